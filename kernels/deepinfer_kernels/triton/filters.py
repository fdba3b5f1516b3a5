"""What top-k, top-p and min-p keep of a row: the lowest logit that is kept, and the last id among its equals.

Top-k: the best k tokens are in the k groups of neighbours with the highest maxima, the first among equals. Programs
over parts of a row leave the maxima, one program lists the tokens of those groups and finds the k-th best by its bits.

Top-p: tokens fall into sixteen bins, by whole units of logit / temperature below the best. Programs over parts leave
the mass and the number of tokens of each bin, with weights relative to the best of the part; then they list the tokens
of the bin in which the mass is reached, and one program finds the token, four bits of its logit at a time. All sums are
f64 and in one order for all rows: that of parts, then that of ids.

Example, 8 tokens at temperature 1, top-p 0.9: weights [1 1 .5 .2 .1 .1 .05 .05] have the mass 3, of which 2.7 is
reached at the fourth: bins 0 and 1 hold [1 1 .5] and [.2], so bin 1 is listed, and .2 is the lowest weight kept.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportOptionalOperand=false
# pyright: reportAssignmentType=false, reportOptionalSubscript=false

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_kernels.triton.noise import score
from deepinfer_kernels.triton.precise import exp, log, quotient
from deepinfer_kernels.triton.select import kth_best, number
from deepinfer_kernels.triton.vocabulary import INFINITE, LAST, LOWEST, part_of, value, whole

#: tokens of a group of which top-k reads the maximum
GROUP = tl.constexpr(32)
#: most listed tokens that are drawn by the program that lists them
_FEW = tl.constexpr(4096)


@triton.jit
def kinds(TEMPERATURE, TOP_K, TOP_P, MIN_P, row, V: tl.constexpr):
    """(temperature, top-k or 0 without, top-p, min-p) of a row."""
    top_k = tl.load(TOP_K + row)
    top_k = tl.where(top_k < V, top_k, 0).to(tl.int32)
    return tl.load(TEMPERATURE + row), top_k, tl.load(TOP_P + row), tl.load(MIN_P + row)


@triton.jit
def _of_bin(weight, bin, b: tl.constexpr, THREADS: tl.constexpr):
    """Sums [THREADS] of the weights [n/4, 4] of a bin."""
    mine = tl.where(bin == b, weight, 0.0)
    return tl.sum(tl.sum(tl.reshape(mine, (mine.shape[0] // THREADS, THREADS, 4)), 2), 0)


@triton.jit
def _of_two(weight, bin, b: tl.constexpr, THREADS: tl.constexpr):
    return tl.join(_of_bin(weight, bin, b, THREADS), _of_bin(weight, bin, b + 8, THREADS))


@triton.jit
def _of_four(weight, bin, b: tl.constexpr, THREADS: tl.constexpr):
    return tl.join(_of_two(weight, bin, b, THREADS), _of_two(weight, bin, b + 4, THREADS))


@triton.jit
def _of_eight(weight, bin, b: tl.constexpr, THREADS: tl.constexpr):
    return tl.join(_of_four(weight, bin, b, THREADS), _of_four(weight, bin, b + 2, THREADS))


@triton.jit
def sixteen_sums(weight, bin, THREADS: tl.constexpr):
    """Sums [16] of the weights f64 [n/4, 4] of bins 0 to 15, first within a thread, then over threads."""
    sums = tl.join(_of_eight(weight, bin, 0, THREADS), _of_eight(weight, bin, 1, THREADS))
    return tl.sum(tl.reshape(sums, (THREADS, 16)), 0)


@triton.jit
def _over(x, temperature):
    """x / temperature in f64."""
    scale = temperature.to(tl.float64)
    return quotient(x.to(tl.float64), scale, 1.0 / scale)


@triton.jit
def _units(top, y):
    """Whole units by which y lies below top, up to 15: the bin of a token."""
    return tl.minimum(tl.floor(top) - tl.floor(y), 15.0).to(tl.int32)


@triton.jit
def weigh_part(MASSES, COUNTS, row, part, PARTS: tl.constexpr, EACH: tl.constexpr, x, kept, best, temperature):
    """MASSES, COUNTS [row, part, 16]: of bins by distance from the best of the part."""
    top = _over(value(best), temperature)
    y = tl.where(kept, _over(x, temperature), top)
    weight, bin = tl.where(kept, exp(y - top), 0.0), _units(top, y)
    threads: tl.constexpr = 256 if EACH >= 1024 else EACH // 4
    to = (row * PARTS + part) * 16 + tl.arange(0, 16)
    tl.store(MASSES + to, sixteen_sums(weight, bin, threads))
    flat = tl.reshape(tl.where(kept, bin, -1), (EACH,), can_reorder=True)
    tl.store(COUNTS + to, tl.histogram(tl.maximum(flat, 0), 16, mask=flat >= 0))


@triton.jit
def group_part(GROUPS, row, part, PARTS: tl.constexpr, EACH: tl.constexpr, key):
    """GROUPS [row, group]: numbers of the best of the groups of a part."""
    best = tl.max(tl.reshape(tl.max(key, 1), (EACH // GROUP, GROUP // 4)), 1)
    tl.store(GROUPS + row * (PARTS * EACH // GROUP) + part * (EACH // GROUP) + tl.arange(0, EACH // GROUP), best)


@triton.jit
def _ends(best, top, temperature, bin):
    """[lowest, highest] number of a bin, by bisecting numbers."""
    end = tl.arange(0, 2)
    low = tl.full((2,), 0, tl.int64) + (LOWEST + 1)
    high = tl.full((2,), 1, tl.int64) + best
    for _ in range(33):  # the first number of the bin, and of the bin above it
        middle = (low + high) >> 1
        open = low < high
        reaches = _units(top, _over(value(middle.to(tl.int32)), temperature)) <= bin - end
        high = tl.where(open & reaches, middle, high)
        low = tl.where(open & (reaches == 0), middle + 1, low)
    return (low - end).to(tl.int32)


@triton.jit
def find_bin(
    FOUND, TEMPERATURE, TOP_K, TOP_P, MIN_P, MASSES, COUNTS, TOTAL, LISTED, BEFORE, V: tl.constexpr,
    PARTS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """TOTAL [row, 3] of a row without top-k: mass of all, mass that top-p reaches, mass of the bins before that one.

    LISTED [row, 3]: lowest and highest number of that bin, tokens of it, where top-p has to find one of them; BEFORE
    [row, part]: those of parts before. ``WHOLE``: rows without filters have their mass too.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, min_p = kinds(TEMPERATURE, TOP_K, TOP_P, MIN_P, row, V)
    limited = (top_p < 1.0) | (min_p > 0.0)
    if WHOLE:
        limited = top_p >= 0.0
    bin16 = tl.arange(0, 16)
    ends = tl.where(tl.arange(0, 2) == 0, LAST, LOWEST)
    if (temperature > 0.0) & (top_k == 0) & limited:
        p = tl.arange(0, triton.next_power_of_2(PARTS))
        own = tl.load(FOUND + (row * PARTS + p) * 3, mask=p < PARTS, other=LOWEST)
        best = tl.max(own, 0)
        if (best > LOWEST) & (best < INFINITE):
            there = own > LOWEST
            top = _over(value(best), temperature)
            own_top = tl.where(there, _over(value(tl.where(there, own, best)), temperature), top)
            at = (row * PARTS + p[:, None]) * 16 + bin16[None, :]
            masses = tl.load(MASSES + at, mask=there[:, None], other=0.0) * exp(own_top - top)[:, None]
            counts = tl.load(COUNTS + at, mask=there[:, None], other=0)
            bin = tl.minimum(_units(top, own_top)[:, None] + bin16[None, :], 15)
            upto = bin[:, :, None] <= bin16[None, None, :]
            within = tl.sum(tl.sum(tl.where(upto, masses[:, :, None], 0.0), 1), 0)
            mass = tl.max(within, 0)
            limit = top_p.to(tl.float64) * mass
            chosen = tl.minimum(tl.sum((within < limit).to(tl.int32), 0), 15)
            tokens = tl.sum(tl.where(bin == chosen, counts, 0), 1)
            tl.store(TOTAL + row * 3, mass)
            tl.store(TOTAL + row * 3 + 1, limit)
            tl.store(TOTAL + row * 3 + 2, tl.sum(tl.where(bin16 == chosen - 1, within, 0.0), 0))
            if top_p < 1.0:
                ends = _ends(best, top, temperature, chosen)
                tl.store(LISTED + row * 3 + 2, tl.sum(tokens, 0))
                tl.store(BEFORE + row * PARTS + p, tl.cumsum(tokens, 0) - tokens, mask=p < PARTS)
    tl.store(LISTED + row * 3 + tl.arange(0, 2), ends)


@triton.jit
def list_bin(LOGITS, LISTED, BEFORE, KEYS, IDS, V: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr):
    """KEYS, IDS [row, V]: the tokens of the bin in which the mass of a row is reached, in their order."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lowest, highest = tl.load(LISTED + row * 3), tl.load(LISTED + row * 3 + 1)
    if lowest <= highest:
        j, _, key = part_of(LOGITS, row, part, V, EACH)
        mine = (key >= lowest) & (key <= highest) & (j < V)
        four = tl.sum(mine.to(tl.int32), 1)
        before = tl.load(BEFORE + row * PARTS + part) + tl.cumsum(four, 0) - four
        place = before[:, None] + tl.cumsum(mine.to(tl.int32), 1) - 1
        tl.store(KEYS + row * V + place, key, mask=mine)
        tl.store(IDS + row * V + place, j, mask=mine)


@triton.jit
def list_groups(
    LOGITS, GROUPS, CHOSEN, KEYS, IDS, row, V: tl.constexpr, G: tl.constexpr, top_k, above, ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """KEYS, IDS [row, ROOM]: tokens of the best top_k groups, as good as the worst best of these; returns how many.

    Those with numbers over ``above``, and no NaN.
    """
    each: tl.constexpr = min(BLOCK, triton.next_power_of_2(G))
    kth, room = tl.full((), -0x80000000, tl.int32), tl.full((), 0, tl.int32)
    if top_k < G:
        kth, room = kth_best(GROUPS, row, G, top_k, True, each)
    taken, equals = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for start in range(0, G, each):
        g = start + tl.arange(0, each)
        key = tl.load(GROUPS + row * G + g, mask=g < G, other=-0x80000000)
        equal = (key == kth) & (g < G)
        nth = equals + tl.cumsum(equal.to(tl.int32), 0)
        chosen = (key > kth) | (equal & (nth <= room))
        place = taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(CHOSEN + row * G + place, g, mask=chosen)
        taken += tl.sum(chosen.to(tl.int32), 0)
        equals += tl.sum(equal.to(tl.int32), 0)
    tl.debug_barrier()
    count = tl.full((), 0, tl.int32)
    for start in range(0, taken * GROUP, BLOCK):
        i = start + tl.arange(0, BLOCK)
        g = tl.load(CHOSEN + row * G + i // GROUP, mask=i < taken * GROUP, other=V)
        j = g * GROUP + i % GROUP
        key = number(tl.load(LOGITS + row * V + j, mask=j < V, other=float("-inf")))
        mine = (key >= kth) & (key > above) & (key < LAST) & (j < V)
        place = count + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(KEYS + row * ROOM + place, key, mask=mine)
        tl.store(IDS + row * ROOM + place, j, mask=mine)
        count += tl.sum(mine.to(tl.int32), 0)
    tl.debug_barrier()
    return count


@triton.jit
def _nth_equal(KEYS, IDS, row, V: tl.constexpr, count, lowest, room, BLOCK: tl.constexpr):
    """Id of the ``room``-th listed token whose number is ``lowest``, or of the last."""
    seen, last = tl.full((), 0, tl.int32), tl.full((), -1, tl.int32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        equal = (tl.load(KEYS + row * V + i, mask=i < count, other=0) == lowest) & (i < count)
        nth = seen + tl.cumsum(equal.to(tl.int32), 0)
        id = tl.load(IDS + row * V + i, mask=equal, other=-1)
        last = tl.maximum(last, tl.max(tl.where(nth <= room, id, -1), 0))
        seen += tl.sum(equal.to(tl.int32), 0)
    return last


@triton.jit
def _listed(KEYS, IDS, row, V: tl.constexpr, i, count, lowest, last):
    """(number, id, whether kept) of items of a list."""
    key = tl.load(KEYS + row * V + i, mask=i < count, other=LOWEST)
    id = tl.load(IDS + row * V + i, mask=i < count, other=0)
    return key, id, ((key > lowest) | ((key == lowest) & (id <= last))) & (i < count)


@triton.jit
def _mass(KEYS, IDS, WEIGHTS, row, V: tl.constexpr, count, lowest, last, scale, inverse, top, BLOCK: tl.constexpr):
    """Sum of the weights of the listed tokens that are kept; WEIGHTS takes them, where given."""
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        key, _, kept = _listed(KEYS, IDS, row, V, i, count, lowest, last)
        weight = tl.where(kept, exp(quotient(value(key).to(tl.float64), scale, inverse) - top), 0.0)
        if WEIGHTS is not None:
            tl.store(WEIGHTS + row * V + i, weight, mask=i < count)
        total += weight
    return tl.sum(total, 0)


@triton.jit
def _reached(KEYS, IDS, WEIGHTS, row, V: tl.constexpr, count, base, limit, BLOCK: tl.constexpr):
    """(lowest, last) with the mass before the last token kept below ``limit``, ``base`` of it before all listed."""
    high, low = tl.full((), LOWEST, tl.int32), tl.full((), LAST, tl.int32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        key = tl.load(KEYS + row * V + i, mask=i < count, other=LOWEST)
        high = tl.maximum(high, tl.max(key, 0))
        low = tl.minimum(low, tl.min(tl.where(i < count, key, LAST), 0))
    high, low = high.to(tl.int64), low.to(tl.int64)
    b = tl.arange(0, 16)
    threads: tl.constexpr = 512 if BLOCK >= 2048 else BLOCK // 4
    while low < high:
        shift = tl.full((), 0, tl.int64)
        while ((high - low) >> shift) > 15:
            shift += 1
        sums = tl.zeros((16,), dtype=tl.float64)
        for start in range(0, count, BLOCK):
            i = start + tl.arange(0, BLOCK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
            key = tl.load(KEYS + row * V + i, mask=i < count, other=LAST)
            weight = tl.load(WEIGHTS + row * V + i, mask=i < count, other=0.0)
            bin = tl.where(i < count, tl.minimum((high - key) >> shift, 16), -1).to(tl.int32)
            sums += sixteen_sums(weight, bin, threads)
        upto = base + tl.cumsum(sums, 0)
        chosen = tl.minimum(tl.sum((upto < limit).to(tl.int32), 0), ((high - low) >> shift).to(tl.int32))
        base = tl.max(tl.where(b == chosen - 1, upto, base), 0)
        high = high - (chosen.to(tl.int64) << shift)
        low = tl.maximum(low, high - (tl.full((), 1, tl.int64) << shift) + 1)
    lowest = high.to(tl.int32)
    each = tl.full((), 0.0, tl.float64)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        key = tl.load(KEYS + row * V + i, mask=i < count, other=LOWEST)
        each = tl.maximum(each, tl.max(tl.load(WEIGHTS + row * V + i, mask=key == lowest, other=0.0), 0))
    # of equal tokens those whose predecessors leave mass below the limit, and the first in any case
    room = tl.minimum((limit - base) / tl.maximum(each, 1e-300), 1e9)
    least = tl.floor(room)
    room = tl.maximum(least.to(tl.int32) + (least < room).to(tl.int32), 1)
    return lowest, _nth_equal(KEYS, IDS, row, V, count, lowest, room, BLOCK)


@triton.jit
def _least(floor, best, scale, top, mass, min_p):
    """The lowest number of at least ``floor`` whose probability is min_p of the best's."""
    low, high = tl.maximum(floor, LOWEST + 1).to(tl.int64), best.to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        weight = exp(value(middle.to(tl.int32)).to(tl.float64) / scale - top)
        enough = weight / mass >= min_p * (1.0 / mass)
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return high.to(tl.int32)


@triton.jit
def _drawn(
    KEYS, IDS, row, V: tl.constexpr, count, lowest, last, scale, top, shift, seed, position, stream,
    ROUNDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Id of the best score of the listed tokens that are kept."""
    best = tl.full((), float("-inf"), tl.float64)
    won = tl.full((), -1, tl.int32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        key, id, kept = _listed(KEYS, IDS, row, V, i, count, lowest, last)
        found = score(value(key), id, scale, top, shift, seed, position, stream, ROUNDED)
        found = tl.where(kept, found, float("-inf"))
        most = tl.max(found, 0)
        first = tl.min(tl.where(kept & (found == most), id, LAST), 0)
        won = tl.where(most > best, first, won)
        best = tl.maximum(most, best)
    return won


@triton.jit
def _row_mass(LOGITS, row, V: tl.constexpr, lowest, last, scale, top, BLOCK: tl.constexpr):
    """Sum of the weights of all tokens of a row that are kept."""
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, V, BLOCK):
        j = start + tl.arange(0, BLOCK)
        x = tl.load(LOGITS + row * V + j, mask=j < V, other=float("-inf"))
        key = number(x)
        kept = ((key > lowest) | ((key == lowest) & (j <= last))) & (key > LOWEST) & (j < V)
        total += tl.where(kept, exp(tl.where(kept, x.to(tl.float64) / scale, top) - top), 0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["stream"])
def filter_row(
    LOGITS, FOUND, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, POSITION, GROUPS, CHOSEN, TOTAL, LISTED, KEYS, IDS, WEIGHTS,
    STATE, MASS, WINNER, stream, V: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """STATE [row]: id of the best, its number, whether raw logits are finite, lowest number kept, last of its equals,
    whether it is drawn: WINNER [row, part] has the id then, and −1 for other parts.

    MASS [row], where wanted: log of the mass kept, of which the best has 1. Nothing is drawn without WINNER.
    """
    row = tl.program_id(0).to(tl.int64)
    best, id, finite = whole(FOUND, row, PARTS)
    temperature, top_k, top_p, min_p = kinds(TEMPERATURE, TOP_K, TOP_P, MIN_P, row, V)
    lowest, last, drawn = tl.full((), LOWEST, tl.int32), tl.full((), LAST, tl.int32), tl.full((), 0, tl.int32)
    mass = tl.full((), 1.0, tl.float64)
    wanted = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    if MASS is not None:
        wanted = top_p >= 0.0
    if (temperature > 0.0) & wanted & (best > LOWEST) & (best < INFINITE):
        scale = temperature.to(tl.float64)
        inverse = 1.0 / scale
        top = quotient(value(best).to(tl.float64), scale, inverse)
        base, limit = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
        count = tl.full((), 0, tl.int32)
        if top_k > 0:
            groups: tl.constexpr = PARTS * (EACH // GROUP)
            count = list_groups(LOGITS, GROUPS, CHOSEN, KEYS, IDS, row, V, groups, top_k, LOWEST, V, BLOCK)
            if count > top_k:
                lowest, room = kth_best(KEYS + row * (V - count), row, count, top_k, True, BLOCK)
                last = _nth_equal(KEYS, IDS, row, V, count, lowest, room, BLOCK)
        else:
            mass, limit, base = tl.load(TOTAL + row * 3), tl.load(TOTAL + row * 3 + 1), tl.load(TOTAL + row * 3 + 2)
            count = tl.where(top_p < 1.0, tl.load(LISTED + row * 3 + 2), 0)
        floor, end = lowest, last
        if count > 0:
            within = _mass(KEYS, IDS, WEIGHTS, row, V, count, lowest, last, scale, inverse, top, WIDE)
            tl.debug_barrier()
            if top_k > 0:
                mass, limit = within, top_p.to(tl.float64) * within
            if top_p < 1.0:
                lowest, last = _reached(KEYS, IDS, WEIGHTS, row, V, count, base, limit, BLOCK)
                last = tl.where(lowest == floor, tl.minimum(last, end), last)
        if min_p > 0.0:
            least = _least(floor, best, scale, top, mass, min_p.to(tl.float64))
            last = tl.where(least > lowest, LAST, last)
            lowest = tl.maximum(lowest, least)
        shift = tl.full((), 0.0, tl.float64)
        if MASS is not None:
            if count > 0:
                mass = base + _mass(KEYS, IDS, None, row, V, count, lowest, last, scale, inverse, top, WIDE)
            if (min_p > 0.0) & (top_k == 0):
                mass = _row_mass(LOGITS, row, V, lowest, last, scale, top, WIDE)
            shift = log(mass)
        if WINNER is not None:
            few = (top_k > 0) & (count <= _FEW)
            if few:
                seed, position = tl.load(SEED + row), tl.load(POSITION + row)
                won = _drawn(
                    KEYS,
                    IDS,
                    row,
                    V,
                    count,
                    lowest,
                    last,
                    scale,
                    top,
                    shift,
                    seed,
                    position,
                    stream,
                    MASS is not None,
                    WIDE,
                )
                i = tl.arange(0, triton.next_power_of_2(PARTS))
                tl.store(WINNER + row * PARTS + i, tl.where(i == 0, won, -1), mask=i < PARTS)
                drawn = tl.full((), 1, tl.int32)
    to = STATE + 6 * row
    tl.store(to, id)
    tl.store(to + 1, best)
    tl.store(to + 2, finite)
    tl.store(to + 3, lowest)
    tl.store(to + 4, last)
    tl.store(to + 5, drawn)
    if MASS is not None:
        tl.store(MASS + row, log(mass))
