"""Drawing: greedy ids, or the Gumbel-max rule over filtered logits with keyed noise.

A program reads a part of a row, and what parts found is put together in their order; parts follow from V alone, so a
row draws the same in any batch. Rows without filters draw in the same pass that finds their best. Noise and scores are
estimated in f32, and computed in f64 for tokens whose estimates are too close to tell.

What filters keep of a row is the front of its ranking, so it is two numbers: the lowest logit that is kept, and the
last id among its equals. A program per row finds them: top-k by the bits of the logits, min-p by bisecting the logits,
top-p by the mass of sixteen parts of the row by distance from its best, then by bisecting the part in which the mass is
reached. Then parts draw once more. Probabilities, noise and sums are f64.

Ids are those of the reference unless two scores, or a mass and its bound, agree to about 1e-14 of themselves: there the
order of f64 sums decides, and it is another on every device in the reference too.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportOptionalOperand=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty, float32, float64, int32, int64

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.reference.sample import DRAFT, NON_FINITE, NOTHING_ALLOWED, TARGET
from deepinfer_kernels.triton.launch import blocks, contiguous, launch, power_of_two
from deepinfer_kernels.triton.noise import noise_about, one_of_four, philox, score
from deepinfer_kernels.triton.precise import exp, log
from deepinfer_kernels.triton.select import kth_best, number

#: tokens of a program that reads a part of a row, and of a step of one that reads a whole row; of its sixteen sums
_EACH, _ROW, _WIDE = 4096, 2048, 1024
_LOWEST, _INFINITE, _LAST = tl.constexpr(-0x7F800001), tl.constexpr(0x7F800000), tl.constexpr(0x7FFFFFFF)
_NON_FINITE, _NOTHING = tl.constexpr(NON_FINITE), tl.constexpr(NOTHING_ALLOWED)
#: estimated scores further apart are ordered like the scores: noise is off by 5e-6, distances up to the 20.2 of noise
#: by 5e-6, the rounding of a log-probability by 2e-6
_APART = tl.constexpr(1e-4)


@triton.jit
def _value(key):
    """The f32 of a number."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _part(LOGITS, row, part, V: tl.constexpr, EACH: tl.constexpr):
    """(ids [EACH/4, 4] of a part of a row, their logits, their numbers); −∞ behind the last."""
    quad, place = tl.arange(0, EACH // 4)[:, None], tl.arange(0, 4)[None, :]
    j = part * EACH + quad * 4 + place
    x = tl.load(LOGITS + row * V + j, mask=j < V, other=float("-inf"))
    return j, x, number(x)


@triton.jit
def _look(LOGITS, RAW, row, part, V: tl.constexpr, EACH: tl.constexpr):
    """(ids, logits and numbers of a part, number of the best, its lowest id, 1 where the raw logits are finite)."""
    j, x, key = _part(LOGITS, row, part, V, EACH)
    best = tl.max(tl.max(key, 1), 0)
    id = tl.min(tl.min(tl.where(key == best, j, _LAST), 1), 0)
    raw = key
    if RAW is not None:
        raw = number(tl.load(RAW + row * V + j, mask=j < V, other=0.0))
    wrong = ((raw >= _INFINITE) | (raw <= _LOWEST)) & (j < V)
    return j, x, key, best, id, 1 - tl.max(tl.max(wrong.to(tl.int32), 1), 0)


@triton.jit
def _keep(FOUND, row, part, PARTS: tl.constexpr, best, id, finite):
    to = FOUND + (row * PARTS + part) * 3
    tl.store(to, best)
    tl.store(to + 1, id)
    tl.store(to + 2, finite)


@triton.jit
def _whole(FOUND, row, PARTS: tl.constexpr):
    """(number of the best of a row, its lowest id, 1 where raw logits are finite) of FOUND [row, part]."""
    i = tl.arange(0, triton.next_power_of_2(PARTS))
    at, mask = FOUND + (row * PARTS + i) * 3, i < PARTS
    key = tl.load(at, mask=mask, other=-0x80000000)
    best = tl.max(key, 0)
    id = tl.min(tl.where((key == best) & mask, tl.load(at + 1, mask=mask, other=0), _LAST), 0)
    return best, id, tl.min(tl.load(at + 2, mask=mask, other=1), 0)


@triton.jit
def _judged(id, best, finite, ADJUSTED: tl.constexpr):
    """The id, or why there is none."""
    if ADJUSTED:
        id = tl.where(best > _LOWEST, id, _NOTHING)
    return tl.where(finite != 0, id, _NON_FINITE).to(tl.int64)


@triton.jit
def _greedy(
    LOGITS, RAW, FOUND, IDS, V: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr, ADJUSTED: tl.constexpr
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, _, _, best, id, finite = _look(LOGITS, RAW, row, part, V, EACH)
    if PARTS == 1:
        tl.store(IDS + row, _judged(id, best, finite, ADJUSTED))
    else:
        _keep(FOUND, row, part, PARTS, best, id, finite)


@triton.jit
def _greedy_whole(FOUND, IDS, PARTS: tl.constexpr, ADJUSTED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    best, id, finite = _whole(FOUND, row, PARTS)
    tl.store(IDS + row, _judged(id, best, finite, ADJUSTED))


@triton.jit
def _last_of_equals(LOGITS, row, V: tl.constexpr, lowest, room, BLOCK: tl.constexpr):
    """Id of the ``room``-th token whose number is ``lowest``."""
    seen, last = tl.full((), 0, tl.int32), tl.full((), -1, tl.int32)
    for start in range(0, V, BLOCK):
        j = start + tl.arange(0, BLOCK)
        equal = (number(tl.load(LOGITS + row * V + j, mask=j < V, other=float("-inf"))) == lowest) & (j < V)
        nth = seen + tl.cumsum(equal.to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(equal & (nth <= room), j, -1), 0))
        seen += tl.sum(equal.to(tl.int32), 0)
    return last


@triton.jit
def _weights(LOGITS, row, V: tl.constexpr, j, lowest, last, top, temperature):
    """(number, whether kept, distance from the best, weight exp(−distance), both 0 where not kept)."""
    x = tl.load(LOGITS + row * V + j, mask=j < V, other=float("-inf"))
    key = number(x)
    kept = ((key > lowest) | ((key == lowest) & (j <= last))) & (key > _LOWEST) & (j < V)
    distance = tl.where(kept, top - x.to(tl.float64) / temperature, 0.0)
    return key, kept, distance, tl.where(kept, exp(-distance), 0.0)


@triton.jit
def _reached(
    LOGITS, WEIGHT, ITEM, row, V: tl.constexpr, lowest, last, top, temperature, chosen, base, limit, best,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """(lowest, last) with the mass before the last token kept below ``limit``: that token lies in part ``chosen``."""
    count = tl.full((), 0, tl.int32)
    for start in range(0, V, BLOCK):
        j = start + tl.arange(0, BLOCK)
        key, kept, distance, weight = _weights(LOGITS, row, V, j, lowest, last, top, temperature)
        mine = kept & (tl.minimum(distance, 15.0).to(tl.int32) == chosen)
        place = count + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(WEIGHT + row * V + place, weight, mask=mine)
        tl.store(ITEM + row * V + place, (key.to(tl.int64) << 32) | j.to(tl.int64), mask=mine)
        count += tl.sum(mine.to(tl.int32), 0)
    tl.debug_barrier()
    low, high = tl.full((), -0x7F800000, tl.int64), best.to(tl.int64)
    while low < high:  # the lowest number with less than the limit above it
        middle = (low + high) >> 1
        above = tl.zeros((BLOCK,), dtype=tl.float64)
        for start in range(0, count, BLOCK):
            i = start + tl.arange(0, BLOCK)
            item = tl.load(ITEM + row * V + i, mask=i < count, other=0)
            weight = tl.load(WEIGHT + row * V + i, mask=i < count, other=0.0)
            above += tl.where((item >> 32) > middle, weight, 0.0)
        below = base + tl.sum(above, 0) < limit
        high = tl.where(below, middle, high)
        low = tl.where(below, low, middle + 1)
    above = tl.zeros((BLOCK,), dtype=tl.float64)
    each = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        key = tl.load(ITEM + row * V + i, mask=i < count, other=0) >> 32
        weight = tl.load(WEIGHT + row * V + i, mask=i < count, other=0.0)
        above += tl.where(key > high, weight, 0.0)
        each = tl.maximum(each, tl.where((key == high) & (i < count), weight, 0.0))
    # of equal tokens those whose predecessors leave mass below the limit, and the first in any case
    room = (limit - base - tl.sum(above, 0)) / tl.max(each, 0)
    whole = tl.minimum(room, 1e9).to(tl.int32)
    room = tl.maximum(whole + (whole.to(tl.float64) < room).to(tl.int32), 1)
    seen, end = tl.full((), 0, tl.int32), tl.full((), -1, tl.int32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        item = tl.load(ITEM + row * V + i, mask=i < count, other=0)
        equal = ((item >> 32) == high) & (i < count)
        nth = seen + tl.cumsum(equal.to(tl.int32), 0)
        id = (item & 0xFFFFFFFF).to(tl.int32)
        end = tl.maximum(end, tl.max(tl.where(equal & (nth <= room), id, -1), 0))
        seen += tl.sum(equal.to(tl.int32), 0)
    return high.to(tl.int32), end


@triton.jit
def _filter(
    LOGITS, FOUND, TEMPERATURE, TOP_K, TOP_P, MIN_P, STATE, MASS, WEIGHT, ITEM, V: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """STATE [row]: id of the best, its number, whether raw logits are finite, lowest number kept, last of its equals.

    MASS [row], where wanted: log of the mass kept, of which the best has 1. WEIGHT, ITEM [row, V]: room to work in.
    """
    row = tl.program_id(0).to(tl.int64)
    best, id, finite = _whole(FOUND, row, PARTS)
    temperature = tl.load(TEMPERATURE + row).to(tl.float64)
    top_k, top_p = tl.load(TOP_K + row).to(tl.int32), tl.load(TOP_P + row).to(tl.float64)
    min_p = tl.load(MIN_P + row).to(tl.float64)
    lowest, last = tl.full((), -0x7F800001, tl.int32), tl.full((), 0x7FFFFFFF, tl.int32)
    mass = tl.full((), 1.0, tl.float64)
    if (temperature > 0.0) & (best > _LOWEST) & (best < _INFINITE):
        top = _value(best).to(tl.float64) / temperature
        if (top_k > 0) & (top_k < V):
            lowest, room = kth_best(LOGITS, row, V, top_k, False, BLOCK)
            last = _last_of_equals(LOGITS, row, V, lowest, room, BLOCK)
        if (top_p < 1.0) | (min_p > 0.0):
            part = tl.arange(0, 16)
            sums = tl.zeros((WIDE, 16), dtype=tl.float64)
            for start in range(0, V, WIDE):
                j = start + tl.arange(0, WIDE)
                _, _, distance, weight = _weights(LOGITS, row, V, j, lowest, last, top, temperature)
                which = tl.minimum(distance, 15.0).to(tl.int32)
                sums += tl.where(which[:, None] == part[None, :], weight[:, None], 0.0)
            masses = tl.sum(sums, 0)
            mass = tl.sum(masses, 0)
            floor = lowest
            if top_p < 1.0:
                limit = top_p * mass
                chosen = tl.minimum(tl.sum((tl.cumsum(masses, 0) < limit).to(tl.int32), 0), 15)
                base = tl.sum(tl.where(part < chosen, masses, 0.0), 0)
                if tl.sum(tl.where(part == chosen, masses, 0.0), 0) > 0.0:
                    lowest, last = _reached(
                        LOGITS, WEIGHT, ITEM, row, V, lowest, last, top, temperature, chosen, base, limit, best, BLOCK
                    )
            if min_p > 0.0:  # the lowest number whose probability is min_p of the best's
                low, high = tl.maximum(floor, -0x7F800000).to(tl.int64), best.to(tl.int64)
                while low < high:
                    middle = (low + high) >> 1
                    weight = exp(_value(middle.to(tl.int32)).to(tl.float64) / temperature - top)
                    enough = weight / mass >= min_p * (1.0 / mass)
                    high = tl.where(enough, middle, high)
                    low = tl.where(enough, low, middle + 1)
                least = high.to(tl.int32)
                last = tl.where(least > lowest, _LAST, last)
                lowest = tl.maximum(lowest, least)
        if MASS is not None:
            total = tl.zeros((BLOCK,), dtype=tl.float64)
            for start in range(0, V, BLOCK):
                j = start + tl.arange(0, BLOCK)
                _, _, _, weight = _weights(LOGITS, row, V, j, lowest, last, top, temperature)
                total += weight
            mass = tl.sum(total, 0)
    to = STATE + 5 * row
    tl.store(to, id)
    tl.store(to + 1, best)
    tl.store(to + 2, finite)
    tl.store(to + 3, lowest)
    tl.store(to + 4, last)
    if MASS is not None:
        tl.store(MASS + row, log(mass))


@triton.jit
def _winner(
    LOGITS, row, part, V: tl.constexpr, EACH: tl.constexpr, j, x, key, kept, temperature, top, shift, seed, position,
    stream, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Id of the best score among the tokens kept of a part, −1 where there is none.

    Scores are estimated, and computed in f64 only for those within ``_APART`` of the best estimate: mostly one.
    """
    nearest = tl.max(tl.max(tl.where(kept, key, -0x80000000), 1), 0)
    won = tl.full((), -1, tl.int32)
    if (nearest > _LOWEST) & (nearest < _INFINITE):
        words = philox(seed, position, stream, part * (EACH // 4) + tl.arange(0, EACH // 4))
        wide = words[0][:, None], words[1][:, None], words[2][:, None], words[3][:, None]
        word = one_of_four(wide, tl.arange(0, 4)[None, :])
        inverse = tl.minimum(1.0 / temperature, 3e38)
        about = tl.where(kept, (x - _value(nearest)) * inverse + noise_about(word), float("-inf"))
        close = about >= tl.max(tl.max(about, 1), 0) - _APART
        won = tl.min(tl.min(tl.where(close, j, _LAST), 1), 0)
        count = tl.sum(tl.sum(close.to(tl.int32), 1), 0)
        if count > 1:
            scale = temperature.to(tl.float64)
            at = won
            best = score(tl.load(LOGITS + row * V + at), at, scale, top, shift, seed, position, stream, ROUNDED)
            for _ in range(1, count):
                at = tl.min(tl.min(tl.where(close & (j > at), j, _LAST), 1), 0)
                other = score(tl.load(LOGITS + row * V + at), at, scale, top, shift, seed, position, stream, ROUNDED)
                won = tl.where(other > best, at, won)
                best = tl.maximum(other, best)
    return won


@triton.jit(do_not_specialize=["stream"])
def _begin(
    LOGITS, RAW, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, POSITION, FOUND, WINNER, stream, V: tl.constexpr,
    PARTS: tl.constexpr, EACH: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """The best of a part; its winner too, if the row has no filter and ``DRAWS``."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j, x, key, best, id, finite = _look(LOGITS, RAW, row, part, V, EACH)
    _keep(FOUND, row, part, PARTS, best, id, finite)
    if DRAWS:
        temperature, top_k = tl.load(TEMPERATURE + row), tl.load(TOP_K + row)
        filtered = ((top_k > 0) & (top_k < V)) | (tl.load(TOP_P + row) < 1.0) | (tl.load(MIN_P + row) > 0.0)
        if (temperature > 0.0) & (filtered == 0):
            top = _value(best).to(tl.float64) / temperature.to(tl.float64)
            seed, position, kept = tl.load(SEED + row), tl.load(POSITION + row), (key > _LOWEST) & (j < V)
            won = _winner(
                LOGITS, row, part, V, EACH, j, x, key, kept, temperature, top, 0.0, seed, position, stream, False
            )
            tl.store(WINNER + row * PARTS + part, won)


@triton.jit(do_not_specialize=["stream"])
def _draw(
    LOGITS, STATE, MASS, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, POSITION, WINNER, LOGPROB, stream, V: tl.constexpr,
    PARTS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """The winner of a part of a row with filters; LOGPROB takes the f32 log-distribution, of which it is then drawn."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_k = tl.load(TEMPERATURE + row), tl.load(TOP_K + row)
    filtered = ((top_k > 0) & (top_k < V)) | (tl.load(TOP_P + row) < 1.0) | (tl.load(MIN_P + row) > 0.0)
    wanted = (temperature > 0.0) & filtered
    if LOGPROB is not None:
        wanted = temperature >= 0.0
    if wanted:
        j, x, key = _part(LOGITS, row, part, V, EACH)
        state = STATE + 5 * row
        top_id, best, lowest, last = tl.load(state), tl.load(state + 1), tl.load(state + 3), tl.load(state + 4)
        kept = ((key > lowest) | ((key == lowest) & (j <= last))) & (key > _LOWEST) & (j < V)
        scale = tl.where(temperature > 0.0, temperature, 1.0).to(tl.float64)
        top = _value(best).to(tl.float64) / scale
        shift = tl.full((), 0.0, tl.float64)
        if LOGPROB is not None:
            shift = tl.load(MASS + row)
            value = ((x.to(tl.float64) / scale - top) - shift).to(tl.float32)
            value = tl.where(temperature > 0.0, tl.where(kept, value, float("-inf")), float("-inf"))
            value = tl.where(j == tl.where(temperature > 0.0, -1, top_id), 0.0, value)
            tl.store(LOGPROB + row * V + j, value, mask=j < V)
        if temperature > 0.0:
            seed, position = tl.load(SEED + row), tl.load(POSITION + row)
            rounds = LOGPROB is not None
            won = _winner(
                LOGITS, row, part, V, EACH, j, x, key, kept, temperature, top, shift, seed, position, stream, rounds
            )
            tl.store(WINNER + row * PARTS + part, won)


@triton.jit(do_not_specialize=["stream"])
def _decide(
    LOGITS, STATE, MASS, TEMPERATURE, SEED, POSITION, WINNER, IDS, stream, V: tl.constexpr, PARTS: tl.constexpr,
    JUDGED: tl.constexpr, ADJUSTED: tl.constexpr,
):  # fmt: skip
    """The best of the winners of a row's parts."""
    row = tl.program_id(0).to(tl.int64)
    temperature, state = tl.load(TEMPERATURE + row), STATE + 5 * row
    id, best_key = tl.load(state), tl.load(state + 1)
    if temperature > 0.0:
        i = tl.arange(0, triton.next_power_of_2(PARTS))
        won = tl.load(WINNER + row * PARTS + i, mask=i < PARTS, other=-1)
        scale = temperature.to(tl.float64)
        top, shift = _value(best_key).to(tl.float64) / scale, tl.full((), 0.0, tl.float64)
        if MASS is not None:
            shift = tl.load(MASS + row)
        x = tl.load(LOGITS + row * V + won, mask=won >= 0, other=float("-inf"))
        found = score(x, won, scale, top, shift, tl.load(SEED + row), tl.load(POSITION + row), stream, MASS is not None)
        found = tl.where(won >= 0, found, float("-inf"))
        drawn = tl.min(tl.where((found == tl.max(found, 0)) & (won >= 0), won, _LAST), 0)
        id = tl.where(drawn < _LAST, drawn, id)
    judged = id.to(tl.int64)
    if JUDGED:
        judged = _judged(id, best_key, tl.load(state + 2), ADJUSTED)
    tl.store(IDS + row, judged)


def _checked(logits: Tensor, adjusted: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(logits to draw by, others that are judged)."""
    for t in (logits,) if adjusted is None else (logits, adjusted):
        if t.dtype is not float32 or t.dim() != 2 or t.shape != logits.shape or not t.shape[1]:
            raise ValueError(f"logits {tuple(t.shape)} {t.dtype}, expected float32 [rows, V] with V of 1 or more")
    return (contiguous(logits), None) if adjusted is None else (contiguous(adjusted), contiguous(logits))


def _each(V: int) -> int:
    """Tokens of a part of a row: they follow from V alone, as do the sums and draws of parts."""
    return min(_EACH, max(128, power_of_two(V)))


def _argmax(logits: Tensor, adjusted: Tensor | None) -> Tensor:
    logits, raw = _checked(logits, adjusted)
    (B, V), device = logits.shape, logits.device
    parts, ids = blocks(V, _each(V)), empty(B, dtype=int64, device=device)
    found = empty((B, parts, 3), dtype=int32, device=device)
    sizes = dict(PARTS=parts, EACH=_each(V), ADJUSTED=adjusted is not None)
    launch(_greedy, (B, parts), logits, raw, found, ids, warps=8, V=V, **sizes)
    if parts > 1:
        launch(_greedy_whole, (B,), found, ids, warps=1, PARTS=parts, ADJUSTED=adjusted is not None)
    return ids


def _drawn(
    logits: Tensor, adjusted: Tensor | None, stream: int, with_logprobs: bool, filters: dict[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    logits, raw = _checked(logits, adjusted)
    (B, V), device = logits.shape, logits.device
    kinds = dict(temperature=float32, top_k=int64, top_p=float32, min_p=float32, seed=int64, position=int64)
    for name, dtype in kinds.items():
        if filters[name].dtype is not dtype or filters[name].shape != (B,):
            raise ValueError(f"{name} {tuple(filters[name].shape)} {filters[name].dtype}, expected {dtype} ({B},)")
    limits = [contiguous(filters[name]) for name in ("temperature", "top_k", "top_p", "min_p")]
    keys = [contiguous(filters[name]) for name in ("seed", "position")]
    parts = blocks(V, _each(V))
    found = empty((B, parts, 3), dtype=int32, device=device)
    winner = empty((B, parts), dtype=int32, device=device)
    state = empty((B, 5), dtype=int32, device=device)
    mass = empty(B, dtype=float64, device=device) if with_logprobs else None
    logprobs = empty((B, V), dtype=float32, device=device) if with_logprobs else None
    room = empty((B, V), dtype=float64, device=device), empty((B, V), dtype=int64, device=device)
    sizes = dict(V=V, PARTS=parts)
    begun = (logits, raw, *limits, *keys, found, winner, stream)
    launch(_begin, (B, parts), *begun, warps=8, **sizes, EACH=_each(V), DRAWS=not with_logprobs)
    launch(_filter, (B,), logits, found, *limits, state, mass, *room, warps=8, **sizes, BLOCK=_ROW, WIDE=_WIDE)
    drawn = (logits, state, mass, *limits, *keys, winner, logprobs, stream)
    launch(_draw, (B, parts), *drawn, warps=8, **sizes, EACH=_each(V))
    ids = empty(B, dtype=int64, device=device)
    decided = (logits, state, mass, limits[0], *keys, winner, ids, stream)
    judged = dict(JUDGED=not with_logprobs, ADJUSTED=adjusted is not None)
    launch(_decide, (B,), *decided, warps=1, **sizes, **judged)
    return ids, logprobs


def next_tokens(num: Numerics, logits: Tensor, adjusted: Tensor | None, filters: dict[str, Tensor] | None) -> Tensor:
    """Ids int64 [B] by ``adjusted`` logits (None: the logits), greedy without ``filters``; negative: why none."""
    if filters is None:
        return _argmax(logits, adjusted)
    return _drawn(logits, adjusted, TARGET, False, filters)[0]


def draft_sample(
    num: Numerics,
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    coupled: bool,
) -> tuple[Tensor, Tensor]:
    """(draft ids int64 [B], the log-distribution f32 [B, V] they were drawn from) for the drafter's logits [B, V]."""
    filters = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, position=position)
    ids, logprobs = _drawn(logits, None, TARGET if coupled else DRAFT, True, filters)
    assert logprobs is not None
    return ids, logprobs
