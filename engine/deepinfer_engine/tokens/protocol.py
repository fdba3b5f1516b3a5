"""``ChatCodec``: a conversation to prompt ids, generated ids back to reasoning, content and tool calls.

The prompt text and the output grammar are those of ``deepseek_recipe``, the vendor's codec, with the V4.1 encoding and
the checkpoint's own tokenizer. A request passes through its conversion in every case, so a conversation given as
Python objects and the same one in a chat-completions body render alike. Sampling parameters are not looked at.

Two things are done here and not in the library:

* Generated ids are cut into whole UTF-8 characters before they are handed over. The library decodes a push at a time
  and keeps a push that ends inside a character to itself, so its text would depend on how the ids are grouped.
* Control tokens count only as tokens: ``</think>`` spelled with ordinary ids inside the reasoning is text, as in the
  library. Only a stretch with invalid UTF-8 goes over as text, because the library cannot flush it as ids.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import deepseek_recipe as recipe

from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.errors import ArtefactError, CheckpointError, UsageError
from deepinfer_engine.tokens import tokenizer as spelling
from deepinfer_engine.tokens.tokenizer import Tokenizer
from deepinfer_engine.types import FinishReason

#: Tokens that prompts and answers are built from; a tokenizer without one of them cannot hold a conversation.
REQUIRED = (
    spelling.BOS,
    spelling.EOS,
    spelling.PAD,
    spelling.SYSTEM,
    spelling.USER,
    spelling.ASSISTANT,
    spelling.THINK_START,
    spelling.THINK_END,
    spelling.DSML,
)
_MODEL = "deepseek-v4.1-flash"  # the library resolves the encoding from a model name; ours for calls without one
_LIBRARY_REASON = {"stop": recipe.InferenceFinishReason.Stop, "length": recipe.InferenceFinishReason.Length}
_SPECIALS = recipe.SpecialTokens(image=spelling.IMAGE)  # the library's default is V4's spelling
_REQUEST_ERRORS = (recipe.ConversionError, ValueError, TypeError, RecursionError)


@dataclass(frozen=True)
class Piece:
    """The next part of an answer. ``text`` continues the reasoning, the content or a tool call's JSON arguments.

    A tool call starts with a piece that carries ``call_id`` and ``name``; ``index`` tells the calls of an answer apart.
    """

    kind: Literal["reasoning", "content", "tool_call"]
    text: str
    index: int = 0
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True)
class ToolCall:
    """One call of an answer. ``arguments`` is the model's JSON text; neither it nor ``name`` is validated."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """A whole answer. ``finish_reason`` is the engine's, or ``tool_calls`` when the model stopped after calls."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason | Literal["tool_calls"]


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation: prompt ids up to the first token to generate, and how its answer is to be parsed.

    ``constraint`` is (kind, schema) of what the request wants the output restricted to, None if free; enforcing it is
    the caller's. ``stop`` are the request's stop strings; the parser applies them.
    """

    token_ids: tuple[int, ...]
    text: str
    thinking: bool
    constraint: tuple[str, str] | None
    stop: tuple[str, ...]
    _tokenizer: Tokenizer
    _library_tokenizer: recipe.Tokenizer
    _request: recipe.ConversationRequest

    def parser(self) -> AnswerParser:
        """A fresh parser for one answer to this prompt."""
        generator = recipe.ChatCompletionRequest.chunk_generator(self._request, "", _MODEL)
        stream = recipe.StreamProcessor(generator, self._request.parsing_options, self._library_tokenizer)
        return AnswerParser(stream, self._tokenizer)

    def parse(self, token_ids: Iterable[int], reason: FinishReason = "stop") -> Answer:
        """The whole answer at once; equal to what a parser streams, whatever the grouping."""
        parser = self.parser()
        pieces = [*parser.push(token_ids), *parser.finish(reason)]
        return collect(pieces, parser.finish_reason or reason)


def collect(pieces: Iterable[Piece], reason: FinishReason | Literal["tool_calls"]) -> Answer:
    """Join the pieces of one answer."""
    text = {"reasoning": [], "content": []}
    calls: dict[int, tuple[str, str, list[str]]] = {}
    for piece in pieces:
        if piece.kind == "tool_call":
            calls.setdefault(piece.index, (piece.call_id, piece.name, []))[2].append(piece.text)
        else:
            text[piece.kind].append(piece.text)
    return Answer(
        reasoning="".join(text["reasoning"]),
        content="".join(text["content"]),
        tool_calls=tuple(ToolCall(i, name, "".join(parts)) for _, (i, name, parts) in sorted(calls.items())),
        finish_reason=reason,
    )


class AnswerParser:
    """Splits one answer into pieces as its ids come; the joined pieces do not depend on how ids are grouped.

    The EOS that ends a generation is not fed. ``finished`` turns true when a stop string was met: cancel the
    generation, ids after that point are not part of the answer and yield nothing.
    """

    def __init__(self, stream: recipe.StreamProcessor, tokenizer: Tokenizer):
        self._stream = stream
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held: list[int] = []  # ids whose bytes do not end on a character yet
        self._held_text = ""
        self._closed = False
        self.finish_reason: FinishReason | Literal["tool_calls"] | None = None

    @property
    def finished(self) -> bool:
        """Whether the answer is complete, by a stop string or by ``finish``."""
        return self._stream.finished

    def push(self, token_ids: Iterable[int]) -> list[Piece]:
        """Pieces that these ids complete; ``UsageError`` for an id outside the vocabulary."""
        assert not self._closed, "push after finish"
        pieces: list[Piece] = []
        for token_id in token_ids:
            data = self._tokenizer.token_bytes(token_id)
            if self.finished:
                continue
            self._held_text += self._decoder.decode(data)
            self._held.append(token_id)
            if not self._decoder.getstate()[0]:
                pieces += self._flush()
        return pieces

    def finish(self, reason: FinishReason) -> list[Piece]:
        """Pieces still held back; sets ``finish_reason``. Called once, also after a stop string was met."""
        assert not self._closed, "finish called twice"
        pieces: list[Piece] = []
        if not self.finished:
            pieces += self._flush()
        if not self.finished:  # an aborted answer is cut off like one that reached its limit
            pieces += self._send(recipe.InferenceChunk.finish(_LIBRARY_REASON.get(reason, _LIBRARY_REASON["length"])))
        pieces += self._pieces(self._stream.finish())
        self._closed = True
        if reason in ("abort", "error") or self.finish_reason is None:
            self.finish_reason = reason
        return pieces

    def _flush(self) -> list[Piece]:
        if not self._held:
            return []
        text = self._held_text + self._decoder.decode(b"", final=True)
        ids, self._held, self._held_text = self._held, [], ""
        if "\ufffd" in text:
            return self._send(recipe.InferenceChunk.text(text, len(ids)))
        return self._send(recipe.InferenceChunk.tokens(ids))

    def _send(self, chunk: recipe.InferenceChunk) -> list[Piece]:
        return self._pieces(self._stream.push(chunk))

    def _pieces(self, events: Sequence[Any]) -> list[Piece]:
        pieces: list[Piece] = []
        for event in events:
            choice = json.loads(event.to_json())["choices"][0]
            delta = choice["delta"]
            if delta.get("reasoning_content"):
                pieces.append(Piece("reasoning", delta["reasoning_content"]))
            if delta.get("content"):
                pieces.append(Piece("content", delta["content"]))
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                pieces.append(
                    Piece(
                        "tool_call",
                        function.get("arguments") or "",
                        index=call["index"],
                        call_id=call.get("id") or "",
                        name=function.get("name") or "",
                    )
                )
            if choice.get("finish_reason"):
                self.finish_reason = choice["finish_reason"]
        return pieces


class ChatCodec:
    """Renders conversations for one checkpoint and parses its answers.

    Raises ``CheckpointError`` when the tokenizer lacks a needed control token or disagrees with the config about an id,
    and ``ArtefactError`` when text could pass as a control token.
    """

    def __init__(self, model_dir: str | Path, config: ModelConfig):
        self.tokenizer = Tokenizer.from_dir(model_dir)
        _check_ids(self.tokenizer, config)
        try:
            self._library_tokenizer = recipe.Tokenizer.from_str(self.tokenizer.json_text)
        except (ValueError, RuntimeError) as exc:
            raise ArtefactError(f"{self.tokenizer.where}: not a usable tokenizer ({exc})") from None
        encoding = recipe.DeepseekV41Encoding().with_tokenizer(self._library_tokenizer)
        self._encoding = encoding.with_special_tokens(_SPECIALS)
        self._options = recipe.ConversionOptions().with_special_tokens(_SPECIALS)
        self._self_test()

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        thinking: bool = True,
        effort: str | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        response_format: dict[str, Any] | None = None,
    ) -> ChatPrompt:
        """Prompt of a conversation; arguments have the form of a chat-completions body.

        ``effort`` is one of minimal, low, medium, high, xhigh, ultra, max. ``UsageError`` for anything malformed.
        """
        if effort is not None and (effort == "none" or not thinking):
            raise UsageError(f"effort {effort!r} asks for thinking, which is off", hint="leave the effort out")
        body: dict[str, Any] = {
            "model": _MODEL,
            "messages": list(messages),
            "thinking": {"type": "enabled" if thinking else "disabled"},
        }
        if effort is not None:
            body["reasoning_effort"] = effort
        if tools:
            body["tools"] = list(tools)
        if response_format is not None:
            body["response_format"] = response_format
        return self._render(body)

    def render_request(self, body: bytes | str | dict[str, Any]) -> ChatPrompt:
        """Prompt of a chat-completions body, JSON or parsed; any model name is taken. ``UsageError`` if invalid."""
        if isinstance(body, dict):
            return self._render({**body})
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError) as exc:
            raise UsageError(f"the request body is not JSON: {exc}") from None
        if not isinstance(parsed, dict):
            raise UsageError(f"the request body is {type(parsed).__name__}, expected a JSON object")
        return self._render(parsed)

    def _render(self, body: dict[str, Any]) -> ChatPrompt:
        messages = body.get("messages")
        if isinstance(messages, list):  # the newer name of the system role, which the library does not know
            body["messages"] = [
                {**m, "role": "system"} if isinstance(m, dict) and m.get("role") == "developer" else m for m in messages
            ]
        try:
            parsed = recipe.ChatCompletionRequest(body)
            options = self._options.with_model_alias(parsed.model, recipe.ModelVersion.DeepseekV41Flash)
            request = parsed.convert(options)
        except _REQUEST_ERRORS as exc:
            raise UsageError(f"invalid request: {_reason(exc)}") from None
        return self._encode(request)

    def _encode(self, request: recipe.ConversationRequest) -> ChatPrompt:
        conversation = request.conversation
        if any(message.image_sources for message in conversation.messages):
            raise UsageError("the conversation holds an image; this engine reads text only")
        try:
            token_ids = self._encoding.encode(conversation)
        except RuntimeError as exc:  # a rarely used control token that the tokenizer lacks
            raise ArtefactError(f"{self.tokenizer.where}: {exc}") from None
        constraint = request.inference_options.output_constraint
        return ChatPrompt(
            token_ids=tuple(token_ids),
            text=self._encoding.render_conversation(conversation).prompt,
            thinking=conversation.thinking_mode,
            constraint=(constraint.kind, constraint.schema) if constraint else None,
            stop=tuple(request.parsing_options.stop_sequences),
            _tokenizer=self.tokenizer,
            _library_tokenizer=self._library_tokenizer,
            _request=request,
        )

    def _self_test(self) -> None:
        """Render a conversation whose texts spell every added token; only the frame may hold control ids."""
        hostile = "".join(self.tokenizer.added)
        prompt = self.render([{"role": "system", "content": hostile}, {"role": "user", "content": hostile}])
        found = [self.tokenizer.token_string(i) for i in prompt.token_ids if i in self.tokenizer.added_ids]
        frame = [spelling.BOS, spelling.SYSTEM, spelling.USER, spelling.ASSISTANT, spelling.THINK_START]
        if found != frame:
            raise ArtefactError(f"{self.tokenizer.where}: a prompt holds control tokens {found}, expected {frame}")
        if self.tokenizer.decode(prompt.token_ids) != prompt.text:
            raise ArtefactError(f"{self.tokenizer.where}: an encoded prompt does not decode to its text")


def _check_ids(tokenizer: Tokenizer, config: ModelConfig) -> None:
    problems = [f"no added token {token!r}" for token in REQUIRED if token not in tokenizer.added]
    if tokenizer.vocab_size != config.vocab_size:
        problems.append(f"{tokenizer.vocab_size} ids, config.json says vocab_size {config.vocab_size}")
    pairs = [
        ("bos_token_id", config.bos_token_id, spelling.BOS),
        ("eos_token_id", config.eos_token_id, spelling.EOS),
        ("pad_token_id", config.pad_token_id, spelling.PAD),
        ("engram_pad_token_id", config.engram_pad_token_id, spelling.PAD),
    ]
    if config.image_token_id is not None:
        pairs.append(("image_token_id", config.image_token_id, spelling.IMAGE))
        if spelling.IMAGE not in tokenizer.added:
            problems.append(f"no added token {spelling.IMAGE!r}")
    for name, expected, token in pairs:
        if tokenizer.added.get(token, expected) != expected:
            problems.append(f"{token!r} has id {tokenizer.added[token]}, config.json says {name} {expected}")
    if problems:
        raise CheckpointError(tokenizer.where, problems, hint="use the checkpoint's own tokenizer.json")


def _reason(exc: Exception) -> str:
    """The library's sentence; a conversion error carries it inside an error body."""
    if isinstance(exc, recipe.ConversionError):
        return str(json.loads(exc.body)["error"]["message"])
    return str(exc)
