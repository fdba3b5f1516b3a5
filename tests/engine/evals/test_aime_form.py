"""The 30 questions of aime-form: every answer by brute force, from the statement and nothing else."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

QUESTIONS = Path(__file__).resolve().parents[3] / "recipes" / "evals" / "aime-form.jsonl"


def residues() -> int:
    return sum((n * n + 3 * n + 9) % 13 == 0 for n in range(1, 1501))


def climbing_digits() -> int:
    numbers = [str(n) for n in range(1000, 10000)]
    return sum(list(d) == sorted(d) and sum(map(int, d)) == 20 for d in numbers)


def neighbours_not_by_three() -> int:
    return sum(all((a + b) % 3 for a, b in itertools.pairwise(order)) for order in itertools.permutations(range(1, 8)))


def lattice_paths() -> int:
    def walk(x: int, y: int) -> int:
        if x > 8 or y > 7 or (x % 4 == 3 and y % 4 == 1):
            return 0
        return 1 if (x, y) == (8, 7) else walk(x + 1, y) + walk(x, y + 1)

    return walk(0, 0) % 1000


def scalene_triangles() -> int:
    return sum(a + b > 90 - a - b > b for a in range(1, 90) for b in range(a + 1, 90))


def square_product() -> int:
    rolls = list(itertools.product(range(1, 7), repeat=4))
    share = Fraction(sum(math.isqrt(math.prod(r)) ** 2 == math.prod(r) for r in rolls), len(rolls))
    return share.numerator + share.denominator


def recurrence() -> int:
    a, b = 2, 5
    for _ in range(2025):
        a, b = b, 3 * b + 2 * a
    return a % 1000


def integer_roots() -> int:
    values = set()
    for roots in itertools.combinations_with_replacement(range(1, 22), 4):  # four of them sum to 24
        if math.prod(roots) == 720 and sum(roots) == 24:
            values.add(sum(x * y for x, y in itertools.combinations(roots, 2)))
    return sum(values)


def floor_sum() -> int:
    return sum(k * k // 7 for k in range(1, 61)) % 1000


def no_difference_three() -> int:
    sets = (set(c) for size in range(13) for c in itertools.combinations(range(1, 13), size))
    return sum(all(x + 3 not in s for x in s) for s in sets)


def unit_vectors() -> int:
    count = 0
    for a, b in itertools.combinations(range(36), 2):
        re = math.cos(math.tau * a / 36) + math.cos(math.tau * b / 36)
        im = math.sin(math.tau * a / 36) + math.sin(math.tau * b / 36)
        count += math.hypot(re, im) <= 1 + 1e-9
    return count


def inside_triangle() -> int:
    corners = [(0, 0), (40, 10), (15, 45)]

    def side(p: tuple[int, int], q: tuple[int, int], x: int, y: int) -> int:
        return (q[0] - p[0]) * (y - p[1]) - (q[1] - p[1]) * (x - p[0])

    edges = list(zip(corners, corners[1:] + corners[:1], strict=True))
    return sum(all(side(p, q, x, y) > 0 for p, q in edges) for x in range(41) for y in range(46))


def stones() -> int:
    wins = [False]
    for n in range(1, 501):
        wins.append(any(n >= take and not wins[n - take] for take in (1, 3, 4)))
    return wins[1:].count(False)


def base_seven() -> int:
    def read(n: int) -> int:
        return int(str(n % 7)) if n < 7 else 10 * read(n // 7) + n % 7

    return sum(read(n) % 3 == 0 for n in range(1, 1000))


def cube_walk() -> int:
    ways = {v: int(v == 0) for v in range(8)}
    for _ in range(5):
        ways = {v: sum(ways[v ^ bit] for bit in (1, 2, 4)) for v in range(8)}
    share = Fraction(ways[1] + ways[2] + ways[4], 3**5)
    return share.numerator + share.denominator


def eight_divisors() -> int:
    return sum(n for n in range(1, 201) if sum(n % d == 0 for d in range(1, n + 1)) == 8) % 1000


def zeros_in_base_twelve() -> int:
    product = math.prod(range(2, 401, 2))
    count = 0
    while product % 12 == 0:
        product //= 12
        count += 1
    return count


def unit_fractions() -> int:
    return sum((72 * x) % (x - 72) == 0 for x in range(73, 72 * 73 + 1))


def self_maps() -> int:
    maps = itertools.product(range(5), repeat=5)
    return sum(all(f[f[f[x]]] == f[x] for x in range(5)) for f in maps)


def magic_fours() -> int:
    rows = [r for r in itertools.product(range(5), repeat=3) if sum(r) == 4]
    return sum(all(a + b + c == 4 for a, b, c in zip(*m, strict=True)) for m in itertools.product(rows, repeat=3))


def rooks() -> int:
    squares = [(r, c) for r in range(5) for c in range(5) if r != c and r + c != 4]
    return sum(
        len({r for r, _ in four}) == len({c for _, c in four}) == 4 for four in itertools.combinations(squares, 4)
    )


def right_triangles() -> int:
    return sum(
        a * a + b * b == c * c
        for a in range(1, 100)
        for b in range(a, 100)
        if (c := math.isqrt(a * a + b * b)) and a + b + c <= 200
    )


def digit_sums() -> int:
    def digits(n: int) -> int:
        return sum(map(int, str(n)))

    return sum(digits(n) % 7 == 0 or digits(n + 1) % 7 == 0 for n in range(1, 1000))


def power_of_two() -> int:
    return next(n for n in itertools.count(1) if str(2**n).startswith("777"))


def words() -> int:
    strings = ("".join(s) for s in itertools.product("ABC", repeat=7))
    return sum("AA" not in s and "BC" not in s for s in strings)


def acute_triangles() -> int:
    return sum(max(b - a, c - b, 15 - c + a) * 2 < 15 for a, b, c in itertools.combinations(range(15), 3))


def remainders() -> int:
    return next(n for n in itertools.count(1) if (n % 7, n % 11, n % 13) == (3, 5, 9))


def largest_product() -> int:
    triples = ((a, b, 50 - a - b) for a in range(1, 49) for b in range(1, 50 - a))
    return max(a * b * c for a, b, c in triples if (a * b * c) % 84 == 0) % 1000


def hexagon_colours() -> int:
    def good(c: tuple[int, ...]) -> bool:
        return all(c[i] != c[(i + 1) % 6] for i in range(6)) and all(c[i] != c[i + 3] for i in range(3))

    return sum(map(good, itertools.product(range(4), repeat=6)))


def right_angle_heights() -> int:
    return sum(y for x in range(51) for y in range(1, 26) if x * (x - 50) + y * y == 0)


SOLVERS: dict[str, Callable[[], int]] = {
    f.__name__.replace("_", "-"): f
    for f in (
        residues, climbing_digits, neighbours_not_by_three, lattice_paths, scalene_triangles, square_product,
        recurrence, integer_roots, floor_sum, no_difference_three, unit_vectors, inside_triangle, stones, base_seven,
        cube_walk, eight_divisors, zeros_in_base_twelve, unit_fractions, self_maps, magic_fours, rooks,
        right_triangles, digit_sums, power_of_two, words, acute_triangles, remainders, largest_product,
        hexagon_colours, right_angle_heights,
    )
}  # fmt: skip


def questions() -> dict[str, dict[str, str]]:
    rows = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    return {row["id"]: row for row in rows}


def test_thirty_different_questions_and_a_solver_for_each():
    rows = questions()
    assert len(QUESTIONS.read_text(encoding="utf-8").splitlines()) == len(rows) == 30
    assert rows.keys() == SOLVERS.keys()
    assert len({row["question"] for row in rows.values()}) == 30


@pytest.mark.parametrize("name", SOLVERS)
def test_answer_is_what_brute_force_finds(name: str):
    answer = SOLVERS[name]()
    assert 0 <= answer <= 999
    assert questions()[name]["answer"] == str(answer)
