"""``deepinfer eplb-plan nano``: the statistics that are shipped with the embedded model."""

from __future__ import annotations

import json

from deepinfer_cli import main as cli
from deepinfer_engine.config.resources import model_dir
from deepinfer_engine.eplb.plan import read_plan


def test_nano_stands_for_the_shipped_statistics(tmp_path, monkeypatch, capsys):
    """The plan goes to the current folder, never into the installation."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["eplb-plan", "nano", "--loop", "numpy", "--format", "json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["plan"] == "nano.plan.json"
    assert read_plan(tmp_path / "nano.plan.json").digest() == value["plan_digest"]
    assert not list(model_dir("nano").glob("*.plan.json"))
