"""``Figure``: a number with its unit and its origin, so that kinds of numbers are never mixed unseen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: computed: arithmetic on the model's config. vendor: published by a vendor. simulated: a model fitted to vendor
#: figures, or a simulation. measured: on hardware, with a record. assumed: an allowance nobody has measured.
Source = Literal["computed", "measured", "simulated", "vendor", "assumed"]

SOURCES: dict[str, str] = {
    "computed": "arithmetic on the model's config and the profile",
    "measured": "measured on hardware, with a record",
    "simulated": "predicted by a model fitted to vendor figures",
    "vendor": "published by a vendor",
    "assumed": "an allowance, not measured",
}


@dataclass(frozen=True)
class Figure:
    """One number of a plan."""

    name: str
    value: float
    unit: str
    source: Source
    note: str = ""
