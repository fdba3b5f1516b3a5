"""``Preparer``: a line of a request file to prompt ids and what restricts its answer. No torch, no weights."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_engine.errors import UsageError
from deepinfer_engine.offline.lines import Item
from deepinfer_engine.tokens.protocol import ChatCodec, ChatPrompt
from deepinfer_engine.types import GrammarSpec

#: kind of constraint that the codec finds in a body → ours
_CONSTRAINTS = {"json": "json_schema", "regex": "regex"}


@dataclass(frozen=True)
class Prepared:
    """An item with its prompt ids, the conversation (None: raw), and what restricts its answer."""

    item: Item
    token_ids: tuple[int, ...]
    chat: ChatPrompt | None
    grammar: GrammarSpec | None


class Preparer:
    """Turns items into prompt ids; needs the tokenizer, not the weights."""

    def __init__(self, codec: ChatCodec, bos: int):
        self._codec = codec
        self._bos = bos

    def prepare(self, item: Item) -> Prepared:
        """``UsageError`` for a conversation that cannot be rendered."""
        if item.kind == "token_ids":
            return Prepared(item, item.content, None, item.grammar)
        if item.raw:
            return Prepared(item, (self._bos, *self._codec.tokenizer.encode_text(item.content)), None, item.grammar)
        messages = [{"role": "user", "content": item.content}] if item.kind == "prompt" else item.content
        # sampling and stop strings are the engine's: the codec must not apply them a second time
        body = {"model": item.model or "deepseek-v4.1-flash", "messages": messages, **item.options}
        chat = self._codec.render_request(body)
        return Prepared(item, chat.token_ids, chat, item.grammar or _constraint(chat))


def _constraint(chat: ChatPrompt) -> GrammarSpec | None:
    if chat.constraint is None:
        return None
    kind, schema = chat.constraint
    if kind in ("tool_call", "tool_call_required"):
        return GrammarSpec("tools" if kind == "tool_call" else "tools_required", schema)
    if kind == "json" and not schema:
        return GrammarSpec("json_object")
    if kind not in _CONSTRAINTS:
        raise UsageError(f"output constraint {kind!r} is not supported")
    return GrammarSpec("regex" if kind == "regex" else "json_schema", schema)
