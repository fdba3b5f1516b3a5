"""The one number that a piece of answer text states, by value, or why there is none.

Understood: digits (full-width too) with a sign, thousands groups, a decimal part; a fraction ``a/b`` or ``\\frac``;
markup around it (``$``, ``\\text``, ``\\mathbf``, bold, braces, spaces); an equation, whose right side counts; a unit
behind it; a degree sign; a currency sign in front. Everything else has no value here: two numbers, an expression
still to be computed, words. Abstaining is the rule, because a guess that happens to match is not an answer.
"""

from __future__ import annotations

import re
from fractions import Fraction

#: Longest text that can state one number; beyond it is a list, a derivation or a loop of digits.
MAX_CHARS = 400

_WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_SPACES = dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2009\u200a\u202f\u3000"), " ")
_MINUS = dict.fromkeys(map(ord, "\u2212\u2013\u2010\u2011"), "-")
_HIDDEN = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"), "")
_TABLE = _WIDE | _SPACES | _MINUS | _HIDDEN

_WRAPPER = re.compile(
    r"\\(?:text|underline|textbf|textrm|textit|mathrm|mathbf|mathit|mathsf|mathtt|boldsymbol|bm|mbox|operatorname|emph|bf|rm)"
    r"\s*\{([^{}]*)\}"
)
_TEXT_UNIT = re.compile(
    r"(?<=[0-9}])\s*(?:\\[,;: ]|~)*\s*\\(?:text|textrm|mathrm|mbox|operatorname)\s*\{([A-Za-z .^/]*)\}"
    r"(?:\^\{?[23]\}?)?\s*$"
)
_NOISE = re.compile(r"\\(?:left|right|displaystyle|textstyle|quad|qquad|bf|rm|limits)(?![A-Za-z])|\\[!:;>]|~|\\ ")
_DELIMITERS = re.compile(r"\\[()\[\]]|\$|\*\*|__|`")
_FRACTION = re.compile(
    r"(?P<sign>[-+]?)\s*\\[dtc]?frac\s*"
    r"(?:\{\s*(?P<n>[-+]?[0-9]+)\s*\}|(?P<n1>[0-9]))\s*(?:\{\s*(?P<d>[0-9]+)\s*\}|(?P<d1>[0-9]))"
)
_SLASH = re.compile(r"(?P<n>[-+]?[0-9]+)\s*/\s*(?P<d>[0-9]+)")
_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:(?:,|\{,\}|\\,)[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|[-+]?\.[0-9]+")
_DEGREE = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°)\s*$")
_WORD_UNIT = re.compile(r"(?<=[0-9}])\s+([A-Za-z]{2,}(?: [A-Za-z]{2,}){0,2})$")
_CURRENCY = re.compile(r"^(?:\\\$|€|£|\\pounds|\\euro)\s*")
#: Words that change a number instead of naming its unit.
_NOT_A_UNIT = {
    "or", "and", "to", "mod", "modulo", "percent", "dozen", "hundred", "thousand", "million", "billion", "trillion",
    "times", "choose", "plus", "minus", "over", "divided", "squared", "cubed", "factorial", "if", "when", "for",
    "because", "but", "not", "half", "base", "in", "by", "per",
}  # fmt: skip
_LIST = re.compile(r"[;,]|\b(?:or|and)\b|\\text\{\s*(?:or|and)\s*\}|\\(?:quad|lor|land|cup)")


def one_number(text: str, *, percent: bool = False) -> Fraction | None:
    """The number ``text`` states, or None. With ``percent`` a trailing per cent sign is a unit."""
    if len(text) > MAX_CHARS:
        return None
    text = text.translate(_TABLE).strip()
    text = _DEGREE.sub("", _strip(text))
    text = _without_text_unit(text)
    for _ in range(8):  # markup may be nested; eight levels are more than anyone writes
        unwrapped = _WRAPPER.sub(r" \1 ", text)
        if unwrapped == text:
            break
        text = unwrapped
    text = _strip(text)
    side = _right_side(text)
    if side is None:
        return None
    side = _strip(_DEGREE.sub("", _CURRENCY.sub("", side)))
    if percent:
        side = re.sub(r"\s*\\?%$", "", side)
    unit = _WORD_UNIT.search(side)
    if unit is not None and not _NOT_A_UNIT & set(unit.group(1).lower().split()):
        side = side[: unit.start()]
    return _parse(side)


def _strip(text: str) -> str:
    """Without delimiters, spacing commands, outer braces and a final point."""
    escaped = "\x00"  # a dollar sign that is meant as one survives the removal of math delimiters
    text = text.replace("\\$", escaped)
    text = _DELIMITERS.sub(" ", _NOISE.sub(" ", text)).replace(escaped, "\\$")
    text = re.sub(r"^(?:\\,|\s)+|(?:\\,|\s)+$", "", text)
    while True:
        text = text.strip()
        if _enclosed(text, "{}") or _enclosed(text, "()"):
            text = text[1:-1]
        elif len(text) > 1 and text.endswith(".") and not text.endswith(".."):
            text = text[:-1]
        elif text.startswith("*") and text.endswith("*") and len(text) > 2:
            text = text[1:-1]
        else:
            return text


def _enclosed(text: str, pair: str) -> bool:
    """Whether one pair of braces encloses all of the text."""
    if not (len(text) > 1 and text[0] == pair[0] and text[-1] == pair[1]):
        return False
    depth = 0
    for char in text[1:-1]:
        depth += (char == pair[0]) - (char == pair[1])
        if depth < 0:
            return False
    return depth == 0


def _without_text_unit(text: str) -> str:
    match = _TEXT_UNIT.search(text)
    if match is None or _NOT_A_UNIT & set(re.findall(r"[a-z]+", match.group(1).lower())):
        return text
    return text[: match.start()].strip()


def _right_side(text: str) -> str | None:
    """The right side of an equation, the text itself without one; None when the left side makes it a list."""
    if "=" not in text:
        return text
    if re.search(r"[<>≤≥≠]|\\(?:neq?|leq?|geq?|approx|equiv|not)(?![A-Za-z])|!=", text):
        return None
    *left, right = text.split("=")
    for side in left:
        stated = _parse(_strip(side))
        if _LIST.search(side) or (stated is not None and stated != _parse(_strip(right))):
            return None
    return _strip(right)


def _parse(text: str) -> Fraction | None:
    for pattern in (_FRACTION, _SLASH):
        match = pattern.fullmatch(text)
        if match is not None:
            parts = match.groupdict()
            bottom = int(parts.get("d") or parts.get("d1") or 0)
            if bottom == 0:
                return None
            sign = -1 if parts.get("sign") == "-" else 1
            return sign * Fraction(int(parts.get("n") or parts.get("n1") or 0), bottom)
    if _NUMBER.fullmatch(text) is None:
        return None
    return Fraction(re.sub(r"\{,\}|\\,|,", "", text).rstrip("."))


def shown(value: Fraction) -> str:
    """The number as results and logs write it: ``33`` or ``67/2``."""
    return str(value.numerator) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"
