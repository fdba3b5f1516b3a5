"""``float`` against the recorded vectors: the mathematics of every mechanism, composed.

Tolerance 2e-4 on every logit, decisions identical. An independent f32 implementation stays within 4e-6; the commonest
mistakes cost 0.5 and more, so 2e-4 is far from both.
"""

from __future__ import annotations

import pytest
import torch

TOLERANCE = 2e-4
CASES = [
    *(f"base_n{n:04d}" for n in (1, 5, 15, 16, 17, 35, 300, 700)),
    *(f"w128_n{n:04d}" for n in (5, 127, 128, 129, 259, 300, 700)),
]


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.float() - b.float()).abs().max().item()


@pytest.mark.parametrize("case_id", CASES)
def test_prefill_and_greedy_decode_give_the_recorded_logits_and_tokens(golden, float_rigs, case_id):
    case = golden.cases[case_id]
    rig, expected = float_rigs[case["variant"]], f"case/{case_id}/float/"
    ids, n = list(case["prompt_ids"]), case["length"]
    kv = rig.kv()
    out = rig.run(kv, ids, 0, n)
    a, b = case["logit_positions"]
    assert gap(out.logits[a:b], golden.tensors[expected + "logits"]) <= TOLERANCE
    assert gap(out.taps[-1], golden.tensors[expected + "taps_last"]) <= TOLERANCE
    assert gap(out.hidden[-1], golden.tensors[expected + "hidden_last"]) <= TOLERANCE
    greedy = [int(out.logits[-1].argmax())]
    recorded = golden.tensors[expected + "greedy_logits"]
    for i in range(1, len(case["float"]["greedy_ids"])):
        ids.append(greedy[-1])
        step = rig.run(kv, ids, len(ids) - 1, len(ids))
        assert gap(step.logits[0], recorded[i]) <= TOLERANCE
        greedy.append(int(step.logits[0].argmax()))
    assert greedy == case["float"]["greedy_ids"]


@pytest.mark.parametrize("case_id", CASES)
def test_selected_sets_candidates_experts_and_hash_ids_are_the_recorded_ones(golden, float_rigs, case_id):
    case = golden.cases[case_id]
    rig, expected = float_rigs[case["variant"]], case["float"]
    rig.seen.clear()
    rig.run(rig.kv(), list(case["prompt_ids"]), 0, case["length"], watch=True)
    layers = range(rig.config.num_hidden_layers)
    assert [rig.seen["experts", layer][-1].tolist() for layer in layers] == expected["experts_last"]
    for layer in layers:
        want = torch.tensor(expected["route_weights_last"][layer])
        assert gap(rig.seen["route_weights", layer][-1], want) <= 1e-5
    for layer, chosen in expected["index_topk_last"].items():
        mine = rig.seen["selected", int(layer)][-1]
        assert mine[mine >= 0].tolist() == chosen
    source = rig.config.candidate_source_layer_id
    if case["length"] > rig.config.candidate_topk_blocks * rig.config.candidate_block_size:
        blocks = rig.seen["candidates", source][0, -1]
        assert blocks.nonzero().flatten().tolist() == expected["candidate_blocks_last"]
    for layer, rows in case["engram_ids_first8"].items():
        mine = rig.seen["engram_ids", int(layer)][: len(rows)]
        assert mine.tolist() == rows[: len(mine)]


@pytest.mark.parametrize("case_id", ["base_n0017", "base_n0300", "w128_n0129", "w128_n0259"])
@pytest.mark.parametrize("sizes", [(1,), (7,), (64,), (5, 1, 40, 2)])
def test_any_chunking_gives_the_logits_of_one_shot(golden, float_rigs, case_id, sizes):
    case = golden.cases[case_id]
    rig, ids = float_rigs[case["variant"]], list(case["prompt_ids"])
    if sizes == (1,):
        ids = ids[:60]
    whole = rig.run(rig.kv(), ids, 0, len(ids)).logits
    kv, parts, start = rig.kv(), [], 0
    while start < len(ids):
        end = min(len(ids), start + sizes[len(parts) % len(sizes)])
        parts.append(rig.run(kv, ids, start, end).logits)
        start = end
    assert gap(torch.cat(parts), whole) <= 1e-4


@pytest.mark.parametrize("case_id", CASES)
def test_a_verify_chunk_and_the_one_after_a_rejection_need_no_undo(golden, float_rigs, case_id):
    case = golden.cases[case_id]
    rig, verify = float_rigs[case["variant"]], case["float"]["verify"]
    prompt, n = list(case["prompt_ids"]), case["length"]
    kv = rig.kv()
    rig.run(kv, prompt, 0, n)
    ids = prompt + verify["tokens"]
    out = rig.run(kv, ids, n, len(ids))
    assert gap(out.logits, golden.tensors[f"case/{case_id}/float/verify_logits"]) <= TOLERANCE
    accepted = 0
    while accepted < 5 and int(out.logits[accepted].argmax()) == verify["tokens"][accepted + 1]:
        accepted += 1
    assert accepted == verify["accepted_drafts"]
    assert int(out.logits[accepted].argmax()) == verify["next_token"]
    second = verify["round2"]
    start = second["start_position"]
    ids = ids[:start] + second["tokens"]
    out = rig.run(kv, ids, start, len(ids))
    assert gap(out.logits, golden.tensors[f"case/{case_id}/float/verify2_logits"]) <= TOLERANCE


def test_decoder_replay_is_the_recorded_variant(golden, float_rigs):
    """Rows past the cut: the last window only; layers above the cut see no row before it."""
    for record in golden.replay:
        if record["kind"] != "vllm":
            continue
        case = golden.cases[record["case"]]
        rig, ids = float_rigs[case["variant"]], list(case["prompt_ids"])
        n, window = len(ids), rig.config.sliding_window
        kv, at = rig.kv(), f"replay/{record['case']}/vllm/"
        out = rig.run(kv, ids, 0, n, tail=window, floor_decoder=n - window)
        assert gap(out.logits[-8:], golden.tensors[at + "tail_logits"]) <= TOLERANCE
        assert gap(out.taps[-1], golden.tensors[at + "taps_last"]) <= TOLERANCE
        exact = golden.tensors[f"case/{record['case']}/float/logits"][-1]
        assert gap(out.logits[-1], exact) > 10 * TOLERANCE, "replay is an approximation; equality would mean it is off"
        for i, token in enumerate(record["decode_tokens"]):
            ids.append(token)
            step = rig.run(kv, ids, n + i, n + i + 1, floor_decoder=n - window)
            assert gap(step.logits[0], golden.tensors[at + "decode_logits"][i]) <= TOLERANCE


def test_a_prefix_hit_without_its_windows_is_the_recorded_one(golden, float_rigs):
    """Block KV of the hit is kept, one window before it is recomputed with floors and without block writes."""
    for record in golden.prefix_hit:
        case = golden.cases[record["case"]]
        rig, ids, hit = float_rigs[case["variant"]], list(case["prompt_ids"]), record["hit_length"]
        n, window = len(ids), rig.config.sliding_window
        exact, kv = rig.kv(), rig.kv()
        rig.run(exact, ids, 0, n)
        for s in rig.layout.sources:
            rows = torch.arange(s.entries_per_block, s.entries_per_block + hit // s.ratio)
            kv.write_entries(s.layer, rows, exact.entries(s.layer, rows), exact.index_keys(s.layer, rows))
        trimmed = record["mode"] != "encoder_only"
        floors = {"floor_encoder": hit - window, "floor_decoder": n - window if trimmed else hit - window}
        out = rig.run(kv, ids, hit - window, n, keep_blocks_below=hit, tail=window if trimmed else None, **floors)
        at = f"prefix_hit/{record['case']}/h{hit}/{record['mode']}/"
        assert gap(out.logits[-1], golden.tensors[at + "last_logits"]) <= TOLERANCE
        for i, token in enumerate(record["decode_tokens"]):
            ids.append(token)
            step = rig.run(kv, ids, n + i, n + i + 1, **floors)
            assert gap(step.logits[0], golden.tensors[at + "decode_logits"][i]) <= TOLERANCE


def test_ragged_batches_give_each_row_what_it_gets_alone(golden, float_rigs):
    from deepinfer_engine.cache.state import KVState
    from deepinfer_engine.runtime.batch import RowInput, build_batch

    rig = float_rigs["base"]
    prompts = [list(golden.cases[c]["prompt_ids"]) for c in ("base_n0035", "base_n0001", "base_n0300", "base_n0016")]
    kv = KVState(rig.layout, rig.ops, slots=4, blocks=12)
    tables = [list(range(1 + 3 * i, 4 + 3 * i)) for i in range(4)]
    first = [20, 1, 250, 16]
    rows = [
        RowInput(p, 0, k, i + 1, tables[i], logits="all") for i, (p, k) in enumerate(zip(prompts, first, strict=True))
    ]
    rig.model.forward(build_batch(rows, rig.layout, ngram=4), kv, rig.ops, rig.mesh)
    prompts[1] += [7]
    prompts[3] += [11, 12]
    rows = [
        RowInput(p, k, len(p) - k, i + 1, tables[i], logits="all")
        for i, (p, k) in enumerate(zip(prompts, first, strict=True))
    ]
    out = rig.model.forward(build_batch(rows, rig.layout, ngram=4), kv, rig.ops, rig.mesh).logits
    at = 0
    for p, k in zip(prompts, first, strict=True):
        alone = rig.run(rig.kv(), p, 0, len(p)).logits[k:]
        assert gap(out[at : at + len(alone)], alone) <= 1e-4
        at += len(alone)


def test_hash_ids_treat_image_spans_and_the_start_as_missing_history(golden, float_rigs):
    """Dead positions and everything before them count as the pad token's class."""
    record, rig = golden.engram_hash, float_rigs["base"]
    classes = golden.tensors["engram/token_map"]
    assert torch.equal(rig.model.hasher.token_class, classes)
    ids = torch.tensor(record["token_ids"])
    source = classes[ids]
    source[record["dead_positions"]] = -1
    padded = torch.cat((torch.full((3,), -1), source))
    lags = torch.stack([padded[3 - lag : len(padded) - lag] for lag in range(4)], 1)
    for layer, rows in record["ids"].items():
        t = rig.model.hasher.tables[int(layer)]
        mine = rig.ops.engram_hash(lags, rig.model.hasher.pad_class, t.multipliers, t.primes, t.offsets)
        assert mine.tolist() == rows


def test_an_image_token_routes_by_its_own_bias_and_gets_no_memory(golden, float_rigs):
    rig = float_rigs["base"]
    image = rig.config.image_token_id
    ids = [5, 9, image, image, 7, 8]
    rig.seen.clear()
    rig.run(rig.kv(), ids, 0, len(ids), watch=True)
    for layer in rig.config.engram_layer_ids:
        gate = rig.seen["engram_gate", layer]
        assert (gate[2:4] == 0).all() and (gate[[0, 1, 4, 5]] > 0).all()
    x = rig.seen["ffn_in", 0]
    ffn = rig.model.weights.layers[0].ffn
    c = rig.config
    for bias, tokens in ((ffn.bias_vl, [2, 3]), (ffn.bias, [0, 1, 4, 5])):
        ids_TK, _ = rig.ops.gate_topk(
            x[tokens], ffn.gate, bias, k=c.num_experts_per_tok, normalise=True, scale=1.5, temperature=1.0
        )
        assert torch.equal(rig.seen["experts", 0][tokens], ids_TK)
