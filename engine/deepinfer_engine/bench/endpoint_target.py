"""Any OpenAI-compatible endpoint as a target: one thread and one connection per request in flight, streamed answers.

What we measure includes the network, the connection's set-up and the server's own rendering. Token counts are the
server's: its ``usage`` is asked for; without it they are unknown, not guessed from characters.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_engine.bench.metrics import Value
from deepinfer_engine.bench.run import Chunk, Ended, TargetFacts
from deepinfer_engine.bench.words import WORDS
from deepinfer_engine.bench.workload import PlannedRequest, Workload
from deepinfer_engine.config.profile import LoadedProfile
from deepinfer_engine.config.schema import leaves
from deepinfer_engine.errors import NotReadyError
from deepinfer_engine.offline.lines import Item, bad_lines
from deepinfer_engine.remote.client import Endpoint
from deepinfer_engine.remote.stream import Interface, Piece, Stream, StreamFailed
from deepinfer_engine.types import SamplingParams

#: failures that every further request would meet too
_FATAL = ("unreachable", "http_401", "http_403", "http_404")


class EndpointTarget:
    """``interface`` chat sends text of one word per planned token; completions sends token ids of ``id_range``.

    ``profile``: the deployment behind the endpoint, for its GPU count and the result; None leaves both undefined.
    ``extra`` replaces keys of the request's body; a null removes one that the server does not know.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        interface: Interface = "chat",
        id_range: tuple[int, int] = (1000, 30_000),
        extra: Mapping[str, Any] | None = None,
        profile: LoadedProfile | None = None,
    ):
        self.endpoint = endpoint
        self.interface: Interface = interface
        self.extra = dict(extra or {})
        self.profile = profile
        self._ids = np.arange(*id_range, dtype=np.int64)
        self._range = id_range
        self._events: queue.SimpleQueue[Chunk | Ended | NotReadyError] = queue.SimpleQueue()
        self._open: dict[int, Stream] = {}
        self._lock = threading.Lock()
        self._answered = False

    def facts(self) -> TargetFacts:
        identity = {
            "kind": "endpoint",
            "url": self.endpoint.url,
            "model": self.endpoint.model,
            "interface": self.interface,
            "body": self.extra,
        }
        if self.interface == "completions":
            identity["token_ids"] = list(self._range)
        hidden = {"name": "behind the endpoint"}
        if self.profile is None:
            reason = "no profile names the GPUs behind the endpoint"
            return TargetFacts(identity, None, None, {}, hidden, None, reason, True)
        profile = self.profile.profile
        reason = f"profile {profile.name} names no GPU"
        gpus = profile.hardware.gpus or None
        return TargetFacts(identity, profile.name, self.profile.digest, leaves(profile), hidden, gpus, reason, True)

    def plan(self, workload: Workload) -> Workload:
        """As it is: how many tokens a text has is the endpoint's to say."""
        return workload

    def check(self, workload: Workload) -> None:
        """Refuse (``UsageError``) lines of a file of texts that this interface cannot carry as they are meant."""
        texts = {r.text.line: r.text for r in (*workload.requests, *workload.warmup) if r.text is not None}
        found = [(item.line, self._unsendable(item)) for _, item in sorted(texts.items())]
        if problems := [f"line {line}: {text}" for line, text in found if text]:
            raise bad_lines(Path(workload.recipe["load"]["file"]), problems)

    def _unsendable(self, item: Item) -> str | None:
        if item.model is not None and item.model != self.endpoint.model:
            return f"model is {item.model!r}, the endpoint is asked for {self.endpoint.model!r}"
        if item.form == "plain" and item.grammar is not None:
            return "json_schema, regex and ebnf are our engine's; write response_format for an endpoint"
        if self.interface == "chat":
            if item.kind == "token_ids" or item.raw:
                return f"{item.kind} cannot be sent as a conversation; use the interface completions"
        elif item.kind == "messages" or item.options:
            return "is a conversation, the interface completions has none; use the interface chat"
        return None

    def prepare(self, workload: Workload, request: PlannedRequest, salt: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.endpoint.model,
            "max_tokens": request.output_tokens,  # of a text the most
            "temperature": workload.sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if workload.sampling.ignore_eos:
            body["ignore_eos"] = True
        if request.text is not None:
            body |= _body_of(request.text, self.interface)
        elif self.interface == "completions":
            body["prompt"] = workload.token_ids(request, self._ids, salt=salt)
        else:
            words = workload.token_ids(request, _WORD_NUMBERS, salt=salt)
            body["messages"] = [{"role": "user", "content": " ".join(WORDS[i] for i in words)}]
        body |= self.extra
        return {key: value for key, value in body.items() if value is not None}

    def start(self, index: int, prepared: Any) -> float:
        stream = Stream(self.endpoint, self.interface)
        with self._lock:
            self._open[index] = stream
        # daemon: a request may hang for as long as an endpoint likes, and an interrupted run must end now
        thread = threading.Thread(
            target=self._follow, args=(index, stream, prepared), name=f"bench-{index}", daemon=True
        )
        at = time.perf_counter()
        thread.start()
        return at

    def poll(self, timeout_s: float) -> Sequence[Chunk | Ended]:
        out: list[Chunk | Ended] = []
        try:
            event = self._events.get(timeout=timeout_s)
            while True:
                if isinstance(event, NotReadyError):
                    raise event
                out.append(event)
                event = self._events.get_nowait()
        except queue.Empty:
            return out

    def abort(self) -> Sequence[Chunk | Ended]:
        now = time.perf_counter()
        with self._lock:
            streams, self._open = self._open, {}
        out: list[Chunk | Ended] = []
        while not self._events.empty():
            event = self._events.get()
            if not isinstance(event, NotReadyError):
                out.append(event)
        ended = {e.index for e in out if isinstance(e, Ended)}
        for stream in streams.values():
            stream.close()
        return [*out, *(Ended(i, now, "cancelled", finish_reason="abort") for i in streams if i not in ended)]

    def begin(self) -> None:
        """Nothing to reset: the endpoint's counters are its own."""

    def counters(self) -> tuple[dict[str, Value], dict[str, str]]:
        return {}, {}

    def close(self) -> None:
        self.abort()

    def _follow(self, index: int, stream: Stream, body: dict[str, Any]) -> None:
        """One request to its end, on its own thread."""
        try:
            ended = self._read(index, stream, body)
            self._answered = True
        except StreamFailed as exc:
            if exc.group in _FATAL and not self._answered:
                hint = "is the endpoint up, are the URL, the model's name and the key right?"
                self._events.put(NotReadyError(f"{self.endpoint.url}: {exc.message}", hint=hint))
                return
            ended = Ended(index, time.perf_counter(), "failed", error_group=exc.group, error=exc.message)
        except Exception as exc:  # the thread's boundary: a request that ends in no way would hang the run
            ended = Ended(
                index, time.perf_counter(), "failed", error_group="client", error=f"{type(exc).__name__}: {exc}"
            )
        with self._lock:
            self._open.pop(index, None)
        self._events.put(ended)

    def _read(self, index: int, stream: Stream, body: dict[str, Any]) -> Ended:
        prompt = generated = cached = finish = None
        pending = 0
        last = None
        for piece in stream.pieces(body):
            last = piece
            finish = piece.finish or finish
            prompt = piece.prompt_tokens if piece.prompt_tokens is not None else prompt
            cached = piece.cached_tokens if piece.cached_tokens is not None else cached
            new = _new_tokens(piece, generated)
            generated = piece.generated_tokens if piece.generated_tokens is not None else generated
            if piece.text:
                self._events.put(Chunk(index, piece.at_s, new))
                pending += 1
        if last is None or finish is None:
            raise StreamFailed("stream_cut", "the stream ended without saying how the answer ended")
        if not pending and body.get("ignore_eos"):
            raise StreamFailed("empty_answer", "no text came although the answer may not end early (ignore_eos)")
        if generated is None and not pending:
            generated = 0
        return Ended(
            index,
            time.perf_counter(),
            "completed",
            input_tokens=prompt,
            output_tokens=generated,
            cached_tokens=cached,
            finish_reason=finish,
        )


def _body_of(item: Item, interface: Interface) -> dict[str, Any]:
    """What a line adds to the body: its text, what belongs to its conversation, and how it wants to be drawn."""
    if interface == "completions":
        body: dict[str, Any] = {"prompt": list(item.content) if item.kind == "token_ids" else item.content}
    else:
        user = [{"role": "user", "content": item.content}]
        body = {"messages": user if item.kind == "prompt" else item.content, **item.options}
    neutral, own = asdict(SamplingParams()), asdict(item.sampling)
    drawn = {key: value for key, value in own.items() if value != neutral[key] and key != "max_tokens"}
    if "logit_bias" in drawn:
        drawn["logit_bias"] = dict(item.sampling.logit_bias)
    return {**body, **drawn, "temperature": item.sampling.temperature}


def _new_tokens(piece: Piece, before: int | None) -> int | None:
    """Tokens of a chunk where the server counts along; None where it does not."""
    return None if piece.generated_tokens is None else piece.generated_tokens - (before or 0)


_WORD_NUMBERS = np.arange(len(WORDS), dtype=np.int64)
