"""``DeepEpMesh``: real ranks over DeepEP's buffers, where that library is installed.

Not verified: no machine with it was at hand. What is checked without one is the probe, and the arithmetic around the
two calls (the tests put an exchange of their own behind them). Nothing chooses this transport by itself; a profile
asks for it with ``parallel.transport: deepep``.

DeepEP sends each token once to every process that needs it, with its slot ids (−1 elsewhere) and weights; here the
arriving tokens are expanded to one row per slot, and the results summed per token before they go home, where DeepEP
adds the parts of the processes. So the order of a token's sum depends on where its experts live: results agree within
rounding, the same bits cannot be promised, and ``numerics.batch_invariant`` refuses this transport.

Names are no proof: the package index has a ``deep-ep`` that is not the library. It counts when it has ``EPBuffer`` with
``dispatch`` and ``combine``.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepinfer_engine.dist.mesh import Dispatched, check_same_storage
from deepinfer_engine.dist.placement import Placement, SlotTable
from deepinfer_engine.dist.replica import Choice, choose
from deepinfer_engine.dist.share import Share
from deepinfer_engine.errors import NotReadyError
from deepinfer_kernels.vendor.libraries import LIBRARIES

_INSTALL = f"{LIBRARIES['deep_ep'].install} says what it takes; or use parallel.transport torch"


@dataclass(frozen=True)
class Probe:
    """What an installed ``deep_ep`` can do: its buffer class, or the reason why it does not count."""

    buffer: Any = None
    reason: str = ""


def probe(module: Any = None) -> Probe:
    """Look at ``deep_ep`` (or at a module given) by its attributes alone."""
    if module is None:
        if importlib.util.find_spec("deep_ep") is None:
            return Probe(reason="deep_ep is not installed")
        try:
            module = importlib.import_module("deep_ep")
        except (ImportError, OSError, RuntimeError) as exc:
            return Probe(reason=f"deep_ep is installed, but cannot be imported: {exc}")
    buffer = getattr(module, "EPBuffer", None)
    if buffer is None:
        return Probe(reason="this deep_ep has no EPBuffer: it is a placeholder of that name, or an older DeepEP")
    lacking = [name for name in ("dispatch", "combine") if not callable(getattr(buffer, name, None))]
    if lacking:
        return Probe(reason=f"the EPBuffer of this deep_ep has no {' and no '.join(lacking)}")
    return Probe(buffer)


def open_buffer(group: dist.ProcessGroup, *, tokens: int, hidden: int, choices: int) -> Any:
    """A buffer for up to ``tokens`` tokens of a process and step. Raises NotReadyError when DeepEP is not there."""
    found = probe()
    if found.buffer is None:
        raise NotReadyError(f"parallel.transport deepep: {found.reason}", hint=_INSTALL)
    return found.buffer(
        group, num_max_tokens_per_rank=tokens, hidden=hidden, num_topk=choices, use_fp8_dispatch=False, deterministic=True
    )


class DeepEpMesh:
    """The mesh as process ``share.rank`` sees it, over a DeepEP buffer. All processes make the same calls."""

    def __init__(
        self,
        placement: Placement,
        experts: int,
        share: Share,
        group: dist.ProcessGroup,
        buffer: Any,
        device: str,
        *,
        tokens: int,
        choice: Choice = "hash",
    ):
        self._table = SlotTable.build(placement, experts, device)
        self._choice: Choice = choice
        self._group = group
        self._buffer = buffer
        self._tokens = tokens
        self.entered = 0
        slots = placement.slots // share.size
        self._local = range(share.rank * slots, (share.rank + 1) * slots)

    @property
    def table(self) -> SlotTable:
        return self._table

    @property
    def placement(self) -> Placement:
        return self._table.placement

    @property
    def local_slots(self) -> range:
        return self._local

    def switch(self, table: SlotTable) -> None:
        """Dispatch by ``table`` from the next step on; to be called between the same two steps everywhere."""
        check_same_storage(self._table, table)
        self._table = table

    def dispatch(self, ops: Any, layer: int, x: Tensor, experts: Tensor, weights: Tensor, key: Tensor) -> Dispatched:
        """This process's x [T, H], experts [T, K], weights [T, K], key [T] → rows of all processes for its slots."""
        self.entered += 1
        slots = choose(self._table, layer, experts, key, self._choice)
        got, ids, weight, handle, _ = self._buffer.dispatch(
            x,
            topk_idx=slots,
            topk_weights=weights.float(),
            num_experts=self._table.placement.slots,
            num_max_tokens_per_rank=self._tokens,
            do_cpu_sync=True,
        )
        token, nth = (ids >= 0).nonzero(as_tuple=True)
        at, order, counts = ops.dispatch_permute(ids[token, nth].unsqueeze(1), len(self._local))
        rows = token.index_select(0, at)
        moved = weight[token, nth].index_select(0, at)
        return Dispatched(got.index_select(0, rows), counts, moved, order, experts.shape[1], (handle, rows, got.shape[0]))

    def combine(self, ops: Any, y: Tensor, sent: Dispatched, shared: Tensor) -> Tensor:
        """Sums per arrived token back to where the tokens came from, plus the shared expert's [T, H]."""
        self.entered += 1
        handle, rows, count = sent.back
        part = torch.zeros((count, y.shape[1]), device=y.device).index_add_(0, rows, y.float())
        routed, *_ = self._buffer.combine(part.to(torch.bfloat16), handle)
        return (routed.float() + shared.float()).to(shared.dtype)

    def total(self, value: Tensor) -> Tensor:
        """The sum of an integer tensor over all processes."""
        self.entered += 1
        dist.all_reduce(value, group=self._group)
        return value
