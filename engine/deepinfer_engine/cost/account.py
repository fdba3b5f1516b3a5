"""What a request costs in GPU seconds, and the ratio of prefill to decode GPUs that follows."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_engine.errors import UsageError


@dataclass(frozen=True)
class Workload:
    """Mean request: prompt and answer tokens, and the share of prompt tokens found in the prefix cache."""

    input_tokens: int
    output_tokens: int
    hit_rate: float

    def __post_init__(self) -> None:
        if self.input_tokens < 1 or self.output_tokens < 1:
            raise UsageError("a workload needs at least one input and one output token")
        if not 0 <= self.hit_rate <= 1:
            raise UsageError(f"the hit rate is {self.hit_rate:g}, expected 0 to 1")

    def computed_tokens(self, replay_window: int) -> float:
        """Prompt tokens computed: the missed ones, and one replayed window after a hit."""
        missed = (1 - self.hit_rate) * self.input_tokens
        return min(missed + (replay_window if self.hit_rate else 0), float(self.input_tokens))


@dataclass(frozen=True)
class RequestCost:
    """GPU seconds of one request in each phase."""

    prefill_gpu_s: float
    decode_gpu_s: float

    @property
    def gpu_s(self) -> float:
        return self.prefill_gpu_s + self.decode_gpu_s

    @property
    def prefill_per_decode(self) -> float:
        """Prefill GPUs per decode GPU that are equally busy."""
        return self.prefill_gpu_s / self.decode_gpu_s


def request_cost(
    workload: Workload, *, prefill_tokens_s: float, decode_tokens_s: float, replay_window: int
) -> RequestCost:
    """Cost of the mean request at given throughputs per GPU; balancing losses, which cancel in the ratio, left out."""
    return RequestCost(
        workload.computed_tokens(replay_window) / prefill_tokens_s, workload.output_tokens / decode_tokens_s
    )


def gpu_split(gpus: int, prefill_per_decode: float) -> tuple[int, int]:
    """(prefill, decode) GPUs of a total that come closest to a ratio, at least one each; ties favour decode."""
    if gpus < 2:
        raise UsageError(f"{gpus} GPU cannot be split between prefill and decode; at least 2 are needed")
    prefill = min(range(1, gpus), key=lambda p: (abs(p - prefill_per_decode * (gpus - p)), p))
    return prefill, gpus - prefill
