"""Requests to a model hub: resolve a revision, list a commit, read ranges of a file; and what a refusal means.

Endpoint, login, proxy and offline conventions are those of ``huggingface_hub`` (``HF_ENDPOINT``, ``HF_TOKEN``,
``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_HUB_DOWNLOAD_TIMEOUT``, …), whose session and headers are used. Files are read
with plain HTTP ranges, which have no size limit. The session drops the login when a redirect leaves the hub's host.
Addresses are not put into messages: those of storage hosts carry signatures.
"""

from __future__ import annotations

import email.utils
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import build_hf_headers, get_session, parse_ratelimit_headers, validate_repo_id

import deepinfer_engine
from deepinfer_engine.config.strict_json import parse_json, printable
from deepinfer_engine.errors import ArtefactError, DeepInferError, NotReadyError, PartialFailure, UsageError
from deepinfer_engine.weights.fetch.files import RemoteFile, check_listing, hash_bytes

#: A listing or a metadata file larger than this is none; the released index has 7 MB.
MAX_BODY_BYTES = 128 * 1024 * 1024

_COMMIT = re.compile(r"[0-9a-f]{40}")

_LOGIN_HINT = "log in with `hf auth login` or set HF_TOKEN to a token that may read it"

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """How hard to try. The defaults suit one 10 to 100 Gbit/s machine."""

    connections: int = 8
    #: Bytes between two flushes of a connection; what a killed process loses at most, per connection.
    chunk_bytes: int = 16 * 1024 * 1024
    #: Bytes asked for in one request: few enough requests for rate limits, and never a range that a proxy refuses.
    segment_bytes: int = 512 * 1024 * 1024
    #: A connection that brings less than ``stall_bytes`` in ``stall_s`` is given up and opened again.
    stall_s: float = 60.0
    stall_bytes: int = 256 * 1024
    #: Attempts after the first that may bring less than one chunk each.
    retries: int = 5
    backoff_s: float = 1.0
    #: The longest wait between attempts, also when the hub asks for more.
    max_wait_s: float = 300.0


class Transient(Exception):
    """A failed attempt that may succeed next time. ``wait_s`` is what the hub asked for; ``timeout`` marks silence."""

    def __init__(self, reason: str, *, wait_s: float | None = None, timeout: bool = False):
        super().__init__(reason)
        self.reason, self.wait_s, self.timeout = reason, wait_s, timeout


class Watch:
    """The stall watchdog of one connection: silence is caught by the read time-out, a trickle here."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self.reset()

    def reset(self) -> None:
        """Begin a new window, as after time that was not spent on the network."""
        self._since, self._got = time.monotonic(), 0

    def feed(self, count: int) -> None:
        """Count received bytes; raises ``Transient`` when a window ends with too few of them."""
        self._got += count
        spent_s = time.monotonic() - self._since
        if spent_s >= self._limits.stall_s:
            if self._got < self._limits.stall_bytes:
                raise Transient(f"stalled: {self._got} bytes in {spent_s:.0f} s", timeout=True)
            self.reset()


class Hub:
    """One repository on one hub."""

    def __init__(self, repo: str, limits: Limits, note: Callable[[str], None]):
        try:
            validate_repo_id(repo)
        except HFValidationError:
            raise UsageError(f"{printable(repo)!r} is not a repository name",
                             hint="a name looks like deepseek-ai/DeepSeek-V4.1-Flash") from None  # fmt: skip
        self.repo, self.limits, self.note = repo, limits, note
        self.endpoint = constants.ENDPOINT
        self.host = urlsplit(self.endpoint).hostname
        if urlsplit(self.endpoint).scheme not in ("http", "https") or not self.host:
            raise NotReadyError(f"HF_ENDPOINT: {printable(self.endpoint)!r} is not an http(s) address",
                                hint="unset HF_ENDPOINT, or give https://host")  # fmt: skip
        self._headers = build_hf_headers(library_name="deepinfer", library_version=deepinfer_engine.__version__)
        self._headers["accept-encoding"] = "identity"  # ranges and sizes are those of the file itself
        self._short = httpx2.Timeout(min(limits.stall_s, constants.HF_HUB_ETAG_TIMEOUT))

    @property
    def offline(self) -> bool:
        return constants.is_offline_mode()

    def resolve(self, revision: str) -> str:
        """The commit that ``revision`` (branch, tag or commit) names now."""
        body, _ = self._json(f"api/models/{self.repo}/revision/{quote(revision, safe='')}", f"revision {revision!r}")
        commit = body.get("sha") if isinstance(body, dict) else None
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise ArtefactError(f"{self.endpoint}: the answer about {self.repo} names no commit",
                                hint="check that HF_ENDPOINT is a model hub")  # fmt: skip
        return commit

    def listing(self, commit: str) -> tuple[RemoteFile, ...]:
        """Every file of ``commit``, with size and hash; paths are checked (``CheckpointError``)."""
        where: str | None = f"api/models/{self.repo}/tree/{commit}?recursive=true&expand=false"
        files: list[RemoteFile] = []
        while where is not None:
            page, where = self._json(where, "the file list")
            if not isinstance(page, list):
                raise ArtefactError(f"{self.repo}: the file list is not a list", hint="check HF_ENDPOINT")
            files += [_remote_file(e, self.repo) for e in page if not _is_folder(e)]
        if not files:
            raise ArtefactError(f"{self.repo} at {commit[:12]} holds no files", hint="check the revision")
        return check_listing(files, f"{self.repo} at {commit[:12]}")

    def small(self, commit: str, file: RemoteFile) -> bytes:
        """The content of a metadata file, checked against its hash."""

        def read() -> bytes:
            with self.range(commit, file, 0, file.size) as response:
                return _body(response, file.size, self.limits)

        data = self.retrying(read, file.path) if file.size else b""
        if len(data) != file.size or not hash_bytes(data).matches(file.digest):
            raise mismatch([file.path])
        return data

    @contextmanager
    def range(self, commit: str, file: RemoteFile, begin: int, end: int) -> Iterator[httpx2.Response]:
        """An open answer whose body begins at byte ``begin`` and may go beyond ``end``.

        Raises ``Transient``, or a final ``DeepInferError``.
        """
        url = f"{self.endpoint}/{self.repo}/resolve/{commit}/{quote(file.path)}"
        headers = {**self._headers, "range": f"bytes={begin}-{end - 1}"}
        timeout = httpx2.Timeout(self.limits.stall_s, connect=constants.HF_HUB_DOWNLOAD_TIMEOUT)
        with self._open(url, headers, timeout, file.path) as response:
            self._check_range(response, file, begin, end)
            yield response

    def _check_range(self, response: httpx2.Response, file: RemoteFile, begin: int, end: int) -> None:
        linked = next((r.headers["x-linked-etag"] for r in response.history if "x-linked-etag" in r.headers), None)
        if linked is not None and file.digest.startswith("sha256:") and linked.strip('W/"') != file.digest[7:]:
            raise ArtefactError(f"{file.path}: the hub is about to send other content than it listed",
                                hint="run the same command again; if it stays, the mirror is broken")  # fmt: skip
        if response.status_code == 206:
            match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", response.headers.get("content-range", ""))
            if not match or int(match[1]) != begin:
                raise Transient("the answer is not the range that was asked for")
            if match[3] not in ("*", str(file.size)):
                raise ArtefactError(f"{file.path}: the file list says {file.size} bytes, the server has {match[3]}",
                                    hint="run the same command again; if it stays, the mirror is broken")  # fmt: skip
        elif begin > 0 or end < file.size:
            raise NotReadyError(f"{file.path}: {response.url.host} ignores ranges, so the fetch cannot continue",
                                hint="use a hub or mirror (HF_ENDPOINT) that serves ranges")  # fmt: skip

    @contextmanager
    def _open(self, url: str, headers: dict[str, str], timeout: httpx2.Timeout, what: str) -> Iterator[httpx2.Response]:
        try:
            with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
                if response.status_code not in (200, 206):
                    raise self._refusal(response, what)
                yield response
        except httpx2.TimeoutException as exc:
            raise Transient(f"no answer in time ({type(exc).__name__})", timeout=True) from None
        except (httpx2.UnsupportedProtocol, httpx2.InvalidURL, httpx2.TooManyRedirects) as exc:
            raise NotReadyError(f"{what}: the hub redirects to where nothing can be fetched ({type(exc).__name__})",
                                hint="check HF_ENDPOINT and the proxy settings") from None  # fmt: skip
        except httpx2.TransportError as exc:
            raise Transient(f"connection lost ({type(exc).__name__})") from None

    def _json(self, path_or_url: str, what: str) -> tuple[Any, str | None]:
        """A JSON answer and the address of its next page."""
        url = path_or_url if "://" in path_or_url else f"{self.endpoint}/{path_or_url}"

        def read() -> tuple[Any, str | None]:
            with self._open(url, self._headers, self._short, what) as response:
                body = _body(response, MAX_BODY_BYTES, self.limits)
                return parse_json(body), response.links.get("next", {}).get("url")

        try:
            body, following = self.retrying(read, what)
        except ValueError as exc:
            raise ArtefactError(f"{self.endpoint}: {what} is not JSON ({exc})", hint="check HF_ENDPOINT") from None
        if following is not None and urlsplit(following)[:2] != urlsplit(self.endpoint)[:2]:
            raise ArtefactError(f"{what}: its next page is on another host", hint="check HF_ENDPOINT")
        return body, following

    # ------------------------------------------------------------------ refusals

    def _refusal(self, response: httpx2.Response, what: str) -> Exception:
        """What an answer that is not 200 or 206 means: ``Transient``, or an error with one next step."""
        status, code = response.status_code, response.headers.get("x-error-code", "")
        if status == 429:
            return Transient("the hub asks for fewer requests (429)", wait_s=_retry_after(response))
        if status == 408 or status >= 500:
            return Transient(f"the server failed ({status})", wait_s=_retry_after(response))
        if response.url.netloc != httpx2.URL(self.endpoint).netloc:
            # signed addresses of storage hosts expire; the next attempt asks the hub for a new one
            return Transient(f"the storage host refused ({status})")
        page = f"{self.endpoint}/{self.repo}"
        if code == "GatedRepo" or (status == 403 and code not in ("RepoNotFound", "RevisionNotFound")):
            why = "is gated and this account has" if code == "GatedRepo" else "is closed to this account: it has"
            return NotReadyError(f"{self.repo} {why} no access ({status})",
                                 hint=f"ask for access at {page}, then {_LOGIN_HINT}")  # fmt: skip
        if code == "RevisionNotFound":
            return NotReadyError(f"{self.repo}: there is no {what} ({status})", hint=f"see {page}/tree/main")
        if code == "EntryNotFound":
            return NotReadyError(f"{self.repo}: there is no {what} at this commit ({status})", hint=f"see {page}")
        if status == 401 and "authorization" in self._headers:
            return NotReadyError(f"{self.repo}: the login is not accepted, or there is no such repository (401)",
                                 hint=f"check the name, or {_LOGIN_HINT}")  # fmt: skip
        if status in (401, 404):
            return NotReadyError(f"{self.repo}: there is no such repository, or it is private ({status})",
                                 hint=f"check the name; if it is private, {_LOGIN_HINT}")  # fmt: skip
        if status == 416:
            return ArtefactError(f"{what}: the server has fewer bytes than the file list says",
                                 hint="run the same command again; if it stays, the mirror is broken")  # fmt: skip
        return NotReadyError(f"{what}: the hub refused ({status})", hint=f"see {page}")

    # ------------------------------------------------------------------- retries

    def retrying(self, work: Callable[[], T], what: str) -> T:
        """``work()``, tried again after ``Transient`` failures; the last one becomes an error (exit 3, time-out 5)."""
        for attempt in range(self.limits.retries + 1):
            try:
                return work()
            except Transient as exc:
                if attempt == self.limits.retries:
                    raise self.give_up(exc, what, attempt + 1) from None
                wait_s = self.pause(exc, attempt, what)
                time.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    def pause(self, exc: Transient, attempt: int, what: str) -> float:
        """Seconds to wait after failed attempt number ``attempt`` (from 0), noted; raises when asked for too many."""
        if exc.wait_s is not None and exc.wait_s > self.limits.max_wait_s:
            raise NotReadyError(f"{what}: the hub asks to wait {exc.wait_s:.0f} s",
                                hint="run the same command again then; what is fetched is kept")  # fmt: skip
        # doubling, with jitter so that connections that failed together do not come back together
        wait_s = min(self.limits.backoff_s * 2**attempt, self.limits.max_wait_s) * random.uniform(0.5, 1.0)
        wait_s = max(wait_s, exc.wait_s or 0.0)
        self.note(f"{what}: {exc.reason}; attempt {attempt + 2} of {self.limits.retries + 1} in {wait_s:.1f} s")
        return wait_s

    def give_up(self, exc: Transient, what: str, attempts: int) -> DeepInferError:
        """The final error after ``attempts`` failures in a row."""
        message = f"{what}: {exc.reason}; gave up after {attempts} attempts"
        if exc.timeout:
            return PartialFailure(message, hint="what is fetched is kept: run the same command again")
        hint = f"check the network to {self.host}; what is fetched is kept: run the same command again"
        return NotReadyError(message, hint=hint)


def mismatch(paths: list[str]) -> ArtefactError:
    """Fetched bytes that do not have the listed hash; they were thrown away."""
    first = ", ".join(printable(p) for p in paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
    return ArtefactError(f"{first}: the fetched bytes do not have the listed hash; they were thrown away",
                         hint="run the same command again; if it stays, a proxy or mirror changes files")  # fmt: skip


def _body(response: httpx2.Response, limit: int, limits: Limits) -> bytes:
    data, watch = bytearray(), Watch(limits)
    for block in response.iter_raw():
        data += block
        watch.feed(len(block))
        if len(data) > limit:
            raise ArtefactError(f"{response.url.host}: the answer is longer than {limit} bytes")
    return bytes(data)


def _is_folder(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("type") == "directory"


def _remote_file(entry: Any, repo: str) -> RemoteFile:
    try:
        lfs = entry.get("lfs")
        digest = f"sha256:{lfs['oid']}" if lfs is not None else f"git-sha1:{entry['oid']}"
        path, size = entry["path"], entry["size"]
    except (AttributeError, KeyError, TypeError):
        path, size, digest = None, None, ""
    if not isinstance(path, str) or type(size) is not int:
        raise ArtefactError(f"{repo}: the file list has an entry that is no file: {printable(repr(entry))}",
                            hint="check HF_ENDPOINT")  # fmt: skip
    return RemoteFile(path, size, digest)


def _retry_after(response: httpx2.Response) -> float | None:
    """Seconds to wait from ``Retry-After`` (a number or a date), or from the hub's rate-limit header."""
    value = response.headers.get("retry-after", "").strip()
    if value.isdigit():
        return float(value)
    if value:
        try:
            return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
        except ValueError:
            return None
    rate = parse_ratelimit_headers(response.headers)
    return float(rate.reset_in_seconds) if rate is not None and rate.remaining == 0 else None
