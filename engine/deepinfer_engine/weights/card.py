"""The card of a checkpoint: ``card.json`` beside the weights says how they were made, what they can do and cannot.

Its values are texts, numbers, and lists and objects of them; ``weights_digest`` names the weights that it is about. No
torch here.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from deepinfer_engine.config.strict_json import read_json_object
from deepinfer_engine.errors import ArtefactError

FILE = "card.json"
SCHEMA = "deepinfer/card/1"
#: Columns of the keys in ``card_text``.
_INDENT = 16
_HIDDEN = ("schema", "weights_digest")


def read_card(directory: Path) -> dict[str, Any] | None:
    """The card in a folder; None without one and for another tool's card.json. ArtefactError for a damaged one."""
    path = directory / FILE
    if not path.is_file():
        return None
    card = read_json_object(path)
    if card.get("schema") != SCHEMA:
        return None
    if not isinstance(card.get("weights_digest"), str):
        raise ArtefactError(f"{path}: weights_digest is {card.get('weights_digest')!r}, expected a text")
    return card


def card_text(card: dict[str, Any], width: int = 100) -> str:
    """The card in lines of at most ``width`` columns: a key, then its value or, of a list, one paragraph an item."""
    lines = []
    for key, value in card.items():
        if key in _HIDDEN:
            continue
        label = key.replace("_", " ")
        for item in value if isinstance(value, list) else [value]:
            lines += textwrap.wrap(
                _plain(item), width, initial_indent=label.ljust(_INDENT), subsequent_indent=" " * _INDENT
            )
            label = ""
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _plain(value: Any) -> str:
    """A value in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_plain(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "; ".join(map(_plain, value))
    return str(value)
