"""Multiple choice: the order in which choices are shown, and the letter that an answer names.

The order depends on nothing but the seed and the question's id, so a log can be read and a run repeated anywhere. An
answer counts when it names one letter explicitly; a letter that may be an article ("A strong acid") and two letters do
not. A box that holds exactly the text of one choice names that choice.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathsf|boldsymbol|bm|mbox|emph)\s*\{([^{}]*)\}")
_NOISE = re.compile(r"\\[()\[\],;!: ]|\$|\*\*|__|`|\\(?:left|right|displaystyle|quad)(?![A-Za-z])")
_LEAD = re.compile(r"(?:option|choice|letter|answer)s?\b\s*:?\s*", re.IGNORECASE)


def shown_order(item_id: str, count: int, seed: int) -> tuple[int, ...]:
    """Which choice stands at each position; position p shows choice ``order[p]``. SHA-256 of (seed, id, choice)."""

    def key(choice: int) -> bytes:
        return hashlib.sha256(f"{seed}\x00{item_id}\x00{choice}".encode()).digest()

    return tuple(sorted(range(count), key=key))


def listed(choices: Sequence[str]) -> str:
    """The choices as the prompt shows them, a letter in front of each."""
    return "\n".join(f"({LETTERS[i]}) {text.strip()}" for i, text in enumerate(choices))


def chosen(text: str, choices: Sequence[str], *, boxed: bool) -> int | None:
    """Position of the choice an answer names, or None when it names none or more than one.

    ``boxed`` answers may be a lower-case letter or the text of a choice; elsewhere a lone "a" could be an article.
    """
    plain = _plain(text)
    letter = _letter(plain, len(choices), boxed=boxed)
    if letter is not None or not boxed:
        return letter
    same = [i for i, choice in enumerate(choices) if _plain(choice) == plain]
    return same[0] if len(same) == 1 else None


def _plain(text: str) -> str:
    for _ in range(4):
        text = _MARKUP.sub(r"\1", text)
    return " ".join(_NOISE.sub(" ", text).replace("{", " ").replace("}", " ").split())


def _letter(text: str, count: int, *, boxed: bool) -> int | None:
    text = _LEAD.sub("", text, count=1) if _LEAD.match(text) else text
    upper = LETTERS[:count]
    match = re.match(rf"\(\s*([{upper}{upper.lower()}])\s*\)|([{upper}{upper.lower()}])(?![A-Za-z0-9_'’])", text)
    if match is None:
        return None
    name = match.group(1) or match.group(2)
    rest = text[match.end() :].strip()
    if match.group(1) is None and name.islower() and not (boxed and rest in ("", ".", ")")):
        return None
    if not _ends_there(name, rest, parenthesised=match.group(1) is not None):
        return None
    if _another_letter(name, rest, upper):
        return None
    return upper.index(name.upper())


def _ends_there(name: str, rest: str, *, parenthesised: bool) -> bool:
    """Whether the letter is a name and not a word or a symbol of what follows."""
    if parenthesised or rest == "" or rest[0] in ").:,;-–—":
        return True
    if re.match(r"(?:because|since|as|is)\b", rest):
        return True
    return re.match(r"(?:or|and)\b|[/&]", rest) is not None or (name != "A" and re.match(r"\(", rest) is not None)


def _another_letter(name: str, rest: str, upper: str) -> bool:
    """Whether the answer goes on to a second, different letter as an alternative."""
    pattern = rf"^[).:]?\s*(?:,|;|/|&|\bor\b|\band\b|\bor maybe\b)\s*(?:and|or)?\s*\(?([{upper}])(?![A-Za-z0-9])"
    other = re.search(pattern, rest)
    if other is not None and other.group(1) != name.upper():
        return True
    return re.match(r"(?:or|and)\b", rest) is not None
