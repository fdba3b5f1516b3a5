"""Workloads made in a test, from a recipe's text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_engine.bench.recipe import check_recipe
from deepinfer_engine.bench.workload import Workload, load_workload
from deepinfer_engine.config.yaml import parse_yaml

MakeWorkload = Callable[..., Workload]


@pytest.fixture
def workload_of(tmp_path: Path) -> MakeWorkload:
    """``workload_of("requests=3", …)``: a fixed workload of 8 + 4 tokens, two in flight, with overrides."""

    def make(*sets: str, load: str = "{kind: fixed, input_tokens: 8, output_tokens: 4}") -> Workload:
        text = (
            "schema_version: 1\nkind: workload\nname: test\ndescription: a test\nrequests: 6\n"
            f"load: {load}\narrivals: {{mode: closed, concurrency: 2}}\n"
        )
        return load_workload(check_recipe(parse_yaml(text, where="test.yaml"), tmp_path, sets))

    return make
