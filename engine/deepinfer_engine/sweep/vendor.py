"""What the vendor published, as rows of kind ``vendor``: read off its pictures or from its tables, never measured here.

They are for orientation: another machine, another load and a few per cent of reading error.
"""

from __future__ import annotations

from typing import Literal

from deepinfer_engine.cost import published
from deepinfer_engine.sim.models import RELEASE
from deepinfer_engine.sweep import columns
from deepinfer_engine.sweep.results import Row
from deepinfer_engine.sweep.series import PER_GPU, PER_USER

Which = Literal["prefill-chunk", "decode", "decode-by-ep", "dspark"]

_MODEL = RELEASE


def vendor_rows(which: Which) -> tuple[Row, ...]:
    """The published points of one picture."""
    rows = {
        "prefill-chunk": _prefill,
        "decode": _decode,
        "decode-by-ep": _decode_by_ep,
        "dspark": _dspark,
    }[which]()
    return tuple({**row, "cell": f"{which} {i}"} for i, row in enumerate(rows, 1))


def _row(gpus: int, **values: float | int | str) -> Row:
    return {"kind": "vendor", "model": _MODEL, "platform": "sm100", "gpus": gpus, **values}


def _prefill() -> list[Row]:
    return [
        _row(4, **{"sched.prefill_chunk_tokens": chunk, "parallel.ep": 4, "input_tok_s_gpu": rate})
        for chunk, rate in published.PREFILL_TOKENS_S.items()
    ]


def _decode() -> list[Row]:
    return [
        _row(64, **{"rows_per_rank": rows, "parallel.ep": 64, PER_GPU: gpu} | ({PER_USER: user} if user else {}))
        for rows, (user, gpu) in published.DECODE_CURVE.items()
    ]


def _decode_by_ep() -> list[Row]:
    return [
        _row(ep, **{"parallel.ep": ep, PER_USER: user, PER_GPU: gpu})
        for user, by_ep in published.DECODE_BY_EP.items()
        for ep, gpu in zip((8, 64), by_ep, strict=True)
    ]


def _dspark() -> list[Row]:
    return [
        _row(64, **{"rows_per_rank": row.rows, "parallel.ep": 64, columns.GAIN: row.gain_percent})
        for row in published.VERIFY_TABLE
    ]
