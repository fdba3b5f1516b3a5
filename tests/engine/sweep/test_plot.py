"""Pictures: every kind has its own mark, vendor points have no line, GPUs and processes have panels of their own."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib", reason="needs the extra plot")

from deepinfer_engine.sweep import plot as pictures
from deepinfer_engine.sweep.recipe import Plot
from deepinfer_engine.sweep.series import Source


def row(cell, kind="measured", **columns):
    base = {"cell": cell, "repeat": 1, "kind": kind, "model": "nano", "platform": "cpu", "gpus": None}
    return base | {"x": cell, "output_tok_s": 10.0 * cell, "output_tok_s_user": 9.0 - cell} | columns


GPU = {"platform": "sm90", "gpus": 8, "output_tok_s_gpu": 100.0}
SOURCES = [
    Source("", [row(1), row(2), row(3)]),
    Source("h200", [row(1, **GPU), row(2, **GPU)]),
    Source("laws", [row(1, "simulated", **GPU), row(2, "simulated", **GPU)]),
]


@pytest.fixture
def drawn(monkeypatch):
    """The axes of every figure that is drawn."""
    axes = []
    real = pictures._figure

    def kept(panels):
        figure, found = real(panels)
        axes.extend(found)
        return figure, found

    monkeypatch.setattr(pictures, "_figure", kept)
    return axes


def marks(axes) -> dict[str, tuple[str, str, int]]:
    """Label to (marker, line style, points)."""
    return {
        str(line.get_label()): (line.get_marker(), line.get_linestyle(), len(line.get_xdata()))
        for line in axes.lines
        if not str(line.get_label()).startswith("_")
    }


def test_kinds_have_marks_of_their_own_and_share_no_line(drawn):
    made = pictures.draw(Plot(name="a", title="A", x="x", y="output_tok_s", vendor="decode"), SOURCES, ("x",))
    assert made.png and marks(drawn[0]) == {
        "nano, cpu (measured)": ("o", "-", 3),
        "h200: nano, 8 x sm90 (measured)": ("o", "-", 2),
        "laws: nano, 8 x sm90 (simulated)": ("s", "--", 2),
    }
    assert next(t.get_text() for t in drawn[0].get_legend().get_texts()) == "nano, cpu (measured)"


def test_pareto_panels_divide_by_gpus_or_not_and_vendor_points_have_no_line(drawn):
    made = pictures.draw(Plot(name="p", kind="pareto", title="P", vendor="decode"), SOURCES, ("x",))
    process, gpu = drawn
    assert made.png and list(marks(process)) == ["nano, cpu (measured)"]
    assert process.get_ylabel() == "output throughput, tok/s" and gpu.get_ylabel() == "output throughput, tok/s/GPU"
    found = marks(gpu)
    assert found["deepseek-v4.1-flash, 64 x sm100 (vendor reading)"] == ("D", "None", 2)
    assert found["h200: nano, 8 x sm90 (measured)"][2] == 1  # of two points with one throughput the faster user wins


def test_models_have_panels_of_their_own_with_their_own_scales(drawn):
    large = {"model": "large", "platform": "sm100", "gpus": 64, "output_tok_s": 1e6}
    rows = [row(1, "simulated", x=4000, **large), row(2, "simulated", x=32_000, **large)]
    plot = Plot(name="a", title="A", x="x", y="output_tok_s", x_scale="log")
    made = pictures.draw(plot, [SOURCES[0], Source("laws", rows)], ("x",))
    small, other = drawn
    assert made.png and list(marks(small)) == ["nano, cpu (measured)"]
    assert list(marks(other)) == ["laws: large, 64 x sm100 (simulated)"]
    assert small.get_xlim()[1] < 4 and small.get_yscale() == other.get_yscale() == "linear"


def test_where_leaves_rows_out_and_one_measurement_says_that_noise_is_unknown(drawn):
    plot = Plot(name="a", title="A", x="x", y="output_tok_s", where={"x": [1, 3]})
    made = pictures.draw(plot, SOURCES[:1], ("x",))
    assert marks(drawn[0])["nano, cpu (measured)"][2] == 2 and "noise is not known" in made.note


def test_a_wide_interval_leaves_the_picture_instead_of_flattening_it(drawn):
    rows = [row(1), row(1, repeat=2, output_tok_s=900.0), row(2)]
    pictures.draw(Plot(name="a", title="A", x="x", y="output_tok_s"), [Source("", rows)], ("x",))
    assert drawn[0].get_ylim() == (0.0, 2 * 455.0)


def test_a_far_faster_machine_makes_the_axis_logarithmic_instead_of_flattening_the_other(drawn):
    fast = Source("fast", [row(1, output_tok_s=5000.0), row(2, output_tok_s=6000.0)])
    plot = Plot(name="a", title="A", x="x", y="output_tok_s")
    pictures.draw(plot, [SOURCES[0]], ("x",))
    pictures.draw(plot, [SOURCES[0], fast], ("x",))
    assert [axes.get_yscale() for axes in drawn] == ["linear", "log"]


def test_the_same_rows_give_the_same_bytes():
    plot = Plot(name="a", title="A", x="x", y="output_tok_s")
    assert pictures.draw(plot, SOURCES, ("x",)).png == pictures.draw(plot, SOURCES, ("x",)).png
