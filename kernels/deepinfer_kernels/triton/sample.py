"""Drawing: greedy ids, or the Gumbel-max rule over filtered logits with keyed noise.

A program reads a part of a row, and what parts found is put together in their order; parts follow from V alone, so a
row draws the same in any batch. Rows without filters draw in the same pass that finds their best. For others it finds
what filters.py needs, and parts of a row with top-p draw once more when the filters are known. A launch returns early
for rows that do not need it. Noise and scores are estimated in f32, and computed in f64 for tokens whose estimates are
too close to tell; probabilities and sums are f64.

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
from deepinfer_kernels.triton.filters import GROUP, filter_row, find_bin, group_part, kinds, list_bin, weigh_part
from deepinfer_kernels.triton.launch import blocks, contiguous, launch
from deepinfer_kernels.triton.noise import noise_about, one_of_four, philox, score
from deepinfer_kernels.triton.precise import quotient
from deepinfer_kernels.triton.vocabulary import INFINITE, LAST, LOWEST, keep, look, part_of, part_size, value, whole

#: listed tokens of a step of the program that filters a row, and of a step that takes exponents or noise of them
_LIST, _WIDE = 4096, 1024
_NON_FINITE, _NOTHING = tl.constexpr(NON_FINITE), tl.constexpr(NOTHING_ALLOWED)
#: estimated scores further apart are ordered like the scores: noise is off by 5e-6, distances up to the 20.2 of noise
#: by 5e-6, the rounding of a log-probability by 2e-6
_APART = tl.constexpr(1e-4)


@triton.jit
def _judged(id, best, finite, ADJUSTED: tl.constexpr):
    """The id, or why there is none."""
    if ADJUSTED:
        id = tl.where(best > LOWEST, id, _NOTHING)
    return tl.where(finite != 0, id, _NON_FINITE).to(tl.int64)


@triton.jit
def _greedy(
    LOGITS, RAW, FOUND, IDS, V: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr, ADJUSTED: tl.constexpr
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, _, _, best, id, finite = look(LOGITS, RAW, row, part, V, EACH)
    if PARTS == 1:
        tl.store(IDS + row, _judged(id, best, finite, ADJUSTED))
    else:
        keep(FOUND, row, part, PARTS, best, id, finite)


@triton.jit
def _greedy_whole(FOUND, IDS, PARTS: tl.constexpr, ADJUSTED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    best, id, finite = whole(FOUND, row, PARTS)
    tl.store(IDS + row, _judged(id, best, finite, ADJUSTED))


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
    if (nearest > LOWEST) & (nearest < INFINITE):
        words = philox(seed, position, stream, part * (EACH // 4) + tl.arange(0, EACH // 4))
        wide = words[0][:, None], words[1][:, None], words[2][:, None], words[3][:, None]
        word = one_of_four(wide, tl.arange(0, 4)[None, :])
        inverse = tl.minimum(1.0 / temperature, 3e38)
        about = tl.where(kept, (x - value(nearest)) * inverse + noise_about(word), float("-inf"))
        close = about >= tl.max(tl.max(about, 1), 0) - _APART
        won = tl.min(tl.min(tl.where(close, j, LAST), 1), 0)
        count = tl.sum(tl.sum(close.to(tl.int32), 1), 0)
        if count > 1:
            scale = temperature.to(tl.float64)
            at = won
            best = score(tl.load(LOGITS + row * V + at), at, scale, top, shift, seed, position, stream, ROUNDED)
            for _ in range(1, count):
                at = tl.min(tl.min(tl.where(close & (j > at), j, LAST), 1), 0)
                other = score(tl.load(LOGITS + row * V + at), at, scale, top, shift, seed, position, stream, ROUNDED)
                won = tl.where(other > best, at, won)
                best = tl.maximum(other, best)
    return won


@triton.jit(do_not_specialize=["stream"])
def _begin(
    LOGITS, RAW, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, POSITION, FOUND, MASSES, COUNTS, GROUPS, WINNER, stream,
    V: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """The best of a part, and what its filters need; else its winner, if ``DRAWS``."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j, x, key, best, id, finite = look(LOGITS, RAW, row, part, V, EACH)
    keep(FOUND, row, part, PARTS, best, id, finite)
    temperature, top_k, top_p, min_p = kinds(TEMPERATURE, TOP_K, TOP_P, MIN_P, row, V)
    if temperature > 0.0:
        kept = (key > LOWEST) & (j < V)
        limited = (top_p < 1.0) | (min_p > 0.0)
        if not DRAWS:
            limited = top_p >= 0.0
        if top_k > 0:
            group_part(GROUPS, row, part, PARTS, EACH, key)
        elif limited:
            weigh_part(MASSES, COUNTS, row, part, PARTS, EACH, x, kept, best, temperature)
        elif DRAWS:
            top = value(best).to(tl.float64) / temperature.to(tl.float64)
            seed, position = tl.load(SEED + row), tl.load(POSITION + row)
            won = _winner(
                LOGITS, row, part, V, EACH, j, x, key, kept, temperature, top, 0.0, seed, position, stream, False
            )
            tl.store(WINNER + row * PARTS + part, won)


@triton.jit(do_not_specialize=["stream"])
def _draw(
    LOGITS, STATE, MASS, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, POSITION, WINNER, LOGPROB, stream, V: tl.constexpr,
    PARTS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """The winner of a part of a row with filters that is not drawn yet.

    LOGPROB takes the f32 log-distribution, of which every row is then drawn.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_k, top_p, min_p = kinds(TEMPERATURE, TOP_K, TOP_P, MIN_P, row, V)
    state = STATE + 6 * row
    open = (temperature > 0.0) & (tl.load(state + 5) == 0)
    wanted = open & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    if LOGPROB is not None:
        wanted = temperature >= 0.0
    if wanted:
        j, x, key = part_of(LOGITS, row, part, V, EACH)
        top_id, best, lowest, last = tl.load(state), tl.load(state + 1), tl.load(state + 3), tl.load(state + 4)
        kept = ((key > lowest) | ((key == lowest) & (j <= last))) & (key > LOWEST) & (j < V)
        scale = tl.where(temperature > 0.0, temperature, 1.0).to(tl.float64)
        top = value(best).to(tl.float64) / scale
        shift = tl.full((), 0.0, tl.float64)
        if LOGPROB is not None:
            shift = tl.load(MASS + row)
            logprob = ((quotient(x.to(tl.float64), scale, 1.0 / scale) - top) - shift).to(tl.float32)
            logprob = tl.where(temperature > 0.0, tl.where(kept, logprob, float("-inf")), float("-inf"))
            logprob = tl.where(j == tl.where(temperature > 0.0, -1, top_id), 0.0, logprob)
            tl.store(LOGPROB + row * V + j, logprob, mask=j < V)
        if open:
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
    temperature, state = tl.load(TEMPERATURE + row), STATE + 6 * row
    id, best_key = tl.load(state), tl.load(state + 1)
    if temperature > 0.0:
        i = tl.arange(0, triton.next_power_of_2(PARTS))
        won = tl.load(WINNER + row * PARTS + i, mask=i < PARTS, other=-1)
        scale = temperature.to(tl.float64)
        top, shift = value(best_key).to(tl.float64) / scale, tl.full((), 0.0, tl.float64)
        if MASS is not None:
            shift = tl.load(MASS + row)
        x = tl.load(LOGITS + row * V + won, mask=won >= 0, other=float("-inf"))
        found = score(x, won, scale, top, shift, tl.load(SEED + row), tl.load(POSITION + row), stream, MASS is not None)
        found = tl.where(won >= 0, found, float("-inf"))
        drawn = tl.min(tl.where((found == tl.max(found, 0)) & (won >= 0), won, LAST), 0)
        id = tl.where(drawn < LAST, drawn, id)
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


def _argmax(logits: Tensor, adjusted: Tensor | None) -> Tensor:
    logits, raw = _checked(logits, adjusted)
    (B, V), device = logits.shape, logits.device
    parts, ids = blocks(V, part_size(V)), empty(B, dtype=int64, device=device)
    found = empty((B, parts, 3), dtype=int32, device=device)
    sizes = dict(PARTS=parts, EACH=part_size(V), ADJUSTED=adjusted is not None)
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
    each = part_size(V)
    parts = blocks(V, each)

    def ints(*shape: int) -> Tensor:
        return empty((B, *shape), dtype=int32, device=device)

    def doubles(*shape: int) -> Tensor:
        return empty((B, *shape), dtype=float64, device=device)

    found, winner, state = ints(parts, 3), ints(parts), ints(6)
    masses, counts, total, listed, before = doubles(parts, 16), ints(parts, 16), doubles(3), ints(3), ints(parts)
    groups, chosen = ints(parts * each // GROUP.value), ints(parts * each // GROUP.value)
    keys_listed, ids_listed, weights = ints(V), ints(V), doubles(V)
    mass = doubles() if with_logprobs else None
    logprobs = empty((B, V), dtype=float32, device=device) if with_logprobs else None
    sizes = dict(V=V, PARTS=parts, EACH=each)
    begun = (logits, raw, *limits, *keys, found, masses, counts, groups, winner, stream)
    launch(_begin, (B, parts), *begun, warps=8, **sizes, DRAWS=not with_logprobs)
    bins = (found, *limits, masses, counts, total, listed, before)
    launch(find_bin, (B,), *bins, V=V, PARTS=parts, WHOLE=with_logprobs)
    launch(list_bin, (B, parts), logits, listed, before, keys_listed, ids_listed, warps=8, **sizes)
    filtered = (groups, chosen, total, listed, keys_listed, ids_listed, weights, state, mass, winner, stream)
    launch(filter_row, (B,), logits, found, *limits, *keys, *filtered, warps=16, **sizes, BLOCK=_LIST, WIDE=_WIDE)
    drawn = (logits, state, mass, *limits, *keys, winner, logprobs, stream)
    launch(_draw, (B, parts), *drawn, warps=8, **sizes)
    ids = empty(B, dtype=int64, device=device)
    decided = (logits, state, mass, limits[0], *keys, winner, ids, stream)
    judged = dict(JUDGED=not with_logprobs, ADJUSTED=adjusted is not None)
    launch(_decide, (B,), *decided, warps=1, V=V, PARTS=parts, **judged)
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
