"""What ``inspect`` reports: sizes by component and per rank, parameters at work per token, the layer plan as a picture.

Everything comes from a config alone (no weights needed) and without torch. Bytes are payload bytes of the official
format; parameters do not count scales.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.config.model_v4 import AnyConfig, V4Config
from deepinfer_engine.errors import UsageError
from deepinfer_engine.weights.plan import tensor_families
from deepinfer_engine.weights.read_plan import engram_rows
from deepinfer_engine.weights.tensor_spec import Family

#: Order of the component table; a component that a config does not have is left out.
COMPONENTS = (
    "routed experts", "shared expert", "router", "attention", "indexer", "compressor", "hyper-connections", "norms",
    "embedding", "head", "engram tables", "engram projections", "draft routed experts", "draft shared expert",
    "draft router", "draft attention", "draft hyper-connections", "draft norms", "draft heads", "vision",
)  # fmt: skip


@dataclass(frozen=True)
class Component:
    """One row of the size table; ``rank_bytes`` are those of the fullest rank, ``share`` says how it is split."""

    name: str
    group: str
    tensors: int
    parameters: int
    nbytes: int
    rank_bytes: int
    share: str


@dataclass(frozen=True)
class ActiveParameters:
    """Parameters that take part in one token: matrices read, table rows and the embedding row not counted."""

    prefill: int
    decode: int
    draft: int


def components(config: AnyConfig, ep: int = 1) -> tuple[Component, ...]:
    """Sizes by component, whole and for the fullest of ``ep`` ranks (rank 0).

    Experts are split by slot, Engram tables by whole hash heads, everything else is on every rank. Raises
    ``UsageError`` for an ``ep`` that is not positive.
    """
    if ep < 1:
        raise UsageError(f"ep is {ep}, expected 1 or more")
    grouped: dict[str, list[Family]] = {}
    for family in tensor_families(config):
        grouped.setdefault(family.component, []).append(family)
    unknown = set(grouped) - set(COMPONENTS)
    assert not unknown, f"components without a place in the table: {unknown}"
    rows = []
    for name in COMPONENTS:
        families = grouped.get(name)
        if not families:
            continue
        share = "experts" if name.endswith("routed experts") else "rows" if name == "engram tables" else "copied"
        rows.append(
            Component(
                name=name,
                group=families[0].specs[0].group,
                tensors=sum(f.tensors for f in families),
                parameters=sum(f.parameters for f in families),
                nbytes=sum(f.nbytes for f in families),
                rank_bytes=sum(_rank_bytes(config, f, share, ep) for f in families),
                share=share,
            )
        )
    return tuple(rows)


def _rank_bytes(config: AnyConfig, family: Family, share: str, ep: int) -> int:
    if share == "experts":
        return family.nbytes // family.count * -(-family.count // ep)
    if share == "rows":
        assert isinstance(config, ModelConfig)
        layer = int(family.place)
        fullest = max(len(engram_rows(config, layer, ep, rank)) for rank in range(min(ep, config.engram_columns)))
        return sum(s.nbytes // s.shape[0] for s in family.specs) * fullest
    return family.nbytes


def active_parameters(config: AnyConfig) -> ActiveParameters:
    """Parameters at work per token.

    Decode: every layer with ``num_experts_per_tok`` routed experts and the shared one, Engram projections, head.
    Prefill of V4.1: the encoder half, Engram projections, and what the cut layer makes for every token (its window
    row, global row and index key); the decoder half and the head run for the last window only. V4 has no halves.
    ``draft``: all draft stages, their heads and the shared head, per drafted position.
    """
    per_layer = [0] * config.num_hidden_layers
    projections = head = draft = 0
    draft_top_k = config.dspark_num_experts_per_tok if isinstance(config, ModelConfig) else config.num_experts_per_tok
    for family in tensor_families(config):
        group = family.specs[0].group
        if group == "vision" or family.component in ("engram tables", "embedding"):
            continue
        if family.component.endswith("routed experts"):
            chosen = config.num_experts_per_tok if group == "backbone" else draft_top_k
            parameters = family.parameters // family.count * chosen
        else:
            parameters = family.parameters
        if group == "draft":
            draft += parameters
        elif group == "engram":
            projections += parameters
        elif family.component == "head":
            head = parameters
        else:
            per_layer[int(family.place)] += parameters
    decode = sum(per_layer) + projections + head
    prefill = sum(per_layer) if isinstance(config, V4Config) else _prefill(config, per_layer, projections)
    return ActiveParameters(prefill=prefill, decode=decode, draft=draft + head if draft else 0)


def _prefill(config: ModelConfig, per_layer: list[int], projections: int) -> int:
    names = ("attn.wkv.weight", "attn.kv_norm.weight", "attn.compressor.", "attn.indexer.wk.", "attn.indexer.k_norm.")
    prefixes = tuple(f"layers.{config.cut}.{name}" for name in names)
    source = sum(
        spec.parameters
        for family in tensor_families(config)
        if family.place == str(config.cut)
        for spec in family.specs
        if spec.name.startswith(prefixes)
    )
    return sum(per_layer[: config.cut]) + projections + source


# ---------------------------------------------------------------------- picture


def layer_picture(config: AnyConfig, *, width: int = 64) -> str:
    """The layer plan, one column per layer; rows wrap after ``width`` layers. Ends with a legend of the signs used."""
    rows = _v4_rows(config) if isinstance(config, V4Config) else _v41_rows(config)
    cut = config.cut if isinstance(config, ModelConfig) else 0
    layers = config.num_hidden_layers
    label = max(len(name) for name, _, _ in rows)
    lines = []
    for start in range(0, layers, width):
        if start:
            lines.append("")
        stop = min(start + width, layers)
        if cut:
            halves = [(max(start, a), min(stop, b), n) for a, b, n in ((0, cut, "encoder"), (cut, layers, "decoder"))]
            marks = [(n if b - a >= len(n) else n[:3])[: b - a].ljust(b - a) for a, b, n in halves if a < b]
            lines.append(_line(label, "half", " | ".join(marks)))
        tens = "".join(str(i // 10 % 10) if i % 10 == 0 else " " for i in range(start, stop))
        units = "".join(str(i % 10) for i in range(start, stop))
        lines.append(_line(label, "layer", _split(tens, start, cut)))
        lines.append(_line(label, "", _split(units, start, cut)))
        lines += [_line(label, name, _split(signs[start:stop], start, cut)) for name, signs, _ in rows]
    lines.append("")
    for name, _, legend in rows:
        first, *more = legend.splitlines()
        lines += [_line(label, name, first), *(_line(label, "", text) for text in more)]
    return "\n".join(lines) + "\n"


def _line(label: int, name: str, text: str) -> str:
    return f"{name.ljust(label)}  {text}".rstrip()


def _split(text: str, start: int, cut: int) -> str:
    """``text`` with a bar in front of the first decoder layer, when that layer is not the first of the row."""
    at = cut - start
    return f"{text[:at]} | {text[at:]}" if 0 < at < len(text) else text


def _v41_rows(c: ModelConfig) -> list[tuple[str, str, str]]:
    plans = c.layer_plan
    keys = "".join("." if p.mode == "window" else "F" if p.owns_kv else "-" for p in plans)
    topk = "".join({"window": ".", "full": "F", "reindex": "R", "reuse": "-"}[p.mode] for p in plans)
    if any(p.candidates == "publish" for p in plans):
        topk = "".join("C" if p.candidates == "publish" else sign for p, sign in zip(plans, topk, strict=True))
    rows = [
        ("ratio", "".join(str(p.ratio) for p in plans),
         f"0 window of {c.sliding_window} tokens only, 1 a global entry per token, 2 one per pair of tokens"),
        ("keys", keys, "F makes global KV and index keys, - reads those of the F to its left, . none"),
        ("top-k", topk, f"F scores every entry and picks {c.index_topk}, - reuses the pick to its left"),
    ]  # fmt: skip
    if "C" in topk:
        pool = c.candidate_topk_blocks * c.candidate_block_size
        rows[-1] = (*rows[-1][:2], f"{rows[-1][2]}\nC is F and keeps {pool} candidates, R picks among them")
    if c.engram_layer_ids:
        rows.append(("engram", _marks(c.num_hidden_layers, c.engram_layer_ids, "E"),
                     f"E adds {c.engram_columns} n-gram table rows per token before the layer"))  # fmt: skip
    if c.num_nextn_predict_layers:
        rows.append(("draft", _marks(c.num_hidden_layers, c.dspark_target_layer_ids, "T"),
                     f"T feeds its input to the {c.num_nextn_predict_layers} draft stages"))  # fmt: skip
    return rows


def _v4_rows(c: V4Config) -> list[tuple[str, str, str]]:
    layers = c.num_hidden_layers
    ratios = "".join({0: ".", 4: "4", 128: "H"}[r] for r in c.compress_ratios[:layers])
    rows = [
        ("ratio", ratios, f". window of {c.sliding_window} tokens only, 4 and H (128) pool that many tokens per entry"),
        ("top-k", "".join("F" if r == 4 else "." for r in c.compress_ratios[:layers]),
         f"F scores every entry and picks {c.index_topk}"),
        ("router", "".join("h" if i < c.num_hash_layers else "l" for i in range(layers)),
         "h experts by token id, l learned"),
    ]  # fmt: skip
    if c.draft == "dspark":
        taps = _marks(layers, c.dspark_target_layer_ids, "T")
        rows.append(("draft", taps, f"T feeds its output to the {c.draft_stages} draft stages"))
    return rows


def _marks(layers: int, ids: tuple[int, ...], sign: str) -> str:
    return "".join(sign if i in ids else "." for i in range(layers))
