"""Prompts against hand-written V4.1 text, injection, and an answer parser that no grouping of ids can confuse."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_engine.config.model import ModelConfig, load_model_config
from deepinfer_engine.errors import ArtefactError, CheckpointError, UsageError
from deepinfer_engine.tokens import tokenizer as spelling
from deepinfer_engine.tokens.protocol import REQUIRED, Answer, ChatCodec, ChatPrompt, collect
from deepinfer_engine.tokens.tokenizer import Tokenizer

B, E, S, U, A = spelling.BOS, spelling.EOS, spelling.SYSTEM, spelling.USER, spelling.ASSISTANT
ASK = [{"role": "user", "content": "17+25?"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}
CALLS = (
    "\n\n<｜DSML｜ calls>\n"
    '<｜DSML｜ invoke name="add">\n'
    '<｜DSML｜ parameter name="a" string="false">1</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="b" string="true">x 😀 y</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n"
    '<｜DSML｜ invoke name="add">\n'
    '<｜DSML｜ parameter name="a" string="false">2</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n"
    "</｜DSML｜ calls>"
)


def effort_line(budget: int) -> str:
    return f"Reasoning Effort: {budget} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


def generated(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of an answer: control spellings as control tokens, the rest as text."""
    ids: list[int] = []
    while text:
        found = [(text.find(c), c) for c in (spelling.THINK_END, spelling.DSML) if c in text]
        at, control = min(found, default=(len(text), ""))
        ids += tokenizer.encode_text(text[:at])
        if control:
            ids.append(tokenizer.control_id(control))
        text = text[at + len(control) :]
    return ids


def without_call_ids(answer: Answer) -> Answer:
    """Call ids are random labels; everything else must be equal."""
    return dataclasses.replace(
        answer, tool_calls=tuple(dataclasses.replace(call, call_id="") for call in answer.tool_calls)
    )


def streamed(prompt: ChatPrompt, groups: list[list[int]], reason: Any = "stop") -> Answer:
    parser = prompt.parser()
    pieces = [piece for group in groups for piece in parser.push(group)]
    pieces += parser.finish(reason)
    assert parser.finish_reason is not None
    return collect(pieces, parser.finish_reason)


# --------------------------------------------------------------------- prompts

RENDERED: dict[str, tuple[dict[str, Any], str]] = {
    "thinking": ({"messages": ASK}, f"{B}{S}{effort_line(75)}{U}17+25?{A}<think>"),
    "no thinking": ({"messages": ASK, "thinking": False}, f"{B}{U}17+25?{A}</think>"),
    "low effort": ({"messages": ASK, "effort": "low"}, f"{B}{S}{effort_line(50)}{U}17+25?{A}<think>"),
    "max effort": ({"messages": ASK, "effort": "max"}, f"{B}{S}{effort_line(100)}{U}17+25?{A}<think>"),
    "system": (
        {"messages": [{"role": "system", "content": "Be brief."}, *ASK]},
        f"{B}{S}{effort_line(75)}Be brief.{U}17+25?{A}<think>",
    ),
    "system without thinking": (
        {"messages": [{"role": "system", "content": "Be brief."}, *ASK], "thinking": False},
        f"{B}{S}Be brief.{U}17+25?{A}</think>",
    ),
    "developer is system": (
        {"messages": [{"role": "developer", "content": "Be brief."}, *ASK], "thinking": False},
        f"{B}{S}Be brief.{U}17+25?{A}</think>",
    ),
    "several turns": (
        {
            "messages": [
                *ASK,
                {"role": "assistant", "content": "42", "reasoning_content": "17+25"},
                {"role": "user", "content": "and 1+1?"},
            ]
        },
        f"{B}{S}{effort_line(75)}{U}17+25?{A}</think>42{E}{U}and 1+1?{A}<think>",
    ),
    "continued answer": (
        {"messages": [*ASK, {"role": "assistant", "content": "It is 4", "prefix": True}], "thinking": False},
        f"{B}{U}17+25?{A}</think>It is 4",
    ),
}


@pytest.mark.parametrize("case", RENDERED)
def test_prompt_text_and_ids(codec: ChatCodec, case: str) -> None:
    arguments, expected = RENDERED[case]
    prompt = codec.render(**arguments)
    assert prompt.text == expected
    assert codec.tokenizer.decode(prompt.token_ids) == expected
    assert prompt.token_ids[0] == codec.tokenizer.control_id(B)
    assert prompt.thinking is arguments.get("thinking", True)


def test_tools_are_listed_and_their_history_is_rendered(codec: ChatCodec) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "q"}'}}
    messages = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    ]
    prompt = codec.render(messages, tools=[ADD])
    assert json.dumps(ADD["function"]) in prompt.text
    assert prompt.text.endswith(
        f"{U}add{A}<think>r</think>\n\n<｜DSML｜ calls>\n"
        '<｜DSML｜ invoke name="add">\n'
        '<｜DSML｜ parameter name="a" string="false">1</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="b" string="true">q</｜DSML｜ parameter>\n'
        f"</｜DSML｜ invoke>\n</｜DSML｜ calls>{E}{U}<tool_result>5</tool_result>{A}<think>"
    )
    assert prompt.constraint is not None
    assert prompt.constraint[0] == "tool_call"


def test_response_format_reaches_prompt_and_constraint(codec: ChatCodec) -> None:
    prompt = codec.render(
        [{"role": "user", "content": "as json"}], response_format={"type": "json_object"}, thinking=False
    )
    assert '{"type": "json_object"}' in prompt.text
    assert prompt.constraint == ("json", "")
    assert codec.render(ASK).constraint is None


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(st.one_of(st.sampled_from([*REQUIRED, spelling.IMAGE, "<｜latest_reminder｜>"]), st.text(
        st.characters(exclude_categories=["Cs"]), max_size=10))).map("".join)
)  # fmt: skip
def test_message_text_never_becomes_a_control_token(codec: ChatCodec, text: str) -> None:
    prompt = codec.render([{"role": "user", "content": "x" + text}], thinking=False)
    control = [codec.tokenizer.token_string(i) for i in prompt.token_ids if i in codec.tokenizer.added_ids]
    assert control == [B, U, A, spelling.THINK_END]
    assert codec.tokenizer.decode(prompt.token_ids) == prompt.text == f"{B}{U}x{text}{A}</think>"


def test_request_body_renders_like_the_arguments(codec: ChatCodec) -> None:
    body = {
        "model": "any/name",
        "messages": [{"role": "developer", "content": "Be brief."}, *ASK],
        "tools": [ADD],
        "reasoning_effort": "low",
        "temperature": 0.0,
        "stop": ["\n\nQ"],
    }
    direct = codec.render(body["messages"], tools=[ADD], effort="low")
    for form in (body, json.dumps(body), json.dumps(body).encode()):
        prompt = codec.render_request(form)
        assert (prompt.token_ids, prompt.stop) == (direct.token_ids, ("\n\nQ",))
    assert body["messages"][0]["role"] == "developer", "the caller's body was changed"


def test_image_is_refused(codec: ChatCodec) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(UsageError, match="image"):
        codec.render([{"role": "user", "content": [{"type": "text", "text": "see"}, part]}])


BAD_BODIES: dict[str, Any] = {
    "not JSON": b"{",
    "not an object": b"[]",
    "bad UTF-8": b'{"model": "\xff"}',
    "no model": {"messages": ASK},
    "no messages": {"model": "m"},
    "empty messages": {"model": "m", "messages": []},
    "messages no list": {"model": "m", "messages": "hi"},
    "message no object": {"model": "m", "messages": ["hi"]},
    "unknown role": {"model": "m", "messages": [{"role": "wizard", "content": "x"}]},
    "unknown effort": {"model": "m", "messages": ASK, "reasoning_effort": "bogus"},
    "lone surrogate": {"model": "m", "messages": [{"role": "user", "content": "\ud800"}]},
    "not a JSON value": {"model": "m", "messages": [{"role": "user", "content": object()}]},
    "NaN": b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    "nested": b'{"model": ' + b"[" * 100_000,
    "two answers": {"model": "m", "messages": ASK, "n": 2},
    "tool name": {"model": "m", "messages": ASK, "tools": [{"type": "function", "function": {"name": "bad name"}}]},
}


@pytest.mark.parametrize("case", BAD_BODIES)
def test_a_bad_request_is_a_usage_error(codec: ChatCodec, case: str) -> None:
    with pytest.raises(UsageError) as caught:
        codec.render_request(BAD_BODIES[case])
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("arguments", [{"effort": "low", "thinking": False}, {"effort": "none"}, {"effort": "tiny"}])
def test_effort_without_thinking_or_of_unknown_name_is_refused(codec: ChatCodec, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        codec.render(ASK, **arguments)


# -------------------------------------------------------------------- start-up


def _write(folder: Path, raw: dict[str, Any]) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    return folder


@pytest.mark.parametrize("token", [*REQUIRED[3:], spelling.IMAGE])
def test_a_missing_control_token_is_named(raw_tokenizer, config: ModelConfig, tmp_path: Path, token: str) -> None:
    raw = json.loads(json.dumps(raw_tokenizer).replace(json.dumps(token), json.dumps("<｜other｜>")))
    with pytest.raises(CheckpointError) as caught:
        ChatCodec(_write(tmp_path, raw), config)
    assert caught.value.problems == (f"no added token {token!r}",)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    "field", ["bos_token_id", "eos_token_id", "pad_token_id", "engram_pad_token_id", "image_token_id", "vocab_size"]
)
def test_config_ids_must_be_the_tokenizers(model_dir: Path, config: ModelConfig, field: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json says {field} 300"):
        ChatCodec(model_dir, dataclasses.replace(config, **{field: 300}))


def test_a_text_only_config_needs_no_image_token(raw_tokenizer, config: ModelConfig, tmp_path: Path) -> None:
    raw = json.loads(json.dumps(raw_tokenizer).replace(json.dumps(spelling.IMAGE), json.dumps("<｜other｜>")))
    codec = ChatCodec(_write(tmp_path, raw), dataclasses.replace(config, image_token_id=None))
    assert codec.render(ASK, thinking=False).text == f"{B}{U}17+25?{A}</think>"


def test_a_rare_role_without_its_token_is_refused_when_used(raw_tokenizer, config, tmp_path: Path) -> None:
    raw = json.loads(json.dumps(raw_tokenizer).replace(json.dumps("<｜latest_reminder｜>"), json.dumps("<｜other｜>")))
    codec = ChatCodec(_write(tmp_path, raw), config)
    with pytest.raises(ArtefactError, match="latest_reminder"):
        codec.render([*ASK, {"role": "latest_reminder", "content": "now"}])


def test_the_golden_checkpoint_has_no_chat_tokens_and_says_which(golden_dir: Path) -> None:
    folder = golden_dir / "checkpoint"
    with pytest.raises(CheckpointError, match="no added token '<｜User｜>'"):
        ChatCodec(folder, load_model_config(folder))


# --------------------------------------------------------------------- answers


def test_reasoning_and_content(codec: ChatCodec) -> None:
    prompt = codec.render(ASK)
    ids = generated(codec.tokenizer, "17+25 is 你好 42</think>It is 42 😀.")
    assert prompt.parse(ids) == Answer("17+25 is 你好 42", "It is 42 😀.", (), "stop")
    assert prompt.parse(ids[:-1], "length") == Answer("17+25 is 你好 42", "It is 42 😀", (), "length")
    assert prompt.parse(ids, "abort").finish_reason == "abort"
    assert prompt.parse([]) == Answer("", "", (), "stop")


def test_truncated_reasoning_has_no_content(codec: ChatCodec) -> None:
    ids = generated(codec.tokenizer, "let me see")
    assert codec.render(ASK).parse(ids, "length") == Answer("let me see", "", (), "length")


def test_without_thinking_everything_is_content(codec: ChatCodec) -> None:
    ids = codec.tokenizer.encode_text("42")
    assert codec.render(ASK, thinking=False).parse(ids) == Answer("", "42", (), "stop")


def test_pieces_come_as_soon_as_they_are_whole(codec: ChatCodec) -> None:
    parser = codec.render(ASK).parser()
    tokenizer = codec.tokenizer
    for token_id, kind in [*((i, "reasoning") for i in tokenizer.encode_text("ab")), (None, ""), *(
        (i, "content") for i in tokenizer.encode_text("cd"))]:  # fmt: skip
        pieces = parser.push([tokenizer.control_id(spelling.THINK_END) if token_id is None else token_id])
        assert [p.kind for p in pieces] == ([kind] if kind else [])
    assert parser.finish("stop") == []
    assert (parser.finished, parser.finish_reason) == (True, "stop")


def test_think_end_spelled_with_ordinary_ids_is_text(codec: ChatCodec) -> None:
    tokenizer = codec.tokenizer
    ids = [*tokenizer.encode_text("the tag </think> ends"), tokenizer.control_id(spelling.THINK_END)]
    ids += tokenizer.encode_text("done")
    expected = Answer("the tag </think> ends", "done", (), "stop")
    assert codec.render(ASK).parse(ids) == expected
    assert streamed(codec.render(ASK), [[i] for i in ids]) == expected


def test_tool_calls(codec: ChatCodec) -> None:
    ids = generated(codec.tokenizer, "sum</think>Adding." + CALLS)
    answer = codec.render(ASK, tools=[ADD]).parse(ids)
    assert (answer.reasoning, answer.content, answer.finish_reason) == ("sum", "Adding.", "tool_calls")
    assert [(c.name, json.loads(c.arguments)) for c in answer.tool_calls] == [
        ("add", {"a": 1, "b": "x 😀 y"}),
        ("add", {"a": 2}),
    ]
    assert len({c.call_id for c in answer.tool_calls} - {""}) == 2


def test_calls_without_declared_tools_are_text(codec: ChatCodec) -> None:
    answer = codec.render(ASK).parse(generated(codec.tokenizer, "</think>" + CALLS))
    assert answer.tool_calls == ()
    assert "invoke" in answer.content


def test_a_truncated_call_keeps_what_came(codec: ChatCodec) -> None:
    ids = generated(codec.tokenizer, "</think>" + CALLS[: CALLS.index(" 😀 y")])
    answer = codec.render(ASK, tools=[ADD]).parse(ids, "length")
    assert answer.finish_reason == "length"
    assert [c.arguments for c in answer.tool_calls] == ['{"a": 1, "b": "x']


def test_a_stop_string_ends_the_answer_inside_a_group(codec: ChatCodec) -> None:
    body = {"model": "m", "messages": ASK, "thinking": {"type": "disabled"}, "stop": ["Q:"]}
    prompt = codec.render_request(body)
    ids = codec.tokenizer.encode_text("42\nQ: more and more")
    for groups in ([ids], [[i] for i in ids]):
        parser = prompt.parser()
        pieces = [p for group in groups for p in parser.push(group)]
        assert parser.finished
        assert collect([*pieces, *parser.finish("length")], "stop").content == "42\n"
        assert parser.finish_reason == "stop"


def test_an_unfinished_character_at_the_end_is_shown(codec: ChatCodec) -> None:
    tokenizer = codec.tokenizer
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [*tokenizer.encode_text("ab"), single[b"\xf0"], single[b"\x9f"]]
    assert codec.render(ASK).parse(ids, "length").reasoning == "ab\ufffd"
    ids += [tokenizer.control_id(spelling.THINK_END), *tokenizer.encode_text("c")]
    answer = codec.render(ASK).parse(ids)
    assert (answer.reasoning, answer.content) == ("ab\ufffd", "c")


def test_an_id_outside_the_vocabulary_is_refused(codec: ChatCodec) -> None:
    with pytest.raises(UsageError, match="outside the vocabulary"):
        codec.render(ASK).parser().push([codec.tokenizer.vocab_size])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_grouping_of_a_well_formed_answer_gives_the_same(codec: ChatCodec, data) -> None:
    words = st.lists(st.sampled_from(["sum", " 你好", "😀", "\n", "\n\n", "<", "｜", "</thi", "👩‍👩‍👧", " "])).map(
        "".join
    )
    calls = data.draw(st.sampled_from(["", CALLS, CALLS[:60], CALLS[:-20]]))
    ids = generated(codec.tokenizer, data.draw(words) + "</think>" + data.draw(words) + calls)
    check_grouping(codec, ids, data)


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_any_grouping_of_any_ids_gives_the_same(codec: ChatCodec, data) -> None:
    ids = data.draw(st.lists(st.integers(2, codec.tokenizer.vocab_size - 1), max_size=25))
    answer = check_grouping(codec, ids, data)
    text = codec.tokenizer.decode(ids)
    if spelling.THINK_END not in text and spelling.DSML not in text:
        assert answer.reasoning == text.lstrip("\n"), "leading line ends are the library's to drop, nothing else"


def check_grouping(codec: ChatCodec, ids: list[int], data) -> Answer:
    prompt = codec.render(ASK, tools=[ADD])
    reason = data.draw(st.sampled_from(["stop", "length", "abort"]))
    whole = without_call_ids(prompt.parse(ids, reason))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    groups = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert without_call_ids(streamed(prompt, groups, reason)) == whole
    assert without_call_ids(streamed(prompt, [[i] for i in ids], reason)) == whole
    return whole
