"""The loop. Read it from top to bottom; `docs/loop.md` draws it.

`fit` calls `step` for each batch of the data, and `step` is public: who wants to keep the `for` calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from cosmati.core.batch import Batch, Data, count_rows_and_tokens
from cosmati.core.clock import Clock
from cosmati.core.loss import LossFunction, scalar_of, without_tombstones
from cosmati.core.method import Method, Position, State
from cosmati.core.plan import Plan
from cosmati.core.rng import position_key
from cosmati.core.source import Source
from cosmati.errors import DataError, DivergenceError
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import PolicyFile
from cosmati.train.applied import AppliedMethods, Trace
from cosmati.train.assembly import SubStep, split_batch
from cosmati.train.buffers import buffer_versions
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation, averaged, averaged_weights, evaluate
from cosmati.train.facts import facts_of
from cosmati.train.feed import Feed, as_batch
from cosmati.train.finite import FiniteCheck
from cosmati.train.gradients import StepGradients, StepInput, StepPasses, update_norms_since
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome
from cosmati.train.prepare import AnyOptimizer, Ingredients, prepare
from cosmati.train.routes import Route, empty_flags
from cosmati.train.run.checkpoints import Checkpoint
from cosmati.train.run.environment import environment
from cosmati.train.run.result import RunResult
from cosmati.train.run.session import OpenRun
from cosmati.train.snapshot import restore, snapshot
from cosmati.train.timing import Stopwatch


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
        given = Ingredients(model, loss, data, optimizers, methods, policy, taxonomy, config or RunConfig())
        self.prepared = prepare(given)
        a = self.assembly = self.prepared.assembly
        self.feed = self.prepared.feed
        self.evaluation = evaluation
        self.observers: list[Observer] = list(observers)
        self.trace: Trace | None = None
        self.clock = Clock()
        self.stopwatch = Stopwatch()
        self.finite = FiniteCheck(self.assembly.config, self.assembly.device)
        self._plan = self.assembly.plan
        self._metrics: Mapping[str, float] = {}
        self._run: OpenRun | None = None
        self._environment: ExitStack | None = None
        self._ended: str | None = None
        self._needs_outcome = False
        self.methods = AppliedMethods(a.plan, a.layout.weights(), a.generators, self.tell)
        self._passes = StepPasses(a, self.methods.loss, self.stopwatch, self.tell)
        self.is_plain = a.num_microbatches == 1 and not (
            a.policy or a.ranks.is_parallel or len(a.turns) > 1 or self.methods.need_microbatches
        )

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
        return self._plan

    def fit(self) -> RunResult:
        """Train to the end of the budget, from the last checkpoint in the run folder if there is one.

        Ctrl-C (and SIGTERM) end the run after the step in progress, with a checkpoint.

        Raises:
            DivergenceError: the loss isn't finite; nothing of that step is kept.
        """
        if self.feed is None:
            msg = "fit() needs data: Trainer(model, loss, data, ...). With step(), no data are needed."
            raise DataError(msg)
        with self:
            assert self._run is not None, "entered"
            ended = "completed"
            while not self.assembly.budget.is_over(self.clock):
                if self._run.stop_is_asked():
                    ended = "stopped"
                    break
                data = self._next(self.feed)
                if data is None:
                    break
                if self.is_plain:
                    self.plain_step(data)
                else:
                    self.step_microbatches(data, self.feed.class_ids(self.clock))
                if self._run.evaluation_is_due(self.clock):
                    self._evaluate()
                if self._run.checkpoint_is_due(self.clock):
                    self._save()
            self.finite.look(self.clock.step)
            if ended == "completed":
                self._evaluate()
            self._ended = ended
            self._save()
            return self._result(ended)

    def _next(self, feed: Feed) -> Any:  # noqa: ANN401  (the short road takes the user's own nest)
        """Return what a step trains on: all on the short road, else this rank's microbatches; None at the end."""
        passes = feed.num_passes
        data = feed.whole(self.clock) if self.is_plain else feed.microbatches(self.clock, self.assembly.layout.mine)
        if feed.num_passes != passes and feed.steps_per_epoch is None:
            # Data without a length tell of an epoch's end only when asked for more.
            self.clock = self.clock._replace(epoch=feed.num_passes, step_in_epoch=0)
            if self.assembly.budget.is_over(self.clock):
                return None
        return data

    def step(self, batch: Data) -> StepOutcome:
        """Train on one step's rows: every rank is given the same batch, and takes its own microbatches of it.

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
        a = self.assembly
        parts = split_batch(as_batch(batch, self.clock.rows), a.num_microbatches)
        return self.step_microbatches([parts[i] for i in a.layout.mine], [a.router.class_of(part) for part in parts])

    def plain_step(self, data: Data) -> StepOutcome:
        """Take a step with V = 1, one rank and no route: the bare loop with a seed and one look at what is due."""
        a, turn = self.assembly, self.assembly.turns[0]
        batches: tuple[Batch, ...] = ()
        has_lineage = isinstance(data, Batch)
        rows, tokens = count_rows_and_tokens(data.data if isinstance(data, Batch) else data)
        if self.methods.change_batches or has_lineage or self._needs_outcome:
            batch = as_batch(data, self.clock.rows, trusted=True)
            batch = self.methods.batch(batch.to(a.device) if a.device.type != "cpu" else batch, self.position())
            data, batches = batch.data, (batch,)
        a.generators.seed(position_key(a.config.seed, "forward", self.clock.step, 0))
        statistics = a.statistics.copied()
        self.stopwatch.lap("data")
        loss_function = self.methods.loss(turn.loss, self.position()) if self.methods.change_losses else turn.loss
        try:
            if a.config.precision == "float32":
                result = loss_function(a.model, data)
            else:
                with a.config.autocast(a.device):
                    result = loss_function(a.model, data)
            if has_lineage:
                result = without_tombstones(result, batches[0].present)
            loss = scalar_of(result)
            self.finite.check(loss, self.clock.step)
            self.stopwatch.lap("forward")
            loss.backward()
            self.stopwatch.lap("backward")
            if self.methods.change_gradients:
                held = {p.name: p.tensor.grad for p in a.layout.parameters if p.tensor.grad is not None}
                root = self.methods.gradients(a.layout.weights().having(held), self.position())
        except BaseException:  # Whoever catches it and goes on takes this step anew.
            a.statistics.put_back(statistics)
            a.model.zero_grad()
            raise
        if self.methods.change_gradients:
            a.layout.commit(root, turn.indices, partial(turn.step, self.clock, a.budget))
        else:
            turn.step(self.clock, a.budget)
        self.stopwatch.lap("optimizer")
        return self._committed(rows, tokens, None, StepOutcome(self.clock, loss.detach(), [loss.detach()], batches))

    def step_microbatches(self, mine: Sequence[Batch], class_ids: Sequence[int | None]) -> StepOutcome:
        """Train on this rank's microbatches.

        Args:
            mine: microbatches r, r + W, ... of the step.
            class_ids: classes of all V microbatches.
        """
        a = self.assembly
        self.tell("step")
        positions = [self.position(m) for m in a.layout.mine]
        moved = [batch.to(a.device) for batch in mine]
        routes = self._routes(moved, class_ids)
        versions = buffer_versions(a.model) if self.clock.step == 0 else None
        frozen = self.methods.frozen(positions[0])
        self.stopwatch.lap("data")
        with a.statistics.captured():
            batches = [
                self.methods.batch(batch, at) if routes[at.microbatch].offered else batch
                for batch, at in zip(moved, positions, strict=True)
            ]
            self.stopwatch.lap("method")
            given = StepInput(batches, positions, routes, moved[0].num_tokens, frozen)
            first, losses, learnt, update_norms = self._turns(given)
        if versions is not None and (changed := a.statistics.unfolded(a.model, versions)):
            self._plan = self._plan.withdraw("elastic", f"forward changes the buffers {', '.join(changed)}")
        if a.statistics.layers:
            self.tell("fold")
            a.statistics.fold(first.statistics, a.ranks, lambda m, layer: a.router.teaches(routes[m], layer))
        rows = sum(batch.num_rows for batch in mine) * a.ranks.world
        tokens = sum(batch.num_tokens for batch in mine) * a.ranks.world
        outcome = StepOutcome(
            clock=self.clock,
            loss=losses[0],
            sub_losses=losses,
            batches=batches,
            routes=routes,
            weights=first.weights,
            num_rows=first.num_rows,
            norms=first.norms,
            update_norms=update_norms,
        )
        return self._committed(rows, tokens, learnt, outcome)

    def _routes(self, mine: Sequence[Batch], class_ids: Sequence[int | None]) -> list[Route]:
        """Look up what each of the step's V microbatches may teach."""
        a = self.assembly
        empty = a.layout.gather(empty_flags(mine, a.device)).flatten().tolist()
        return [
            a.router.route_of(class_id, self.clock.step, is_empty=bool(flag))
            for class_id, flag in zip(class_ids, empty, strict=True)
        ]

    def _turns(self, step: StepInput) -> tuple[StepGradients, list[Tensor], frozenset[str], Tensor | None]:
        """Let each sub-step compute its gradients and commit them.

        Returns the first one's gradients, all losses, names of what moved, and the update's norms where they're due.
        """
        a = self.assembly
        is_offered = any(route.offered for route in step.routes)
        measure = self._needs_outcome and self.clock.step % a.config.details_every == 0
        follow = self._needs_outcome and a.policy is not None and self.clock.step % a.config.update_norm_every == 0
        found: list[StepGradients] = []
        learnt: frozenset[str] = frozenset()
        update_norms: Tensor | None = None
        for turn in a.turns:
            gradients = self._passes(step, turn, measure=measure)
            self.stopwatch.lap("method")
            found.append(gradients)
            root = self.methods.gradients(gradients.root, step.positions[0])
            self.finite.check(gradients.loss, self.clock.step)
            if is_offered:
                before = a.layout.weights().copied() if follow else None
                self.tell("commit")
                learnt |= a.layout.commit(root, turn.indices, partial(turn.step, self.clock, a.budget))
                self.stopwatch.lap("optimizer")
                update_norms = None if before is None else update_norms_since(a.layout, before)
        return found[0], [gradients.loss for gradients in found], learnt, update_norms

    def _committed(self, rows: int, tokens: int, learnt: frozenset[str] | None, outcome: StepOutcome) -> StepOutcome:
        """Advance the clock, let averages follow, and report."""
        a = self.assembly
        self.clock = self.clock.advanced(rows, tokens, a.budget.steps_per_epoch, self.stopwatch.training_seconds())
        self.methods.after(self.position, learnt)
        self.stopwatch.lap("method")
        outcome = outcome._replace(clock=self.clock)
        if self._needs_outcome and self._run is not None:
            self.tell("report")
            self._run.report(outcome)
            self.stopwatch.lap("ledger")
        return outcome

    def position(self, microbatch: int = 0) -> Position:
        """Return a position of the step at which the clock stands."""
        a = self.assembly
        return Position(self.clock, a.budget, a.config.seed, microbatch, a.model, a.turns[0].loss)

    def averaged(self) -> AbstractContextManager[nn.Module]:
        """Give the model to evaluate and ship: `with trainer.averaged() as model`; averages are put in for as long."""
        return averaged(self.assembly, averaged_weights(self.assembly, self.methods.states, self.position()), self.feed)

    def _evaluate(self) -> None:
        if self.evaluation is None or self._run is None:
            return
        a = self.assembly
        with self.stopwatch.paused("evaluation"):
            self.tell("evaluate")
            with self.averaged() as model:
                self._metrics = evaluate(model, self.evaluation, a.ranks, a.device, a.config.autocast(a.device))
            self._run.evaluated(self.clock, self._metrics, self.stopwatch.training_seconds())

    def _save(self) -> None:
        """Write a checkpoint, if there is a folder for it."""
        if self._run is None or self.assembly.config.run_folder is None:
            return
        with self.stopwatch.paused("checkpoint"):
            self.finite.look(self.clock.step)
            self._run.save(self.clock, self._snapshot)

    def _snapshot(self) -> Checkpoint:
        self.tell("checkpoint")
        return snapshot(self.assembly, self.methods.states, self.clock, self._plan, self.feed)

    def __enter__(self) -> Self:
        """Open the run: deterministic kernels, threads, the run folder; go on from its last checkpoint."""
        if self._environment is not None:
            return self
        a = self.assembly
        with ExitStack() as stack:
            stack.enter_context(environment(a))
            facts = facts_of(a, self.prepared.data_digest)
            run = OpenRun(facts, a.config, a.budget, a.ranks, self.observers, a.layout.digest)
            with run.opening() as checkpoint:
                if checkpoint is not None:
                    restored = restore(checkpoint, a, self.feed)
                    self.methods.states, self.clock, self._plan = restored.states, restored.clock, restored.plan
                run.start(self.clock)
            # What is measured goes through collectives, so ranks must agree, whoever has observers.
            self._needs_outcome = a.ranks.agree(bool(run.observers))
            self._environment = stack.pop_all()
        self._run, self._ended = run, None
        self.stopwatch.start(self.clock.seconds)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the run: everything that was committed is on disk."""
        opened, run = self._environment, self._run
        if opened is None or run is None:
            return
        if kind is None and self._ended is None:
            # The user's own loop ends where its `with` does.
            self._ended = "completed" if self.assembly.budget.is_over(self.clock) else "stopped"
            try:
                self._save()
            except BaseException as refused:
                self.__exit__(type(refused), refused, refused.__traceback__)
                raise
        with opened:
            self.stopwatch.stop()
            if kind is not None:
                self._ended = "diverged" if issubclass(kind, DivergenceError) else "failed"
            assert self._ended is not None, "by itself or by an error"
            self._environment = self._run = None
            run.close(self._result(self._ended), self._plan)

    def _result(self, ended: str) -> RunResult:
        watch, folder = self.stopwatch, self.assembly.config.run_folder
        return RunResult(ended, self.clock, self._metrics, watch.training_seconds(), dict(watch.seconds), folder)

    def tell(self, event: str) -> None:
        """Tell the trace of an event."""
        if self.trace is not None:
            self.trace(event)
