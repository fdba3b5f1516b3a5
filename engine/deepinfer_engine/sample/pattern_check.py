"""What of a regular expression is refused before it is compiled. No torch.

The grammar library matches a whole text, so an anchor inside a pattern can never hold; it drops such an anchor, and the
backslash of an escape that it does not know, with a warning at most. Both would let answers through that the pattern
does not match.
"""

from __future__ import annotations

import re

from deepinfer_engine.errors import UsageError

#: most characters of a pattern, and times of a repetition: more take the compiler very long
MAX_PATTERN = 1 << 16
_MAX_REPEAT = 1000

#: letters and digits that mean something behind a backslash, or that the library itself refuses there
_ESCAPES = frozenset("0123456789BDPSWabcdefknprstvwx")
_TOKEN = re.compile(r"\\u(?:[0-9a-fA-F]{4}|\{[0-9a-fA-F]+\})|\\.|\(\?:|[\[\](|)^$]", re.DOTALL)


def check_pattern(pattern: str) -> None:
    """Raise ``UsageError`` with the place of what would be ignored, or would take very long."""
    if len(pattern) > MAX_PATTERN:
        raise UsageError(f"the pattern has {len(pattern)} characters, at most {MAX_PATTERN}")
    for match in re.finditer(r"\{(\d+)(?:,(\d*))?\}", pattern):
        most = max(int(n) for n in match.groups() if n)
        if most > _MAX_REPEAT:
            raise UsageError(
                f"{place(pattern, match.start())}: the pattern repeats {match.group()}, at most {_MAX_REPEAT} times "
                "are supported"
            )
    inside = False  # a character class
    begins = 0  # where a branch begins
    for token in _TOKEN.finditer(pattern):
        text, at = token.group(), token.start()
        if text[0] == "\\":
            if len(text) == 2 and text[1].isascii() and text[1].isalnum() and text[1] not in _ESCAPES:
                raise UsageError(f"{place(pattern, at)}: the escape {text} means nothing")
        elif inside:
            inside = text != "]"
        elif text == "[":
            inside = True
        elif text in ("(", "(?:", "|"):
            begins = token.end()
        elif (text == "^" and at != begins) or (text == "$" and pattern[at + 1 : at + 2] not in ("", "|", ")")):
            raise UsageError(
                f"{place(pattern, at)}: {text} inside the pattern can never hold, it matches a whole answer"
            )


def place(pattern: str, at: int) -> str:
    """The place of a character as errors name it."""
    return f"character {at + 1} of the pattern" if at < len(pattern) else "the end of the pattern"
