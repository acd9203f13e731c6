"""The facts of a study: arms, their runs at several budgets and seeds, and what the comparison rests on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from cosmati.errors import RunError
from cosmati.records.encoding import FileRecord
from cosmati.records.study_upgrades import refuse_nameless_profile, upgraded_study

STUDY_VERSION = 4
PROFILE_VERSION = 2
NUM_HEADLINES = 4
"""Most tests of a family of headlines."""
Setting = bool | int | float | str
_MAX_SECONDS = 1e11
"""Three thousand years."""


def settings_key(settings: Mapping[str, Setting]) -> str:
    """Return settings as one text, the same for equal ones in any order."""
    return json.dumps(dict(settings), sort_keys=True)


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
        cpu_seconds: Processor time of the training process so far, of all its threads, in seconds; evaluation isn't
            counted. 0 where it wasn't measured.
    """

    step: int
    seconds: float
    quality: float
    rows: int = 0
    tokens: int = 0
    flops: float = 0.0
    cpu_seconds: float = 0.0


@dataclass(frozen=True)
class StudyRun:
    """One run of a study: its arm, its budget as a share of the full budget, its seed and what it reached.

    `seconds_by_part` has the run's wall clock by part, evaluation included; `final` is the point that counts.
    `num_threads` is of the process that trained, 0 where it isn't known. `error` is what a run failed with, empty where
    it didn't: a failed run has no quality, as one that diverged has none.
    """

    arm: str
    budget: float
    seed: int
    run_id: str
    points: tuple[EvaluationPoint, ...]
    final: EvaluationPoint
    seconds_by_part: Mapping[str, float]
    num_threads: int = 0
    error: str = ""


@dataclass(frozen=True)
class CostProfile:
    """What so many steps of an arm cost: a whole, short run, profiled alone, in turns with the other arms.

    Attributes:
        arm: Its name.
        turn: In which turn; all arms are profiled once in each.
        steps: Optimizer steps of the profiled run.
        seconds: Training time of these steps.
        evaluation_seconds: Time of one more evaluation when training had ended: inference as the arm is deployed.
        evaluated_rows: Rows of that evaluation, 0 where there was none.
        num_threads: Of the process that was profiled, 0 where it isn't known.
    """

    arm: str
    turn: int
    steps: int
    seconds: float
    evaluation_seconds: float = 0.0
    evaluated_rows: int = 0
    num_threads: int = 0


@dataclass(frozen=True, kw_only=True)
class ProfileRecord(FileRecord):
    """What the arms of a study cost on some hardware, profiled there without the study's runs.

    Attributes:
        study: Its name.
        hardware: In words.
        recipes: SHA-256 of each arm's recipe text, as hex, by the arm's name.
        costs: All profiles.
        version: Version of this record's form.
    """

    version: int = PROFILE_VERSION
    study: str
    hardware: str
    recipes: Mapping[str, str]
    costs: tuple[CostProfile, ...]

    upgraded = staticmethod(refuse_nameless_profile)


@dataclass(frozen=True)
class DimensionRecord:
    """One dimension of a search.

    Attributes:
        name: Of the setting.
        low: Lower end of a range, 0 where there are choices.
        high: Upper end.
        is_log: Whether points are even in its logarithm.
        choices: In order, where there's no range.
        widened: How many times an optimum at an edge widened it.
        ends_below: Whether there's nothing to search below the low end, or before the first choice.
        ends_above: The same of the high end and the last choice.
    """

    name: str
    low: float
    high: float
    is_log: bool
    choices: tuple[str, ...]
    widened: int
    ends_below: bool = False
    ends_above: bool = False


@dataclass(frozen=True)
class TrialRecord:
    """One run of a search.

    Attributes:
        point: Number of the point; its runs at larger budgets have the same one.
        settings: By name.
        is_known: Whether it's a setting that was known to be good, and not a drawn point.
        budget: Share of the full budget.
        seed: Of the run.
        quality: On the rows for selection; not finite where it diverged or failed.
        steps: Optimizer steps done.
        rows: Rows trained on.
        seconds: Training time.
        error: What it failed with; empty where it didn't.
    """

    point: int
    settings: Mapping[str, Setting]
    is_known: bool
    budget: float
    seed: int
    quality: float
    steps: int
    rows: int
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class SearchRecord:
    """How an arm's settings were found: all runs that it took, those of pruned points too.

    Attributes:
        dimensions: What was searched, as it was at the end.
        trials: All runs.
        chosen: Number of the chosen point.
        by_hand: About how many runs by hand, before the search and not among `trials`, found the settings that were
            known to it; 0 where nobody counted them.
        arm: Its name in the search, which needn't be its name in a study; empty in older records.
        evaluated_on: A sample of the rows that its runs were evaluated on, as `row_sample` draws it; empty where it
            isn't known.
    """

    dimensions: tuple[DimensionRecord, ...]
    trials: tuple[TrialRecord, ...]
    chosen: int
    by_hand: int = 0
    arm: str = ""
    evaluated_on: tuple[str, ...] = ()

    @property
    def num_settings(self) -> int:
        """Distinct settings that were run."""
        return len({settings_key(trial.settings) for trial in self.trials})

    @property
    def is_choice(self) -> bool:
        """Whether there was anything to choose from: two settings or more. Without that nothing was tuned."""
        return self.num_settings > 1

    @property
    def is_known(self) -> bool:
        """Whether the chosen settings were known before the search, and not found by it."""
        return any(trial.is_known for trial in self.trials if trial.point == self.chosen)


@dataclass(frozen=True)
class ArmRecord:
    """One way of training.

    Attributes:
        name: Of the arm.
        description: In words.
        recipe_text: All that says what it does.
        methods: What it adds to the baseline: methods, optimizers, schedules, options of the model.
        opponent: How strong it is as an opponent: `tuned` (searched as the arms are) or `plain` (a common public
            recipe, cited in `source`, of which model size and budget alone were changed). None says neither.
        source: Where a plain opponent's settings come from.
        search: How its settings were searched; None where they weren't, so that they're the baseline's.
    """

    name: str
    description: str
    recipe_text: str
    methods: tuple[str, ...] = ()
    opponent: str | None = None
    source: str = ""
    search: SearchRecord | None = None


@dataclass(frozen=True)
class Prediction:
    """A speed-up that was predicted before the runs: of `arm` over `opponent`, at least `at_least`, along `axis`."""

    arm: str
    opponent: str
    axis: str
    at_least: float


@dataclass(frozen=True)
class Registration:
    """What a study committed itself to before its runs.

    Attributes:
        family: Name of the family of tests.
        predictions: Its tests, with what was predicted.
        date: When, as ISO 8601 in UTC.
        digest: SHA-256 of what was committed, as hex.
        num_tests: Of the family, in all of its studies together; None in what an older release registered.
    """

    family: str
    predictions: tuple[Prediction, ...]
    date: str
    digest: str
    num_tests: int | None = None

    @property
    def family_size(self) -> int:
        """Tests that p-values are adjusted for. Where nobody said how many, it's as many as headlines may be."""
        return self.num_tests or max(NUM_HEADLINES, len(self.predictions))


@dataclass(frozen=True)
class ChecklistItem:
    """One demand on a strong baseline, whether it was met, and how that is known."""

    name: str
    met: bool
    note: str


@dataclass(frozen=True, kw_only=True)
class StudyRecord(FileRecord):
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
        costs: Profiles of the arms' costs, empty where the runs' own seconds have to do. With them, a run's time is
            its steps at the arm's profiled cost.
        registration: What was predicted before the runs, None where nothing was.
        evaluated_on: A sample of the rows that its runs were evaluated on, as `row_sample` draws it; empty where it
            isn't known.
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
    costs: tuple[CostProfile, ...] = ()
    registration: Registration | None = None
    evaluated_on: tuple[str, ...] = ()

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

    upgraded = staticmethod(upgraded_study)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a record from JSON text; `from_json(to_json(x)) == x`. Versions 1 to 3 are read too.

        Raises:
            RunError: not JSON, another version, other fields or types than this version's, or times that no clock has.
        """
        record = super().from_json(text)
        for run in record.runs:
            for point in (*run.points, run.final):
                if not (0 <= point.seconds < _MAX_SECONDS and 0 <= point.cpu_seconds < _MAX_SECONDS):
                    times = f"{point.seconds} s of training and {point.cpu_seconds} s of a processor"
                    raise RunError(f"Run {run.run_id} has {times}, which no clock has shown. Mend or remove that run.")
        return record
