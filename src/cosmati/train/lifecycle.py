"""The life of a trainer around its loop: opened, saved, evaluated, closed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import nn

from cosmati.core.batch import Data
from cosmati.core.clock import Clock
from cosmati.core.memory import freed_memory_kept
from cosmati.core.method import Position, State
from cosmati.core.named_settings import KnownNames
from cosmati.core.plan import Plan, Promise
from cosmati.errors import PlanError
from cosmati.records.attempts import metrics_at
from cosmati.train.all_ranks import meet
from cosmati.train.applied import AppliedMethods, Trace
from cosmati.train.authority_watch import still_measured
from cosmati.train.averaging import averaged, averaged_weights
from cosmati.train.config import TRAINER_NAMES
from cosmati.train.continuity import Continuity
from cosmati.train.cutting import Cuts
from cosmati.train.epochs import refuse_endless
from cosmati.train.finite import FiniteCheck
from cosmati.train.identity import Change
from cosmati.train.marks import StepRows
from cosmati.train.named_evaluations import Evaluations, checked, evaluate_all, try_out_all
from cosmati.train.observers.observer import Observer, checked_observers
from cosmati.train.opening import open_run, read_back, without_ends, without_schedulers
from cosmati.train.optimizer_watch import OptimizerWatch
from cosmati.train.policy_watch import policy_watch_of
from cosmati.train.prepare import Prepared
from cosmati.train.refusals import explain
from cosmati.train.run.checkpoints import Checkpoint, whole
from cosmati.train.run.environment import numerics
from cosmati.train.run.parts import HeldState
from cosmati.train.run.result import RunResult, outcome_of
from cosmati.train.run.session import OpenRun
from cosmati.train.signed import refuse_own_rows
from cosmati.train.snapshot import snapshot, with_observers
from cosmati.train.timing import Stopwatch
from cosmati.train.written import WRITTEN, WrittenHere

Outcome = TypeVar("Outcome")


class Lifecycle(KnownNames):
    """What a trainer is beside its loop; `with` opens and closes its run.

    Args:
        prepared: what the run needs.
        evaluation: what is measured.
        observers: the user's.
    """

    other_names = TRAINER_NAMES

    def __init__(
        self, prepared: Prepared, evaluation: Evaluations | None, observers: Sequence[Observer] | Observer
    ) -> None:
        self.prepared = prepared
        a = self.assembly = prepared.assembly
        self.feed, self.policy_watch = prepared.feed, policy_watch_of(prepared)
        self.evaluation = checked(evaluation)
        self.observers = checked_observers(observers)
        self.trace: Trace | None = None
        self.clock, self.stopwatch = Clock(), Stopwatch()
        self.finite = FiniteCheck(a.config, a.device)
        self.methods = AppliedMethods(a.plan, a.layout.weights(), a.generators, self.tell, policy=a.policy)
        self._plan = without_ends(a.plan, self.observers)
        self._metrics: Mapping[str, float] = {}
        self._evaluated_at: Clock | None = None
        self._run: OpenRun | None = None
        self._opened: ExitStack | None = None
        self._is_bare = self._is_stopped = False
        self._rows: StepRows | None = None
        self._written, self.cuts = WrittenHere(), Cuts()
        self._continuity: Continuity | None = None
        self._ended: str | None = None
        self._optimizer_watch = OptimizerWatch(a.optimizers)
        self._needs_outcome, self._num_averaged, self._is_training = False, 0, a.model.training

    @property
    def model(self) -> nn.Module:
        """The model as the methods' surgery left it."""
        return self.assembly.model

    @property
    def states(self) -> Mapping[int, State]:
        """States of the methods, by their index in the plan."""
        return self.methods.states

    @property
    def plan(self) -> Plan:
        """What the run does and promises; promises that the run itself broke are withdrawn."""
        stopped = "" if self._run is None else self._run.stop_from_rows
        self._plan = without_schedulers(without_ends(self._plan, (), stopped), self.assembly)
        doubt = self.feed.doubt if self.feed is not None else ""
        for promise in (Promise.RESUME, Promise.ELASTIC, Promise.REPLAYABLE) if doubt else ():
            self._plan = self._plan.withdraw(promise, doubt) if self._plan.holds(promise) else self._plan
        return self._plan

    def watched(self, take: Callable[..., Outcome], rows: Data, *others: Any) -> Outcome:  # noqa: ANN401
        """Take a step with rows of a loop of the user's own, or of a source, and see whether it changes them.

        Rows as an earlier step has left them withdraw the promises: who resumes has them as they were, and what they
        hold follows from the rows of those steps.
        """
        if any(map(WRITTEN.has_part_of, rows if isinstance(rows, list) else (rows,))):
            because = (
                f"step {self.clock.step} is given rows that an earlier step, of this trainer or another one, has "
                "changed in place: have the loss change a copy (x = x.clone(); ReLU without inplace=True)"
            )
            for g in self._plan.guarantees:
                self._plan = self._plan.withdraw(g.promise, because, g.pair) if g.holds else self._plan
        try:
            return take(rows, *others)
        finally:  # Before anybody fills their memory anew.
            if self._rows is not None and (changed := self._rows.changed()):
                self._written.add(changed)
            self._rows = None

    @property
    def changed(self) -> Sequence[Change]:
        """What has changed since the run was stopped, and was asked for or is free; nothing where it wasn't."""
        return () if self._continuity is None else self._continuity.changed

    @property
    def should_stop(self) -> bool:
        """Whether a loop of the user's own should end: the budget is over, or somebody has called `stop`.

        Raises:
            PlanError: the budget is in epochs, which such a loop hasn't: it would never end.
        """
        refuse_endless(self.assembly.budget, own_loop=self.feed is None)
        is_asked = self._is_stopped if self._run is None else self._run.stop_is_asked()
        return is_asked or self.assembly.budget.is_over(self.clock)

    def stop(self) -> None:
        """End the run after the step in progress, with a checkpoint: early stopping, say. Before `fit`, at once."""
        if self._run is not None:
            self._run.ask_to_stop()
        self._is_stopped = self._run is None

    def position(self, microbatch: int = 0) -> Position:
        """Return a position of the step at which the clock stands."""
        a = self.assembly
        seed, loss = a.config.seed, a.turns[0].loss
        return Position(self.clock, a.budget, seed, microbatch, a.model, loss, self._note_budget_read, a.image_size)

    def _note_budget_read(self, *, is_told: bool) -> None:
        if self._continuity is not None:
            self._continuity.budget_was_read = True
            self._continuity.budget_use_is_told &= is_told

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Give the model to evaluate and ship: `with trainer.averaged() as model`; averages are put in for as long."""
        weights = averaged_weights(self.assembly, self.methods.states, self.position())
        with averaged(self.assembly, weights, self.feed) as model:
            self._num_averaged += 1
            try:
                yield model
            finally:
                self._num_averaged -= 1

    def _begin_step(self) -> None:
        if self._num_averaged:
            self._refuse_averaged("step()")
        self._is_training = self.assembly.model.training
        if self._needs_outcome and self._run is not None:
            self._run.step_begins(self.clock)

    def _refuse_averaged(self, what: str) -> None:
        if self._num_averaged:
            msg = (
                f"{what} within averaged(), where averages stand in for the weights that train, and which puts these "
                f"back: a step would be undone, and a checkpoint hold the wrong ones. Call {what} after the `with`."
            )
            raise PlanError(msg)

    def _get_ready(self, *, is_own: bool = False) -> None:
        """Open the run if it isn't yet, and go by what those who vouch for the data say since, before each step.

        Args:
            is_own: the step's rows come from a loop of the user's own.
        """
        if is_own:
            refuse_own_rows(self.assembly.config)
        if self._opened is None:
            self._open()
        if self.prepared.watch is not None and self._run is not None:
            self.prepared.watch.before_step(self._run, self.clock, self.save)
        if self.policy_watch is not None and self._run is not None and self._continuity is not None:
            self._plan = self.policy_watch.before_step(self._run, self.clock, self._continuity, self._plan)

    def halve_microbatches(self, why: str, *, state_moves: bool) -> None:
        """Cut each microbatch in two from this step on, on record, before it's taken anew.

        Args:
            why: what was short.
            state_moves: forward passes change more than BatchNorm's statistics; the attempt that failed has, too.
        """
        assert self._run is not None, "opened"
        a, before = self.assembly, self.cuts.pieces
        self.cuts.halve(self.clock.step)
        was, now = (a.num_microbatches * pieces for pieces in (before, self.cuts.pieces))
        self._run.cut(self.clock, self.cuts, Change("microbatches", was, now))
        because = f"memory was short at step {self.clock.step}: {now} microbatches since, {was} before ({why})"
        broken = [Promise.ELASTIC, Promise.PARITY, Promise.ISOLATED]  # Whose rows were too many shows in all.
        broken += [Promise.RESUME, Promise.REPLAYABLE] if state_moves else []
        for g in self._plan.guarantees:
            if g.holds and g.promise in broken:
                self._plan = self._plan.withdraw(g.promise, because, g.pair)
        warnings.warn(
            f"Memory is too short for step {self.clock.step} ({why}): each microbatch is cut in two, {now} in place of "
            f"{was} from here on. Begin with num_microbatches={now} next time.",
            stacklevel=2,
        )
        torch.cuda.empty_cache()  # nothing, where CUDA isn't in use

    def evaluate(self) -> Mapping[str, float]:
        """On all ranks: measure, tell observers, and return the metrics; nothing without `Evaluation` or open run."""
        evaluation = still_measured(self.evaluation, self.prepared.watch, self.clock.step)
        if evaluation is None or self._run is None:
            return {}
        meet((a := self.assembly).ranks, "evaluate()")
        with self.stopwatch.paused("evaluation"):
            self.tell("evaluate")
            with self.averaged() as model:
                measured = self._run.to_measure(averaged_weights(a, self.methods.states, self.position()))
                settings = a.ranks, a.device, a.config.autocast(a.device), [turn.loss for turn in a.turns]
                self._metrics = evaluate_all(model, evaluation, *settings)
            self._evaluated_at = self.clock
            self._run.evaluated(self.clock, self._metrics, self.stopwatch.training_seconds(), measured)
        return self._metrics

    def save(self) -> None:
        """On all ranks: write a checkpoint of this step, if there is a folder for it and no such checkpoint yet.

        Raises:
            DivergenceError: weights, averages or state aren't finite: nothing is written.
            PlanError: averages stand in for the weights: within `averaged()`.
        """
        self._refuse_averaged("save()")
        if self._run is None or self.assembly.config.run_folder is None:
            return
        meet(self.assembly.ranks, "save()")
        with self.stopwatch.paused("checkpoint"):
            self.finite.look(self.clock.step)
            self.look_around()
            self._run.save(self.clock, self._snapshot)

    def look_around(self) -> None:
        """See what others have done to model and optimizers since the plan.

        Raises:
            PlanError: a parameter was thawed, frozen, added or exchanged.
            CheckpointError: an optimizer keeps what no checkpoint can hold, and there is a folder for them.
        """
        self.assembly.check_unchanged()
        self._plan = self._optimizer_watch.judged(self._plan)
        if self.assembly.config.run_folder is not None:
            self._optimizer_watch.refuse_unsavable(dict(self.assembly.layout.pieces()))

    def check_finite(self) -> None:
        """Look at parameters, buffers and optimizers, as before a checkpoint, also where nothing is written.

        Raises:
            DivergenceError: one isn't finite, and began so.
        """
        if self._continuity is not None:
            a, kept = self.assembly, self._optimizer_watch.tensors(dict(self.assembly.layout.pieces()))
            held = {name: span.tensor for name, span in a.layout.held().items()}
            self.finite.publish({**held, **kept}, self._continuity.never_finite, (), a.ranks.agree)

    def _snapshot(self) -> Checkpoint | HeldState:
        self.tell("checkpoint")
        assert self._continuity is not None, "the run is open"
        # Who evaluates by hand, and saves before model.train(), means other modes than those of the next step.
        keep_modes = self._is_training == self.assembly.model.training
        can_compare = self.plan.holds(Promise.RESUME)
        facts = self._continuity.facts(self.clock.step, self.plan, compare_code=can_compare, keep_modes=keep_modes)
        facts["cuts"] = self.cuts.made
        taken = snapshot(self.assembly, self.methods.states, self.clock, self.plan, self.feed, facts)
        own = (scheduled.optimizer for scheduled in self.assembly.optimizers)
        plain = [{"groups": one.param_groups, "state": list(one.state.values())} for one in own]
        self.finite.publish(taken.tensors, self._continuity.never_finite, plain, self.assembly.ranks.agree)
        taken = with_observers(taken, self.observers, self.assembly)  # only now: what these keep may be infinite
        return taken if self.assembly.layout.is_cut else whole(taken)

    def __enter__(self) -> Self:
        """Open the run: deterministic kernels, threads, the run folder; go on from its last checkpoint."""
        if self._opened is None:
            self._open()
        elif self._is_bare:
            self._is_bare = False  # it was opened by a step that nobody had put into a `with`
            self._opened.enter_context(numerics(self.assembly))
        return self

    def _open(self) -> None:
        a = self.assembly
        with ExitStack() as stack:
            stack.enter_context(freed_memory_kept())
            if not self._is_bare:
                stack.enter_context(numerics(a))
            opened = open_run(self.prepared, self.observers, self._plan, self.clock, self.policy_watch)
            self._run, self._continuity, self._plan, self.clock, self.cuts = opened[:5]
            self._is_training = a.model.training
            stack.push(self._close_run)
            if self.feed is not None:
                stack.callback(self.feed.close)  # first, and what it raises is why the run has failed
            if self.prepared.watch is not None:
                stack.callback(self.prepared.watch.close)
                self.prepared.watch.start()
            if self._is_stopped:
                self.stop()
            if opened.states is not None:
                self.methods.states = opened.states
            # What is measured goes through collectives, so ranks must agree, whoever has observers.
            self._needs_outcome = self.finite.keeps_norms = a.ranks.agree(bool(opened.run.observers))
            self._ended = None
            if self.clock.step == 0 and opened.states is None:
                self._try_out()
            self.stopwatch.start(self.clock.seconds)
            if self.clock.step and a.config.run_folder is not None:
                # A run that has nothing left to do still has what it measured.
                self._metrics = self._metrics or metrics_at(a.config.run_folder, self.clock.step)
            self._opened = stack.pop_all()
        if self._is_bare and self.clock.step:
            warnings.warn(
                f"This run goes on at step {self.clock.step}, which was found after this step's batch had been chosen. "
                "If that follows from trainer.clock, open the run before the loop: `with trainer:`.",
                stacklevel=4,
            )

    def _try_out(self) -> None:
        """Before the first step, do once what would fail after many: evaluate a batch, write and read a checkpoint."""
        a = self.assembly
        if self.feed is not None and self._continuity is not None:
            for batch in list(self.feed.again(0))[:1]:
                self._continuity.see(batch.to(a.device).data)
        if self.evaluation is not None:
            with self.averaged() as model, a.ranks.together():
                try_out_all(model, self.evaluation, a.device, a.config.autocast(a.device), [t.loss for t in a.turns])
        self.save()
        read_back(a)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the run: everything that was committed is on disk."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        with opened:
            if kind is not None:
                self._ended = outcome_of(kind)
                explain(error, self.assembly.model)
            elif self._ended is None:
                # The user's own loop ends where its `with` does.
                self.finite.look(self.clock.step)
                self.check_finite()
                self._ended = "completed" if self.assembly.budget.is_over(self.clock) else "stopped"
                self.look_around()
                self.save()
            if kind is None and self._run is not None:
                self._run.settle()

    def _close_run(
        self, kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        """Write the end, whatever has failed before."""
        self.stopwatch.stop()
        if kind is not None:
            self._ended = outcome_of(kind)
        assert self._run is not None, "opened"
        assert self._ended is not None, "by itself or by an error"
        run, told, self._run = self._run, (self._result(self._ended), self.plan), None  # It says why it was stopped.
        run.close(*told)
        if self.policy_watch is not None:
            self.policy_watch.close(self._ended)

    def _result(self, ended: str) -> RunResult:
        a, seconds = self.assembly, self.stopwatch.training_seconds()
        reason = self._run.stop_reason if self._run is not None and ended == "stopped" else ""
        where, waiting, parts = a.config.run_folder, a.deferred_rows.num_waiting, dict(self.stopwatch.seconds)
        return RunResult(ended, self.clock, self._metrics, seconds, parts, where, reason, waiting)

    def tell(self, event: str) -> None:
        """Tell the trace of an event."""
        if self.trace is not None:
            self.trace(event)
