"""Loads of kind ``prompts``: the texts of a file, one request a line, in the forms that ``deepinfer run -f`` takes.

A line decides its text and may decide how its answer is drawn (temperature, stop, its own lower ``max_tokens``); what
it leaves out is the recipe's. Lines are taken in order, or shuffled by the seed, and again from the first when there
are more requests than lines; warm-up takes the lines that follow. No torch.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import numpy as np

from deepinfer_engine.bench.recipe import Recipe
from deepinfer_engine.bench.workload import PlannedRequest, Workload
from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.errors import ArtefactError, UsageError
from deepinfer_engine.offline.lines import bad_lines, read_items
from deepinfer_engine.types import SamplingParams


def read_prompts(spec: Recipe, path: Path) -> tuple[tuple[PlannedRequest, ...], tuple[PlannedRequest, ...], str]:
    """Requests, warm-up requests and the file's SHA-256. ``UsageError`` with every bad line by its number."""
    load = spec.load
    assert load.output_tokens is not None
    defaults = SamplingParams(temperature=spec.sampling.temperature, max_tokens=load.output_tokens)
    if not path.is_file():
        raise ArtefactError(f"{path}: no such file", hint="load.file is relative to the recipe")
    items = read_items(path, defaults, thinking=None)
    problems = [f"line {i.line}: {text}" for i in items if (text := _unfit(i.sampling, load.output_tokens))]
    if problems:
        raise bad_lines(path, problems)
    order = np.random.default_rng([spec.seed, 2]).permutation(len(items)) if load.shuffle else np.arange(len(items))
    count = len(items) if spec.requests is None else spec.requests
    drawn = [items[order[i % len(items)]] for i in range(count + spec.warmup.requests)]
    planned = [
        PlannedRequest(i, None, item.sampling.max_tokens, (), text=item)
        for i, item in ((i if i < count else i - count, item) for i, item in enumerate(drawn))
    ]
    return tuple(planned[:count]), tuple(planned[count:]), hashlib.sha256(path.read_bytes()).hexdigest()


def _unfit(sampling: SamplingParams, most: int) -> str | None:
    """Why a line's settings cannot be measured, or None. ``most``: tokens that the recipe allows an answer."""
    if sampling.max_tokens > most:
        return f"max_tokens is {sampling.max_tokens}, the recipe's load.output_tokens is {most}"
    if sampling.n != 1:
        return f"n is {sampling.n}, a benchmark's request has one answer"
    return "ignore_eos is true; an answer ends where the model ends it" if sampling.ignore_eos else None


def with_tokens(workload: Workload, directory: Path, config: ModelConfig) -> Workload:
    """The workload with its texts rendered for a checkpoint's tokenizer; itself when it has none.

    Raises ``UsageError`` with every line that cannot be rendered or names a token outside the vocabulary.
    """
    if workload.measured:
        return workload
    from deepinfer_engine.offline.prepare import Prepared, Preparer
    from deepinfer_engine.tokens.protocol import ChatCodec

    preparer = Preparer(ChatCodec(directory, config), config.bos_token_id)
    done: dict[int, Prepared] = {}
    problems: list[str] = []
    for item in {r.text.line: r.text for r in (*workload.requests, *workload.warmup) if r.text is not None}.values():
        try:
            done[item.line] = preparer.prepare(item)
        except UsageError as exc:
            problems.append(f"line {item.line}: {exc}")
            continue
        if (text := _outside(done[item.line].token_ids, config)) is not None:
            problems.append(f"line {item.line}: {text}")
    if problems:
        raise bad_lines(Path(workload.recipe["load"]["file"]), problems)
    earlier: list[tuple[int, ...]] = []

    def rendered(request: PlannedRequest) -> PlannedRequest:
        assert request.text is not None
        found = done[request.text.line]
        ids = found.token_ids
        seen = _longest_beginning(ids, earlier)
        return replace(request, input_tokens=len(ids), ids=ids, grammar=found.grammar, seen_tokens=seen)

    requests = tuple(rendered(r) for r in workload.requests)
    earlier.clear()
    return replace(workload, requests=requests, warmup=tuple(rendered(r) for r in workload.warmup))


def _outside(ids: Sequence[int], config: ModelConfig) -> str | None:
    bad = next((i for i in ids if not 0 <= i < config.vocab_size or i == config.image_token_id), None)
    if bad is None:
        return None
    if bad == config.image_token_id:
        return f"token {bad} stands for an image; this engine reads text only"
    return f"token {bad} is outside the vocabulary, expected 0 to {config.vocab_size - 1}"


def _longest_beginning(ids: tuple[int, ...], earlier: list[tuple[int, ...]]) -> int:
    """Leading tokens that one of the ``earlier`` prompts (sorted) has too; ``ids`` joins them.

    Among sorted sequences a neighbour shares the most.
    """
    at = bisect_left(earlier, ids)
    near = earlier[max(at - 1, 0) : at + 1]
    earlier.insert(at, ids)
    return max((sum(1 for _ in takewhile(lambda p: p[0] == p[1], zip(ids, n, strict=False))) for n in near), default=0)
