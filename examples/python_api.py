"""The engine from Python: several requests at once, streamed as they come.

    python examples/python_api.py [CHECKPOINT]

Without a checkpoint the embedded model runs.
"""

from __future__ import annotations

import sys

from deepinfer_engine.engine import Engine
from deepinfer_engine.tokens.protocol import ChatCodec
from deepinfer_engine.types import Completion, Request, SamplingParams

QUESTIONS: tuple[str, ...] = ("17+25?", "What is 12+30?", "Name a colour.")


def main(model: str | None = None) -> None:
    """Answer three questions in one batch; the first one greedily, the others sampled from a seed."""
    with Engine.open("cpu-nano", model) as engine:
        codec = ChatCodec(engine.checkpoint.directory, engine.config)
        parsers = {}
        for i, question in enumerate(QUESTIONS):
            prompt = codec.render([{"role": "user", "content": question}])
            sampling = SamplingParams(temperature=0.0 if i == 0 else 0.8, seed=i, max_tokens=96)
            engine.submit(Request(question, prompt.token_ids, sampling))
            parsers[question] = prompt.parser()
        answers = dict.fromkeys(QUESTIONS, "")
        for event in engine.stream():
            parser = parsers[event.request_id]
            if isinstance(event, Completion):
                pieces = parser.finish(event.finish_reason)
            else:
                pieces = parser.push([event.token_id])
            answers[event.request_id] += "".join(p.text for p in pieces if p.kind == "content")
            if isinstance(event, Completion):
                print(f"{event.request_id} -> {answers[event.request_id].strip()} [{event.finish_reason}]")


if __name__ == "__main__":
    main(*sys.argv[1:2])
