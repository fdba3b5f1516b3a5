"""Request files: both forms, and every kind of bad line reported by number before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer_engine.errors import UsageError
from deepinfer_engine.offline.lines import Item, read_items
from deepinfer_engine.types import GrammarSpec, SamplingParams


def read(tmp_path: Path, *lines: object, raw: bool = False, **defaults) -> list[Item]:
    path = tmp_path / "in.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_bytes("\n".join(texts).encode())
    return read_items(path, SamplingParams(**defaults), thinking=True, raw=raw)


def problem(tmp_path: Path, line: object) -> str:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, {"id": "ok", "prompt": "x"}, line)
    assert "1 problem\n  line 2: " in caught.value.message
    return caught.value.message.split("line 2: ", 1)[1]


def test_both_forms_in_one_file(tmp_path: Path):
    items = read(
        tmp_path,
        {"custom_id": "a", "body": {"messages": [{"role": "user", "content": "x"}], "temperature": 0.5, "n": 2}},
        "",
        {"id": 7, "token_ids": [1, 2], "regex": "[a-z]+"},
        {"id": "c", "prompt": "x", "thinking": False, "top_k": None, "json_schema": {"type": "object"}},
        {"custom_id": "d", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "model": "m"}},
        seed=2**64 - 1,
        top_k=3,
    )
    assert [i.line for i in items] == [1, 3, 4, 5]
    assert [i.key for i in items] == ["a", 7, "c", "d"]
    assert [i.raw for i in items] == [False, True, False, True]
    assert items[0].sampling.n == 2 and items[0].sampling.seed == 2**64 - 1 and items[0].options == {}
    assert items[1].sampling.seed == 1 and items[1].grammar == GrammarSpec("regex", "[a-z]+")
    assert items[2].options == {"thinking": {"type": "disabled"}} and items[2].sampling.top_k == 3
    assert items[3].model == "m"


BAD = [
    ("{", "line 1 column 2"),
    ("[1]", "expected a JSON object, found list"),
    ('{"id": "x", "id": "y", "prompt": "z"}', "'id' appears twice"),
    ('{"id": "x", "prompt": "z", "temperature": NaN}', "NaN is not a JSON number"),
    ({"prompt": "x"}, "id is None"),
    ({"id": True, "prompt": "x"}, "id is True"),
    ({"id": "", "prompt": "x"}, "id is ''"),
    ({"id": "x"}, "expected exactly one of prompt, messages, token_ids, found none"),
    ({"id": "x", "prompt": "a", "token_ids": [1]}, "found prompt and token_ids"),
    ({"id": "x", "prompt": ""}, "expected a non-empty string"),
    ({"id": "x", "messages": []}, "expected a non-empty list"),
    ({"id": "x", "token_ids": [1, 2.0]}, "token_ids[1] is 2.0, expected an integer"),
    ({"id": "x", "token_ids": [True]}, "token_ids[0] is True"),
    ({"id": "x", "prompt": "a", "temprature": 1}, "unknown key temprature; nearest is 'temperature'"),
    ({"id": "x", "prompt": "a", "temperature": -1}, "temperature is -1"),
    ({"id": "x", "prompt": "a", "max_tokens": True}, "max_tokens is True"),
    ({"id": "x", "token_ids": [1], "thinking": True}, "thinking belongs to a conversation"),
    ({"id": "x", "prompt": "a", "regex": "a", "ebnf": "b"}, "regex and ebnf exclude each other"),
    ({"id": "x", "prompt": "a", "regex": ""}, "expected a non-empty string"),
    ({"id": "x", "prompt": "a", "json_schema": "{}"}, "json_schema is no JSON schema"),
    ({"id": "ok", "prompt": "again"}, "id 'ok' is already on line 1"),
    ({"custom_id": "x"}, "body is missing"),
    ({"custom_id": 5, "body": {}}, "custom_id is 5"),
    ({"custom_id": "x", "body": {"messages": [{}]}, "method": "GET"}, "method is 'GET'"),
    ({"custom_id": "x", "body": {"messages": [{}]}, "url": "/v1/embeddings"}, "url is '/v1/embeddings'"),
    ({"custom_id": "x", "body": {"messages": [{}]}, "url": "/v1/completions"}, "for a body with messages"),
    ({"custom_id": "x", "body": {"messages": [{}], "stream": True}}, "a batch has no streams"),
    ({"custom_id": "x", "body": {"messages": [{}], "best_of": 3}}, "unknown key body.best_of"),
    ({"custom_id": "x", "body": {"messages": [{}]}, "extra": 1}, "unknown key extra"),
    ({"custom_id": "x", "body": {"messages": [{}], "model": 3}}, "body.model is 3"),
]


@pytest.mark.parametrize(("line", "reason"), BAD, ids=[r[1][:32] for r in BAD])
def test_bad_line_is_reported_with_its_number(tmp_path: Path, line: object, reason: str):
    assert reason in problem(tmp_path, line)


def test_an_id_of_a_bad_line_counts_as_taken(tmp_path: Path):
    with pytest.raises(UsageError) as caught:
        read(
            tmp_path, {"id": "a", "prompt": "x", "top_k": True}, {"id": "a", "prompt": "y"}, "{", {"id": "", "top_k": 1}
        )
    lines = caught.value.message.splitlines()[1:]
    assert [line.split(":")[0] for line in lines] == ["  line 1", "  line 2", "  line 3", "  line 4"]
    assert lines[1] == "  line 2: id 'a' is already on line 1"


def test_all_problems_are_listed_and_counted(tmp_path: Path):
    with pytest.raises(UsageError) as caught:
        read(tmp_path, *[{"id": i} for i in range(30)])
    assert caught.value.message.count("\n  line ") == 20 and "… and 10 more" in caught.value.message


def test_empty_and_missing_files(tmp_path: Path):
    with pytest.raises(UsageError, match="no requests"):
        read(tmp_path, "", "  ")
    with pytest.raises(UsageError, match="No such file"):
        read_items(tmp_path / "absent.jsonl", SamplingParams(), thinking=True)
