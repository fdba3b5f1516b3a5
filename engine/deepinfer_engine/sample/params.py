"""Sampling settings out of a request body: one reading for files, pipes and servers. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from deepinfer_engine.errors import UsageError
from deepinfer_engine.types import SamplingParams

#: every key of a body that says how tokens are drawn; the second is the chat interface's newer name of the first
SAMPLING_KEYS = frozenset({f.name for f in fields(SamplingParams)} | {"max_completion_tokens"})


def sampling_from(body: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    """Settings of a body over ``defaults``; null means the default. Keys outside ``SAMPLING_KEYS`` are the caller's.

    Raises ``UsageError`` naming the key, what it holds and what is expected.
    """
    given = {k: v for k, v in body.items() if k in SAMPLING_KEYS and v is not None}
    if "max_completion_tokens" in given:
        if "max_tokens" in given and given["max_tokens"] != given["max_completion_tokens"]:
            raise UsageError("max_tokens and max_completion_tokens differ, expected one of them")
        given["max_tokens"] = given.pop("max_completion_tokens")
    return replace(defaults, **given)
