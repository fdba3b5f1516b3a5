"""The control channel between the leading process and the others: framed messages over one socket each.

The leader decides and tells; a follower does and answers. A socket also is the quickest witness of a death: when a
process ends in whatever way, the system closes its socket and the other side knows. A thread per socket reads frames,
so that a leader learns of a loss, and a follower answers pings, while the main threads compute or wait in an exchange.

Frames: length (8 bytes), then a pickled (kind, body). A connection is accepted only with the token of this run, which
travels through the rendezvous store; nothing is unpickled before.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import pickle
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from deepinfer_engine.errors import ArtefactError, DeepInferError, NotReadyError, PeerLost, UsageError

_LENGTH = struct.Struct("!Q")
_HELLO = struct.Struct("!32sII")  # token, rank, process id
#: seconds between two pings, and without an answer after which a follower counts as silent
_PING_S, _SILENT_S = 1.0, 4.0
#: seconds in which the cause of a failed exchange shows on the control channel
_SETTLE_S = 2.0
#: seconds that a main thread gets to end by itself once a peer is lost
_GRACE_S = 5.0
#: classes of an error that a follower met, by exit code
_CLASSES: dict[int, type[DeepInferError]] = {2: UsageError, 3: NotReadyError, 4: ArtefactError}


class Channel:
    """One connected socket. ``send`` may be called from any thread, ``receive`` from one."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()

    def send(self, kind: str, body: Any = None) -> None:
        """Raises OSError when the other side is gone."""
        data = pickle.dumps((kind, body), protocol=5)
        with self._lock:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> tuple[str, Any] | None:
        """The next message; None when the other side is gone."""
        head = _read(self._socket, _LENGTH.size)
        data = None if head is None else _read(self._socket, _LENGTH.unpack(head)[0])
        try:
            return None if data is None else pickle.loads(data)
        except Exception as exc:  # the process boundary: a message of another version
            return "failed", (1, f"a message cannot be read: {type(exc).__name__}: {exc}", None)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._lock:  # a thread that sends has been woken by the shutdown
            self._socket.close()


def _read(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        try:
            got = connection.recv_into(view)
        except OSError:
            return None
        if not got:
            return None
        view = view[got:]
    return bytes(data)


# ------------------------------------------------------------------------ leader


@dataclass
class _Member:
    """A follower as the leader sees it."""

    rank: int
    host: str
    pid: int
    channel: Channel
    inboxes: dict[str, queue.SimpleQueue[Any]] = field(default_factory=dict)
    heard_s: float = 0.0
    entered: int = 0
    gone: bool = False
    failure: tuple[int, str, str | None] | None = None

    def inbox(self, kind: str) -> queue.SimpleQueue[Any]:
        """Messages of one kind in order; a step in flight and a command after it may be waited for in either order."""
        return self.inboxes.setdefault(kind, queue.SimpleQueue())

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


class Crew:
    """The followers, ranks 1 … size − 1, as the leader holds them.

    ``fate(rank)`` may say how a process ended (None: not known); ``stuck`` is called with the loss when the main
    thread has not come back from an exchange some seconds after it, and must not return.
    """

    def __init__(self, size: int, *, step_s: float, fate: Callable[[int], str | None] = lambda rank: None):
        self.size = size
        self.step_s = step_s
        self.fate = fate
        self.stuck: Callable[[PeerLost], None] = _leave
        self.entered: Callable[[], int] = lambda: 0
        self._members: dict[int, _Member] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._busy_since: float | None = None
        self._lost_s: float | None = None

    def accept(self, listener: socket.socket, token: bytes, timeout_s: float) -> None:
        """Wait until every follower has connected. Raises PeerLost naming those that did not."""
        listener.settimeout(0.2)
        ends = time.monotonic() + timeout_s
        while len(self._members) < self.size - 1:
            self._raise_fate()
            try:
                connection, address = listener.accept()
            except TimeoutError:
                if time.monotonic() < ends:
                    continue
                missing = [r for r in range(1, self.size) if r not in self._members]
                raise PeerLost(
                    f"{_ranks(missing)} did not connect within {timeout_s:.0f} s", hint="look at what they printed"
                ) from None
            connection.settimeout(5.0)
            hello = _read(connection, _HELLO.size)
            known, rank, pid = _HELLO.unpack(hello) if hello is not None else (b"", 0, 0)
            if not hmac.compare_digest(known, token) or not 0 < rank < self.size or rank in self._members:
                connection.close()
                continue
            connection.settimeout(None)
            self._members[rank] = _Member(rank, address[0], pid, Channel(connection), heard_s=time.monotonic())
        for member in self._members.values():
            threading.Thread(target=self._listen, args=(member,), name=f"rank-{member.rank}", daemon=True).start()
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def tell(self, rank: int, kind: str, body: Any = None) -> None:
        """Send a message to one follower. Raises PeerLost when it is gone."""
        try:
            self._members[rank].channel.send(kind, body)
        except OSError:
            raise self.loss() from None

    def tell_all(self, kind: str, body: Any = None) -> None:
        for rank in self._members:
            self.tell(rank, kind, body)

    def gather(self, kind: str, timeout_s: float, doing: str) -> dict[int, Any]:
        """The next message of ``kind`` of every follower, by rank.

        Raises PeerLost naming the ranks that are gone, or have not answered in time; what a follower failed with.
        """
        ends = time.monotonic() + timeout_s
        out: dict[int, Any] = {}
        while len(out) < len(self._members):
            for rank, member in self._members.items():
                if rank not in out and not member.inbox(kind).empty():
                    out[rank] = member.inbox(kind).get()
            if len(out) == len(self._members):
                break
            with self._changed:
                if any(m.gone or m.failure for m in self._members.values()):
                    raise self.loss()
                waiting = [m for r, m in self._members.items() if r not in out and m.inbox(kind).empty()]
                if waiting and not self._changed.wait(max(0.0, ends - time.monotonic())):
                    raise self._late(waiting, timeout_s, doing)
        return out

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Around what may wait for other ranks: what the transport raises becomes PeerLost that names the rank."""
        self._busy_since = time.monotonic()
        try:
            yield
        except RuntimeError as exc:
            if isinstance(exc, DeepInferError) or not is_transport(exc):
                raise
            raise self.loss(exc) from exc
        finally:
            self._busy_since = None

    def loss(self, cause: BaseException | None = None) -> DeepInferError:
        """The error for what has happened: who is gone, or failed, or hangs; waits a moment until that shows."""
        ends = time.monotonic() + _SETTLE_S
        with self._changed:
            while not any(m.gone or m.failure for m in self._members.values()):
                if not self._changed.wait(max(0.0, ends - time.monotonic())):
                    break
        time.sleep(0.2)  # those that fall with the first one must not be taken for it
        members = list(self._members.values())
        failed = [m for m in members if m.failure is not None and m.failure[0] != PeerLost.exit_code]
        if failed:
            code, text, hint = failed[0].failure or (0, "", None)
            return _CLASSES.get(code, PeerLost)(f"{failed[0].name}: {text}", hint=hint)
        gone = [m for m in members if m.gone and m.failure is None]
        if gone:
            return _lost(gone, None, [self.fate(m.rank) for m in gone])
        silent = [m for m in members if time.monotonic() - m.heard_s > _SILENT_S]
        if silent:
            return _lost(silent, "no answer on the control channel", [None] * len(silent))
        why = "" if cause is None else f": {str(cause).splitlines()[0]}"
        return PeerLost(f"the ranks lost each other{why}", hint=_HINT)

    def _late(self, waiting: list[_Member], timeout_s: float, doing: str) -> PeerLost:
        """Who is to blame for a step that does not end: the silent, else those furthest behind in the exchanges."""
        now = time.monotonic()
        silent = [m for m in waiting if now - m.heard_s > _SILENT_S]
        behind = min(m.entered for m in waiting)
        blamed = silent or [m for m in waiting if m.entered == behind]
        return _lost(blamed, f"no answer to {doing} within {timeout_s:.0f} s", [None] * len(blamed))

    def close(self) -> None:
        """Tell everybody to end."""
        self._closing = True
        for member in self._members.values():
            with contextlib.suppress(OSError):
                member.channel.send("stop")

    def _listen(self, member: _Member) -> None:
        while True:
            message = member.channel.receive()
            if message is not None and message[0] == "pong":
                member.heard_s, member.entered = time.monotonic(), message[1]
                continue
            with self._changed:
                if message is None:
                    member.gone = True
                    if not self._closing and self._lost_s is None:
                        self._lost_s = time.monotonic()
                elif message[0] == "failed":
                    member.failure = message[1]
                else:
                    member.inbox(message[0]).put(message[1])
                self._changed.notify_all()
            if message is None:
                member.channel.close()
                return

    def _watch(self) -> None:
        """Ping; end the process when its main thread hangs in an exchange with a rank that is gone or too slow."""
        while not self._closing:
            for member in self._members.values():
                with contextlib.suppress(OSError):
                    member.channel.send("ping")
            time.sleep(_PING_S)
            now, busy = time.monotonic(), self._busy_since
            if busy is None or self._closing:
                continue
            lost = self._lost_s is not None and now - max(self._lost_s, busy) > _GRACE_S
            if lost or now - busy > self.step_s + _GRACE_S:
                error = self.loss()
                self.stuck(error if isinstance(error, PeerLost) else PeerLost(error.message, hint=error.hint))

    def _raise_fate(self) -> None:
        for rank in range(1, self.size):
            how = self.fate(rank)
            if how is not None:
                raise PeerLost(f"rank {rank} ended before it connected: {how}", hint="look at what it printed")


_HINT = "start again with --healthy N for the ranks that are left"


def _lost(members: list[_Member], why: str | None, how: list[str | None]) -> PeerLost:
    """The error for ranks that are gone, each with ``how`` it ended where that is known."""
    names = [m.name if h is None or len(members) == 1 else f"{m.name}, {h}" for m, h in zip(members, how, strict=True)]
    why = why if why is not None or len(members) > 1 else how[0]
    verb = "was" if len(names) == 1 else "were"
    return PeerLost(f"{' and '.join(names)} {verb} lost" + (f": {why}" if why else ""), hint=_HINT)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def is_transport(exc: RuntimeError) -> bool:
    """Whether an exchange failed, as opposed to the computation around it."""
    text, kind = str(exc).lower(), type(exc).__name__
    return kind.startswith("Dist") or any(w in text for w in ("gloo", "nccl", "connection", "timed out", "socket"))


def _leave(error: PeerLost) -> None:
    os.write(2, f"error: {error.message}\n".encode())
    os._exit(PeerLost.exit_code)


# ---------------------------------------------------------------------- follower


class Follower:
    """A follower's side: ``next`` gives the leader's messages in order; the leader's end ends this process."""

    def __init__(self, host: str, port: int, token: bytes, rank: int, timeout_s: float):
        connection = socket.create_connection((host, port), timeout=timeout_s)
        connection.sendall(_HELLO.pack(token, rank, os.getpid()))
        connection.settimeout(None)
        self.channel = Channel(connection)
        self.entered: Callable[[], int] = lambda: 0
        self._inbox: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="leader", daemon=True).start()

    def next(self) -> tuple[str, Any]:
        """The next message. Raises PeerLost when the leader is gone."""
        message = self._inbox.get()
        if message is None:
            raise PeerLost("rank 0 was lost", hint=_HINT)
        return message

    def answer(self, kind: str, body: Any = None) -> None:
        """Send a message. Raises PeerLost when the leader is gone."""
        try:
            self.channel.send(kind, body)
        except OSError:
            raise PeerLost("rank 0 was lost", hint=_HINT) from None

    def _listen(self) -> None:
        while True:
            message = self.channel.receive()
            if message is None:
                self._inbox.put(None)
                time.sleep(_GRACE_S)  # the main thread may hang in an exchange and cannot be woken
                os._exit(PeerLost.exit_code)
            if message[0] == "ping":
                with contextlib.suppress(OSError):
                    self.channel.send("pong", self.entered())
            else:
                self._inbox.put(message)


def new_token() -> bytes:
    """32 random bytes that the processes of one run share."""
    return secrets.token_bytes(32)
