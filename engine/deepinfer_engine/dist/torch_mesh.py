"""``TorchMesh``: real ranks. Tokens travel between processes by all-to-all of torch.distributed (gloo or NCCL).

Every process holds the slots of its mesh ranks only. Dispatch sorts a process's (token, choice) pairs by physical
slot, so that those for one process are contiguous; it exchanges how many go to each slot, then the rows with their
routing weights in one message; what arrives, sorted by sender, is sorted by slot. Combine goes the same way back, and
each token is summed where it came from, in ascending expert order as on one process: a row's bits do not depend on
how many processes there are wherever those of an expert's output do not depend on the batch.

Three exchanges per layer. Their sizes are known to the host only after the first, so a device is waited for once per
layer; a transport with its own receive buffers (DeepEP) avoids that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepinfer_engine.dist.mesh import Dispatched, check_same_storage
from deepinfer_engine.dist.placement import Placement, SlotTable
from deepinfer_engine.dist.replica import Choice, choose
from deepinfer_engine.dist.share import Share


class TorchMesh:
    """The mesh as process ``share.rank`` sees it. All processes must make the same calls in the same order.

    ``entered`` counts the exchanges begun: a process that hangs behind the others shows where.
    """

    def __init__(
        self,
        placement: Placement,
        experts: int,
        share: Share,
        group: dist.ProcessGroup,
        device: str = "cpu",
        *,
        choice: Choice = "hash",
    ):
        self._table = SlotTable.build(placement, experts, device)
        self._choice: Choice = choice
        self._group = group
        self._share = share
        self._device = device
        self.entered = 0
        slots = placement.slots // share.size
        self._local = range(share.rank * slots, (share.rank + 1) * slots)
        self._slot_of_part = torch.arange(slots, device=device).repeat(share.size)

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
        slots = choose(self._table, layer, experts, key, self._choice)
        token, order, counts = ops.dispatch_permute(slots, self._table.placement.slots)
        weight = torch.empty_like(weights.flatten()).index_copy_(0, order, weights.flatten())
        received = self._exchange(counts)
        per_process = torch.stack((counts.view(self._share.size, -1).sum(1), received.view(self._share.size, -1).sum(1)))
        sends, takes = per_process.tolist()
        rows, weight = self._unpack(self._exchange(_pack(x.index_select(0, token), weight), takes, sends), x, weight)
        slot = torch.repeat_interleave(self._slot_of_part, received)
        at, back, local = ops.dispatch_permute(slot.unsqueeze(1), len(self._local))
        moved = weight.index_select(0, at)
        return Dispatched(rows.index_select(0, at), local, moved, order, experts.shape[1], (back, sends, takes))

    def combine(self, ops: Any, y: Tensor, sent: Dispatched, shared: Tensor) -> Tensor:
        """Expert rows y [M, H] back to the processes and tokens they came from, plus the shared expert's [T, H]."""
        back, sends, takes = sent.back
        home = self._exchange(y.index_select(0, back), sends, takes)
        return ops.moe_combine(home, sent.order, shared, sent.choices) if shared.shape[0] else shared

    def process_of(self, slot: int) -> int:
        """Process that hosts a physical slot."""
        return slot // len(self._local)

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Send and receive bytes, (process, contiguous uint8) each, between two steps; pairs of processes in order."""
        self.entered += 1
        ops = [dist.P2POp(dist.isend, data, group=self._group, group_peer=to) for to, data in sends]
        ops += [dist.P2POp(dist.irecv, data, group=self._group, group_peer=source) for source, data in receives]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def total(self, value: Tensor) -> Tensor:
        """The sum of an integer tensor over all processes."""
        self.entered += 1
        dist.all_reduce(value, group=self._group)
        return value

    def _exchange(self, send: Tensor, takes: list[int] | None = None, sends: list[int] | None = None) -> Tensor:
        """Rows for each process in order, ``sends`` of them (None: equal parts) → rows from each, ``takes``."""
        self.entered += 1
        shape = send.shape if takes is None else (sum(takes), *send.shape[1:])
        out = torch.empty(shape, dtype=send.dtype, device=send.device)
        dist.all_to_all_single(out, send.contiguous(), takes, sends, group=self._group)
        return out

    def _unpack(self, packed: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        width = x.shape[1] * x.element_size()
        rows = packed[:, :width].contiguous().view(x.dtype).view(-1, x.shape[1])
        return rows, packed[:, width:].contiguous().view(weight.dtype).view(-1)


def _pack(rows: Tensor, weight: Tensor) -> Tensor:
    """Rows [M, H] and their routing weights [M] as bytes [M, H · size + 4], so that they travel together."""
    return torch.cat((rows.view(torch.uint8), weight.unsqueeze(1).contiguous().view(torch.uint8)), 1)
