"""One fetch from beginning to end: what the destination has, what it lacks, and the steps that bring it there.

``Job.survey`` decides (no network beyond listing and metadata, nothing written), the other steps execute.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from deepinfer_engine.config.model_v4 import parse_any_config
from deepinfer_engine.config.strict_json import parse_json, printable
from deepinfer_engine.errors import ArtefactError, CapacityError, CheckpointError, NotReadyError, UsageError
from deepinfer_engine.weights.fetch.files import STATE_DIR, Content, RemoteFile, hash_bytes, hash_file, local_path
from deepinfer_engine.weights.fetch.hub import MAX_BODY_BYTES, Hub, Limits, mismatch
from deepinfer_engine.weights.fetch.manifest import Manifest, load_manifest
from deepinfer_engine.weights.fetch.partial import finished_ranges, total
from deepinfer_engine.weights.fetch.progress import Progress
from deepinfer_engine.weights.fetch.selection import Selection, Share, shard_shares
from deepinfer_engine.weights.fetch.transfer import Transfer, disk_error
from deepinfer_engine.weights.plan import tensor_plan
from deepinfer_engine.weights.validate import INDEX_FILE, SINGLE_FILE

CONFIG_FILE = "config.json"

#: Files hashed at once when they are on disk: SHA-256 takes a core per 1 to 2 GB/s, a fast disk gives several.
_HASHERS = 4

#: checked: has its stamp. unchecked: right size, to be hashed. partial: begun. outdated: ours, of another commit.
#: wrong: something else under this name, replaced only by a repair. fetched: brought by this job.
State = Literal["checked", "unchecked", "partial", "missing", "outdated", "wrong", "fetched"]


@dataclass(frozen=True)
class Item:
    """One wanted file. ``needed_bytes`` is what the selected rank reads of a shard (None without a rank)."""

    file: RemoteFile
    groups: tuple[str, ...]
    needed_bytes: int | None
    state: State
    kept_bytes: int

    @property
    def fetch_bytes(self) -> int:
        """Bytes that still have to come over the network."""
        return 0 if self.state in ("checked", "unchecked", "fetched") else self.file.size - self.kept_bytes


@dataclass(frozen=True)
class FetchPlan:
    """Every wanted file of a commit and its state in the destination."""

    repo: str
    revision: str
    commit: str
    dest: Path
    selection: Selection
    items: tuple[Item, ...]
    free_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(i.file.size for i in self.items)

    @property
    def fetch_bytes(self) -> int:
        return sum(i.fetch_bytes for i in self.items)

    def paths(self, *states: State) -> list[str]:
        return [i.file.path for i in self.items if i.state in states]


class Job:
    """A fetch of ``repo`` into ``dest``. ``revision`` None means the main branch, or, for a check of what is there
    (``pinned``) and offline, the commit that was fetched; the same holds for a selection of None.
    """

    def __init__(self, repo: str, dest: Path, progress: Progress, *, revision: str | None = None,
                 selection: Selection | None = None, limits: Limits | None = None, pinned: bool = False):  # fmt: skip
        self._progress = progress
        self._hub = Hub(repo, limits or Limits(), progress.note)
        self.offline = self._hub.offline
        self._dest, self._revision, self._selection = dest.absolute(), revision, selection
        self._pinned = pinned or self.offline
        self._ready: dict[str, bytes] = {}
        self._manifest: Manifest | None = None
        self._shares: dict[str, Share] = {}
        self._wanted: list[RemoteFile] = []
        self._remembers = True
        self.plan: FetchPlan | None = None

    # ------------------------------------------------------------------- survey

    def survey(self) -> FetchPlan:
        """List the commit, select, and look at sizes, stamps and partial files; nothing is hashed or written.

        The hub is asked the first time only; a second survey, under the lock, looks at the destination again.
        """
        if self._dest.exists() and not self._dest.is_dir():
            raise UsageError(f"{self._dest}: not a directory", hint="give a directory to --dest")
        try:
            return self._survey()
        except OSError as exc:
            raise NotReadyError(f"{exc.filename}: cannot be read: {exc.strerror}",
                                hint="check the permissions of --dest, or choose another") from None  # fmt: skip

    def _survey(self) -> FetchPlan:
        old = load_manifest(self._dest)
        if old is not None and old.repo != self._hub.repo:
            raise UsageError(f"{self._dest} holds {printable(old.repo)}, not {self._hub.repo}",
                             hint="give another directory to --dest")  # fmt: skip
        if self._manifest is None:
            self._manifest = self._listed(old)
            if self._selection is None:
                self._selection = old.selection if old is not None and self._pinned else Selection()
            self._shares = self._select(self._manifest, self._selection)
            self._wanted = [f for f in self._manifest.files if self._wants(f, self._selection)]
            self._warn_of_strangers(old, self._manifest)
        assert self._selection is not None
        manifest = self._manifest
        if old is not None:
            manifest.stamps = dict(old.stamps)
        manifest.selection = _union(old.selection, self._selection) if old is not None else self._selection
        items = tuple(self._item(f, self._selection) for f in self._wanted)
        self.plan = FetchPlan(manifest.repo, manifest.revision, manifest.commit, self._dest, self._selection, items,
                              _free_bytes(self._dest))  # fmt: skip
        return self.plan

    def _listed(self, old: Manifest | None) -> Manifest:
        """The listing to go by: the hub's, or the one remembered when that is what was asked for."""
        wanted = self._revision
        if old is not None:
            same = wanted in (old.revision, old.commit) or wanted is None
            if wanted == old.commit or (self._pinned and same):
                return replace(old, stamps=dict(old.stamps))
        if self.offline:
            if old is None:
                raise NotReadyError(f"offline, and {self._dest} remembers no fetch", hint="unset HF_HUB_OFFLINE")
            raise NotReadyError(f"offline, and {self._dest} holds commit {old.commit[:12]}, not {wanted!r}",
                                hint="unset HF_HUB_OFFLINE, or leave out --revision")  # fmt: skip
        revision = wanted or "main"
        commit = revision if re.fullmatch(r"[0-9a-f]{40}", revision) else self._hub.resolve(revision)
        if old is not None and commit != old.commit:
            self._progress.note(f"{self._dest} holds commit {old.commit[:12]}, {revision} is now {commit[:12]}")
        elif old is not None:
            return Manifest(old.repo, revision, commit, old.files, old.selection, dict(old.stamps))
        stamps = dict(old.stamps) if old is not None else {}
        return Manifest(self._hub.repo, revision, commit, self._hub.listing(commit), Selection(), stamps)

    def _select(self, manifest: Manifest, selection: Selection) -> dict[str, Share]:
        """What the selection needs of each shard; empty where everything is wanted and the groups are not known."""
        files = {f.path: f for f in manifest.files}
        where = f"{manifest.repo} at {manifest.commit[:12]}"
        weights = next((f for f in (INDEX_FILE, SINGLE_FILE) if f in files), None)
        if CONFIG_FILE not in files or weights is None:
            text = f"{where} holds no {CONFIG_FILE if CONFIG_FILE not in files else INDEX_FILE}"
            if not selection.everything:
                raise ArtefactError(text, hint="leave out --groups, --ep and --rank to fetch it as it is")
            self._progress.note(f"groups are not known: {text}")
            return {}
        raw = self._metadata(files[CONFIG_FILE], selection)
        index = self._metadata(files[INDEX_FILE], selection) if weights == INDEX_FILE else {}
        if raw is None or index is None:
            return {}
        try:
            config = parse_any_config(raw, where=CONFIG_FILE)
        except ArtefactError as exc:
            if not selection.everything:
                raise
            self._progress.note(f"groups are not known: {exc.message}")
            return {}
        weight_map = _weight_map(index) if weights == INDEX_FILE else dict.fromkeys(tensor_plan(config), SINGLE_FILE)
        absent = sorted(set(weight_map.values()) - set(files))
        if absent:
            raise CheckpointError(where, [f"the index names {printable(f)}, which is not in the repository"
                                          for f in absent])  # fmt: skip
        return shard_shares(config, weight_map, selection, where)

    def _metadata(self, file: RemoteFile, selection: Selection) -> dict[str, Any] | None:
        """A JSON object of the commit: from the destination when it is there unchanged, otherwise from the hub.

        None when the hub is not to be asked and the object is needed for labels only.
        """
        if file.size > MAX_BODY_BYTES:
            raise ArtefactError(f"{file.path}: {file.size} bytes, a metadata file has at most {MAX_BODY_BYTES}",
                                hint="the repository is damaged")  # fmt: skip
        local = local_path(self._dest, file.path)
        data = local.read_bytes() if local.is_file() and local.stat().st_size == file.size else None
        if data is None or not hash_bytes(data).matches(file.digest):
            if self._pinned and selection.everything:
                return None
            if self.offline:
                raise NotReadyError(f"offline, and {local} is missing or changed", hint="unset HF_HUB_OFFLINE")
            data = self._ready[file.path] = self._hub.small(self._manifest_now().commit, file)
        try:
            value = parse_json(data)
        except ValueError as exc:
            raise ArtefactError(f"{file.path}: not valid JSON ({exc})", hint="the repository is damaged") from None
        if not isinstance(value, dict):
            raise ArtefactError(f"{file.path}: expected a JSON object, found {type(value).__name__}",
                                hint="the repository is damaged")  # fmt: skip
        return value

    def _wants(self, file: RemoteFile, selection: Selection) -> bool:
        if selection.everything:
            return True
        if file.path in self._shares:
            return self._shares[file.path].needed_bytes > 0
        if file.path.endswith(".safetensors"):
            self._progress.note(f"{file.path} is not named by the index and is left out")
            return False
        return True

    def _warn_of_strangers(self, old: Manifest | None, manifest: Manifest) -> None:
        """Files of an earlier selection that are of another commit would make a mixed checkpoint."""
        if old is None or old.commit == manifest.commit:
            return
        wanted = {f.path for f in self._wanted}
        listed = {f.path: f.digest for f in manifest.files}
        stale = [p for p, s in old.stamps.items() if p not in wanted and not s.matches(listed.get(p, ""))
                 and (self._dest / p).exists()]  # fmt: skip
        if stale:
            self._progress.note(f"{len(stale)} files outside this selection are of commit {old.commit[:12]}: "
                                f"{', '.join(map(printable, stale[:5]))}{' …' if len(stale) > 5 else ''}")  # fmt: skip

    def _item(self, file: RemoteFile, selection: Selection) -> Item:
        share = self._shares.get(file.path)
        groups = share.groups if share is not None else ()
        needed = share.needed_bytes if share is not None and selection.ep is not None else None
        kept = total(finished_ranges(self._dest / STATE_DIR, file))
        return Item(file, groups, needed, self._state(file, kept), kept)

    def _state(self, file: RemoteFile, kept: int) -> State:
        path = local_path(self._dest, file.path)
        try:
            status = path.stat()
        except FileNotFoundError:
            return "partial" if kept else "missing"
        if not stat.S_ISREG(status.st_mode):
            raise ArtefactError(f"{path}: not a regular file", hint="remove it, or choose another --dest")
        stamp = self._manifest_now().stamps.get(file.path)
        if stamp is not None and stamp.holds(path):
            return "checked" if stamp.matches(file.digest) else "outdated"
        sizes = {file.size, stamp.size if stamp is not None else file.size}
        return "unchecked" if status.st_size in sizes else "wrong"

    # -------------------------------------------------------------------- steps

    def check(self, *, rehash: bool) -> FetchPlan:
        """Hash files that have no stamp (with ``rehash`` every file that is there) and remember the result."""
        plan, manifest = self._plan_now(), self._manifest_now()
        states: set[State] = {"unchecked", "checked"} if rehash else {"unchecked"}
        todo = {i.file.path for i in plan.items if i.state in states}
        self._progress.expect("check", sum(i.file.size for i in plan.items if i.file.path in todo))
        stop = threading.Event()
        pool = ThreadPoolExecutor(_HASHERS, thread_name_prefix="check")
        items: list[Item] = []
        try:
            hashed = {i.file.path: pool.submit(self._hash, i.file, stop) for i in plan.items if i.file.path in todo}
            for item in plan.items:
                content = hashed[item.file.path].result() if item.file.path in hashed else None
                items.append(self._judged(item, content) if content is not None else item)
                if content is not None and self._remembers:
                    self._save(manifest)  # one by one: hashing all of it takes minutes
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
        self.plan = replace(plan, items=tuple(items))
        return self.plan

    def _hash(self, file: RemoteFile, stop: threading.Event) -> Content | None:
        path = self._dest / file.path
        self._progress.begin("check", file.path, file.size, 0)
        try:
            content = hash_file(path, file.digest, lambda n: self._progress.advance("check", file.path, n), stop.is_set)
        except OSError as exc:
            raise NotReadyError(f"{path}: cannot be read: {exc.strerror}", hint="check the disk") from None
        self._progress.end("check", file.path)
        return content

    def _judged(self, item: Item, content: Content) -> Item:
        """The item as its content says; content that was right for another commit is ours and merely outdated."""
        path, manifest = item.file.path, self._manifest_now()
        right = content.matches(item.file.digest)
        old = manifest.stamps.pop(path, None)
        if right or (old is not None and old.sha256 == content.sha256):
            manifest.stamp(path, self._dest / path, content)
            return replace(item, state="checked" if right else "outdated")
        return replace(item, state="wrong")

    def require_right(self, *states: State) -> None:
        """Raise ``CheckpointError`` (exit 4) naming the files that are in one of ``states``."""
        plan = self._plan_now()
        problems = [f"{i.file.path}: not the content that the commit lists ({i.file.size} bytes, {i.file.digest})"
                    for i in plan.items if i.state in states]  # fmt: skip
        if problems:
            raise CheckpointError(str(plan.dest), problems, hint="add --repair to fetch these files again")

    def require_complete(self) -> None:
        """Raise for wrong files (exit 4), then for missing ones (exit 3), each by name."""
        self.require_right("wrong", "outdated")
        plan = self._plan_now()
        missing = plan.paths("missing", "partial")
        if missing:
            listed = "".join(f"\n  {p}" for p in missing[:20]) + (f"\n  … and {len(missing) - 20} more"
                                                                  if len(missing) > 20 else "")  # fmt: skip
            step = "unset HF_HUB_OFFLINE and run it again" if self.offline else "run it again without --verify"
            raise NotReadyError(f"{plan.dest}: {len(missing)} of {len(plan.items)} files are missing, "
                                f"{plan.fetch_bytes} bytes to fetch{listed}", hint=step)  # fmt: skip

    def require_space(self) -> None:
        """Raise ``CapacityError`` with need and have when what is to be fetched does not fit on the disk."""
        plan = self._plan_now()
        if plan.fetch_bytes > plan.free_bytes:
            raise CapacityError(
                f"{plan.dest}: need {plan.fetch_bytes} bytes ({plan.fetch_bytes / 1e9:.1f} GB), "
                f"have {plan.free_bytes} ({plan.free_bytes / 1e9:.1f} GB) free",
                hint="free some space, choose another --dest, or fetch less with --groups",
            )

    def fetch(self) -> FetchPlan:
        """Bring every file that is not there; raises exit 4 after the others are done when one had a wrong hash."""
        plan, manifest = self._plan_now(), self._manifest_now()
        todo = [i.file for i in plan.items if i.state not in ("checked", "unchecked")]
        self._save(manifest, required=True)
        for file in todo:
            local_path(self._dest, file.path)  # links on the way are refused before the first byte
        # small files first: what they say about the shards is then there for other tools
        todo.sort(key=lambda f: (f.path.endswith(".safetensors"), f.path))
        bad = Transfer(self._hub, self._dest, manifest, self._progress).run(todo, self._ready)
        fetched = {f.path for f in todo} - set(bad)
        self.plan = replace(plan, items=tuple(replace(i, state="fetched", kept_bytes=i.file.size)
                                              if i.file.path in fetched else i for i in plan.items))  # fmt: skip
        if bad:
            raise mismatch(list(bad))
        return self.plan

    def _save(self, manifest: Manifest, *, required: bool = False) -> None:
        try:
            manifest.save(self._dest)
        except OSError as exc:
            if required:
                raise disk_error(exc, "manifest", self._dest) from None
            self._remembers = False
            self._progress.note(f"the result is not remembered: {self._dest / STATE_DIR}: {exc.strerror}")

    def _plan_now(self) -> FetchPlan:
        assert self.plan is not None, "survey comes first"
        return self.plan

    def _manifest_now(self) -> Manifest:
        assert self._manifest is not None, "survey comes first"
        return self._manifest


def _weight_map(index: dict[str, Any]) -> dict[str, str]:
    raw = index.get("weight_map")
    if not isinstance(raw, dict) or not raw or not all(isinstance(f, str) for f in raw.values()):
        raise ArtefactError(f"{INDEX_FILE}: weight_map does not map tensors to files", hint="the repository is damaged")
    return raw


def _union(old: Selection, new: Selection) -> Selection:
    """What the destination holds after both, where one selection can say it; otherwise the new one."""
    if (old.ep, old.rank) != (new.ep, new.rank):
        return old if old.everything else new
    if old.groups is None or new.groups is None:
        return replace(new, groups=None)
    return replace(new, groups=tuple(dict.fromkeys((*old.groups, *new.groups))))


def _free_bytes(dest: Path) -> int:
    """Room on the disk where ``dest`` is or will be."""
    while not os.path.lexists(dest):
        dest = dest.parent
    return shutil.disk_usage(dest).free
