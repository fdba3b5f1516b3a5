"""``V4Config``: the flat ``config.json`` of DeepSeek-V4 releases, and ``load_any_config`` for either family.

Three variants are told apart by the file itself: no draft, one classic MTP block, or DSpark stages (one per entry of
``dspark_target_layer_ids``; ``num_nextn_predict_layers`` stays 1 in those releases). Without ``quantization_config``
every linear is stored as BF16.

V4 can be inspected and validated; its forward pass is not implemented, and ``require_v41`` says so by name.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from deepinfer_engine.config.model import ModelConfig, RopeScaling, _convert, parse_model_config
from deepinfer_engine.config.strict_json import printable, read_json_object
from deepinfer_engine.errors import ArtefactError, CheckpointError


@dataclass(frozen=True)
class V4Config:
    """Fields of a V4 model under their official names, and how its weights are stored."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling | None
    sliding_window: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    num_hash_layers: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    quantised: bool
    weight_block: int

    @property
    def draft(self) -> Literal["none", "mtp", "dspark"]:
        """Which kind of draft weights the release carries."""
        if self.dspark_target_layer_ids:
            return "dspark"
        return "mtp" if self.num_nextn_predict_layers else "none"

    @property
    def draft_stages(self) -> int:
        """Number of ``mtp.<stage>`` blocks."""
        return len(self.dspark_target_layer_ids) if self.draft == "dspark" else self.num_nextn_predict_layers

    @property
    def hc_rows(self) -> int:
        """Outputs of one mHC projection: C pre + C post + C·C combine."""
        return self.hc_mult * (self.hc_mult + 2)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the fields in canonical JSON: the identity of the shapes, not of the weights."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        text = json.dumps({"v4": values}, sort_keys=True, default=lambda o: vars(o), separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


AnyConfig = ModelConfig | V4Config


def load_any_config(path: str | Path) -> AnyConfig:
    """Read a V4 or V4.1 ``config.json`` (a file, or the directory that holds it)."""
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    return parse_any_config(read_json_object(path), where=str(path))


def parse_any_config(raw: Any, *, where: str = "config.json") -> AnyConfig:
    """The config of either family by ``model_type``; raises ``ArtefactError`` or lists all bad fields."""
    if isinstance(raw, dict) and raw.get("model_type") == "deepseek_v4":
        return parse_v4_config(raw, where=where)
    if isinstance(raw, dict) and raw.get("model_type") != "deepseek_v41":
        raise ArtefactError(
            f"{where}: model_type is {printable(repr(raw.get('model_type')))}, "
            "expected 'deepseek_v41' (or 'deepseek_v4', inspect only)"
        )
    return parse_model_config(raw, where=where)


def require_v41(config: AnyConfig, *, where: str = "config.json") -> ModelConfig:
    """``config`` when this engine can run it; raises ``ArtefactError`` for the V4 family."""
    if isinstance(config, V4Config):
        raise ArtefactError(
            f"{where}: the forward pass of 'deepseek_v4' is not implemented, this engine runs 'deepseek_v41'",
            hint="`deepinfer inspect` works on V4 checkpoints; to run, use a DeepSeek-V4.1 checkpoint",
        )
    return config


# ---------------------------------------------------------------------- reading

_FIXED: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
}
#: Fields that do not change shapes or inference; the second line holds names kept from V3 configs that V4 never reads.
_INERT = {
    "model_type", "architectures", "attention_dropout", "initializer_range", "use_cache", "dtype", "torch_dtype",
    "transformers_version", "quantization_config", "expert_dtype",
    "n_group", "topk_group", "first_k_dense_replace", "moe_layer_freq", "kv_lora_rank", "qk_nope_head_dim",
    "v_head_dim", "ep_size", "router_aux_loss_coef", "router_jitter_noise", "output_router_logits",
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "dspark_block_size": 0,
    "dspark_noise_token_id": 0,
    "dspark_target_layer_ids": (),
    "dspark_markov_rank": 0,
    "num_hash_layers": 0,
    "rope_scaling": None,
}
_STORAGE = {"quantised", "weight_block"}


def parse_v4_config(raw: dict[str, Any], *, where: str = "config.json") -> V4Config:
    """Build a ``V4Config``; raises ``CheckpointError`` with every bad field or violated invariant."""
    problems: list[str] = []
    types = {f.name: str(f.type) for f in fields(V4Config)}
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key in _FIXED:
            if value not in _FIXED[key] or isinstance(value, bool) != isinstance(_FIXED[key][0], bool):
                problems.append(f"{key} is {printable(repr(value))}, only {_FIXED[key][0]!r} is implemented")
        elif key not in _INERT and (key not in types or key in _STORAGE):
            problems.append(f"{printable(key)} is not a field of a V4 config that this engine knows")
    for name, kind in types.items():
        if name in _STORAGE:
            continue
        if name not in raw:
            if name in _DEFAULTS:
                values[name] = _DEFAULTS[name]
            else:
                problems.append(f"{name} is missing")
            continue
        try:
            values[name] = _convert(name, raw[name], kind)
        except ValueError as exc:
            problems.append(f"{name}: {printable(str(exc), 300)}")
    values["quantised"], values["weight_block"] = _storage(raw, problems)
    if not problems:
        config = V4Config(**values)
        problems = check_v4_invariants(config)
        if not problems:
            return config
    raise CheckpointError(where, problems)


def _storage(raw: dict[str, Any], problems: list[str]) -> tuple[bool, int]:
    quant = raw.get("quantization_config")
    if quant is None:
        if "expert_dtype" in raw:
            problems.append("expert_dtype is given without a quantization_config")
        return False, 128
    if not isinstance(quant, dict):
        problems.append("quantization_config is not an object")
        return True, 128
    expected = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0",
                "weight_block_size": [128, 128]}  # fmt: skip
    for key, want in expected.items():
        if quant.get(key) != want:
            found = printable(repr(quant.get(key)))
            problems.append(f"quantization_config.{key} is {found}, only {want!r} is implemented for V4")
    for key in quant.keys() - expected.keys():
        problems.append(f"quantization_config.{printable(key)} is not a field this engine knows")
    if raw.get("expert_dtype") != "fp4":
        found = printable(repr(raw.get("expert_dtype")))
        problems.append(f"expert_dtype is {found}, only 'fp4' is implemented (the Base releases store 'fp8' experts)")
    return True, 128


# ------------------------------------------------------------------- invariants


def check_v4_invariants(c: V4Config) -> list[str]:
    """Every invariant of a V4 config; one sentence per violation, an empty list when all hold."""
    bad = _check_ranges(c)
    if bad:
        return bad
    layers, ratios = c.num_hidden_layers, c.compress_ratios
    if len(ratios) != layers + c.draft_stages:
        bad.append(
            f"compress_ratios has {len(ratios)} entries, expected {layers} layers + {c.draft_stages} draft blocks"
        )
    if unknown := sorted(set(ratios) - {0, 4, 128}):
        bad.append(f"compress_ratios may hold 0, 4 and 128 only, found {unknown[:8]}")
    if any(ratios[layers:]):
        bad.append("compress_ratios of draft blocks (entries past num_hidden_layers) must be 0")
    if c.num_hash_layers > layers:
        bad.append(f"num_hash_layers {c.num_hash_layers} exceeds the {layers} layers")
    if c.num_experts_per_tok > c.n_routed_experts:
        bad.append(f"num_experts_per_tok {c.num_experts_per_tok} exceeds n_routed_experts {c.n_routed_experts}")
    if c.n_shared_experts != 1:
        bad.append(f"n_shared_experts is {c.n_shared_experts}; V4 checkpoints store exactly one")
    if c.num_attention_heads % c.o_groups:
        bad.append(f"{c.num_attention_heads} heads cannot be split into o_groups {c.o_groups}")
    if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim > min(c.head_dim, c.index_head_dim):
        bad.append(f"qk_rope_head_dim {c.qk_rope_head_dim} must be even and at most head_dim and index_head_dim")
    if c.quantised:
        for name in ("hidden_size", "moe_intermediate_size"):
            if getattr(c, name) % 32:
                bad.append(f"{name} is {getattr(c, name)}; quantised expert widths must be multiples of 32")
    return bad + _check_draft(c)


def _check_ranges(c: V4Config) -> list[str]:
    bad = []
    may_be_zero = {"num_nextn_predict_layers", "num_hash_layers", "bos_token_id", "eos_token_id", "pad_token_id",
                   "dspark_block_size", "dspark_noise_token_id", "dspark_markov_rank"}  # fmt: skip
    for f in fields(c):
        value = getattr(c, f.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not (0 if f.name in may_be_zero else 1e-300) <= value < 2**40:
            bad.append(f"{f.name} is {printable(str(value))}, it must be positive and finite")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if not bad and getattr(c, name) >= c.vocab_size:
            bad.append(f"{name} is {getattr(c, name)}, the vocabulary has ids 0..{c.vocab_size - 1}")
    sizes = {"num_hidden_layers": 4096, "n_routed_experts": 65536, "num_nextn_predict_layers": 64, "hc_mult": 64}
    for name, most in sizes.items():
        if getattr(c, name) > most:
            bad.append(f"{name} is {getattr(c, name)}, more than {most} is no model of this family")
    return bad


def _check_draft(c: V4Config) -> list[str]:
    if c.draft != "dspark":
        given = [n for n in ("dspark_block_size", "dspark_markov_rank") if getattr(c, n)]
        return [f"{n} is given without dspark_target_layer_ids" for n in given]
    bad = []
    ids = list(c.dspark_target_layer_ids)
    if ids != sorted(set(ids)) or not all(0 <= i < c.num_hidden_layers for i in ids):
        bad.append(f"dspark_target_layer_ids {ids[:8]} must increase and name layers 0..{c.num_hidden_layers - 1}")
    for name in ("dspark_block_size", "dspark_markov_rank"):
        if getattr(c, name) < 1:
            bad.append(f"{name} is missing or 0 but the model has DSpark stages")
    if c.dspark_noise_token_id >= c.vocab_size:
        bad.append(f"dspark_noise_token_id is {c.dspark_noise_token_id}, outside the vocabulary")
    return bad
