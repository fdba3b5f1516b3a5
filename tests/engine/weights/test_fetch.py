"""Fetching from a stub hub: what arrives, what is never fetched twice, and every way in which it can go wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from deepinfer_engine.errors import (
    ArtefactError,
    CapacityError,
    CheckpointError,
    DeepInferError,
    NotReadyError,
    PartialFailure,
    UsageError,
)
from deepinfer_engine.weights.fetch import job as job_module
from deepinfer_engine.weights.fetch import lock, partial, transfer
from deepinfer_engine.weights.fetch.files import Content, RemoteFile
from deepinfer_engine.weights.fetch.hub import Limits
from deepinfer_engine.weights.fetch.job import Job
from deepinfer_engine.weights.fetch.lock import destination_lock
from deepinfer_engine.weights.fetch.manifest import load_manifest
from tests.stub_hub import COMMIT, REPO, Fault, StubHub

ROOT = Path(__file__).resolve().parents[3]

KIB = 1024
LIMITS = Limits(
    connections=3, chunk_bytes=16 * KIB, segment_bytes=64 * KIB, stall_s=0.3, stall_bytes=64, retries=2, backoff_s=0.01
)
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


class Seen:
    """A progress that remembers."""

    def __init__(self):
        self.notes: list[str] = []
        self.bytes = {"fetch": 0, "check": 0}
        self.expected = {"fetch": 0, "check": 0}

    def expect(self, activity, nbytes):
        self.expected[activity] += nbytes

    def begin(self, activity, path, size, done):
        pass

    def advance(self, activity, path, nbytes):
        self.bytes[activity] += nbytes

    def end(self, activity, path):
        pass

    def note(self, text):
        self.notes.append(text)


def content(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def repository() -> dict[str, bytes]:
    return {
        A: content(200 * KIB + 7, 1),
        B: content(100 * KIB, 2),
        "config.json": b'{"model_type": "other"}',
        "encoding/empty.txt": b"",
        "encoding/a %2F.txt": b"escaped\n",
    }


@pytest.fixture(autouse=True)
def no_login(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(monkeypatch):
    with StubHub(repository()) as stub:
        monkeypatch.setattr(constants, "ENDPOINT", stub.url)
        yield stub


@pytest.fixture
def dest(tmp_path) -> Path:
    return tmp_path / "models" / "it"


def fetch(dest: Path, *, rehash=False, repair=False, limits=LIMITS, seen=None, **options):
    """The steps of the command, without its output."""
    job = Job(REPO, dest, seen or Seen(), limits=limits, pinned=rehash or repair, **options)
    job.survey()
    with destination_lock(dest, wait=False, note=print):
        job.survey()
        job.require_space()
        job.check(rehash=rehash)
        if not repair:
            job.require_right("wrong")
        job.require_space()
        return job.fetch()


def check(dest: Path, *, rehash=True, seen=None, **options):
    job = Job(REPO, dest, seen or Seen(), limits=LIMITS, pinned=True, **options)
    job.survey()
    job.check(rehash=rehash)
    job.require_complete()
    return job.plan


def on_disk(dest: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(dest)): p.read_bytes() for p in dest.rglob("*") if p.is_file() and ".fetch" not in p.parts
    }


def left_over(dest: Path) -> list[str]:
    return sorted(p.name for p in (dest / ".fetch").iterdir() if p.name not in ("lock", "manifest.json"))


# ----------------------------------------------------------------------- whole


def test_every_file_arrives_and_nothing_else_is_left(hub, dest):
    seen = Seen()
    plan = fetch(dest, seen=seen)
    assert on_disk(dest) == hub.files
    assert left_over(dest) == []
    assert {i.state for i in plan.items} == {"fetched"}
    total = sum(len(d) for d in hub.files.values())
    assert seen.bytes == seen.expected == {"fetch": total, "check": total}
    assert hub.sent == {p: len(d) for p, d in hub.files.items() if d}
    assert (dest / A).stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


def test_stamp_remembers_size_mtime_commit_and_hash(hub, dest):
    fetch(dest)
    manifest = load_manifest(dest)
    assert manifest is not None
    status = (dest / A).stat()
    stamp = manifest.stamps[A]
    assert (stamp.size, stamp.mtime_ns, stamp.commit) == (status.st_size, status.st_mtime_ns, COMMIT)
    assert stamp.sha256 == hashlib.sha256(hub.files[A]).hexdigest()


def test_second_fetch_asks_only_for_the_commit_and_a_pinned_one_for_nothing(hub, dest):
    fetch(dest)
    hub.requests.clear()
    fetch(dest)
    assert [path for _, path, _ in hub.requests] == [f"/api/models/{REPO}/revision/main"]
    hub.requests.clear()
    seen = Seen()
    fetch(dest, revision=COMMIT, seen=seen)
    assert hub.requests == []
    assert seen.bytes == {"fetch": 0, "check": 0}


def test_listing_is_read_page_by_page(hub, dest):
    hub.page = 2
    fetch(dest)
    assert on_disk(dest) == hub.files


def test_login_stays_with_the_hub_and_out_of_everything_written(hub, dest, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_topsecret")
    hub.faults[A] = [Fault(how="drop", after=10 * KIB), Fault(status=503)]
    seen = Seen()
    fetch(dest, seen=seen)
    by_role = {role: {h.get("authorization") for r, _, h in hub.requests if r == role} for role in ("hub", "storage")}
    assert by_role == {"hub": {"Bearer hf_topsecret"}, "storage": {None}}
    written = "".join(seen.notes) + "".join(p.read_text() for p in (dest / ".fetch").iterdir())
    assert "secret" not in written


# ---------------------------------------------------------------------- faults


def test_dropped_connection_is_continued_where_it_ended(hub, dest):
    hub.faults[A] = [Fault(how="drop", after=n * KIB) for n in (5, 40, 1)]
    seen = Seen()
    fetch(dest, seen=seen)
    assert on_disk(dest) == hub.files
    # what the client had received was kept, so a drop costs no byte twice
    assert hub.sent[A] == len(hub.files[A])
    assert sum("attempt" in n for n in seen.notes) == 3


def test_silent_connection_is_dropped_and_opened_again(hub, dest):
    hub.faults[A] = [Fault(how="hang", after=20 * KIB)]
    seen = Seen()
    fetch(dest, seen=seen)
    assert on_disk(dest) == hub.files
    assert any("no answer in time" in n for n in seen.notes)
    assert hub.sent[A] == len(hub.files[A])


def test_trickling_connection_is_dropped_though_bytes_still_come(hub, dest):
    hub.faults[A] = [Fault(how="trickle", after=20 * KIB)]
    seen = Seen()
    fetch(dest, seen=seen)
    assert on_disk(dest) == hub.files
    assert any("stalled" in n for n in seen.notes)


def test_stall_that_never_ends_is_exit_5_and_what_came_is_kept(hub, dest):
    hub.faults[A], hub.forever = [Fault(how="hang")], {A}
    with pytest.raises(PartialFailure, match="gave up after 3 attempts") as caught:
        fetch(dest)
    assert caught.value.exit_code == 5
    assert "run the same command again" in caught.value.hint
    hub.forever.clear()
    hub.faults.clear()
    fetch(dest)
    assert on_disk(dest) == hub.files


def test_drops_that_never_end_are_exit_3_after_bounded_attempts(hub, dest):
    hub.faults[A], hub.forever = [Fault(how="drop")], {A}
    one = Limits(**{**vars(LIMITS), "connections": 1, "segment_bytes": 1 << 30})
    with pytest.raises(NotReadyError, match=r"connection lost.*gave up after 3 attempts") as caught:
        fetch(dest, limits=one)
    assert caught.value.exit_code == 3
    assert hub.content_requests().count(f"/{A}?X-Signature=very-secret") == 3
    assert "very-secret" not in caught.value.message


def test_stopping_does_not_wait_for_connections_that_hang(hub, dest):
    """A failure elsewhere ends the fetch at once, though another connection may stay silent for a minute."""
    hub.faults[B], hub.forever = [Fault(how="hang")], {B}
    hub.faults[A] = [Fault(status=416)]
    hub.redirect = False
    started = time.monotonic()
    with pytest.raises(ArtefactError, match="fewer bytes"):
        fetch(dest, limits=Limits(**{**vars(LIMITS), "stall_s": 60.0}))
    assert time.monotonic() - started < 5


def test_progress_between_failures_allows_more_of_them_than_the_bound(hub, dest):
    hub.faults[A] = [Fault(how="drop", after=16 * KIB)] * 9
    fetch(dest, limits=Limits(**{**vars(LIMITS), "connections": 1, "segment_bytes": 1 << 30}))
    assert on_disk(dest) == hub.files


def test_too_many_requests_waits_as_long_as_the_hub_asks(hub, dest):
    hub.faults[A] = [Fault(status=429, headers=(("Retry-After", "1"),))]
    seen, started = Seen(), time.monotonic()
    fetch(dest, seen=seen)
    assert time.monotonic() - started >= 1.0
    assert any("429" in n and "in 1.0 s" in n for n in seen.notes)


@pytest.mark.parametrize(
    "header",
    [("Retry-After", "4000"), ("RateLimit", '"api";r=0;t=4000'), ("Retry-After", "Fri, 01 Jan 2100 00:00:00 GMT")],
)
def test_too_long_a_wait_is_refused_with_its_length(hub, dest, header):
    hub.api_faults = [Fault(status=429, headers=(header,))]
    with pytest.raises(NotReadyError, match="asks to wait") as caught:
        fetch(dest)
    assert caught.value.exit_code == 3


def test_server_errors_and_expired_links_are_tried_again(hub, dest):
    hub.api_faults = [Fault(status=502)]
    hub.faults[A] = [Fault(status=403), Fault(status=500)]
    fetch(dest)
    assert on_disk(dest) == hub.files


def test_hub_that_does_not_answer_its_listing_is_exit_5(hub, dest):
    hub.api_faults = [Fault(how="hang")] * 3
    with pytest.raises(PartialFailure, match="revision 'main': no answer in time"):
        fetch(dest)


def test_wrong_bytes_of_the_right_length_are_exit_4_and_thrown_away(hub, dest):
    hub.faults[A] = [Fault(how="flip")]
    with pytest.raises(ArtefactError, match=A) as caught:
        fetch(dest)
    assert caught.value.exit_code == 4
    assert set(on_disk(dest)) == set(hub.files) - {A}  # the others are there
    assert left_over(dest) == []
    hub.requests.clear()
    fetch(dest)
    assert on_disk(dest) == hub.files
    assert {p.partition("?")[0] for p in hub.content_requests()} == {f"/{A}"}


def test_wrong_small_file_is_exit_4(hub, dest):
    hub.faults["encoding/a %2F.txt"] = [Fault(how="flip")]
    with pytest.raises(ArtefactError, match="do not have the listed hash"):
        fetch(dest)


def test_mirror_that_announces_other_content_is_refused_before_the_bytes(hub, dest):
    hub.linked_etag[A] = "0" * 64
    with pytest.raises(ArtefactError, match="other content than it listed"):
        fetch(dest, limits=Limits(**{**vars(LIMITS), "connections": 1}))
    assert not (dest / A).exists()


def test_file_of_another_size_than_listed_is_refused(hub, dest):
    hub.listed[A] = {"size": len(hub.files[A]) - 5}
    with pytest.raises(ArtefactError, match="the file list says"):
        fetch(dest)


def test_server_without_ranges_is_refused_by_name(hub, dest):
    hub.faults[A], hub.forever = [Fault(how="whole")], {A}
    with pytest.raises(NotReadyError, match="ignores ranges"):
        fetch(dest)


def test_server_without_ranges_serves_what_one_request_can(hub, dest):
    hub.faults[A], hub.forever = [Fault(how="whole")], {A}
    fetch(dest, limits=Limits(**{**vars(LIMITS), "segment_bytes": 1 << 30}))
    assert on_disk(dest) == hub.files


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("status", "code", "text", "hint"),
    [
        (401, "", "no such repository, or it is private", "hf auth login"),
        (401, "RepoNotFound", "no such repository, or it is private", "HF_TOKEN"),
        (401, "GatedRepo", "is gated", "ask for access at {url}/org/model"),
        (403, "GatedRepo", "is gated and this account has no access", "ask for access at {url}/org/model"),
        (403, "", "is closed to this account", "ask for access at {url}/org/model"),
        (404, "RepoNotFound", "no such repository", "check the name"),
        (404, "RevisionNotFound", "there is no revision 'main'", "{url}/org/model/tree/main"),
        (418, "", "the hub refused (418)", "{url}/org/model"),
    ],
)
def test_refusal_is_exit_3_with_the_next_step(hub, dest, status, code, text, hint):
    hub.gate = lambda headers: Fault(status=status, headers=(("X-Error-Code", code),) if code else ())
    with pytest.raises(NotReadyError) as caught:
        fetch(dest)
    assert caught.value.exit_code == 3
    assert text in caught.value.message
    assert hint.format(url=hub.url) in caught.value.hint
    assert not dest.exists()


def test_login_that_is_not_accepted_is_said_so(hub, dest, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_topsecret")
    hub.gate = lambda headers: Fault(status=401)
    with pytest.raises(NotReadyError, match="the login is not accepted") as caught:
        fetch(dest)
    assert "topsecret" not in caught.value.message + caught.value.hint


def test_unknown_revision_and_repository(hub, dest):
    with pytest.raises(NotReadyError, match="there is no revision 'v9'"):
        fetch(dest, revision="v9")
    with pytest.raises(UsageError, match="not a repository name"):
        Job("no/such/name/", dest, Seen())


def test_file_that_vanished_is_named(hub, dest):
    job = Job(REPO, dest, Seen(), limits=LIMITS)
    job.survey()
    del hub.files[A]
    with (
        pytest.raises(NotReadyError, match=f"there is no {A} at this commit"),
        destination_lock(dest, wait=False, note=print),
    ):
        job.fetch()


@pytest.mark.parametrize(
    "path",
    [
        "../evil",
        "/etc/evil",
        "a/../../evil",
        "a//b",
        "./a",
        ".fetch/manifest.json",
        ".FETCH/x",
        "a\\b",
        "a\nb",
        "a/",
        "x" * 250,
    ],
)
def test_hostile_path_is_exit_4_and_nothing_is_written(hub, dest, path):
    hub.files["harmless.txt"] = b"x"
    hub.listed["harmless.txt"] = {"path": path}
    with pytest.raises(CheckpointError, match="path ") as caught:
        fetch(dest)
    assert caught.value.exit_code == 4
    assert not dest.exists()


@pytest.mark.parametrize("twin", ["CONFIG.json", "config.json/x"])
def test_paths_that_collide_are_refused(hub, dest, twin):
    hub.files[twin] = b"x"
    with pytest.raises(CheckpointError, match=r"differ at most in case|both a file and the folder"):
        fetch(dest)


@pytest.mark.parametrize(
    ("entry", "text"),
    [({"size": "big"}, "no file"), ({"path": 7}, "no file"), ({"oid": "x"}, "not valid"), ({"size": -1}, "not valid")],
)
def test_malformed_listing_is_exit_4(hub, dest, entry, text):
    hub.listed["config.json"] = entry
    with pytest.raises(ArtefactError, match=text):
        fetch(dest)


# ----------------------------------------------------------------- destination


def test_link_on_the_way_is_not_written_through(hub, dest, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    dest.mkdir(parents=True)
    (dest / "encoding").symlink_to(outside)
    with pytest.raises(ArtefactError, match="symbolic link"):
        fetch(dest)
    assert list(outside.iterdir()) == []


def test_link_under_a_final_name_is_replaced_and_its_target_left_alone(hub, dest, tmp_path):
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    dest.mkdir(parents=True)
    (dest / A).symlink_to(target)
    with pytest.raises(CheckpointError, match="not the content"):
        fetch(dest)
    fetch(dest, repair=True)
    assert target.read_bytes() == b"precious"
    assert not (dest / A).is_symlink()
    assert on_disk(dest) == hub.files


def test_links_in_the_state_folder_are_refused(hub, dest, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"v" * len(hub.files[A]))
    (dest / ".fetch").mkdir(parents=True)
    (dest / ".fetch" / f"{A}.part").symlink_to(victim)
    with pytest.raises(NotReadyError, match=A):
        fetch(dest)
    assert victim.read_bytes() == b"v" * len(hub.files[A])
    shutil.rmtree(dest / ".fetch")
    (dest / ".fetch").symlink_to(tmp_path)
    with pytest.raises(ArtefactError, match="symbolic link"):
        fetch(dest)


def test_state_folder_that_is_a_file_is_exit_3(hub, dest):
    dest.mkdir(parents=True)
    (dest / ".fetch").write_text("")
    with pytest.raises(NotReadyError, match=r"\.fetch"):
        fetch(dest)
    with pytest.raises(NotReadyError, match="cannot be created"), destination_lock(dest, wait=False, note=print):
        pass


def test_destination_that_is_a_file_or_cannot_be_locked(hub, dest, monkeypatch):
    with pytest.raises(UsageError, match="not a directory"):
        fetch(Path(__file__))

    def flock(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    with pytest.raises(NotReadyError, match="cannot lock it: No locks available"):
        fetch(dest)


def test_foreign_file_is_not_overwritten_without_being_told(hub, dest):
    dest.mkdir(parents=True)
    (dest / "config.json").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match=r"config\.json: not the content") as caught:
        fetch(dest)
    assert caught.value.exit_code == 4
    assert "--repair" in caught.value.hint
    assert on_disk(dest) == {"config.json": b"mine"}
    assert hub.sent[A] == 0
    fetch(dest, repair=True)
    assert on_disk(dest) == hub.files


def test_right_file_without_a_stamp_is_hashed_and_not_fetched(hub, dest):
    dest.mkdir(parents=True)
    (dest / A).write_bytes(hub.files[A])
    fetch(dest)
    assert on_disk(dest) == hub.files
    assert hub.sent[A] == 0
    seen = Seen()
    fetch(dest, seen=seen)
    assert seen.bytes["check"] == 0


def test_new_commit_replaces_what_changed_and_only_that(hub, dest):
    fetch(dest)
    hub.files[B] = content(100 * KIB, 3)
    hub.revisions["main"] = "f00d" + "0" * 36
    hub.sent.clear()
    seen = Seen()
    plan = fetch(dest, seen=seen)
    assert on_disk(dest) == hub.files
    assert dict(hub.sent) == {B: 100 * KIB}
    assert plan.paths("fetched") == [B]
    assert any("main is now f00d" in n for n in seen.notes)


def test_copied_destination_is_known_again_though_its_times_changed(hub, dest):
    """Without its times the old content of a changed file is still ours: hashed, known, replaced."""
    fetch(dest)
    for path in on_disk(dest):
        os.utime(dest / path, ns=(1, 1))
    hub.files[B] = content(90 * KIB, 3)
    hub.revisions["main"] = "f00d" + "0" * 36
    hub.sent.clear()
    fetch(dest)
    assert on_disk(dest) == hub.files
    assert dict(hub.sent) == {B: 90 * KIB}


def test_other_repository_in_the_same_directory_is_refused(hub, dest):
    fetch(dest)
    with pytest.raises(UsageError, match="holds org/model, not org/other"):
        Job("org/other", dest, Seen(), limits=LIMITS).survey()


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "x"}', '{"schema": "deepinfer/fetch-manifest/1"}'])
def test_malformed_manifest_is_exit_4(hub, dest, text):
    (dest / ".fetch").mkdir(parents=True)
    (dest / ".fetch" / "manifest.json").write_text(text)
    with pytest.raises(ArtefactError, match="manifest"):
        fetch(dest)


def test_manifest_with_a_hostile_path_is_exit_4(hub, dest):
    fetch(dest)
    path = dest / ".fetch" / "manifest.json"
    raw = json.loads(path.read_text())
    raw["files"][0]["path"] = "../evil"
    path.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="leaves the destination"):
        check(dest)


# ----------------------------------------------------------------------- space


def test_too_small_a_disk_is_refused_with_need_and_have_before_any_byte(hub, dest, monkeypatch):
    monkeypatch.setattr(job_module, "_free_bytes", lambda dest: 1000)
    with pytest.raises(CapacityError, match=r"need 307\d\d\d bytes .* have 1000") as caught:
        fetch(dest)
    assert caught.value.exit_code == 3
    assert hub.sent[A] == 0


def test_bytes_that_are_there_count_against_the_need(hub, dest, monkeypatch):
    hub.faults[B], hub.forever = [Fault(how="drop", after=10 * KIB)], {B}
    with pytest.raises(NotReadyError):
        fetch(dest, limits=Limits(**{**vars(LIMITS), "retries": 0}))
    job = Job(REPO, dest, Seen(), limits=LIMITS)
    state = {i.file.path: i for i in job.survey().items}[B]
    assert state.state == "partial"
    assert 0 < state.fetch_bytes <= 100 * KIB - 10 * KIB


def test_disk_that_fills_up_is_exit_3_and_the_fetch_continues_later(hub, dest, monkeypatch):
    written, real = [0], os.pwrite

    def pwrite(handle, data, offset):
        written[0] += len(data)
        if written[0] > 150 * KIB:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(CapacityError, match="no room left") as caught:
        fetch(dest, limits=Limits(**{**vars(LIMITS), "connections": 1}))
    assert caught.value.exit_code == 3
    monkeypatch.setattr(os, "pwrite", real)
    sent = sum(hub.sent.values())
    fetch(dest)
    assert on_disk(dest) == hub.files
    total = sum(len(d) for d in hub.files.values())
    assert sum(hub.sent.values()) - sent < total - 100 * KIB


# --------------------------------------------------------- death and large files


_CHILD = """
import sys
from pathlib import Path
from tests.engine.weights.test_fetch import Seen, Job, Limits, REPO, LIMITS, destination_lock
dest = Path(sys.argv[1])
job = Job(REPO, dest, Seen(), limits=LIMITS)
with destination_lock(dest, wait=False, note=print):
    job.survey()
    job.fetch()
"""


def child(hub, dest) -> subprocess.Popen:
    paths = os.pathsep.join(str(p) for p in (ROOT, ROOT / "engine", ROOT / "kernels"))
    env = os.environ | {"PYTHONPATH": paths, "HF_ENDPOINT": hub.url, "NO_PROXY": "127.0.0.1"}
    return subprocess.Popen([sys.executable, "-c", _CHILD, str(dest)], env=env)


def test_killed_fetch_continues_and_fetches_at_most_the_last_chunks_twice(hub, dest):
    size = 1024 * KIB
    hub.files = {A: content(size, 5), B: content(size // 2, 6)}
    hub.rate_bytes_s = 600 * KIB  # slow enough that nothing waits in socket buffers when the process dies
    process = child(hub, dest)
    deadline = time.monotonic() + 20
    while sum(hub.sent.values()) < 700 * KIB and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    time.sleep(0.1)
    with hub.lock:
        first = {p: list(r) for p, r in hub.ranges.items()}
        hub.ranges.clear()
    assert not (dest / A).exists()
    state = dest / ".fetch"
    kept = {f.path: partial.finished_ranges(state, f) for f in _listing(hub)}
    assert sum(partial.total(r) for r in kept.values()) >= 400 * KIB
    # received and written, but not in the journal: less than a chunk and a block per connection
    unnoted = sum(_written(state / f"{p}.part", d) - partial.total(kept[p]) for p, d in hub.files.items())
    assert 0 <= unnoted <= LIMITS.connections * (LIMITS.chunk_bytes + 8 * KIB)

    hub.rate_bytes_s = None
    fetch(dest)
    assert on_disk(dest) == hub.files
    for path in hub.files:
        # exactly what the journal lacked was asked for, and together both runs brought every byte
        assert partial.merge(hub.ranges[path]) == partial.merge(partial.gaps(kept[path], len(hub.files[path]), size))
        assert partial.merge(first.get(path, []) + hub.ranges[path]) == [(0, len(hub.files[path]))]
    assert sum(hub.sent.values()) < 1.2 * (size + size // 2)


def _listing(hub) -> list[RemoteFile]:
    return [RemoteFile(p, len(d), f"sha256:{hashlib.sha256(d).hexdigest()}") for p, d in hub.files.items()]


def _written(part: Path, data: bytes) -> int:
    """Bytes of a partial file that are there already, counted in blocks of 1 KiB (holes read as zeros)."""
    stored = part.read_bytes() if part.exists() else b""
    return sum(KIB for at in range(0, len(stored), KIB) if stored[at : at + KIB] == data[at : at + KIB])


def test_death_while_hashing_costs_no_byte(hub, dest, monkeypatch):
    monkeypatch.setattr(transfer, "hash_file", lambda *args: None)  # as if stopped there
    fetch(dest)
    assert on_disk(dest) == {}
    monkeypatch.undo()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    hub.sent.clear()
    fetch(dest)
    assert on_disk(dest) == hub.files
    assert hub.sent[A] == hub.sent[B] == 0


def test_files_above_50_gb_are_fetched_by_ranges(hub, dest, monkeypatch):
    """A 101.5 GB file of which all but the last 64 KiB is there (a sparse file stands for it)."""
    size, tail = 101_537_936_048, content(64 * KIB, 9)
    digest = hashlib.sha256(b"stands for 101.5 GB").hexdigest()

    class Sparse(bytes):
        """Looks like the large file to the stub: only its end can be read."""

        def __len__(self):
            return size

        def __getitem__(self, key):
            assert key.start >= size - len(tail), "only the end may be asked for"
            return tail[key.start - size + len(tail) : key.stop - size + len(tail)]

    hub.files = {B: b""}
    hub.listed[B] = {"size": size, "lfs": {"oid": digest, "size": size, "pointerSize": 1}}
    hub.linked_etag[B] = digest
    file = RemoteFile(B, size, f"sha256:{digest}")
    state = dest / ".fetch"
    state.mkdir(parents=True)
    part = partial.Partial(state, file)
    part.commit(0, size - len(tail))
    part.close()
    monkeypatch.setattr(transfer, "hash_file", lambda *args: Content(digest, ""))
    monkeypatch.setattr(job_module, "_free_bytes", lambda dest: 10**12)
    tree = hub.tree()
    hub.tree = lambda: tree
    hub.files[B] = Sparse()
    fetch(dest)
    with (dest / B).open("rb") as stored:
        stored.seek(size - len(tail))
        assert stored.read() == tail
    assert (dest / B).stat().st_size == size
    assert hub.sent[B] == len(tail)


def test_range_is_noted_only_after_its_bytes_are_flushed(tmp_path, monkeypatch):
    order = []
    part = partial.Partial(tmp_path, RemoteFile("f", 10, "sha256:" + "0" * 64))
    monkeypatch.setattr(os, "fdatasync", lambda handle: order.append(("flush", handle == part._data)))
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: order.append(("note", bytes(data))) or real(handle, data))
    part.write(0, b"12345")
    part.commit(0, 5)
    assert order == [("flush", True), ("note", b"0 5\n")]
    part.close()


# ------------------------------------------------------------------------ lock


def test_second_fetch_says_who_holds_the_directory(hub, dest):
    with destination_lock(dest, wait=False, note=print), pytest.raises(NotReadyError) as caught:
        fetch(dest)
    assert f"is being fetched by process {os.getpid()} on " in caught.value.message
    assert caught.value.exit_code == 3


def test_second_fetch_waits_and_then_has_nothing_to_fetch(hub, dest):
    notes: list[str] = []
    hub.rate_bytes_s = 600 * KIB
    process = child(hub, dest)
    while not hub.sent:
        time.sleep(0.005)
    job = Job(REPO, dest, Seen(), limits=LIMITS)
    job.survey()
    with destination_lock(dest, wait=True, note=notes.append):
        assert process.wait(5) == 0
        plan = job.survey()
        assert {i.state for i in plan.items} == {"checked"}
    assert len(notes) == 1
    assert f"is being fetched by process {process.pid} on " in notes[0]
    assert hub.sent[A] == len(hub.files[A])


def test_lock_is_free_after_its_holder_was_killed(hub, dest):
    hub.faults[A], hub.forever = [Fault(how="hang", after=KIB)], {A}
    process = child(hub, dest)
    while not hub.sent[A]:
        time.sleep(0.005)
    process.kill()
    process.wait()
    with destination_lock(dest, wait=False, note=print):
        pass


def test_two_fetches_at_once_fetch_everything_once(hub, dest):
    failures: list[BaseException] = []

    def one():
        try:
            job = Job(REPO, dest, Seen(), limits=LIMITS)
            with destination_lock(dest, wait=True, note=lambda text: None):
                job.survey()
                job.fetch()
        except DeepInferError as exc:
            failures.append(exc)

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert on_disk(dest) == hub.files
    assert {p: hub.sent[p] for p in (A, B)} == {p: len(hub.files[p]) for p in (A, B)}


# -------------------------------------------------------------- offline, verify


def test_offline_checks_what_is_there_without_a_request(hub, dest, monkeypatch):
    fetch(dest)
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    seen = Seen()
    plan = check(dest, rehash=False, seen=seen)
    assert {i.state for i in plan.items} == {"checked"}
    assert hub.requests == []
    assert seen.bytes["check"] == 0  # stamped


def test_offline_names_what_is_missing(hub, dest, monkeypatch):
    fetch(dest)
    (dest / A).unlink()
    (dest / "config.json").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NotReadyError) as caught:
        check(dest)
    assert caught.value.exit_code == 3
    assert "2 of 5 files are missing" in caught.value.message
    assert A in caught.value.message and "config.json" in caught.value.message


def test_offline_without_a_fetch_or_with_another_revision(hub, dest, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NotReadyError, match="remembers no fetch"):
        check(dest)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    fetch(dest)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NotReadyError, match="holds commit c0ffee"):
        check(dest, revision="v2")


def rot(path: Path) -> None:
    """Change one byte behind the back of size and modification time."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_verify_finds_a_flipped_byte_and_repair_fetches_only_that_file(hub, dest):
    fetch(dest)
    rot(dest / B)
    assert {i.state for i in check(dest, rehash=False).items} == {"checked"}  # a stamp cannot see this
    hub.requests.clear()
    with pytest.raises(CheckpointError, match=B) as caught:
        check(dest)
    assert caught.value.exit_code == 4
    assert hub.requests == []
    hub.sent.clear()
    plan = fetch(dest, repair=True)
    assert dict(hub.sent) == {B: 100 * KIB}
    assert plan.paths("fetched") == [B]
    assert on_disk(dest) == hub.files
    check(dest)


def test_truncated_file_is_wrong_without_hashing(hub, dest):
    fetch(dest)
    os.truncate(dest / A, 1000)
    seen = Seen()
    with pytest.raises(CheckpointError, match=A):
        check(dest, rehash=False, seen=seen)
    assert seen.bytes["check"] == 0


def test_repair_keeps_the_commit_that_was_fetched(hub, dest):
    fetch(dest)
    before = dict(hub.files)
    rot(dest / A)
    hub.revisions["main"] = "f00d" + "0" * 36
    hub.revisions["old"] = COMMIT
    plan = fetch(dest, rehash=True, repair=True)
    assert plan.commit == COMMIT
    assert on_disk(dest) == before
