"""``deepinfer run -f FILE.jsonl``: a file of requests answered into a file of lines, resumable."""

from __future__ import annotations

import hashlib
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_cli import render
from deepinfer_cli.announce import balance_text, closing_notes, experts_recorded, fallback_notes
from deepinfer_cli.rank_report import rank_report
from deepinfer_cli.ranks import Crew
from deepinfer_engine.errors import Interrupted, PartialFailure, PeerLost, UsageError

if TYPE_CHECKING:
    from deepinfer_engine.launch import Launch
    from deepinfer_engine.offline.job import Tally
    from deepinfer_engine.offline.lines import Item
    from deepinfer_engine.offline.prepare import Preparer
    from deepinfer_engine.types import SamplingParams

#: a file with one of these endings holds requests, any other holds one prompt per line
SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class BatchOptions:
    """What the command line says about a batch."""

    file: Path
    out: Path
    defaults: SamplingParams
    thinking: bool
    raw: bool
    ordered: bool
    resume: bool
    crew: Crew
    record_experts: Path | None
    explain: bool
    quiet: bool


def read(options: BatchOptions) -> list[Item]:
    """The checked requests; before torch or a model is loaded."""
    from deepinfer_engine.offline.lines import read_items

    if options.out.resolve() == options.file.resolve():
        raise UsageError("--out names the input file")
    return read_items(options.file, options.defaults, thinking=options.thinking, raw=options.raw)


def answer(options: BatchOptions, items: list[Item], launch: Launch, profile_digest: str) -> None:
    """Render every request, open the journal, load the model, run. Raises ``PartialFailure`` if a line failed."""
    from deepinfer_engine.engine import Engine
    from deepinfer_engine.offline.job import BatchRun
    from deepinfer_engine.offline.journal import Journal
    from deepinfer_engine.offline.prepare import Preparer
    from deepinfer_engine.sample.grammar import require_library
    from deepinfer_engine.tokens.protocol import ChatCodec

    checkpoint = launch.checkpoint
    preparer = Preparer(ChatCodec(checkpoint.directory, checkpoint.config), checkpoint.config.bos_token_id)
    if _check_all(options.file, items, preparer):
        require_library()
    header = {
        "input_sha256": hashlib.sha256(options.file.read_bytes()).hexdigest(),
        "profile_digest": profile_digest,
        "weights_digest": checkpoint.digest,
        "defaults": asdict(options.defaults),
        "thinking": options.thinking,
        "raw": options.raw,
    }
    meter = _Meter(quiet=options.quiet)
    with Journal(options.out, header, resume=options.resume, restarts=options.crew.restarts) as journal:
        before = len(journal.done)
        if before:
            render.note(f"resuming: {before} of {len(items)} lines are done", quiet=options.quiet)
        try:
            with render.progress("loading", quiet=options.quiet) as advance:
                engine = Engine.open(
                    launch.profile,
                    checkpoint.directory,
                    device=launch.device,
                    progress=advance,
                    record_experts=options.record_experts is not None,
                    placement=launch.placement,
                    world=options.crew.world(launch.profile),
                )
            fallback_notes(engine, quiet=options.quiet)
            with engine:
                run = BatchRun(engine, preparer, journal, model=checkpoint.config.digest[:12], created=int(time.time()))
                with experts_recorded(engine, options.record_experts, quiet=options.quiet):
                    tally = run.run(items, meter.show)
                balance = engine.balance(now=True)
            closing_notes(engine, quiet=options.quiet)
            if options.explain:
                meter.end()
                render.panel("ranks", rank_report(engine, balance), quiet=options.quiet)
        except KeyboardInterrupt:
            meter.end()
            raise Interrupted(
                f"interrupted: {len(journal.done)} of {len(items)} lines are kept in {journal.path}",
                hint="the same command with --resume continues",
            ) from None
        except PeerLost as exc:
            meter.end()
            kept = f"{len(journal.done)} of {len(items)} lines are kept in {journal.path}"
            raise PeerLost(
                f"{exc.message}; {kept}",
                hint="the same command with --resume --healthy N goes on over N ranks; --nproc must divide N",
            ) from None
        meter.end()
        journal.finish(ordered=options.ordered)
    speed = tally.tokens / tally.seconds if tally.seconds > 0 else 0.0
    render.note(
        f"{tally.done} of {tally.total} lines answered into {options.out}: {tally.tokens} tokens in "
        f"{tally.seconds:.1f} s ({speed:.0f} tok/s)" + (f", {spread}" if (spread := balance_text(balance)) else ""),
        quiet=options.quiet,
    )
    if tally.failed:
        more = [f"  … and {tally.failed - len(tally.failures)} more"] if tally.failed > len(tally.failures) else []
        told = [f"{tally.failed} of {tally.done} lines of {options.file} failed; their error is in {options.out}"]
        raise PartialFailure(
            "\n".join([*told, *(f"  {line}" for line in tally.failures), *more]),
            hint=f"grep '\"error\": {{' {options.out}",
        )


def _check_all(file: Path, items: list[Item], preparer: Preparer) -> bool:
    """Render every conversation once, so that a bad one is reported before the weights are read; whether any line
    restricts its answer."""
    from deepinfer_engine.offline.lines import bad_lines

    problems, restricted = [], False
    for item in items:
        try:
            restricted |= preparer.prepare(item).grammar is not None
        except UsageError as exc:
            problems.append(f"line {item.line}: {exc}")
    if problems:
        raise bad_lines(file, problems)
    return restricted


class _Meter:
    """One line of progress on stderr: rewritten on a terminal, every ten seconds elsewhere."""

    def __init__(self, *, quiet: bool):
        self._quiet = quiet
        self._live = sys.stderr.isatty()
        self._next = 0.0 if self._live else 10.0
        self._shown = False

    def show(self, tally: Tally) -> None:
        if self._quiet or tally.seconds < self._next:
            return
        self._next = tally.seconds + (0.25 if self._live else 10.0)
        text = progress_text(tally)
        if self._live:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
            self._shown = True
        else:
            render.note(text)

    def end(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            self._shown = False


def progress_text(tally: Tally) -> str:
    """Lines done, speed, and the time left if the rest goes like what is done."""
    text = f"{tally.done}/{tally.total} lines"
    if tally.seconds > 0:
        text += f", {tally.tokens / tally.seconds:.0f} tok/s"
    if tally.balance is not None and (spread := balance_text(tally.balance())):
        text += f", {spread}"
    if 0 < tally.done < tally.total:
        text += f", about {_span(tally.seconds * (tally.total - tally.done) / tally.done)} left"
    return text


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def unsupported(**given: Any) -> None:
    """Refuse options that a batch takes from its lines."""
    named = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if named:
        raise UsageError(f"{', '.join(named)} does not apply to a file of requests; write it into the lines")
