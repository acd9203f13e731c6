"""A trainer keeps its word around the loop: what it opens, measures, saves and withdraws, whoever asks when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati import Evaluation, RunConfig, Trainer
from cosmati.core.clock import Clock
from cosmati.core.loss import Regression
from cosmati.core.plan import Guarantee, Promise
from cosmati.errors import DataError, PlanError
from cosmati.methods import EMA
from cosmati.optim import SGD
from cosmati.provenance.authority.errors import DeclaredOnlyError
from cosmati.train import lifecycle
from cosmati.train.marks import StepRows
from cosmati.train.observers import History, Observer
from cosmati.train.opening import open_run, without_ends

GENERATOR = torch.Generator().manual_seed(5)
ROWS = [(torch.randn(4, 3, generator=GENERATOR), torch.randn(4, 1, generator=GENERATOR)) for _ in range(4)]
PAIR = ("warm", "body")


def make(data: Any = None, budget: str = "4ba", **given: Any) -> Trainer:
    torch.manual_seed(1)
    config = RunConfig(**{"budget": budget, "num_threads": 1} | given.pop("config", {}))
    model = given.pop("model", None) or nn.Linear(3, 1)
    loss = given.pop("loss", Regression())
    settings: dict[str, Any] = {"optimizers": [SGD(lr=0.1)], "config": config} | given
    return Trainer(model, loss, data, **settings)


def measured(value: float = 2.0) -> Evaluation:
    return Evaluation(ROWS[:1], {"it": lambda *_: value})


def weight(trainer: Trainer) -> nn.Parameter:
    return next(trainer.model.parameters())


def promise_all(trainer: Trainer, *broken: Promise) -> None:
    """Let a run promise all there is, twice for a pair, but what was broken before."""
    made = [Guarantee(one, one not in broken, "before", PAIR if "_" in one else None) for one in Promise]
    trainer._plan = replace(trainer._plan, guarantees=tuple(made))


def broken(trainer: Trainer) -> dict[str, str]:
    return {str(g.promise): g.because for g in trainer.plan.guarantees if not g.holds}


class Told(Observer):
    """Keeps what it was told, in order."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_start(self, clock: Clock, budget: Any) -> None:
        self.told.append(("start", clock.step))

    def on_step_begin(self, clock: Clock) -> None:
        self.told.append(("begin", clock.step))

    def on_evaluation(self, clock: Clock, metrics: Mapping[str, float], seconds: float) -> None:
        self.told.append(("evaluation", clock.step, dict(metrics), seconds > 0))

    def on_end(self, clock: Clock, outcome: str) -> None:
        self.told.append(("end", clock.step, outcome))


def test_before_it_is_opened_nothing_has_happened() -> None:
    trainer = make()
    assert (trainer.model, trainer.trace, trainer.clock) == (trainer.assembly.model, None, Clock())
    assert (trainer.changed, trainer.should_stop, trainer.evaluate()) == ((), False, {})
    trainer.save()
    trainer.check_finite()
    trainer.stop()
    assert trainer.should_stop is True, "a loop of one's own has no step to do"


def test_one_observer_is_a_list_of_one_and_no_evaluation_has_no_names() -> None:
    one, evaluation = History(), measured()
    trainer = make(observers=one, evaluation={"it": evaluation})
    assert trainer.observers == [one]
    assert trainer.evaluation == {"it": evaluation}
    with pytest.raises(DataError, match="evaluation is a int"):
        make(evaluation=3)


def test_states_are_the_methods() -> None:
    trainer = make(methods=[EMA(half_life="1ba")])
    assert trainer.states is trainer.methods.states
    assert sorted(trainer.states) == [0]


class Ends(Observer):
    ends_runs = True


def test_who_may_end_the_run_is_told_by_its_plan() -> None:
    plan = make().plan
    made = replace(plan, guarantees=(Guarantee(Promise.ISOLATED, holds=True, because="before", pair=PAIR),))
    assert without_ends(made, [Ends()]).guarantees[0].because.startswith("Ends may end the run")
    assert without_ends(made, [History()]) == made


def test_a_run_that_was_stopped_by_its_rows_isolates_nothing() -> None:
    trainer = make()
    promise_all(trainer)
    with trainer:
        assert broken(trainer) == {}
        assert trainer._run is not None
        trainer._run.ask_to_stop("the loss is low")
        assert list(broken(trainer)) == ["isolated"]
    assert broken(trainer)["isolated"].startswith("the run was stopped: the loss is low, which may follow from any row")


@pytest.mark.parametrize("doubt", ["", "its order is unknown"])
def test_what_a_feed_doubts_is_taken_back_once(doubt: str) -> None:
    trainer = make(ROWS)
    promise_all(trainer, Promise.ELASTIC)
    trainer.feed = SimpleNamespace(doubt=doubt)
    told = {"resume": doubt, "elastic": "before", "replayable": doubt} if doubt else {"elastic": "before"}
    assert broken(trainer) == told
    assert trainer._plan is trainer.plan or not doubt


def test_rows_that_a_step_has_changed_break_all_promises_of_the_next_that_is_given_them() -> None:
    trainer, rows = make(), torch.ones(2, 3)
    promise_all(trainer, Promise.PARITY)
    given: list[Any] = []

    def takes(rows: Any, *others: Any) -> str:
        trainer._rows = StepRows(rows)
        given.append((rows, others))
        rows[0].add_(1)
        return "taken"

    trainer.clock = Clock(step=6)
    both: Any = [rows, torch.zeros(1)]
    assert trainer.watched(takes, both, 1, 2) == "taken"
    assert (given[0][0] is both, given[0][1], trainer._rows) == (True, (1, 2), None)
    assert broken(trainer) == {"parity": "before"}
    assert trainer.watched(lambda given: given, rows) is rows
    because = "step 6 is given rows that an earlier step, of this trainer or another one, has changed in place"
    told = broken(trainer)
    assert told.pop("parity") == "before"
    assert [text.startswith(because) for text in told.values()] == [True] * 5
    assert all("x = x.clone()" in text for text in told.values())
    promise_all(trainer)
    trainer.watched(lambda given: given, [torch.zeros(1), rows])
    assert len(broken(trainer)) == 6
    promise_all(trainer)
    trainer.watched(lambda given: given, rows.clone())
    assert broken(trainer) == {}


def test_rows_that_a_failing_step_has_changed_are_known_too() -> None:
    trainer, rows = make(), torch.ones(2, 3)
    promise_all(trainer)

    def fails(rows: Tensor) -> None:
        trainer._rows = StepRows(rows)
        rows.zero_()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trainer.watched(fails, rows)
    assert trainer._rows is None
    trainer.watched(lambda given: given, rows)
    assert len(broken(trainer)) == 6


def test_rows_that_stay_as_they_are_break_nothing() -> None:
    trainer, rows = make(), torch.ones(2, 3)
    promise_all(trainer)

    def reads(rows: Tensor) -> None:
        trainer._rows = StepRows(rows)

    trainer.watched(reads, rows)
    assert trainer._rows is None
    trainer.watched(reads, rows)
    assert broken(trainer) == {}


def test_a_loop_of_ones_own_stops_with_its_budget_or_when_asked() -> None:
    trainer = make(budget="2ba")
    with trainer:
        trainer.step(ROWS[0])
        assert trainer.should_stop is False
        trainer.step(ROWS[1])
        assert trainer.should_stop is True
    other = make()
    with other:
        other.stop()
        assert other.should_stop is True
        assert other._is_stopped is False
    assert other.should_stop is False, "the stop was of the run that has ended"


def test_a_budget_in_epochs_ends_no_loop_of_ones_own() -> None:
    class Endless:
        def __iter__(self) -> Iterator[Any]:
            yield from ROWS

    trainer = make(Endless(), "1ep")
    assert trainer.should_stop is False
    trainer.feed = None
    with pytest.raises(PlanError, match="epoch"):
        _ = trainer.should_stop


def test_a_stop_before_the_run_is_of_the_next_run_alone() -> None:
    trainer = make(ROWS)
    trainer.stop()
    with trainer:
        assert trainer.should_stop is True
    assert (trainer.clock.step, trainer._ended) == (0, "stopped")
    assert trainer.fit().outcome == "completed"


def test_a_position_is_of_the_step_at_which_the_clock_stands() -> None:
    trainer = make(config={"seed": 9, "num_microbatches": 2})
    trainer.clock = Clock(step=3)
    first, second = trainer.position(), trainer.position(1)
    assert (first.clock.step, first.seed, first.microbatch, second.microbatch) == (3, 9, 0, 1)
    assert first.model is trainer.model
    assert first.loss is trainer.assembly.turns[0].loss
    assert (first.image_size, first.budget) == (trainer.assembly.image_size, trainer.assembly.budget)


@pytest.mark.parametrize(("reads", "told"), [((), True), ((True, True), True), ((True, False, True), False)])
def test_who_reads_the_budget_without_a_word_is_noted_for_good(reads: Sequence[bool], told: bool) -> None:
    trainer = make()
    with trainer:
        continuity = trainer._continuity
        assert continuity is not None
        for is_told in reads:
            _ = trainer.position().budget_told if is_told else trainer.position().budget
        assert (continuity.budget_was_read, continuity.budget_use_is_told) == (bool(reads), told)


def test_averages_stand_in_for_as_long_as_the_outermost_with() -> None:
    trainer = make(methods=[EMA(half_life="1ba")])
    with trainer:
        trainer.step(ROWS[0])
        trainer.step(ROWS[1])
        own = weight(trainer).clone()
        with trainer.averaged() as model:
            assert model is trainer.model
            assert not torch.equal(next(model.parameters()), own)
            with trainer.averaged():
                pass
            for what, act in (("step()", lambda: trainer.step(ROWS[0])), ("save()", trainer.save)):
                with pytest.raises(PlanError) as caught:
                    act()
                assert str(caught.value).startswith(f"{what} within averaged(), where averages stand in")
                assert str(caught.value).endswith(f"Call {what} after the `with`.")
        assert torch.equal(weight(trainer), own)
        with pytest.raises(ZeroDivisionError), trainer.averaged():
            raise ZeroDivisionError
        assert torch.equal(weight(trainer), own)
        trainer.step(ROWS[1])
    assert trainer.clock.step == 3


def test_a_step_begins_for_who_asked_and_notes_the_mode_of_its_model() -> None:
    told = Told()
    trainer = make(observers=told)
    trainer._begin_step()
    with trainer:
        trainer.model.eval()
        trainer._begin_step()
        assert trainer._is_training is False
        trainer._needs_outcome = False
        trainer.model.train()
        trainer._begin_step()
        assert trainer._is_training is True
    assert told.told == [("start", 0), ("begin", 0), ("end", 0, "stopped")]


def test_rows_of_a_loop_are_declared_only() -> None:
    trainer = make(ROWS)
    config = replace(trainer.assembly.config, require_signed=True)
    trainer.assembly = replace(trainer.assembly, config=config)
    with pytest.raises(DeclaredOnlyError, match="rows that step\\(\\) is given are only declared"):
        trainer._get_ready(is_own=True)
    assert trainer._run is None
    trainer._get_ready()
    assert trainer._run is not None
    trainer.__exit__(None, None, None)


class Watches:
    """What stands where those are asked who vouch for data, or for a policy."""

    def __init__(self, told: list[Any]) -> None:
        self.told = told
        self.start, self.close = lambda: told.append("start"), lambda *given: told.append(("close", *given))
        self.reads = lambda evaluation, step: told.append(("reads", step))  # says no

    def before_step(self, *given: Any) -> Any:
        self.told.append(given)
        return given[-1]


def test_who_vouches_is_asked_from_the_opening_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    data: list[Any] = []
    policy: list[Any] = []
    trainer = make(evaluation=measured())

    def opens(prepared: Any, *rest: Any) -> Any:
        observers, plan, clock, policy_watch = rest
        assert policy_watch is trainer.policy_watch
        return open_run(replace(prepared, watch=None), observers, plan, clock, None)

    monkeypatch.setattr(lifecycle, "open_run", opens)
    trainer.prepared = replace(trainer.prepared, watch=Watches(data))  # type: ignore[arg-type]
    trainer.policy_watch = Watches(policy)  # type: ignore[assignment]
    with trainer:
        run, continuity, plan = trainer._run, trainer._continuity, trainer._plan
        assert data == ["start"]
        trainer._get_ready()
        assert trainer._plan is plan
        assert trainer.evaluate() == {}
    assert data == ["start", (run, Clock(), trainer.save), ("reads", 0), ("close",)]
    assert policy == [(run, Clock(), continuity, plan), ("close", "stopped")]
