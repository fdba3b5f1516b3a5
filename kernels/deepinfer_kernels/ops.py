"""Every operation the engine calls, with its specification. The model does no other mathematics.

Dimension letters: T tokens, B rows, C streams or queries per row (stated), H hidden, N heads, D head dim, K keys or
choices, E experts, S slots, V vocabulary, M expert rows, I expert width, n index entries, Di index head dim.
"""

from __future__ import annotations

from collections.abc import Mapping

from deepinfer_kernels.spec import EXACT, Dims, OpSpec, Tolerance

_BF16 = Tolerance(relative=5e-3)  # one bf16 rounding of a product sum in another order
_F32 = Tolerance(relative=1e-6)  # f32 arithmetic in another order


def _none(d: Dims) -> int:
    return 0


def _spec(
    name: str,
    family: str,
    summary: str,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    tolerance: Tolerance,
    bytes_,
    flops=_none,
    *,
    row_independent: bool = True,
) -> OpSpec:
    return OpSpec(name, family, summary, inputs, outputs, tolerance, bytes_, flops, row_independent)


OPS: dict[str, OpSpec] = {
    s.name: s
    for s in (
        # ------------------------------------------------------------ linear
        _spec("prepare_weight", "linear", "raw checkpoint storage to an opaque prepared weight",
              {"data": "out in raw", "scale": "tiles u8"}, {"weight": "opaque"}, EXACT,
              lambda d: d["out"] * d["in"] * 3),
        _spec("linear", "linear", "x · Wᵀ; FP8/FP4 kinds quantise the input per 32",
              {"x": "T in act", "weight": "out in"}, {"y": "T out act"}, _BF16,
              lambda d: d["out"] * d["in"] + 2 * d["T"] * (d["in"] + d["out"]),
              lambda d: 2 * d["T"] * d["out"] * d["in"]),
        _spec("linear_grouped", "linear", "block-diagonal projection of the attention output",
              {"x": "T G in act", "weight": "G out in"}, {"y": "T G out act"}, _BF16,
              lambda d: d["G"] * d["out"] * d["in"] + 2 * d["T"] * d["G"] * (d["in"] + d["out"]),
              lambda d: 2 * d["T"] * d["G"] * d["out"] * d["in"]),
        _spec("embed", "linear", "embedding rows", {"ids": "T i64", "table": "V H bf16"}, {"x": "T H act"}, EXACT,
              lambda d: 4 * d["T"] * d["H"]),
        _spec("head_logits", "linear", "f32 logits of normed hidden states",
              {"h": "T H act", "weight": "V H bf16"}, {"logits": "T V f32"}, _F32,
              lambda d: 2 * d["V"] * d["H"] + 4 * d["T"] * d["V"], lambda d: 2 * d["T"] * d["V"] * d["H"]),
        # -------------------------------------------------------------- norm
        _spec("rms_norm", "norm", "RMSNorm with an f32 statistic", {"x": "T H act", "weight": "H"}, {"y": "T H act"},
              _BF16, lambda d: 4 * d["T"] * d["H"], lambda d: 4 * d["T"] * d["H"]),
        _spec("rope_angles", "norm", "cos and sin of position · frequency", {"positions": "T i64", "f": "Dr/2 f32"},
              {"cos": "T Dr/2 f32", "sin": "T Dr/2 f32"}, _F32, lambda d: 4 * d["T"] * d["Dr"],
              lambda d: d["T"] * d["Dr"]),
        _spec("rope", "norm", "rotate interleaved pairs of the last dims, or back",
              {"x": "T N D act", "cos": "T Dr/2 f32", "sin": "T Dr/2 f32"}, {"y": "T N D act"}, _BF16,
              lambda d: 4 * d["T"] * d["N"] * d["D"], lambda d: 3 * d["T"] * d["N"] * d["Dr"]),
        # ------------------------------------------------------------- hyper
        _spec("mhc_mixes", "hyper", "pre, post and doubly stochastic combine coefficients of a sublayer",
              {"X": "T C H act", "fn": "C(C+2) CH f32"}, {"pre": "T C f32", "post": "T C f32", "comb": "T C C f32"},
              _F32, lambda d: 2 * d["T"] * d["C"] * d["H"] + 4 * d["C"] * (d["C"] + 2) * d["C"] * d["H"],
              lambda d: 2 * d["T"] * d["C"] * (d["C"] + 2) * d["C"] * d["H"]),
        _spec("mhc_collapse", "hyper", "weighted sum of the streams", {"X": "T C H act", "pre": "T C f32"},
              {"x": "T H act"}, _BF16, lambda d: 2 * d["T"] * (d["C"] + 1) * d["H"],
              lambda d: 2 * d["T"] * d["C"] * d["H"]),
        _spec("mhc_expand", "hyper", "sublayer output and remixed streams",
              {"X": "T C H act", "y": "T H act", "post": "T C f32", "comb": "T C C f32"}, {"X": "T C H act"}, _BF16,
              lambda d: 2 * d["T"] * (2 * d["C"] + 1) * d["H"], lambda d: 2 * d["T"] * d["C"] * (d["C"] + 1) * d["H"]),
        # --------------------------------------------------------------- moe
        _spec("gate_topk", "moe", "router: biased selection, unbiased weights",
              {"x": "T H act", "weight": "E H bf16", "bias": "E f32"}, {"ids": "T K i64", "weights": "T K f32"}, EXACT,
              lambda d: 2 * d["E"] * d["H"] + 2 * d["T"] * d["H"], lambda d: 2 * d["T"] * d["E"] * d["H"]),
        _spec("dispatch_permute", "moe", "sort (token, choice) pairs by physical slot", {"slots": "T K i64"},
              {"token": "TK i64", "order": "TK i64", "counts": "S i64"}, EXACT, lambda d: 24 * d["T"] * d["K"],
              row_independent=False),
        _spec("moe_experts", "moe", "grouped SwiGLU experts over rows sorted by slot",
              {"rows": "M H act", "counts": "S i64", "bank": "S slots", "weight": "M f32"}, {"y": "M H act"}, _BF16,
              lambda d: d["active"] * 3 * d["H"] * d["I"] * 17 // 32 + 4 * d["M"] * d["H"],
              lambda d: 6 * d["M"] * d["H"] * d["I"]),
        _spec("moe_combine", "moe", "sum of a token's expert rows and the shared expert",
              {"y": "M H act", "order": "TK i64", "shared": "T H act"}, {"out": "T H act"}, _BF16,
              lambda d: 2 * d["M"] * d["H"] + 4 * d["T"] * d["H"], lambda d: d["M"] * d["H"]),
        _spec("shared_expert", "moe", "the always-on expert", {"x": "T H act"}, {"y": "T H act"}, _BF16,
              lambda d: 3 * d["H"] * d["I"] + 4 * d["T"] * d["H"], lambda d: 6 * d["T"] * d["H"] * d["I"]),
        # --------------------------------------------------------- attention
        _spec("attend", "attention", "one softmax over window rows, selected global rows and a sink",
              {"q": "T N D act", "keys": "T K D act", "mask": "T K bool", "sink": "N f32"}, {"o": "T N D act"}, _BF16,
              lambda d: d["T"] * d["K"] * d["D"] + 4 * d["T"] * d["N"] * d["D"],
              lambda d: 4 * d["T"] * d["N"] * d["K"] * d["D"]),
        _spec("attend_cached", "attention", "attend over this step's rows and records read in place",
              {"q": "T N D act", "local": "T D act", "window": "T W i64", "ring": "R bytes", "slots": "T K i64",
               "entries": "E bytes", "sink": "N f32"}, {"o": "T N D act"}, _BF16,
              lambda d: d["T"] * d["K"] * d["D"] + 4 * d["T"] * d["N"] * d["D"],
              lambda d: 4 * d["T"] * d["N"] * d["K"] * d["D"]),
        _spec("pool_pairs", "compress", "gated pooling of a token pair", {"first": "T D f32", "second": "T D f32"},
              {"z": "T D act"}, _BF16, lambda d: 18 * d["T"] * d["D"], lambda d: 6 * d["T"] * d["D"]),
        # ------------------------------------------------------------- index
        _spec("quantise_index_query", "cache", "index queries as the scorer sees them", {"iq": "T N Di act"},
              {"iq": "T N Di act"}, EXACT, lambda d: 4 * d["T"] * d["N"] * d["Di"]),
        _spec("index_weights", "index", "scaled head weights", {"projected": "T N act"}, {"iw": "T N act"}, EXACT,
              lambda d: 4 * d["T"] * d["N"]),
        _spec("index_scores", "index", "Σ_h iw · relu(iq · key), −inf where invisible",
              {"iq": "B C N Di act", "iw": "B C N act", "keys": "B n Di act", "visible": "B C i64"},
              {"scores": "B C n f32"}, _BF16, lambda d: d["B"] * d["n"] * d["Di"] * 17 // 32,
              lambda d: 2 * d["B"] * d["C"] * d["N"] * d["n"] * d["Di"]),
        _spec("candidate_blocks", "index", "best blocks per query row, newest pinned",
              {"scores": "B C n f32", "visible": "B C i64"}, {"blocks": "B C n/block bool"}, EXACT,
              lambda d: 4 * d["B"] * d["C"] * d["n"]),
        _spec("restrict_to_candidates", "index", "−inf outside the published blocks",
              {"scores": "B C n f32", "blocks": "B C n/block bool"}, {"scores": "B C n f32"}, EXACT,
              lambda d: 8 * d["B"] * d["C"] * d["n"]),
        _spec("select_topk", "index", "ascending indices of the k best scores, −1 padded",
              {"scores": "B C n f32"}, {"ids": "B C k i64"}, EXACT, lambda d: 4 * d["B"] * d["C"] * d["n"]),
        # ------------------------------------------------------------- cache
        _spec("pack_rows", "cache", "rows to stored records", {"rows": "T D act"}, {"stored": "T bytes u8"}, EXACT,
              lambda d: 3 * d["T"] * d["D"]),
        _spec("unpack_rows", "cache", "stored records to rows", {"stored": "T bytes u8"}, {"rows": "T D act"}, EXACT,
              lambda d: 3 * d["T"] * d["D"]),
        _spec("store_rows", "cache", "scatter records into their slots", {"store": "R bytes", "slots": "T i64"}, {},
              EXACT, lambda d: 2 * d["T"] * d["D"]),
        _spec("load_rows", "cache", "gather rows from slots", {"store": "R bytes", "slots": "T K i64"},
              {"rows": "T K D act"}, EXACT, lambda d: 3 * d["T"] * d["K"] * d["D"]),
        # ------------------------------------------------------------ engram
        _spec("engram_hash", "engram", "table rows of the n-grams ending at each token", {"classes": "T nmax i64"},
              {"ids": "T columns i64"}, EXACT, lambda d: 8 * d["T"] * d["columns"]),
        _spec("dequantise_table", "engram", "values of gathered rows", {"weight": "M width u8", "scale": "M w/32"},
              {"e": "M width act"}, EXACT, lambda d: 3 * d["M"] * d["width"]),
        _spec("engram_gate", "engram", "mix the looked-up value into the streams",
              {"X": "T C H act", "projected": "T (C+1)H act"}, {"X": "T C H act", "gate": "T C f32"}, _BF16,
              lambda d: 2 * d["T"] * (3 * d["C"] + 1) * d["H"], lambda d: 8 * d["T"] * d["C"] * d["H"]),
        # ------------------------------------------------------------ sample
        _spec("sample", "sample", "next token ids, greedy or by keyed Gumbel noise",
              {"logits": "B V f32", "temperature": "B f32", "seed": "B i64", "position": "B i64"}, {"ids": "B i64"},
              EXACT, lambda d: 4 * d["B"] * d["V"], lambda d: 10 * d["B"] * d["V"]),
        _spec("adjust_logits", "sample", "penalties, biases and token masks of the rows that have them",
              {"logits": "B V f32", "row": "P i64", "token": "P i64", "count": "P f32", "mask": "G V/32 i32"},
              {"logits": "B V f32"}, EXACT, lambda d: 8 * d["B"] * d["V"], lambda d: 6 * d["P"]),
        _spec("token_logprobs", "sample", "log-probability of drawn tokens and of the best alternatives",
              {"logits": "B V f32", "ids": "B i64"}, {"logp": "B f32", "ids": "B top i64", "values": "B top f32"},
              _F32, lambda d: 8 * d["B"] * d["V"], lambda d: 4 * d["B"] * d["V"]),
        # --------------------------------------------------------- speculate
        _spec("dspark_confidence", "speculate", "sigmoid of confidence logits over the regime's temperatures",
              {"logits": "B J f32", "temperature": "G J f32", "regime": "B i64"}, {"confidence": "B J f32"}, _F32,
              lambda d: 8 * d["B"] * d["J"], lambda d: 4 * d["B"] * d["J"]),
        _spec("dspark_split", "speculate", "drafts each row verifies, out of one budget, by survival",
              {"confidence": "B J f32", "cap": "B i64", "admission": "B i64", "budget": "i64"}, {"length": "B i64"},
              EXACT, lambda d: 4 * d["B"] * d["J"] + 24 * d["B"], lambda d: d["B"] * d["J"], row_independent=False),
        _spec("verify_rows", "speculate", "packed rows of a verify step: sequence and draft place of each",
              {"length": "B i64"}, {"first": "B i64", "row": "T i64", "offset": "T i64"}, EXACT,
              lambda d: 16 * (d["B"] + d["T"]), row_independent=False),
        _spec("draft_sample", "speculate", "draft ids and the distribution they were drawn from",
              {"logits": "B V f32", "temperature": "B f32", "seed": "B i64", "position": "B i64"},
              {"ids": "B i64", "logprobs": "B V f32"}, EXACT, lambda d: 8 * d["B"] * d["V"],
              lambda d: 10 * d["B"] * d["V"]),
        _spec("adjust_verify_logits", "speculate", "penalties, biases and masks of verify rows, drafts counted",
              {"logits": "T V f32", "drafts": "B J i64", "first": "B i64", "length": "B i64", "row": "P i64",
               "token": "P i64", "count": "P f32", "mask": "G J+1 V/32 i32"}, {"logits": "T V f32"}, EXACT,
              lambda d: 8 * d["T"] * d["V"], lambda d: 6 * d["P"]),
        _spec("accept_drawn", "speculate", "drafts that equal the tokens drawn at their places",
              {"drawn": "T i64", "drafts": "B J i64", "first": "B i64", "length": "B i64"},
              {"tokens": "B J+1 i64", "num_accepted": "B i64"}, EXACT, lambda d: 8 * (d["T"] + 3 * d["B"] * d["J"])),
        _spec("accept_rejection", "speculate", "drafts accepted with min(1, p/q), then a residual or bonus token",
              {"logits": "T V f32", "drafts": "B J i64", "draft_logprobs": "B J V f32", "first": "B i64",
               "length": "B i64"}, {"tokens": "B J+1 i64", "num_accepted": "B i64"}, EXACT,
              lambda d: 4 * d["V"] * (d["T"] + d["B"] * d["J"]), lambda d: 20 * d["T"] * d["V"]),
        _spec("truncate_emitted", "speculate", "emitted tokens up to a stop id or the length limit",
              {"tokens": "B J+1 i64", "num_accepted": "B i64", "stop": "B S i64", "room": "B i64"},
              {"count": "B i64", "num_accepted": "B i64", "ended": "B i64"}, EXACT,
              lambda d: 8 * d["B"] * (d["J"] + d["S"])),
    )
}  # fmt: skip
