"""The draft blocks that are trained are the ones that the engine runs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from deepinfer_engine.config.model import load_model_config
from recipes.nano.draft_model import DraftBlocks, Frozen, kind_of, stored
from recipes.nano.export import read_back

GOLDEN = Path(__file__).resolve().parents[1] / "vectors" / "v41-tiny-a"


def stacked(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters of the draft blocks with their experts stacked."""
    out, experts = {}, {}
    for name, value in weights.items():
        head, _, rest = name.partition(".ffn.experts.")
        if name.startswith("mtp.") and rest:
            number, matrix, _ = rest.split(".")
            experts.setdefault(f"{head}.ffn.experts.{matrix}", {})[int(number)] = value.float()
        elif name.startswith("mtp."):
            out[name] = value.float()
    return out | {name: torch.stack([e[i] for i in range(len(e))]) for name, e in experts.items()}


def test_trained_blocks_give_the_recorded_drafts():
    """Official rounding and bf16, as on the training device: near the recorded logits, with the same drafts."""
    config = load_model_config(GOLDEN / "checkpoint")
    weights = read_back(GOLDEN / "checkpoint")
    params = stacked(weights)
    for name, value in stored(params).items():
        assert torch.equal(value, params[name]), f"{name}: {kind_of(name)} values are official already"
    tensors = load_file(GOLDEN / "expected.safetensors")
    case = next(c for c in json.loads((GOLDEN / "cases.json").read_text())["cases"] if c["id"] == "base_n0035")
    streams = [tensors[f"layerwise/base_n0035/ref/L{layer}/x_in"] for layer in config.dspark_target_layer_ids]
    taps = torch.stack([x.float().mean(1) for x in streams], 1).unsqueeze(0)
    wanted = load_file(GOLDEN / "draft_reference.safetensors")
    logits = wanted["case/base_n0035/ref/draft_logits"]
    drafts = logits.argmax(-1).tolist()
    ids = torch.tensor([[*case["prompt_ids"], case["ref"]["greedy_ids"][0], *drafts]])
    taps = torch.nn.functional.pad(taps, (0, 0, 0, 0, 0, ids.shape[1] - taps.shape[1]))
    frozen = Frozen(weights["embed.weight"].float(), weights["head.weight"].float())
    made = DraftBlocks(config, frozen, torch.bfloat16)(params, taps, ids, torch.tensor([[35]]))
    gap = (made.logits[0, 0] - logits).abs().max()
    assert made.logits[0, 0].argmax(-1).tolist() == drafts
    assert gap < 0.3
    assert (made.confidence[0, 0] - wanted["case/base_n0035/ref/draft_confidence"]).abs().max() < 0.3
