"""The recipe of the embedded model: its forward pass against golden logits, its formats, its data, and a small run."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from deepseek_recipe import DeepseekV41Encoding, SpecialTokens
from deepseek_recipe import Tokenizer as CodecTokenizer
from safetensors.torch import load_file
from tokenizers import Tokenizer

from deepinfer_engine.config.model import ModelConfig, load_model_config, parse_model_config
from deepinfer_engine.config.resources import model_dir
from deepinfer_engine.eplb.stats import read_stats
from deepinfer_engine.weights.card import read_card
from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_kernels.reference import quantise as q
from recipes.nano import average, chat, data, engram, experts, export, formats, frames, measure, packing, tasks, train
from recipes.nano.model import Layout, Model, Numerics, Trace, stored
from recipes.nano.parameters import from_official, initial_parameters, shapes, to_official
from recipes.nano.tokenizer import IMAGE

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "recipes" / "nano"
GOLDEN = ROOT / "tests" / "vectors" / "v41-tiny-a"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def template() -> dict[str, Any]:
    return json.loads((HERE / "config.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, template: dict[str, Any]) -> tuple[Path, Path, ModelConfig]:
    """(data folder, recipe file, config) of a model with every mechanism, small enough for a few CPU steps."""
    folder = tmp_path_factory.mktemp("nano")
    raw = json.loads(json.dumps(template))
    raw["text_config"] |= {
        "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 32,
        "q_lora_rank": 32, "index_n_heads": 2, "index_topk": 12, "candidate_topk_blocks": 4, "candidate_block_size": 4,
        "compress_ratios": [0, 2, 1, 1, 0, 0, 0], "kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2, 3],
        "candidate_source_layer_id": 2, "hc_mult": 2, "hc_sinkhorn_iters": 4, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "engram_layer_ids": [0, 1], "engram_vocab_size": 200,
        "dspark_target_layer_ids": [1, 2, 3],
    }  # fmt: skip
    recipe = yaml.safe_load((HERE / "nano.yaml").read_text(encoding="utf-8"))
    recipe["tokenizer"]["chats"] = 2000
    recipe["train"] |= {
        "tokens": 1536, "length": 768, "long_length": 1536, "long_from": 2.0, "judged": 1, "judged_last": 1,
        "lookup_share": 0.2,
    }  # fmt: skip
    data.generate(folder / "data", recipe, raw)
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    return folder / "data", folder / "recipe.yaml", load_model_config(folder / "data" / "config.json")


# ---------------------------------------------------------------- forward pass


def golden_weights() -> dict[str, torch.Tensor]:
    raw: dict[str, torch.Tensor] = {}
    for shard in sorted((GOLDEN / "checkpoint").glob("*.safetensors")):
        raw |= load_file(str(shard))
    values: dict[str, torch.Tensor] = {}
    for name, value in raw.items():
        scale = raw.get(f"{name.removesuffix('.weight')}.scale")
        if name.endswith(".scale"):
            continue
        if scale is None:
            values[name] = value.float()
        else:
            experts_ = ".ffn.experts." in name
            decode = q.dequantise_mxfp4 if experts_ else q.dequantise_fp8_tiles
            decode = q.dequantise_rows if name.endswith("embed.weight") else decode
            values[name] = decode(value.view(torch.uint8), scale.view(torch.uint8))
    return from_official(values)


@pytest.mark.parametrize("case_id", ["base_n0001", "base_n0035", "base_n0300", "w128_n0300"])
def test_forward_reproduces_golden_float_logits_and_decisions(case_id: str):
    cases = json.loads((GOLDEN / "cases.json").read_text(encoding="utf-8"))
    expected = load_file(str(GOLDEN / "expected.safetensors"))
    case = next(c for c in cases["cases"] if c["id"] == case_id)
    config = load_model_config(GOLDEN / "checkpoint" / cases["variants"][case["variant"]]["config_file"])
    model = Model(config, expected["engram/token_map"].long())
    weights, trace = golden_weights(), Trace()
    with torch.no_grad():
        logits = model.logits(weights, model.hidden(weights, torch.tensor([case["prompt_ids"]]), trace))[0]
    first, last = case["logit_positions"]
    assert (logits[first:last] - expected[f"case/{case_id}/float/logits"]).abs().max() <= 2e-4
    for layer, ids in enumerate(case["float"]["experts_last"]):
        assert sorted(trace.experts[layer][-1].tolist()) == ids
    for layer, entries in case["float"]["index_topk_last"].items():
        assert trace.selected[int(layer)][0, -1].nonzero().flatten().tolist() == entries


def test_token_classes_match_the_golden_map():
    tokenizer = Tokenizer.from_file(str(GOLDEN / "checkpoint" / "tokenizer.json"))
    expected = load_file(str(GOLDEN / "expected.safetensors"))["engram/token_map"]
    assert engram.token_classes(tokenizer).tolist() == expected.tolist()


def test_causality_holds_under_official_numerics(small: tuple[Path, Path, ModelConfig]):
    """Later tokens never change earlier outputs (pairs, candidates and windows included)."""
    config = small[2]
    classes = torch.arange(config.vocab_size) % config.engram_compressed_vocab_size
    model = Model(config, classes, numerics=Numerics(official=True))
    weights = initial_parameters(config, seed=3, device=torch.device("cpu"))
    ids = torch.randint(3, 300, (1, 40), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[0, 25:] = 7
    with torch.no_grad():
        a, b = model.hidden(weights, ids), model.hidden(weights, changed)
    assert torch.allclose(a[0, :25], b[0, :25], atol=1e-5)
    assert not torch.allclose(a[0, 25:], b[0, 25:], atol=1e-2)


def test_grouped_experts_equal_dense_experts_with_gradients(small: tuple[Path, Path, ModelConfig]):
    assert train.grouped_problem(small[2], torch.device("cpu")) is None


def test_dense_experts_equal_a_loop_over_selected_experts():
    g = torch.Generator().manual_seed(5)
    x, w1, w3 = torch.randn(6, 8, generator=g), torch.randn(4, 5, 8, generator=g), torch.randn(4, 5, 8, generator=g)
    w2, weights = torch.randn(4, 8, 5, generator=g), torch.rand(6, 2, generator=g)
    ids = torch.rand(6, 4, generator=g).topk(2, -1).indices
    want = torch.zeros(6, 8)
    for t in range(6):
        for slot in range(2):
            e = int(ids[t, slot])
            gate, up = (w1[e] @ x[t]).clamp(max=1.5), (w3[e] @ x[t]).clamp(-1.5, 1.5)
            want[t] += w2[e] @ (weights[t, slot] * torch.nn.functional.silu(gate) * up)
    got = experts.dense_experts(x, ids, weights, w1, w3, w2, limit=1.5, act=lambda t: t)
    assert torch.allclose(got, want, atol=1e-5)


# --------------------------------------------------------------------- formats


def test_straight_through_formats_equal_the_engine_quantisers():
    g = torch.Generator().manual_seed(7)
    x = torch.randn(64, 128, generator=g) * torch.exp2(torch.randint(-12, 12, (64, 1), generator=g).float())
    x[0], x[1, :64] = 0, torch.arange(64) / 8
    pairs = [
        (formats.through(x, formats.fp8_values, 32), q.dequantise_q8(*q.quantise_q8(x))),
        (formats.through(x, formats.fp4_values, 32), q.dequantise_q4m(*q.quantise_q4m(x))),
        (formats.through(x, formats.fp4_global_values, 16), q.dequantise_q4n(*q.quantise_q4n(x))),
        (formats.fp8_tiles([x, x[:32]])[0], q.dequantise_fp8_tiles(*q.quantise_fp8_tiles(x))),
        (formats.grouped_weights([x[:3], x], formats.fp4_values)[1], q.dequantise_mxfp4(*q.quantise_mxfp4(x))),
    ]
    for got, want in pairs:
        assert torch.equal(got, want)
    probe = x.clone().requires_grad_()
    formats.through(probe, formats.fp4_values, 32).sum().backward()
    assert probe.grad is not None and bool((probe.grad == 1).all())


# ------------------------------------------------------------------------ data


def test_worked_steps_are_true_and_end_in_the_result():
    rng = Random(2)
    for _ in range(3000):
        a, b = rng.randrange(1000), rng.randrange(1000)
        for text, result in ((chat.work_sum(a, b), a + b), (chat.work_difference(a, b), a - b)):
            lines = text.split("\n")
            assert lines[-1] == str(result)
            for line in lines[:-1]:
                if "=" in line:
                    left, right = line.split(" ")[0].split("=")
                    assert eval(left) == int(right)


def test_held_out_pairs_never_occur_in_training():
    rng = Random(4)
    seen = 0
    for _ in range(4000):
        item = chat.training_chat(rng)
        if item.kind in ("add", "subtract"):
            op = "+" if item.kind == "add" else "-"
            a, b = item.answer.split("=")[0].split(op)
            assert not chat.held_out(int(a), int(b))
            seen += 1
    assert seen > 3000
    for item in chat.held_out_chats(rng, 50, (2, 2)):
        a, b = item.answer.split("=")[0].replace("-", "+").split("+")
        assert chat.held_out(int(a), int(b)) and chat.held_out(int(b), int(a))


def codec(data_folder: Path) -> DeepseekV41Encoding:
    tokenizer = CodecTokenizer.from_file(str(data_folder / "tokenizer.json"))
    return DeepseekV41Encoding().with_tokenizer(tokenizer).with_special_tokens(SpecialTokens(image=IMAGE))


def test_every_frame_with_a_question_is_what_the_codec_encodes(small: tuple[Path, Path, ModelConfig]):
    """Rows are encoded by a dictionary of pieces; the codec encodes the same conversation to the same ids."""
    writer, encoding, rng = packing.Writer(small[0]), codec(small[0]), Random(6)
    for frame in frames.names():
        for draw in (tasks.two_step, tasks.sorting, tasks.counting, tasks.extraction):
            earlier = tasks.talk(rng) if frame == "turn" else None
            task = tasks.Task(draw(rng), frame, earlier=earlier)
            turn = (earlier.question, earlier.answer) if earlier else ("", "")
            row = writer.row(task)
            assert row.ids[: row.prompt] == encoding.encode(frames.conversation(frame, task.chat.question, turn))


def test_training_rows_equal_the_tokenizer_on_whole_texts(small: tuple[Path, Path, ModelConfig]):
    writer, rng = packing.Writer(small[0]), Random(8)
    for _ in range(60):
        c = tasks.short_task(rng).chat
        for text in (c.question, c.thinking, c.answer):
            assert writer.encode(text) == writer.tokenizer.encode(text, add_special_tokens=False).ids


def test_an_earlier_turn_is_another_one_every_time(small: tuple[Path, Path, ModelConfig]):
    """A constant earlier turn teaches a model to ignore its very words."""
    packing.Writer(small[0])
    rng, turns = Random(9), []
    while len(turns) < 40:
        task = tasks.short_task(rng)
        if task.frame == "turn":
            assert task.earlier is not None
            turns.append(task.earlier.question)
    assert len(set(turns)) > 30


def test_worked_chains_end_in_the_value_of_their_expression():
    rng = Random(10)
    for _ in range(2000):
        item = tasks.two_step(rng)
        text, _, result = item.answer.partition("=")
        assert eval(text) == int(result) == int(item.thinking.split("\n")[-1])


def test_short_tasks_are_answered_truly(small: tuple[Path, Path, ModelConfig]):
    packing.Writer(small[0])
    rng = Random(12)
    for _ in range(200):
        item = tasks.sorting(rng)
        numbers = item.question.replace(",", " ").replace(".", " ").replace(":", " ").split()
        assert [int(n) for n in item.answer.split()] == sorted(int(n) for n in numbers if n.isdigit())
        item = tasks.counting(rng)
        asking, listing = item.question.split(": ")
        word = re.sub("^(How often does|Count|How many times) | (occur )?in$", "", asking)
        assert int(item.answer) == listing.split().count(word) == int(item.thinking.split()[-1])
        item = tasks.lookup(rng, 12, 3)
        lines = dict(line.split(": ") for line in item.question.split("\n\n")[0].split("\n"))
        asked = [k for line in item.thinking.split("\n") for k in [line.split(": ")[0]]]
        assert item.answer.split() == [lines[k] for k in asked] and all(k in item.question for k in asked)


def held_out_chains(item: chat.Chat) -> list[bool]:
    """Whether the operands of each of the two steps are a held-out pair."""
    expression = item.answer.rpartition("=")[0].replace("(", "").replace(")", "")
    assert item.kind == "two_step", expression
    lines = item.thinking.split("\n")
    pairs = [re.fullmatch(r"(-?\d+)[+-](\d+)", line) for line in lines]
    steps = [(abs(int(m[1])), int(m[2])) for m in pairs if m is not None and "=" not in m[0]]
    return [chat.held_out(*pair) for pair in steps]


def test_new_tasks_are_held_out_by_construction(small: tuple[Path, Path, ModelConfig]):
    """No training question is one that evaluation could ask, and evaluation asks nothing else."""
    packing.Writer(small[0])
    rng = Random(14)
    by_text = {"sort", "count", "copy", "reverse"}
    seen = dict.fromkeys(by_text, 0)
    for _ in range(4000):
        task = tasks.short_task(rng)
        if task.chat.kind in by_text:
            seen[task.chat.kind] += 1
            assert not tasks.held_out_text(task.chat.question)
        if task.chat.kind == "talk" and task.chat.answer == tasks.I_CANNOT:
            assert not tasks.held_out_text(task.chat.question)
    assert min(seen.values()) > 50
    for _ in range(100):
        table = tasks.lookup(rng, 30, 4)
        assert not any(map(tasks.held_out_text, table.thinking.split("\n")))
        assert not any(held_out_chains(tasks.two_step(rng)))
    for name, items in tasks.evaluation_tasks(5, 12).items():
        for task in items:
            kind, question = task.chat.kind, task.chat.question
            if name.startswith("lookup"):
                assert tasks.held_out_text(task.chat.thinking)
            elif kind in by_text:
                assert tasks.held_out_text(question)
            elif kind == "two_step":
                assert held_out_chains(task.chat)[0]


# --------------------------------------------------------------------- packing


def packed(folder: Path, config: ModelConfig) -> tuple[Model, packing.Writer, list[packing.Row], packing.Batch]:
    """A model, and one batch of one row with the chats of the list."""
    writer, rng = packing.Writer(folder), Random(16)
    rows = [writer.row(tasks.Task(draw(rng))) for draw in (tasks.two_step, tasks.sorting, tasks.counting)]
    classes = torch.from_numpy(engram.token_classes(writer.tokenizer))
    batch = writer.pack([rows], 768, 600, 32, rng)
    return Model(config, classes), writer, rows, batch


def test_a_packed_chat_gives_the_numbers_of_the_chat_alone(small: tuple[Path, Path, ModelConfig]):
    model, _, rows, batch = packed(small[0], small[2])
    w = stored(initial_parameters(small[2], seed=3, device=torch.device("cpu")), weights=True)
    with torch.no_grad():
        together = model.hidden(w, batch.ids, None, Layout(batch.start, select=False))[0]
        at = 0
        for row in rows:
            ids = torch.tensor([row.ids])
            alone = model.hidden(w, ids, None, Layout(torch.zeros_like(ids), select=False))[0]
            assert torch.allclose(together[at : at + len(row.ids)], alone, atol=2e-4)
            at += -(-len(row.ids) // packing.ALIGN) * packing.ALIGN


def test_learned_positions_are_thinking_and_answer_only(small: tuple[Path, Path, ModelConfig]):
    _, _, rows, batch = packed(small[0], small[2])
    learned = batch.doc >= 0
    targets = batch.ids.flatten()[batch.place + 1]
    for number, row in enumerate(rows):
        assert targets[batch.doc == number].tolist() == row.ids[row.prompt :]
    assert int(learned.sum()) == sum(len(r.ids) - r.prompt for r in rows)
    assert not batch.weight[~learned].any() and bool((batch.weight[learned] > 0).all())
    assert [row.kind for row in rows] == batch.kinds


def test_same_seed_and_progress_draw_the_same_rows(small: tuple[Path, Path, ModelConfig]):
    folder, recipe, _ = small
    settings = json.loads(recipe.read_text(encoding="utf-8"))["train"]
    writer = packing.Writer(folder)
    draws = [packing.draw_batch(writer, Random(seed), settings, 768, 2, 0.5) for seed in (1, 1, 2)]
    assert torch.equal(draws[0].ids, draws[1].ids) and not torch.equal(draws[0].ids, draws[2].ids)


def test_tokenizer_has_every_id_and_splits_digits(small: tuple[Path, Path, ModelConfig]):
    tokenizer = Tokenizer.from_file(str(small[0] / "tokenizer.json"))
    config = small[2]
    assert tokenizer.get_vocab_size() == config.vocab_size
    assert all(tokenizer.id_to_token(i) is not None for i in range(config.vocab_size))
    assert [tokenizer.token_to_id(t) for t in ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")] == [0, 1]
    assert tokenizer.encode("2048+7").tokens == ["2", "0", "4", "8", "+", "7"]
    for text in ("naïve 漢字 🙂\r\n\t", "a<b> {}"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_shipped_config_meets_every_invariant(template: dict[str, Any], small: tuple[Path, Path, ModelConfig]):
    raw = json.loads(json.dumps(template))
    filled = json.loads((small[0] / "config.json").read_text(encoding="utf-8"))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        raw[name] = filled[name]
    text = raw["text_config"]
    primes = engram.bucket_primes(text["engram_vocab_size"], 2, 6)
    text |= {"engram_num_embeddings": [sum(p) for p in primes], "engram_pad_token_id": 2}
    text |= {"engram_compressed_vocab_size": 1700, "dspark_noise_token_id": 2039}
    config = parse_model_config(raw)
    assert config.n_routed_experts == 64 and config.sliding_window == 128
    assert [list(p) for p in config.engram_primes] == primes
    assert {p.mode for p in config.layer_plan} == {"window", "full", "reindex", "reuse"}
    assert config.candidate_topk_blocks * config.candidate_block_size < 2048  # candidates bite at 2k tokens


# ------------------------------------------------------------- generation, run


def test_scoring_wants_the_exact_text_and_for_json_the_same_object():
    assert measure.right("sort", "1 2 3", "1 2 3") and not measure.right("sort", "1 2 3 ", "1 2 3")
    assert measure.right("json", '{"b":2, "a":1}', '{"a": 1, "b": 2}')
    assert not measure.right("json", '{"a": 1, "b": 3}', '{"a": 1, "b": 2}')
    assert not measure.right("json", '{"a": 1', '{"a": 1}')


def trained(small: tuple[Path, Path, ModelConfig], out: Path, *more: str) -> tuple[dict[str, Any], list[Any]]:
    """(result, log) of a short run on the CPU."""
    folder, recipe, _ = small
    options = {"--data": folder, "--out": out, "--recipe": recipe, "--report-every": 3, "--workers": 0}
    options |= {"--device": "cpu", "--compile": "off", "--eval-every": 1e9}
    result = train.run(train.arguments([str(v) for pair in options.items() for v in pair] + list(more)))
    gc.collect()  # what was left open is told of here
    return result, [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(log: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in log if line["event"] == "step"]


@pytest.mark.filterwarnings("error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning")  # no open file
def test_recipe_generates_trains_resumes_averages_exports_and_reloads(
    small: tuple[Path, Path, ModelConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The whole path on the CPU: the loss falls, and the engine reads back exactly what was trained."""
    draw = tasks.evaluation_tasks  # without the set whose rows are too long for a test
    monkeypatch.setattr(tasks, "evaluation_tasks", lambda *a: {n: t for n, t in draw(*a).items() if n != "lookup_4k"})
    folder, _, config = small
    result, log = trained(small, tmp_path / "a", "--steps", "12")
    assert losses(log)[-1] < 0.9 * np.log(config.vocab_size)
    assert [line["official"] for line in log if line["event"] == "step"] == [False] * 3 + [True]
    assert set(result["scores"]) == set(tasks.evaluation_tasks(1, 1))
    resumed = ("--steps", "3", "--init", str(tmp_path / "a"), "--set", "warmup=0.9", "--set", "official_from=0")
    _, log = trained(small, tmp_path / "b", *resumed)
    assert log[0]["init"] == str(tmp_path / "a") and log[0]["settings"]["warmup"] == 0.9
    assert losses(log)[0] < 0.9 * np.log(config.vocab_size)  # it goes on where the first run ended
    first, second = export.load_pieces(tmp_path / "b"), export.load_pieces(tmp_path / "a")
    mixed = average.average(first, second, 0.75)
    name = "layers.0.attn.attn_sink"
    assert torch.allclose(mixed[name].float(), 0.75 * first[name] + 0.25 * second[name], atol=1e-6)
    source = export.export(mixed, folder, tmp_path / "checkpoint")
    assert export.largest_difference(tmp_path / "checkpoint", source) == 0
    opened = Checkpoint.open(tmp_path / "checkpoint")
    assert opened.config.digest == config.digest
    assert opened.groups_present == {"backbone", "engram"}
    stacked = from_official(export.read_back(tmp_path / "checkpoint"))
    assert {n: tuple(v.shape) for n, v in stacked.items()} == shapes(config)
    assert to_official(stacked).keys() == source.keys()
    started = export.load_start(tmp_path / "checkpoint")
    assert all(torch.equal(started[n], mixed[n].float()) for n in mixed)


def test_averages_of_different_models_are_refused():
    weights = {"norm.weight": torch.ones(4)}
    with pytest.raises(ValueError, match=r"the share is 1\.5"):
        average.average(weights, weights, 1.5)
    with pytest.raises(ValueError, match=r"different models: norm\.weight and 0 more"):
        average.average(weights, {"norm.weight": torch.ones(5)}, 0.5)


# ------------------------------------------------------------- what is shipped


def test_shipped_card_and_expert_loads_are_about_the_shipped_weights():
    """The averaged weights, their card and their statistics were not mixed up."""
    shipped = model_dir("nano")
    digest = Checkpoint.open(shipped).digest
    card = read_card(shipped)
    assert card is not None and card["weights_digest"] == digest
    stats = read_stats(shipped / "stats.npz")
    assert stats.weights_digest == digest and stats.ep == 8
    assert stats.counts_MLE.shape[1:] == (8, 64) and int(stats.counts_MLE.sum(0).min()) > 0
    assert (shipped / "stats.npz").stat().st_size < 200_000


def test_shipped_tokenizer_and_config_are_what_the_recipe_writes(tmp_path: Path, template: dict[str, Any]):
    recipe = yaml.safe_load((HERE / "nano.yaml").read_text(encoding="utf-8"))
    data.generate(tmp_path, recipe, template)
    for name in ("config.json", *export.SIDE_FILES):
        assert (tmp_path / name).read_bytes() == (model_dir("nano") / name).read_bytes()
