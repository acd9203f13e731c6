"""Quality bands: rows of one class told apart by something that was measured when their shards were written.

    bands:
      measure: readability          # what was measured, in words
      names: [low, middle, high]
      thresholds: [0.3, 0.7]        # low below 0.3, middle from 0.3 to below 0.7, high from 0.7
    floors:
      - {class: "licensed/**", band: middle}    # rows of lower bands are rejected, whatever the rules say

The thresholds are frozen: they are signed with the policy. A row's band is measured once, by `Bands.band_of`, and is
signed with its shard (`band` of `write_dataset`); it's never measured in training, nor by quantiles of what is at hand.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise
from typing import Annotated

from pydantic import Field, model_validator

from cosmati.routing.measures import is_measured
from cosmati.routing.selectors import Names, RegionName, Strict


class Bands(Strict):
    """The bands, from the lowest; the number of a shard's band counts from 0."""

    measure: Annotated[str, Field(min_length=1)]
    names: Annotated[tuple[RegionName, ...], Field(min_length=2, max_length=1 << 16)]
    thresholds: tuple[Annotated[float, Field(strict=True, allow_inf_nan=False)], ...]

    @model_validator(mode="after")
    def _in_order(self) -> Bands:
        if len(set(self.names)) < len(self.names):
            msg = "a band is named twice"
            raise ValueError(msg)
        if len(self.thresholds) != len(self.names) - 1:
            wanted = len(self.names) - 1
            msg = f"{len(self.names)} bands need {wanted} thresholds between them, not {len(self.thresholds)}"
            raise ValueError(msg)
        if any(low >= high for low, high in pairwise(self.thresholds)):
            msg = "thresholds go up from band to band"
            raise ValueError(msg)
        return self

    def band_of(self, value: float) -> int:
        """Return the number of the band that a measured value is in.

        Raises:
            ValueError: it's no number.
        """
        if math.isnan(value):
            msg = f"What was measured ({self.measure}) is no number. Leave the row out, or measure it again."
            raise ValueError(msg)
        return bisect_right(self.thresholds, value)

    def read(self, value: object) -> int:
        """Return the number of the band that a field of a row says: by a band's name, or by what was measured.

        Raises:
            ValueError: it's neither, or it isn't finite.
        """
        if isinstance(value, str) and value in self.names:
            return self.names.index(value)
        if is_measured(value):
            return self.band_of(float(value))
        raise ValueError(f"{value!r:.60} is neither a finite number nor one of the bands {', '.join(self.names)}")


class Floor(Strict):
    """The lowest band of which rows of some classes are admitted at all."""

    classes: Annotated[Names, Field(alias="class", min_length=1)]
    band: RegionName
