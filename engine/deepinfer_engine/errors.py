"""The exception tree. Each class carries the exit code the command line ends with.

The engine raises; only ``deepinfer_cli.main`` prints and exits. A message says what is wrong and where,
``hint`` gives one next step.
"""

from __future__ import annotations

from collections.abc import Sequence


class DeepInferError(Exception):
    """Base of every error that a user can cause or meet; anything else that escapes is a bug (exit 1)."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(DeepInferError):
    """A command line, request parameter or recipe that cannot be honoured."""

    exit_code = 2


class ProfileError(UsageError):
    """A deployment profile (or a ``--set`` override) that is not valid."""


class NotReadyError(DeepInferError):
    """The environment cannot do it: wrong architecture, missing extra, no network, no room."""

    exit_code = 3


class CapacityError(NotReadyError):
    """Something does not fit; the message gives need and have, the hint names the knob."""


class ArtefactError(DeepInferError):
    """A file handed to us is malformed or belongs to something else."""

    exit_code = 4


class CheckpointError(ArtefactError):
    """A checkpoint that does not match its own config, index or headers.

    ``problems`` holds every finding; the message shows the first ``SHOWN`` of them and the total.
    """

    SHOWN = 20

    def __init__(self, where: str, problems: Sequence[str], *, hint: str | None = None):
        self.problems = tuple(problems)
        shown = self.problems[: self.SHOWN]
        more = len(self.problems) - len(shown)
        noun = "problem" if len(self.problems) == 1 else "problems"
        lines = [f"{where}: {len(self.problems)} {noun}", *(f"  {p}" for p in shown)]
        if more:
            lines.append(f"  … and {more} more")
        super().__init__("\n".join(lines), hint=hint)


class PartialFailure(DeepInferError):
    """The job ran to its end, but some of its items failed."""

    exit_code = 5


class CheckFailed(DeepInferError):
    """The job ran to its end, and the check it makes said no."""

    exit_code = 6


class PeerLost(DeepInferError):
    """A peer process or rank disappeared."""

    exit_code = 7


class Interrupted(DeepInferError):
    """Stopped by the user; partial results were kept and marked."""

    exit_code = 130
