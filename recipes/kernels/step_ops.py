"""Times of what a decode step does beside products, experts and attention, at V4.1-Flash's shapes, beside plain torch.

``PYTHONPATH=.:engine:kernels python -m recipes.kernels.step_ops --out FILE.jsonl`` prints per operation: microseconds
inside a CUDA graph, as ``recipes.kernels.bench`` measures them, and microseconds that the host takes to launch one
call, which is what a step without graphs waits for; each of our kernel and of the reference on the same device. Where
64 MB or more move, also the share of the time that a copy of as many bytes takes, by the rate of copies in this run.
With ``--warm I/N`` every Nth is called once, so that several processes fill Triton's cache first.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.reference.linear import Weight
from deepinfer_kernels.reference.numerics import NUMERICS
from deepinfer_kernels.registry import IMPLEMENTATIONS, Ops
from recipes.kernels.bench import ceilings, timed

#: V4.1-Flash: rows of a decode step, hidden, streams, head dim, rotary dim, experts, choices, vocabulary, index heads
T, H, C, D, DR, E, K, V, IH, DI = 64, 5120, 4, 512, 64, 384, 6, 129280, 32, 128
#: bytes from which a kernel is held to the rate of copies, not to microseconds
LARGE = 64_000_000


def ops_of(backend: str) -> Ops:
    """Every operation of one backend where it has one, of the reference elsewhere."""
    picked = {}
    for name, rows in IMPLEMENTATIONS.items():
        mine = [i for i in rows if i.backend == backend]
        picked[name] = mine[0] if mine else next(i for i in rows if i.backend == "reference")
    return Ops(NUMERICS["fast"], "cuda", picked)


@dataclass(frozen=True)
class OpCase:
    """One operation, how its arguments are made, and about how many bytes they are."""

    name: str
    op: str
    make: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    bytes: int


def bf(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def f32(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, device="cuda")


def u8(*shape: int) -> Tensor:
    return torch.randint(0, 120, shape, device="cuda", dtype=torch.uint8)


def cases() -> Iterator[OpCase]:
    """A decode step; what also a prefill chunk does row by row, at its size; selection, dispatch, drawing and head."""

    def case(op: str, what: str, size: int, make: Callable[[], tuple[Any, ...]], **options: Any) -> OpCase:
        return OpCase(f"{op} {what}", op, lambda: (make(), options), size)

    for rows in (T, 2048):
        yield from _rows(case, rows)
    blocks = ids(9999, T, 1024)
    yield case(
        "entry_slots", f"T{T} K512", 16 * T * 512,
        lambda: (ids(1 << 16, T, 512), torch.arange(T, device="cuda"), blocks), per_block=128, count=512,
    )  # fmt: skip
    spans = torch.stack((ids(9, T), ids(9999, T), torch.arange(T, device="cuda")), 1)
    yield case(
        "window_places", f"T{T}", 8 * T * 128,
        lambda: (spans[:, 1] + 1, torch.arange(T, device="cuda"), spans, ids(T, T)), width=128, ring=134,
    )  # fmt: skip
    yield case("index_weights", f"T{T}", 4 * T * IH, lambda: (bf(T, IH), DI))
    for n in (2048, 16384, 131072):
        yield case("select_topk", f"T{T} n{n} k512", 4 * T * n, lambda n=n: (f32(T, 1, n),), k=512)
    visible = torch.full((T, 1), 131072, device="cuda")
    yield case(
        "candidate_blocks", f"T{T} n131072", 4 * T * 131072, lambda: (f32(T, 1, 131072), visible), block=8, keep=2048
    )
    kept = ids(2, T, 1, 16384) == 0
    yield case("restrict_to_candidates", f"T{T} n131072", 8 * T * 131072, lambda: (f32(T, 1, 131072), kept), block=8)
    expert = u8(16, 3 * 2304 * H // 2 + 3 * 2304 * H // 32)  # slots that hold one expert each
    moved = torch.arange(8, device="cuda")
    yield case("copy_rows", "8 experts", 16 * expert.shape[1], lambda: (expert, moved, expert, moved + 8))
    for rows in (T, 2048):
        yield case("dispatch_permute", f"T{rows} E{E}", 24 * rows * K, lambda rows=rows: (ids(E, rows, K), E))
        yield case(
            "dispatch_rows", f"T{rows} E{E}", 2 * rows * (K + 1) * H,
            lambda rows=rows: (bf(rows, H), ids(E, rows, K), torch.rand(rows, K, device="cuda"), E),
        )  # fmt: skip
        yield case("count_choices", f"L40 T{rows} E{E}", 320 * rows * K, lambda rows=rows: (ids(E, 40, rows, K), E))
    yield from _drawing(case)
    head = Weight(bf(V, H), "bf16")
    for rows in (1, T):
        yield case("head_logits", f"T{rows} V{V}", 2 * V * H, lambda rows=rows: (bf(rows, H), head))


def _rows(case: Callable[..., OpCase], T: int) -> Iterator[OpCase]:
    """Streams, records, pairs and memory of T tokens."""
    table = bf(V, H)
    yield case("embed_streams", f"T{T}", 10 * T * H, lambda: (ids(V, T), table, C))
    pre = torch.rand(T, C, device="cuda")
    yield case("mhc_collapse_norm", f"T{T}", 10 * T * H, lambda: (bf(T, C, H), pre, bf(H), 1e-20))
    yield case("rope_angles", f"T{T}", T * 600, lambda: (ids(1 << 20, T), torch.rand(DR // 2, device="cuda")))
    angles = (torch.rand(T, DR // 2, device="cuda"), torch.rand(T, DR // 2, device="cuda"))
    yield case("window_rows", f"T{T}", 5 * T * D, lambda: (bf(T, D), bf(D), 1e-20, *angles))
    for kind, width, size in (("global", D, 288), ("index", DI, 68)):
        store = u8(T * 64, size)

        def entries(width: int = width, store: Tensor = store, kind: str = kind) -> tuple[Any, ...]:
            return bf(T, width), bf(width), 1e-20, *angles, store, ids(T * 64, T), kind

        yield case("store_entries", f"{kind} T{T}", 5 * T * width, entries)
    ring = f32(T * 7, 2, D)

    def pairs() -> tuple[Any, ...]:
        here = torch.arange(T, device="cuda")
        return f32(T, D), f32(T, D), ring, here, here, ids(T * 7, T), here % 2 == 0

    yield case("pool_cached", f"T{T}", 18 * T * D, pairs)
    yield case("store_pairs", f"T{T}", 16 * T * D, lambda: (ring, ids(T * 7, T), f32(T, D), f32(T, D)))
    yield case("embed", f"T{T}", 4 * T * H, lambda: (ids(V, T), table))
    yield case("pool_pairs", f"T{T}", 18 * T * D, lambda: ((f32(T, D), f32(T, D)), (f32(T, D), f32(T, D))))
    yield case("quantise_index_query", f"T{T}", 4 * T * IH * DI, lambda: (bf(T, IH, DI),))
    here = torch.randperm(T * 64, device="cuda")[:T]
    for kind, width, size in (("window", D, 528), ("global", D, 288), ("index", DI, 68)):
        store = u8(T * 64, size)
        packed = u8(T, size)
        yield case("store_rows", f"{kind} T{T}", 2 * T * size, lambda store=store, packed=packed: (store, here, packed))
        yield case(
            "load_rows", f"{kind} T{T} x 64", 64 * T * (size + 2 * width),
            lambda store=store, kind=kind: (store, torch.randperm(T * 64, device="cuda").view(T, 64), kind),
        )  # fmt: skip
    multipliers, primes = ids(1 << 40, 3) | 1, ids(1 << 22, 2, 8) | 1
    yield case("token_classes", f"T{T}", 48 * T, lambda: (ids(V, T, 3), ids(1 << 17, V), None))
    yield case("engram_hash", f"T{T}", 150 * T, lambda: (ids(1 << 17, T, 3), 2, multipliers, primes, primes))
    memory, scale = u8(1 << 20, 320), u8(1 << 20, 10)
    yield case("engram_lookup", f"T{T}", T * 16 * 970, lambda: (memory, scale, ids(1 << 20, T, 16)))
    q, k = bf(C, H), bf(C, H)
    yield case("engram_gate", f"T{T}", 2 * T * 13 * H, lambda: (bf(T, C, H), bf(T, (C + 1) * H), q, k, None, 1e-20))


def _drawing(case: Callable[..., OpCase]) -> Iterator[OpCase]:
    """Logits of a standard deviation of 3: a top-p of 0.95 keeps some thousand tokens."""

    def filters(**given: float) -> dict[str, Tensor]:
        base = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0) | given
        kinds = dict(top_k=torch.int64, seed=torch.int64, position=torch.int64)
        return {k: torch.full((T,), v, dtype=kinds.get(k, torch.float32), device="cuda") for k, v in base.items()}

    size = 4 * T * V
    yield case("next_tokens", f"greedy T{T} V{V}", size, lambda: (3 * f32(T, V), None, None))
    for what, given in (("plain", {}), ("top_p", {"top_p": 0.95}), ("top_k", {"top_k": 50}),
                        ("all", {"temperature": 0.6, "top_k": 400, "top_p": 0.95, "min_p": 0.01})):  # fmt: skip
        yield case("next_tokens", f"{what} T{T} V{V}", size, lambda g=given: (3 * f32(T, V), None, filters(**g)))
    draft = {**filters(top_p=0.95), "coupled": False}
    yield case("draft_sample", f"T{T} V{V}", 2 * size, lambda: (3 * f32(T, V),), **draft)
    hidden = {k: torch.zeros(0, device="cuda") for k in ("count", "presence", "frequency", "repetition", "bias")}
    hidden |= {k: ids(9, 0) for k in ("row", "token", "bias_row", "bias_token")}
    hidden |= {"mask_row": torch.arange(T, device="cuda"), "mask": ids(1 << 31, T, V // 32).int()}
    yield case("adjust_logits", f"masks T{T} V{V}", 2 * size, lambda: (f32(T, V),), **hidden)
    yield case("token_logprobs", f"top 20 T{T} V{V}", size, lambda: (3 * f32(T, V), ids(V, T)), top=20)
    J = 5
    yield case("dspark_confidence", f"B{T}", 40 * T, lambda: (f32(T, J), torch.ones(2, J, device="cuda"), ids(2, T)))
    order = torch.arange(T, device="cuda")
    yield case(
        "dspark_split", f"B{T}", 40 * T, lambda: (torch.rand(T, J, device="cuda"), ids(J + 1, T), order, order[T // 2])
    )
    length = ids(J + 1, T)
    yield case("accept_drawn", f"B{T}", 160 * T, lambda: (ids(9, T * (J + 1)), ids(9, T, J), order * (J + 1), length))
    full = {"first": order * (J + 1), "length": torch.full((T,), J, device="cuda")}
    full["failed"] = torch.zeros(T * (J + 1), dtype=torch.int64, device="cuda")

    def drafted(**given: float) -> tuple[tuple[Tensor], dict[str, Tensor]]:
        """Verify logits, the laws of a drafter that is about half a logit off, and drafts of it."""
        logits = 3 * f32(T, J + 1, V)
        laws = (logits[:, :J] + 0.5 * f32(T, J, V)).log_softmax(-1)
        drafts = torch.multinomial(laws.flatten(0, 1).exp(), 1).view(T, J)
        return (logits.flatten(0, 1),), {"drafts": drafts, "draft_logprobs": laws, **full, **filters(**given)}

    for what, given in (("plain", {}), ("top_p", {"top_p": 0.95})):
        name = f"accept_rejection {what} B{T} J{J} V{V}"
        yield OpCase(name, "accept_rejection", lambda g=given: drafted(**g), 4 * V * T * (2 * J + 1))
    emitted = {"stop": ids(9, T, 2), "room": ids(99, T)}
    yield case("truncate_emitted", f"B{T}", 80 * T, lambda: (ids(9, T, J + 1), length), **emitted)


def host_us(call: Callable[[], Any], calls: int = 60) -> float:
    """Microseconds that launching one call takes the host, with an empty queue before the first."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    took = (time.perf_counter() - began) / calls * 1e6
    torch.cuda.synchronize()
    return took


def measure(case: OpCase, ops: Ops) -> dict[str, float | str]:
    """Microseconds on the device and on the host, or what went wrong."""
    try:
        fn = getattr(ops, case.op)

        def made() -> Callable[[], Any]:
            args, options = case.make()
            return lambda: fn(*args, **options)

        host = host_us(made())
        return {"us": round(timed(made, case.bytes), 1), "host_us": round(host, 1)}
    except Exception as exc:  # one failing case must not lose the others
        torch.cuda.synchronize()
        return {"error": f"{type(exc).__name__}: {str(exc)[:160]}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON lines")
    parser.add_argument("--warm", metavar="I/N")
    parser.add_argument("--only", nargs="*", default=[""], help="operations whose name begins so")
    parser.add_argument("--ours", action="store_true", help="leave torch out")
    args = parser.parse_args()
    torch.manual_seed(0)
    mine, plain = ops_of("triton"), ops_of("reference")
    todo = [c for c in cases() if c.op.startswith(tuple(args.only))]
    if args.warm:
        first, step = (int(part) for part in args.warm.split("/"))
        for case in todo[first::step]:
            positional, options = case.make()
            getattr(mine, case.op)(*positional, **options)
        return
    copy, _ = ceilings()
    lines: list[dict[str, Any]] = []
    for case in todo:
        line: dict[str, Any] = {"case": case.name, "bytes": case.bytes, "triton": measure(case, mine)}
        line |= {} if args.ours else {"torch": measure(case, plain)}
        text = f"{case.name:38s} {line['triton']}"
        if case.bytes >= LARGE and isinstance(us := line["triton"].get("us"), float):
            line["of_copy"] = round(case.bytes / copy * 1e6 / us, 3)
            text += f"  {line['of_copy']:.0%} of {copy / 1e12:.2f} TB/s"
        lines.append(line)
        print(text + ("" if args.ours else f"  torch {line['torch']}"), flush=True)
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
