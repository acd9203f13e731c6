"""The facts of a study: arms, their runs at several budgets and seeds, and what the comparison rests on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from cosmati.errors import RunError
from cosmati.records.encoding import decode_record, encode_record

STUDY_VERSION = 1


@dataclass(frozen=True)
class EvaluationPoint:
    """One evaluation of a run.

    Attributes:
        step: Optimizer steps done.
        seconds: Training time so far, in seconds. Time spent in evaluation isn't counted.
        quality: The study's quality measure. A run that diverged has a non-finite one.
        rows: Rows trained on so far.
        tokens: Tokens trained on so far, 0 where the task has none.
        flops: Floating point operations so far, 0 where they weren't counted.
    """

    step: int
    seconds: float
    quality: float
    rows: int = 0
    tokens: int = 0
    flops: float = 0.0


@dataclass(frozen=True)
class StudyRun:
    """One run of a study: its arm, its budget as a share of the full budget, its seed and what it reached.

    `seconds_by_part` has the run's wall clock by part, evaluation included; `final` is the point that counts.
    """

    arm: str
    budget: float
    seed: int
    run_id: str
    points: tuple[EvaluationPoint, ...]
    final: EvaluationPoint
    seconds_by_part: Mapping[str, float]


@dataclass(frozen=True)
class ArmRecord:
    """One way of training. `methods` names what it adds to the baseline."""

    name: str
    description: str
    recipe_text: str
    methods: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChecklistItem:
    """One demand on a strong baseline, whether it was met, and how that is known."""

    name: str
    met: bool
    note: str


@dataclass(frozen=True, kw_only=True)
class StudyRecord:
    """A whole study.

    Attributes:
        name: Name of the study.
        task: What is learnt from what, in words.
        quality_name: Name of the quality measure, such as `accuracy`.
        higher_is_better: Whether a higher quality is the better one.
        unit: Unit of the quality, empty for a plain number.
        baseline_arm: Name of the arm that the others are compared with.
        arms: All arms, the baseline among them.
        runs: All finished runs.
        checklist: What makes the baseline a strong one.
        hardware: What all runs ran on, in words.
        price_per_hour: Price of that hardware, None where it isn't known.
        command: The command that made the study.
        notes: Whatever a reader must know besides.
        version: Version of this record's form.
    """

    version: int = STUDY_VERSION
    name: str
    task: str
    quality_name: str
    higher_is_better: bool
    unit: str
    baseline_arm: str
    arms: tuple[ArmRecord, ...]
    runs: tuple[StudyRun, ...]
    checklist: tuple[ChecklistItem, ...]
    hardware: str
    price_per_hour: float | None
    command: str
    notes: str

    def __post_init__(self) -> None:
        """Refuse a study whose runs and arms don't fit together."""
        names = [arm.name for arm in self.arms]
        keys = [(run.arm, run.budget, run.seed) for run in self.runs]
        unknown = sorted({name for name, _, _ in keys} | {self.baseline_arm}, key=str)
        unknown = [name for name in unknown if name not in names]
        if unknown or len(set(names)) != len(names) or len(set(keys)) != len(keys):
            raise RunError(
                f"Study {self.name!r} doesn't fit together: arms {names}, unknown {unknown}, {len(keys)} "
                f"runs with {len(set(keys))} different keys. Name each arm once, keep one run for each key."
            )

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return encode_record(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a record from JSON text; `from_json(to_json(x)) == x`.

        Raises:
            RunError: not JSON, another version, or other fields or types than this version's.
        """
        return decode_record(cls, text, version=STUDY_VERSION)
