"""Runs an evaluation: asks what the log does not hold yet, judges, appends, and tells how it stands."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from deepinfer_engine import __version__
from deepinfer_engine.evals.backend import Backend, Reply
from deepinfer_engine.evals.grade import Grade, grade
from deepinfer_engine.evals.items import ItemSet
from deepinfer_engine.evals.judge import Judge, Verdict
from deepinfer_engine.evals.log import LogContent, SampleLog
from deepinfer_engine.evals.prompt import Plan, Prompt, prompts
from deepinfer_engine.evals.task import LoadedTask
from deepinfer_engine.evals.workers import Workers

#: (samples done, samples in all, correct so far, graded so far)
Progress = Callable[[int, int, int, int], None]
#: Verdicts asked for at a time, beside the answers.
_JUDGES = 8


@dataclass(frozen=True)
class Job:
    """Everything that decides a run but who answers it."""

    loaded: LoadedTask
    items: ItemSet
    plan: Plan
    judge: Judge | None = None

    def identity(self, answerer: Mapping[str, Any]) -> dict[str, Any]:
        """What a log of this run states, given who answers; a log continues under an equal identity only."""
        task = self.loaded.task
        return {
            "task": task.name,
            "task_digest": self.loaded.digest,
            "data": self.items.source,
            "data_revision": self.items.revision,
            "data_sha256": self.items.sha256,
            "items": len(self.items.items),
            "skipped": self.items.skipped,
            "grader": task.grader,
            "judge": None if self.judge is None else dict(self.judge.identity()),
            "sampling": self.plan.sampling.model_dump(mode="json"),
            "seeds": list(self.plan.seeds),
            "backend": dict(answerer),
            "tool_version": __version__,
        }


def run(job: Job, backend: Backend, log: SampleLog, progress: Progress) -> LogContent:
    """Ask every sample that the log lacks or holds as errored; the log's content afterwards.

    Whatever ends it early (a signal, a lost endpoint), finished samples are in the log.
    """
    done = log.content.done
    records = dict(log.content.records)
    todo = [p for p in prompts(job.loaded.task, job.items.items, job.plan) if p.key not in done]
    by_key = {p.key: p for p in todo}
    total = len(todo) + len(done)
    correct = sum(r["outcome"] == "correct" for r in done.values())
    graded = sum(r["outcome"] != "ungraded" for r in done.values())
    finished = len(done)
    progress(finished, total, correct, graded)
    for reply, verdict in _judged(job, backend.answers(todo), by_key):
        prompt = by_key[reply.key]
        record = _record(prompt, reply, verdict)
        log.append(record)
        records[reply.key] = record
        finished += 1
        correct += record["outcome"] == "correct"
        graded += record["outcome"] not in ("errored", "ungraded")
        progress(finished, total, correct, graded)
    return replace(log.content, records=records)


def _judged(job: Job, replies: Iterable[Reply], by_key: Mapping[str, Prompt]) -> Iterator[tuple[Reply, Verdict]]:
    """Each reply with its verdict; judge calls run beside the answers, a few at a time."""
    if job.loaded.task.grader != "judge" or job.judge is None:
        for reply in replies:
            yield reply, _verdict(job, by_key[reply.key], reply)
        return
    judge, workers = job.judge, Workers[tuple[Reply, Verdict]](_JUDGES, "judge")
    try:
        for reply in replies:
            if reply.finish == "stop":
                workers.put(partial(_ask_judge, judge, by_key[reply.key], reply))
            else:
                yield reply, _verdict(job, by_key[reply.key], reply)
            while workers.in_flight and (workers.ready() or workers.in_flight >= 8 * _JUDGES):
                yield workers.get()
        while workers.in_flight:
            yield workers.get()
    finally:
        if workers.in_flight:
            judge.close()
        workers.close()


def _ask_judge(judge: Judge, prompt: Prompt, reply: Reply) -> tuple[Reply, Verdict]:
    return reply, judge.judge(prompt, reply.content)


def _verdict(job: Job, prompt: Prompt, reply: Reply) -> Verdict:
    task = job.loaded.task
    if reply.finish == "error":
        return Verdict(Grade("errored"))
    if reply.finish == "length":  # a box before the cut may not have been the last one
        return Verdict(Grade("truncated"))
    if task.grader == "judge":
        return Verdict(Grade("ungraded"))
    return Verdict(grade(task.grader, reply.content, prompt.item.answer, prompt.choices, prompt.right))


def _record(prompt: Prompt, reply: Reply, verdict: Verdict) -> dict[str, Any]:
    """One line of the log: enough to judge again, to check by eye, and to see what it cost."""
    found = verdict.grade or Grade("errored")
    record: dict[str, Any] = {
        "item": prompt.item.id,
        "sample": prompt.sample,
        "seed": prompt.seed,
        "outcome": found.outcome,
        "extracted": found.extracted,
        "gold": prompt.item.answer,
        "key": found.key,
        "error": verdict.error or reply.error,
        "finish": reply.finish,
        "content": reply.content,
        "reasoning": reply.reasoning,
        "prompt_sha256": prompt.digest,
        "rendered_sha256": reply.rendered_sha256,
        "reproducible": reply.reproducible,
        "prompt_tokens": reply.prompt_tokens,
        "generated_tokens": reply.generated_tokens,
        "seconds": round(reply.seconds, 3),
        "attempts": reply.attempts,
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if prompt.order:
        record["order"] = list(prompt.order)
    return record
