"""How the processes of a run find each other: spawned by the leader, or started by torchrun.

Rank 0 leads. Started by a user with a number of processes it spawns the others itself, on this host; under torchrun
(RANK and WORLD_SIZE are set) all of them exist already. Either way they share a torch.distributed store, through which
the leader publishes the address of its control channel, and later the group of the data transport is formed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from deepinfer_engine.dist.control import Crew, Follower, new_token
from deepinfer_engine.errors import NotReadyError, PeerLost, UsageError

_KEY = "deepinfer/control"
#: seconds that spawned processes get to end after the leader has
_END_S = 10.0


@dataclass
class Children:
    """Processes that the leader spawned, rank 1 first."""

    processes: list[subprocess.Popen] = field(default_factory=list)

    def fate(self, rank: int) -> str | None:
        """How a rank's process ended; None while it runs."""
        code = self.processes[rank - 1].poll()
        if code is None:
            return None
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit {code}"

    def end(self) -> None:
        """Wait for them, then kill those that are left."""
        ends = time.monotonic() + _END_S
        for process in self.processes:
            try:
                process.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass
class World:
    """The processes of this run as the leader sees them. ``close`` ends the others."""

    size: int
    store: Store
    crew: Crew
    children: Children | None
    group: dist.ProcessGroup | None = None
    threads: int = 1

    def join(self, device: str, step_s: float) -> dist.ProcessGroup:
        """Form the data transport's group; every process must call it. One group at a time in a process."""
        if dist.is_initialized():
            raise UsageError("this process leads other ranks already", hint="close that engine first")
        self.threads = torch.get_num_threads()
        self.group = join_group(self.store, 0, self.size, device, step_s)
        return self.group

    def close(self) -> None:
        self.crew.close()
        if self.group is not None:
            dist.destroy_process_group()
            self.group = None
            torch.set_num_threads(self.threads)
        if self.children is not None:
            self.children.end()


def torchrun_rank(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """(rank, world size) when torchrun, or anything that sets its variables, started this process."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    return int(environment["RANK"]), int(environment["WORLD_SIZE"])


def spawn(size: int, *, load_s: float, step_s: float) -> World:
    """Start ``size`` − 1 followers on this host and connect with them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=load_s))
    paths = os.pathsep.join(p for p in sys.path if p)
    children = Children()
    crew = Crew(size, step_s=step_s, fate=children.fate)
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for rank in range(1, size):
                command = [sys.executable, "-m", "deepinfer_engine.runtime.worker", str(store.port), str(rank), str(size)]
                children.processes.append(
                    subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, stdin=subprocess.DEVNULL)
                )
            own = _publish_and_accept(store, crew, listener, "127.0.0.1", load_s)
    except BaseException:
        for process in children.processes:
            process.kill()
        children.end()
        raise
    return World(size, own, crew, children)


def lead(*, load_s: float, step_s: float) -> World:
    """Rank 0 under torchrun: connect with the other ranks."""
    store, _, size = _torchrun_store(load_s)
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    crew = Crew(size, step_s=step_s)
    with socket.create_server(("", 0)) as listener:
        own = _publish_and_accept(store, crew, listener, host, load_s)
    return World(size, own, crew, None)


def follow_spawned(port: int, rank: int, size: int, *, timeout_s: float) -> tuple[Store, Follower]:
    """A spawned process's side of ``spawn``."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout_s))
    return _follow(store, rank, timeout_s)


def follow_torchrun(*, timeout_s: float) -> tuple[Store, Follower, int, int]:
    """Another rank's side of ``lead``: (store, channel to the leader, rank, world size)."""
    store, rank, size = _torchrun_store(timeout_s)
    return *_follow(store, rank, timeout_s), rank, size


def join_group(store: Store, rank: int, size: int, device: str, step_s: float) -> dist.ProcessGroup:
    """The group that tokens travel in: NCCL on devices, gloo on CPUs; an exchange may take ``step_s``."""
    backend = "gloo"
    if device.startswith("cuda"):
        if not dist.is_nccl_available():
            raise NotReadyError("this torch has no NCCL", hint="install a CUDA build of torch")
        backend = "nccl"
        torch.cuda.set_device(torch.device(device))
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=step_s),
    )
    group = dist.group.WORLD
    assert group is not None
    return group


def _torchrun_store(timeout_s: float) -> tuple[Store, int, int]:
    from torch.distributed.rendezvous import rendezvous

    try:
        return next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    except (RuntimeError, ValueError) as exc:
        raise NotReadyError(f"the rendezvous of torchrun failed: {exc}", hint="check MASTER_ADDR and MASTER_PORT") from exc


def _publish_and_accept(store: Store, crew: Crew, listener: socket.socket, host: str, load_s: float) -> Store:
    """Let the others find this leader; the part of the store that belongs to this start."""
    token = new_token()
    store.set(_KEY, f"{host} {listener.getsockname()[1]} {token.hex()}")
    crew.accept(listener, token, load_s)
    return _part(store, token)


def _part(store: Store, token: bytes) -> Store:
    """A store may outlive a restart: what a group leaves in it must not be found by the next one."""
    return PrefixStore(f"deepinfer/{token.hex()[:16]}", store)


def _follow(store: Store, rank: int, timeout_s: float) -> tuple[Store, Follower]:
    """Connect to the leader; a store that outlives a restart may still name the leader before it."""
    ends = time.monotonic() + timeout_s
    while True:
        host, port, token = store.get(_KEY).decode().split()
        try:
            follower = Follower(host, int(port), bytes.fromhex(token), rank, 5.0)
        except OSError as exc:
            if time.monotonic() > ends:
                raise PeerLost(f"rank 0 at {host}:{port} does not answer: {exc}") from None
            time.sleep(0.2)
            continue
        return _part(store, bytes.fromhex(token)), follower
