"""``Finding``: what one check saw, and the runner that turns a crashing check into a failed one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from deepinfer_engine.errors import DeepInferError

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis. ``fix`` is the next step of whatever did not pass; ``details`` are further lines."""

    name: str
    status: Status
    found: str
    fix: str | None = None
    details: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert (self.fix is None) == (self.status == "pass"), f"{self.name}: a fix goes with warn and fail only"


def passed(name: str, found: str, details: Iterable[str] = ()) -> Finding:
    return Finding(name, "pass", found, None, tuple(details))


def warned(name: str, found: str, fix: str, details: Iterable[str] = ()) -> Finding:
    return Finding(name, "warn", found, fix, tuple(details))


def failed(name: str, found: str, fix: str, details: Iterable[str] = ()) -> Finding:
    return Finding(name, "fail", found, fix, tuple(details))


@dataclass(frozen=True)
class Check:
    """``run`` looks at one subject and returns its findings; ``subject`` names it when it crashes."""

    group: str
    subject: str
    run: Callable[[], Sequence[Finding]]


@dataclass(frozen=True)
class Diagnosis:
    """Every finding with its group, in the order of the checks."""

    findings: tuple[tuple[str, Finding], ...]

    def count(self, status: Status) -> int:
        return sum(f.status == status for _, f in self.findings)

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(f for _, f in self.findings if f.status == "fail")


def run_checks(checks: Iterable[Check]) -> Diagnosis:
    """Run every check to its end; one that raises becomes a failed finding with the reason."""
    out: list[tuple[str, Finding]] = []
    for check in checks:
        try:
            found = list(check.run())
        except DeepInferError as exc:
            found = [failed(check.subject, exc.message, exc.hint or "see the message")]
        except Exception as exc:  # the boundary of one check: the others still have something to say
            reason = f"the check itself failed: {type(exc).__name__}: {exc}"
            found = [failed(check.subject, reason, "report this output as a bug")]
        out += [(check.group, finding) for finding in found]
    return Diagnosis(tuple(out))
