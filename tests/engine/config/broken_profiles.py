"""Broken profiles: name, text (or bytes), expected fragment of the message. ``@`` in a fragment is the file name."""

# ruff: noqa: E501  (one case per line, however long its text)

from __future__ import annotations

GOOD = """\
schema_version: 1
name: mine
hardware:
  platform: sm100
  gpus: 8
  gpus_per_node: 8
  hbm_gib: 178
parallel:
  ep: 8
  dp: 8
"""
_CPU = "schema_version: 1\nname: mine\n"


def _edit(old: str, new: str) -> str:
    assert GOOD.count(old) == 1, old
    return GOOD.replace(old, new)


SYNTAX: list[tuple[str, str | bytes, str]] = [
    ("empty", "", "@: is empty"),
    ("only-comments", "# nothing\n\n", "@: is empty"),
    ("only-marker", "---\n", "@: is empty"),
    ("null-document", "null\n", "@: is empty"),
    ("list-document", "- a\n- b\n", "@:1:1: found a list, expected keys and values"),
    ("scalar-document", "hello\n", "@:1:1: found 'hello', expected keys and values"),
    ("duplicate-key", _CPU + "role: both\nrole: decode\n", "@:4:1: the key 'role' is given twice, first on line 3"),
    (
        "duplicate-nested",
        _CPU + "sched:\n  overlap: true\n  overlap: true\n",
        "@:5:3: the key 'overlap' is given twice",
    ),
    ("duplicate-quoted", _CPU + '"role": both\nrole: both\n', "@:4:1: the key 'role' is given twice"),
    ("anchor", _CPU + "sched: &s\n  overlap: true\n", "@:3:8: anchor &s: anchors are not accepted"),
    ("alias", _CPU + "sched: *s\n", "@:3:8: alias *s: aliases are not accepted"),
    ("merge-key", _CPU + "<<: {role: both}\n", "@:3:1: unknown key '<<'"),
    ("tag", _CPU + "role: !!str both\n", "@:3:7: tag tag:yaml.org,2002:str: tags are not accepted"),
    ("python-tag", _CPU + "role: !!python/object/apply:os.system [x]\n", "@:3:7: tag"),
    ("two-documents", _CPU + "---\n" + _CPU, "@:3:1: a second document starts here"),
    ("directive", "%YAML 1.1\n---\n" + _CPU, "@:1:1: directives are not accepted"),
    ("tab-indent", _CPU + "sched:\n\toverlap: true\n", "@:4:1: not valid YAML: found character '\\t'"),
    ("unclosed-flow", _CPU + "sched: {overlap: true\n", "not valid YAML: expected ',' or '}'"),
    ("unclosed-quote", _CPU + 'role: "both\n', "not valid YAML: found unexpected end of stream"),
    ("bad-indent", _CPU + "sched:\n    overlap: true\n  max_rows_per_rank: 1\n", "@:5:3: not valid YAML"),
    ("missing-colon", _CPU + "role both\nsched: {}\n", "not valid YAML"),
    ("colon-in-value", _CPU + "description: a: b\n", "@:3:15: not valid YAML: mapping values are not allowed here"),
    ("list-as-key", _CPU + "? [a, b]\n: 1\n", "@:3:3: a key must be text, not a section or a list"),
    ("number-as-key", _CPU + "1: x\n", "@:3:1: the key '1' is not text"),
    ("true-as-key", _CPU + "true: x\n", "@:3:1: the key 'true' is not text"),
    ("not-utf8", b"schema_version: 1\nname: m\xff\n", "@:2: byte 25 is not UTF-8"),
    ("utf16", _CPU.encode("utf-16"), "@:1: byte 0 is not UTF-8"),
    ("nul", _CPU + "role: \0\n", "@:3:7: character U+0000 is not allowed"),
    ("bad-escape", _CPU + 'role: "\\UFFFFFFFF"\n', "@: not valid YAML"),
    ("surrogate", _CPU + 'role: "\\ud800"\n', "@:3:7: an escape names half of a surrogate pair"),
    ("infinity", GOOD.replace("178", ".inf"), "@:7:12: .inf is not a finite number"),
    ("nan", GOOD.replace("178", ".nan"), "@:7:12: .nan is not a finite number"),
    ("overflow", GOOD.replace("178", "1e999"), "@:7:12: the number 1e999 is too large"),
    ("huge-integer", GOOD.replace("178", "9" * 5000), "@:7:12: an integer of 5000 characters"),
    ("deep-flow", _CPU + "sched: " + "[" * 3000 + "]" * 3000 + "\n", "nested deeper than 16 levels"),
    ("deep-block", _CPU + "".join(" " * i + f"k{i}:\n" for i in range(300)), "nested deeper than 16 levels"),
    ("too-long", _CPU + "# " + "x" * 70_000, "@: longer than 65536 bytes"),
]

SCHEMA: list[tuple[str, str | bytes, str]] = [
    ("no-version", "name: mine\n", "the required key 'schema_version' is missing"),
    ("no-name", "schema_version: 1\n", "the required key 'name' is missing"),
    ("future-version", "schema_version: 2\nname: mine\n", "@:1:17: schema_version is the number 2, expected 1"),
    ("text-version", "schema_version: '1'\nname: mine\n", "@:1:17: schema_version is the text '1', expected 1"),
    ("bad-name", "schema_version: 1\nname: My Profile\n", "@:2:7: name is the text 'My Profile', expected lower-case"),
    ("number-name", "schema_version: 1\nname: 12\n", "@:2:7: name is the number 12, expected text"),
    ("unknown-top", _CPU + "shed:\n  overlap: true\n", "@:3:1: unknown key 'shed'; nearest is 'sched'"),
    ("unknown-nested", _CPU + "sched:\n  overlp: true\n", "@:4:3: unknown key 'overlp' in sched; nearest is 'overlap'"),
    ("unknown-far", _CPU + "replay:\n  zzz: 1\n", "@:4:3: unknown key 'zzz' in replay; known are decoder, encoder"),
    ("unknown-deep", _CPU + "cache:\n  store:\n    ttl_s:\n      agnet: 5\n", "@:6:7: unknown key 'agnet' in cache.store.ttl_s"),
    ("yaml11-bool", _CPU + "sched:\n  overlap: on\n", "@:4:12: sched.overlap is the text 'on', expected true or false"),
    ("bool-as-int", _CPU + "sched:\n  max_rows_per_rank: true\n", "@:4:22: sched.max_rows_per_rank is true, expected an integer"),
    ("int-as-bool", _CPU + "cache:\n  prefix: 1\n", "@:4:11: cache.prefix is the number 1, expected true or false"),
    ("float-as-int", _CPU + "sched:\n  max_rows_per_rank: 1e3\n", "@:4:22: sched.max_rows_per_rank is the number 1000.0"),
    ("unit-in-int", _CPU + "sched:\n  prefill_chunk_tokens: 64k\n", "@:4:25: sched.prefill_chunk_tokens is the text '64k'"),
    ("unit-in-float", _CPU + "cache:\n  host_gib_per_rank: 2GiB\n", "is the text '2GiB', expected a number"),
    ("quoted-int", GOOD.replace("ep: 8", 'ep: "8"'), "@:9:7: parallel.ep is the text '8', expected an integer"),
    ("version-as-float", _CPU + "requires:\n  cann_min: 9.2\n", "@:4:13: requires.cann_min is the number 9.2, expected text"),
    ("version-form", _CPU + "requires:\n  cann_min: latest\n", "expected a version such as"),
    ("list-for-section", _CPU + "sched: [1]\n", "@:3:8: sched is a list, expected a section of keys"),
    ("text-for-section", _CPU + "sched: off\n", "@:3:8: sched is the text 'off', expected a section of keys"),
    ("empty-section", _CPU + "sched:\n", "sched has no value; expected a section of keys"),
    ("empty-value", _CPU + "sched:\n  overlap:\n", "sched.overlap has no value; expected true or false"),
    ("section-for-value", _CPU + "sched:\n  overlap: {a: 1}\n", "@:4:12: sched.overlap is a section, expected true or false"),
    ("section-for-list", _CPU + "spec:\n  confidence_temperatures: 1.0\n", "is the number 1.0, expected a list"),
    ("choice", _CPU + "numerics:\n  mode: fsat\n", "@:4:9: numerics.mode is the text 'fsat', expected reference, float or fast; nearest is 'fast'"),
    ("choice-case", _CPU + "role: Decode\n", "@:3:7: role is the text 'Decode'"),
    ("replay-true", _CPU + "replay:\n  decoder: false\n", "@:4:12: replay.decoder is false, expected off, exact or bounded"),
    ("rows-zero", _CPU + "sched:\n  max_rows_per_rank: 0\n", "is the number 0, expected 1 or more"),
    ("negative", _CPU + "eplb:\n  period_steps: -1\n", "@:4:17: eplb.period_steps is the number -1, expected 0 or more"),
    ("too-large", _CPU + "sched:\n  max_context_tokens: 2000000\n", "expected 1048576 or less"),
    ("temperature-zero", _CPU + "spec:\n  confidence_temperatures: [1, 1, 0, 1, 1]\n", "@:4:35: spec.confidence_temperatures.2 is the number 0, expected more than 0"),
    ("op-name", _CPU + "kernels:\n  overrides: {RMS Norm: auto}\n", "@:4:15: 'RMS Norm' is not the name of an operation"),
    ("op-backend", _CPU + "kernels:\n  overrides: {rmsnorm: trition}\n", "kernels.overrides.rmsnorm is the text 'trition'"),
    ("empty-path", _CPU + 'eplb:\n  plan_path: ""\n', "expected at least one character"),
    ("long-description", _CPU + f"description: {'x' * 300}\n", "expected at most 200 characters"),
    ("extends-unknown", _CPU + "extends: decode-ep46\n", "@:3:10: no shipped profile is called 'decode-ep46'; nearest is 'decode-ep64'"),
    ("extends-two-levels", _CPU + "extends: decode-ep8\n", "decode-ep8.yaml:5:10: a base cannot extend 'decode-ep64' itself; profiles extend one level"),
    ("extends-missing-file", _CPU + "extends: nowhere/base.yaml\n", "base.yaml: no such file"),
    ("two-problems", _CPU + "role: x\nsched:\n  overlap: 3\n", "@: 2 problems"),
]  # fmt: skip

RELATIONS: list[tuple[str, str | bytes, str]] = [
    ("ep-exceeds-mesh", GOOD.replace("ep: 8\n  dp: 8", "ep: 64\n  dp: 64"), "@:9:7: ep 64 needs 64 ranks, the mesh has 8"),
    ("ep-below-mesh", GOOD.replace("ep: 8\n  dp: 8", "ep: 4\n  dp: 4"), "@:9:7: ep 4 uses 4 of 8 gpus"),
    ("dp-divides", _edit("dp: 8", "dp: 6"), "@:10:7: dp 6 does not divide ep 8"),
    ("cpu-gpus", _CPU + "hardware:\n  gpus: 1\n", "@:4:9: hardware.gpus is 1 on platform cpu, expected 0"),
    ("no-gpus", _edit("  gpus: 8\n", ""), "platform sm100 needs hardware.gpus of 1 or more, found 0"),
    ("no-hbm", _edit("  hbm_gib: 178\n", ""), "platform sm100 needs hardware.hbm_gib above 0, found 0"),
    ("odd-nodes", _edit("gpus_per_node: 8", "gpus_per_node: 3"), "@:5:9: 8 gpus do not fill whole nodes of 3"),
    ("redundant-alone", _CPU + "parallel:\n  redundant_experts_per_rank: 2\n", "2 redundant experts on ep 1"),
    ("ascend-invariant", _edit("sm100", "ascend950") + "numerics:\n  batch_invariant: true\n", "@:12:20: numerics.batch_invariant is not available on platform ascend950"),
    ("half-block", _CPU + "cache:\n  hbm_tokens_per_rank: 100000\n", "is not a multiple of the 128-token block"),
    ("context-does-not-fit", _CPU + "cache:\n  hbm_tokens_per_rank: 1280\n", "@:4:24: cache.hbm_tokens_per_rank 1280 cannot hold one request of sched.max_context_tokens 8192"),
    ("tier-without-prefix", _CPU + "cache:\n  host_gib_per_rank: 4\n", "cache.host_gib_per_rank is 4.0, but cache.prefix is false"),
    ("pool-without-prefix", _CPU + "cache:\n  swa_pool_gib_per_rank: 4\n", "cache.swa_pool_gib_per_rank is 4.0, but cache.prefix is false"),
    ("tier-of-float-rows", _CPU + "numerics: {mode: float}\ncache:\n  prefix: true\n  host_gib_per_rank: 4\n", "cache.host_gib_per_rank is 4.0, but it keeps official records and numerics.mode float has f32 rows"),
    ("pool-of-float-rows", _CPU + "numerics: {mode: float}\ncache:\n  prefix: true\n  swa_pool_gib_per_rank: 4\n", "cache.swa_pool_gib_per_rank is 4.0, but it keeps official records"),
    ("store-of-float-rows", _CPU + "numerics: {mode: float}\ncache:\n  prefix: true\n  store: {backend: posix, path: kv}\n", "cache.store.backend is posix, but it keeps official records"),
    ("store-without-path", _CPU + "cache:\n  prefix: true\n  store: {backend: posix}\n", "cache.store.backend posix needs cache.store.path"),
    ("path-without-store", _CPU + "cache:\n  store: {path: kv}\n", "cache.store.path is kv, but cache.store.backend is none"),
    ("device-on-cpu", _CPU + "cache:\n  engram_placement: device\n", "platform cpu has no device memory"),
    ("encoder-without-prefix", _CPU + "replay:\n  encoder: bounded\n", "replay.encoder bounded replays after a prefix hit, but cache.prefix is false"),
    ("temperatures", _CPU + "spec:\n  confidence_temperatures: [1.0, 1.1]\n", "has 2 values for spec.draft_tokens 5"),
    ("window-over-period", GOOD + "eplb:\n  window_steps: 500\n  period_steps: 100\n", "@:12:17: eplb.window_steps 500 exceeds eplb.period_steps 100"),
    ("eplb-alone", _CPU + "eplb:\n  period_steps: 1000\n", "eplb.period_steps is 1000, but ep 1 has no ranks to balance"),
    ("triton-on-cpu", _CPU + "kernels:\n  backend: triton\n", "@:4:12: kernels.backend is triton, which does not run on platform cpu; use auto, reference, cpu"),
    ("override-platform", GOOD + "kernels:\n  overrides:\n    rmsnorm: cpu\n", "@:13:14: kernels.overrides.rmsnorm is cpu, which does not run on platform sm100"),
]  # fmt: skip

BROKEN = [*SYNTAX, *SCHEMA, *RELATIONS]
