"""Root of the ``deepinfer`` command, and the only place where exceptions become exit codes.

========  =======================================================================
0         done and correct
1         a bug: the traceback is kept in a file whose path is printed
2         usage, profile or recipe invalid
3         environment not ready (missing extra, does not fit, no network)
4         artefact invalid (checkpoint, stats, plan)
5         ran, but some items failed
6         ran, and the check said no
7         a peer or rank was lost
130       interrupted, or the reader of stdout went away
========  =======================================================================
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from deepinfer_cli import render
from deepinfer_cli.commands import VERBS
from deepinfer_cli.options import Session
from deepinfer_engine.errors import DeepInferError

#: Base of every complaint about a command line; Typer exports only its subclass BadParameter.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]

#: what the system says when there is no room to write
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}

_EPILOG = "Exit codes: 0 done, 1 bug, 2 usage, 3 not ready, 4 bad artefact, 5 partial, 6 check failed, 7 peer lost."


class LazyGroup(TyperGroup):
    """The root group: verbs come from the static table, a verb's module is imported when it is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [verb.name for verb in VERBS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        verb = next((v for v in VERBS if v.name == cmd_name), None)
        if verb is None:
            return None
        if cmd_name not in self.commands:
            self.commands[cmd_name] = _load(verb.name, verb.module, verb.help)
        return self.commands[cmd_name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if not name.startswith("-") and name not in self.list_commands(ctx):
            near = get_close_matches(name, self.list_commands(ctx), n=1)
            ctx.fail(f"there is no verb {name!r}" + (f"; nearest is {near[0]!r}" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs from the table, without importing any of them."""
        with formatter.section("Verbs"):
            formatter.write_dl([(verb.name, verb.help) for verb in VERBS])


def _load(name: str, module_name: str, help_line: str) -> Any:
    module = importlib.import_module(module_name)
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=_CONTEXT)
        app.command(name, help=module.command.__doc__ or help_line)(module.command)
    command = get_command(app)
    command.name = name
    return command


_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

app = typer.Typer(
    name="deepinfer",
    cls=LazyGroup,
    add_completion=True,
    rich_markup_mode=None,  # plain help: readable without colour, quick, and stable enough to compare
    pretty_exceptions_enable=False,
    context_settings=_CONTEXT,
    subcommand_metavar="VERB [ARGS]...",
    epilog=_EPILOG,
)


def _print_version(value: bool) -> None:
    if value:
        from deepinfer_engine import __version__

        render.out(f"deepinfer {__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No notes or progress on stderr; errors stay.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Operate DeepSeek-V4.1-Flash-class models: inspect, plan, run, verify and measure, with an engine inside.

    Results go to stdout, everything else to stderr.
    """
    ctx.obj = Session(quiet=quiet)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's) and return its exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed it: nobody reads what is written there
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    command = get_command(app)
    if "_DEEPINFER_COMPLETE" in os.environ:  # the shell asks for completions
        command.main(args, prog_name="deepinfer")
    try:
        with command.make_context("deepinfer", args) as ctx:
            command.invoke(ctx)
        sys.stdout.flush()
        return 0
    except typer.Exit as exc:
        return exc.exit_code
    except (KeyboardInterrupt, typer.Abort):
        render.error("interrupted")
        return 130
    except BrokenPipeError:
        _drop_stdout()  # whoever read it has seen enough
        return 130
    except DeepInferError as exc:
        render.error(exc.message, exc.hint)
        return exc.exit_code
    except _CommandLineError as exc:
        render.error(*_usage_error(exc))
        return 2
    except Exception as exc:  # the process boundary: whatever arrives here is a bug and is kept for its report
        if isinstance(exc, OSError) and exc.errno in _FULL:
            _drop_stdout()
            where = f" {exc.filename}" if exc.filename else ""
            render.error(f"cannot write{where}: {exc.strerror}", "make room there; a batch goes on with --resume")
            return 3
        if _is_out_of_memory(exc):
            render.error(f"out of memory: {exc}", "lower sched.max_rows_per_rank or cache.hbm_tokens_per_rank")
            return 3
        render.error(f"this is a bug in deepinfer: {type(exc).__name__}: {exc}", f"report it with {_keep_traceback()}")
        return 1


def _drop_stdout() -> None:
    """Nothing may be written to stdout any more, at interpreter exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _is_out_of_memory(exc: Exception) -> bool:
    """Whether the host or a device ran out of memory; torch's host allocator says so in words only."""
    named = isinstance(exc, MemoryError) or type(exc).__name__ == "OutOfMemoryError"
    return named or "can't allocate memory" in str(exc)


def _usage_error(exc: Any) -> tuple[str, str]:
    """Message and hint of a complaint about the command line, in the form of all other errors."""
    text = exc.format_message().replace("Value error, ", "").rstrip(".")
    ctx = getattr(exc, "ctx", None)
    return text[:1].lower() + text[1:], f"{ctx.command_path if ctx is not None else 'deepinfer'} --help"


def _keep_traceback() -> str:
    """Write the current traceback and the command line to a file in the temporary folder; its path."""
    from deepinfer_engine import __version__

    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", prefix="deepinfer-bug-", suffix=".txt", delete=False
    ) as file:
        file.write(f"deepinfer {__version__}\n{sys.argv}\n\n{traceback.format_exc()}")
    return file.name
