"""Running a batch over the engine: requests enter as rows become free, lines leave as answers are complete."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from deepinfer_engine.engine import Engine
from deepinfer_engine.eplb.record import Balance
from deepinfer_engine.errors import CapacityError, UsageError
from deepinfer_engine.offline.journal import Journal
from deepinfer_engine.offline.lines import Item
from deepinfer_engine.offline.prepare import Prepared, Preparer
from deepinfer_engine.tokens.protocol import Answer, ChatPrompt
from deepinfer_engine.types import Completion, Request

#: failed lines that are told at the end
_SHOWN = 8


@dataclass(frozen=True)
class Tally:
    """Progress: lines finished and failed, tokens generated, seconds since the start, and how even ranks are.

    ``failures``: the first of the failed, by line and reason.
    """

    done: int
    failed: int
    total: int
    tokens: int
    seconds: float
    balance: Callable[[], Balance | None] | None = None
    failures: tuple[str, ...] = ()


class BatchRun:
    """One run over prepared requests; ``run`` ends when every line is in the journal."""

    def __init__(self, engine: Engine, preparer: Preparer, journal: Journal, *, model: str, created: int):
        self._engine = engine
        self._preparer = preparer
        self._journal = journal
        self._model = model
        self._created = created
        self._flying: dict[str, tuple[Prepared, list[Completion]]] = {}
        self._began = time.perf_counter()
        self._done = self._failed = self._tokens = 0
        self._failures: list[str] = []

    def run(self, items: Iterable[Item], progress: Callable[[Tally], None]) -> Tally:
        """Answer every item that the journal does not hold yet; ``progress`` after every step."""
        todo = [i for i in items if i.line not in self._journal.done]
        waiting = iter(todo)
        limits = self._engine.scheduler.limits
        window = 2 * limits.rows * limits.dp  # one batch runs, one is queued, so that no row waits for a prompt
        exhausted = False
        tally = self._tally(len(todo))
        while self._flying or not exhausted:
            while not exhausted and len(self._flying) < window:
                item = next(waiting, None)
                if item is None:
                    exhausted = True
                else:
                    self._submit(item)
            for event in self._engine.step() if self._flying else ():
                if isinstance(event, Completion):
                    self._collect(event)
            tally = self._tally(len(todo))
            progress(tally)
        return tally

    def _tally(self, total: int) -> Tally:
        seconds = time.perf_counter() - self._began
        return Tally(
            self._done, self._failed, total, self._tokens, seconds, self._engine.balance, tuple(self._failures)
        )

    def _submit(self, item: Item) -> None:
        prepared = self._preparer.prepare(item)
        label = f"line {item.line}"
        try:
            self._engine.submit(Request(label, prepared.token_ids, item.sampling, grammar=prepared.grammar))
        except (CapacityError, UsageError) as exc:
            code = "does_not_fit" if isinstance(exc, CapacityError) else "invalid_request"
            self._fail(item, code, exc.message)
            return
        self._flying[label] = (prepared, [])

    def _collect(self, done: Completion) -> None:
        prepared, choices = self._flying[done.request_id]
        choices.append(done)
        self._tokens += done.usage.generated
        item = prepared.item
        if len(choices) < item.sampling.n:
            return
        del self._flying[done.request_id]
        choices.sort(key=lambda c: c.index)
        bad = next((c for c in choices if c.finish_reason in ("error", "abort")), None)
        if bad is not None:
            code = bad.error or bad.finish_reason
            self._fail(item, code, bad.error_detail or code.replace("_", " "))
            return
        answers = [answer_of(prepared.chat, c) for c in choices]
        if item.form == "plain":
            line = _plain_line(item, choices, answers)
        else:
            line = _batch_line(item, choices, answers, self._model, self._created, self._engine)
        self._keep(item, line)

    def _fail(self, item: Item, code: str, message: str) -> None:
        self._failed += 1
        if len(self._failures) < _SHOWN:
            self._failures.append(f"line {item.line}: {message}")
        self._keep(item, _failure(item, code, message))

    def _keep(self, item: Item, line: dict[str, Any]) -> None:
        self._journal.append(item.line, json.dumps(line, ensure_ascii=False, allow_nan=False))
        self._done += 1


def answer_of(chat: ChatPrompt | None, done: Completion) -> Answer:
    """The parts of a completion; raw text is all content."""
    if chat is None:
        return Answer("", done.text, (), done.finish_reason)
    answer = chat.parse(done.token_ids, done.finish_reason)
    if done.tail:
        return Answer(answer.reasoning, answer.content + done.tail, answer.tool_calls, answer.finish_reason)
    return answer


def _calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in answer.tool_calls
    ]


def _plain_line(item: Item, choices: list[Completion], answers: list[Answer]) -> dict[str, Any]:
    rows = []
    for done, answer in zip(choices, answers, strict=True):
        row: dict[str, Any] = {"content": answer.content, "reasoning": answer.reasoning}
        if answer.tool_calls:
            row["tool_calls"] = _calls(answer)
        row["finish_reason"] = answer.finish_reason
        row["stop_reason"] = done.stop_reason
        row["reproducible"] = done.reproducible
        row["usage"] = asdict(done.usage)
        row["timing"] = {"ttft_s": done.timing.ttft_s, "e2e_s": done.timing.e2e_s}
        if done.logprobs is not None:
            row["logprobs"] = [asdict(p) for p in done.logprobs]
        rows.append(row)
    if item.sampling.n == 1:
        return {"id": item.key, **rows[0], "error": None}
    return {"id": item.key, "choices": rows, "error": None}


def _batch_line(
    item: Item, choices: list[Completion], answers: list[Answer], model: str, created: int, engine: Engine
) -> dict[str, Any]:
    chat = item.kind == "messages"
    rows = []
    for done, answer in zip(choices, answers, strict=True):
        row: dict[str, Any] = {"index": done.index, "finish_reason": answer.finish_reason}
        row["logprobs"] = None if done.logprobs is None else _logprobs(done, engine)
        if chat:
            message: dict[str, Any] = {"role": "assistant", "content": answer.content}
            if answer.reasoning:
                message["reasoning_content"] = answer.reasoning
            if answer.tool_calls:
                message["tool_calls"] = _calls(answer)
            row["message"] = message
        else:
            row["text"] = answer.content
        rows.append(row)
    generated = sum(c.usage.generated for c in choices)
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{item.line}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": item.model or model,
        "choices": rows,
        "usage": {
            "prompt_tokens": choices[0].usage.prompt,
            "completion_tokens": generated,
            "total_tokens": choices[0].usage.prompt + generated,
        },
    }
    return {
        "id": f"batch_req_{item.line}",
        "custom_id": item.key,
        "response": {"status_code": 200, "request_id": f"req_{item.line}", "body": body},
        "error": None,
    }


def _logprobs(done: Completion, engine: Engine) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = engine.tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(data)}

    return {
        "content": [
            {**entry(p.token_id, p.logprob), "top_logprobs": [entry(t, v) for t, v in p.top]}
            for p in done.logprobs or ()
        ]
    }


def _failure(item: Item, code: str, message: str) -> dict[str, Any]:
    error = {"code": code, "message": message, "line": item.line}
    if item.form == "batch":
        return {"id": f"batch_req_{item.line}", "custom_id": item.key, "response": None, "error": error}
    return {"id": item.key, "error": error}
