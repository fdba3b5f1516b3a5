"""Recipes and questions: the shipped ones are sound, broken ones are refused with the place, hub data are pinned."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from deepinfer_engine.errors import ArtefactError, DeepInferError, NotReadyError, UsageError
from deepinfer_engine.evals import hub
from deepinfer_engine.evals.items import load_items
from deepinfer_engine.evals.prompt import plan_for, prompts
from deepinfer_engine.evals.task import fill, find_task, load_task, shipped_tasks

RECIPES = Path(__file__).resolve().parents[3] / "recipes"

GOOD = """\
schema_version: 1
name: mine
description: a test
data:
  file: mine.jsonl
prompt: "{{question}}"
grader: integer
"""


def write(folder: Path, text: str, rows: list[dict] | None = None) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    if rows is not None:
        (folder / "mine.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def test_the_tasks_of_the_toolkit_are_shipped():
    names = {t.task.name for t in shipped_tasks()}
    assert names >= {
        "aime24", "aime25", "aime26", "aime-form", "gpqa", "hle", "math500", "gsm8k", "nano-arith", "nano-retrieval",
        "nano-json",
    }  # fmt: skip
    assert find_task("aime").task.name == "aime26"
    assert len({t.digest for t in shipped_tasks()}) == len(names)


@pytest.mark.parametrize("name", ["aime-form", "nano-arith", "nano-retrieval", "nano-json"])
def test_shipped_questions_load_and_fill_the_prompt(name: str):
    loaded = find_task(name)
    path = loaded.data_file
    assert path is not None
    items = load_items(loaded, path, source=path.name).items
    plan = plan_for(loaded.task, embedded=True)
    every = list(prompts(loaded.task, items, plan))
    assert len(every) == len(items) * plan.k
    assert len({p.key for p in every}) == len(every)
    assert all(p.item.question in p.text and "{{" not in p.text for p in every)


@pytest.mark.parametrize("name", [t.task.name for t in shipped_tasks() if t.task.data.hub])
def test_hub_data_are_pinned_to_a_commit(name: str):
    data = find_task(name).task.data
    assert data.revision is not None and len(data.revision) == 40 and data.rows is not None


def test_nano_items_are_what_their_generator_writes_and_are_held_out():
    spec = importlib.util.spec_from_file_location("nano_items", RECIPES / "evals" / "nano_items.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, make in module.SETS.items():
        assert (RECIPES / "evals" / f"{name}.jsonl").read_text(encoding="utf-8") == module.text(make())
    rows = module.arithmetic()
    assert len(rows) == 200
    for row in rows:
        a, sign, b = row["id"].partition("+") if "+" in row["id"] else row["id"].partition("-")
        assert int(row["answer"]) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
        assert module.held_out(int(a), int(b))


def test_the_held_out_rule_is_the_training_datas():
    path = RECIPES / "nano" / "chat.py"
    modules = []
    for name, file in (("nano_chat", path), ("nano_items", RECIPES / "evals" / "nano_items.py")):
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        import sys

        sys.modules[name] = module
        spec.loader.exec_module(module)
        modules.append(module)
    chat, items = modules
    assert all(chat.held_out(a, b) == items.held_out(a, b) for a in range(100) for b in range(100))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("grader: integer", "grader: integre"), "mine.yaml:7:9: grader is the text 'integre'"),
        (("name: mine", "nam: mine"), "nearest is 'name'"),
        (("schema_version: 1\n", ""), "schema_version"),
        (("{{question}}", "{{problem}}"), "does not contain {{question}}"),
        (('"{{question}}"', '"{{question}} {{choices}}"'), "which grader integer does not fill"),
        (("grader: integer", "grader: choice"), "data.columns.wrong goes with grader choice"),
        (("  file: mine.jsonl", "  file: mine.jsonl\n  hub: a/b"), "given together"),
        (("  file: mine.jsonl", "  file: mine.jsonl\n  gated: true"), "not on the hub"),
        (("grader: integer", "grader: integer\nk: 0"), "expected 1 or more"),
        (("grader: integer", "grader: integer\nk: yes"), "expected an integer"),
        (("grader: integer", "grader: integer\nsampling:\n  top_p: 0"), "expected more than 0"),
        (("grader: integer", "grader: integer\ngrader: number"), "given twice"),
        (("  file: mine.jsonl", "  file: mine.jsonl\n  hub: a/b\n  revision: main"), "revision"),
    ],
)
def test_a_broken_recipe_is_refused_with_the_reason(tmp_path: Path, change: tuple[str, str], message: str):
    path = write(tmp_path, GOOD.replace(*change))
    with pytest.raises(UsageError) as caught:
        load_task(path)
    assert message in caught.value.message
    assert "mine.yaml" in caught.value.message


def test_an_unknown_task_names_the_nearest():
    with pytest.raises(UsageError, match="nearest is 'nano-arith'"):
        find_task("nano-arit")


def test_questions_are_not_templates():
    assert fill("a {{question}} b", {"question": "{{choices}} \\1"}) == "a {{choices}} \\1 b"


ROW = {"question": "1+1?", "answer": "2"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "q"}\n', "no column 'answer'"),
        ('{"question": "q", "answer": "soon"}\n', "the answer 'soon' is not a number"),
        ('{"question": " ", "answer": "1"}\n', "question is empty"),
        ('{"question": ["q"], "answer": "1"}\n', "question is list"),
        ('{"question": "q", "answer": true}\n', "answer is bool"),
        ('{"question": "q", "question": "r", "answer": "1"}\n', "appears twice"),
        ('{"question": "q", "answer": NaN}\n', "not a JSON number"),
        ("[1]\n", "expected a JSON object"),
        ("\n", "no questions"),
        ("version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_broken_questions_are_refused_with_the_row(tmp_path: Path, text: str, message: str):
    loaded = load_task(write(tmp_path, GOOD))
    (tmp_path / "mine.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(ArtefactError) as caught:
        load_items(loaded, tmp_path / "mine.jsonl", source="mine.jsonl")
    assert message in caught.value.message
    assert caught.value.exit_code == 4


def test_ids_come_from_the_column_and_may_not_repeat(tmp_path: Path):
    loaded = load_task(
        write(tmp_path, GOOD.replace("  file: mine.jsonl", "  file: mine.jsonl\n  columns:\n    id: id"))
    )
    data = tmp_path / "mine.jsonl"
    data.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW) + "\n")
    assert [i.id for i in load_items(loaded, data, source="x").items] == ["1", "2"]
    data.write_text(json.dumps(ROW | {"id": "a"}) + "\n" + json.dumps(ROW | {"id": "b"}) + "\n")
    assert [i.id for i in load_items(loaded, data, source="x").items] == ["a", "b"]
    data.write_text(json.dumps(ROW | {"id": "a"}) + "\n" + json.dumps(ROW | {"id": "a"}) + "\n")
    with pytest.raises(ArtefactError, match="occurs twice"):
        load_items(loaded, data, source="x")
    data.write_text(json.dumps(ROW | {"id": "a"}) + "\n" + json.dumps(ROW) + "\n")
    with pytest.raises(ArtefactError, match="no column 'id'"):
        load_items(loaded, data, source="x")


def test_csv_with_quoted_lines_and_choices(tmp_path: Path):
    data = tmp_path / "gpqa.csv"
    head = "Record ID,Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3\n"
    data.write_text(head + 'r1,"Which, of\nthese?",right,"a ""b""",c,d\n', encoding="utf-8")
    loaded = find_task("gpqa")
    (item,) = load_items(loaded, data, source="gpqa.csv").items
    assert (item.id, item.question, item.answer, item.wrong) == (
        "r1",
        "Which, of\nthese?",
        "right",
        ('a "b"', "c", "d"),
    )
    plan = plan_for(loaded.task, embedded=False, k=8)
    every = list(prompts(loaded.task, [item], plan))
    assert all(p.choices[p.right] == "right" and f"({'ABCD'[p.right]}) right" in p.text for p in every)
    assert len({p.order for p in every}) > 1
    data.write_text(head + "r1,q,right,a,c\n")
    with pytest.raises(ArtefactError, match="5 cells under 6 columns"):
        load_items(loaded, data, source="gpqa.csv")


def test_gsm8k_answers_are_taken_behind_the_mark(tmp_path: Path):
    data = tmp_path / "g.jsonl"
    data.write_text(json.dumps({"question": "q", "answer": "6+12=18\n#### 1,018"}) + "\n")
    assert load_items(find_task("gsm8k"), data, source="g").items[0].answer == "1,018"


def test_hle_leaves_out_questions_with_an_image_and_counts_them(tmp_path: Path):
    data = tmp_path / "h.jsonl"
    rows = [
        {"id": "a", "question": "q", "answer": "x", "image": ""},
        {"id": "b", "question": "q", "answer": "y", "image": "data:"},
    ]
    data.write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = load_items(find_task("hle"), data, source="h")
    assert [i.id for i in found.items] == ["a"] and found.skipped == 1


def test_a_changed_file_at_the_pinned_revision_is_refused(tmp_path: Path):
    data = tmp_path / "aime.jsonl"
    data.write_text(json.dumps({"problem": "q", "answer": "2"}) + "\n")
    with pytest.raises(ArtefactError, match="1 rows at the pinned revision, the recipe says 30"):
        load_items(find_task("aime25"), data, source="hub", revision="a" * 40)


def test_parquet_without_a_reader_is_refused_with_the_install_line(tmp_path: Path):
    if importlib.util.find_spec("pyarrow") is not None:
        pytest.skip("pyarrow is installed")
    data = tmp_path / "x.parquet"
    data.write_bytes(b"PAR1")
    with pytest.raises(NotReadyError) as caught:
        load_items(find_task("aime25"), data, source="x.parquet")
    assert caught.value.hint == "pip install 'deepinfer-cli[eval]'"


def test_parquet_rows_are_the_rows_of_the_same_jsonl(tmp_path: Path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra 'eval'")
    rows = [{"problem": f"What is {i}+1?", "answer": str(i + 1)} for i in range(30)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    parquet.write_table(importlib.import_module("pyarrow").Table.from_pylist(rows), tmp_path / "x.parquet")
    task = find_task("aime25")
    loaded = [load_items(task, tmp_path / name, source=name) for name in ("x.jsonl", "x.parquet")]
    assert loaded[0].items == loaded[1].items


# ---------------------------------------------------------------------- hub


def fail_with(error: Exception):
    def fail(*args, **kwargs):
        raise error

    return fail


def hub_error(kind: str, message: str = "no") -> Exception:
    from huggingface_hub import errors

    class Response:
        status_code, headers, request, text = 403, {}, None, ""

    return getattr(errors, kind)(message, response=Response())


@pytest.mark.parametrize(
    ("kind", "unreachable", "hint"),
    [
        ("GatedRepoError", False, "https://huggingface.co/datasets/Idavidrein/gpqa"),
        ("RepositoryNotFoundError", False, "https://huggingface.co/datasets/Idavidrein/gpqa"),
        ("RevisionNotFoundError", False, "--data"),
        ("HfHubHTTPError", True, "--data"),
    ],
)
def test_refusals_of_the_hub_name_the_way_out(monkeypatch: pytest.MonkeyPatch, kind: str, unreachable: bool, hint: str):
    import huggingface_hub

    downloads: list[str] = []
    monkeypatch.setattr(hub, "cached", lambda data: None)
    monkeypatch.setattr(hub, "_touch", lambda: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "auth_check", fail_with(hub_error(kind)))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: downloads.append("x"))
    with pytest.raises(DeepInferError) as caught:
        hub.fetch(find_task("gpqa").task.data)
    assert caught.value.exit_code == 3
    assert isinstance(caught.value, hub.DataUnreachable) == unreachable
    assert hint in (caught.value.hint or "") and "--data" in (caught.value.hint or "")
    assert downloads == [], "a gated set is refused before anything is downloaded"


def test_no_network_is_told_apart_from_a_refusal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub, "cached", lambda data: None)
    monkeypatch.setattr(hub, "_touch", fail_with(ConnectionError("no route")))
    with pytest.raises(hub.DataUnreachable) as caught:
        hub.fetch(find_task("aime").task.data)
    assert "--data" in (caught.value.hint or "")


def test_a_cached_file_needs_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(hub, "cached", lambda data: tmp_path)
    monkeypatch.setattr(hub, "_touch", fail_with(AssertionError("asked the network")))
    assert hub.fetch(find_task("aime").task.data) == tmp_path


# ---------------------------------------------------------------------- plan


def test_sampling_is_recipe_then_embedded_then_flags():
    task = find_task("aime").task
    assert plan_for(task, embedded=False).k == 16
    assert plan_for(task, embedded=False).sampling == task.sampling
    small = plan_for(task, embedded=True)
    assert (small.k, small.sampling.max_tokens, small.sampling.temperature) == (1, 256, 0.0)
    mine = plan_for(task, embedded=True, k=3, seed=5, sampling={"temperature": 0.7, "top_p": None})
    assert mine.seeds == (5, 6, 7) and mine.sampling.temperature == 0.7 and mine.sampling.top_p == 0.95


def test_several_greedy_samples_are_refused():
    with pytest.raises(UsageError, match="all samples of a question would be equal"):
        plan_for(find_task("nano-arith").task, embedded=True, k=4)
