"""``deepinfer run``: answer prompts, one after the other or all in one batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_cli import batch_run, options, ranks, render
from deepinfer_cli.announce import (
    balance_text,
    closing_notes,
    experts_recorded,
    experts_row,
    fallback_rows,
    launch_notes,
    load_notes,
)
from deepinfer_cli.options import OutputFormat
from deepinfer_cli.rank_report import rank_report
from deepinfer_engine.errors import ArtefactError, PartialFailure, UsageError

if TYPE_CHECKING:
    from deepinfer_engine.engine import DraftCounts, Engine
    from deepinfer_engine.eplb.record import Balance
    from deepinfer_engine.launch import Launch
    from deepinfer_engine.tokens.detokenizer import IncrementalDetokenizer
    from deepinfer_engine.tokens.protocol import AnswerParser, ChatPrompt, Piece
    from deepinfer_engine.types import Completion, GrammarSpec, SamplingParams

#: most bytes read from a prompt file or stdin
_MAX_PROMPT_BYTES = 64 * 1024 * 1024


def command(
    prompt: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Prompts; - reads one from stdin.")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", "-f", metavar="FILE", help="One prompt per line, or requests if it ends in .jsonl."),
    ] = None,
    profile: options.Profile = "cpu-nano",
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Checkpoint; default: the embedded model.")
    ] = None,
    set_: options.Set = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option("--temperature", min=0, max=100, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Nucleus mass, 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Most likely tokens kept, 0 is off.")] = 0,
    min_p: Annotated[float, typer.Option("--min-p", help="Least share of the best token, 0 is off.")] = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Random stream of the first prompt.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="Ends the answer, not looked for in thinking.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option("--json-schema", metavar="FILE", help="Answers follow this JSON Schema.")
    ] = None,
    regex: Annotated[str | None, typer.Option("--regex", metavar="REGEX", help="Answers match this pattern.")] = None,
    ebnf: Annotated[
        Path | None, typer.Option("--ebnf", metavar="FILE", help="Answers are derived from this grammar.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a conversation.")] = False,
    thinking: Annotated[bool, typer.Option("--thinking/--no-thinking", help="Reason before the answer.")] = True,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.")] = None,
    overlap: Annotated[
        bool | None,
        typer.Option("--overlap/--no-overlap", help="Plan beside the forward pass; default: the profile's."),
    ] = None,
    unordered: Annotated[
        bool, typer.Option("--unordered", help="Requests: write lines as they finish, not in input order.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Requests: continue a run that was cut off.")] = False,
    nproc: ranks.Nproc = None,
    healthy: ranks.Healthy = None,
    record_experts: options.RecordExperts = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show at the end what every rank did: rows, tokens, expert load.")
    ] = False,
    format: options.Format = OutputFormat.text,
    out: options.Out = None,
    quiet: options.Quiet = False,
) -> None:
    """Answer prompts with the embedded engine.

    Answers go to stdout; thinking, token counts and timing go to stderr. Greedy unless --temperature is given.
    With --seed S the i-th prompt (or line) uses the stream S + i.

    A --file that ends in .jsonl holds requests: chat-completions batch lines ({"custom_id", "body"}) or plain ones
    ({"id", "prompt" | "messages" | "token_ids", and any sampling setting}). Every line is checked before the model
    is loaded; --out gets one line for each. Until the end they are in OUT.part, from which --resume continues.

    With --nproc N the profile's ranks are spread over N processes, each with its own experts; under torchrun they are
    those that it starts. A rank that dies ends the run with exit code 7; --resume with --healthy goes on without it.

    \b
    Examples:
      deepinfer run "17+25?"
      deepinfer run -f prompts.txt --format jsonl --out answers.jsonl
      deepinfer run -f requests.jsonl --out answers.jsonl --resume
      echo "What is 12+30?" | deepinfer run -
      deepinfer run --profile decode-ep64 --explain "What is 12+30?"
      deepinfer run --profile decode-ep8 -f prompts.txt --record-experts stats.npz
      deepinfer run --profile decode-ep8 --nproc 2 -f requests.jsonl --out answers.jsonl
      deepinfer run --profile decode-ep8 --healthy 6 -f requests.jsonl --out answers.jsonl --resume
      deepinfer run --json-schema person.json --no-thinking "Name and age of Ada?"
      deepinfer run --temperature 0.8 --seed 7 --set sched.max_rows_per_rank=4 "Tell me a number."
    """
    options.accept(format, OutputFormat.text, OutputFormat.json, OutputFormat.jsonl, verb="run")
    crew = ranks.started(nproc)
    ranks.follow(crew)
    if raw and system is not None:
        raise UsageError("--raw has no conversation, so --system does not apply")
    requests = file is not None and file.endswith(batch_run.SUFFIXES)
    if not requests and (unordered or resume):
        raise UsageError("--unordered and --resume belong to a file of requests (.jsonl)")
    if record_experts is not None and out is not None and record_experts.resolve() == out.resolve():
        raise UsageError("--record-experts and --out name the same file")
    grammars = _grammar(json_schema, regex, ebnf)
    from deepinfer_engine.config.profile import load_profile
    from deepinfer_engine.runtime.threads import set_thread_defaults
    from deepinfer_engine.types import SamplingParams

    defaults = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_tokens=max_tokens,
        seed=seed,
        stop=tuple(stop or ()),
    )
    sets = list(set_ or ())
    if overlap is not None:
        sets.append(f"sched.overlap={str(overlap).lower()}")
    loaded = load_profile(profile, sets)
    if requests:
        assert file is not None
        if prompt:
            raise UsageError("prompts come from the command line or from --file, not both")
        if out is None:
            raise UsageError("a file of requests needs --out", hint=f"deepinfer run -f {file} --out answers.jsonl")
        batch_run.unsupported(
            system=system, json_schema=json_schema, regex=regex, ebnf=ebnf, format=format is OutputFormat.json
        )
        batch = batch_run.BatchOptions(
            Path(file),
            out,
            defaults,
            thinking=thinking,
            raw=raw,
            ordered=not unordered,
            resume=resume,
            crew=crew,
            record_experts=record_experts,
            explain=explain,
            quiet=quiet,
        )
        items = batch_run.read(batch)
        set_thread_defaults(len(items))
        launch = crew.prepare(loaded.profile, model, healthy)
        launch_notes(launch, quiet=quiet)
        batch_run.answer(batch, items, launch, loaded.digest)
        return
    prompts = _prompts(prompt or [], file)
    sampling = [replace(defaults, seed=None if seed is None else (seed + i) % 2**64) for i in range(len(prompts))]
    set_thread_defaults(len(prompts))
    from deepinfer_engine.engine import Engine

    launch = crew.prepare(loaded.profile, model, healthy)
    launch_notes(launch, quiet=quiet)
    jobs = _render_all(prompts, launch, raw=raw, thinking=thinking, system=system)
    _check_lengths(jobs, max_tokens, launch)
    with render.progress("loading", quiet=quiet) as advance:
        engine = Engine.open(
            launch.profile,
            launch.checkpoint.directory,
            device=launch.device,
            progress=advance,
            record_experts=record_experts is not None,
            placement=launch.placement,
            world=crew.world(launch.profile),
            grammars=grammars,
        )
    load_notes(engine, quiet=quiet)
    grammar = next(iter(grammars.values()), None)
    live = format is OutputFormat.text and len(jobs) == 1 and out is None
    with engine:
        with experts_recorded(engine, record_experts, quiet=quiet):
            results = _answer(engine, jobs, sampling, grammar, live=live, quiet=quiet)
        balance = engine.balance(now=True)
    closing_notes(engine, quiet=quiet)
    if not live:
        experts = experts_row(engine, balance, explain=explain)
        render.deliver(_text(format, results, launch, loaded.digest, experts, engine), out)
    if explain:
        render.panel("ranks", rank_report(engine, balance), quiet=quiet)
    _summarise(results, balance, engine.drafts, quiet=quiet)


def _grammar(json_schema: Path | None, regex: str | None, ebnf: Path | None) -> dict[str, GrammarSpec]:
    """What the answers are restricted to, from at most one of the three options, by its name in complaints."""
    if json_schema is None and regex is None and ebnf is None:
        return {}
    from deepinfer_engine.config.strict_json import read_json
    from deepinfer_engine.sample.grammar import checked_grammar, require_library
    from deepinfer_engine.types import GrammarSpec

    given = [name for name, v in (("json-schema", json_schema), ("regex", regex), ("ebnf", ebnf)) if v is not None]
    if len(given) > 1:
        raise UsageError(f"--{' and --'.join(given)} exclude each other")
    require_library()
    label = "--regex" if regex is not None else f"--{given[0]} {json_schema or ebnf}"
    try:
        if json_schema is not None:
            spec = GrammarSpec("json_schema", json.dumps(read_json(json_schema), ensure_ascii=False))
        else:
            spec = GrammarSpec("regex", regex) if regex is not None else GrammarSpec("ebnf", _read(str(ebnf)))
        return {label: checked_grammar(spec)}
    except (ArtefactError, UsageError) as exc:
        path = f"{json_schema or ebnf}: "  # what cannot be read is named already
        raise UsageError(f"{label}: {exc.message.removeprefix(path)}", hint=exc.hint) from None


@dataclass
class _Job:
    """One prompt on its way: its ids, and what turns generated ids into text."""

    prompt: str
    token_ids: tuple[int, ...]
    parser: AnswerParser | None
    detokenizer: IncrementalDetokenizer | None
    reasoning: str = ""
    content: str = ""
    completion: Completion | None = None

    def push(self, token: int) -> list[Piece]:
        return self._keep(self._pieces([token]))

    def finish(self, completion: Completion) -> list[Piece]:
        self.completion = completion
        if self.parser is not None:
            pieces = self.parser.finish(completion.finish_reason)
        else:
            assert self.detokenizer is not None
            pieces = _raw_piece(self.detokenizer.finish())
        return self._keep([*pieces, *_raw_piece(completion.tail)])

    def _pieces(self, tokens: list[int]) -> list[Piece]:
        if self.parser is not None:
            return self.parser.push(tokens)
        assert self.detokenizer is not None
        return _raw_piece("".join(self.detokenizer.push(t) for t in tokens))

    def _keep(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            if piece.kind == "reasoning":
                self.reasoning += piece.text
            else:
                self.content += piece.text
        return pieces


def _raw_piece(text: str) -> list[Piece]:
    from deepinfer_engine.tokens.protocol import Piece

    return [Piece("content", text)] if text else []


def _prompts(given: list[str], file: str | None) -> list[str]:
    if file is not None and given:
        raise UsageError("prompts come from the command line or from --file, not both")
    if file is not None:
        lines = [line for line in _read(file).splitlines() if line.strip()]
        if not lines:
            raise UsageError(f"{'stdin' if file == '-' else file}: no prompts in it")
        return lines
    if not given:
        raise UsageError("no prompt given", hint='deepinfer run "17+25?"')
    prompts = [_read("-").strip("\r\n") if p == "-" else p for p in given]
    for text in prompts:
        if not text.strip():
            raise UsageError("a prompt is empty")
    return prompts


def _read(source: str) -> str:
    where = "stdin" if source == "-" else source
    try:
        if source == "-":
            data = sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1)
        else:
            with open(source, "rb") as stream:
                data = stream.read(_MAX_PROMPT_BYTES + 1)
    except OSError as exc:
        raise UsageError(f"{where}: {exc.strerror}") from None
    if len(data) > _MAX_PROMPT_BYTES:
        raise UsageError(f"{where}: more than {_MAX_PROMPT_BYTES} bytes of prompts")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise UsageError(f"{where}: not UTF-8 at byte {exc.start}") from None


def _render_all(prompts: list[str], launch: Launch, *, raw: bool, thinking: bool, system: str | None) -> list[_Job]:
    from deepinfer_engine.tokens.detokenizer import IncrementalDetokenizer
    from deepinfer_engine.tokens.protocol import ChatCodec
    from deepinfer_engine.tokens.tokenizer import Tokenizer

    directory, config = launch.checkpoint.directory, launch.checkpoint.config
    if raw:
        tokenizer = Tokenizer.from_dir(directory)
        bos = config.bos_token_id
        return [_Job(p, (bos, *tokenizer.encode_text(p)), None, IncrementalDetokenizer(tokenizer)) for p in prompts]
    codec = ChatCodec(directory, config)
    head = [{"role": "system", "content": system}] if system is not None else []
    rendered: list[ChatPrompt] = [
        codec.render([*head, {"role": "user", "content": p}], thinking=thinking) for p in prompts
    ]
    return [_Job(p, r.token_ids, r.parser(), None) for p, r in zip(prompts, rendered, strict=True)]


def _check_lengths(jobs: list[_Job], max_tokens: int, launch: Launch) -> None:
    """Refuse a prompt that leaves no room for its answer, before weights are read."""
    from deepinfer_engine.engine import limits_of

    limits = limits_of(launch.profile, launch.checkpoint.config)
    for change in launch.replaced:
        if change.key == "sched.max_context_tokens":
            limits = replace(limits, profile=f"{limits.profile}, which asks for {change.requested}: {change.reason}")
    for i, job in enumerate(jobs):
        limits.check("this request" if len(jobs) == 1 else f"prompt {i}", len(job.token_ids), max_tokens)


def _answer(
    engine: Engine,
    jobs: list[_Job],
    sampling: list[SamplingParams],
    grammar: GrammarSpec | None,
    *,
    live: bool,
    quiet: bool,
) -> list[_Job]:
    from deepinfer_engine.types import Request, TokenEvent

    for i, (job, params) in enumerate(zip(jobs, sampling, strict=True)):
        engine.submit(Request(str(i), job.token_ids, params, grammar=grammar))
    show = _Live() if live else None
    with render.progress("answers", quiet=quiet or live) as advance:
        for done, event in _counted(engine):
            job = jobs[int(event.request_id)]
            pieces = job.push(event.token_id) if isinstance(event, TokenEvent) else job.finish(event)
            if show is not None:
                show.write(pieces, quiet=quiet)
            advance(done, len(jobs), balance_text(engine.balance()))
    if show is not None:
        show.end()
    return jobs


def _counted(engine: Engine) -> Iterator[tuple[int, Any]]:
    """Events of the engine with the number of finished requests so far."""
    from deepinfer_engine.types import Completion

    done = 0
    for event in engine.stream():
        done += isinstance(event, Completion)
        yield done, event


class _Live:
    """Writes one answer as it comes: content to stdout, thinking dimmed to stderr when someone watches."""

    def __init__(self) -> None:
        self._open = ""

    def write(self, pieces: list[Piece], *, quiet: bool) -> None:
        for piece in pieces:
            if piece.kind == "reasoning":
                if sys.stderr.isatty() and not quiet:
                    sys.stderr.write(render.dim(piece.text, sys.stderr))
                    sys.stderr.flush()
                    self._open = "reasoning"
                continue
            if self._open == "reasoning":
                sys.stderr.write("\n")
            self._open = "content"
            sys.stdout.write(piece.text)
            sys.stdout.flush()

    def end(self) -> None:
        if self._open == "reasoning":
            sys.stderr.write("\n")
        sys.stdout.write("\n")
        sys.stdout.flush()


def _text(
    form: OutputFormat,
    jobs: list[_Job],
    launch: Launch,
    digest: str,
    experts: dict[str, Any] | None,
    engine: Engine,
) -> str:
    if form is OutputFormat.text:
        if len(jobs) == 1:
            return jobs[0].content + "\n"
        return "\n".join(f"> {job.prompt}\n{job.content}\n" for job in jobs)
    rows = [_row(i, job) for i, job in enumerate(jobs)]
    if form is OutputFormat.jsonl:
        return "".join(render.json_text(row, indent=None) for row in rows)
    content = {
        "profile": launch.requested.name,
        "profile_digest": digest,
        "weights_digest": launch.checkpoint.digest,
        "emulated": [asdict(r) for r in launch.replaced],
        "inactive": [asdict(i) for i in launch.inactive],
        "fallbacks": fallback_rows(engine),
        "kernels_compiled_while_serving": len(engine.compiled),
        "experts": experts,
        "results": rows,
    }
    return render.json_text(render.document("run", content))


def _row(i: int, job: _Job) -> dict[str, Any]:
    done = job.completion
    assert done is not None
    return {
        "id": i,
        "prompt": job.prompt,
        "reasoning": job.reasoning,
        "content": job.content,
        "finish_reason": done.finish_reason,
        "stop_reason": done.stop_reason,
        "error": done.error,
        "reproducible": done.reproducible,
        "usage": asdict(done.usage),
        "timing": {
            "ttft_s": done.timing.ttft_s,
            "e2e_s": done.timing.e2e_s,
            "tpot_s": done.timing.tpot_s(done.usage.generated),
        },
    }


def _summarise(jobs: list[_Job], balance: Balance | None, drafts: DraftCounts, *, quiet: bool) -> None:
    done = [job.completion for job in jobs if job.completion is not None]
    prompt = sum(c.usage.prompt for c in done)
    generated = sum(c.usage.generated for c in done)
    seconds = max(c.timing.e2e_s for c in done)
    first = [c.timing.ttft_s for c in done if c.timing.ttft_s is not None]
    ttft = f", first token {min(first) * 1000:.0f} ms" if first else ""
    render.note(
        f"{len(done)} answered: {prompt} prompt + {generated} generated tokens in {seconds:.2f} s "
        f"({generated / seconds:.0f} tok/s{ttft})",
        quiet=quiet,
    )
    if drafts.rows:
        render.note(
            f"{drafts.tokens_per_row:.2f} tokens per step and sequence: {drafts.accepted} of {drafts.drafted} drafts "
            "accepted",
            quiet=quiet,
        )
    if spread := balance_text(balance):
        assert balance is not None
        render.note(f"{spread} over {balance.load_LR.shape[1]} ranks in {balance.steps} steps", quiet=quiet)
    cut = sum(c.finish_reason == "length" for c in done)
    if cut:
        render.note(f"{cut} stopped at --max-tokens", quiet=quiet)
    failed = [(i, job.completion) for i, job in enumerate(jobs) if job.completion and job.completion.error]
    if failed:
        shown = [f"  prompt {i}: {c.error_detail or str(c.error).replace('_', ' ')}" for i, c in failed[:8]]
        hint = None
        if any(c.error == "non_finite_logits" for _, c in failed):
            hint = "compare with --set numerics.mode=reference"
        raise PartialFailure("\n".join([f"{len(failed)} of {len(jobs)} requests failed", *shown]), hint=hint)
