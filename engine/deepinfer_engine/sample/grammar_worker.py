"""A process that compiles grammars: one JSON line in, one out. It may be killed at any time.

The first line describes the vocabulary; every further one is a job {"kind", "source"}, answered by {"compiled"} or
{"error"}. Memory is bounded, so that a grammar that explodes takes this process and nothing else.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

#: address space beyond what importing took
_MEMORY_BYTES = 2 << 30
#: longest run of white space between tokens of JSON: room for indentation, no room for an endless blank answer
_WHITE_SPACE = 16


def _compile(xgrammar: Any, compilers: dict[str, Any], kind: str, source: str) -> Any:
    plain = compilers["plain"]
    if kind == "json_schema":
        return plain.compile_json_schema(source, max_whitespace_cnt=_WHITE_SPACE)
    if kind == "json_object":
        return plain.compile_json_schema(
            '{"type": "object", "additionalProperties": true}', max_whitespace_cnt=_WHITE_SPACE
        )
    if kind == "regex":
        return plain.compile_regex(source)
    if kind == "ebnf":
        return plain.compile_grammar(source)
    choice = "required" if kind == "tools_required" else "auto"
    tag = xgrammar.get_model_structural_tag(
        "deepseek_v4_1", tools=json.loads(source), tool_choice=choice, reasoning=False, max_whitespace_cnt=_WHITE_SPACE
    )
    return compilers["tags"].compile_structural_tag(tag)


def main() -> None:
    """Serve jobs until stdin ends."""
    lines, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the library prints warnings; nothing but replies may reach the parent's pipe
    import xgrammar  # pyright: ignore[reportMissingImports]

    from deepinfer_engine.sample.grammar import tokenizer_info
    from deepinfer_engine.sample.grammar_fault import sentence

    hello = json.loads(lines.readline())
    compilers = {
        name: xgrammar.GrammarCompiler(tokenizer_info(xgrammar, hello, name), max_threads=1, cache_enabled=False)
        for name in ("plain", "tags")
    }
    with open("/proc/self/statm", encoding="ascii") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, used + _MEMORY_BYTES))
    _reply(replies, {"ready": True})
    for line in lines:
        job = json.loads(line)
        try:
            compiled = _compile(xgrammar, compilers, job["kind"], job["source"])
            _reply(replies, {"compiled": compiled.serialize_json()})
        except MemoryError:
            _reply(replies, {"error": "the compiler ran out of memory"})
        except Exception as exc:  # a process boundary: whatever the library raises belongs to this grammar
            said = sentence(job["kind"], job["source"], str(exc), xgrammar.Grammar.from_regex)
            _reply(replies, {"error": said})


def _reply(stream: Any, value: dict[str, Any]) -> None:
    stream.write(json.dumps(value).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    main()
