"""The gradients of one step: its microbatches through the layout's slots to the root, twice where a method asks.

This is the road of every run with several microbatches, ranks, routes or passes; a plain run takes the short one in
`trainer.py`. Both give the same bits where both can go.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cosmati.core.batch import Batch
from cosmati.core.labels import LabelCount, count_labels
from cosmati.core.loss import Loss, LossFunction, as_loss, without_tombstones
from cosmati.core.meetings import MetAloneError, meeting_nobody
from cosmati.core.method import Method, Position
from cosmati.core.pieces import Pieces
from cosmati.core.plan import row_couplings
from cosmati.core.rng import position_key
from cosmati.errors import OutOfMemoryError
from cosmati.routing.token_masks import TokenMasks
from cosmati.train.all_ranks import all_or_none
from cosmati.train.applied import Trace
from cosmati.train.assembly import Assembly, Turn
from cosmati.train.collectives import unmet
from cosmati.train.cutting import shortage
from cosmati.train.due_details import DueDetails
from cosmati.train.entropy_profile import EntropyProfile
from cosmati.train.failures import RAN_ALONE, Failure
from cosmati.train.foreign_reads import foreign_read
from cosmati.train.forward_watch import ForwardWatch, loss_roots
from cosmati.train.held import remember
from cosmati.train.layout.layout import Slot
from cosmati.train.leaf_facts import NO_LEAF, LeafFacts, LeafFigures, even_loss, figures_in, table_of
from cosmati.train.marks import Repeated
from cosmati.train.parts_compared import refuse_unlike_parts
from cosmati.train.passing import PassingMethods
from cosmati.train.routes import Route
from cosmati.train.timing import Stopwatch
from cosmati.train.token_routes import RunApart, count_labels_by_class, masking, refuse_compiled
from cosmati.train.token_watch import leak_between_documents

BoundLoss = Callable[[LossFunction, Position], LossFunction]
"""A loss with the loss methods put around it, for a position."""


_BY_ALL_LABELS = "in packs, what the loss adds ({}) is weighed by the number of labels of all classes: leave it out"


@dataclass(frozen=True)
class StepInput:
    """What a step trains on.

    Attributes:
        batches: this rank's microbatches, as the methods have left them.
        positions: their positions.
        routes: of all V microbatches.
        num_tokens: of the first microbatch as the data give it, the same on every rank. Others, and methods, may make
            more or fewer of them.
        frozen: names of parameters that don't learn in this step.
        failure: what this rank has failed at with its batches; the other ranks are told so.
    """

    batches: Sequence[Batch]
    positions: Sequence[Position]
    routes: Sequence[Route]
    num_tokens: int
    frozen: frozenset[str] = frozenset()
    failure: Exception | None = None


class StepGradients(NamedTuple):
    """What a step's microbatches gave, the same on every rank.

    Attributes:
        root: mean gradients; what no microbatch has taught is absent.
        loss: mean over the step's weight, scalar; 0 where nothing was offered.
        weights: weight of each microbatch, float64 [V].
        figures: each microbatch's norm and direction by region as it enters the mean, and entropy; NaN where absent.
        num_rows: rows of each microbatch that took part, float64 [V].
        labels: of each microbatch, by the source's class, float64 [V, classes]; None where rows aren't packs.
        statistics: what BatchNorm saw in each of this rank's microbatches.
        is_finite: all gradients are known to be finite, on all ranks.
    """

    root: Pieces
    loss: Tensor
    weights: Tensor
    figures: LeafFigures
    num_rows: Tensor
    labels: Tensor | None
    statistics: list[Tensor]
    is_finite: bool


class StepPasses:
    """Computes `StepGradients`: one pass over the microbatches, and a second one for each method that asks.

    Args:
        assembly: of the run.
        bound: puts the loss methods around a loss.
        stopwatch: charged with forward and backward.
        tell: told of each event.

    Attributes:
        watch: on what a forward pass changes.
    """

    def __init__(self, assembly: Assembly, bound: BoundLoss, stopwatch: Stopwatch, tell: Trace) -> None:
        self._a = assembly
        self._bound = bound
        self._stopwatch = stopwatch
        self._tell = tell
        self._looked_at = -1
        self._has_compared = False
        losses = [turn.loss for turn in assembly.turns]
        self._roots = {"": assembly.model, **loss_roots(losses)}
        self._apart = RunApart(assembly.model, self._roots)
        self._again: tuple[Method, ...] = assembly.plan.with_hook("perturbation")
        self._passing = PassingMethods(assembly)
        self._profile = EntropyProfile(assembly.model, assembly.regions)
        a = assembly
        self.watch = ForwardWatch(
            a.model,
            losses,
            a.statistics.layers.values(),
            a.regions,
            a.ranks,
            a.statistics.repeated,
        )

    def __call__(self, step: StepInput, turn: Turn, due: DueDetails) -> StepGradients:
        """Return the gradients of a sub-step.

        Args:
            step: what it trains on.
            turn: the loss and who learns from it.
            due: what is measured: norms and directions of each leaf, in the pass whose gradients are applied; and in
                the first pass, by the weights as they are, entropies.

        Raises:
            PlanError: a parameter was frozen since the plan (between sub-steps a loss may do so for a while), or ranks
                that compute a microbatch together have other bits than one does.
            OutOfMemoryError: a rank's memory is too short; all of them raise it.
        """
        if turn is self._a.turns[0] and not all(p.tensor.requires_grad for p in self._a.layout.parameters):
            self._a.check_unchanged()
        if self._a.ranks.degree > 1:
            self._compare(step, turn)
        given = Repeated(step.batches) if self._again else None
        gradients = self._pass(step, turn, due)
        # Afterwards, when it's known whether they wait for other ranks, who may not look: then nothing is promised.
        if self.watch.is_on and self._a.policy is not None and not self._a.ranks.has_met:
            with all_or_none(self._a.ranks) if self._a.ranks.can_tell else nullcontext():
                self._look(step, turn)
        weights = self._a.layout.weights()
        for method in self._again:
            with torch.no_grad():
                root = gradients.root
                offsets = method.perturbation(root.alike(weights.only(root.names)), root, step.positions[0])
            gradients = gradients._replace(is_finite=False)  # which it was given, and may have written to
            if offsets is not None and given is not None:
                self._tell("again")
                reader = f"The second pass of step {step.positions[0].clock.step}, for {type(method).__name__},"
                again = dataclasses.replace(step, batches=given.given_to(reader))
                with self._a.layout.perturbed(offsets):
                    applied = self._pass(again, turn, dataclasses.replace(due, entropy=False))
                figures = applied.figures._replace(entropies=gradients.figures.entropies)
                gradients = gradients._replace(root=applied.root, figures=figures, is_finite=applied.is_finite)
        return gradients

    def _pass(self, step: StepInput, turn: Turn, due: DueDetails) -> StepGradients:
        """Run this rank's microbatches forward and backward, and sum over all ranks.

        Raises:
            OutOfMemoryError: a rank's memory is too short; all of them raise it.
        """
        a = self._a
        scale = self._scale(step)
        failure = Failure(step.failure)
        learns = turn.learning(step.frozen)
        seen: list[LeafFacts] = []
        norms, sketches, entropies = list[Tensor](), list[Tensor](), list[Tensor]()
        statistics: list[Tensor] = []
        admitted = [route.weights for route in step.routes]
        alone = unmet(a.ranks, [route.offered for route in step.routes])
        opened = a.layout.step(admitted, learns, measure=due.norms, sketch=due.sketch)
        with failure, opened as sums, self.watch.around(), self._profile.reading(is_on=due.entropy):
            for batch, position in zip(step.batches, step.positions, strict=True):
                mark = a.statistics.clear()
                route = step.routes[position.microbatch]
                with sums.slot(position.microbatch) as slot, a.router.running(route, batch, a.device):
                    # Where one was too much, the others are left out; ranks still meet in each slot.
                    found = NO_LEAF
                    if route.offered and failure.error is None:
                        run = partial(self._microbatch, slot, batch, position, turn, scale, route)
                        found = self._tried(run, route, failure, is_alone=position.microbatch in alone)
                    seen.append(failure.facts(found))
                norms += slot.norms
                sketches += slot.sketches
                entropies += self._profile.read()
                if a.statistics.layers:
                    statistics.append(a.statistics.read(mark))
                self._tell("leaf")
                self._stopwatch.lap("backward")
            num_classes = a.router.num_classes if any(route.tokens for route in step.routes) else 0
            facts = a.layout.gather(table_of(seen, (norms, sketches, entropies), num_classes, a.device))
            labels, facts = facts[:, :num_classes], facts[:, num_classes:]
            if failure.error is not None or a.ranks.is_parallel:
                failure.refuse(a.ranks, facts[:, 5].tolist())
            self._tell("tree")
            denominators = None if scale is None else self._denominators(facts[:, 1], step.routes, scale, labels)
            root = sums.root(denominators)
        losses, weights, num_rows = facts[:, 0], facts[:, 1], facts[:, 2]
        # Without any weight nothing is learnt, and there is no mean to take.
        loss = losses.sum() / torch.where(weights.sum() == 0, 1.0, weights.sum())
        loss = even_loss(loss, facts[:, 3], facts[:, 4])
        figures = figures_in(facts[:, 6:], due, denominators, len(a.regions.names))
        self._stopwatch.lap("backward")
        by_class = labels if num_classes else None
        return StepGradients(root, loss, weights, figures, num_rows, by_class, statistics, sums.is_finite)

    def _tried(self, run: Callable[[], LeafFacts], route: Route, failure: Failure, *, is_alone: bool) -> LeafFacts:
        """Run a microbatch; return what it tells.

        Args:
            run: does it.
            route: its own.
            failure: takes what it has failed at, where other ranks can still be told.
            is_alone: other ranks have none in its place, so that nothing may wait for them.
        """
        try:
            with meeting_nobody() if is_alone else nullcontext():
                return self._apart.settled(run, route.tokens)
        except MetAloneError:
            return RAN_ALONE
        except Exception as error:
            # In lockstep, a pass that broke off halfway can't be begun anew: the error ends the run.
            ranks = self._a.ranks
            if not ranks.in_lockstep and (why := shortage(error)):
                failure.error = OutOfMemoryError(why)  # Not the error: its frames hold what didn't fit.
            elif ranks.can_tell:
                failure.error = error
            else:
                raise
        return NO_LEAF

    def _looked_at_now(self, step: StepInput) -> frozenset[int]:
        """Return the microbatches of packs that are looked at, which costs two passes: one of each rank's at most."""
        number, ranks = step.positions[0].clock.step, self._a.ranks
        mixed = [m for m, r in enumerate(step.routes) if r.offered and r.tokens is not None and r.tokens.mixed]
        if not mixed or not self.watch.is_on or self._looked_at == number:
            return frozenset()
        self._looked_at = number
        slots = [[m for m in slot if m in mixed] for slot in ranks.slots(len(step.routes))]
        busiest: list[int] = max(slots, key=len)
        return frozenset(busiest)

    def _microbatch(
        self,
        slot: Slot,
        batch: Batch,
        position: Position,
        turn: Turn,
        scale: float | None,
        route: Route,
    ) -> LeafFacts:
        """Run one microbatch forward and backward."""
        a = self._a
        by_class = count_labels_by_class(a.model, batch, a.router.num_classes) if route.tokens else None
        with self._passing.around(batch, position, route) as around:
            masks = masking(route.tokens, batch, a.layout.parameters, self._apart, zeroed=around.zeroed)
            if masks is not None and a.config.compile_blocks:
                refuse_compiled()
            result = self._forward(batch, position, turn, masks)
            if masks is not None and isinstance(result, Loss) and result.aux:
                self.watch.note_read(_BY_ALL_LABELS.format(", ".join(sorted(result.aux))))
            self._tell("forward")
            self._stopwatch.lap("forward")
            objective, loss, weight = _objective(result, scale)
            around.look(objective)
            with a.ranks.counting(), nullcontext() if masks is None else masks.differentiating(objective):
                slot.backward(objective, is_final=masks is None)
        labels = LabelCount(0.0, 0.0) if isinstance(result, Loss) else count_labels(a.model, batch.data)
        present = batch.present
        num_rows = float(batch.num_rows if present is None else int(present.sum()))
        return LeafFacts(loss, weight, num_rows, *labels, labels=by_class)

    def _look_at_packs(self, batch: Batch, position: Position, turn: Turn, scale: float | None, route: Route) -> None:
        """See whether documents are kept apart, and note it where they aren't."""
        a = self._a
        assert route.tokens is not None, "it's masked"
        couplings = row_couplings(a.plan.methods, a.plan.facts)

        def probed(one: Batch, own: TokenMasks) -> Tensor:
            return _objective(self._forward(one, position, turn, own), scale)[0]

        if couplings:
            self.watch.note(couplings[0])
            return
        put_back = remember(self._roots)  # A look leaves no trace: a run that resumes looks at other steps.
        try:
            with self._passing.around(batch, position, route) as around:
                among = route.tokens, a.layout.parameters, self._apart, around.zeroed
                self.watch.note(leak_between_documents(probed, batch, *among))
        finally:
            put_back()

    def _look(self, step: StepInput, turn: Turn) -> None:
        """See whether microbatches read what is another class's own, and note it where they do; then look at packs."""
        a, looked = self._a, self._looked_at_now(step)
        with a.generators.restored():
            for batch, at in zip(step.batches, step.positions, strict=True):
                route, forward = step.routes[at.microbatch], partial(self._forward, turn=turn, position=at, masks=None)
                if route.offered:
                    with a.router.running(route, batch, a.device):
                        self.watch.note_read(foreign_read(a.model, turn.loss, a.layout, forward, batch))
                        if at.microbatch in looked:
                            see = partial(self._look_at_packs, batch, at, turn, self._scale(step), route)
                            self._apart.settled(see, route.tokens)

    def _compare(self, step: StepInput, turn: Turn) -> None:
        """Compare what ranks compute together with what one does: before a process's first step, and 1, 2, 4, 8, ...

        A slip may not show in weights as they begin: where a layer begins at zero, there's no gradient before it.
        """
        number = step.positions[0].clock.step
        if self._has_compared and number & (number - 1):
            return
        self._has_compared = True
        forward = partial(self._forward, position=step.positions[0], turn=turn, masks=None)
        scale = self._scale(step)
        refuse_unlike_parts(self._a, self._roots, lambda rows: _objective(forward(rows), scale)[0], step.batches[0])

    def _forward(self, batch: Batch, position: Position, turn: Turn, masks: TokenMasks | None) -> Tensor | Loss:
        """Run one microbatch forward."""
        a = self._a
        a.generators.seed(position_key(a.config.seed, "forward", position.clock.step, position.microbatch))
        with a.ranks.counting(), a.config.autocast(a.device), masks or nullcontext():
            return without_tombstones(as_loss(self._bound(turn.loss, position)(a.model, batch.data)), batch.present)

    def _scale(self, step: StepInput) -> float | None:
        """Return the power of two near 1 / (weight of a step); None where the user's scalar is taken as it is.

        It follows from shapes alone, so every rank has it before the first backward. A power of two is exact, so its
        choice doesn't change the result.
        """
        if len(step.routes) == 1 and self._a.policy is None:
            return None
        size = step.num_tokens * len(step.routes)
        return 2.0 ** -(size.bit_length() - 1)

    def _denominators(self, weights: Tensor, routes: Sequence[Route], scale: float, labels: Tensor) -> Tensor:
        """Return for each region the weight of the rows that may teach it, times the scale: float64 [regions].

        Of packs it's the part of their weight that their labels have which may.
        """
        teaches = torch.tensor([[float(rho != 0) for rho in route.weights] for route in routes], dtype=torch.float64)
        admitted = weights[:, None] * teaches.to(weights.device)
        for line, weight, route, own in zip(admitted, weights, routes, labels, strict=True):
            if route.tokens is not None:
                line.copy_(weight * route.tokens.teachers(own) / own.sum().clamp(min=1))
        return admitted.sum(0) * scale


def _objective(result: Tensor | Loss, scale: float | None) -> tuple[Tensor, Tensor | float, Tensor | float]:
    """Return what is differentiated, the loss for the record, and its weight."""
    if not isinstance(result, Loss):
        # A bare scalar is the mean of its microbatch, and microbatches weigh the same.
        return (result if scale is None else result * scale), result.detach(), 1.0
    if scale is None:
        value = result.mean()
        return value, value.detach() * result.weight, result.weight
    summed = result.sum
    for term in result.aux.values():
        summed = summed + term * result.weight
    # What weighs nothing teaches nothing, whatever its sum: the ledger goes by weights.
    if isinstance(result.weight, Tensor) and not result.weight.is_cpu:
        summed = summed * (result.weight != 0)
    elif not result.weight:
        summed = summed * 0.0
    return summed * scale, summed.detach(), result.weight
