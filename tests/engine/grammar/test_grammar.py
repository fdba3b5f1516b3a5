"""Answers under a grammar: always derived from it, with bad grammars ending only their own request."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("xgrammar", reason="needs the extra 'grammar'")

import deepinfer_engine.sample.grammar as grammar_module
from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.engine import Engine
from deepinfer_engine.errors import NotReadyError, UsageError
from deepinfer_engine.runtime.lane import ThreadLane
from deepinfer_engine.sample.grammar import GrammarService, GrammarState, checked_grammar, vocabulary
from deepinfer_engine.tokens import tokenizer as spelling
from deepinfer_engine.types import Completion, GrammarSpec, Request, SamplingParams
from tests.tiny_model import write_tiny_model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tag": {"enum": ["x", "y"]},
    },
    "required": ["name", "age", "tag"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "maximum": 99}},
                "required": ["a"],
            },
        },
    }
]
SETS = (
    "sched.max_context_tokens=1024",
    "sched.max_rows_per_rank=6",
    "cache.hbm_tokens_per_rank=4096",
    "numerics.mode=float",
    "grammar.workers=1",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["false", "true"], ids=["plain", "overlap"])
def engine(model: Path, request: pytest.FixtureRequest):
    profile = load_profile("cpu-nano", [*SETS, f"sched.overlap={request.param}"]).profile
    with Engine.open(profile, model, device="cpu", lane=ThreadLane()) as opened:
        yield opened


def ask(name: str, grammar: GrammarSpec | None, seed: int = 1, prompt=(20, 21, 22), **sampling) -> Request:
    settings = {"temperature": 1.0, "seed": seed, "max_tokens": 160} | sampling
    return Request(name, tuple(prompt), SamplingParams(**settings), grammar=grammar)


def schema(value: object) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(value))


def test_random_answers_follow_their_grammar(engine: Engine):
    work = [ask(f"j{i}", schema(PERSON), seed=i, max_tokens=70) for i in range(5)]
    work += [ask(f"r{i}", GrammarSpec("regex", "[a-f]{2,4}-[0-9]+"), seed=i, max_tokens=30) for i in range(4)]
    work += [ask(f"e{i}", GrammarSpec("ebnf", 'root ::= "yes" | "no" [!?]'), seed=i) for i in range(4)]
    done = engine.generate(work)
    for c in done:
        if c.finish_reason == "length":
            continue
        assert c.finish_reason == "stop"
        if c.request_id[0] == "j":
            value = json.loads(c.text)
            assert list(value) == ["name", "age", "tag"]
            assert 0 <= value["age"] <= 120 and value["tag"] in "xy" and len(value["name"]) <= 6
        elif c.request_id[0] == "r":
            assert re.fullmatch("[a-f]{2,4}-[0-9]+", c.text)
        else:
            assert c.text in ("yes", "no!", "no?")
    assert sum(c.finish_reason == "stop" for c in done) >= 6
    assert not set(t for c in done for t in c.token_ids) & engine.tokenizer.added_ids


def test_bad_grammars_end_their_request_only(engine: Engine):
    free = ask("free", None, max_tokens=8, ignore_eos=True)
    alone = engine.generate([free])[0].token_ids
    bad = {
        "syntax": GrammarSpec("ebnf", "root ::= undefined_rule"),
        "empty": GrammarSpec("ebnf", "root ::= root"),
        "regex": GrammarSpec("regex", "(a"),
    }
    done = {c.request_id: c for c in engine.generate([free, *[ask(n, g) for n, g in bad.items()]])}
    for name in bad:
        assert (done[name].finish_reason, done[name].error) == ("error", "grammar")
        assert done[name].error_detail and ".cc:" not in done[name].error_detail
    assert "allows no text" in done["empty"].error_detail
    assert done["free"].token_ids == alone
    assert not engine.busy and not engine._compiling


def test_a_grammar_that_is_known_at_the_start_is_compiled_before_weights_are_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    def read(*args, **named):
        raise AssertionError("weights were read")

    monkeypatch.setattr("deepinfer_engine.engine.host_runner", read)
    profile = load_profile("cpu-nano", SETS).profile
    nested = {"type": "object", "properties": {"a/b": {"type": "string", "pattern": "x(y"}}}
    for name, spec, place in (
        ("--regex", GrammarSpec("regex", "a(b"), "the end of the pattern: the parenthesis is not closed"),
        ("--regex", GrammarSpec("regex", "ü(?=b)"), "character 4 of the pattern: lookahead is not supported yet"),
        ("--regex", GrammarSpec("regex", "a[z-b]"), "character 3 of the pattern: bad character range z-b"),
        ("--regex", GrammarSpec("regex", "a\\qb"), "character 2 of the pattern: the escape"),
        ("--ebnf", GrammarSpec("ebnf", 'root ::= "a"\n  | b'), 'line 2, column 5: rule "b" is not defined'),
        ("--json-schema", schema(nested), "#/properties/a~1b/pattern: the end of the pattern: the parenthesis"),
    ):
        with pytest.raises(UsageError) as caught:
            Engine.open(profile, model, device="cpu", grammars={name: spec})
        assert caught.value.message.startswith(f"{name}: {place}"), caught.value.message
    with pytest.raises(AssertionError, match="weights were read"):
        Engine.open(profile, model, device="cpu", grammars={"--regex": GrammarSpec("regex", "ab?")})


def test_unenforced_keyword_is_refused_at_submit(engine: Engine):
    with pytest.raises(UsageError, match="#/uniqueItems"):
        engine.submit(ask("x", schema({"type": "array", "uniqueItems": True})))
    with pytest.raises(UsageError, match="ignore_eos and a grammar"):
        engine.submit(ask("x", schema({"type": "integer"}), ignore_eos=True))
    assert not engine.busy


def test_reasoning_is_free_and_the_answer_is_not(engine: Engine):
    start = engine.tokenizer.control_id(spelling.THINK_START)
    end = engine.tokenizer.control_id(spelling.THINK_END)
    # biased towards the closing marker, so that a random model stops thinking soon
    request = ask("t", GrammarSpec("regex", "(ab)+c"), prompt=(20, 21, start), logit_bias={end: 9.0}, max_tokens=200)
    (done,) = engine.generate([request])
    assert end in done.token_ids
    at = done.token_ids.index(end)
    answer = engine.tokenizer.decode(done.token_ids[at + 1 :])
    pattern = "(ab)+c" if done.finish_reason == "stop" else "(ab)*a?"
    assert re.fullmatch(pattern, answer)


def test_tool_calls_are_well_formed(engine: Engine):
    spec = GrammarSpec("tools_required", json.dumps(TOOLS))
    done = engine.generate([ask(f"c{i}", spec, seed=i, max_tokens=120) for i in range(2)])
    call = (
        r'(<｜DSML｜ invoke name="add">\n\s*<｜DSML｜ parameter name="a" string="false">\s*-?\d+\s*'
        r"</｜DSML｜ parameter>\s*</｜DSML｜ invoke>\n)+</｜DSML｜ calls>"
    )
    finished = [c.text for c in done if c.finish_reason == "stop"]
    assert all(re.fullmatch(call, text) for text in finished)
    started = [c.text for c in done]
    assert all(text.startswith('<｜DSML｜ invoke name="add">\n'[: len(text)]) for text in started)


def test_abort_while_compiling(engine: Engine):
    engine.submit(ask("gone", GrammarSpec("regex", "never asked again [0-9]{17}")))
    assert engine.abort("gone")[0].finish_reason == "abort"
    assert engine.abort("gone") == [] and not engine.busy
    (after,) = engine.generate([ask("after", GrammarSpec("regex", "[a-z]{3}"))])
    assert re.fullmatch("[a-z]{3}", after.text)


def test_preempted_constrained_answer_goes_on_where_it_was(model: Path, engine: Engine):
    if not engine.overlap:
        pytest.skip("one loop is enough")
    work = [
        ask("a", None, prompt=range(5, 131), max_tokens=140, ignore_eos=True, temperature=0.0),
        ask("b", GrammarSpec("regex", "[a-z ]{900}"), prompt=range(6, 132), max_tokens=140),
    ]
    calm = engine.generate(work)[1]
    sets = (
        *SETS[1:2],
        *SETS[3:],
        "cache.hbm_tokens_per_rank=512",
        "sched.max_context_tokens=512",
        "sched.overlap=true",
    )
    with Engine.open(load_profile("cpu-nano", sets).profile, model, device="cpu", lane=ThreadLane()) as tight:
        tight._grammars = engine._grammars  # compiled already
        got = tight.generate(work)[1]
        tight._grammars = None
    assert (got.usage.preemptions, calm.usage.preemptions) == (1, 0)
    assert got.token_ids == calm.token_ids
    assert re.fullmatch("[a-z ]+", got.text)


def wait(service: GrammarService, count: int) -> list:
    out = []
    for _ in range(2400):
        out += service.poll(0.05)
        if len(out) >= count:
            break
    return out


def test_service_shares_work_times_out_and_keeps_its_size(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    if engine.overlap:
        pytest.skip("the service does not know about overlap")
    hello = vocabulary(engine.tokenizer, engine.config.vocab_size, engine.config.eos_token_id)
    service = GrammarService(hello, workers=1, timeout_s=30.0, cache_bytes=1 << 20)
    one = checked_grammar(schema(PERSON))
    for ticket in range(3):
        service.request(ticket, one)
    assert sorted(o.ticket for o in wait(service, 3)) == [0, 1, 2] and service.compiled == 1
    service.request(3, one)
    assert [o.ticket for o in service.poll()] == [3], "a cached grammar is there at once"
    service._cache_bytes = 20_000
    for ticket in range(4, 24):
        service.request(ticket, GrammarSpec("regex", f"[a-z]{{{ticket}}}"))
    outcomes = wait(service, 20)
    assert len(outcomes) == 20
    assert all(o.error is None for o in outcomes)
    assert sum(g.memory_size_bytes for g in service._cache.values()) <= 20_000
    service._timeout_s = 0.3
    service.request(30, GrammarSpec("regex", "((((a{1,900}){1,900}){1,900}){1,900}b?){1,900}"))
    (slow,) = wait(service, 1)
    assert slow.error is not None
    assert re.search(r"took longer than 0\.3 s|memory|ended", slow.error.message)
    service._timeout_s = 30.0
    service.request(31, GrammarSpec("regex", "ok?"))
    (after,) = wait(service, 1)
    assert after.error is None, "a new worker took over"
    service.close()
    _rolls_back(engine, after.grammar)


def _rolls_back(engine: Engine, compiled: object) -> None:
    """A state over the pattern "ok?" refuses without change and undoes what it accepted."""
    state = GrammarState(compiled, -(-engine.config.vocab_size // 32), opened=False)
    o, k, x = (engine.tokenizer.encode_text(t)[0] for t in "okx")
    before = state.mask()
    assert before is not None and state.accept(o)
    assert not state.accept(x)
    assert state.accept(k)
    state.rollback(2)
    after = state.mask()
    assert after is not None and (after == before).all()


def test_missing_extra_names_the_install_line(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotReadyError, match="needs the extra") as caught:
        engine.submit(ask("x", schema({"type": "integer"})))
    assert caught.value.hint == "pip install 'deepinfer-cli[grammar]'" and caught.value.exit_code == 3
    assert isinstance(engine.generate([ask("y", None, max_tokens=1)])[0], Completion)
