"""Loading a profile: defaults, base, file and ``--set`` merged in that order, validated, every value traceable.

``load_profile`` is the only way in. A problem names the file, line and column (or the ``--set``) it comes from, what
was found, what is expected, and the nearest known key or value. All problems of a profile are reported at once.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deepinfer_engine.config import complaint, resources, rules
from deepinfer_engine.config.schema import LABELS, Profile, known_keys, leaves
from deepinfer_engine.config.strict_json import printable
from deepinfer_engine.config.yaml import Document, KeyPath, format_scalar, parse_scalar, parse_yaml, read_yaml
from deepinfer_engine.errors import ProfileError

__all__ = ["LoadedProfile", "Profile", "load_profile", "load_profile_text", "render_yaml"]

#: Keys that belong to a file and cannot be set from outside it.
_FILE_KEYS = ("schema_version", "name", "extends")

#: Defaults that the role changes (chunk, rebalancing, speculation); the values are the published deployments'.
_ROLE_DEFAULTS: dict[str, dict[str, Any]] = {
    "prefill": {
        "sched.prefill_chunk_tokens": 32_768,  # published throughput is flat beyond 32k
        "eplb.window_steps": 100,
        "eplb.period_steps": 1000,
    },
    "decode": {
        "eplb.window_steps": 1000,
        "eplb.period_steps": 10_000,
        "spec.verify": "adaptive",
    },
    "both": {},
}


@dataclass(frozen=True)
class LoadedProfile:
    """A valid profile and where it comes from.

    ``origins`` maps every resolved key to ``file:line``, ``--set``, ``default`` or ``default (role R)``; ``stated``
    are the keys a file or ``--set`` gives; ``reasons`` the comment beside a stated value. ``digest`` is the SHA-256
    of the canonical resolved values without labels.
    """

    profile: Profile
    source: str
    origins: Mapping[str, str]
    reasons: Mapping[str, str]
    digest: str

    @property
    def stated(self) -> tuple[str, ...]:
        return tuple(k for k, origin in self.origins.items() if not origin.startswith("default"))


@dataclass
class _Layers:
    """The merged tree while it is built, and for every path the place of its key, its value and its origin."""

    tree: dict[str, Any] = field(default_factory=dict)
    key_at: dict[KeyPath, str] = field(default_factory=dict)
    value_at: dict[KeyPath, str] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    reasons: dict[KeyPath, str] = field(default_factory=dict)

    def where(self, path: KeyPath, *, key: bool = False) -> str | None:
        places = self.key_at if key else self.value_at
        while path and path not in places:
            path = path[:-1]
        return places.get(path)


def load_profile(name_or_path: str | Path, sets: Sequence[str] = ()) -> LoadedProfile:
    """Load a shipped profile by name, or any file by path, with ``a.b=value`` overrides applied on top.

    Raises ``ProfileError`` (exit 2) listing every problem found.
    """
    document = read_yaml(_find(str(name_or_path)), where=_shown(str(name_or_path)), error=ProfileError)
    return _load(document, sets, folder=_folder(str(name_or_path)))


def load_profile_text(data: bytes | str, *, where: str, sets: Sequence[str] = ()) -> LoadedProfile:
    """Load a profile from text; ``extends`` can then name shipped profiles only."""
    return _load(parse_yaml(data, where=where, error=ProfileError), sets, folder=None)


def render_yaml(loaded: LoadedProfile, keys: Iterable[str], notes: Mapping[str, str]) -> str:
    """YAML of the given keys in schema order, with a note behind a value where there is one.

    The resolved form (all keys of ``origins``) reads back to a profile of the same digest.
    """
    values = leaves(loaded.profile)
    wanted = set(keys)
    lines: list[str] = []
    open_path: tuple[str, ...] = ()
    for key, value in values.items():
        if key not in wanted:
            continue
        *section, leaf = key.split(".")
        for depth, name in enumerate(section):
            if tuple(section[: depth + 1]) != open_path[: depth + 1]:
                lines.append(f"{'  ' * depth}{name}:")
        open_path = tuple(section)
        text = f"{'  ' * len(section)}{leaf}: {format_scalar(value)}"
        lines.append(f"{text}  # {notes[key]}" if key in notes else text)
    return "\n".join(lines) + "\n"


# -------------------------------------------------------------------- finding


def _is_path(name: str) -> bool:
    return "/" in name or "\\" in name or name.endswith((".yaml", ".yml"))


def _shown(name: str) -> str:
    return name if _is_path(name) else f"{name}.yaml"


def _folder(name: str) -> Path | None:
    return Path(name).parent if _is_path(name) else None


def _find(name: str) -> Path:
    if not name:
        raise ProfileError("the profile name is empty", hint="deepinfer profile list")
    if _is_path(name):
        return Path(name)
    known = resources.profile_names()
    if name in known:
        return resources.profile_path(name)
    near = difflib.get_close_matches(name, known, n=1)
    guess = f"; nearest is {near[0]!r}" if near else ""
    raise ProfileError(
        f"no shipped profile is called {name!r}{guess}",
        hint="deepinfer profile list shows them; a file needs a / or ends with .yaml",
    )


# -------------------------------------------------------------------- merging


def _load(document: Document, sets: Sequence[str], *, folder: Path | None, is_base: bool = False) -> LoadedProfile:
    layers = _Layers()
    own = _section_of(document)
    base_name = own.get("extends")
    if isinstance(base_name, str):
        if is_base:
            raise ProfileError(
                f"{document.at_value(('extends',))}: a base cannot extend {base_name!r} itself; "
                "profiles extend one level"
            )
        _merge_base(layers, document, base_name, folder)
    _merge(layers, document, own, ())
    for text in _check_sets(sets):
        _apply_set(layers, text)
    _merge_role_defaults(layers)
    profile = _validate(layers, document.where)
    values = leaves(profile)
    origins = {key: layers.origins.get(tuple(key.split(".")), "default") for key in values}
    reasons = {".".join(map(str, p)): text for p, text in layers.reasons.items()}
    return LoadedProfile(profile, document.where, origins, reasons, _digest(values))


def _section_of(document: Document) -> dict[str, Any]:
    if not isinstance(document.value, dict):
        found = "a list" if isinstance(document.value, list) else repr(printable(str(document.value)))
        raise ProfileError(f"{document.at_value(())}: found {found}, expected keys and values")
    return document.value


def _merge_base(layers: _Layers, document: Document, name: str, folder: Path | None) -> None:
    """Load the base on its own, so that its problems are its own, then merge its file layer."""
    at = document.at_value(("extends",))
    path = Path(name)
    if _is_path(name):
        if folder is None:
            raise ProfileError(f"{at}: a shipped profile extends shipped profiles only, not the file {name!r}")
        path = path if path.is_absolute() else folder / path
        shown = str(path)
    else:
        try:
            path, shown = _find(name), _shown(name)
        except ProfileError as exc:
            raise ProfileError(f"{at}: {exc.message}", hint=exc.hint) from None
    base = read_yaml(path, where=shown, error=ProfileError)
    _load(base, (), folder=path.parent, is_base=True)
    labels = {k: v for k, v in _section_of(base).items() if k not in LABELS}
    _merge(layers, base, labels, ())


def _merge(layers: _Layers, document: Document, values: dict[str, Any], path: KeyPath) -> None:
    """Lay one file's values over the tree: sections merge key by key, anything else replaces."""
    target = layers.tree
    for key in path:
        target = target[str(key)]
    for key, value in values.items():
        here = (*path, key)
        layers.key_at[here] = document.at_key(here)
        layers.value_at[here] = document.at_value(here)
        if isinstance(value, dict) and value:
            if not isinstance(target.get(key), dict):
                target[key] = {}
            _merge(layers, document, value, here)
            continue
        if value == {} and isinstance(target.get(key), dict):
            continue  # an empty section adds nothing to the base's
        target[key] = value
        if isinstance(value, list):
            layers.value_at |= {(*here, i): document.at_value((*here, i)) for i in range(len(value))}
        layers.origins[here] = f"{document.where}:{document.keys[here].line}"
        layers.reasons.pop(here, None)
        if here in document.comments:
            layers.reasons[here] = document.comments[here]


def _merge_role_defaults(layers: _Layers) -> None:
    """Put the defaults of the role under what the files and ``--set`` state."""
    role = layers.tree.get("role", "both")
    parallel = layers.tree.get("parallel")
    alone = not isinstance(parallel, dict) or parallel.get("ep", 1) == 1
    for dotted, value in _ROLE_DEFAULTS.get(role if isinstance(role, str) else "", {}).items():
        section, key = dotted.split(".")
        if dotted == "eplb.period_steps" and alone:
            continue  # one rank has nothing to rebalance
        tree = layers.tree.setdefault(section, {})
        if isinstance(tree, dict) and key not in tree:
            tree[key] = value
            layers.origins[(section, key)] = f"default (role {role})"


# ----------------------------------------------------------------- --set a.b=v


def _check_sets(sets: Sequence[str]) -> Sequence[str]:
    seen: dict[str, str] = {}
    for text in sets:
        key, equals, _ = text.partition("=")
        if not equals:
            raise ProfileError(f"--set {text}: has no '='", hint="write --set section.key=value")
        if key in seen:
            raise ProfileError(f"--set {text}: {key} is already set by --set {seen[key]}", hint="keep one of them")
        seen[key] = text
    return sets


def _apply_set(layers: _Layers, text: str) -> None:
    dotted, _, raw = text.partition("=")
    where = f"--set {text}"
    path = tuple(dotted.split("."))
    _check_set_key(path, dotted, where)
    value = parse_scalar(raw, where=where, error=ProfileError)
    if isinstance(value, dict) and value:
        raise ProfileError(f"{where}: a section cannot be set as a whole", hint="repeat --set for each key")
    target = layers.tree
    for depth, key in enumerate(path[:-1]):
        if not isinstance(target.get(key), dict):
            target[key] = {}
            layers.value_at[path[: depth + 1]] = where
        target = target[key]
    target[path[-1]] = value
    for stale in [p for p in layers.value_at if p[: len(path)] == path]:
        del layers.value_at[stale]
    for places in (layers.key_at, layers.value_at):
        places[path] = where
    for stale in [p for p in layers.origins if p[: len(path)] == path]:
        del layers.origins[stale]
        layers.reasons.pop(stale, None)
    layers.origins[path] = "--set"


def _check_set_key(path: tuple[str, ...], dotted: str, where: str) -> None:
    if dotted in _FILE_KEYS:
        raise ProfileError(f"{where}: {dotted} belongs to the file and cannot be set")
    for depth, key in enumerate(path):
        known = known_keys(path[:depth])
        if known is None:
            if path[:depth] == ("kernels", "overrides") and depth == len(path) - 1:
                return  # the names of operations are checked where operations are known
            raise ProfileError(f"{where}: {'.'.join(path[:depth])} has no keys")
        if key not in known:
            raise ProfileError(f"{where}: {complaint.unknown_key(path[: depth + 1], known)}")
    keys = known_keys(path)
    if keys is not None:
        raise ProfileError(f"{where}: {dotted} is a section", hint=f"set one of its keys, such as {dotted}.{keys[0]}")


# ------------------------------------------------------------------ validation


def _validate(layers: _Layers, source: str) -> Profile:
    try:
        profile = Profile.model_validate(layers.tree)
    except ValidationError as exc:
        complaints = [complaint.from_error(e, known_keys) for e in exc.errors(include_url=False, include_context=True)]
    else:
        complaints = [complaint.Complaint(tuple(key.split(".")), text) for key, text in rules.check_profile(profile)]
        if not complaints:
            return profile
    lines = [f"{layers.where(c.path, key=c.on_key) or source}: {c.text}" for c in complaints]
    if len(lines) == 1:
        raise ProfileError(lines[0], hint=complaints[0].hint)
    hint = next((c.hint for c in complaints if c.hint), None)
    raise ProfileError("\n".join([f"{source}: {len(lines)} problems", *(f"  {line}" for line in lines)]), hint=hint)


def _digest(values: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in values.items() if key not in LABELS}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()
