"""The facts of one finished run: the content of `run.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cosmati.records.encoding import FileRecord

RUN_VERSION = 1

CLOCK_FIELDS = ("step", "rows", "tokens", "seconds")
"""What lines of `steps.jsonl` and its kin say besides what was measured; no measure is called so."""
PAUSES = ("evaluation", "checkpoint")
"""Parts of a run's time in which it doesn't train."""
TIME_PARTS = ("data", "forward", "backward", "optimizer", "method", "ledger", "evaluation", "other")
"""The usual parts of a run's time, in the order in which a step goes through them."""


def training_seconds(seconds_by_part: Mapping[str, float]) -> float:
    """Return the seconds in which a run trained, of those of its parts."""
    # Not `fsum`, which raises where a sum of the largest numbers is infinite.
    return sum(seconds for name, seconds in seconds_by_part.items() if name not in PAUSES)


@dataclass(frozen=True)
class PlanLine:
    """One line of the printed plan: at which stage which method does what."""

    stage: str
    method: str
    does: str


@dataclass(frozen=True)
class GuaranteeRecord:
    """A promise of the run: whether it holds, and because of what it holds or is broken."""

    name: str
    holds: bool
    because: str


@dataclass(frozen=True, kw_only=True)
class RunRecord(FileRecord):
    """What a run was, what it promised and what came out of it.

    Attributes:
        run_id: Name of the run's folder in its store.
        recipe_name: Name of the recipe.
        recipe_text: The recipe as JSON text.
        digests: Hex digests by what they cover: `plan`, `model`, `data`, `policy`; `data_root` and `policy_root` are
            those of the authorities which have signed them, or `declared`. `artifact: LABEL` says in words whether a
            preparation artifact is signed or ungoverned, and its digest.
        environment: Package versions, device names and compile modes by name.
        plan: The plan's lines in the order in which they run.
        guarantees: Every guarantee, held or broken.
        seed: Seed of the run.
        num_microbatches: Microbatches a step (V).
        num_steps: Optimizer steps done.
        hardware: What the run ran on, in words.
        cost: Price of the run in the currency of the study's price, None where no price is known.
        seconds_by_part: Seconds of wall clock by part of the work (`TIME_PARTS`).
        outcome: `completed`, `stopped`, `diverged` or `failed`.
        started: ISO 8601 time.
        ended: ISO 8601 time, None while the run goes on.
        metrics: Final metrics by name.
        version: Version of this record's form.
    """

    version: int = RUN_VERSION
    run_id: str
    recipe_name: str
    recipe_text: str
    digests: Mapping[str, str]
    environment: Mapping[str, str]
    plan: tuple[PlanLine, ...]
    guarantees: tuple[GuaranteeRecord, ...]
    seed: int
    num_microbatches: int
    num_steps: int
    hardware: str
    cost: float | None
    seconds_by_part: Mapping[str, float]
    outcome: str
    started: str
    ended: str | None
    metrics: Mapping[str, float]
