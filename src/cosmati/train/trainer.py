"""The loop. Read it from top to bottom; `docs/loop.md` draws it.

`fit` calls `step` for each batch of the data, and `step` is public: who wants to keep the `for` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch, Data, count_rows_and_tokens
from cosmati.core.loss import Loss, LossFunction, as_loss, without_tombstones
from cosmati.core.method import Method, Position
from cosmati.core.plan import Promise
from cosmati.core.rng import position_key
from cosmati.core.source import Source
from cosmati.errors import DataError, DivergenceError, OutOfMemoryError
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import PolicyFile
from cosmati.train.assembly import SubStep
from cosmati.train.bare_calls import run_backward
from cosmati.train.collectives import run_alike, without_met
from cosmati.train.commit import Commit, step_plainly
from cosmati.train.config import RunConfig
from cosmati.train.cutting import refuse_uncut, shortage
from cosmati.train.due_details import NOTHING_DUE, DetailCadences
from cosmati.train.exporting import ExportingTrainer
from cosmati.train.feed import Feed, in_microbatches
from cosmati.train.finite import MAX_LEFT_OUT
from cosmati.train.forward_watch import loss_roots
from cosmati.train.gradients import StepInput
from cosmati.train.held import remember
from cosmati.train.ingredients import AnyOptimizer, Ingredients, listed
from cosmati.train.marks import StepRows, with_own_containers
from cosmati.train.named_evaluations import Evaluations
from cosmati.train.observers.observer import Observer
from cosmati.train.opening import warn_of_idle_schedulers
from cosmati.train.outcome import StepOutcome
from cosmati.train.prepare import prepare
from cosmati.train.region_changes import RegionDigests, region_digests
from cosmati.train.routes import Route
from cosmati.train.run.environment import numerics
from cosmati.train.run.result import RunResult
from cosmati.train.step_rows import as_batch, split_step
from cosmati.train.token_routes import without_withheld

_AS_IT_IS = nullcontext()


class Trainer(ExportingTrainer):
    """Trains a model.

    Args:
        model: the model; surgery may give it another root, see `trainer.model`.
        loss: `loss(model, data)` returns a scalar or a `Loss`; or a list of `SubStep`, for losses that take turns.
        data: a `Source`, or anything iterable that gives a step's rows at a time; None where only `step` is called.
        optimizers: configurations (`cosmati.optim.AdamW(lr=...)`), or torch optimizers already built; one, or several.
        methods: training methods, in any order; one, or several.
        policy: which class may teach which region.
        taxonomy: the classes that policy and data speak of.
        evaluation: what is measured, every `config.evaluate_every`: an `Evaluation`, or several by name.
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
        optimizers: Sequence[AnyOptimizer] | AnyOptimizer,
        methods: Sequence[Method] | Method = (),
        policy: PolicyFile | None = None,
        taxonomy: Taxonomy | None = None,
        evaluation: Evaluations | None = None,
        observers: Sequence[Observer] | Observer = (),
        config: RunConfig | None = None,
    ) -> None:
        optimizers, methods = listed(optimizers, AnyOptimizer), listed(methods, Method)
        given = Ingredients(model, loss, data, optimizers, methods, policy, taxonomy, config or RunConfig(), evaluation)
        super().__init__(prepare(given), evaluation, observers)
        a = self.assembly
        self._commit = Commit(a, self.methods, self.stopwatch, self.tell)
        self._num_left_out = 0
        self._learning = [a.layout.parameters[index] for index in sorted(a.turns[0].indices)]
        self._cadences = DetailCadences(a.config, is_governed=a.policy is not None)
        needed = self.methods.need_microbatches or self._cadences.need_microbatches
        self.is_plain = a.num_microbatches == 1 and not (a.policy or a.ranks.is_parallel or len(a.turns) > 1 or needed)

    def fit(self) -> RunResult:
        """Train to the end of the budget, from the last checkpoint in the run folder if there is one.

        Ctrl-C (and SIGTERM) end the run after the step in progress, with a checkpoint.

        Returns:
            How it ended: `completed`, `stopped` as asked, or `exhausted` where the data ended before the budget.

        Raises:
            DivergenceError: a loss or a gradient isn't finite; nothing of that step is kept.
            NoLongerVouchedError: an authority has taken back what the run learns from, and it stops with a checkpoint.
        """
        if self.feed is None:
            msg = "fit() needs data: Trainer(model, loss, data, ...). With step(), no data are needed."
            raise DataError(msg)
        warn_of_idle_schedulers(self.assembly, self.observers)
        with self:
            assert self._run is not None, "entered"
            ended, take = "completed", self._take if self.feed.sees_changes else partial(self.watched, self._take)
            with self._run.listening():
                while not self.assembly.budget.is_over(self.clock):
                    if self._run.stop_is_asked():
                        ended = "stopped"
                        break
                    self._get_ready()
                    given = self._next(self.feed)
                    if given is None:
                        ended = "completed" if self.assembly.budget.is_over(self.clock) else "exhausted"
                        break
                    take(*given)
            self.finite.look(self.clock.step)
            self.check_finite()
            self.look_around()
            if ended != "stopped":
                self.evaluate()
            self._ended = ended
            self.save()
            return self._result(ended)

    def _next(self, feed: Feed) -> tuple[Any, Sequence[int | None] | None] | None:
        """Return what a step trains on, as `_take` takes it; None at the end."""
        passes, cut = feed.num_passes, None if self.is_plain else in_microbatches(feed)
        data = feed.whole(self.clock) if cut is None else cut.microbatches(self.clock, self.assembly.layout.mine)
        if feed.num_passes != passes and feed.steps_per_epoch is None:
            # Data without a length tell of an epoch's end only when asked for more.
            self.clock = self.clock._replace(epoch=feed.num_passes, step_in_epoch=0)
            if self.assembly.budget.is_over(self.clock):
                return None
        if data is None or self.is_plain:
            return None if data is None else (data, None)
        if cut is not None:
            return data, cut.class_ids(self.clock)
        return split_step(self.assembly, self.clock, data, feed.generators)

    def step(self, batch: Data) -> StepOutcome:
        """Train on one step's rows: every rank is given the same batch, and takes its own microbatches of it.

        What is due after the step (evaluation, checkpoint) is done, as in `fit`; the last evaluation is `evaluate()`'s.

        Args:
            batch: the user's own nest of tensors, or a `Batch` with lineage.

        Raises:
            BatchError, PlanError: the batch can't be read or split.
            DivergenceError: the loss or a gradient isn't finite.
        """
        a = self.assembly
        self._is_bare = self._is_bare or self._opened is None
        # Where nobody says when this loop ends, the process is between its steps as the user left it.
        with numerics(a) if self._is_bare else _AS_IT_IS:
            self._get_ready(is_own=True)
            if self.is_plain and isinstance(batch, Batch):
                batch.check()
            return self.watched(self._take, *((batch, None) if self.is_plain else split_step(a, self.clock, batch)))

    def _take(self, data: Any, class_ids: Sequence[int | None] | None) -> StepOutcome:  # noqa: ANN401  (see `_next`)
        """Take a step, and do what is due after it.

        Args:
            data: the step's, whole; or this rank's microbatches of it.
            class_ids: of all V microbatches; None where the data are whole.
        """
        assert self._run is not None, "opened"
        self._begin_step()
        if self._continuity is not None and not self._continuity.has_seen:
            first = data if class_ids is None else data[0]
            self._continuity.see(first.data if isinstance(first, Batch) else first)
        put_back = None if self.assembly.config.on_divergence == "stop" else self._remember()
        try:
            outcome = self._cut_as_needed(data, class_ids)
        except DivergenceError as error:
            if put_back is None:
                raise
            put_back()
            self._num_left_out += 1
            if self._num_left_out > MAX_LEFT_OUT:
                raise
            outcome = self._left_out(data, class_ids, str(error))
        else:
            self._num_left_out = 0
        if not self.clock.step & (self.clock.step - 1):  # 1, 2, 4, 8, ...
            self.look_around()
        if self._run.evaluation_is_due(self.clock):
            self.evaluate()
        if self._run.checkpoint_is_due(self.clock):
            self.save()
        return outcome

    def _cut_as_needed(self, data: Any, class_ids: Sequence[int | None] | None) -> StepOutcome:  # noqa: ANN401
        """Take a step, and take it anew with smaller microbatches as long as memory is too short."""
        why = "as in an earlier attempt" if self.cuts.is_due(self.clock.step) else ""
        rows = self._rows = StepRows(data)
        while True:
            if class_ids is None and (why or self.cuts.made):
                data, class_ids = split_step(self.assembly, self.clock, data)
            if why:
                have_changed = self.assembly.ranks.agree(rows.have_changed())
                refuse_uncut(data, self.cuts.pieces, self.clock.step, why, have_changed=have_changed)
                self.halve_microbatches(why, state_moves=self._commit.watch.has_moved)
            try:
                if class_ids is None:
                    return self.plain_step(data)
                return self.step_microbatches(self.cuts.cut(data), list(class_ids) * self.cuts.pieces)
            except OutOfMemoryError as error:
                why = str(error)  # No more here: until the handler has ended, its frames hold what didn't fit.

    def _remember(self) -> Callable[[], None]:
        """Copy what a forward pass may spoil, where a step may be left out; return how to put it back."""
        return remember({"": self.assembly.model, **loss_roots([turn.loss for turn in self.assembly.turns])})

    def plain_step(self, data: Data) -> StepOutcome:
        """Take a step with V = 1, one rank and no route: the bare loop with a seed and one look at what is due."""
        a, turn, statistics = self.assembly, self.assembly.turns[0], self.assembly.statistics
        batches: tuple[Batch, ...] = ()
        data, has_lineage = with_own_containers(data), isinstance(data, Batch)
        rows, tokens = count_rows_and_tokens(data.data if isinstance(data, Batch) else data)
        if isinstance(data, Batch) and rows != data.num_rows:
            data.check()  # Where the first tensor speaks of the same rows, nobody looks at all of it (10 us).
        if self.methods.change_batches or has_lineage or self._needs_outcome:
            batch = as_batch(data, self.clock.rows, trusted=True)
            batch = self.methods.batch(batch.to(a.device) if a.device.type != "cpu" else batch, self.position())
            data, batches = batch.data, (batch,)
        a.generators.seed(position_key(a.config.seed, "forward", self.clock.step, 0))
        before = statistics.copied() if statistics.layers else ()
        for parameter in self._learning:
            parameter.tensor.grad = None  # What somebody's own backward has left isn't this step's.
        self.stopwatch.lap("data")
        loss_function = self.methods.loss(turn.loss, self.position()) if self.methods.change_losses else turn.loss
        try:
            loss = self._differentiated(loss_function, data, batches[0].present if has_lineage else None)
            if loss is None:
                nothing = torch.zeros((), device=a.device)
                return self._committed(rows, tokens, frozenset(), loss=nothing, sub_losses=[nothing], batches=batches)
            root, gradients = None, [p.tensor.grad for p in self._learning if p.tensor.grad is not None]
            if self.methods.change_gradients:
                held = {p.name: p.tensor.grad for p in a.layout.parameters if p.tensor.grad is not None}
                root = self.methods.gradients(a.layout.weights().having(held), self.position())
                gradients = list(root.tensors.values())
            self.finite.check(loss, self.clock.step, gradients, statistics.own if statistics.layers else ())
        except BaseException as error:  # Whoever catches it and goes on takes this step anew.
            statistics.put_back(before)
            a.model.zero_grad()
            if why := shortage(error):
                raise OutOfMemoryError(why) from None
            raise
        step_plainly(a, turn, self.clock, root)
        self.stopwatch.lap("optimizer")
        loss = loss.detach()
        return self._committed(rows, tokens, None, loss=loss, sub_losses=[loss], batches=batches)

    def _differentiated(self, loss_function: LossFunction, data: Data, present: Tensor | None) -> Tensor | None:
        """Run the one microbatch forward and backward; return its loss, None where no row has any weight."""
        a, watch = self.assembly, self._commit.watch
        watch.step_begins(self.clock.step)
        with watch.around():
            with _AS_IT_IS if a.config.precision == "float32" else a.config.autocast(a.device):
                result = loss_function(a.model, data)
            result = as_loss(result if present is None else without_tombstones(result, present))
            loss = result.mean() if isinstance(result, Loss) else result
            self.stopwatch.lap("forward")
            has_weight = not isinstance(result, Loss) or bool(result.weight)
            if has_weight:
                run_backward(loss)
                self.stopwatch.lap("backward")
        if watch.is_on:
            self._plan = watch.judged(self._plan)
        return loss if has_weight else None

    def step_microbatches(self, mine: Sequence[Batch], class_ids: Sequence[int | None]) -> StepOutcome:
        """Train on this rank's microbatches.

        Args:
            mine: this rank's, in the order of its slots.
            class_ids: classes of all V microbatches, or of all their pieces.
        """
        a = self.assembly
        self.tell("step")
        positions = [self.position(m) for m in a.ranks.mine(len(class_ids))]
        for batch, at in zip(mine, positions, strict=True):
            a.router.check(batch, class_ids[at.microbatch])
        moved = [batch.to(a.device) for batch in mine]
        routes = self._routes(moved, class_ids)
        self._commit.watch.step_begins(self.clock.step, has_packs=any(r.tokens and r.tokens.mixed for r in routes))
        frozen = self.methods.frozen(positions[0])
        offered = [route.offered for route in routes]
        due = self._cadences.due(self.clock.step, is_offered=any(offered)) if self._needs_outcome else NOTHING_DUE
        before = region_digests(a.layout) if due.digests else None
        self.stopwatch.lap("data")
        with a.statistics.captured():
            own = [routes[at.microbatch] for at in positions]
            changes = [partial(self._changed, *one) for one in zip(moved, own, positions, strict=True)]
            batches, failure = run_alike(a.ranks, offered, changes, runs_model=self.methods.change_batches)
            self.stopwatch.lap("method")
            given = StepInput(batches or moved, positions, routes, routes[0].num_tokens, frozen, failure)
            done = self._commit(given, self.clock, self.finite, due)
        self._plan = without_met(self._commit.watch.judged(self._plan), a.ranks, is_on=self._commit.watch.is_on)
        if a.statistics.layers:
            self.tell("fold")
            a.statistics.fold(done.statistics)
        rows, tokens = (sum(getattr(route, n) for route in routes) for n in ("num_rows", "num_tokens"))
        return self._committed(
            rows,
            tokens,
            done.learnt,
            loss=done.losses[0],
            sub_losses=done.losses,
            batches=batches,
            routes=routes,
            weights=done.first.weights,
            num_rows=done.first.num_rows,
            labels=done.first.labels,
            **done.figures._asdict(),
            **({} if done.update is None else done.update.by_name),
            digests=before,
            taught=done.taught,
            given=moved,
        )

    def _changed(self, batch: Batch, route: Route, at: Position) -> Batch:
        """Return a microbatch as the methods leave it; they score rows with what is their class's own."""
        with self.assembly.router.running(route, batch, self.assembly.device):
            return self.methods.batch(without_withheld(batch, route.tokens), at) if route.offered else batch

    def _left_out(self, data: Any, class_ids: Sequence[int | None] | None, why: str) -> StepOutcome:  # noqa: ANN401
        """Go on as if the step's rows weren't there, and say so in the record."""
        because = f"step {self.clock.step} was left out: {why}"
        self._plan = self._plan.withdraw(Promise.ISOLATED, because)
        for g in self._plan.guarantees:
            # Rows of any class may have been what wasn't finite, and every region has missed the step.
            if g.holds and g.promise in (Promise.PARITY, Promise.NO_DIRECT_WRITE):
                self._plan = self._plan.withdraw(g.promise, because, g.pair)
        mine = data if class_ids is not None else [as_batch(data, self.clock.rows, trusted=True)]
        nothing = torch.zeros(self.assembly.num_microbatches, dtype=torch.float64)
        routes = self._routes(mine, class_ids or [0])
        rows, tokens = (sum(getattr(route, n) for route in routes) for n in ("num_rows", "num_tokens"))
        return self._committed(
            rows,
            tokens,
            frozenset(),
            loss=torch.tensor(torch.nan),
            sub_losses=[],
            batches=mine,
            routes=[route._replace(offered=False) for route in routes],
            weights=nothing,
            num_rows=nothing,
            left_out=why,
        )

    def _routes(self, mine: Sequence[Batch], class_ids: Sequence[int | None]) -> list[Route]:
        """Look up what each of the step's V microbatches may teach."""
        a, step = self.assembly, self.clock.step
        return a.router.routes(class_ids, step, a.layout.gather(a.router.found(mine, class_ids, step, a.device)))

    def _committed(
        self,
        rows: int,
        tokens: int,
        learnt: frozenset[str] | None,
        **outcome: Any,  # noqa: ANN401  (fields of StepOutcome)
    ) -> StepOutcome:
        """Advance the clock, let averages follow, and report."""
        a = self.assembly
        self.clock = self.clock.advanced(rows, tokens, a.budget.steps_per_epoch, self.stopwatch.training_seconds())
        self.methods.after(self.position, learnt)
        self.stopwatch.lap("method")
        if not (self._needs_outcome and self._run is not None):
            return StepOutcome(self.clock, **outcome)
        self.tell("report")
        if (before := outcome.get("digests")) is not None:
            outcome["digests"] = RegionDigests(before, region_digests(a.layout))
        rates = [float(scheduled.optimizer.param_groups[0]["lr"]) for scheduled in a.optimizers]
        if learnt is None or learnt:
            outcome["gradient_norm"] = self.finite.norm_later()
        done = StepOutcome(self.clock, learning_rates=rates, **outcome)
        self._run.report(done)
        self.stopwatch.lap("ledger")
        return done
