"""Our engine as a backend: the vendor's chat rendering, continuous batching, answers as they finish."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from deepinfer_engine.engine import Engine, limits_of
from deepinfer_engine.errors import CapacityError, UsageError
from deepinfer_engine.evals.backend import Reply
from deepinfer_engine.evals.prompt import Prompt
from deepinfer_engine.evals.task import Sampling
from deepinfer_engine.launch import Launch
from deepinfer_engine.tokens.protocol import ChatCodec, ChatPrompt
from deepinfer_engine.types import Completion, Request, SamplingParams


def check_room(sampling: Sampling, launch: Launch) -> None:
    """Refuse, before weights are loaded, an answer length that leaves the context no room for a prompt."""
    limits_of(launch.profile, launch.checkpoint.config).check("every sample", 1, sampling.max_tokens)


class Renderer:
    """Turns prompts into ids by the vendor's chat rendering, with the effort of the sampling's mode."""

    def __init__(self, launch: Launch, sampling: Sampling):
        self._codec = ChatCodec(launch.checkpoint.directory, launch.checkpoint.config)
        self._sampling = sampling

    def render(self, prompt: Prompt) -> ChatPrompt:
        thinking = self._sampling.mode != "non-think"
        effort = self._sampling.mode if thinking else None
        return self._codec.render([{"role": "user", "content": prompt.text}], thinking=thinking, effort=effort)


def engine_identity(launch: Launch, profile_digest: str) -> dict[str, Any]:
    """What answers, as a log states it; known before weights are loaded."""
    profile = launch.profile
    return {
        "kind": "engine",
        "profile": launch.requested.name,
        "profile_digest": profile_digest,
        "emulated_keys": sorted(r.key for r in launch.replaced),
        "inactive_keys": sorted(i.key for i in launch.inactive),
        "numerics": profile.numerics.mode,
        "ep": profile.parallel.ep,
        "device": launch.device,
        "config_digest": launch.checkpoint.config.digest,
        "weights_digest": launch.checkpoint.digest,
        "embedded": launch.embedded,
    }


class EngineBackend:
    """Prompts answered in this process by an open engine."""

    def __init__(self, engine: Engine, launch: Launch, sampling: Sampling):
        self._engine = engine
        self._renderer = Renderer(launch, sampling)
        self._launch = launch
        self._sampling = sampling

    def close(self) -> None:
        self._engine.close()

    def answers(self, prompts: Iterable[Prompt]) -> Iterator[Reply]:
        """Replies in the order in which answers finish; prompts are handed over as rows become free."""
        waiting = iter(prompts)
        flying: dict[str, ChatPrompt] = {}
        rows = self._launch.profile.sched.max_rows_per_rank * self._launch.profile.parallel.dp
        exhausted = False
        while flying or not exhausted:
            # one batch in flight and one queued keep every row busy without holding all prompts in memory
            while not exhausted and len(flying) < 2 * rows:
                prompt = next(waiting, None)
                if prompt is None:
                    exhausted = True
                    break
                refused = self._submit(prompt, flying)
                if refused is not None:
                    yield refused
            for event in self._engine.step() if flying else ():
                if isinstance(event, Completion):
                    yield self._reply(flying.pop(event.request_id), event)

    def _submit(self, prompt: Prompt, flying: dict[str, ChatPrompt]) -> Reply | None:
        """Queue one prompt; a reply when it cannot run (too long for the context)."""
        rendered = self._renderer.render(prompt)
        sampling = self._sampling
        params = SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, max_tokens=sampling.max_tokens, seed=prompt.seed
        )
        try:
            self._engine.submit(Request(prompt.key, rendered.token_ids, params))
        except (CapacityError, UsageError) as exc:
            return Reply(prompt.key, "", "", "error", exc.message, prompt_tokens=len(rendered.token_ids))
        flying[prompt.key] = rendered
        return None

    def _reply(self, rendered: ChatPrompt, done: Completion) -> Reply:
        answer = rendered.parse(done.token_ids, done.finish_reason)
        finish: Literal["stop", "length", "error"] = "error"
        error = "the logits were not finite" if done.finish_reason == "error" else "the request was aborted"
        if done.finish_reason in ("stop", "length"):
            finish, error = ("length" if done.finish_reason == "length" else "stop"), None
        return Reply(
            key=done.request_id,
            content=answer.content,
            reasoning=answer.reasoning,
            finish=finish,
            error=error,
            prompt_tokens=done.usage.prompt,
            generated_tokens=done.usage.generated,
            seconds=done.timing.e2e_s,
            reproducible=done.reproducible,
            rendered_sha256=hashlib.sha256(rendered.text.encode()).hexdigest(),
        )
