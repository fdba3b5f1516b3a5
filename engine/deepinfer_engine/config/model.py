"""``ModelConfig``: the DeepSeek-V4.1 ``config.json``, checked, frozen, with everything that derives from it.

Model facts come only from here. The nested form of the release (``text_config``, ``vision_config``,
``quantization_config``) is read; every field is typed, an unknown field of the text model is refused by name.

Derived (no literals elsewhere):

* ``layer_plan``   per layer: ratio, mode (window / full / reindex / reuse), kv source, index source, extras
* ``cut``          first decoder layer = max(kv_source_layer_ids)
* ``ring``         rows of a window ring = W + γ + 1 (134 = 128 window + 5 drafts + 1 for the release)
* ``engram_primes`` bucket sizes of the n-gram hash, ``engram_multipliers`` its odd multipliers
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from deepinfer_engine.config.strict_json import read_json_object
from deepinfer_engine.errors import ArtefactError, CheckpointError

Mode = Literal["window", "full", "reindex", "reuse"]

#: Tokens per block of global KV. 128 = one window, the unit at which windows are stored and replayed.
BLOCK_TOKENS = 128


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters; applied to layers with ratio > 0 only."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the vision tower (its tensors are planned and skipped by the text engine)."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    downsample_ratio: int
    rope_theta: float = 10000.0
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None


@dataclass(frozen=True)
class LayerPlan:
    """What one backbone layer is and where its keys come from.

    ``kv_source`` / ``index_source`` are layer ids, or -1 for a window-only layer.
    """

    layer: int
    ratio: int
    mode: Mode
    kv_source: int
    index_source: int
    engram: bool
    tap: bool
    candidates: Literal["none", "publish", "restrict"]

    @property
    def owns_kv(self) -> bool:
        return self.mode == "full"

    @property
    def owns_index(self) -> bool:
        return self.mode in ("full", "reindex")


@dataclass(frozen=True)
class ModelConfig:
    """Text-model fields under their official names, plus the top-level ids and quantisation."""

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
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int | None
    weight_block: int
    gate_temp: float
    vision: VisionConfig | None

    # ------------------------------------------------------------------ derived

    @cached_property
    def cut(self) -> int:
        """First decoder layer; layers below it are the causal encoder."""
        return max(self.kv_source_layer_ids)

    @cached_property
    def layer_plan(self) -> tuple[LayerPlan, ...]:
        return tuple(self._plan_layer(layer) for layer in range(self.num_hidden_layers))

    @cached_property
    def draft_plan(self) -> tuple[LayerPlan, ...]:
        """The draft blocks as window-only layers after those of the backbone."""
        first = self.num_hidden_layers
        return tuple(self._plan_layer(first + stage) for stage in range(self.num_nextn_predict_layers))

    def _plan_layer(self, layer: int) -> LayerPlan:
        ratio = self.compress_ratios[layer]
        mode: Mode = "window"
        kv_source = index_source = -1
        candidates: Literal["none", "publish", "restrict"] = "none"
        if ratio > 0:
            kv_source = max(s for s in self.kv_source_layer_ids if s <= layer)
            index_source = max(s for s in self.index_source_layer_ids if s <= layer)
            mode = "full" if layer == kv_source else "reindex" if layer == index_source else "reuse"
            first = self.candidate_source_layer_id
            if first >= 0 and layer == index_source:
                candidates = "publish" if layer == first else "restrict" if layer > first else "none"
        return LayerPlan(
            layer=layer,
            ratio=ratio,
            mode=mode,
            kv_source=kv_source,
            index_source=index_source,
            engram=layer in self.engram_layer_ids,
            tap=layer in self.dspark_target_layer_ids,
            candidates=candidates,
        )

    @property
    def ring(self) -> int:
        """Rows of one window ring: W + γ + 1, so that a rejected verify step never loses a visible row."""
        return self.sliding_window + self.dspark_block_size + 1

    @property
    def rollback_slack(self) -> int:
        """G = γ + 1, the rows kept after a prefix hit so that a verify step may be rolled back."""
        return self.dspark_block_size + 1

    @property
    def pair_ring(self) -> int:
        """Rows of the pending-pair ring of a ratio-2 source: γ + 2, order of reads and writes irrelevant."""
        return self.dspark_block_size + 2

    @property
    def hc_rows(self) -> int:
        """Outputs of one mHC projection: C pre + C post + C·C combine."""
        return self.hc_mult * (self.hc_mult + 2)

    @property
    def engram_columns(self) -> int:
        """Hash ids per token and Engram layer: (orders 2..n) × heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @cached_property
    def engram_primes(self) -> tuple[tuple[int, ...], ...]:
        """Bucket sizes per Engram layer in column order: successive unused primes from ``engram_vocab_size``."""
        found: list[int] = []
        candidate = self.engram_vocab_size
        need = len(self.engram_layer_ids) * self.engram_columns
        while len(found) < need:
            if _is_prime(candidate):
                found.append(candidate)
            candidate += 1
        n = self.engram_columns
        return tuple(tuple(found[i * n : (i + 1) * n]) for i in range(len(self.engram_layer_ids)))

    @cached_property
    def engram_multipliers(self) -> tuple[tuple[int, ...], ...]:
        """Odd int64 multipliers per Engram layer, one per n-gram lag (PCG64 seeded with 10007·layer)."""
        import numpy as np

        bound = max(1, (2**63 - 1) // self.engram_compressed_vocab_size // 2)
        rows = []
        for layer in self.engram_layer_ids:
            draw = np.random.default_rng(10007 * layer).integers(
                0, bound, size=self.engram_max_ngram_size, dtype=np.int64
            )
            rows.append(tuple(int(v) * 2 + 1 for v in draw))
        return tuple(rows)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the fields in canonical JSON: the identity of the shapes, not of the weights."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        text = json.dumps(values, sort_keys=True, default=lambda o: vars(o), separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


# ---------------------------------------------------------------------- reading

#: Fields of ``text_config`` whose only supported value is the one of the release.
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("deepseek_v41_text", "deepseek_v41"),
    "num_key_value_heads": (1,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "num_hash_layers": (0,),
    "hc_pre_from_prev_sublayer": (True,),
    "q_head_norm": (False,),
}
#: Fields that do not change inference.
_INERT = {"attention_dropout", "initializer_range", "use_cache", "dtype", "torch_dtype", "architectures"}
#: Ids that the release keeps at the top level; repeated in text_config they must agree.
_TOP_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
#: Everything else the top level may hold.
_TOP = {"text_config", "vision_config", "quantization_config", "transformers_version", "auto_map", "_name_or_path"}
_DEFAULTS: dict[str, Any] = {"gate_temp": 1.0, "dspark_n_routed_experts": 0, "dspark_num_experts_per_tok": 0}


def load_model_config(path: str | Path) -> ModelConfig:
    """Read ``config.json`` (a file, or the directory that holds it).

    Raises ``ArtefactError`` when it cannot be read, ``CheckpointError`` listing every bad field or invariant.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    return parse_model_config(read_json_object(path), where=str(path))


def parse_model_config(raw: Any, *, where: str = "config.json") -> ModelConfig:
    """Build a ``ModelConfig`` from the parsed JSON of a V4.1 release; all problems are reported at once."""
    if not isinstance(raw, dict):
        raise ArtefactError(f"{where}: expected a JSON object, found {type(raw).__name__}")
    if raw.get("model_type") != "deepseek_v41":
        raise ArtefactError(
            f"{where}: model_type is {raw.get('model_type')!r}, this engine runs 'deepseek_v41'",
            hint="use a DeepSeek-V4.1 checkpoint",
        )
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ArtefactError(f"{where}: text_config is missing; V4.1 nests the text model there")
    problems: list[str] = []
    values = _text_values(text, raw, problems)
    values |= _top_values(raw, problems)
    if problems:
        raise CheckpointError(where, problems)
    config = ModelConfig(**values)
    problems = check_invariants(config)
    if problems:
        raise CheckpointError(where, problems)
    return config


def _text_values(text: dict[str, Any], top: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    types = {f.name: f.type for f in fields(ModelConfig)}
    outside = {*_TOP_IDS, "weight_block", "vision"}
    wanted = [n for n in types if n not in outside]
    for key, value in text.items():
        if key in _FIXED:
            if value not in _FIXED[key] or isinstance(value, bool) != isinstance(_FIXED[key][0], bool):
                problems.append(f"text_config.{key} is {value!r}, only {_FIXED[key][0]!r} is implemented")
        elif key in _TOP_IDS:
            if value != top.get(key, value):
                problems.append(f"text_config.{key} is {value!r}, the top level says {top[key]!r}")
        elif key not in wanted and key not in _INERT:
            problems.append(f"text_config.{key} is not a field this engine knows")
    out: dict[str, Any] = {}
    for name in wanted:
        if name not in text:
            if name in _DEFAULTS:
                out[name] = _DEFAULTS[name]
            else:
                problems.append(f"text_config.{name} is missing")
            continue
        try:
            out[name] = _convert(name, text[name], str(types[name]))
        except ValueError as exc:
            problems.append(f"text_config.{name}: {exc}")
    for name, backbone in (
        ("dspark_n_routed_experts", "n_routed_experts"),
        ("dspark_num_experts_per_tok", "num_experts_per_tok"),
    ):
        if out.get(name) == 0 and backbone in out:
            out[name] = out[backbone]  # absent or 0 means "as in the backbone"
    return out


def _convert(name: str, value: Any, kind: str) -> Any:
    if name == "rope_scaling":
        return _rope_scaling(value)
    if kind == "bool":
        if not isinstance(value, bool):
            raise ValueError(f"expected true or false, found {value!r}")
        return value
    if kind == "int":
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"expected an integer, found {value!r}")
        return value
    if kind == "float":
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"expected a number, found {value!r}")
        return float(value)
    if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
        raise ValueError(f"expected a list of integers, found {value!r}")
    return tuple(value)


def _rope_scaling(value: Any) -> RopeScaling | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {value!r}")
    kind = value.get("rope_type", value.get("type"))
    if kind != "yarn":
        raise ValueError(f"rope_type {kind!r} is not implemented, only 'yarn'")
    names = {f.name for f in fields(RopeScaling)}
    unknown = set(value) - names - {"rope_type", "type"}
    if unknown:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    missing = names - set(value)
    if missing:
        raise ValueError(f"missing keys {sorted(missing)}")
    for name in names:
        if isinstance(value[name], bool) or not isinstance(value[name], int | float):
            raise ValueError(f"{name}: expected a number, found {value[name]!r}")
    return RopeScaling(
        factor=float(value["factor"]),
        beta_fast=float(value["beta_fast"]),
        beta_slow=float(value["beta_slow"]),
        original_max_position_embeddings=int(value["original_max_position_embeddings"]),
    )


def _top_values(raw: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {"image_token_id": None, "vision": None}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        value = raw.get(name)
        if value is None and name == "image_token_id":
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            problems.append(f"{name}: expected an integer, found {value!r}")
        else:
            out[name] = value
    for key in raw:
        if key not in _TOP and key not in _TOP_IDS and key not in _INERT and key not in _FIXED:
            problems.append(f"{key} is not a field this engine knows")
    quant = raw.get("quantization_config")
    expected = {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    if not isinstance(quant, dict):
        problems.append("quantization_config is missing")
    else:
        for key, want in expected.items():
            if quant.get(key) != want:
                problems.append(f"quantization_config.{key} is {quant.get(key)!r}, only {want!r} is implemented")
        for key in quant:
            if key not in expected and key not in ("weight_block_size", "fmt"):
                problems.append(f"quantization_config.{key} is not a field this engine knows")
        if quant.get("weight_block_size") != [32, 32]:
            problems.append(
                f"quantization_config.weight_block_size is {quant.get('weight_block_size')!r}, V4.1 uses [32, 32]"
            )
    out["weight_block"] = 32
    vision = raw.get("vision_config")
    if vision is not None:
        try:
            out["vision"] = _vision(vision)
        except ValueError as exc:
            problems.append(f"vision_config: {exc}")
    return out


def _vision(raw: Any) -> VisionConfig:
    if not isinstance(raw, dict):
        raise ValueError(f"expected an object, found {raw!r}")
    names = [f.name for f in fields(VisionConfig)]
    unknown = set(raw) - set(names) - {"model_type"}
    if unknown:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    required = names[:6]
    missing = [n for n in required if n not in raw]
    if missing:
        raise ValueError(f"missing keys {missing}")
    for name in required:
        if isinstance(raw[name], bool) or not isinstance(raw[name], int) or raw[name] < 1:
            raise ValueError(f"{name}: expected a positive integer, found {raw[name]!r}")
    return VisionConfig(**{n: raw[n] for n in names if n in raw})


# ------------------------------------------------------------------- invariants


def check_invariants(c: ModelConfig) -> list[str]:
    """Every invariant of a V4.1 config; one sentence per violation, an empty list when all hold."""
    bad = _check_ranges(c)
    if bad:
        return bad  # the relations below presuppose sane ranges
    L = c.num_hidden_layers
    ratios = c.compress_ratios
    if len(ratios) < L:
        bad.append(f"compress_ratios has {len(ratios)} entries for {L} layers")
        return bad
    if any(r not in (0, 1, 2) for r in ratios):
        bad.append(f"compress_ratios may hold 0, 1 and 2 only, found {sorted(set(ratios) - {0, 1, 2})}")
        return bad
    if any(r != 0 for r in ratios[L:]):
        bad.append("compress_ratios of draft blocks (entries past num_hidden_layers) must be 0")
    bad += _check_sources(c)
    bad += _check_sizes(c)
    bad += _check_engram(c)
    bad += _check_draft(c)
    return bad


def _check_ranges(c: ModelConfig) -> list[str]:
    bad = []
    may_be_zero = {"num_nextn_predict_layers", "candidate_source_layer_id", "engram_pad_token_id", "bos_token_id",
                   "eos_token_id", "pad_token_id", "image_token_id", "dspark_noise_token_id"}  # fmt: skip
    for f in fields(c):
        value = getattr(c, f.name)
        if isinstance(value, bool) or not isinstance(value, int | float) or f.name in may_be_zero:
            continue
        if not 0 < value < 2**40:
            bad.append(f"{f.name} is {value}, it must be positive and finite")
    if c.num_nextn_predict_layers < 0:
        bad.append(f"num_nextn_predict_layers is {c.num_nextn_predict_layers}, it cannot be negative")
    if not c.kv_source_layer_ids:
        bad.append("kv_source_layer_ids is empty; a V4.1 model has at least one global KV source")
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "dspark_target_layer_ids"):
        ids = getattr(c, name)
        if list(ids) != sorted(set(ids)):
            bad.append(f"{name} must be strictly increasing, found {list(ids)}")
        out = [i for i in ids if not 0 <= i < c.num_hidden_layers]
        if out:
            bad.append(f"{name} names layers {out}, the model has 0..{c.num_hidden_layers - 1}")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "engram_pad_token_id", "image_token_id"):
        value = getattr(c, name)
        if value is not None and not 0 <= value < c.vocab_size:
            bad.append(f"{name} is {value}, the vocabulary has ids 0..{c.vocab_size - 1}")
    return bad


def _check_sources(c: ModelConfig) -> list[str]:
    bad = []
    kv, ix, ratios = c.kv_source_layer_ids, c.index_source_layer_ids, c.compress_ratios
    for s in kv:
        if s not in ix:
            bad.append(f"kv source {s} is not an index source; the owner's indexer makes the index keys")
    for s in sorted(set(kv) | set(ix)):
        if ratios[s] == 0:
            bad.append(f"layer {s} is a source but its compress ratio is 0")
    for layer in range(c.num_hidden_layers):
        if ratios[layer] == 0:
            continue
        kv_below = [s for s in kv if s <= layer]
        ix_below = [s for s in ix if s <= layer]
        if not kv_below or not ix_below:
            what = "kv" if not kv_below else "index"
            bad.append(f"layer {layer} has ratio {ratios[layer]} but no {what} source at or below it")
        elif not ratios[kv_below[-1]] == ratios[ix_below[-1]] == ratios[layer]:
            bad.append(
                f"layer {layer} has ratio {ratios[layer]}, its kv source {kv_below[-1]} has "
                f"{ratios[kv_below[-1]]} and its index source {ix_below[-1]} has {ratios[ix_below[-1]]}"
            )
    first = c.candidate_source_layer_id
    if first != -1:
        if first not in ix:
            bad.append(f"candidate_source_layer_id {first} is not an index source")
        else:
            source = max((s for s in kv if s <= first), default=-1)
            for s in ix:
                if s > first and max((k for k in kv if k <= s), default=-1) != source:
                    bad.append(f"index source {s} comes after candidate source {first} but reads another kv source")
        if (c.candidate_topk_blocks - 1) * c.candidate_block_size + 1 < c.index_topk:
            bad.append(
                f"{c.candidate_topk_blocks} candidate blocks of {c.candidate_block_size} may hold fewer than "
                f"index_topk {c.index_topk} visible entries; need (blocks - 1) * size + 1 >= topk"
            )
    return bad


def _check_sizes(c: ModelConfig) -> list[str]:
    bad = []
    inputs = {
        "hidden_size": c.hidden_size,
        "q_lora_rank": c.q_lora_rank,
        "moe_intermediate_size": c.moe_intermediate_size,
        "o_groups * o_lora_rank": c.o_groups * c.o_lora_rank,
        "head_dim": c.head_dim,
        "index_head_dim": c.index_head_dim,
        "engram_head_dim": c.engram_head_dim,
    }
    for name, value in inputs.items():
        if value % 32:
            bad.append(f"{name} is {value}; quantised widths must be multiples of 32")
    if (c.num_attention_heads * c.head_dim) % c.o_groups or c.num_attention_heads % c.o_groups:
        bad.append(f"{c.num_attention_heads} heads cannot be split into o_groups {c.o_groups}")
    elif c.num_attention_heads * c.head_dim // c.o_groups % 32:
        bad.append("heads of one output group must span a multiple of 32 channels")
    if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim > min(c.head_dim, c.index_head_dim):
        bad.append(f"qk_rope_head_dim {c.qk_rope_head_dim} must be even and at most head_dim and index_head_dim")
    if c.num_experts_per_tok > c.n_routed_experts:
        bad.append(f"num_experts_per_tok {c.num_experts_per_tok} exceeds n_routed_experts {c.n_routed_experts}")
    if c.n_shared_experts != 1:
        bad.append(f"n_shared_experts is {c.n_shared_experts}; V4.1 checkpoints store exactly one")
    if BLOCK_TOKENS % 2:
        bad.append("a block must hold whole pairs")
    return bad


def _check_engram(c: ModelConfig) -> list[str]:
    bad = []
    if len(c.engram_layer_ids) != len(c.engram_num_embeddings):
        return [
            f"engram_num_embeddings has {len(c.engram_num_embeddings)} entries for {len(c.engram_layer_ids)} layers"
        ]
    if c.engram_max_ngram_size < 2:
        return [f"engram_max_ngram_size is {c.engram_max_ngram_size}, the smallest n-gram order is 2"]
    if c.engram_columns * len(c.engram_layer_ids) > 4096 or c.engram_vocab_size > 2**31:
        return ["engram sizes are beyond what the 31-bit row ids can address"]
    for layer, rows, primes in zip(c.engram_layer_ids, c.engram_num_embeddings, c.engram_primes, strict=True):
        if sum(primes) != rows:
            bad.append(f"engram layer {layer} has {rows} rows, its bucket primes sum to {sum(primes)}")
        if layer >= c.cut:
            bad.append(f"engram layer {layer} lies at or after the cut {c.cut}; bounded replay needs it before")
    return bad


def _check_draft(c: ModelConfig) -> list[str]:
    bad = []
    if c.num_nextn_predict_layers:
        if not c.dspark_target_layer_ids:
            bad.append("dspark_target_layer_ids is empty but the model has draft blocks")
        if len(c.compress_ratios) != c.num_hidden_layers + c.num_nextn_predict_layers:
            bad.append(
                f"compress_ratios has {len(c.compress_ratios)} entries, expected {c.num_hidden_layers} layers + "
                f"{c.num_nextn_predict_layers} draft blocks"
            )
        if c.dspark_num_experts_per_tok > c.dspark_n_routed_experts:
            bad.append("dspark_num_experts_per_tok exceeds dspark_n_routed_experts")
        if not 0 <= c.dspark_noise_token_id < c.vocab_size:
            bad.append(f"dspark_noise_token_id is {c.dspark_noise_token_id}, outside the vocabulary")
    return bad


def _is_prime(n: int) -> bool:
    if n < 2 or n % 2 == 0:
        return n == 2
    d = 3
    while d * d <= n:
        if n % d == 0:
            return False
        d += 2
    return True
