"""Which prompt rows a prefill computes, what they see, and what they may write: the replay planner. Pure integers.

W window, G rollback slack (drafts + 1), B block, N layers, L prompt length. The decoder half is everything after the
cut layer; the cut layer itself writes window and block KV for every row.

1. T, the rows that go through the decoder half, is L (off), W + (N − cut − 1)(W − 1) (exact: the receptive field of
   the last W rows) or W (bounded). ``reach`` is T, and W when off.
2. cap = ⌊(L − reach − G) / B⌋·B: a hit beyond it would leave decoder rows whose encoder outputs this prefill does not
   compute. L1 = min(contiguous cached tokens, cap).
3. L1 = 0: COLD, start s = 0. Window KV of [L1 − W, L1) at hand: EXACT, s = L1. Otherwise REPLAY, s = L1 − W: one
   window is recomputed, sees nothing below s, and leaves block KV alone. REPLAY falls back to COLD when it is switched
   off or would recompute the whole prefix (L1 ≤ W).
4. The decoder pivot d = max(0, L − T) depends on the prompt only, never on chunks: layers above the cut compute rows
   from d on and see none below. When off, rows from s on run through all layers.
5. Unless off, the last chunk has at least W + G rows, so that a bounded tail and its rollback rows lie in one chunk.

Worked example (release: W 128, G 6, N 40, cut 20; bounded): L 1000, 900 cached → cap = ⌊866/128⌋·128 = 768 = L1.
Windows at hand: EXACT, rows 768..999 (232), decoder from 872. Without: REPLAY from 640 (360 rows, 128 replayed).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deepinfer_engine.config.model import BLOCK_TOKENS, ModelConfig
from deepinfer_engine.errors import UsageError

DecoderReplay = Literal["off", "exact", "bounded"]
EncoderReplay = Literal["off", "bounded"]
Mode = Literal["cold", "exact", "replay"]
Lineage = Literal["exact", "replayed"]


@dataclass(frozen=True)
class ReplayShape:
    """What planning needs of a model and a profile. Raises ``UsageError`` where replay has no meaning."""

    window: int
    slack: int
    layers: int
    cut: int
    decoder: DecoderReplay = "off"
    encoder: EncoderReplay = "off"

    def __post_init__(self) -> None:
        if not 0 < self.cut < self.layers:
            raise UsageError(
                f"the encoder half ends at layer {self.cut} of {self.layers}; replay needs "
                f"0 < n_prefill_layer {self.cut} < n_layer {self.layers}",
                hint="the last of kv_source_layer_ids is the cut; check the model's config.json",
            )
        if self.window % BLOCK_TOKENS and BLOCK_TOKENS % self.window:
            raise UsageError(f"window {self.window} and block {BLOCK_TOKENS} must divide one another")

    @classmethod
    def of(cls, config: ModelConfig, *, decoder: DecoderReplay = "off", encoder: EncoderReplay = "off") -> ReplayShape:
        """Shape of a model under a profile's ``replay`` section."""
        shape = cls(
            window=config.sliding_window,
            slack=config.rollback_slack,
            layers=config.num_hidden_layers,
            cut=config.cut,
            decoder=decoder,
            encoder=encoder,
        )
        if config.compress_ratios[config.cut] != 1:
            raise UsageError(
                f"the cut layer {config.cut} compresses {config.compress_ratios[config.cut]} tokens into one entry; "
                "decoder replay needs one entry per token there"
            )
        late = [layer for layer in config.engram_layer_ids if layer >= config.cut]
        if late:
            raise UsageError(f"engram layer {late[0]} is at or above the cut {config.cut}; trimmed rows would miss it")
        return shape

    @property
    def reach(self) -> int:
        """Decoder rows of a long prompt that a prefix hit must leave to this prefill."""
        if self.decoder != "exact":
            return self.window
        return self.window + (self.layers - self.cut - 1) * (self.window - 1)

    @property
    def final_rows(self) -> int:
        """Least rows of the last chunk: window + rollback slack (134 = 128 + 6 for the release)."""
        return self.window + self.slack

    @property
    def min_chunk_tokens(self) -> int:
        """Least chunk budget that always makes progress: the final rows and one block; any when off."""
        return 1 if self.decoder == "off" else self.final_rows + BLOCK_TOKENS

    @property
    def snapshot_layers(self) -> range:
        """Layers whose windows a prefix hit needs. Above the cut only when all rows run there."""
        return range(self.layers if self.decoder == "off" else self.cut + 1)


@dataclass(frozen=True)
class Chunk:
    """One piece of a prefill. ``tail``: its last rows that go on past the cut; ``last``: it ends the prompt."""

    start: int
    count: int
    tail: int
    last: bool


@dataclass(frozen=True)
class RowLimits:
    """What a row of a step may see, write and skip; the fields of ``RowInput`` of the same names."""

    floor_encoder: int
    floor_decoder: int
    keep_blocks_below: int
    tail: int


@dataclass(frozen=True)
class ReplaySpan:
    """The plan of one prompt.

    ``start`` is the first computed row, ``reused`` (L1) the tokens whose block KV is taken from the cache and never
    written again, ``pivot`` the first row of the decoder half. ``floor_encoder`` and ``floor_decoder`` are the lowest
    visible window positions up to and above the cut, for prompt rows and for the decode steps that follow.
    ``inherited``: what is reused was itself computed after a replay.
    """

    shape: ReplayShape
    length: int
    hit: int
    cap: int
    reused: int
    mode: Mode
    start: int
    pivot: int
    floor_encoder: int
    floor_decoder: int
    inherited: bool = False
    fallback: str = ""

    @property
    def replayed(self) -> int:
        """Rows computed again although their block KV is cached."""
        return self.reused - self.start

    @property
    def decoder_rows(self) -> int:
        """Prompt rows that go through the layers above the cut."""
        return self.length - self.pivot

    @property
    def window_end(self) -> int | None:
        """End of the window KV to load before the first row (EXACT only)."""
        return self.reused if self.mode == "exact" else None

    def tail(self, start: int, count: int) -> int:
        """Rows of [start, start + count) that go on past the cut."""
        return min(count, max(0, start + count - self.pivot))

    def limits(self, start: int, count: int) -> RowLimits:
        """Limits of rows [start, start + count): of the prompt, and of the decode steps behind it."""
        return RowLimits(self.floor_encoder, self.floor_decoder, self.reused, self.tail(start, count))

    @property
    def keep_windows_at(self) -> int:
        """The pivot whose windows a prefill can copy from its rings: the cap, behind which a last chunk has room."""
        return self.cap if self.cap > self.start else 0

    def next_chunk(self, start: int, budget: int, *, stop: int = 0) -> Chunk | None:
        """The rows of the prompt to run from ``start`` within ``budget`` tokens; None: wait for a larger budget.

        With a budget of ``min_chunk_tokens`` there always is one. A chunk does not cross ``stop``.
        """
        left = self.length - start
        assert left > 0 and start >= self.start, (start, self)
        count = min(budget, left)
        if count < left and self.shape.decoder != "off":  # not the last chunk: leave it enough rows
            count = min(count, left - self.shape.final_rows)
        if start < stop:
            count = min(count, stop - start)
        if count <= 0:
            return None
        return Chunk(start, count, self.tail(start, count), start + count == self.length)

    def chunks(self, budget: int) -> list[Chunk]:
        """All chunks at a constant budget. Raises ``UsageError`` when it is below ``min_chunk_tokens``."""
        if budget < self.shape.min_chunk_tokens:
            raise UsageError(
                f"a chunk of {budget} tokens is too small, replay needs {self.shape.min_chunk_tokens} "
                f"(window {self.shape.window} + rollback {self.shape.slack} + block {BLOCK_TOKENS})"
            )
        out: list[Chunk] = []
        at = self.start
        while at < self.length:
            chunk = self.next_chunk(at, budget)
            assert chunk is not None
            out.append(chunk)
            at += chunk.count
        return out

    @property
    def lineage(self) -> Lineage:
        """Whether KV computed from here on is what a prefill without encoder replay computes.

        One truncated window is enough for "replayed": later rows read its block KV, so the difference never ends.
        """
        return "replayed" if self.mode == "replay" or self.inherited else "exact"

    @property
    def row_layers(self) -> int:
        """Work of this prefill in rows × layers; a full prefill is length × layers."""
        encoder = (self.length - self.start) * self.shape.cut
        return encoder + self.decoder_rows * (self.shape.layers - self.shape.cut)


def plan_prefill(
    shape: ReplayShape,
    length: int,
    *,
    hit: int = 0,
    windows_at: frozenset[int] = frozenset(),
    approximate: bool = False,
) -> ReplaySpan:
    """Plan a prompt of ``length`` tokens of which the first ``hit`` have cached block KV.

    ``windows_at``: ends of window KV that can be loaded. ``approximate``: what is reused has replayed lineage. The
    plan depends on nothing else, so that a preempted or handed-over request gets the same one again. Raises
    ``UsageError`` for lengths below 1 and unaligned hits.
    """
    if length < 1:
        raise UsageError(f"a prompt has at least one token, found {length}")
    if hit < 0 or hit % BLOCK_TOKENS:
        raise UsageError(f"a hit is a number of whole {BLOCK_TOKENS}-token blocks, found {hit} tokens")
    cap = max(0, (length - shape.reach - shape.slack) // BLOCK_TOKENS * BLOCK_TOKENS)
    reused = min(hit, cap)
    mode: Mode = "cold"
    start, fallback = 0, ""
    if reused and reused in windows_at:
        mode, start = "exact", reused
    elif reused and shape.encoder == "off":
        fallback = f"no window KV ends at {reused} and replay.encoder is off"
    elif reused and reused <= shape.window:
        fallback = f"no window KV ends at {reused} and replaying {shape.window} rows would recompute all of it"
    elif reused:
        mode, start = "replay", reused - shape.window
    if mode == "cold":
        reused = 0
    floor_encoder = start if mode == "replay" else 0
    if shape.decoder == "off":
        pivot, floor_decoder = start, floor_encoder
    else:
        pivot = floor_decoder = max(0, length - shape.reach)
    return ReplaySpan(
        shape=shape,
        length=length,
        hit=hit,
        cap=cap,
        reused=reused,
        mode=mode,
        start=start,
        pivot=pivot,
        floor_encoder=floor_encoder,
        floor_decoder=floor_decoder,
        inherited=approximate and reused > 0,
        fallback=fallback,
    )


def explain(span: ReplaySpan) -> list[tuple[str, int | str, str]]:
    """Every field of a plan as (name, value, reason with the numbers behind it)."""
    shape, L, W = span.shape, span.length, span.shape.window
    reach = f"window {W}"
    if shape.decoder == "exact":
        reach = f"{shape.reach} decoder rows (window {W} + {shape.layers - shape.cut - 1} layers × {W - 1})"
    room = L - shape.reach - shape.slack
    full = L * shape.layers
    starts = {
        "cold": "nothing is reused, every row is computed",
        "exact": f"window KV of [{max(0, span.reused - W)}, {span.reused}) is loaded",
        "replay": f"L1 {span.reused} − window {W}: the window before the hit is computed again",
    }
    modes = {
        "cold": span.fallback or ("nothing is cached" if not span.hit else f"the prompt is too short: cap {span.cap}"),
        "exact": f"window KV that ends at {span.reused} is at hand",
        "replay": f"no window KV ends at {span.reused}",
    }
    pivots = {
        "off": "replay.decoder off: every computed row runs through all layers",
        "exact": f"max(0, {L} − {shape.reach}): the receptive field of the last {W} rows",
        "bounded": f"max(0, {L} − window {W}): only the last window goes past the cut",
    }
    decoder_floor = "the pivot: layers above the cut hold no row below it"
    if shape.decoder == "off":
        decoder_floor = "replay.decoder off: the same as up to the cut"
    windows = f"[{span.reused - W}, {span.reused})" if span.mode == "replay" else "none"
    return [
        ("length", L, "tokens of the prompt"),
        ("n_prefill_layer", shape.cut, f"last kv source; 0 < {shape.cut} < {shape.layers} layers"),
        ("hit", span.hit, f"{span.hit // BLOCK_TOKENS} cached blocks of {BLOCK_TOKENS} from position 0 on"),
        ("cap", span.cap, f"({L} − {reach} − rollback {shape.slack}) = {room}, down to a block, at least 0"),
        ("L1", span.reused, f"min(hit {span.hit}, cap {span.cap})" if span.mode != "cold" else modes["cold"]),
        ("mode", span.mode, modes[span.mode]),
        ("start", span.start, starts[span.mode]),
        ("replayed", span.replayed, f"rows {windows}: block KV kept as cached, never written"),
        ("encoder_rows", L - span.start, f"rows [{span.start}, {L}) up to the cut"),
        ("pivot", span.pivot, pivots[shape.decoder]),
        ("decoder_rows", span.decoder_rows, f"rows [{span.pivot}, {L}) above the cut"),
        ("floor_encoder", span.floor_encoder,
         "replayed rows see nothing below the start" if span.mode == "replay" else "whole windows are at hand"),
        ("floor_decoder", span.floor_decoder, decoder_floor),
        ("final_chunk_rows", min(L - span.start, shape.final_rows),
         f"at least window {W} + rollback {shape.slack} rows in the last chunk, or all there are"),
        ("work", f"{span.row_layers / full:.3f}",
         f"{span.row_layers} of {full} rows × layers; attention over the context is not counted"),
    ]  # fmt: skip
