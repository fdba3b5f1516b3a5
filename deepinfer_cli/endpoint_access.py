"""What verbs that ask an endpoint share: the key from a variable, the model's name, keys of the request's body."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deepinfer_engine.errors import NotReadyError, UsageError

if TYPE_CHECKING:
    from deepinfer_engine.remote.client import Endpoint


def api_key(variable: str | None) -> str | None:
    """The key that an environment variable holds; None when none is named."""
    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        raise NotReadyError(f"the environment variable {variable} is not set", hint=f"export {variable}=…")
    return value


def body_keys(given: Sequence[str], fixed: Collection[str]) -> dict[str, Any]:
    """``KEY=JSON`` texts as an object; ``fixed`` keys are the verb's own and refused."""
    from deepinfer_engine.config.strict_json import parse_json

    out: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        try:
            out[key] = parse_json(value)
        except ValueError as exc:
            raise UsageError(f"--body {text}: {exc}", hint='write KEY=JSON, such as top_k=20 or user="me"') from None
        if not equals or not key or key in fixed:
            raise UsageError(f"--body {text}: this key cannot be set")
    return out


def named_endpoint(url: str, model: str | None, key_variable: str | None, timeout_s: float) -> Endpoint:
    """An endpoint with the model to ask for: the given one, or the only one it serves."""
    from deepinfer_engine.remote.client import Client, Endpoint, check_url

    target = Endpoint(check_url(url), model or "", api_key(key_variable), timeout_s)
    return target if target.model else replace(target, model=Client(target).only_model())
