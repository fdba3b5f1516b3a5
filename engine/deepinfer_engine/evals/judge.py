"""A second model that decides whether a free-form answer means the same as the right one.

Its verdict is read strictly: one JSON object with ``correct`` true or false. Anything else is an error of that sample,
never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer_engine.config.strict_json import parse_json
from deepinfer_engine.evals.grade import Grade
from deepinfer_engine.evals.prompt import Prompt
from deepinfer_engine.remote.client import Client, RequestFailed

#: Changing this text changes results, so it is part of a run's identity.
INSTRUCTIONS = """\
You decide whether the final answer of a response agrees with the correct answer to a question. Do not solve the \
question and do not judge the reasoning: compare the response's final answer with the correct answer only. They agree \
when they state the same thing, whatever the notation, or differ by no more than rounding in a numerical answer. \
A response without a final answer, or with several different ones, does not agree.

Question:
{question}

Correct answer:
{answer}

Response:
{response}

Reply with one JSON object and nothing else:
{{"final_answer": "<the response's final answer, or empty>", "correct": <true or false>}}"""

_OBJECT = re.compile(r"\{[^{}]*\}")


@dataclass(frozen=True)
class Verdict:
    """A grade, or the reason there is none."""

    grade: Grade | None
    error: str | None = None


class Judge:
    """Asks the judge's endpoint, greedily. Safe to call from several threads."""

    def __init__(self, client: Client):
        self._client = client

    def identity(self) -> Mapping[str, Any]:
        return {"url": self._client.endpoint.url, "model": self._client.endpoint.model, "instructions": INSTRUCTIONS}

    def close(self) -> None:
        self._client.stop.set()

    def judge(self, prompt: Prompt, content: str) -> Verdict:
        """The verdict on one answer."""
        if not content.strip():
            return Verdict(Grade("unparsed"))
        text = INSTRUCTIONS.format(question=prompt.item.question, answer=prompt.item.answer, response=content)
        body = {
            "model": self._client.endpoint.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0.0,
            "max_tokens": 4096,
        }
        try:
            value, _ = self._client.chat(body)
        except RequestFailed as exc:
            return Verdict(None, f"judge: {exc.message}")
        return _read(value)


def _read(value: dict[str, Any]) -> Verdict:
    try:
        content = value["choices"][0]["message"]["content"]
        found = _OBJECT.findall(content)
        verdict = parse_json(found[-1]) if found else {}
    except (KeyError, IndexError, TypeError, ValueError):
        return Verdict(None, "judge: the reply is not understood")
    correct, answer = verdict.get("correct"), verdict.get("final_answer")
    if not isinstance(correct, bool):
        return Verdict(None, "judge: the reply holds no verdict")
    extracted = answer if isinstance(answer, str) and answer.strip() else None
    if not correct and extracted is None:
        return Verdict(Grade("unparsed"))
    return Verdict(Grade("correct" if correct else "wrong", extracted, "gold" if correct else extracted))
