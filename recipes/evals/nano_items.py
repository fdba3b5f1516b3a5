"""Write the questions of nano-arith, nano-retrieval and nano-json, the same bytes on every run.

    python recipes/evals/nano_items.py DIR

nano-arith takes pairs of two-digit numbers that the embedded model was not trained on: a pair is held out when both
numbers are at least 10 and the first byte of SHA-256 of "smaller,larger" is 230 or more (the last 26 of 256 values).
The other two sets are drawn without regard to training: look-ups in lists and JSON objects, short and offline.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from random import Random

ARITH_ITEMS = 200
RETRIEVAL_ITEMS = 24
JSON_ITEMS = 24
#: First byte of the pair's hash from which on a pair is kept out of training.
HELD_OUT_FROM = 230

NAMES = (
    "amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "hazel", "ivory", "jasper", "kiwi", "lotus",
    "maple", "north", "olive", "pearl", "quartz", "river", "slate", "tulip", "umber", "velvet", "willow", "zinc",
)  # fmt: skip


def held_out(a: int, b: int) -> bool:
    low, high = min(a, b), max(a, b)
    return low >= 10 and hashlib.sha256(f"{low},{high}".encode()).digest()[0] >= HELD_OUT_FROM


def arithmetic() -> list[dict[str, str]]:
    """Distinct held-out problems, additions and subtractions in turn."""
    rng = Random(101)
    seen: set[tuple[int, str, int]] = set()
    while len(seen) < ARITH_ITEMS:
        a, b = rng.randrange(10, 100), rng.randrange(10, 100)
        sign = "+-"[len(seen) % 2]
        if held_out(a, b):
            seen.add((a, sign, b))
    rows = sorted(seen)
    return [
        {"id": f"{a}{sign}{b}", "question": f"{a}{sign}{b}?", "answer": str(a + b if sign == "+" else a - b)}
        for a, sign, b in rows
    ]


def retrieval() -> list[dict[str, str]]:
    """A list of rooms and numbers, then one room; lists of 8 to 192 lines, the asked line anywhere."""
    rng = Random(102)
    rows = []
    for number in range(RETRIEVAL_ITEMS):
        lines = (8, 24, 64, 192)[number % 4]
        rooms = rng.sample([f"{name}-{i}" for name in NAMES for i in range(10)], lines)
        codes = {room: rng.randrange(100, 1000) for room in rooms}
        asked = rng.choice(rooms)
        listing = "\n".join(f"{room}: {code}" for room, code in codes.items())
        question = f"{listing}\n\nWhich number stands behind {asked}?"
        rows.append({"id": f"{lines}-{number}", "question": question, "answer": str(codes[asked])})
    return rows


def documents() -> list[dict[str, str]]:
    """Facts in a sentence, to be returned as one JSON object with given keys."""
    rng = Random(103)
    rows = []
    for number in range(JSON_ITEMS):
        first, second = rng.sample(NAMES, 2)
        a, b = rng.randrange(10, 100), rng.randrange(10, 100)
        question = (
            f"Store {first} has {a} boxes and store {second} has {b} boxes. Give the keys "
            '"first" (name of the first store), "second" (name of the second store), '
            '"boxes" (list of the two numbers in that order) and "total" (their sum).'
        )
        answer = {"first": first, "second": second, "boxes": [a, b], "total": a + b}
        rows.append({"id": f"json-{number}", "question": question, "answer": json.dumps(answer)})
    return rows


SETS = {"nano-arith": arithmetic, "nano-retrieval": retrieval, "nano-json": documents}


def text(rows: list[dict[str, str]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main() -> None:
    for name, make in SETS.items():
        (Path(sys.argv[1]) / f"{name}.jsonl").write_text(text(make()), encoding="utf-8")


if __name__ == "__main__":
    main()
