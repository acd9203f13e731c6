"""The one gate before the optimizers: all sub-steps of a step are committed, or none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosmati.core.clock import Clock
from cosmati.core.pieces import Pieces
from cosmati.errors import PlanError
from cosmati.train.applied import AppliedMethods, Trace
from cosmati.train.assembly import Assembly, Turn
from cosmati.train.buffers import LayerStatistic
from cosmati.train.due_details import DueDetails
from cosmati.train.finite import FiniteCheck
from cosmati.train.gradients import StepGradients, StepInput, StepPasses
from cosmati.train.leaf_facts import LeafFigures
from cosmati.train.marks import Repeated
from cosmati.train.outcome import Taught
from cosmati.train.region_changes import RegionUpdate, update_since
from cosmati.train.timing import Stopwatch


class Committed(NamedTuple):
    """What a step's commit did.

    Attributes:
        first: gradients of the first sub-step.
        losses: mean loss of each sub-step.
        taught: what each sub-step taught.
        figures: of each microbatch by region, over all sub-steps.
        learnt: names of the parameters that moved.
        update: their change by region, where it was asked for.
        statistics: what BatchNorm is to be taught.
    """

    first: StepGradients
    losses: Sequence[Tensor]
    taught: Sequence[Taught]
    figures: LeafFigures
    learnt: frozenset[str]
    update: RegionUpdate | None
    statistics: Sequence[LayerStatistic]


class Commit:
    """Lets each sub-step compute its gradients, looks at them, and hands them to its optimizers.

    Args:
        assembly: of the run.
        methods: at work.
        stopwatch: told when a part ends.
        tell: told of each event.

    Attributes:
        watch: on what a forward pass changes.
    """

    def __init__(self, assembly: Assembly, methods: AppliedMethods, stopwatch: Stopwatch, tell: Trace) -> None:
        self._a = assembly
        self._methods = methods
        self._passes = StepPasses(assembly, methods.loss, stopwatch, tell)
        self.watch = self._passes.watch
        self._stopwatch = stopwatch
        self._tell = tell
        self._halves = [p.name for p in assembly.layout.parameters if p.tensor.dtype == torch.float16]

    def __call__(self, step: StepInput, clock: Clock, finite: FiniteCheck, due: DueDetails) -> Committed:
        """Commit a step.

        Args:
            step: what it trains on.
            clock: where the run stands.
            finite: the look before a commit.
            due: what is measured. For the update, the parameters are copied.

        Raises:
            DivergenceError: a loss or a gradient isn't finite. Nothing of the step is kept, nor of earlier sub-steps.
            OutOfMemoryError: memory is too short. Likewise.
        """
        a = self._a
        turns = [turn for turn in a.turns if clock.step % turn.every == 0]
        undo = self._remember() if len(a.turns) > 1 else None
        given = Repeated(step.batches) if len(turns) > 1 else None
        before = a.layout.weights().copied() if due.update else None
        found: list[StepGradients] = []
        learnt: frozenset[str] = frozenset()
        statistics: list[LayerStatistic] = []
        try:
            for turn in turns:
                if given is not None:
                    reader = f"The sub-step {turn.name!r} of step {clock.step}"
                    step = dataclasses.replace(step, batches=given.given_to(reader))
                own = due if not found else dataclasses.replace(due, entropy=False)
                gradients = self._passes(step, turn, own)
                self._stopwatch.lap("method")
                if not found and a.statistics.layers:
                    statistics = a.statistics.taught(gradients.statistics, a.ranks, partial(self._teaches, step))
                found.append(gradients)
                root = self._as_held(self._methods.gradients(gradients.root, step.positions[0]))
                folded = [tensor for one in statistics for tensor in (one.mean, one.variance)]
                is_known = gradients.is_finite and root is gradients.root and not self._methods.change_gradients
                finite.check(gradients.loss, clock.step, root, folded, is_known=is_known)
                if root:
                    self._tell("commit")
                    with stepping(a, is_undone=undo is not None):
                        learnt |= a.layout.commit(root, turn.indices, partial(turn.step, clock, a.budget))
                    self._stopwatch.lap("optimizer")
        except BaseException:  # Whoever catches it and goes on takes this step anew.
            if undo is not None:
                undo()
            raise
        update = None if before is None or not learnt else update_since(a.layout, before, due.update_sketch)
        taught = [Taught(self._regions_of(turn, step), own.weights) for turn, own in zip(turns, found, strict=True)]
        figures = found[0].figures.joined([one.figures for one in found[1:]])
        return Committed(found[0], [own.loss for own in found], taught, figures, learnt, update, statistics)

    def _as_held(self, root: Pieces) -> Pieces:
        """Return gradients in which what a parameter of float16 can't hold is infinite, as its optimizer does."""
        wide = {name: root.tensors[name] for name in self._halves if name in root}
        own = {
            name: gradient.masked_fill(gradient.half().isinf(), torch.inf)
            for name, gradient in wide.items()
            if gradient.layout is torch.strided and gradient.dtype != torch.float16
        }
        return root.having({**root.tensors, **own}) if own else root

    def _teaches(self, step: StepInput, microbatch: int, layer: str) -> bool:
        return self._a.router.teaches(step.routes[microbatch], layer)

    def _regions_of(self, turn: Turn, step: StepInput) -> tuple[int, ...]:
        parameters = self._a.layout.parameters
        return tuple(sorted({parameters[index].region for index in turn.learning(step.frozen)}))

    def _remember(self) -> Callable[[], None]:
        """Copy parameters and optimizers; return a function that puts them back."""
        a = self._a
        weights = a.layout.weights().copied()
        optimizers = [scheduled.optimizer for scheduled in a.optimizers]
        states = [
            {parameter: {key: _copied(value) for key, value in state.items()} for parameter, state in o.state.items()}
            for o in optimizers
        ]
        # Some count in their groups (schedule-free averaging).
        groups = [[{**group} for group in o.param_groups] for o in optimizers]

        def undo() -> None:
            with torch.no_grad():
                for name, tensor in a.layout.weights().tensors.items():
                    tensor.copy_(weights.tensors[name])
            for optimizer, state, kept in zip(optimizers, states, groups, strict=True):
                optimizer.state.clear()
                optimizer.state.update(state)
                for group, own in zip(optimizer.param_groups, kept, strict=True):
                    group.update(own)

        return undo


@contextmanager
def stepping(a: Assembly, *, is_undone: bool = False) -> Iterator[None]:
    """Let optimizers step within; who reads of an error in their midst also reads what it leaves.

    Args:
        a: of the run.
        is_undone: what has been done of the step is put back.
    """
    try:
        yield
    except BaseException as error:
        if not is_undone and not isinstance(error, PlanError):  # which is a refusal, before anything moves
            mend = (
                "A Trainer made anew goes on from the last checkpoint in its run_folder."
                if a.config.run_folder
                else "No run_folder is set, so there's no checkpoint: begin anew."
            )
            error.add_note(
                "The optimizers were stepping: parameters and optimizer state may be half updated. Don't train on, or "
                f"save, from here. {mend}"
            )
        raise


def step_plainly(a: Assembly, turn: Turn, clock: Clock, root: Pieces | None) -> None:
    """Step a turn's optimizers with the gradients in place, or with those that methods have given."""
    step = partial(turn.step, clock, a.budget)
    with stepping(a):
        if root is None:
            step()
        else:
            a.layout.commit(root, turn.indices, step)


def _copied(value: Any) -> Any:  # noqa: ANN401  (whatever an optimizer keeps)
    return value.detach().clone() if isinstance(value, Tensor) else value
