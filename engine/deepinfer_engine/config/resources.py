"""Where installed data files are: one resolver for profiles, recipes and embedded models.

An installation holds them under ``deepinfer_engine/data/<kind>``; a source tree holds profiles and recipes at its
root. The installed place is looked at first, so that a checkout on the path cannot change an installation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from deepinfer_engine.errors import NotReadyError

Kind = Literal["profiles", "recipes", "models"]

_PACKAGE = Path(__file__).resolve().parents[1]
_SOURCE_TREE = _PACKAGE.parents[1]


def data_dir(kind: Kind) -> Path:
    """The folder of one kind of shipped file; NotReadyError when this installation lacks it."""
    candidates = [_PACKAGE / "data" / kind]
    if kind != "models":  # the embedded models live inside the package in a source tree too
        candidates.append(_SOURCE_TREE / kind)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise NotReadyError(
        f"this installation has no {kind} folder", hint="reinstall it: pip install --force-reinstall deepinfer-cli"
    )


def profile_names() -> list[str]:
    """Names of the shipped profiles, sorted."""
    return sorted(path.stem for path in data_dir("profiles").glob("*.yaml"))


def profile_path(name: str) -> Path:
    """File of a shipped profile; the caller has checked the name against ``profile_names``."""
    return data_dir("profiles") / f"{name}.yaml"


def model_dir(name: str) -> Path:
    """Folder of an embedded model, such as ``nano``; NotReadyError when it is not shipped."""
    path = data_dir("models") / name
    if not (path / "config.json").is_file():
        raise NotReadyError(f"the embedded model {name!r} is not part of this installation", hint="give --model DIR")
    return path


def embedded_or(path: Path, name: str, file: str = "") -> Path:
    """``path``; or, when it is just ``name`` and nothing lies there, that embedded model's folder or ``file`` in it."""
    return model_dir(name) / file if str(path) == name and not path.exists() else path
