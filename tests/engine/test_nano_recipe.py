"""The recipe of the embedded model: its forward pass against golden logits, its formats, its data, and a small run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer

from deepinfer_engine.config.model import ModelConfig, load_model_config, parse_model_config
from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_kernels.reference import quantise as q
from recipes.nano import chat, data, engram, evaluate, experts, export, formats, train
from recipes.nano.model import Model, Numerics, Trace
from recipes.nano.parameters import from_official, initial_parameters, shapes, to_official

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
    recipe["data"] |= {"samples": 1200, "held_out": 4}
    recipe["train"]["batch"] = 8
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


def test_assembled_prompts_equal_the_codec(small: tuple[Path, Path, ModelConfig]):
    renderer = data.Renderer(small[0] / "tokenizer.json")
    rng, before = Random(6), chat.sum_chat(3, 4, "{a}+{b}?")
    for effort in (None, "low", "high", "max"):
        for system in (None, "You are a calculator."):
            for turn in (None, before):
                setting = data.Setting(effort, system, turn)
                question = chat.training_chat(rng).question
                assert renderer.prompt(question, setting) == renderer.encode(question, setting)


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


def test_scoring_wants_the_exact_answer_after_the_thinking():
    end, think = 1, 9
    row = [5, 6, 7, think, 30, 31, end, 2]
    rows = evaluate.Rows(torch.tensor([row]), torch.tensor([7]), torch.tensor([2]), torch.tensor([3]))

    def judged(ids: list[int], stop: int) -> bool:
        return bool(evaluate.correct(torch.tensor([ids]), torch.tensor([stop]), rows)[0])

    assert judged(row, 7)
    assert judged([5, 6, 8, 8, think, 30, 31, end], 8)  # other thinking, same answer
    assert not judged([5, 6, 7, think, 29, 30, 31, end], 8)  # the answer has a token more
    assert not judged([5, 6, 7, think, 30, 32, end, 2], 7)
    assert not judged([5, 6, 7, 8, 8, 8, 8, 8], 8)  # never ended


def test_recipe_generates_trains_exports_and_reloads(small: tuple[Path, Path, ModelConfig], tmp_path: Path):
    """The whole path on the CPU: the loss falls, and the engine reads back exactly what was trained."""
    folder, recipe, config = small
    options = {"--data": folder, "--out": tmp_path / "run", "--recipe": recipe, "--steps": 36, "--report-every": 6}
    options |= {"--device": "cpu", "--compile": "off", "--eval-every": 1e9}
    args = train.arguments([str(v) for pair in options.items() for v in pair])
    result = train.run(args)
    log = [json.loads(line) for line in (args.out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [line["loss"] for line in log if line["event"] == "step"]
    assert losses[-1] < 0.8 * np.log(config.vocab_size)
    assert [line["quantised"] for line in log if line["event"] == "step"] == [False] * 3 + [True] * 3
    assert set(result["scores"]) == {"two_digit", "three_digit", "direct", "talk"}
    source = export.export(export.load_pieces(args.out), folder, tmp_path / "checkpoint")
    assert export.largest_difference(tmp_path / "checkpoint", source) == 0
    opened = Checkpoint.open(tmp_path / "checkpoint")
    assert opened.config.digest == config.digest
    assert opened.groups_present == {"backbone", "engram"}
    stacked = from_official(export.read_back(tmp_path / "checkpoint"))
    assert {n: tuple(v.shape) for n, v in stacked.items()} == shapes(config)
    assert to_official(stacked).keys() == source.keys()
