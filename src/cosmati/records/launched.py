"""What a run says to the launcher that has begun it: where it is, how long, in how many microbatches a step."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

NOTE_VARIABLE = "COSMATI_LAUNCH_NOTE"
"""The environment's variable that names the file for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRun:
    """The run that an attempt trains.

    Attributes:
        folder: of the run, absolute.
        attempt: number of this start in the run's `attempts.jsonl`.
        num_microbatches: V, which the number of replicas of T ranks divides.
        num_steps: of the whole run, None where that isn't known ahead.
        tensor_parallel: T, how many ranks compute a microbatch together.
    """

    folder: str
    attempt: int
    num_microbatches: int
    num_steps: int | None
    tensor_parallel: int = 1

    def to_json(self) -> str:
        """Return it as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read it from JSON text."""
        return cls(**json.loads(text))
