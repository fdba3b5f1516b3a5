"""Engram's compressed vocabulary: token ids that read alike fall into one class, and classes are what is hashed.

The key of an id is its decoded text after: NFKC, NFD, marks stripped, lower case, runs of space/tab/CR/LF to one space,
white space stripped at both ends unless the text is exactly one space. A text that becomes empty keeps its decoded
form as key; an id whose text holds U+FFFD (part of a character) keeps its vocabulary string. Keys are numbered in
order of first appearance by id.

Normalisation is the one of the ``tokenizers`` library rather than ``unicodedata``: its Unicode tables do not change
with the Python version, and one differing key shifts the number of every later class.

Example: " The", "the", "THE" share a class; " " is a class of its own; "é" and "e" share one.
"""

from __future__ import annotations

import re

import numpy as np
from tokenizers import normalizers

from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.errors import ArtefactError
from deepinfer_engine.tokens.tokenizer import Tokenizer

_FOLD = normalizers.Sequence(
    [normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
)
_BLANKS = re.compile(r"[ \t\r\n]+")
#: Unicode White_Space. ``str.strip()`` without it would also take U+001C..U+001F.
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"


def class_key(text: str) -> str:
    """Normalised form of one token's text, or the text itself where nothing would be left."""
    folded = _BLANKS.sub(" ", _FOLD.normalize_str(text))
    if folded == " ":
        return folded
    return folded.strip(_WHITE_SPACE) or text


def token_classes(tokenizer: Tokenizer) -> tuple[np.ndarray, int]:
    """Class id of every token id, int64 [V], and the number of classes."""
    number: dict[str, int] = {}
    classes_V = np.empty(tokenizer.vocab_size, dtype=np.int64)
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.decode((token_id,))
        key = tokenizer.token_string(token_id) if "\ufffd" in text else class_key(text)
        classes_V[token_id] = number.setdefault(key, len(number))
    return classes_V, len(number)


def check_classes(config: ModelConfig, tokenizer: Tokenizer) -> np.ndarray:
    """Class map int64 [V] of a checkpoint; ``ArtefactError`` if vocabulary or class count is not the config's.

    Another count means another hash, so every Engram row would be looked up at the wrong place.
    """
    if tokenizer.vocab_size != config.vocab_size:
        raise ArtefactError(
            f"{tokenizer.where}: {tokenizer.vocab_size} ids, config.json says vocab_size {config.vocab_size}",
            hint="use the checkpoint's own tokenizer",
        )
    classes_V, count = token_classes(tokenizer)
    if count != config.engram_compressed_vocab_size:
        raise ArtefactError(
            f"{tokenizer.where}: the ids form {count} Engram classes, config.json says "
            f"engram_compressed_vocab_size {config.engram_compressed_vocab_size}",
            hint="use the checkpoint's own tokenizer",
        )
    return classes_V
