"""Which shards groups and ranks need, and the arithmetic of partial files, against brute force."""

from __future__ import annotations

import copy
import itertools
import json
import re
from functools import cache
from pathlib import Path

import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_engine.config.model import parse_model_config
from deepinfer_engine.errors import ArtefactError, CheckpointError, UsageError
from deepinfer_engine.weights.fetch import partial
from deepinfer_engine.weights.fetch.files import RemoteFile, check_listing, escape
from deepinfer_engine.weights.fetch.job import Job
from deepinfer_engine.weights.fetch.lock import destination_lock
from deepinfer_engine.weights.fetch.selection import Selection, shard_shares
from deepinfer_engine.weights.plan import tensor_plan
from deepinfer_engine.weights.read_plan import owned_experts
from tests.stub_hub import REPO, StubHub

RAW = json.loads((Path(__file__).resolve().parents[2] / "vectors" / "v41-flash-config.json").read_text())


def small_raw() -> dict:
    """The release with 16 experts (8 in the draft) instead of 384: 5,000 tensors instead of 96,085."""
    raw = copy.deepcopy(RAW)
    raw["text_config"] |= {"n_routed_experts": 16, "dspark_n_routed_experts": 8}
    return raw


def official_map(raw: dict) -> dict[str, str]:
    """One file per shard key, numbered as in the release."""
    plan = tensor_plan(parse_model_config(raw))
    keys = list(dict.fromkeys(s.shard for s in plan.values()))
    names = {key: f"model-{i:05d}-of-{len(keys):05d}.safetensors" for i, key in enumerate(keys, 1)}
    return {name: names[spec.shard] for name, spec in plan.items()}


@cache
def release_map() -> dict[str, str]:
    return official_map(RAW)


def split_map(raw: dict) -> dict[str, str]:
    """As above, but experts 4k to 4k + 3 of all layers lie in ``experts-k``."""
    return {
        name: f"experts-{int(m[1]) // 4}.safetensors" if (m := re.search(r"experts\.(\d+)\.", name)) else file
        for name, file in official_map(raw).items()
    }


def needed(raw: dict, weight_map: dict[str, str], **selection) -> dict[str, int]:
    config = parse_model_config(raw)
    shares = shard_shares(config, weight_map, Selection(**selection), "here")
    return {file: share.needed_bytes for file, share in shares.items() if share.needed_bytes}


@pytest.mark.parametrize(("experts", "ranks"), [(16, 4), (16, 5), (384, 64), (384, 72), (128, 192), (1, 3)])
def test_owner_is_the_floor_of_the_real_quotient_and_shares_are_even(experts, ranks):
    from fractions import Fraction

    owners = [r for r in range(ranks) for _ in owned_experts(experts, ranks, r)]
    assert owners == [int(Fraction(e) / Fraction(experts, ranks)) for e in range(experts)]
    sizes = [owners.count(r) for r in range(ranks)]
    assert max(sizes) - min(sizes) <= 1


def test_groups_of_the_release_need_the_published_shards():
    weight_map = release_map()
    number = lambda files: sorted(int(f[6:11]) for f in files)  # noqa: E731
    everything = needed(RAW, weight_map)
    assert number(everything) == list(range(1, 49))
    assert sum(everything.values()) == 510_286_023_000
    assert number(needed(RAW, weight_map, groups=("vision",))) == [1]
    assert number(needed(RAW, weight_map, groups=("backbone",))) == list(range(2, 44))
    assert number(needed(RAW, weight_map, groups=("draft",))) == [44, 45, 46]
    engram = needed(RAW, weight_map, groups=("engram",))
    assert number(engram) == [47, 48]
    assert list(engram.values()) == [101_535_150_272, 101_537_925_968]


@pytest.mark.parametrize(("ep", "published_gb"), [(8, 48.5), (16, 30.0)])
def test_rank_of_the_release_reads_the_published_bytes_from_every_shard(ep, published_gb):
    """All experts of a layer lie in one shard, so a rank saves no file, but most of the bytes it reads."""
    weight_map = release_map()
    reads = needed(RAW, weight_map, groups=("backbone", "draft", "vision"), ep=ep, rank=ep - 1)
    assert len(reads) == 46
    assert sum(reads.values()) / 1e9 == pytest.approx(published_gb, abs=0.4)


@pytest.mark.parametrize("ep", [4, 5])
def test_ranks_cover_every_tensor_and_share_only_what_is_no_expert(ep):
    raw = small_raw()
    weight_map, plan = split_map(raw), tensor_plan(parse_model_config(raw))
    total: dict[str, int] = {}
    for rank in range(ep):
        for file, nbytes in needed(raw, weight_map, ep=ep, rank=rank).items():
            total[file] = total.get(file, 0) + nbytes
    expected: dict[str, int] = {}
    for name, file in weight_map.items():
        times = 1 if ".experts." in name else ep
        expected[file] = expected.get(file, 0) + times * plan[name].nbytes
    assert total == expected


def test_rank_needs_only_the_files_with_its_experts():
    raw = small_raw()
    files = needed(raw, split_map(raw), ep=4, rank=2)
    # experts 8 to 11 of the backbone, and 4 and 5 of the draft's 8
    assert {f for f in files if f.startswith("experts")} == {"experts-1.safetensors", "experts-2.safetensors"}
    assert {f for f in needed(raw, split_map(raw), ep=4, rank=2, groups=("backbone",)) if f.startswith("experts")} == {
        "experts-2.safetensors"
    }


def test_index_that_lacks_or_adds_tensors_is_refused():
    raw = small_raw()
    weight_map = official_map(raw)
    del weight_map["layers.3.attn.wkv.scale"]
    weight_map["layers.3.attn.bonus"] = weight_map["norm.weight"]
    with pytest.raises(CheckpointError) as caught:
        needed(raw, weight_map)
    assert "missing tensor layers.3.attn.wkv.scale (backbone)" in caught.value.message
    assert "unexpected tensor layers.3.attn.bonus" in caught.value.message


def test_absent_group_is_legal_unless_it_is_asked_for_by_name():
    raw = small_raw()
    weight_map = {n: f for n, f in official_map(raw).items() if not n.startswith("mtp.")}
    assert len(needed(raw, weight_map)) == 45
    assert len(needed(raw, weight_map, groups=("backbone",))) == 42
    with pytest.raises(CheckpointError, match="draft"):
        needed(raw, weight_map, groups=("draft",))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"groups": ("body",)}, "no group 'body'"),
        ({"groups": ()}, "no group is named"),
        ({"ep": 8}, "both --ep and --rank"),
        ({"rank": 0}, "both --ep and --rank"),
        ({"ep": 0, "rank": 0}, "at least one rank"),
        ({"ep": 8, "rank": 8}, "expected 0 to 7"),
        ({"ep": 8, "rank": -1}, "expected 0 to 7"),
    ],
)
def test_selection_that_cannot_be_honoured_is_refused(options, text):
    with pytest.raises(UsageError, match=text):
        Selection(**options)


# ------------------------------------------------------------------ through the hub


class Quiet:
    def __init__(self):
        self.notes = []

    def expect(self, *args): ...
    def begin(self, *args): ...
    def advance(self, *args): ...
    def end(self, *args): ...

    def note(self, text):
        self.notes.append(text)


@pytest.fixture
def model(monkeypatch, tmp_path):
    raw = small_raw()
    files = {f: f.encode() for f in set(split_map(raw).values())}
    files["config.json"] = json.dumps(raw).encode()
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": split_map(raw)}).encode()
    files["tokenizer.json"] = b"{}"
    files["extra.safetensors"] = b"not in the index"
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with StubHub(files) as stub:
        monkeypatch.setattr(constants, "ENDPOINT", stub.url)
        yield stub


def run(dest: Path, **selection):
    progress = Quiet()
    job = Job(REPO, dest, progress, selection=Selection(**selection) if selection else None)
    job.survey()
    with destination_lock(dest, wait=False, note=print):
        job.survey()
        job.fetch()
    return progress, {str(p.relative_to(dest)) for p in dest.rglob("*") if p.is_file() and ".fetch" not in p.parts}


def test_only_the_needed_shards_are_fetched_and_metadata_once(model, tmp_path):
    progress, there = run(tmp_path / "d", groups=("draft",), ep=4, rank=3)
    numbered = {f"model-{i:05d}-of-00048.safetensors" for i in (44, 45, 46)}
    assert there == {
        *numbered,
        "experts-1.safetensors",
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
    }
    assert dict(model.sent) == {path: len(model.files[path]) for path in there}
    assert progress.notes == ["extra.safetensors is not named by the index and is left out"]


def test_later_group_is_added_and_remembered_with_the_first(model, tmp_path):
    dest = tmp_path / "d"
    run(dest, groups=("vision",))
    run(dest, groups=("draft",))
    checked = Job(REPO, dest, Quiet(), pinned=True)
    plan = checked.survey()
    assert plan.selection.groups == ("vision", "draft")
    assert {i.state for i in plan.items} == {"checked"}


def test_everything_needs_no_known_model(model, tmp_path):
    model.files["config.json"] = b'{"model_type": "llama"}'
    progress, there = run(tmp_path / "d")
    assert there == set(model.files)
    assert len(progress.notes) == 1 and progress.notes[0].startswith("groups are not known: config.json: model_type")
    with pytest.raises(ArtefactError, match="model_type"):
        Job(REPO, tmp_path / "e", Quiet(), selection=Selection(("draft",))).survey()


def test_index_that_names_an_absent_file_is_refused(model, tmp_path):
    del model.files["experts-3.safetensors"]
    with pytest.raises(CheckpointError, match=r"experts-3\.safetensors, which is not in the repository"):
        run(tmp_path / "d")


@pytest.mark.parametrize(
    "text", [b"{", b"[]", b'{"a": 1, "a": 2}', b'{"weight_map": [1]}', b'{"weight_map": {"a": 1}}']
)
def test_damaged_index_is_exit_4(model, tmp_path, text):
    model.files["model.safetensors.index.json"] = text
    with pytest.raises(ArtefactError, match=r"model\.safetensors\.index\.json") as caught:
        run(tmp_path / "d")
    assert caught.value.exit_code == 4


# ------------------------------------------------------------------- partial files

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda s: (s[0], min(64, s[0] + s[1]))))


@given(SPANS, st.integers(1, 70))
def test_gaps_and_kept_ranges_cover_a_file_exactly(spans, segment):
    kept = partial.merge(spans)
    have = {i for b, e in spans for i in range(b, e)}
    assert {i for b, e in kept for i in range(b, e)} == have
    assert all(one[1] < two[0] for one, two in itertools.pairwise(kept))
    pieces = partial.gaps(kept, 64, segment)
    assert all(0 < e - b <= segment for b, e in pieces)
    assert [i for b, e in pieces for i in range(b, e)] == [i for i in range(64) if i not in have]


FILE = RemoteFile("a/b.safetensors", 100, "sha256:" + "1" * 64)


def journal(folder: Path, *lines: bytes, file: RemoteFile = FILE) -> None:
    partial.part_path(folder, file).write_bytes(b"\0" * file.size)
    partial.journal_path(folder, file).write_bytes(b"".join(lines))


HEAD = f"{FILE.digest} 100\n".encode()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((HEAD, b"0 10\n", b"20 30\n", b"10 15\n"), [(0, 15), (20, 30)]),
        ((HEAD, b"0 10\n", b"20 3"), [(0, 10)]),  # torn
        ((HEAD, b"0 10\n", b"20 300\n", b"30 40\n"), [(0, 10)]),  # beyond the file: nothing after it is believed
        ((HEAD, b"0 10\n", b"\0\0\0\0\n", b"30 40\n"), [(0, 10)]),  # what a power cut leaves
        ((HEAD, b"10 10\n"), []),
        ((HEAD,), []),
        ((b"",), []),
        ((HEAD.replace(b"1111", b"2222"), b"0 10\n"), []),  # other content
        ((HEAD.replace(b" 100", b" 101"), b"0 10\n"), []),
    ],
)
def test_journal_is_believed_as_far_as_it_is_whole(tmp_path, lines, expected):
    journal(tmp_path, *lines)
    assert partial.finished_ranges(tmp_path, FILE) == expected


def test_journal_without_its_bytes_is_not_believed(tmp_path):
    journal(tmp_path, HEAD, b"0 10\n")
    partial.part_path(tmp_path, FILE).write_bytes(b"\0" * 99)
    assert partial.finished_ranges(tmp_path, FILE) == []
    partial.part_path(tmp_path, FILE).unlink()
    assert partial.finished_ranges(tmp_path, FILE) == []
    partial.Partial(tmp_path, FILE).close()
    assert partial.finished_ranges(tmp_path, FILE) == []


def test_reopened_journal_heals_a_torn_line(tmp_path):
    journal(tmp_path, HEAD, b"0 10\n", b"20 3")
    part = partial.Partial(tmp_path, FILE)
    part.commit(50, 60)
    part.close()
    assert partial.finished_ranges(tmp_path, FILE) == [(0, 10), (50, 60)]


@given(st.lists(st.text(alphabet="a%2F/", min_size=1, max_size=8), min_size=2, max_size=2, unique=True))
def test_escaped_names_are_one_to_one_and_flat(paths):
    assert escape(paths[0]) != escape(paths[1])
    assert "/" not in escape(paths[0])


def test_listing_is_sorted_and_complete():
    files = [RemoteFile(p, 1, "git-sha1:" + "0" * 40) for p in ("b", "a/c", "a/b")]
    assert [f.path for f in check_listing(files, "x")] == ["a/b", "a/c", "b"]
