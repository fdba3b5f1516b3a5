"""Drawing: greedy ids, or the Gumbel-max rule over filtered logits with keyed noise.

What the filters keep of a row is the front of its ranking, so it is two numbers: the lowest logit that is kept, and the
last id among its equals. A program per row finds them: top-k by the bits of the logits, min-p by bisecting the logits,
top-p by the mass of sixteen parts of the row by distance from its best, then by bisecting the part in which the mass is
reached. Then a program for each eighth of a row draws: noise is computed only where a token can still win, because it
never exceeds 17.33. Probabilities, noise and sums are f64.

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
from deepinfer_kernels.triton.launch import contiguous, launch, power_of_two
from deepinfer_kernels.triton.precise import exp, log
from deepinfer_kernels.triton.select import kth_best, number

#: tokens of a step: of a program over a row, of its sums of sixteen parts, of one that draws; programs that draw a row
_ROW, _WIDE, _DRAW, _PARTS = 2048, 1024, 1024, 8
#: tokens of a program of a greedy draw: one launch where they are all, else two
_GREEDY = 16384
#: −log(−log(1 − 2^-25)) = 17.3287
_MOST_NOISE = tl.constexpr(17.33)
_LOWEST, _INFINITE, _LAST = tl.constexpr(-0x7F800001), tl.constexpr(0x7F800000), tl.constexpr(0x7FFFFFFF)
_NON_FINITE, _NOTHING = tl.constexpr(NON_FINITE), tl.constexpr(NOTHING_ALLOWED)


@triton.jit
def _value(key):
    """The f32 of a number."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best(LOGITS, RAW, row, begin, end, V: tl.constexpr, BLOCK: tl.constexpr):
    """(number of the largest logit of a part of a row, its lowest id, whether all raw logits of it are finite)."""
    top = tl.full((BLOCK,), -0x80000000, tl.int32)
    where = tl.zeros((BLOCK,), dtype=tl.int32)
    wrong = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(begin, end, BLOCK):
        j = start + tl.arange(0, BLOCK)
        key = number(tl.load(LOGITS + row * V + j, mask=j < end, other=float("-inf")))
        better = (key > top) & (j < end)
        top = tl.where(better, key, top)
        where = tl.where(better, j, where)
        if RAW is not None:
            raw = number(tl.load(RAW + row * V + j, mask=j < end, other=0.0))
            wrong = wrong | ((raw >= _INFINITE) | (raw <= _LOWEST)).to(tl.int32)
    best = tl.max(top, 0)
    return best, tl.min(tl.where(top == best, where, _LAST), 0), tl.max(wrong, 0) == 0


@triton.jit
def _judged(id, best, finite, ADJUSTED: tl.constexpr):
    """The id, or why there is none."""
    if ADJUSTED:
        id = tl.where(best > _LOWEST, id, _NOTHING)
    return tl.where(finite, id, _NON_FINITE)


@triton.jit
def _greedy(LOGITS, RAW, IDS, V: tl.constexpr, ADJUSTED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    best, id, finite = _best(LOGITS, RAW, row, 0, V, V, BLOCK)
    if RAW is not None:
        id = _judged(id, best, finite, ADJUSTED)
    tl.store(IDS + row, id.to(tl.int64))


@triton.jit
def _greedy_part(LOGITS, RAW, FOUND, V: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """FOUND [row, part]: the number of the best, its id, whether raw logits are finite, of ``EACH`` tokens."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best, id, finite = _best(LOGITS, RAW, row, part * EACH, tl.minimum(part * EACH + EACH, V), V, BLOCK)
    to = FOUND + (row * tl.num_programs(1) + part) * 3
    tl.store(to, best)
    tl.store(to + 1, id)
    tl.store(to + 2, finite.to(tl.int32))


@triton.jit
def _greedy_whole(FOUND, IDS, PARTS: tl.constexpr, BP: tl.constexpr, JUDGED: tl.constexpr, ADJUSTED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BP)
    at, mask = FOUND + (row * PARTS + i) * 3, i < PARTS
    key = tl.load(at, mask=mask, other=-0x80000000)
    best = tl.max(key, 0)
    id = tl.min(tl.where((key == best) & mask, tl.load(at + 1, mask=mask, other=0), _LAST), 0)
    if JUDGED:
        id = _judged(id, best, tl.min(tl.load(at + 2, mask=mask, other=1), 0) != 0, ADJUSTED)
    tl.store(IDS + row, id.to(tl.int64))


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
    LOGITS, RAW, TEMPERATURE, TOP_K, TOP_P, MIN_P, STATE, MASS, WEIGHT, ITEM, V: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """STATE [row]: id of the best, its number, whether raw logits are finite, lowest number kept, last of its equals.

    MASS [row], where wanted: log of the mass kept, of which the best has 1. WEIGHT, ITEM [row, V]: room to work in.
    """
    row = tl.program_id(0).to(tl.int64)
    best, id, finite = _best(LOGITS, RAW, row, 0, V, V, BLOCK)
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
    tl.store(to + 2, finite.to(tl.int32))
    tl.store(to + 3, lowest)
    tl.store(to + 4, last)
    if MASS is not None:
        tl.store(MASS + row, log(mass))


@triton.jit
def _philox(key, position, stream, block):
    """Four words u32 of Philox4x32-10 at (position, stream << 24, block, 0) by a 64-bit key."""
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    c0 = tl.zeros_like(block).to(tl.uint32) + position.to(tl.uint32)
    c1 = tl.zeros_like(c0) + (stream << 24).to(tl.uint32)
    c2 = block.to(tl.uint32)
    c3 = tl.zeros_like(c0)
    for _ in tl.static_range(10):
        wide0 = c0.to(tl.uint64) * 0xD2511F53
        wide1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (wide1 >> 32).to(tl.uint32) ^ c1 ^ k0,
            wide1.to(tl.uint32),
            (wide0 >> 32).to(tl.uint32) ^ c3 ^ k1,
            wide0.to(tl.uint32),
        )
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _noise(word):
    """Gumbel noise f64 of a word: 24-bit midpoints, so that neither end of (0, 1) is reached."""
    u = ((word >> 8).to(tl.float64) + 0.5) * 5.9604644775390625e-08
    return -log(-log(u))


@triton.jit
def _better(best, best_id, score, id):
    """The larger score of two and its id, the lower id of equal ones."""
    wins = (score > best) | ((score == best) & (id < best_id))
    return tl.where(wins, score, best), tl.where(wins, id, best_id)


@triton.jit(do_not_specialize=["stream"])
def _draw(
    LOGITS, STATE, MASS, TEMPERATURE, SEED, POSITION, SCORE, ID, LOGPROB, stream, V: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Best score and its id in one part of a row; LOGPROB takes the f32 log-distribution, of which it is then drawn."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    quarter = tl.arange(0, BLOCK // 4)
    temperature = tl.load(TEMPERATURE + row).to(tl.float64)
    seed, position = tl.load(SEED + row), tl.load(POSITION + row)
    state = STATE + 5 * row
    top_id, best_key, lowest, last = tl.load(state), tl.load(state + 1), tl.load(state + 3), tl.load(state + 4)
    greedy = temperature == 0.0
    scale = tl.where(greedy, 1.0, temperature)
    top = _value(best_key).to(tl.float64) / scale
    shift = tl.full((), 0.0, tl.float64)
    if MASS is not None:
        shift = tl.load(MASS + row)
    best = tl.full((BLOCK // 4,), float("-inf"), tl.float64)
    found = tl.full((BLOCK // 4,), 0x7FFFFFFF, tl.int32)
    each = (V + PARTS * BLOCK - 1) // (PARTS * BLOCK) * BLOCK
    for start in range(part * each, tl.minimum(part * each + each, V), BLOCK):
        blocks = start // 4 + quarter
        nearest = tl.full((BLOCK // 4,), -0x80000000, tl.int32)
        for w in tl.static_range(4):
            j = blocks * 4 + w
            x = tl.load(LOGITS + row * V + j, mask=j < V, other=float("-inf"))
            key = number(x)
            kept = ((key > lowest) | ((key == lowest) & (j <= last))) & (key > _LOWEST) & (j < V)
            nearest = tl.maximum(nearest, tl.where(kept, key, -0x80000000))
            if LOGPROB is not None:
                kept = tl.where(greedy, j == top_id, kept)
                value = tl.where(greedy, 0.0, (x.to(tl.float64) / scale - top) - shift)
                value = tl.where(kept, value, float("-inf"))
                tl.store(LOGPROB + row * V + j, value.to(tl.float32), mask=j < V)
        near = tl.max(nearest, 0)
        may_win = (_value(near).to(tl.float64) / scale - top) - shift + _MOST_NOISE >= tl.max(best, 0)
        if (near > _LOWEST) & may_win & (temperature > 0.0):
            words = _philox(seed, position, stream, blocks)
            for w in tl.static_range(4):
                j = blocks * 4 + w
                x = tl.load(LOGITS + row * V + j, mask=j < V, other=float("-inf"))
                key = number(x)
                kept = ((key > lowest) | ((key == lowest) & (j <= last))) & (key > _LOWEST) & (j < V)
                score = (x.to(tl.float64) / scale - top) - shift
                if LOGPROB is not None:
                    score = score.to(tl.float32).to(tl.float64)
                score = tl.where(kept, score + _noise(words[w]), float("-inf"))
                best, found = _better(best, found, score, j)
    winner = tl.max(best, 0)
    tl.store(SCORE + row * PARTS + part, winner)
    tl.store(ID + row * PARTS + part, tl.min(tl.where(best == winner, found, 0x7FFFFFFF), 0))


@triton.jit
def _decide(SCORE, ID, STATE, TEMPERATURE, IDS, PARTS: tl.constexpr, JUDGED: tl.constexpr, ADJUSTED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PARTS)
    score = tl.load(SCORE + row * PARTS + i)
    best = tl.max(score, 0)
    id = tl.min(tl.where(score == best, tl.load(ID + row * PARTS + i), 0x7FFFFFFF), 0)
    state = STATE + 5 * row
    greedy = (tl.load(TEMPERATURE + row) == 0.0) | (best == float("-inf"))
    id = tl.where(greedy, tl.load(state), id)
    if JUDGED:
        id = _judged(id, tl.load(state + 1), tl.load(state + 2) != 0, ADJUSTED)
    tl.store(IDS + row, id.to(tl.int64))


def _checked(logits: Tensor, raw: Tensor | None) -> tuple[Tensor, Tensor | None]:
    for t in (logits,) if raw is None else (logits, raw):
        if t.dtype is not float32 or t.dim() != 2 or t.shape != logits.shape or not t.shape[1]:
            raise ValueError(f"logits {tuple(t.shape)} {t.dtype}, expected float32 [rows, V] with V of 1 or more")
    return contiguous(logits), None if raw is None else contiguous(raw)


def _argmax(logits: Tensor, raw: Tensor | None, adjusted: bool) -> Tensor:
    logits, raw = _checked(logits, raw)
    B, V = logits.shape
    ids = empty(B, dtype=int64, device=logits.device)
    parts = -(-V // _GREEDY)
    if parts == 1:
        launch(_greedy, (B,), logits, raw, ids, warps=8, V=V, ADJUSTED=adjusted, BLOCK=4096)
        return ids
    found = empty((B, parts, 3), dtype=int32, device=logits.device)
    launch(_greedy_part, (B, parts), logits, raw, found, warps=8, V=V, EACH=_GREEDY, BLOCK=4096)
    sizes = dict(PARTS=parts, BP=power_of_two(parts), JUDGED=raw is not None, ADJUSTED=adjusted)
    launch(_greedy_whole, (B,), found, ids, warps=1, **sizes)
    return ids


def _drawn(
    logits: Tensor, raw: Tensor | None, adjusted: bool, stream: int, with_logprobs: bool, filters: dict[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    logits, raw = _checked(logits, raw)
    (B, V), device = logits.shape, logits.device
    kinds = dict(temperature=float32, top_k=int64, top_p=float32, min_p=float32, seed=int64, position=int64)
    for name, dtype in kinds.items():
        if filters[name].dtype is not dtype or filters[name].shape != (B,):
            raise ValueError(f"{name} {tuple(filters[name].shape)} {filters[name].dtype}, expected {dtype} ({B},)")
    temperature, top_k, top_p, min_p, seed, position = (contiguous(filters[name]) for name in kinds)
    state = empty((B, 5), dtype=int32, device=device)
    mass = empty(B, dtype=float64, device=device) if with_logprobs else None
    logprobs = empty((B, V), dtype=float32, device=device) if with_logprobs else None
    room = empty((B, V), dtype=float64, device=device), empty((B, V), dtype=int64, device=device)
    found = (logits, raw, temperature, top_k, top_p, min_p, state, mass, *room)
    launch(_filter, (B,), *found, warps=8, V=V, BLOCK=_ROW, WIDE=_WIDE)
    score = empty((B, _PARTS), dtype=float64, device=device)
    id = empty((B, _PARTS), dtype=int32, device=device)
    drawn = (logits, state, mass, temperature, seed, position, score, id, logprobs, stream)
    launch(_draw, (B, _PARTS), *drawn, V=V, PARTS=_PARTS, BLOCK=_DRAW)
    ids = empty(B, dtype=int64, device=device)
    decided = dict(PARTS=_PARTS, JUDGED=raw is not None, ADJUSTED=adjusted)
    launch(_decide, (B,), score, id, state, temperature, ids, warps=1, **decided)
    return ids, logprobs


def next_tokens(num: Numerics, logits: Tensor, adjusted: Tensor | None, filters: dict[str, Tensor] | None) -> Tensor:
    """Ids int64 [B] by ``adjusted`` logits (None: the logits), greedy without ``filters``; negative: why none."""
    used = logits if adjusted is None else adjusted
    if filters is None:
        return _argmax(used, logits, adjusted is not None)
    return _drawn(used, logits, adjusted is not None, TARGET, False, filters)[0]


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
    ids, logprobs = _drawn(logits, None, False, TARGET if coupled else DRAFT, True, filters)
    assert logprobs is not None
    return ids, logprobs
