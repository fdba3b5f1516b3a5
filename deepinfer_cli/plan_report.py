"""How plans, anchors and simulations look: sections of aligned rows, every figure with its origin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from deepinfer_cli import render

if TYPE_CHECKING:
    from deepinfer_engine.cost.anchors import Anchor
    from deepinfer_engine.cost.figure import Figure
    from deepinfer_engine.sim.deployment import DeploymentPlan

_GIB = 2**30


def number(value: float) -> str:
    """At most four significant digits, thousands separated."""
    if value == int(value) and abs(value) >= 1000:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def gib(nbytes: float) -> str:
    """Bytes in GiB with the digits that matter."""
    value = nbytes / _GIB
    return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.4f}"


def _section(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    """A titled table whose named columns are set to the right."""
    widths = [max(len(str(row[i])) for row in [columns, *rows]) for i in range(len(columns))]
    numeric = set(right)
    lines = [title]
    for row in [columns, *rows]:
        cells = [c.rjust(w) if i in numeric else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines) + "\n"


# ----------------------------------------------------------------------- plan


def plan_text(plan: DeploymentPlan, digest: str) -> str:
    """The whole plan for people."""
    from deepinfer_engine.cost.figure import SOURCES

    parts = [_head(plan, digest), _memory(plan)]
    if plan.fits:
        parts.append(_fits(plan))
    if plan.predictions:
        parts.append(figures_text("speeds", plan.predictions))
    if plan.notes:
        parts.append("notes\n" + "".join(f"  {note}\n" for note in plan.notes))
    used = {i.source for i in plan.memory.items} | {f.source for f in plan.predictions}
    parts.append("sources\n" + "".join(f"  {name.ljust(9)}  {SOURCES[name]}\n" for name in SOURCES if name in used))
    return "\n".join(parts)


def _head(plan: DeploymentPlan, digest: str) -> str:
    p, m = plan.profile, plan.mesh
    hosts = f" on {m.hosts} host{'s' if m.hosts > 1 else ''}" if p.hardware.platform != "cpu" else " in one process"
    slots = m.ranks * m.slots_per_rank
    return (
        f"profile  {p.name}, {digest[:12]}\n"
        f"model    {plan.model.name}, {plan.model.config.digest[:12]}\n"
        f"mesh     {m.ranks} rank{'s' if m.ranks > 1 else ''} of {p.hardware.platform}{hosts}, "
        f"attention on {p.parallel.dp}\n"
        f"experts  {m.ranks} x {m.slots_per_rank} = {slots} slots for {m.experts} experts: legal, "
        f"{m.replicas} replicas\n"
    )


def _memory(plan: DeploymentPlan) -> str:
    device = [i for i in plan.memory.items if i.where == "device"]
    host = [i for i in plan.memory.items if i.where == "host"]
    rows = [[i.name, gib(i.nbytes), i.source, i.note] for i in device]
    rows.append(["total", gib(plan.memory.device_bytes), "", ""])
    if plan.have_bytes is not None:
        free = plan.have_bytes - plan.memory.device_bytes
        rows.append(["available", gib(plan.have_bytes), "", ""])
        rows.append(["free" if free >= 0 else "missing", gib(abs(free)), "", ""])
    what = "memory of the process" if plan.profile.hardware.platform == "cpu" else "device memory per rank"
    text = _section(what, ["item", "GiB", "source", ""], rows, right=[1])
    if host:
        rows = [[i.name, gib(i.nbytes), i.source, i.note] for i in host]
        text += "\n" + _section("host memory per host", ["item", "GiB", "source", ""], rows, right=[1])
    return text


def _fits(plan: DeploymentPlan) -> str:
    rows = [
        [f"{f.context:,}", f"{f.rows:,}", "most rows" if f.asked == "rows" else "longest context", "computed"]
        for f in plan.fits
    ]
    text = _section("what fits on a rank", ["context", "rows", "found", "source"], rows, right=[0, 1])
    return text + f"  block KV could hold {plan.kv_tokens or 0:,} tokens beside the profile's rows\n"


def figures_text(title: str, figures: Sequence[Figure]) -> str:
    """Figures as a section."""
    rows = [[f.name, number(f.value), f.unit, f.source, f.note] for f in figures]
    return _section(title, ["figure", "value", "unit", "source", ""], rows, right=[1])


def plan_document(plan: DeploymentPlan, digest: str) -> dict[str, Any]:
    """The plan as one JSON result; sizes in bytes."""
    m, d = plan.mesh, plan.deployment
    return render.document(
        "plan",
        {
            "profile": plan.profile.name,
            "profile_digest": digest,
            "model": plan.model.name,
            "config_digest": plan.model.config.digest,
            "mesh": {
                "ranks": m.ranks, "hosts": m.hosts, "experts": m.experts, "slots_per_rank": m.slots_per_rank,
                "replicas": m.replicas, "legal": True,
            },
            "rows": d.rows,
            "context": d.context,
            "memory": [
                {"item": i.name, "where": i.where, "bytes": i.nbytes, "source": i.source, "note": i.note}
                for i in plan.memory.items
            ],
            "device_bytes": plan.memory.device_bytes,
            "host_bytes": plan.memory.host_bytes,
            "available_bytes": plan.have_bytes,
            "fits": plan.have_bytes is None or plan.memory.device_bytes <= plan.have_bytes,
            "frontier": [
                {"found": f.asked, "rows": f.rows, "context": f.context, "source": "computed"} for f in plan.fits
            ],
            "max_kv_tokens": plan.kv_tokens,
            "figures": figure_objects(plan.predictions),
            "notes": list(plan.notes),
        },
    )  # fmt: skip


def figure_objects(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """Figures as JSON objects."""
    return [{"figure": f.name, "value": f.value, "unit": f.unit, "source": f.source, "note": f.note} for f in figures]


def comparison_text(before: DeploymentPlan, after: DeploymentPlan) -> str:
    """What re-forming an instance changes."""

    def figure(plan: DeploymentPlan, name: str) -> float | None:
        return next((f.value for f in plan.predictions if f.name == name), None)

    rows: list[list[str]] = []

    def add(name: str, a: float | None, b: float | None, unit: str, source: str) -> None:
        if a is not None and b is not None:
            change = f"{100 * (b / a - 1):+.1f} %" if a else "-"
            rows.append([name, number(a), number(b), change, unit, source])

    add("ranks", before.mesh.ranks, after.mesh.ranks, "", "computed")
    add("expert slots per rank", before.mesh.slots_per_rank, after.mesh.slots_per_rank, "", "computed")
    add("replicas", before.mesh.replicas, after.mesh.replicas, "", "computed")
    add("routed experts", before.memory.of("routed experts") / _GIB, after.memory.of("routed experts") / _GIB, "GiB",
        "computed")  # fmt: skip
    add("memory per rank", before.memory.device_bytes / _GIB, after.memory.device_bytes / _GIB, "GiB", "computed")
    for name, unit in (("TPOT", "ms"), ("decode throughput", "tok/s/GPU"), ("decode instance", "tok/s")):
        add(name, figure(before, name), figure(after, name), unit, "simulated")
    rate = "prefill throughput"
    a, b = figure(before, rate), figure(after, rate)
    if a is not None and b is not None:
        add("prefill instance", a * before.mesh.ranks, b * after.mesh.ranks, "tok/s", "simulated")
    columns = ["re-formed", "before", "after", "change", "unit", "source"]
    title = f"{after.mesh.ranks} of {before.mesh.ranks} ranks are healthy"
    text = _section(title, columns, rows, right=[1, 2, 3])
    notes = [
        f"{after.mesh.ranks} is the widest legal group: any width is, as long as its slots hold every expert",
        f"a placement for {before.mesh.ranks} ranks does not apply: make one for {after.mesh.ranks} from the last "
        "statistics",
    ]
    was, now = before.profile.hardware.gpus_per_node, after.profile.hardware.gpus_per_node
    if was != now:
        notes.append(
            f"{after.mesh.ranks} GPUs fill no hosts of {was} evenly: the profile, and host memory with it, counts "
            f"{now} per host"
        )
    return text + "".join(f"  {note}\n" for note in notes)


# -------------------------------------------------------------------- anchors

ANCHOR_COLUMNS = ("id", "quantity", "unit", "published", "model", "error", "bound", "kind", "result")


def anchor_rows(found: Sequence[Anchor]) -> list[tuple[render.Cell, ...]]:
    """One row per anchor for every form but the table."""
    return [(a.id, a.quantity, a.unit, a.published, a.model, a.error, a.bound, a.kind, _verdict(a)) for a in found]


def anchor_text(found: Sequence[Anchor]) -> str:
    """The anchors for people; errors are per cent of the published value, or points where the unit is %."""
    rows = []
    for a in found:
        points = "pt" if a.unit == "%" else "%"
        bound = "-" if a.bound is None else f"{a.bound:g} {points}"
        rows.append(
            [
                a.quantity,
                number(a.published),
                number(a.model),
                a.unit,
                f"{a.error:+.1f} {points}",
                bound,
                a.kind,
                _verdict(a),
            ]
        )
    columns = ["quantity", "published", "model", "unit", "error", "bound", "kind", "result"]
    text = _section("published rows, derived again", columns, rows, right=[1, 2, 4, 5])
    judged = [a for a in found if a.bound is not None]
    bad = sum(not a.holds for a in judged)
    return (
        f"{text}\n"
        "published figures are vendor figures; fitted: the model's parameters come from them; predicted: not used in\n"
        "the fit, simulated; arithmetic: computed from the config or from other published figures\n"
        f"{len(judged) - bad} of {len(judged)} within bounds, {len(found) - len(judged)} not judged\n"
    )


def _verdict(a: Anchor) -> str:
    if a.bound is None:
        return "shown"
    return "ok" if a.holds else "beyond"
