"""One module per verb, imported only when its verb is used.

A module exposes ``command`` (a function Typer turns into a command) or ``app`` (a ``typer.Typer`` with subcommands).
Adding a verb is one line in ``VERBS``. Modules keep heavy imports inside their functions, so that ``--help`` of a
verb is quick too.
"""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
    """A verb, the module that implements it, and its line in ``deepinfer --help``."""

    name: str
    module: str
    help: str


#: In the order of ``deepinfer --help``.
VERBS: tuple[Verb, ...] = (
    Verb("run", "deepinfer_cli.commands.run", "Answer prompts with the embedded engine."),
    Verb("chat", "deepinfer_cli.commands.chat", "Converse with the embedded engine in the terminal."),
    Verb("bench", "deepinfer_cli.commands.bench", "Measure speed: our engine, single forwards, or any endpoint."),
    Verb("eval", "deepinfer_cli.commands.eval", "Measure accuracy on our engine or on any endpoint."),
    Verb("sweep", "deepinfer_cli.commands.sweep", "Measure a grid of settings: rows, pictures, comparisons."),
    Verb("inspect", "deepinfer_cli.commands.inspect", "Layer plan, sizes and digests of a checkpoint or config."),
    Verb("eplb-plan", "deepinfer_cli.commands.eplb_plan", "Plan where experts live from recorded loads."),
    Verb("fetch-weights", "deepinfer_cli.commands.fetch_weights", "Fetch a checkpoint, resumable and hash-checked."),
    Verb("kv", "deepinfer_cli.commands.kv", "Explain replay plans; inspect, check and clean the KV store."),
    Verb("yoco-verify", "deepinfer_cli.commands.yoco_verify", "Prove prefix hits and bounded replay."),
    Verb("profile", "deepinfer_cli.commands.profile", "List, show, validate and compare deployment profiles."),
    Verb("plan", "deepinfer_cli.commands.plan", "Say what fits, how fast it may be, and where each number is from."),
    Verb("build-kernels", "deepinfer_cli.commands.build_kernels", "Compile kernels ahead of time."),
    Verb("doctor", "deepinfer_cli.commands.doctor", "What this machine has, lacks, and how to fix it."),
    Verb("logits", "deepinfer_cli.commands.logits", "Teacher-forced logits of token lists, for acceptance tests."),
)
