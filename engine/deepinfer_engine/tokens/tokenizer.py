"""``Tokenizer``: the checkpoint's ``tokenizer.json``, text to ids and ids to bytes.

Two vocabularies live in that file. The base vocabulary is byte-level BPE: every string has an encoding in it. The
added vocabulary holds control tokens (``<｜User｜>``, ``</think>``, …), which only the prompt renderer may emit.
``encode_text`` runs the base vocabulary alone, so text that spells a control token stays text. That needs the base
model to be unable to build a control token by itself, which is checked once when the file is read.

Byte-level spelling: each byte has one printable character (space is ``Ġ``), a base token is a string of those. A token
with any other character, such as the bar U+FF5C of the control tokens, stands for its own UTF-8 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from deepinfer_engine.errors import ArtefactError, UsageError

# Spellings of V4.1's control tokens. The bar is U+FF5C, the gap of the first three U+2581.
BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK_START = "<think>"
THINK_END = "</think>"
DSML = "｜DSML｜"
IMAGE = "<｜deepseek_image｜>"

#: Bounds the memory that a hostile file can make us allocate; the release has 129,280 ids.
MAX_VOCAB = 1 << 22

#: Must come back unchanged: digits, runs of spaces, line ends, several scripts, marks, emoji, a control spelling.
_PROBE = " a  b\r\n\t1234,56 it's Größe e\u0301 你好 العربية \u200d😀 <think> ｜DSML｜ \x00\x7f\ufffd "


def _byte_characters() -> dict[int, str]:
    """Byte value to its byte-level character: printable Latin-1 is itself, the rest follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    rest = [byte for byte in range(256) if byte not in table]
    return table | {byte: chr(0x100 + n) for n, byte in enumerate(rest)}


_CHARACTER_OF = _byte_characters()
# Latin-1 carries one byte per character; a character outside the byte-level alphabet is sent beyond it, to be noticed.
_TO_LATIN1 = {code: "\u0100" for code in range(256)} | {ord(c): chr(b) for b, c in _CHARACTER_OF.items()}


def spelled_bytes(spelling: str) -> bytes:
    """Bytes that a vocabulary string stands for: byte-level if every character is of that alphabet, else UTF-8."""
    try:
        return spelling.translate(_TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:
        return spelling.encode("utf-8")


class Tokenizer:
    """Ids 0..``vocab_size`` - 1 without holes, each with its vocabulary string, bytes and, if added, its spelling.

    Build it with ``from_dir`` or ``from_file``; both raise ``ArtefactError`` naming the file and what is wrong in it.
    """

    def __init__(self, text: str, *, where: str):
        self.where = where
        self.json_text = text
        raw = _parse(text, where)
        vocab, merges = _check_model(raw, where)
        self.added: dict[str, int] = _check_added(raw, vocab, where)
        self._strings = _dense(vocab, self.added, where)
        self.added_ids = frozenset(self.added.values())
        _check_unreachable(raw["model"], vocab, merges, self.added, where)
        self._plain = _load({**raw, "added_tokens": [], "post_processor": None}, where)
        self._check_round_trip()

    @classmethod
    def from_dir(cls, model_dir: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` of a checkpoint directory."""
        return cls.from_file(Path(model_dir) / "tokenizer.json")

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Read one ``tokenizer.json``."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ArtefactError(f"{path}: no such file", hint="a checkpoint directory holds tokenizer.json") from None
        except (OSError, UnicodeDecodeError) as exc:
            raise ArtefactError(f"{path}: not a readable tokenizer file ({exc})") from None
        return cls(text, where=str(path))

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return len(self._strings)

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, never one of ``added_ids``; ``UsageError`` for a lone surrogate."""
        check_text(text)
        return self._plain.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of all ids together, control tokens spelled out; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_string(self, token_id: int) -> str:
        """Vocabulary string of one id (byte-level spelling); ``UsageError`` outside the vocabulary."""
        if not 0 <= token_id < len(self._strings):
            raise UsageError(f"token id {token_id} is outside the vocabulary 0..{len(self._strings) - 1}")
        return self._strings[token_id]

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one id stands for; ``UsageError`` outside the vocabulary."""
        return spelled_bytes(self.token_string(token_id))

    def control_id(self, spelling: str) -> int:
        """Id of an added token by its spelling; ``ArtefactError`` naming the token if the file has none."""
        if spelling not in self.added:
            raise ArtefactError(f"{self.where}: no added token {spelling!r}", hint="use the checkpoint's own tokenizer")
        return self.added[spelling]

    def _check_round_trip(self) -> None:
        # Finds at once a normaliser, a prefix space, or a splitter that drops what it splits at.
        for probe in (_PROBE, _PROBE.strip()):
            back = self.decode(self.encode_text(probe))
            if back != probe:
                raise ArtefactError(f"{self.where}: text does not survive encoding; {probe!r} came back as {back!r}")


def check_text(text: str) -> None:
    """Raise ``UsageError`` if the text holds a lone surrogate, which has no UTF-8 form (undecodable input bytes)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise UsageError(
            f"the text is not valid Unicode: lone surrogate U+{ord(text[exc.start]):04X} at character {exc.start}",
            hint="give the prompt as UTF-8",
        ) from None


# ------------------------------------------------------------------- reading


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        raw = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as exc:
        raise ArtefactError(f"{where}: not JSON ({exc})") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("model"), dict):
        raise ArtefactError(f"{where}: expected an object with a 'model'")
    return raw


def _check_model(raw: dict[str, Any], where: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Base vocabulary and merges of a byte-level BPE; refuses everything that would make encoding lossy or random."""
    model = raw["model"]
    if model.get("type", "BPE") != "BPE":
        raise ArtefactError(f"{where}: model.type is {model['type']!r}, DeepSeek tokenizers are 'BPE'")
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "fuse_unk"):
        if model.get(key):
            raise ArtefactError(f"{where}: model.{key} is {model[key]!r}, a byte-level BPE has none")
    decoder = raw.get("decoder")
    if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
        raise ArtefactError(f"{where}: decoder is {_kind(decoder)}, expected ByteLevel")
    vocab, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocab, dict) or not isinstance(merges, list):
        raise ArtefactError(f"{where}: model.vocab must be an object and model.merges a list")
    for string, token_id in vocab.items():
        _check_id(token_id, string, where)
    missing = [byte for byte, character in _CHARACTER_OF.items() if character not in vocab]
    if missing:
        raise ArtefactError(f"{where}: {len(missing)} byte values have no token, first 0x{missing[0]:02x}")
    pairs = []
    for number, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(p, str) and p in vocab for p in pair):
            raise ArtefactError(f"{where}: merge {number} is {merge!r}, expected two tokens of the vocabulary")
        if pair[0] + pair[1] not in vocab:
            raise ArtefactError(f"{where}: merge {number} builds {pair[0] + pair[1]!r}, which has no id")
        pairs.append((pair[0], pair[1]))
    return vocab, pairs


def _check_added(raw: dict[str, Any], vocab: dict[str, int], where: str) -> dict[str, int]:
    entries = raw.get("added_tokens")
    if not isinstance(entries, list):
        raise ArtefactError(f"{where}: added_tokens must be a list")
    added: dict[str, int] = {}
    for entry in entries:
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str) or not content:
            raise ArtefactError(f"{where}: added_tokens holds {entry!r}, expected an object with id and content")
        _check_id(entry.get("id"), content, where)
        if content in added or vocab.get(content, entry["id"]) != entry["id"]:
            raise ArtefactError(f"{where}: token {content!r} has two ids")
        added[content] = entry["id"]
    return added


def _check_id(token_id: Any, content: str, where: str) -> None:
    if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < MAX_VOCAB:
        raise ArtefactError(f"{where}: token {content!r} has id {token_id!r}, expected 0..{MAX_VOCAB - 1}")


def _dense(vocab: dict[str, int], added: dict[str, int], where: str) -> list[str]:
    """Vocabulary strings by id; every id from 0 to the largest has exactly one."""
    everything = {**vocab, **added}
    strings: dict[int, str] = {}
    for string, token_id in everything.items():
        if token_id in strings:
            raise ArtefactError(f"{where}: tokens {strings[token_id]!r} and {string!r} share id {token_id}")
        strings[token_id] = string
    for token_id in range(len(strings)):
        if token_id not in strings:
            raise ArtefactError(f"{where}: id {token_id} has no token, ids must run from 0 without holes")
    return [strings[token_id] for token_id in range(len(strings))]


def _check_unreachable(
    model: dict[str, Any],
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    added: dict[str, int],
    where: str,
) -> None:
    """Refuse a base model that could spell an added token: by a merge, as a single byte, or by skipping merges."""
    inside = added.keys() & vocab.keys()
    reachable = inside & {left + right for left, right in merges} | inside & set(_CHARACTER_OF.values())
    if model.get("ignore_merges"):  # a whole word that is in the vocabulary is then taken as it is
        alphabet = set(_CHARACTER_OF.values())
        reachable |= {content for content in inside if set(content) <= alphabet}
    if reachable:
        raise ArtefactError(f"{where}: plain text could become the added token {min(reachable)!r}")


def _load(raw: dict[str, Any], where: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(raw))
    except Exception as exc:  # the library raises bare Exception for every defect of the file
        raise ArtefactError(f"{where}: not a usable tokenizer ({exc})") from None


def _kind(value: Any) -> str:
    return repr(value.get("type")) if isinstance(value, dict) else repr(value)
