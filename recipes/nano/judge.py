"""Exact scores of held-out tasks while a model trains, without generating."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import torch
from torch import Tensor

from recipes.nano import tasks
from recipes.nano.model import Layout, Model, Numerics, Ops, stored
from recipes.nano.packing import Batch, Row, Writer, filled


class Judge:
    """Held-out tasks answered with the right tokens before every token: the share that greedy decoding gets exactly.

    A task counts when every token of thinking and answer is the most probable one, with the formats and the selection
    of inference; greedy generation then writes exactly the expected text.
    """

    def __init__(self, model: Model, writer: Writer, train: dict[str, Any], seed: int, count: int):
        self.model = Model(
            model.config, model.classes, numerics=Numerics(model.numerics.dtype, official=True), ops=Ops()
        )
        self.plain = model
        self.batches: dict[str, list[Batch]] = {}
        rng = Random(seed)
        for name, items in tasks.evaluation_tasks(seed, count).items():
            rows = [writer.row(t) for t in items]
            length = train["long_length"] if max(len(r.ids) for r in rows) > train["length"] else train["length"]
            self.batches[name] = list(_judged(writer, rows, length, max(train["tokens"] // length, 1), rng))

    @torch.no_grad()
    def score(self, params: dict[str, Tensor]) -> dict[str, float]:
        """{set: share exact}."""
        device = next(iter(params.values())).device
        self.model.ops.routed = self.plain.ops.routed
        w = stored(params, weights=True)
        out = {}
        for name, batches in self.batches.items():
            right = count = 0
            for host in batches:
                batch = host.to(device)
                hidden = self.model.hidden(w, batch.ids, None, Layout(batch.start)).flatten(0, 1)
                best = self.model.logits(w, hidden[batch.place]).argmax(-1)
                wrong = (best != batch.ids.flatten()[batch.place + 1]) & (batch.doc >= 0)
                missed = torch.zeros(len(batch.kinds), device=device).index_add_(
                    0, batch.doc.clamp(min=0), wrong.float()
                )
                right += int((missed == 0).sum())
                count += len(batch.kinds)
            out[name] = round(right / count, 4)
        return out


def _judged(writer: Writer, rows: list[Row], length: int, batch: int, rng: Random) -> Iterator[Batch]:
    """All of ``rows`` in packed batches."""
    longest = max(len(r.ids) for r in rows)
    if longest > length:
        raise ValueError(f"a held-out task has {longest} tokens, rows have {length}")
    packed: list[list[Row]] = []
    pending = list(rows)
    while pending:
        taken = filled(Random(0), pending, length, lambda: Row([0] * (length + 1), 1, "none", 0.0))
        fitting = [id(r) for r in taken]
        pending = [r for r in pending if id(r) not in fitting]
        packed.append(taken)
    for at in range(0, len(packed), batch):
        part = packed[at : at + batch]
        room = sum(len(r.ids) - r.prompt for chats in part for r in chats)
        yield writer.pack(part, length, room, 2, rng)
