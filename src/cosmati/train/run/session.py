"""The open run: its folder, its observers, what is due when, and its end."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from time import monotonic, time
from typing import Any

from torch import nn

from cosmati.core.clock import Budget, Clock, Time, Unit
from cosmati.core.plan import Plan
from cosmati.errors import CheckpointError
from cosmati.train.all_ranks import all_or_none
from cosmati.train.config import RunConfig
from cosmati.train.cutting import Cuts
from cosmati.train.facts import RunFacts
from cosmati.train.identity import Change
from cosmati.train.observers.ledger import LedgerObserver
from cosmati.train.observers.metrics import MetricsFile
from cosmati.train.observers.observer import Observer, WatchedRun, plain_numbers, refuse_odd_interval
from cosmati.train.observers.progress import ProgressBar
from cosmati.train.observers.witnessing import asked_witnesses
from cosmati.train.outcome import StepOutcome
from cosmati.train.ranks import Ranks
from cosmati.train.run.attempts import begin_attempt, end_attempt
from cosmati.train.run.checkpoints import Checkpoint, Roots, choose_checkpoint
from cosmati.train.run.copies import Copies
from cosmati.train.run.copy_place import url_of_copies
from cosmati.train.run.environment import StopSignal
from cosmati.train.run.folder import RunFolder
from cosmati.train.run.parts import HeldState
from cosmati.train.run.result import RunResult
from cosmati.train.run.saving import Saver
from cosmati.train.sensitive import is_withheld, withholding_of


class OpenRun:
    """The open run of a trainer.

    Args:
        facts: what it is.
        config: folder, cadences.
        budget: its length.
        ranks: the data-parallel ranks; the first one writes.
        observers: the user's; those of the run folder are added.
        digest: gives the model's Merkle root as it is now.
        model: for observers to look at.

    Attributes:
        facts: what it is now.
    """

    def __init__(
        self,
        facts: RunFacts,
        config: RunConfig,
        budget: Budget,
        ranks: Ranks,
        observers: Sequence[Observer],
        digest: Callable[[], bytes],
        model: nn.Module,
    ) -> None:
        self.facts = facts
        self._withholding = withholding_of(facts.policy, facts.sensitive)
        self._withheld: Sequence[str] = ()
        self._config = config
        self._budget = budget
        self._ranks = ranks
        self._digest = digest
        self.observers = list(observers)
        self._model = model
        self._beginning: list[Observer] = []
        self.stop_reason = self.stop_from_rows = ""
        self._attempt = 0
        self._stop = StopSignal()
        self._folder: RunFolder | None = None
        self._copies: Copies | None = None
        self._saved = monotonic()

    @contextmanager
    def opening(self) -> Iterator[Checkpoint | None]:
        """Lock the folder; give its last checkpoint, to go on from. What fails within lets the folder go.

        Raises:
            RunError: another process has the folder, or it can't be written.
            CheckpointError: the checkpoint is damaged.
        """
        path = self._config.run_folder
        if path is None:
            yield None
            return
        try:
            is_first = self._ranks.rank == 0
            with all_or_none(self._ranks):
                if is_first:
                    self._folder = RunFolder.open(path, self.facts)
                if is_first and self._config.checkpoint_to:
                    url = url_of_copies(self._config.checkpoint_to, path)
                    self._copies = Copies(url, self._config.num_checkpoints, path)
                    has_ledger = (path / "ledger" / "checkpoint").exists()
                    self._copies.fetch(path / "checkpoints", self._config.resume_from, has_ledger=has_ledger)
            with all_or_none(self._ranks), self._saying(Copies.told_of_newest):
                found = choose_checkpoint(path / "checkpoints", self._config.resume_from, may_move=is_first)
            with self._saying(Copies.give_back):
                yield found
        except BaseException:
            if self._folder is not None:
                self._folder.unlock()
            raise

    @contextmanager
    def _saying(self, more: Callable[[Copies], str]) -> Iterator[None]:
        """Say what copies have to do with a checkpoint that can't be gone on from."""
        try:
            yield
        except CheckpointError as error:
            if self._copies is None or not (words := more(self._copies)):
                raise
            raise CheckpointError(f"{error}{words}") from error

    def start(
        self,
        clock: Clock,
        changed: Sequence[Change] = (),
        plan: Plan | None = None,
        state_digest: bytes | None = None,
    ) -> None:
        """Tell everybody that the run starts, or goes on.

        Args:
            clock: where it stands.
            changed: since it was stopped.
            plan: with the promises that still hold; None where none was broken.
            state_digest: of the checkpoint from which it goes on, if it does.
        """
        path = self._config.run_folder
        if self._copies is not None and path is not None:
            self._copies.claim()
            if state_digest is not None:
                self._copies.catch_up(path / "checkpoints" / f"step-{clock.step:08d}")
        _ = self._evaluate_every, self._checkpoint_seconds or self._checkpoint_every  # What has no step is found now.
        if self._folder is not None:
            self._folder.write("running", plan or self.facts.plan, clock, None)
            self._folder.note(clock, changed)
            self.observers.append(MetricsFile(self._folder.path, check=self._folder.check))
        has_own = any(isinstance(one, LedgerObserver) for one in self.observers)  # a replay's, which compares
        if path is not None and self._keeps_ledger and not has_own:
            asked = asked_witnesses(path, self._config) if self._ranks.rank == 0 else None
            made = LedgerObserver(path, self.facts, self._ranks, self._digest, changed, state_digest, asked)
            self.observers.append(made)
        if self._config.progress and self._ranks.rank == 0:
            self.observers.append(ProgressBar())
        with ExitStack() as undone:
            self._open_observers(clock, undone)
            for observer in self.observers:
                observer.on_start(clock, self._budget)
                undone.callback(observer.on_end, clock, "failed")
            undone.pop_all()

    def _open_observers(self, clock: Clock, undone: ExitStack) -> None:
        superseded, started = dict[int, int](), time()
        if self._folder is not None:
            attempt, superseded = begin_attempt(self._folder.path, clock)
            self._attempt, started = attempt.number, attempt.started
            undone.callback(end_attempt, self._folder.path, self._attempt, clock, "failed", "")
        run = WatchedRun(
            facts=self.facts,
            model=self._model,
            folder=self._config.run_folder,
            rank=self._ranks.rank,
            attempt=self._attempt,
            started=started,
            superseded=superseded,
            stop=self.ask_to_stop,
            publish=self.publish,
        )
        for observer in self.observers:
            observer.on_open(run)
            refuse_odd_interval(observer)
        # Most don't ask, and a step of 100 us notices each call.
        self._beginning = [one for one in self.observers if type(one).on_step_begin is not Observer.on_step_begin]

    def cut(self, clock: Clock, cuts: Cuts, change: Change) -> None:
        """Put on record that the microbatches are cut, before the step at which the clock stands is taken anew."""
        if self._folder is not None:
            cuts.keep(self._folder.path)
        self.amend(clock, [change], num_microbatches=change.now)

    def restate(self, **facts: Any) -> None:  # noqa: ANN401  (fields of RunFacts)
        """Let some of the run's facts be others, before it starts."""
        self.facts = dataclasses.replace(self.facts, **facts)
        self._withholding = withholding_of(self.facts.policy, self.facts.sensitive)
        if self._folder is not None:
            self._folder.restate(self.facts)

    def amend(self, clock: Clock, changes: Sequence[Change], **facts: Any) -> None:  # noqa: ANN401  (see `restate`)
        """Put on record what is different from the step on at which the clock stands."""
        if self._config.run_folder is not None:
            self._saver.land(wait=True)  # What it's covered by is in force until now.
        self.restate(**facts)
        if self._folder is not None:
            self._folder.note(clock, changes)
        for observer in self.observers:
            if isinstance(observer, LedgerObserver):
                observer.amend(clock, changes, self.facts)

    def listening(self) -> AbstractContextManager[None]:
        """Take Ctrl-C and SIGTERM as a request to stop, for as long as `fit` runs: a loop of the user's has its own."""
        return self._stop.listening()

    def ask_to_stop(self, why: str = "", *, follows_from_rows: bool = True) -> None:
        """End the run after the step in progress; the first reason is told.

        Args:
            why: in words; empty of somebody who ends the run as such.
            follows_from_rows: what the run has seen may be the reason, unless there's none.
        """
        if not self._stop.is_set:
            self.stop_reason = "" if why is None else str(why)
            self.stop_from_rows = self.stop_reason if follows_from_rows else ""
        self._stop.is_set = True

    def publish(self, clock: Clock, values: Mapping[str, float]) -> None:
        """Tell observers of values that one of them has measured."""
        told = {name: value for name, value in plain_numbers(values).items() if not is_withheld(name, self._withheld)}
        for observer in self.observers:
            observer.on_values(clock, dict(told))  # What one of them does to it is its own affair.

    def close(self, result: RunResult, plan: Plan) -> None:
        """Tell everybody that the run has ended, also where one of them fails, and write its record."""
        if result.never_offered and self._ranks.rank == 0 and result.outcome in ("completed", "stopped"):
            rows = ", ".join(f"{number} rows of {name}" for name, number in result.never_offered.items())
            warnings.warn(
                f"Never offered, being deferred: {rows}. The loop gave them to step() while the policy deferred their "
                "class, and not again since.",
                stacklevel=2,
            )
        with ExitStack() as last_first:
            if self._folder is not None:
                last_first.callback(self._folder.close, result, plan)
                last_first.callback(self._end_attempt, result)
            for observer in reversed(self.observers):
                last_first.callback(observer.on_end, result.clock, result.outcome)
            if self._config.run_folder is not None:
                last_first.callback(self._saver.abandon)

    def _end_attempt(self, result: RunResult) -> None:
        assert self._folder is not None, "asked before"
        self._folder.check()
        end_attempt(self._folder.path, self._attempt, result.clock, result.outcome, result.reason)

    def step_begins(self, clock: Clock) -> None:
        """Tell those observers that have asked, and will be told of the step."""
        for observer in self._beginning:
            if (clock.step + 1) % observer.every == 0:
                observer.on_step_begin(clock)

    def report(self, outcome: StepOutcome) -> None:
        """Tell observers of a step; what tells of a sensitive class alone is the ledger's, which seals it."""
        told = outcome if self._withholding is None else self._withholding.of(outcome)
        self._withheld = told.withheld
        for observer in self.observers:
            if outcome.clock.step % observer.every == 0:
                observer.on_step(outcome if isinstance(observer, LedgerObserver) else told)
        self._withheld = ()

    def to_measure(self, averages: object) -> tuple[bytes, str]:
        """Return the root of what is about to be measured, nothing without a ledger, and whether it's averages."""
        return self._digest() if self._keeps_ledger else b"", "trained" if averages is None else "averaged"

    @property
    def _keeps_ledger(self) -> bool:
        return self._config.run_folder is not None and self.facts.plan.facts.has_ledger

    def evaluated(
        self, clock: Clock, metrics: Mapping[str, float], seconds: float, measured: tuple[bytes, str] = (b"", "")
    ) -> None:
        """Tell observers of metrics; the ledger is told what was measured: its root, and whether it was averages."""
        for observer in self.observers:
            observer.on_evaluation(clock, dict(metrics), seconds)
            if isinstance(observer, LedgerObserver) and measured[0]:
                observer.evaluated(clock, metrics, *measured)

    def save(self, clock: Clock, make: Callable[[], Checkpoint | HeldState]) -> None:
        """Publish a checkpoint, unless there is one of this step: the ledger covers it before it's published.

        Args:
            clock: where the run stands.
            make: gathers it, or what this rank holds of it; on every rank.
        """
        if self._config.run_folder is None:
            return
        folder = self._config.run_folder / "checkpoints"
        self._saver.settle()
        if self._ranks.agree((folder / f"step-{clock.step:08d}").exists()):
            return
        self._saved = monotonic()
        self._saver.save(clock, make())
        if not clock.step:
            self._saver.settle()  # The first one is read back.

    def settle(self) -> None:
        """Wait until the checkpoint that is being written is published, and copied where that was asked for.

        Every rank has to call.

        Raises:
            CheckpointError: it couldn't be written, or copied.
        """
        if self._config.run_folder is not None:
            self._saver.settle(copied=True)

    @cached_property
    def _saver(self) -> Saver:
        assert self._config.run_folder is not None, "asked before"
        return Saver(
            self._config.run_folder / "checkpoints",
            self._ranks,
            keep=self._config.num_checkpoints,
            epoch=None if self._folder is None else self._folder.epoch,
            check=lambda: None if self._folder is None else self._folder.check(),
            tell=self._tell_of_checkpoint,
            is_async=self._config.checkpoint_async,
            copies=self._copies,
        )

    def _tell_of_checkpoint(self, clock: Clock, roots: Roots) -> None:
        for observer in self.observers:
            # The ledger signs what a resume goes by besides.
            signs = isinstance(observer, LedgerObserver)
            observer.on_checkpoint(clock, roots.signed_digest if signs else roots.state_digest, roots.parameter_root)

    def stop_is_asked(self) -> bool:
        """Say whether somebody has asked to stop; all ranks say the same."""
        return self._ranks.agree(self._stop.is_set) if self._ranks.is_parallel else self._stop.is_set

    def evaluation_is_due(self, clock: Clock) -> bool:
        """Say whether to evaluate after this step; the end of the run evaluates by itself."""
        every = self._evaluate_every
        return bool(every) and clock.step % every == 0 and not self._budget.is_over(clock)

    def checkpoint_is_due(self, clock: Clock) -> bool:
        """Say whether to write a checkpoint after this step; publish what was written beside the loop meanwhile."""
        if self._config.checkpoint_async and self._config.run_folder is not None:
            self._saver.land(wait=False)
        if self._checkpoint_seconds:
            # Of the wall clock, which each rank reads for itself: they do it together once one of them finds it due.
            return self._ranks.agree(monotonic() - self._saved >= self._checkpoint_seconds)
        every = self._checkpoint_every
        return bool(every) and clock.step % every == 0

    @cached_property
    def _checkpoint_seconds(self) -> float:
        every = self._config.checkpoint_every
        parsed = None if every is None else Time.parse(every)
        return parsed.value if parsed is not None and parsed.unit is Unit.SECOND else 0.0

    @cached_property
    def _evaluate_every(self) -> int:
        return self._interval(self._config.evaluate_every)

    @cached_property
    def _checkpoint_every(self) -> int:
        return self._interval(self._config.checkpoint_every)

    def _interval(self, time: str | None) -> int:
        """Return a span in steps; 0 is never."""
        if time is None:
            return 0
        parsed = Time.parse(time)
        if parsed.unit is Unit.STEP:
            return max(1, round(parsed.value))
        return max(1, self._budget.step_of(parsed))
