"""Whose shapes a plan is made for: the released model, an embedded one, or a config that is given."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from deepinfer_engine.config.model import ModelConfig, load_model_config
from deepinfer_engine.config.resources import model_dir
from deepinfer_engine.errors import ArtefactError

#: The released model's name on the command line; its config travels with the package.
RELEASE = "deepseek-v4.1-flash"
#: The embedded model's name.
EMBEDDED = "nano"

_CONFIGS = Path(__file__).resolve().parents[1] / "data" / "configs"


@dataclass(frozen=True)
class PlannedModel:
    """A config and what it is called in a plan."""

    name: str
    config: ModelConfig

    @property
    def is_release(self) -> bool:
        """Whether step times were published for these shapes."""
        return self.config.digest == release_config().digest


@cache
def release_config() -> ModelConfig:
    """The config of the released V4.1-Flash."""
    return load_model_config(_CONFIGS / f"{RELEASE}.json")


def find_model(name_or_path: str) -> PlannedModel:
    """The model of a name, a directory with config.json, or a config file.

    Raises ``NotReadyError`` for an embedded model that is not shipped, ``ArtefactError`` for a file that is no config.
    """
    if name_or_path == RELEASE:
        return PlannedModel(RELEASE, release_config())
    if name_or_path == EMBEDDED:
        return PlannedModel(EMBEDDED, load_model_config(model_dir(EMBEDDED)))
    path = Path(name_or_path).expanduser()
    if not path.exists():
        near = get_close_matches(name_or_path, (EMBEDDED, RELEASE), 1)
        hint = f"did you mean {near[0]}?" if near else f"name {EMBEDDED}, {RELEASE}, a folder or a config.json"
        raise ArtefactError(f"{name_or_path}: no such file", hint=hint)
    return PlannedModel(
        path.name if path.name != "config.json" else path.parent.name or path.name, load_model_config(path)
    )
