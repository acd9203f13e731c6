"""Which figures of a step's learning are due for the ledger: each has a cadence of its own."""

from __future__ import annotations

from dataclasses import dataclass

from cosmati.train.config import RunConfig
from cosmati.train.direction_sketch import DirectionSketch


@dataclass(frozen=True, slots=True)
class DueDetails:
    """What is measured in a step.

    Attributes:
        norms: each microbatch's gradient norm by region.
        sketch: what sketches the directions of these gradients; None where they aren't due.
        update: the norm of the update by region.
        update_sketch: what sketches its direction; None where it isn't due.
        digests: digests of each region before and after the step.
        entropy: the entropy of what each region computes, by microbatch.
    """

    norms: bool = False
    sketch: DirectionSketch | None = None
    update: bool = False
    update_sketch: DirectionSketch | None = None
    digests: bool = False
    entropy: bool = False


NOTHING_DUE = DueDetails()


class DetailCadences:
    """Says what is due, by the cadences of a run's settings; one of 0 is never.

    Args:
        config: of the run.
        is_governed: it has a policy; updates are measured of such runs only.

    Attributes:
        need_microbatches: something was asked for that the short road of a plain run doesn't measure.
    """

    def __init__(self, config: RunConfig, *, is_governed: bool) -> None:
        self._config, self._is_governed = config, is_governed
        self._sketch = DirectionSketch(config.seed)
        self.need_microbatches = bool(config.digests_every or config.entropy_every)

    def due(self, step: int, *, is_offered: bool) -> DueDetails:
        """Return what is due in a step.

        Args:
            step: its number.
            is_offered: some of its rows may teach something.
        """

        def is_due(every: int) -> bool:
            return every > 0 and step % every == 0

        c = self._config
        directed, moves = is_due(c.direction_every), self._is_governed and is_offered
        update_directed = moves and is_due(c.update_direction_every)
        return DueDetails(
            norms=directed or is_due(c.details_every),  # A direction goes with its length.
            sketch=self._sketch if directed else None,
            update=update_directed or (moves and is_due(c.update_norm_every)),
            update_sketch=self._sketch if update_directed else None,
            digests=is_due(c.digests_every),
            entropy=is_due(c.entropy_every),
        )
