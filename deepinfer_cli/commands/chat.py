"""``deepinfer chat``: a conversation in the terminal."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_cli import options, render
from deepinfer_cli.announce import closing_notes, fallback_notes, launch_notes
from deepinfer_engine.errors import CapacityError, UsageError

if TYPE_CHECKING:
    from deepinfer_engine.engine import Engine
    from deepinfer_engine.tokens.protocol import ChatCodec
    from deepinfer_engine.types import Completion, SamplingParams

_HELP = """\
/reset        forget the conversation
/system TEXT  set the system message and start over
/thinking     switch reasoning on or off
/help         this list
/exit         leave (or Ctrl-D)
"""


def command(
    profile: options.Profile = "cpu-nano",
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Checkpoint; default: the embedded model.")
    ] = None,
    set_: options.Set = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.")] = None,
    thinking: Annotated[bool, typer.Option("--thinking/--no-thinking", help="Reason before the answer.")] = True,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option("--temperature", min=0, max=100, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Nucleus mass, 1 is off.")] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Random stream of the first answer.")] = None,
    quiet: options.Quiet = False,
) -> None:
    """Converse with the embedded engine in the terminal.

    One line is one message; /help lists the commands. Ctrl-C stops an answer, which then stays as it is. Answers go
    to stdout, everything else to stderr, so a conversation can come through a pipe.

    \b
    Examples:
      deepinfer chat
      deepinfer chat --no-thinking --system "Answer in one word."
      printf '17+25?\\nAnd 3 more?\\n' | deepinfer chat --quiet
    """
    from deepinfer_engine.config.profile import load_profile
    from deepinfer_engine.runtime.threads import set_thread_defaults
    from deepinfer_engine.types import SamplingParams

    sampling = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
    loaded = load_profile(profile, set_ or ())
    set_thread_defaults(1)
    from deepinfer_engine.engine import Engine
    from deepinfer_engine.launch import prepare
    from deepinfer_engine.tokens.protocol import ChatCodec

    launch = prepare(loaded.profile, model)
    launch_notes(launch, quiet=quiet)
    codec = ChatCodec(launch.checkpoint.directory, launch.checkpoint.config)
    with render.progress("loading", quiet=quiet) as advance:
        engine = Engine.open(launch.profile, launch.checkpoint.directory, device=launch.device, progress=advance)
    fallback_notes(engine, quiet=quiet)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # the message then names the line
    if sys.stdin.isatty():
        render.note("/help lists the commands, Ctrl-D leaves", quiet=quiet)
    with engine:
        _Conversation(engine, codec, sampling, system, thinking=thinking, quiet=quiet).run()
    closing_notes(engine, quiet=quiet)


class _Conversation:
    """The turns so far, and the loop over lines of stdin."""

    def __init__(
        self,
        engine: Engine,
        codec: ChatCodec,
        sampling: SamplingParams,
        system: str | None,
        *,
        thinking: bool,
        quiet: bool,
    ):
        self._engine = engine
        self._codec = codec
        self._sampling = sampling
        self._thinking = thinking
        self._quiet = quiet
        self._system = system
        self._turns: list[dict[str, Any]] = []
        self._answers = 0
        self._lines = 0

    def run(self) -> None:
        """Answer lines until the input ends or /exit."""
        while True:
            line = self._read()
            if line is None:
                return
            text = line.strip()
            if not text:
                continue
            if text.startswith("/"):
                if text in ("/exit", "/quit"):
                    return
                self._control(text)
                continue
            self._answer(text)

    def _read(self) -> str | None:
        if sys.stdin.isatty():
            sys.stderr.write(render.dim("> ", sys.stderr))
            sys.stderr.flush()
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            return None
        try:
            line.encode()
        except UnicodeEncodeError as exc:
            raise UsageError(f"stdin: line {self._lines + 1} is not UTF-8 at character {exc.start + 1}") from None
        self._lines += 1
        return line or None

    def _control(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name == "/reset":
            self._turns.clear()
            render.note("conversation forgotten", quiet=self._quiet)
        elif name == "/system" and rest.strip():
            self._system = rest.strip()
            self._turns.clear()
            render.note("system message set, conversation forgotten", quiet=self._quiet)
        elif name == "/thinking":
            self._thinking = not self._thinking
            render.note(f"thinking is {'on' if self._thinking else 'off'}", quiet=self._quiet)
        elif name == "/help":
            sys.stderr.write(_HELP)
        else:
            render.note(f"no command {name!r}; /help lists them")

    def _answer(self, text: str) -> None:
        turns = [*self._turns, {"role": "user", "content": text}]
        head = [{"role": "system", "content": self._system}] if self._system is not None else []
        from deepinfer_engine.types import Request

        prompt = self._codec.render([*head, *turns], thinking=self._thinking)
        sampling = self._sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + self._answers) % 2**64)
        try:
            self._engine.submit(Request("chat", prompt.token_ids, sampling))
        except (CapacityError, UsageError) as exc:
            render.error(exc.message, "/reset starts a new conversation")
            return
        self._answers += 1
        content, done = self._stream(prompt)
        self._turns = [*turns, {"role": "assistant", "content": content}]
        speed = done.timing.tpot_s(done.usage.generated)
        rate = f", {1 / speed:.0f} tok/s" if speed else ""
        ended = {"length": ", cut at --max-tokens", "abort": ", stopped", "error": f", failed: {done.error}"}
        render.note(
            f"[{done.usage.prompt} prompt + {done.usage.generated} tokens{rate}{ended.get(done.finish_reason, '')}]",
            quiet=self._quiet,
        )

    def _stream(self, prompt: Any) -> tuple[str, Completion]:
        """Show one answer as it comes; its content and completion. Ctrl-C ends it."""
        from deepinfer_engine.types import Completion, TokenEvent

        parser = prompt.parser()
        shown = _Shown(quiet=self._quiet)
        done: Completion | None = None
        with _interrupts() as hits:
            while done is None:
                for event in self._engine.step():
                    if isinstance(event, TokenEvent):
                        shown.write(parser.push([event.token_id]))
                    elif isinstance(event, Completion):
                        done = event
                if hits and done is None:
                    done = self._engine.abort("chat")[0]
        shown.write(parser.finish(done.finish_reason))
        shown.end()
        return shown.content, done


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Ctrl-C only notes that it was pressed while an answer runs, so that no step is torn."""
    hits: list[int] = []
    before = signal.signal(signal.SIGINT, lambda *_: hits.append(1))
    try:
        yield hits
    finally:
        signal.signal(signal.SIGINT, before)


class _Shown:
    """Writes the pieces of one answer: content to stdout, thinking dimmed to stderr when someone watches."""

    def __init__(self, *, quiet: bool):
        self._thoughts = sys.stderr.isatty() and not quiet
        self._open = False
        self.content = ""

    def write(self, pieces: list[Any]) -> None:
        for piece in pieces:
            if piece.kind == "reasoning":
                if self._thoughts:
                    sys.stderr.write(render.dim(piece.text, sys.stderr))
                    sys.stderr.flush()
                    self._open = True
                continue
            if self._open:
                sys.stderr.write("\n")
                self._open = False
            self.content += piece.text
            sys.stdout.write(piece.text)
            sys.stdout.flush()

    def end(self) -> None:
        if self._open:
            sys.stderr.write("\n")
        sys.stdout.write("\n")
        sys.stdout.flush()
