"""Draft blocks against the recorded vectors: ``float`` to 2e-4 with equal drafts, ``reference`` on equal inputs.

Under ``reference`` a flipped code of the backbone changes the taps, so the blocks are judged on recorded taps.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

VECTORS = Path(__file__).resolve().parents[2] / "vectors" / "v41-tiny-a"
TOLERANCE = 2e-4
CASES = [
    *(f"base_n{n:04d}" for n in (1, 5, 15, 16, 17, 35, 300, 700)),
    *(f"w128_n{n:04d}" for n in (5, 127, 128, 129, 259, 300, 700)),
]


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.float() - b.float()).abs().max().item()


@pytest.mark.parametrize("case_id", CASES)
def test_drafts_logits_and_confidence_are_the_recorded_ones(golden, float_rigs, case_id):
    case, at = golden.cases[case_id], f"case/{case_id}/float/"
    rig, recorded = float_rigs[case["variant"]], case["float"]["draft"]
    ids, kv = list(case["prompt_ids"]), rig.kv()
    out = rig.run(kv, ids, 0, len(ids))
    assert gap(rig.draft.context(out.taps[-1:], rig.ops)[0], golden.tensors[at + "draft_main_x"]) <= TOLERANCE
    drafts = rig.propose(kv, recorded["anchor_token"], recorded["anchor_position"])
    assert gap(drafts.logits[0], golden.tensors[at + "draft_logits"]) <= TOLERANCE
    assert gap(drafts.confidence[0], golden.tensors[at + "draft_confidence"]) <= TOLERANCE
    assert drafts.tokens[0].tolist() == recorded["tokens"]


@pytest.mark.parametrize(("case_id", "rounds"), [("base_n0001", 20), ("base_n0015", 6), ("base_n0300", 6)])
def test_every_round_of_a_continuation_drafts_the_recorded_tokens(golden, float_rigs, case_id, rounds):
    """The window of context rows slides; decode steps write one row each."""
    case = golden.cases[case_id]
    rig, ids = float_rigs[case["variant"]], list(case["prompt_ids"])
    kv = rig.kv()
    rig.run(kv, ids, 0, len(ids))
    for record in case["float"]["draft_trace"][:rounds]:
        assert record["anchor_position"] == len(ids)
        drafts = rig.propose(kv, record["anchor_token"], len(ids))
        assert drafts.tokens[0].tolist() == record["tokens"]
        assert gap(drafts.confidence[0], torch.tensor(record["confidence"])) <= TOLERANCE
        ids.append(record["anchor_token"])
        rig.run(kv, ids, len(ids) - 1, len(ids))


@pytest.mark.parametrize("case_id", ["base_n0017"])
def test_rows_of_rejected_tokens_are_gone_once_their_positions_are_verified_again(golden, float_rigs, case_id):
    case = golden.cases[case_id]
    rig, prompt = float_rigs[case["variant"]], list(case["prompt_ids"])
    clean, dirty, trace = rig.kv(), rig.kv(), case["float"]["draft_trace"]
    accepted = [t["anchor_token"] for t in trace]
    for kv in (clean, dirty):
        rig.run(kv, prompt, 0, len(prompt))
    ids = prompt + accepted[:1] + [7, 8, 9, 10, 11]
    rig.run(dirty, ids, len(prompt), len(ids))
    for i, record in enumerate(trace[:8]):
        want = rig.propose(clean, record["anchor_token"], len(prompt) + i)
        # one row ahead of the anchor's predecessor everything is stale, and masked
        got = rig.propose(dirty, record["anchor_token"], len(prompt) + i)
        assert gap(got.logits, want.logits) <= TOLERANCE
        ids = prompt + accepted[: i + 1]
        for kv in (clean, dirty):
            rig.run(kv, ids, len(ids) - 1, len(ids))


def test_after_a_decoder_replay_context_exists_for_the_replayed_rows_only(golden, float_rigs):
    for record in golden.replay:
        if record["kind"] != "vllm":
            continue
        case = golden.cases[record["case"]]
        rig, ids = float_rigs[case["variant"]], list(case["prompt_ids"])
        n, window = len(ids), rig.config.sliding_window
        kv = rig.kv()
        rig.run(kv, ids, 0, n, tail=window, floor_decoder=n - window)
        recorded = record["draft"]
        drafts = rig.propose(kv, recorded["anchor_token"], recorded["anchor_position"], n - window)
        at = f"replay/{record['case']}/vllm/draft_logits"
        assert gap(drafts.logits[0], golden.tensors[at]) <= TOLERANCE
        assert drafts.tokens[0].tolist() == recorded["tokens"]


def test_a_row_drafts_the_same_in_any_batch(golden, float_rigs):
    from deepinfer_engine.model.draft import Anchors

    case = golden.cases["base_n0035"]
    rig, ids, kv = float_rigs["base"], list(case["prompt_ids"]), float_rigs["base"].kv()
    rig.run(kv, ids, 0, len(ids))
    alone = rig.propose(kv, 7, 35)
    anchors = Anchors(*(torch.tensor(v) for v in ([9, 7], [20, 35], [1, 1], [0, 0])))
    both = rig.draft.propose(anchors, kv, rig.ops, lambda _, logits: logits.argmax(-1))
    assert gap(both.logits[1:], alone.logits) <= 1e-4
    assert gap(both.logits[:1], rig.propose(kv, 9, 20).logits) <= 1e-4


def test_reference_drafts_from_the_recorded_taps(golden, reference_rig):
    """On the taps of all 35 positions the blocks see identical inputs; one flipped code may move a row by a little."""
    rig, layers = reference_rig, reference_rig.config.dspark_target_layer_ids
    streams = [golden.tensors[f"layerwise/base_n0035/ref/L{layer}/x_in"] for layer in layers]
    ops, kv = rig.ops, rig.kv()
    quarter = torch.full(streams[0].shape[:2], 1.0 / rig.config.hc_mult)
    taps = torch.stack([ops.mhc_collapse(x, quarter) for x in streams], 1)
    position = torch.arange(len(taps))
    ring = torch.where(position >= len(taps) - kv.layout.ring, kv.layout.ring + position % kv.layout.ring, -1)
    rig.draft.write_context(taps, position, ring, kv, ops)
    recorded = load_file(VECTORS / "draft_reference.safetensors")
    drafts = rig.propose(kv, golden.cases["base_n0035"]["ref"]["greedy_ids"][0], len(taps))
    want = recorded["case/base_n0035/ref/draft_logits"]
    assert gap(drafts.logits[0], want) <= 0.02
    assert gap(drafts.confidence[0], recorded["case/base_n0035/ref/draft_confidence"]) <= 0.02
    assert drafts.tokens[0].tolist() == want.argmax(-1).tolist()
