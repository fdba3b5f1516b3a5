"""Pictures of a sweep (matplotlib, extra ``plot``): curves and Pareto fronts as PNG, every model in a panel of its own.

Measured points are filled circles on a solid line, simulated ones open squares on a dashed line, vendor-read ones
diamonds without a line. Repeats are one point with a 95 % interval.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepinfer_engine.errors import NotReadyError
from deepinfer_engine.sweep import columns
from deepinfer_engine.sweep.grid import as_values, same
from deepinfer_engine.sweep.recipe import Plot
from deepinfer_engine.sweep.results import Row
from deepinfer_engine.sweep.series import PER_GPU, PER_USER, VENDOR, Kind, Point, Series, Source, curves, front, gains
from deepinfer_engine.sweep.vendor import vendor_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # pyright: ignore[reportMissingImports]

#: Okabe and Ito's colours, told apart by colour-blind eyes, darkest first; yellow is left out on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_STYLE: dict[Kind, dict[str, Any]] = {
    "measured": {"marker": "o", "linestyle": "-", "markersize": 6},
    "simulated": {"marker": "s", "linestyle": "--", "markersize": 6, "markerfacecolor": "none"},
    "vendor": {"marker": "D", "linestyle": "none", "markersize": 7},
}
_WORD: dict[Kind, str] = {"measured": "measured", "simulated": "simulated", "vendor": "vendor reading"}
#: More lines than this hide each other.
_MOST_LINES = 14
#: Labels of six digits fit beside each other up to here.
_MOST_TICKS = 8
#: Values this far apart (another machine, another model) cannot be read off one linear axis.
_MOST_SPAN = 50
#: Room beyond the outermost point, so that its mark is whole.
_MARGIN = 1.05
_DPI = 120


@dataclass(frozen=True)
class Picture:
    """A finished picture, or the sentence that says why there is none."""

    name: str
    title: str
    png: bytes | None
    note: str


def require_matplotlib() -> None:
    """Raise NotReadyError with the install line when matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise NotReadyError("plots need matplotlib", hint="pip install 'deepinfer-cli[plot]', or give --no-plots")


def draw(plot: Plot, sources: Sequence[Source], keys: Sequence[str]) -> Picture:
    """One picture of the rows of all sources, with the vendor's points where the recipe asks for them.

    ``keys`` are the swept keys.
    """
    every = [Source(s.name, [row for row in s.rows if _wanted(row, plot.where or {})]) for s in sources]
    if plot.vendor is not None:
        every.append(Source(VENDOR, vendor_rows(plot.vendor)))
    if plot.kind == "pareto":
        return _draw_pareto(plot, every)
    assert plot.x is not None and plot.y is not None
    y_label = columns.label(plot.y)
    if plot.kind == "gain":
        assert plot.over is not None
        series = gains(every, plot.x, plot.y, plot.over, keys)
        series += curves([s for s in every if s.name == VENDOR], plot.x, columns.GAIN, ())
        y_label = f"gain in {y_label.partition(',')[0]}, %"
    else:
        series = curves(every, plot.x, plot.y, plot.by)
    if not any(s.kind != "vendor" for s in series):
        return Picture(plot.name, plot.title, None, f"not drawn: no row has both {plot.x} and {plot.y}")
    panels = _by_model(series)
    figure, axes = _figure(len(panels))
    for ax, of_model in zip(axes, panels, strict=True):
        _lines(ax, of_model)
        _dress(ax, plot, of_model, columns.label(plot.x), y_label)
    return Picture(plot.name, plot.title, _png(figure), _note(series))


def _wanted(row: Row, rule: Mapping[str, Any]) -> bool:
    return all(any(same(row.get(key), value) for value in as_values(wanted)) for key, wanted in rule.items())


def _by_model(series: Sequence[Series]) -> list[list[Series]]:
    """Series by model, in order: a small model on a processor and a large one on a cluster share neither loads nor
    speeds, and one of them would be pressed into a corner."""
    panels: dict[str, list[Series]] = {}
    for one in series:
        panels.setdefault(one.model, []).append(one)
    return list(panels.values())


def _draw_pareto(plot: Plot, sources: Sequence[Source]) -> Picture:
    """Speed a user sees against throughput: one panel per GPU, one for a process without GPUs; never mixed."""
    with_gpu = [Source(s.name, [r for r in s.rows if r.get("gpus")]) for s in sources]
    without = [Source(s.name, [r for r in s.rows if not r.get("gpus")]) for s in sources]
    panels = [
        (curves(without, PER_USER, columns.PER_PROCESS, plot.by), columns.label(columns.PER_PROCESS)),
        (curves(with_gpu, PER_USER, PER_GPU, plot.by), columns.label(PER_GPU)),
    ]
    panels = [(series, label) for series, label in panels if series]
    if not any(s.kind != "vendor" for series, _ in panels for s in series):
        return Picture(plot.name, plot.title, None, f"not drawn: no row has {PER_USER} and a throughput")
    figure, axes = _figure(len(panels))
    for ax, (series, label) in zip(axes, panels, strict=True):
        _lines(ax, series, pareto=True)
        _dress(ax, plot, series, columns.label(PER_USER), label)
    notes = " ".join(_note(series) for series, _ in panels)
    return Picture(plot.name, plot.title, _png(figure), f"{notes} Lines join the points no other one beats.")


def _figure(panels: int) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyright: ignore[reportMissingImports]
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(7.5 * panels, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _lines(ax: Axes, series: Sequence[Series], *, pareto: bool = False) -> None:
    for colour, one in zip(_cycle(), series, strict=False):
        style = _STYLE[one.kind] | {"color": colour}
        points = one.points
        label = _legend(one)
        joined = front(points) if pareto else points
        rest = [p for p in points if p not in joined]
        _mark(ax, joined, style, label)
        if rest:  # dominated points stay visible, off the line
            _mark(ax, rest, style | {"linestyle": "none", "alpha": 0.45}, None)


def _legend(series: Series) -> str:
    return f"{series.label} ({_WORD[series.kind]})"


def _mark(ax: Axes, points: Sequence[Point], style: dict[str, Any], label: str | None) -> None:
    xs, ys = [p.x for p in points], [p.y.mean for p in points]
    low = [p.y.mean - p.y.low if p.y.low is not None else 0.0 for p in points]
    high = [p.y.high - p.y.mean if p.y.high is not None else 0.0 for p in points]
    if any(low) or any(high):
        ax.errorbar(xs, ys, yerr=[low, high], capsize=3, label=label, **style)
    else:
        ax.plot(xs, ys, label=label, **style)


def _cycle() -> Iterator[str]:
    for i in range(_MOST_LINES):
        yield _COLOURS[i % len(_COLOURS)]


def _scale(ax: Axes, plot: Plot, series: Sequence[Series]) -> None:
    """Scales of both axes and ticks with plain numbers."""
    from matplotlib import ticker  # pyright: ignore[reportMissingImports]

    ax.set_xscale(plot.x_scale)
    ax.set_yscale(plot.y_scale)
    for axis, scale in ((ax.xaxis, plot.x_scale), (ax.yaxis, plot.y_scale)):
        if scale == "log":
            low, high = axis.get_view_interval()
            between = (1, 2, 5) if high > 8 * low else (1, 1.5, 2, 3, 5, 7)  # less than a decade needs more ticks
            axis.set_major_locator(ticker.LogLocator(base=10, subs=between))
            axis.set_minor_formatter(ticker.NullFormatter())
        axis.set_major_formatter(ticker.FuncFormatter(_plain))
    xs = sorted({p.x for s in series if s.kind != "vendor" for p in s.points})
    if plot.x_scale == "log" and plot.kind != "pareto" and 0 < len(xs) <= _MOST_TICKS:
        ax.xaxis.set_major_locator(ticker.FixedLocator(xs))  # the swept values themselves


def _fitting(plot: Plot, series: Sequence[Series]) -> Plot:
    """The plot with a logarithmic vertical axis where a linear one would press a series flat."""
    means = [p.y.mean for s in series for p in s.points]
    if plot.kind != "gain" and min(means) > 0 and max(means) > _MOST_SPAN * min(means):
        return plot.model_copy(update={"y_scale": "log"})
    return plot


def _plain(value: float, _: int) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:g}"


def _dress(ax: Axes, plot: Plot, series: Sequence[Series], x: str, y: str) -> None:
    """Axes, title and legend around the drawn series."""
    plot = _fitting(plot, series)
    _scale(ax, plot, series)
    if plot.y_scale == "linear" and plot.kind != "gain":
        # bars of few repeats may be many times the value: they leave the picture, the points must not shrink to a line
        highest = max(p.y.mean for s in series for p in s.points)
        ax.set_ylim(0.0, min(max(ax.get_ylim()[1], _MARGIN * highest), 2 * highest))
    if plot.x_scale == "linear":
        low, high = ax.get_xlim()
        ax.set_xlim(min(0.0, low), max(high, _MARGIN * max(p.x for s in series for p in s.points)))
    ax.set_title(plot.title, fontsize=11)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.grid(True, which="major", alpha=0.3)
    # below the picture: no place inside is free on every run
    handles = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    order = [label for s in series if (label := _legend(s)) in handles]
    ax.legend(
        [handles[label] for label in order],
        order,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        fontsize=8,
        frameon=False,
    )


def _png(figure: Any) -> bytes:
    stream = io.BytesIO()
    # without the date and the version the same rows give the same bytes
    figure.savefig(stream, dpi=_DPI, format="png", metadata={"Software": None})
    return stream.getvalue()


def _note(series: Sequence[Series]) -> str:
    """What the picture says about its noise."""
    counts = [p.y.count for s in series if s.kind == "measured" for p in s.points]
    left = f" Only {_MOST_LINES} of {len(series)} lines are drawn." if len(series) > _MOST_LINES else ""
    if not counts:
        return f"Nothing here was measured.{left}"
    if min(counts) < 2:
        return f"Measured once per point: the noise is not known.{left}"
    return f"Bars are 95 % intervals of {min(counts)} or more repeats, cut off at twice the highest point.{left}"
