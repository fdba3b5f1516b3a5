"""Score a checkpoint on held-out tasks through the engine, greedy, on any device.

    python -m recipes.nano.measure --checkpoint DIR --data DIR --out FILE [--numerics reference,float,fast]
        [--sets two_step,sort_8] [--count 500] [--profile h200x1-nano] [--seed 9000]
    python -m recipes.nano.measure --data DIR --requests FILE.jsonl [--sets ...] [--count 30] [--seed 9100] [--texts]

``--data`` is what ``recipes.nano.data`` wrote. An answer is right when what follows the thinking is exactly the
expected text (for JSON: the same object). FILE gets a JSON line per set and numerics as soon as it is done,
with the first wrong answers. ``--requests`` writes the tasks, mixed, as requests for ``deepinfer run -f`` instead: as
token ids, or with ``--texts`` as conversations that any endpoint takes.
A set that is named twice is asked twice of one engine: with cache.prefix the second time after a prefix hit.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from random import Random
from typing import Any

from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.engine import Engine
from deepinfer_engine.types import Completion, Request, SamplingParams
from recipes.nano import tasks
from recipes.nano.packing import Writer
from recipes.nano.tokenizer import THINK_END

#: Longest thinking and answer of a set, in tokens; the longest expected ones take about two thirds.
MOST_TOKENS = {"two_step": 160, "sort_8": 90, "count": 80, "json": 120, "tools": 120}


def right(kind: str, given: str, wanted: str) -> bool:
    """Whether an answer's text is the expected one."""
    if kind != "json":
        return given == wanted
    try:
        return json.loads(given) == json.loads(wanted)
    except ValueError:
        return False


def score(engine: Engine, writer: Writer, name: str, items: list[tasks.Task]) -> dict[str, Any]:
    """Counts of one set and its first wrong answers."""
    wanted: dict[str, tasks.Task] = {}
    hits, wrong, tokens, prompt, cached, replayed = 0, [], 0, 0, 0, 0
    for i, task in enumerate(items):
        row = writer.row(task)
        wanted[str(i)] = task
        sampling = SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS.get(name, 64))
        engine.submit(Request(str(i), tuple(row.ids[: row.prompt]), sampling))
    for event in engine.stream():
        if not isinstance(event, Completion):
            continue
        task = wanted[event.request_id]
        text = writer.tokenizer.decode(list(event.token_ids), skip_special_tokens=False)
        given = text.rpartition(THINK_END)[2].removesuffix("<｜end▁of▁sentence｜>")
        tokens += len(event.token_ids)
        prompt += event.usage.prompt
        cached += event.usage.cached
        replayed += event.usage.replayed
        if event.finish_reason == "stop" and right(task.chat.kind, given, task.chat.answer):
            hits += 1
        elif len(wrong) < 6:
            wrong.append([task.chat.question[-90:], text[-160:], task.chat.answer])
    counts = {"items": len(items), "right": hits, "share": round(hits / len(items), 4), "tokens": tokens}
    return counts | {"prompt": prompt, "cached": cached, "replayed": replayed, "wrong": wrong}


def requests(
    writer: Writer, items: dict[str, list[tasks.Task]], sets: list[str], seed: int, *, texts: bool = False
) -> list[str]:
    """The tasks of ``sets`` in a mixed order, a JSON line each.

    Token ids: greedy, at most the set's tokens. Texts: the conversation alone.
    """
    lines = []
    for name in sets:
        for i, task in enumerate(items[name]):
            line: dict[str, Any] = {"id": f"{name}-{i}"}
            if texts:
                line |= conversation(task)
            else:
                row = writer.row(task)
                line |= {"token_ids": row.ids[: row.prompt], "temperature": 0.0}
                line |= {"max_tokens": MOST_TOKENS.get(name, 64)}
            lines.append(json.dumps(line, ensure_ascii=False))
    Random(seed).shuffle(lines)
    return lines


def conversation(task: tasks.Task) -> dict[str, Any]:
    """The keys of a chat-completions body that render to a task's prompt. ``ValueError`` for the frame of an effort."""
    messages = [{"role": "user", "content": task.chat.question}]
    if task.earlier is not None:
        earlier = [{"role": "user", "content": task.earlier.question}]
        messages = [*earlier, {"role": "assistant", "content": task.earlier.answer}, *messages]
    out: dict[str, Any] = {"messages": messages, "thinking": task.frame != "none"}
    if task.frame.startswith("tools"):
        offered = [tasks.TOOLS[i] for i in tasks.TOOL_SETS[int(task.frame[5:])]]
        out["tools"] = [{"type": "function", "function": function(tool)} for tool in offered]
    elif task.frame not in ("high", "none", "turn"):
        raise ValueError(f"frame {task.frame} is none of a plain conversation")
    return out


def function(tool: tasks.Tool) -> dict[str, Any]:
    """A tool as a chat-completions body describes it."""
    schema = {"type": "object", "properties": {tool.parameter: {"type": tool.kind}}, "required": [tool.parameter]}
    return {"name": tool.name, "description": tool.description, "parameters": schema}


def measure(args: argparse.Namespace, writer: Writer, items: dict[str, list[tasks.Task]]) -> None:
    """Every set in every numerics through one engine each, a line per result."""
    with args.out.open("a", encoding="utf-8") as file:
        for mode in args.numerics.split(","):
            profile = load_profile(args.profile, [*args.set_profile, f"numerics.mode={mode}"]).profile
            with Engine.open(profile, args.checkpoint) as engine:
                for name in args.sets.split(","):
                    start = time.monotonic()
                    result = score(engine, writer, name, items[name])
                    line = {"set": name, "numerics": mode, "seconds": round(time.monotonic() - start, 1), **result}
                    print(json.dumps(line, ensure_ascii=False), file=file, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="score a nano checkpoint through the engine")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--requests", type=Path, help="write requests there instead of scoring a checkpoint")
    parser.add_argument("--texts", action="store_true", help="requests as conversations, not as token ids")
    parser.add_argument("--profile", default="h200x1-nano")
    parser.add_argument("--set-profile", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--numerics", default="reference")
    sets = "two_step,lookup_1k,sort_8,json,lookup_4k,sums,count,copy_reverse,tools,second_turn"
    parser.add_argument("--sets", default=sets)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=9000)
    args = parser.parse_args()
    writer = Writer(args.data)
    items = tasks.evaluation_tasks(args.seed, args.count)
    if args.requests is not None:
        lines = requests(writer, items, args.sets.split(","), args.seed, texts=args.texts)
        args.requests.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    elif args.checkpoint is None or args.out is None:
        parser.error("give --checkpoint and --out, or --requests")
    else:
        measure(args, writer, items)


if __name__ == "__main__":
    main()
