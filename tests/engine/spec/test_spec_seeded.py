"""Where a seed can be honoured beside speculation, and the refusal where it cannot."""

from __future__ import annotations

import pytest

from deepinfer_engine.config.schema import Spec
from deepinfer_engine.errors import UsageError
from deepinfer_engine.spec.seeded import check_seed, keeps_seed
from deepinfer_engine.types import SamplingParams

SEEDED = SamplingParams(temperature=1.0, seed=7)


@pytest.mark.parametrize("verify", ["off", "fixed", "adaptive"])
@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_only_adaptive_rejection_refuses_a_seed(mode, verify):
    spec = Spec(mode=mode, verify=verify)
    check_seed(SamplingParams(temperature=1.0), spec, request="a")
    check_seed(SamplingParams(temperature=0.0, seed=7), spec, request="a")  # greedy draws nothing
    if (mode, verify) == ("rejection", "adaptive"):
        with pytest.raises(UsageError, match=r"'a': seed 7 .*rejection .*adaptive") as caught:
            check_seed(SEEDED, spec, request="a")
        assert caught.value.exit_code == 2 and "coupled" in (caught.value.hint or "")
    else:
        check_seed(SEEDED, spec, request="a")
    assert keeps_seed(SEEDED, spec) == (mode == "coupled" or verify == "off")
    assert keeps_seed(SamplingParams(temperature=0.0), spec)
