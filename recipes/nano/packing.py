"""Training rows: several chats behind each other in a row, apart from each other by their start positions.

A chat starts at a multiple of ``ALIGN`` tokens and sees nothing before its start (window, global entries, n-grams), so
a packed chat gives the same numbers as a chat alone: entries of two tokens and candidate blocks of eight begin with it.
Rows are drawn by worker processes while the model trains; a worker's stream depends on its seed and on the progress of
the run only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from recipes.nano import tasks
from recipes.nano.tokenizer import CONTROL, EOS, PAD, THINK_END

ALIGN = 8
#: Marks in the texts of frames.json.
QUESTION, EARLIER_QUESTION, EARLIER_ANSWER = "\x00", "\x01", "\x02"
_PIECES = (
    r"[0-9]|[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\nA-Za-z0-9!-/:-@\[-`{-~]?[A-Za-z]+"
    r"| ?[!-/:-@\[-`{-~]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+|."
)


class Encoder:
    """Token ids of ASCII texts with control tokens; a dictionary of pre-tokens makes it fast."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        controls = sorted((*CONTROL, "<｜begin▁of▁sentence｜>", EOS, PAD), key=len, reverse=True)
        self._controls = re.compile("(" + "|".join(map(re.escape, controls)) + ")")
        self._pattern = re.compile(_PIECES, re.DOTALL)
        self._cache: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        out: list[int] = []
        cache = self._cache
        for number, part in enumerate(self._controls.split(text)):
            for piece in (part,) if number % 2 else self._pattern.findall(part):
                ids = cache.get(piece)
                if ids is None:
                    ids = cache[piece] = self._tokenizer.encode(piece, add_special_tokens=False).ids
                out += ids
        return out


@dataclass(frozen=True)
class Row:
    """Token ids of one chat; the first ``prompt`` of them are given."""

    ids: list[int]
    prompt: int
    kind: str
    weight: float


@dataclass
class Batch:
    """Packed rows: ids [B, T] with the start of every token's chat, and what is learned from them.

    ``place`` [P] are flat positions whose next token is learned with ``weight`` (0 = padding), ``doc`` their chat in
    the batch; ``queries`` [B, Q] are the positions that teach the indexer. ``kinds`` names the chats.
    """

    ids: Tensor
    start: Tensor
    place: Tensor
    weight: Tensor
    doc: Tensor
    queries: Tensor
    kinds: list[str]

    def tensors(self) -> tuple[Tensor, ...]:
        return self.ids, self.start, self.place, self.weight, self.queries

    def to(self, device: torch.device) -> Batch:
        names = ("ids", "start", "place", "weight", "doc", "queries")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


class Writer:
    """Renders tasks to rows and packs rows into batches."""

    def __init__(self, data: Path):
        self.tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
        self.frames: dict[str, str] = json.loads((data / "frames.json").read_text(encoding="utf-8"))
        words = json.loads((data / "words.json").read_text(encoding="utf-8"))
        tasks.WORDS[:] = words
        self.encode = Encoder(self.tokenizer)
        vocabulary = self.tokenizer.get_vocab()
        self.pad = vocabulary[PAD]

    def prompt_text(self, task: tasks.Task) -> str:
        text = self.frames[task.frame]
        if task.earlier is not None:
            text = text.replace(EARLIER_QUESTION, task.earlier.question).replace(EARLIER_ANSWER, task.earlier.answer)
        return text.replace(QUESTION, task.chat.question)

    def row(self, task: tasks.Task) -> Row:
        prompt = self.encode(self.prompt_text(task))
        thinking = "" if task.frame == "none" else f"{task.chat.thinking}{THINK_END}"
        rest = self.encode(f"{thinking}{task.chat.answer}{EOS}")
        return Row(prompt + rest, len(prompt), task.chat.kind, task.weight)

    def pack(self, rows: Sequence[Sequence[Row]], length: int, room: int, queries: int, rng: Random) -> Batch:
        """One batch of ``len(rows)`` rows; learned positions beyond ``room`` are left out from the end."""
        count = len(rows)
        ids = np.full((count, length), self.pad, dtype=np.int64)
        start = np.tile(np.arange(length, dtype=np.int64), (count, 1))
        query = np.zeros((count, queries), dtype=np.int64)
        place: list[np.ndarray] = []
        weight: list[np.ndarray] = []
        doc: list[np.ndarray] = []
        kinds: list[str] = []
        for b, chats in enumerate(rows):
            at = 0
            learned: list[np.ndarray] = []
            for chat_row in chats:
                size = len(chat_row.ids)
                end = min(-(-(at + size) // ALIGN) * ALIGN, length)
                ids[b, at : at + size] = chat_row.ids
                start[b, at:end] = at
                positions = np.arange(at + chat_row.prompt - 1, at + size - 1)
                learned.append(positions)
                place.append(positions + b * length)
                weight.append(np.full(len(positions), chat_row.weight, dtype=np.float32))
                doc.append(np.full(len(positions), len(kinds), dtype=np.int64))
                kinds.append(chat_row.kind)
                at = end
            own = np.concatenate(learned)
            half = min(queries // 2, len(own))
            picks = [*rng.sample(own.tolist(), half), *rng.sample(range(length), queries - half)]
            query[b] = sorted(picks)
        places, weights, docs = np.concatenate(place), np.concatenate(weight), np.concatenate(doc)
        spare = max(room - len(places), 0)
        places = np.pad(places[:room], (0, spare))
        weights = np.pad(weights[:room], (0, spare))
        docs = np.pad(docs[:room], (0, spare), constant_values=-1)
        t = torch.from_numpy
        return Batch(t(ids), t(start), t(places), t(weights), t(docs), t(query), kinds)


def filled(rng: Random, first: Sequence[Row], length: int, draw: Any) -> list[Row]:
    """``first`` and further drawn rows while they fit."""
    rows, at = [], 0
    misses = 0
    pending = list(first)
    while misses < 3:
        row = pending.pop(0) if pending else draw()
        size = -(-len(row.ids) // ALIGN) * ALIGN
        if at + size > length:
            misses += 1
            continue
        rows.append(row)
        at += size
    rng.shuffle(rows)
    return rows


class Rows(IterableDataset[Batch]):
    """An endless stream of batches; every ``long_every``-th worker writes long rows once the progress allows it."""

    def __init__(self, data: Path, train: dict[str, Any], seed: int, progress: Synchronized[float]):
        super().__init__()
        self._data, self._train, self._seed, self._progress = data, train, seed, progress

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        number = info.id if info else 0
        rng = Random(self._seed * 1000 + number)
        writer = Writer(self._data)
        t = self._train
        while True:
            progress = self._progress.value
            long = progress >= t["long_from"] and number % t["long_every"] == t["long_every"] - 1
            length = t["long_length"] if long else t["length"]
            yield draw_batch(writer, rng, t, length, t["tokens"] // length, progress)


def draw_batch(writer: Writer, rng: Random, train: dict[str, Any], length: int, rows: int, progress: float) -> Batch:
    """One training batch of ``rows`` rows at a progress of the run."""
    room = int(rows * length * train["learned_share"])
    packed = []
    for _ in range(rows):
        first = [writer.row(t) for t in lookups(rng, length, train, progress)]
        packed.append(filled(rng, first, length, lambda: writer.row(tasks.short_task(rng))))
    return writer.pack(packed, length, room, max(length // 8, 16), rng)


def lookups(rng: Random, length: int, train: dict[str, Any], progress: float) -> list[tasks.Task]:
    """The look-up chats of one row: short lists early, up to the row's length later."""
    grown = min(progress / max(train["grow_until"], 1e-6), 1.0)
    out = []
    if length > train["length"]:  # one long list that fills most of the row
        pairs = rng.randint(80, 256)
        filler = rng.random() * max(0.0, (length - 300 - 13.2 * pairs) / (8.5 * pairs)) if pairs < 256 else 0.0
        asked = rng.choice((1, 4, 8, 16, 24))
        pairs = min(pairs, int((length - 120 - asked * 24) / (14 + 8.5 * filler)))
        return [tasks.Task(tasks.lookup(rng, pairs, asked, filler=filler), weight=train["lookup_weight"])]
    room = length * train["lookup_share"]
    while room > 0:
        most = int(8 + grown * (length - 220) / 11)
        pairs = rng.randint(2, max(min(most, int((length - 220) / 11)), 4))
        if rng.random() < 0.3 * grown:
            pairs = max(pairs, min(most, 60))
        asked = 1 if rng.random() < 0.25 else rng.randint(2, max(2, min(pairs, 12)))
        pairs = min(pairs, int((length - 90 - asked * 24) / 13))
        out.append(tasks.Task(tasks.lookup(rng, pairs, asked), weight=train["lookup_weight"]))
        room -= 11 * pairs + 20 * asked + 45
    return out


def loader(rows: Rows, workers: int) -> Iterator[Batch]:
    """Batches from ``workers`` processes in a fixed order of the workers."""
    if workers == 0:
        return iter(rows)
    return iter(
        DataLoader(
            rows, batch_size=None, num_workers=workers, prefetch_factor=2, persistent_workers=True,
            multiprocessing_context="fork",
        )
    )  # fmt: skip
