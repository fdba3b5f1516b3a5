"""Cells of a grid against a brute-force product, exclusions, and the running order."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from deepinfer_engine.sweep.grid import Cell, expand, order

VALUES = st.one_of(st.integers(0, 3), st.booleans(), st.sampled_from(["x", "y"]), st.none())


@st.composite
def grids(draw):
    """Up to three axes of one or two keys, and exclusions over their keys."""
    names = iter("abcdef")
    axes = []
    for _ in range(draw(st.integers(0, 3))):
        length = draw(st.integers(1, 4))
        keys = [next(names) for _ in range(draw(st.integers(1, 2)))]
        axes.append({k: draw(st.lists(VALUES, min_size=length, max_size=length)) for k in keys})
    known = {k: v for axis in axes for k, v in axis.items()}
    rules = []
    for _ in range(draw(st.integers(0, 2)) if known else 0):
        keys = draw(st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=2, unique=True))
        rules.append({k: draw(st.lists(st.sampled_from(known[k]), min_size=1, max_size=2)) for k in keys})
    return axes, rules


@given(grids())
def test_cells_are_the_product_less_the_exclusions_in_order(case):
    axes, rules = case
    wanted = []
    for choice in product(*[range(len(next(iter(a.values())))) for a in axes]):
        point = {k: v[i] for a, i in zip(axes, choice, strict=True) for k, v in a.items()}
        typed = {k: (type(v), v) for k, v in point.items()}
        if not any(all(typed[k] in [(type(v), v) for v in values] for k, values in r.items()) for r in rules):
            wanted.append(point)
    cells = expand(axes, rules)
    assert [dict(c.values) for c in cells] == wanted
    assert [c.number for c in cells] == list(range(1, len(wanted) + 1))


def test_one_and_true_are_different_values():
    cells = expand([{"a": [1, True]}], [{"a": True}])
    assert [c.values for c in cells] == [{"a": 1}] and cells[0].values["a"] is not True


def test_every_cell_runs_once_per_repeat_and_every_second_pass_backwards():
    cells = expand([{"a": [1, 2, 3]}])
    assert [(c.number, r) for c, r in order(cells, 3)] == [
        (1, 1), (2, 1), (3, 1), (3, 2), (2, 2), (1, 2), (1, 3), (2, 3), (3, 3),
    ]  # fmt: skip


def test_a_cell_tells_profile_from_workload_keys_and_prints_yaml_words():
    cell = Cell(1, {"sched.overlap": True, "workload.rate": None, "spec.verify": "off"})
    assert cell.profile == {"sched.overlap": True, "spec.verify": "off"}
    assert cell.workload == {"rate": None}
    assert str(cell) == "sched.overlap=true workload.rate=null spec.verify=off"
