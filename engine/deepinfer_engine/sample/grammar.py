"""Structured output: grammars compiled beside the step loop, and per-choice states that say which token may follow.

Compilation runs in worker processes with a time limit each; a request waits for its grammar outside the queue while
others run. Compiled grammars are cached by what they were made from, up to a size. Added tokens (control tokens, image
ids) are blanked in the vocabulary the library sees, so that they can never be part of a constrained answer; tool
grammars keep the one marker they are made of.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer_engine.errors import DeepInferError, NotReadyError, UsageError
from deepinfer_engine.sample.pattern_check import check_pattern
from deepinfer_engine.sample.schema_check import MAX_SOURCE, checked_schema
from deepinfer_engine.tokens import tokenizer as spelling
from deepinfer_engine.tokens.tokenizer import Tokenizer
from deepinfer_engine.types import GrammarSpec

#: what the codec's prompt already holds of a required tool call
_CALLS_OPENING = f"\n\n<{spelling.DSML} calls>\n"
#: seconds a worker may take to import the library and read the vocabulary
_START_S = 120.0
#: seconds between two looks for a grammar that is waited for
_POLL_S = 0.05


def checked_grammar(spec: GrammarSpec) -> GrammarSpec:
    """The grammar as it is compiled. ``UsageError`` for what is not enforced or too large to try."""
    if spec.kind == "json_schema":
        return GrammarSpec("json_schema", checked_schema(spec.source))
    if spec.kind == "regex":
        check_pattern(spec.source)
    if spec.kind in ("regex", "ebnf") and not spec.source.strip():
        raise UsageError(f"the {spec.kind} grammar is empty")
    if len(spec.source) > MAX_SOURCE:
        raise UsageError(f"the grammar has {len(spec.source)} characters, at most {MAX_SOURCE}")
    if spec.kind in ("tools", "tools_required"):
        for i, tool in enumerate(json.loads(spec.source)):
            parameters = tool["function"].get("parameters")
            if parameters is not None:
                try:
                    checked_schema(json.dumps(parameters))
                except UsageError as exc:
                    raise UsageError(f"tools[{i}].function.parameters: {exc}") from None
    return spec


def require_library() -> None:
    """Raise ``NotReadyError`` with the install line when the grammar library is absent."""
    if importlib.util.find_spec("xgrammar") is None:
        raise NotReadyError("structured output needs the extra 'grammar'", hint="pip install 'deepinfer-cli[grammar]'")


def vocabulary(tokenizer: Tokenizer, vocab: int, eos: int) -> dict[str, Any]:
    """What ``tokenizer_info`` needs, as JSON: token bytes as Latin-1 text, added ids, the marker of tool calls."""
    return {
        "tokens": [tokenizer.token_bytes(i).decode("latin-1") for i in range(tokenizer.vocab_size)],
        "added": sorted(tokenizer.added_ids),
        "marker": tokenizer.added.get(spelling.DSML),
        "vocab": vocab,
        "eos": eos,
    }


def tokenizer_info(xgrammar: Any, hello: Mapping[str, Any], which: str) -> Any:
    """The library's view of the vocabulary: ``plain`` blanks every added token, ``tags`` all but the marker."""
    tokens = [t.encode("latin-1") for t in hello["tokens"]]
    for token in hello["added"]:
        if which == "plain" or token != hello["marker"]:
            tokens[token] = b""
    return xgrammar.TokenizerInfo(
        tokens,
        xgrammar.VocabType.RAW,
        vocab_size=hello["vocab"],
        stop_token_ids=[hello["eos"]],
        add_prefix_space=False,
    )


class GrammarState:
    """Where one choice is in its grammar. Accepting a token is undone by ``rollback``."""

    def __init__(self, compiled: Any, words: int, *, opened: bool):
        from xgrammar import GrammarMatcher  # pyright: ignore[reportMissingImports]

        self._matcher = GrammarMatcher(compiled)
        self._words = words
        if opened and not self._matcher.accept_string(_CALLS_OPENING):
            raise UsageError("the tool grammar does not begin with the opening of a call")

    def mask(self) -> np.ndarray | None:
        """int32 [ceil(V/32)] of the tokens that may follow; None when all may."""
        words = np.zeros((1, self._words), dtype=np.int32)
        return words[0] if self._matcher.fill_next_token_bitmask(words, 0) else None

    @property
    def ended(self) -> bool:
        """Whether the end of the answer was accepted; nothing may follow."""
        return self._matcher.is_terminated()

    def accept(self, token: int) -> bool:
        """Advance by a token; False (and nothing changes) when the grammar does not allow it."""
        return self._matcher.accept_token(token)

    def rollback(self, tokens: int) -> None:
        """Undo the last accepted tokens."""
        self._matcher.rollback(tokens)


@dataclass(frozen=True)
class Compiled:
    """Outcome of one request: a state factory's input, or the error that says why not."""

    ticket: int
    grammar: Any
    opened: bool
    error: DeepInferError | None


class GrammarService:
    """Compiles in ``workers`` processes. ``request`` and ``poll`` never wait."""

    def __init__(self, hello: Mapping[str, Any], *, workers: int, timeout_s: float, cache_bytes: int):
        self._hello = json.dumps(hello).encode() + b"\n"
        self._vocabulary = hello
        self._timeout_s = timeout_s
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[GrammarSpec, Any] = OrderedDict()
        self._waiting: dict[GrammarSpec, list[int]] = {}
        self._jobs: queue.SimpleQueue[GrammarSpec | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[GrammarSpec, Any, DeepInferError | None]] = queue.SimpleQueue()
        self._ready: list[Compiled] = []
        self._infos: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._closed = False
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(workers)]
        self.compiled = 0
        for thread in self._threads:
            thread.start()

    def request(self, ticket: int, spec: GrammarSpec) -> None:
        """Ask for a checked grammar; ``poll`` returns the ticket when it is there."""
        if spec in self._cache:
            self._cache.move_to_end(spec)
            self._ready.append(self._outcome(ticket, spec, self._cache[spec], None))
            return
        if spec in self._waiting:
            self._waiting[spec].append(ticket)
            return
        self._waiting[spec] = [ticket]
        self._jobs.put(spec)

    def poll(self, wait_s: float = 0.0) -> list[Compiled]:
        """Outcomes since the last call; waits up to ``wait_s`` for one when there is none."""
        out, self._ready = self._ready, []
        while True:
            try:
                spec, grammar, error = self._done.get(timeout=wait_s) if wait_s and not out else self._done.get_nowait()
            except queue.Empty:
                return out
            if error is None:
                self.compiled += 1
                self._keep(spec, grammar)
            out += [self._outcome(ticket, spec, grammar, error) for ticket in self._waiting.pop(spec)]

    def require(self, spec: GrammarSpec, label: str) -> None:
        """Check and compile a grammar, while nothing else is asked for. Raises its error, under ``label``."""
        try:
            self.request(-1, checked_grammar(spec))
            while not (done := self.poll(_POLL_S)):
                pass
            if done[0].error is not None:
                raise done[0].error
        except DeepInferError as exc:
            raise type(exc)(f"{label}: {exc.message}", hint=exc.hint) from None

    def close(self) -> None:
        """End the workers, whatever they are doing; what was asked for is not answered any more."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _outcome(self, ticket: int, spec: GrammarSpec, grammar: Any, error: DeepInferError | None) -> Compiled:
        return Compiled(ticket, grammar, spec.kind == "tools_required", error)

    def _keep(self, spec: GrammarSpec, grammar: Any) -> None:
        self._cache[spec] = grammar
        while sum(g.memory_size_bytes for g in self._cache.values()) > self._cache_bytes:
            self._cache.popitem(last=False)

    # ----------------------------------------------------------- worker side

    def _serve(self) -> None:
        worker: _Worker | None = None
        while (spec := self._jobs.get()) is not None:
            try:
                if worker is None:
                    worker = self._start()
                reply = worker.ask({"kind": spec.kind, "source": spec.source}, self._timeout_s)
                grammar = self._load(spec, reply["compiled"]) if "compiled" in reply else None
                self._done.put((spec, grammar, UsageError(reply["error"]) if "error" in reply else None))
            except _WorkerLost as exc:
                self._drop(worker)
                worker = None
                self._done.put((spec, None, exc.error))
            except DeepInferError as exc:
                self._done.put((spec, None, exc))
            except Exception as exc:  # a thread's boundary: the request must hear of it, the loop must go on
                self._done.put((spec, None, DeepInferError(f"{type(exc).__name__}: {exc}")))
        self._drop(worker)

    def _start(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise _WorkerLost(NotReadyError("the engine was closed"))
            worker = _Worker()
            self._workers.append(worker)
        try:
            worker.greet(self._hello)
        except _WorkerLost:
            self._drop(worker)
            raise
        return worker

    def _drop(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.kill()
            worker.release()
            with self._lock:
                self._workers.remove(worker)

    def _load(self, spec: GrammarSpec, text: str) -> Any:
        import xgrammar  # pyright: ignore[reportMissingImports]

        which = "tags" if spec.kind in ("tools", "tools_required") else "plain"
        with self._lock:
            if which not in self._infos:
                self._infos[which] = tokenizer_info(xgrammar, self._vocabulary, which)
        grammar = xgrammar.CompiledGrammar.deserialize_json(text, self._infos[which])
        words = np.zeros((1, -(-self._vocabulary["vocab"] // 32)), dtype=np.int32)
        if xgrammar.GrammarMatcher(grammar).fill_next_token_bitmask(words, 0) and not words.any():
            raise UsageError("the grammar allows no text at all")
        return grammar


class _WorkerLost(Exception):
    """A worker process that died or took too long, and the error for what it was asked for."""

    def __init__(self, error: DeepInferError):
        super().__init__(error.message)
        self.error = error


class _Worker:
    """One process and the pipe to it."""

    def __init__(self) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deepinfer_engine.sample.grammar_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
        )
        self._buffer = b""

    def greet(self, hello: bytes) -> None:
        """Describe the vocabulary and wait until jobs are taken."""
        try:
            self._exchange(hello, _START_S)
        except _WorkerLost as exc:
            raise _WorkerLost(NotReadyError(f"the grammar compiler did not start: {exc}")) from None

    def ask(self, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one job and wait for its answer."""
        return self._exchange(json.dumps(job).encode() + b"\n", timeout_s)

    def kill(self) -> None:
        """End the process; the thread that waits for it sees its pipe close."""
        self._process.kill()
        self._process.wait()

    def release(self) -> None:
        """Close the pipes; only the thread that reads them may do so."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # what was not sent yet has no reader
                pipe.close()

    def _exchange(self, data: bytes, timeout_s: float) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        deadline = time.monotonic() + timeout_s
        try:
            stdin.write(data)
            stdin.flush()
        except (BrokenPipeError, ValueError):
            raise _WorkerLost(UsageError("the compiler ended unexpectedly")) from None
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stdout], [], [], left)[0]:
                hint = "make it smaller, or raise grammar.timeout_s"
                raise _WorkerLost(UsageError(f"compiling took longer than {timeout_s:g} s", hint=hint))
            chunk = os.read(stdout.fileno(), 1 << 20)
            if not chunk:
                raise _WorkerLost(UsageError("the compiler ended unexpectedly"))
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)
