"""The loop. Read it from top to bottom; `docs/loop.md` draws it.

`fit` calls `step` for each batch of the data, and `step` is public: who wants to keep the `for` calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch, Data, count_rows_and_tokens
from cosmati.core.clock import Clock
from cosmati.core.loss import Loss, LossFunction, without_tombstones
from cosmati.core.method import Method, Position, Stage, State
from cosmati.core.plan import Plan
from cosmati.core.rng import position_key
from cosmati.core.source import Source
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import PolicyFile
from cosmati.train.assembly import SubStep, Turn, split_batch
from cosmati.train.buffers import buffer_versions
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation, averaged, averaged_weights
from cosmati.train.feed import as_batch
from cosmati.train.finite import FiniteCheck
from cosmati.train.observers import Observer, StepReport
from cosmati.train.routes import Route, Router
from cosmati.train.session import FitSession, RunResult, environment
from cosmati.train.setup import AnyOptimizer, Ingredients, assemble
from cosmati.train.step import StepGradients, StepGradientsFunction, Trace, snapshot, update_norms_since
from cosmati.train.timing import Stopwatch
from cosmati.train.tree import Leaf


class Trainer:
    """Trains a model.

    Args:
        model: the model; surgery may give it another root, see `trainer.model`.
        loss: `loss(model, data)` returns a scalar or a `Loss`; or a list of `SubStep`, for losses that take turns.
        data: a `Source`, or anything iterable that gives a step's rows at a time; None where only `step` is called.
        optimizers: configurations (`cosmati.optim.AdamW(lr=...)`), or torch optimizers already built.
        methods: training methods, in any order.
        policy: which class may teach which region.
        taxonomy: the classes that policy and data speak of.
        evaluation: what is measured, every `config.evaluate_every`.
        observers: told of every step, evaluation, checkpoint and the end.
        config: everything else.

    Raises:
        PlanError, PolicyError, DataError: before anything runs, with what, why and the mend.

    Example:
        >>> trainer = Trainer(model, loss, data, optimizers=[AdamW(lr=1e-3)], config=RunConfig(budget="2ep"))
        >>> result = trainer.fit()
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | Sequence[SubStep],
        data: Source | Iterable[Data] | None = None,
        *,
        optimizers: Sequence[AnyOptimizer],
        methods: Sequence[Method] = (),
        policy: PolicyFile | None = None,
        taxonomy: Taxonomy | None = None,
        evaluation: Evaluation | None = None,
        observers: Sequence[Observer] = (),
        config: RunConfig | None = None,
    ) -> None:
        config = config or RunConfig()
        given = Ingredients(model, loss, data, optimizers, methods, policy, taxonomy, config)
        self.assembly, self.feed = assemble(given)
        self.given = given
        self.evaluation = evaluation
        self.clock = Clock()
        self.stopwatch = Stopwatch()
        self.observers: list[Observer] = list(observers)
        self.trace: Trace | None = None
        self.withdrawn: Plan = self.assembly.plan
        self._bind()

    def _bind(self) -> None:
        """Look up once what every step would look up."""
        a = self.assembly
        plan = a.plan
        batch_methods = plan.with_hook("batch")
        self._batch_methods = [(m.stage.name.lower(), m) for m in batch_methods]
        self._freezing = plan.with_hook("frozen")
        self._again = plan.with_hook("perturbation")
        self._gradient_methods = plan.with_hook("gradients")
        self._after_methods = [(i, m) for i, m in enumerate(plan.methods) if m in plan.with_hook("after")]
        self.states: dict[int, State] = {i: m.init(a.model) for i, m in enumerate(plan.methods)}
        selects = any(m.stage is Stage.SELECT for m in batch_methods)
        special = a.policy or a.ranks.is_parallel or len(a.turns) > 1 or selects or self._freezing or self._again
        self.is_plain = a.num_microbatches == 1 and not special
        self._router = Router(a)
        self._gradients = StepGradientsFunction(a, self.stopwatch, self.tell)
        self._mine = a.ranks.mine(a.num_microbatches)
        self._region_by_name = dict(zip(a.names, a.region_of, strict=True))
        self._session: FitSession | None = None
        self._environment: ExitStack | None = None
        self.finite = FiniteCheck(a)
        self._needs_report = False

    @property
    def model(self) -> nn.Module:
        """The model as the methods' surgery left it."""
        return self.assembly.model

    @property
    def plan(self) -> Plan:
        """What the run does and promises; promises that the run itself broke are withdrawn."""
        return self.withdrawn

    def fit(self) -> RunResult:
        """Train to the end of the budget, from the last checkpoint in the run folder if there is one.

        Ctrl-C (and SIGTERM) end the run after the step in progress, with a checkpoint.

        Raises:
            DivergenceError: the loss isn't finite; nothing of that step is kept.
        """
        with self:
            assert self._session is not None, "entered"
            return self._session.run()

    def __enter__(self) -> Self:
        """Open the run: deterministic kernels, threads, the run folder; go on from its last checkpoint."""
        if self._environment is None:
            with ExitStack() as stack:
                stack.enter_context(environment(self.assembly))
                self._session = stack.enter_context(FitSession(self))
                # What is measured goes through collectives, so ranks must agree, whoever has observers.
                self._needs_report = self.assembly.ranks.agree(bool(self.observers))
                self._environment = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the run: everything that was committed is on disk."""
        opened, self._environment, self._session = self._environment, None, None
        if opened is not None:
            opened.__exit__(kind, error, traceback)

    def step(self, batch: Data) -> StepReport:
        """Train on one step's rows.

        Every rank is given the same batch, and takes its own microbatches of it.

        Args:
            batch: the user's own nest of tensors, or a `Batch` with lineage.

        Raises:
            BatchError, PlanError: the batch can't be read or split.
            DivergenceError: the loss isn't finite.
        """
        if self._environment is None:
            self.__enter__()
        if self.is_plain:
            return self.plain_step(batch)
        parts = split_batch(as_batch(batch, self.clock.rows), self.assembly.num_microbatches)
        classes = [self._router.class_of(part) for part in parts]
        return self.step_microbatches([parts[i] for i in self._mine], classes)

    def plain_step(self, data: Data) -> StepReport:
        """Take a step with V = 1, one rank and no route: the bare loop with a seed and one look at what is due."""
        a = self.assembly
        turn = a.turns[0]
        batches: tuple[Batch, ...] = ()
        has_lineage = False
        # As the data give them: methods may cut rows up.
        rows, tokens = count_rows_and_tokens(data.data if isinstance(data, Batch) else data)
        if self._batch_methods or isinstance(data, Batch) or self._needs_report:
            has_lineage = isinstance(data, Batch)
            batch = as_batch(data, self.clock.rows, trusted=True)
            at = self.position()
            batch = self._prepared(batch.to(a.device) if a.device.type != "cpu" else batch, at)
            data, batches = batch.data, (batch,)
        a.generators.seed(position_key(a.config.seed, "forward", self.clock.step, 0))
        statistics = a.statistics.copied()
        self.stopwatch.lap("data")
        if a.config.precision == "float32":
            result = turn.loss(a.model, data)
        else:
            with a.config.autocast(a.device):
                result = turn.loss(a.model, data)
        if has_lineage:
            result = without_tombstones(result, batches[0])
        loss = result.mean() if isinstance(result, Loss) else result
        self.finite.check(loss, self.clock.step, undo=lambda: a.statistics.put_back(statistics))
        self.stopwatch.lap("forward")
        loss.backward()
        self.stopwatch.lap("backward")
        if self._gradient_methods:
            parameters = a.parameters
            leaf = self._changed([p.grad for p in parameters])
            for parameter, gradient in zip(parameters, leaf, strict=True):
                parameter.grad = gradient
        turn.step(self.clock, a.budget)
        self.stopwatch.lap("optimizer")
        return self._committed(rows, tokens, None, [loss.detach()], (), batches)

    def step_microbatches(self, mine: Sequence[Batch], class_ids: Sequence[int | None]) -> StepReport:
        """Train on this rank's microbatches.

        Args:
            mine: microbatches r, r + W, ... of the step.
            class_ids: classes of all V microbatches.
        """
        a = self.assembly
        self.tell("step")
        positions = [self.position(m) for m in self._mine]
        moved = [batch.to(a.device) for batch in mine]
        empty = self._router.are_empty(moved)
        routes = [
            self._router.route_of(class_id, self.clock.step, is_empty=gone)
            for class_id, gone in zip(class_ids, empty, strict=True)
        ]
        versions = buffer_versions(a.model) if self.clock.step == 0 else None
        frozen = frozenset[str]().union(*(m.frozen(a.names, positions[0]) for m in self._freezing))
        self.stopwatch.lap("data")
        with a.statistics.captured():
            batches = [
                self._prepared(b, at) if routes[at.microbatch].offered else b
                for b, at in zip(moved, positions, strict=True)
            ]
            self.stopwatch.lap("method")
            losses, learnt, first, update_norms = self._turns(batches, positions, routes, frozen)
        if versions is not None and (changed := a.statistics.unfolded(a.model, versions)):
            self.withdrawn = self.withdrawn.withdraw("elastic", f"forward changes the buffers {', '.join(changed)}")
        if a.statistics.layers and first is not None:
            self.tell("fold")
            a.statistics.fold(first.statistics, a.ranks, lambda m, layer: self._router.teaches(routes[m], layer))
        assert first is not None, "a step has a turn"
        rows = sum(batch.num_rows for batch in mine) * a.ranks.world
        tokens = sum(batch.num_tokens for batch in mine) * a.ranks.world
        return self._committed(rows, tokens, learnt, losses, routes, batches, first, update_norms)

    def _turns(
        self,
        batches: Sequence[Batch],
        positions: Sequence[Position],
        routes: Sequence[Route],
        frozen: frozenset[str],
    ) -> tuple[list[Tensor], frozenset[str], StepGradients | None, Tensor | None]:
        """Let each sub-step compute its gradients and commit them."""
        a = self.assembly
        losses: list[Tensor] = []
        learnt: frozenset[str] = frozenset()
        first: StepGradients | None = None
        update_norms: Tensor | None = None
        for turn in a.turns:
            gradients = self._pass(batches, positions, routes, turn, frozen)
            first = first or gradients
            loss = (
                gradients.losses.sum() / gradients.weights.sum()
                if any(r.offered for r in routes)
                else gradients.losses.sum()
            )
            self.finite.check(loss, self.clock.step)
            losses.append(loss)
            if any(route.offered for route in routes):
                due = self._needs_report and a.policy is not None and self.clock.step % a.config.update_norm_every == 0
                before = snapshot(a) if due else None
                learnt |= self._commit(turn, gradients.root)
                update_norms = None if before is None else update_norms_since(a, before)
        return losses, learnt, first, update_norms

    def _pass(
        self,
        batches: Sequence[Batch],
        positions: Sequence[Position],
        routes: Sequence[Route],
        turn: Turn,
        frozen: frozenset[str],
    ) -> StepGradients:
        """Compute the step's gradients, twice where a method asks for a second point."""
        a = self.assembly
        measured = self._needs_report and self.clock.step % a.config.details_every == 0
        gradients = self._gradients(batches, positions, routes, turn, frozen=frozen, with_norms=measured)
        for method in self._again:
            names = {n: (p, g) for n, p, g in zip(a.names, a.parameters, gradients.root, strict=True) if g is not None}
            offsets = method.perturbation(
                {n: p for n, (p, _) in names.items()}, {n: g for n, (_, g) in names.items()}, positions[0]
            )
            if offsets is None:
                continue
            self.tell("again")
            kept = {name: names[name][0].detach().clone() for name in offsets}
            with torch.no_grad():
                for name, offset in offsets.items():
                    names[name][0].add_(offset)
            second = self._gradients(batches, positions, routes, turn, frozen=frozen)
            with torch.no_grad():
                # w + e - e isn't w: the saved copy is.
                for name, value in kept.items():
                    names[name][0].copy_(value)
            gradients = gradients._replace(root=second.root)
        self.stopwatch.lap("method")
        return gradients._replace(root=self._changed(gradients.root)) if self._gradient_methods else gradients

    def _changed(self, leaf: Leaf) -> Leaf:
        """Let the gradient methods change the step's gradients."""
        a = self.assembly
        present = {name: g for name, g in zip(a.names, leaf, strict=True) if g is not None}
        parameters = dict(zip(a.names, a.parameters, strict=True))
        self.tell("gradients")
        for method in self._gradient_methods:
            present = dict(method.gradients(present, parameters, self._region_by_name))
        return [present.get(name) for name in a.names]

    def _commit(self, turn: Turn, root: Leaf) -> frozenset[str]:
        """Step the optimizers: the one gate through which parameters change. What is absent doesn't move at all."""
        a = self.assembly
        self.tell("commit")
        for index in turn.parameters:
            gradient = root[index]
            a.parameters[index].grad = None if gradient is None else gradient.to(a.parameters[index].dtype)
        turn.step(self.clock, a.budget)
        self.stopwatch.lap("optimizer")
        return frozenset(a.names[i] for i in turn.parameters if root[i] is not None)

    def _committed(
        self,
        rows: int,
        tokens: int,
        learnt: frozenset[str] | None,
        losses: Sequence[Tensor],
        routes: Sequence[Route],
        batches: Sequence[Batch],
        gradients: StepGradients | None = None,
        update_norms: Tensor | None = None,
    ) -> StepReport:
        """Advance the clock, let averages follow, and report."""
        a = self.assembly
        self.clock = self._advanced(rows, tokens)
        for index, method in self._after_methods:
            self.tell("after")
            at = self.position()
            self.states[index] = method.after(self.states[index], a.model, at, learnt)
        self.stopwatch.lap("method")
        g = gradients
        weights, rows_each, norms = (g.weights, g.num_rows, g.norms) if g else (None, None, None)
        report = StepReport(self.clock, losses[0], losses, routes, weights, rows_each, norms, update_norms, batches)
        if self._needs_report:
            self.tell("report")
            for observer in self.observers:
                if self.clock.step % observer.every == 0:
                    observer.on_step(report)
            self.stopwatch.lap("ledger")
        return report

    def _advanced(self, rows: int, tokens: int) -> Clock:
        clock, per_epoch = self.clock, self.assembly.budget.steps_per_epoch
        step = clock.step + 1
        epoch, in_epoch = divmod(step, per_epoch) if per_epoch else (clock.epoch, clock.step_in_epoch + 1)
        seconds = self._session.training_seconds() if self._session else 0.0
        return Clock(step, epoch, in_epoch, clock.rows + rows, clock.tokens + tokens, seconds)

    def _prepared(self, batch: Batch, at: Position) -> Batch:
        """Let the batch methods change a microbatch, in their stages' order."""
        if self._batch_methods:
            self.assembly.generators.seed(
                position_key(self.assembly.config.seed, "prepare", at.clock.step, at.microbatch)
            )
        for event, method in self._batch_methods:
            self.tell(event)
            batch = method.batch(batch, at)
        return batch

    def averaged(self) -> AbstractContextManager[nn.Module]:
        """Give the model to evaluate and ship: `with trainer.averaged() as model`; averages are put in for as long."""
        return averaged(self.assembly, averaged_weights(self.assembly, self.states, self.position()), self.feed)

    def position(self, microbatch: int = 0) -> Position:
        """Return a position of the step at which the clock stands."""
        a = self.assembly
        return Position(self.clock, a.budget, a.config.seed, microbatch, a.model, a.turns[0].loss)

    def tell(self, event: str) -> None:
        """Tell the trace of an event."""
        if self.trace is not None:
            self.trace(event)

    def state_facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside tensors."""
        return {"clock": list(self.clock), "feed": dict(self.feed.state()) if self.feed else {}}
