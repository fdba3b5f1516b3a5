"""Batches against a token-by-token transcription of what each field means."""

from __future__ import annotations

import random

import numpy as np
import torch

from deepinfer_engine.cache.layout import PAD, KVLayout, SourceLayout
from deepinfer_engine.runtime.batch import RowInput, _Moved, build_batch

LAYOUT = KVLayout(False, 4, 16, 22, 7, 32, 32, (SourceLayout(2, 2), SourceLayout(4, 1)))
NGRAM = 4


def expected(rows: list[RowInput]) -> dict[str, list]:
    out = {name: [] for name in ("ids", "pos", "row", "lags", "ring", "pair", "block", "logits", "tail")}
    kept = 0
    for b, r in enumerate(rows):
        end = r.start + r.count
        known = [*r.token_ids[: end - r.newest_unknown], *([0] if r.newest_unknown else [])]
        tail = r.count if r.tail is None else min(r.tail, r.count)
        for p in range(r.start, end):
            if p >= end - tail:
                out["tail"].append(len(out["ids"]))
                if r.logits == "all" or (r.logits == "last" and p == end - 1):
                    out["logits"].append(kept)
                kept += 1
            out["ids"].append(known[p])
            out["pos"].append(p)
            out["row"].append(b)
            out["lags"].append([known[p - k] if p >= k else -1 for k in range(NGRAM)])
            out["ring"].append(r.slot * 22 + p % 22 if p >= end - 22 else PAD)
            out["pair"].append(r.slot * 7 + p % 7 if p >= end - 7 else PAD)
            out["block"].append(r.block_ids[p // 128] * 128 + p % 128 if p >= r.keep_blocks_below else PAD)
    return out


def random_row(rng: random.Random, slot: int) -> RowInput:
    start = rng.choice((0, 0, 1, 5, 127, 128, 300))
    count = rng.choice((1, 1, 2, 40, 130))
    ids = [rng.randrange(1, 300) for _ in range(start + count + rng.randrange(3))]
    unknown = count == 1 and start > 0 and rng.random() < 0.5
    tail = rng.choice((None, None, 3))
    return RowInput(
        ids[:start] if unknown else ids,
        start,
        count,
        slot,
        [rng.randrange(1, 50) for _ in range((start + count) // 128 + 1)],
        floor_decoder=max(0, start + count - 3) if tail else 0,
        keep_blocks_below=rng.choice((0, start + 1)),
        tail=tail,
        logits=rng.choice(("last", "all", "none")),
        newest_unknown=unknown,
    )


def test_every_field_means_what_it_says():
    rng = random.Random(11)
    for _ in range(200):
        rows = [random_row(rng, slot + 1) for slot in range(rng.randrange(1, 6))]
        batch, want = build_batch(rows, LAYOUT, ngram=NGRAM), expected(rows)
        assert batch.ids_T.tolist() == want["ids"]
        assert batch.pos_T.tolist() == want["pos"]
        assert batch.row_T.tolist() == want["row"]
        assert batch.lag_ids_TN.tolist() == want["lags"]
        assert batch.ring_slot_T.tolist() == want["ring"]
        assert batch.pair_slot_T.tolist() == want["pair"]
        assert batch.block_slot_T.tolist() == want["block"]
        assert batch.logits_T.tolist() == want["logits"]
        assert batch.ring_slot_B.tolist() == [r.slot for r in rows]
        if len(want["tail"]) == len(want["ids"]):
            assert batch.tail_T is None
        else:
            assert batch.tail_T is not None and batch.tail_T.tolist() == want["tail"]
        for b, r in enumerate(rows):
            assert batch.block_table_BP[b, : len(r.block_ids)].tolist() == list(r.block_ids)
            span = batch.rows[b]
            assert (span.start, span.count, span.end) == (r.start, r.count, r.start + r.count)
        assert batch.ids_T.dtype == torch.int64 and batch.lag_ids_TN.is_contiguous()


def test_arrays_that_travel_together_arrive_as_they_were():
    rng = np.random.default_rng(3)
    sent = [rng.integers(-9, 9, shape) for shape in ((5,), (3, 4), (0,), (2, 0), (1, 7))]
    moved = _Moved("cpu:0")  # a device by another name than that of the host's own tensors
    numbers = [moved.add(values.T if values.shape == (3, 4) else values) for values in sent]
    there = moved.all()
    for number, values in zip(numbers, sent, strict=True):
        want = values.T if values.shape == (3, 4) else values
        assert there[number].dtype == torch.int64 and there[number].is_contiguous()
        assert there[number].tolist() == want.tolist()
        offset = there[number].storage_offset() * 8
        assert offset % 16 == 0, "kernels are compiled for addresses of whole 16 bytes"
    before = there[1].clone()
    there[0].fill_(77)
    assert torch.equal(there[1], before), "no element is shared"
