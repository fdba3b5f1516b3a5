"""Every form of statistics reads back to the counts it was made from; damaged and hostile ones are named."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from deepinfer_engine.eplb import plan as plans
from deepinfer_engine.eplb.interchange import folded, read_statistics
from deepinfer_engine.errors import ArtefactError, UsageError

COUNTS = np.random.default_rng(4).integers(0, 50, (5, 2, 6))
SLOTS = np.array([[[0, 1, 2, 3], [4, 5, 0, 1]], [[5, 4, 3, 2], [1, 0, 5, 5]]])


def plan() -> plans.ExpertPlan:
    return plans.ExpertPlan(0, 6, SLOTS, (7, 8), "test", (None, None), plans.Digests("cfg", "wts", ""))


def physical() -> np.ndarray:
    """COUNTS as if the first replica of each expert took one token more than half."""
    out = np.zeros((5, 2, 8), np.int64)
    for k, row in enumerate(SLOTS.reshape(2, 8)):
        for e in range(6):
            at = np.nonzero(row == e)[0]
            left = COUNTS[:, k, e].copy()
            for n, p in enumerate(at):
                out[:, k, p] = left if n == len(at) - 1 else (left + 1) // 2
                left = left - out[:, k, p]
    return out


def test_arrays(tmp_path):
    np.save(tmp_path / "c.npy", COUNTS)
    s, notes = read_statistics(tmp_path / "c.npy")
    assert (s.counts_MLE == COUNTS).all() and notes == ()
    np.save(tmp_path / "t.npy", COUNTS.sum(axis=0))
    s, notes = read_statistics(tmp_path / "t.npy")
    assert (
        s.counts_MLE.shape == (1, 2, 6) and (s.counts_MLE[0] == COUNTS.sum(axis=0)).all() and "totals only" in notes[0]
    )


def test_physical_counts_with_the_plan_they_were_recorded_under(tmp_path):
    np.save(tmp_path / "c.npy", physical())
    s, _ = read_statistics(tmp_path / "c.npy", recorded_under=plan())
    assert (s.counts_MLE == COUNTS).all() and s.layer_ids == (7, 8) and s.config_digest == "cfg" and s.ep == 2
    np.savez(tmp_path / "c.npz", counts=physical(), physical_to_logical=SLOTS.reshape(2, 8))
    assert (read_statistics(tmp_path / "c.npz")[0].counts_MLE == COUNTS).all()
    with pytest.raises(UsageError, match="carries its own"):
        read_statistics(tmp_path / "c.npz", recorded_under=plan())


@pytest.mark.parametrize(
    ("counts", "slots", "text"),
    [
        (np.ones((1, 2, 7), int), SLOTS.reshape(2, 8), "\\[2, 7\\] layers x slots, the plan .* has \\[2, 8\\]"),
        (np.ones((1, 1, 3), int), np.array([[0, 1, -1]]), "slot 2 is empty in the plan but has tokens"),
        (np.ones((1, 1, 3), int), np.array([[0, 2, 0]]), "some of the 3 experts have no slot"),
        (np.ones((1, 1, 2), int), np.array([[0, -3]]), "slot map holds experts -3..0"),
    ],
)
def test_slot_maps_that_cannot_be_right(counts, slots, text):
    with pytest.raises(ArtefactError, match=text):
        folded(counts, slots, "counts")


def test_sglang_statistics_dump(tmp_path):
    path = tmp_path / "expert_distribution_recorder_1.pt"
    torch.save(
        {"rank": 0, "logical_count": torch.from_numpy(COUNTS).int(), "average_utilization_rate_over_window": None}, path
    )
    s, notes = read_statistics(path)
    assert (s.counts_MLE == COUNTS).all() and not s.ordered and "ring buffer" in notes[0]
    (tmp_path / "init.json").write_text(json.dumps({"logical_count": COUNTS.sum(axis=0).tolist()}))
    assert (read_statistics(tmp_path / "init.json")[0].counts_MLE[0] == COUNTS.sum(axis=0)).all()


def records(rank: int, share: np.ndarray) -> dict:
    return {
        "records": [
            {
                "forward_pass_id": 100 - m,
                "rank": rank,
                "gatherer_key": "primary",
                "global_physical_count": torch.from_numpy(share[m]),
            }
            for m in reversed(range(5))
        ],
        "last_physical_to_logical_map": torch.tensor(SLOTS.reshape(2, 8).tolist()),
    }


def test_sglang_per_pass_records_of_all_ranks(tmp_path):
    share = physical() // 3
    torch.save(records(0, share), tmp_path / "r_0.pt")
    torch.save(records(1, physical() - share), tmp_path / "r_1.pt")
    s, notes = read_statistics(tmp_path)
    assert (s.counts_MLE == COUNTS[::-1]).all() and "last slot map" in notes[0]
    s, notes = read_statistics(tmp_path, recorded_under=plan())
    assert (s.counts_MLE == COUNTS[::-1]).all() and s.layer_ids == (7, 8) and notes == ()
    other = records(1, share) | {"last_physical_to_logical_map": torch.from_numpy(SLOTS[::-1].reshape(2, 8).copy())}
    torch.save(other, tmp_path / "r_1.pt")
    with pytest.raises(ArtefactError, match="slot map differs"):
        read_statistics(tmp_path)


def test_deepseek_tensor(tmp_path):
    torch.save(torch.from_numpy(COUNTS.sum(axis=0)), tmp_path / "w.pt")
    for kind in ("deepseek", "auto"):
        s, notes = read_statistics(tmp_path / "w.pt", kind)
        assert (s.counts_MLE[0] == COUNTS.sum(axis=0)).all() and "totals only" in notes[-1]


def trtllm(folder, experts: int = 6, drop: str = ""):
    (folder / "meta_info.json").write_text(json.dumps({"num_experts": experts, "num_experts_per_token": 2}))
    first = COUNTS // 2
    for rank, part in enumerate((first, COUNTS - first)):
        cells = {f"{m + 10}_{k + 3}": part[m, k].astype(np.int32) for m in range(5) for k in range(2)}
        save_file({key: v for key, v in cells.items() if key != drop}, folder / f"rank{rank}.safetensors")
    save_file({"0_0": np.zeros(4, np.int32)}, folder / "rank0_raw.safetensors")


def test_tensorrt_llm_folder(tmp_path):
    trtllm(tmp_path)
    s, notes = read_statistics(tmp_path)
    assert (s.counts_MLE == COUNTS).all() and s.layer_ids == (3, 4) and s.top_k == 2 and notes == ()


@pytest.mark.parametrize(
    ("experts", "drop", "text"),
    [
        (7, "", "shape \\[6\\], expected \\[7\\]"),
        (6, "11_4", "iteration 11 has no layer 4"),
        (0, "", "num_experts is 0"),
    ],
)
def test_tensorrt_llm_folder_that_is_incomplete(tmp_path, experts, drop, text):
    trtllm(tmp_path, experts, drop)
    with pytest.raises(ArtefactError, match=text):
        read_statistics(tmp_path)


def test_damaged_safetensors_header(tmp_path):
    trtllm(tmp_path)
    (tmp_path / "rank0.safetensors").write_bytes((2**40).to_bytes(8, "little") + b"{}")
    with pytest.raises(ArtefactError, match="damaged"):
        read_statistics(tmp_path)


class Evil:
    def __reduce__(self):
        return (print, ("this must never run",))


def test_pickles_are_never_run(tmp_path, capsys, recwarn):
    path = tmp_path / "x.pt"
    torch.save({"logical_count": Evil()}, path)
    with pytest.raises(ArtefactError, match="a pickle"):
        read_statistics(path)
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ArtefactError):
        read_statistics(path)
    assert "never run" not in capsys.readouterr().out and not recwarn.list


def test_views_that_claim_more_than_the_file_holds(tmp_path):
    torch.save({"logical_count": torch.ones(1, dtype=torch.int32).expand(10**9, 1).unsqueeze(1)}, tmp_path / "x.pt")
    with pytest.raises(ArtefactError, match="1000000000 values"):
        read_statistics(tmp_path / "x.pt")


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\x80\x02}q\x00", b"junk" * 100])
def test_damaged_torch_files(tmp_path, data):
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(ArtefactError, match=r"x\.pt"):
        read_statistics(tmp_path / "x.pt")


def test_other_content_says_what_was_expected(tmp_path):
    torch.save({"weights": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(ArtefactError, match="keys \\['weights'\\], expected logical_count or records"):
        read_statistics(tmp_path / "x.pt")
    torch.save({"logical_count": torch.ones(2, 2)}, tmp_path / "y.pt")
    with pytest.raises(ArtefactError, match="expected one tensor"):
        read_statistics(tmp_path / "y.pt", "deepseek")
    (tmp_path / "z.csv").write_text("1,2")
    with pytest.raises(UsageError, match=r"cannot tell what a \.csv file is"):
        read_statistics(tmp_path / "z.csv")
    with pytest.raises(UsageError, match="does not exist"):
        read_statistics(tmp_path / "absent.npz")
