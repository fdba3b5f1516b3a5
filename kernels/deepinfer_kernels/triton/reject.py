"""Acceptance by rejection: which drafts stand, and what is drawn where they end.

A program reads a part of a row, and what parts found is put together in their order; parts follow from V alone, so a
sequence is judged the same in any batch. Seven launches: what filters need of the parts of verify rows, and the mass of
the parts of the drafts' distributions; three that filter each row (``filters`` has them); which drafts stand; the best
score of each part of the row behind the last one that stands; and the best of those. Rows that are not under test are
skipped. Probabilities, noise and sums are f64.

A refused row is drawn from the positive part of p − q. Where nothing of it is left but rounding, p is drawn from
instead: a part computes that draw too, unless what is left in it alone shows that it is not needed.

Ids and lengths are those of the reference unless a coin and its bound, two scores, or a mass and its bound, agree to
about 1e-14 of themselves.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportOptionalOperand=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty, empty_like, float32, float64, int32, int64

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.reference.sample import ACCEPT, TARGET
from deepinfer_kernels.reference.speculate import _NO_RESIDUAL as NO_RESIDUAL
from deepinfer_kernels.reference.speculate import NO_TOKEN
from deepinfer_kernels.triton.filters import GROUP, filter_row, find_bin, group_part, kinds, list_bin, weigh_part
from deepinfer_kernels.triton.launch import blocks, contiguous, launch, power_of_two
from deepinfer_kernels.triton.noise import noise, one_of_four, philox
from deepinfer_kernels.triton.precise import exp, log, quotient
from deepinfer_kernels.triton.sample import _LIST, _WIDE
from deepinfer_kernels.triton.select import number
from deepinfer_kernels.triton.vocabulary import LAST, LOWEST, keep, look, part_size, value

#: tokens of a step of a program that draws
_STEP = 1024
#: −log(−log(1 − 2^-25)) = 17.3287
_MOST_NOISE = tl.constexpr(17.33)
_NO_TOKEN, _NO_RESIDUAL = tl.constexpr(NO_TOKEN), tl.constexpr(NO_RESIDUAL)
_TARGET, _ACCEPT = tl.constexpr(TARGET), tl.constexpr(ACCEPT)
#: arguments that may begin anywhere
_SMALL = ["FAILED", "DRAFTS", "FIRST", "LENGTH", "TEMPERATURE", "TOP_K", "TOP_P", "MIN_P", "SEED", "POSITION"]
#: what a row of the batch has
_PER_ROW = dict.fromkeys(("first", "length", "seed", "position", "top_k"), int64)
_PER_ROW |= dict.fromkeys(("temperature", "top_p", "min_p"), float32)


@triton.jit
def _owner(FIRST, t, B):
    """The sequence that a verify row belongs to, or follows."""
    before = tl.full((), 0, tl.int32)
    for start in range(0, B, 128):
        b = start + tl.arange(0, 128)
        before += tl.sum(((tl.load(FIRST + b, mask=b < B, other=0) <= t) & (b < B)).to(tl.int32), 0)
    return tl.maximum(before - 1, 0).to(tl.int64)


@triton.jit(do_not_specialize=["B"], do_not_specialize_on_alignment=_SMALL)
def _survey(
    LOGITS, Q, FAILED, FIRST, LENGTH, TEMPERATURE, TOP_K, TOP_P, MIN_P, FOUND, MASSES, COUNTS, GROUPS, LIMIT, TOP_KS,
    TOP_PS, MIN_PS, DRAFT_TOP, DRAFT_MASS, B, V: tl.constexpr, J: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """The best of a part of each row under test, the largest log of its draft's part and the mass in units of it.

    LIMIT, TOP_KS, TOP_PS, MIN_PS [T] take the filters of each row; a temperature of −1 where it is not under test.
    """
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b = _owner(FIRST, t, B)
    place, length = t - tl.load(FIRST + b), tl.load(LENGTH + b)
    tested = (place >= 0) & (place <= length) & (tl.load(FAILED + t) == 0)
    if part == 0:
        tl.store(LIMIT + t, tl.where(tested, tl.load(TEMPERATURE + b), -1.0))
        tl.store(TOP_KS + t, tl.load(TOP_K + b))
        tl.store(TOP_PS + t, tl.load(TOP_P + b))
        tl.store(MIN_PS + t, tl.load(MIN_P + b))
    if tested:
        _, x, key, best, id, finite = look(LOGITS, None, t, part, V, EACH)
        keep(FOUND, t, part, PARTS, best, id, finite)
        temperature, top_k, _, _ = kinds(TEMPERATURE, TOP_K, TOP_P, MIN_P, b, V)
        if temperature > 0.0:
            if top_k > 0:
                group_part(GROUPS, t, part, PARTS, EACH, key)
            else:
                weigh_part(MASSES, COUNTS, t, part, PARTS, EACH, x, key > LOWEST, best, temperature)
        if place < length:
            j = part * EACH + tl.arange(0, EACH)
            d = tl.load(Q + (b * J + place) * V + j, mask=j < V, other=float("-inf"))
            top = tl.max(d, 0).to(tl.float64)
            mass = tl.where(d == float("-inf"), 0.0, exp(d.to(tl.float64) - top))
            tl.store(DRAFT_TOP + t * PARTS + part, top)
            tl.store(DRAFT_MASS + t * PARTS + part, tl.sum(mass, 0))


@triton.jit
def _law(x, j, top_id, best, lowest, last, temperature, shift, V: tl.constexpr):
    """Log-probability f64 of tokens j with logits x, −inf where a filter excludes them."""
    key, greedy = number(x), temperature == 0.0
    kept = ((key > lowest) | ((key == lowest) & (j <= last))) & (key > LOWEST) & (j < V)
    scale = tl.where(greedy, 1.0, temperature).to(tl.float64)
    top = quotient(value(best).to(tl.float64), scale, 1.0 / scale)
    law = (quotient(x.to(tl.float64), scale, 1.0 / scale) - top) - shift
    law = tl.where(greedy, 0.0, law)
    return tl.where(tl.where(greedy, j == top_id, kept), law, float("-inf"))


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=_SMALL)
def _judge(
    LOGITS, Q, FAILED, DRAFTS, FIRST, LENGTH, SEED, POSITION, LIMIT, STATE, MASS, DRAFT_TOP, DRAFT_MASS, REST,
    ACCEPTED, T, V: tl.constexpr, J: tl.constexpr, PARTS: tl.constexpr, JP: tl.constexpr, PP: tl.constexpr,
):  # fmt: skip
    """How many drafts of a sequence stand.

    REST [T, 2]: what turns a log of a row's draft into one of a probability: the largest, and the log of the mass; NaN
    where it is no distribution.
    """
    b, k, part = tl.program_id(0).to(tl.int64), tl.arange(0, JP), tl.arange(0, PP)
    first, length = tl.load(FIRST + b), tl.load(LENGTH + b)
    t = tl.minimum(first + k, T - 1)
    there, tested = k <= length, k < tl.minimum(length, J)
    there = there & (tl.load(FAILED + t, mask=there, other=-1) == 0)
    tested = tested & there
    at, whole = t[:, None] * PARTS + part[None, :], part[None, :] < PARTS
    tops = tl.load(DRAFT_TOP + at, mask=tested[:, None] & whole, other=float("-inf"))
    top = tl.max(tops, 1)
    masses = tl.load(DRAFT_MASS + at, mask=tested[:, None] & whole, other=0.0)
    mass = tl.sum(tl.where(tops == float("-inf"), masses, masses * exp(tops - top[:, None])), 1)
    real = (mass > 0.0) & (tl.abs(top) < float("inf"))
    rest = tl.where(real, log(tl.where(real, mass, 1.0)), float("nan"))
    tl.store(REST + t * 2, top, mask=there)
    tl.store(REST + t * 2 + 1, rest, mask=there)
    draft = tl.load(DRAFTS + b * J + k, mask=tested, other=-1)
    known = tested & (draft >= 0) & (draft < V)
    x = tl.load(LOGITS + t * V + draft, mask=known, other=float("-inf"))
    state, temperature = STATE + 6 * t, tl.load(LIMIT + t, mask=known, other=0.0)
    shift = tl.load(MASS + t, mask=known, other=0.0)
    top_id, best = tl.load(state, mask=known, other=0), tl.load(state + 1, mask=known, other=0)
    lowest, last = tl.load(state + 3, mask=known, other=0), tl.load(state + 4, mask=known, other=0)
    p = _law(x, draft, top_id, best, lowest, last, temperature, shift, V)
    q = tl.load(Q + (b * J + k) * V + draft, mask=known, other=float("-inf")).to(tl.float64)
    q = (q - top) - rest
    words = philox(tl.load(SEED + b), tl.load(POSITION + b) + k, tl.full((), _ACCEPT, tl.int32), tl.zeros_like(k))
    # the midpoint of one of 2^52 cells, 26 bits of each word
    cell = ((words[0] >> 6).to(tl.int64) << 26) | (words[1] >> 6).to(tl.int64)
    coin = log((cell.to(tl.float64) + 0.5) * 2.220446049250313e-16)
    stands = known & (q > float("-inf")) & (coin + q < p)
    wrong = tl.cumsum((stands == 0).to(tl.int32), 0)
    tl.store(ACCEPTED + b, tl.sum((wrong == 0).to(tl.int64), 0))


@triton.jit
def _best_score(
    LOGITS, DRAFT, STATE, MASS, REST, t, temperature, seed, position, part, refused, V: tl.constexpr,
    EACH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """(best score of a part of a row, the lowest id that has it, mass of the part) by p, or by its excess over q."""
    state = STATE + 6 * t
    top_id, first, lowest, last = tl.load(state), tl.load(state + 1), tl.load(state + 3), tl.load(state + 4)
    shift, draft_top, draft_rest = tl.load(MASS + t), tl.load(REST + 2 * t), tl.load(REST + 2 * t + 1)
    quad, place = tl.arange(0, STEP // 4), tl.arange(0, 4)[None, :]
    best, found = tl.full((), float("-inf"), tl.float64), tl.full((), LAST, tl.int32)
    mass = tl.full((), 0.0, tl.float64)
    for start in range(part * EACH, tl.minimum(part * EACH + EACH, V), STEP):
        j = start + quad[:, None] * 4 + place
        x = tl.load(LOGITS + t * V + j, mask=j < V, other=float("-inf"))
        law = _law(x, j, top_id, first, lowest, last, temperature, shift, V)
        if refused:
            d = tl.load(DRAFT + j, mask=j < V, other=float("-inf")).to(tl.float64)
            kept = law > float("-inf")
            gap = tl.minimum(((d - draft_top) - draft_rest) - tl.where(kept, law, 0.0), 0.0)
            law = tl.where(kept, law + log(1.0 - exp(gap)), float("-inf"))
            mass += tl.sum(tl.sum(exp(law), 1), 0)
        nearest = tl.max(tl.max(law, 1), 0)
        if (nearest > float("-inf")) & (nearest + _MOST_NOISE >= best):
            words = philox(seed, position, tl.full((), _TARGET, tl.int32), start // 4 + quad)
            wide = words[0][:, None], words[1][:, None], words[2][:, None], words[3][:, None]
            score = law + noise(one_of_four(wide, place))
            most = tl.max(tl.max(score, 1), 0)
            id = tl.min(tl.min(tl.where(score == most, j, LAST), 1), 0)
            found = tl.where(most > best, id, found)
            best = tl.maximum(most, best)
    return best, found, mass


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=_SMALL)
def _draw(
    LOGITS, Q, FAILED, FIRST, LENGTH, SEED, POSITION, LIMIT, STATE, MASS, REST, ACCEPTED, SCORE, ID, LEFT, T,
    V: tl.constexpr, J: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """SCORE, ID [B, 2, PARTS]: the best of a part by the excess of p over q, and by p; LEFT [B, PARTS]: the excess."""
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    accepted, length = tl.load(ACCEPTED + b), tl.load(LENGTH + b)
    t = tl.minimum(tl.load(FIRST + b) + accepted, T - 1)
    if tl.load(FAILED + t) == 0:
        seed, position = tl.load(SEED + b), tl.load(POSITION + b) + accepted
        draft, temperature = Q + (b * J + accepted) * V, tl.load(LIMIT + t)
        rest = tl.load(REST + 2 * t + 1)
        refused = (accepted < length) & (rest == rest)
        best, id, left = _best_score(
            LOGITS, draft, STATE, MASS, REST, t, temperature, seed, position, part, refused, V, EACH, STEP
        )
        to = b * 2 * PARTS + part + tl.where(refused, 0, PARTS)
        tl.store(SCORE + to, best)
        tl.store(ID + to, id)
        tl.store(LEFT + b * PARTS + part, left)
        if refused & (log(left) <= _NO_RESIDUAL):
            best, id, left = _best_score(
                LOGITS, draft, STATE, MASS, REST, t, temperature, seed, position, part, False, V, EACH, STEP
            )
            tl.store(SCORE + to + PARTS, best)
            tl.store(ID + to + PARTS, id)


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=_SMALL)
def _decide(
    FAILED, DRAFTS, FIRST, LENGTH, STATE, REST, ACCEPTED, SCORE, ID, LEFT, TOKENS, T, J: tl.constexpr,
    PARTS: tl.constexpr, JP: tl.constexpr, PP: tl.constexpr,
):  # fmt: skip
    """TOKENS [B, J+1]: the drafts that stand, the token behind them or why there is none, and nothing."""
    b, k, part = tl.program_id(0).to(tl.int64), tl.arange(0, JP), tl.arange(0, PP)
    accepted, length = tl.load(ACCEPTED + b), tl.load(LENGTH + b)
    t = tl.minimum(tl.load(FIRST + b) + accepted, T - 1)
    token = tl.load(FAILED + t)
    if token == 0:
        rest = tl.load(REST + 2 * t + 1)
        refused = (accepted < length) & (rest == rest)
        left = tl.sum(tl.load(LEFT + b * PARTS + part, mask=part < PARTS, other=0.0), 0)
        at = b * 2 * PARTS + part + tl.where(refused & (log(left) > _NO_RESIDUAL), 0, PARTS)
        score = tl.load(SCORE + at, mask=part < PARTS, other=float("-inf"))
        id = tl.load(ID + at, mask=part < PARTS, other=LAST)
        best = tl.max(score, 0)
        id = tl.min(tl.where(score == best, id, LAST), 0)
        token = tl.where(best > float("-inf"), id, tl.load(STATE + 6 * t)).to(tl.int64)
    draft = tl.load(DRAFTS + b * J + k, mask=k < J, other=_NO_TOKEN)
    emitted = tl.where(k < accepted, draft, tl.where(k == accepted, token, _NO_TOKEN))
    tl.store(TOKENS + b * (J + 1) + k, emitted, mask=k <= J)


def _checked(logits: Tensor, draft_logprobs: Tensor, per_row: dict[str, Tensor], drafts: Tensor, failed: Tensor):
    """Refuse what the kernels would read as something else."""
    (T, V), (B, J) = logits.shape, drafts.shape
    expected = {name: (dtype, (B,)) for name, dtype in _PER_ROW.items()}
    expected |= {"drafts": (int64, (B, J)), "failed": (int64, (T,)), "draft_logprobs": (float32, (B, J, V))}
    given = per_row | {"drafts": drafts, "failed": failed, "draft_logprobs": draft_logprobs}
    for name, (kind, shape) in expected.items():
        if given[name].dtype is not kind or given[name].shape != shape:
            raise ValueError(f"{name} {tuple(given[name].shape)} {given[name].dtype}, expected {kind} {shape}")
    if logits.dtype is not float32 or not V or (B and not T):
        raise ValueError(f"logits {(T, V)} {logits.dtype} of {B} rows, expected float32 [T, V] of 1 or more")


def accept_rejection(
    num: Numerics,
    logits: Tensor,
    *,
    drafts: Tensor,
    draft_logprobs: Tensor,
    failed: Tensor,
    first: Tensor,
    length: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> tuple[Tensor, Tensor]:
    """(tokens int64 [B, J+1], num_accepted int64 [B]) of rejection verification over adjusted logits f32 [T, V]."""
    places = dict(first=first, length=length, seed=seed, position=position)
    filters = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    _checked(logits, draft_logprobs, places | filters, drafts, failed)
    logits, q, failed, drafts = (contiguous(t) for t in (logits, draft_logprobs, failed, drafts))
    first, length, seed, position = (contiguous(t) for t in places.values())
    limits = [contiguous(t) for t in filters.values()]
    (T, V), (B, J), device = logits.shape, drafts.shape, logits.device
    each = part_size(V)
    parts = blocks(V, each)

    def ints(*shape: int) -> Tensor:
        return empty(shape, dtype=int32, device=device)

    def doubles(*shape: int) -> Tensor:
        return empty(shape, dtype=float64, device=device)

    found, masses, counts, groups = (
        ints(T, parts, 3),
        doubles(T, parts, 16),
        ints(T, parts, 16),
        ints(T, parts * each // GROUP.value),
    )
    of_rows = [empty(T, dtype=t.dtype, device=device) for t in limits]
    of_drafts = doubles(T, parts), doubles(T, parts)
    padded = dict(JP=power_of_two(J + 1), PP=power_of_two(parts))
    surveyed = (logits, q, failed, first, length, *limits, found, masses, counts, groups, *of_rows, *of_drafts, B)
    launch(_survey, (T, parts), *surveyed, warps=8, V=V, J=J, PARTS=parts, EACH=each)
    state, mass = _kept(logits, found, of_rows, masses, counts, groups)
    accepted, rest = empty(B, dtype=int64, device=device), doubles(T, 2)
    judged = (logits, q, failed, drafts, first, length, seed, position, of_rows[0], state, mass, *of_drafts)
    launch(_judge, (B,), *judged, rest, accepted, T, V=V, J=J, PARTS=parts, **padded)
    score, id, left = doubles(B, 2, parts), ints(B, 2, parts), doubles(B, parts)
    drawn = (logits, q, failed, first, length, seed, position, of_rows[0], state, mass, rest, accepted, score, id, left)
    launch(_draw, (B, parts), *drawn, T, V=V, J=J, PARTS=parts, EACH=each, STEP=min(each, _STEP))
    tokens = empty((B, J + 1), dtype=int64, device=device)
    decided = (failed, drafts, first, length, state, rest, accepted, score, id, left, tokens, T)
    launch(_decide, (B,), *decided, warps=1, J=J, PARTS=parts, **padded)
    return tokens, accepted


def _kept(logits: Tensor, found: Tensor, limits: list[Tensor], *begun: Tensor) -> tuple[Tensor, Tensor]:
    """(STATE [T, 6], log of the mass kept f64 [T]) of ``filter_row``, by what was begun with the parts of each row."""
    (T, V), device = logits.shape, logits.device
    masses, counts, groups = begun
    total, listed = empty((T, 3), dtype=float64, device=device), empty((T, 3), dtype=int32, device=device)
    before = empty(found.shape[:2], dtype=int32, device=device)
    keys, ids = (empty((T, V), dtype=int32, device=device) for _ in range(2))
    weights, chosen = empty((T, V), dtype=float64, device=device), empty_like(groups)
    state, mass = empty((T, 6), dtype=int32, device=device), empty(T, dtype=float64, device=device)
    sizes = dict(V=V, PARTS=found.shape[1], EACH=part_size(V))
    bins = (found, *limits, masses, counts, total, listed, before)
    launch(find_bin, (T,), *bins, V=V, PARTS=found.shape[1], WHOLE=True)
    launch(list_bin, found.shape[:2], logits, listed, before, keys, ids, warps=8, **sizes)
    filtered = (groups, chosen, total, listed, keys, ids, weights, state, mass, None, TARGET)
    launch(filter_row, (T,), logits, found, *limits, None, None, *filtered, warps=16, **sizes, BLOCK=_LIST, WIDE=_WIDE)
    return state, mass
