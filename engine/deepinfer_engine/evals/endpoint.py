"""Any OpenAI-compatible endpoint as a backend: a bounded number of requests in flight, answers as they arrive."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from deepinfer_engine.evals.backend import Reply
from deepinfer_engine.evals.prompt import Prompt
from deepinfer_engine.evals.task import Sampling
from deepinfer_engine.evals.workers import Workers
from deepinfer_engine.remote.client import Client, RequestFailed


class EndpointBackend:
    """``extra`` replaces keys of the request's body; a null removes one that the server does not know."""

    def __init__(self, client: Client, sampling: Sampling, *, concurrency: int, extra: Mapping[str, Any]):
        self._client = client
        self._sampling = sampling
        self._concurrency = concurrency
        self._extra = extra

    def identity(self) -> dict[str, Any]:
        """What answers, as a log states it: no key, nothing that varies."""
        endpoint = self._client.endpoint
        return {"kind": "endpoint", "url": endpoint.url, "model": endpoint.model, "body": dict(self._extra)}

    def shown(self, prompt: Prompt) -> str:
        return json.dumps(self._body(prompt), indent=2, ensure_ascii=False, allow_nan=False)

    def close(self) -> None:
        self._client.stop.set()

    def answers(self, prompts: Iterable[Prompt]) -> Iterator[Reply]:
        """Replies in the order in which they arrive; no more than the concurrency is in flight."""
        waiting = iter(prompts)
        workers: Workers[Reply] = Workers(self._concurrency, "eval")
        try:
            while True:
                while workers.in_flight < self._concurrency and (prompt := next(waiting, None)) is not None:
                    workers.put(partial(self._ask, prompt))
                if not workers.in_flight:
                    return
                yield workers.get()
        finally:
            if workers.in_flight:  # stopped early: end the waits of what is still in flight
                self._client.stop.set()
            workers.close()

    def _ask(self, prompt: Prompt) -> Reply:
        started = time.perf_counter()
        try:
            value, attempts = self._client.chat(self._body(prompt))
        except RequestFailed as exc:
            seconds = time.perf_counter() - started
            return Reply(prompt.key, "", "", "error", exc.message, seconds=seconds, attempts=exc.attempts)
        return _reply(prompt.key, value, time.perf_counter() - started, attempts)

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        sampling = self._sampling
        thinking = sampling.mode != "non-think"
        body: dict[str, Any] = {
            "model": self._client.endpoint.model,
            "messages": [{"role": "user", "content": prompt.text}],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "seed": prompt.seed,
            "stream": False,
            "thinking": {"type": "enabled" if thinking else "disabled"},
        }
        if thinking:
            body["reasoning_effort"] = sampling.mode
        body |= self._extra
        return {key: value for key, value in body.items() if value is not None}


def _reply(key: str, value: dict[str, Any], seconds: float, attempts: int) -> Reply:
    """A reply from a response; one without a complete choice is an error, never an empty answer."""

    def failed(why: str) -> Reply:
        return Reply(key, "", "", "error", why, seconds=seconds, attempts=attempts)

    choices = value.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return failed("the response does not hold exactly one choice")
    message, reason = choices[0].get("message"), choices[0].get("finish_reason")
    if not isinstance(message, dict):
        return failed("the response's choice holds no message")
    if reason not in ("stop", "length"):
        return failed(f"the answer ended with finish_reason {reason!r}")
    texts = {name: message.get(name) or "" for name in ("content", "reasoning_content", "reasoning")}
    if not all(isinstance(text, str) for text in texts.values()):
        return failed("the response's message is not text")
    usage = value.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    return Reply(
        key=key,
        content=texts["content"],
        reasoning=texts["reasoning_content"] or texts["reasoning"],
        finish=reason,
        prompt_tokens=_count(counts.get("prompt_tokens")),
        generated_tokens=_count(counts.get("completion_tokens")),
        seconds=seconds,
        attempts=attempts,
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
