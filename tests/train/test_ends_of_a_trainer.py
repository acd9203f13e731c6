"""A run that is opened is closed, whatever fails: with what it has measured, saved, and taken back until then."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cosmati import Evaluation, InMemory
from cosmati.core.clock import Clock
from cosmati.core.plan import Promise
from cosmati.errors import DataError, DivergenceError, PlanError
from cosmati.methods import EMA
from cosmati.provenance.authority.errors import NoLongerVouchedError
from cosmati.records.run import RunRecord
from cosmati.train import lifecycle
from cosmati.train.continuity import Continuity
from cosmati.train.identity import Change
from cosmati.train.observers import History
from cosmati.train.opening import read_back
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from tests.train.test_life_of_a_trainer import ROWS, Told, broken, make, measured, promise_all, weight


def outcome(folder: Path) -> str | None:
    return RunRecord.from_json((folder / "run.json").read_text()).outcome


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in list_checkpoints(folder / "checkpoints"))


def facts(folder: Path) -> dict[str, Any]:
    return dict(read_checkpoint(list_checkpoints(folder / "checkpoints")[0]).facts)


@pytest.mark.parametrize("state_moves", [False, True])
def test_microbatches_are_halved_on_record_and_the_plan_says_why(
    state_moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    trainer, told = make(config={"num_microbatches": 2}), list[Any]()
    with trainer:
        promise_all(trainer, Promise.PARITY)
        assert trainer._run is not None
        monkeypatch.setattr(trainer._run, "cut", lambda *given: told.append(given))
        trainer.clock = Clock(step=3)
        with pytest.warns(UserWarning, match=r"too short for step 3 \(no room\): each .* 4 in place of 2 from here on"):
            trainer.halve_microbatches("no room", state_moves=state_moves)
        assert told == [(trainer.clock, trainer.cuts, Change("microbatches", 2, 4))]
        assert (trainer.cuts.made, emptied) == ([(3, 2)], [1])
        because = "memory was short at step 3: 4 microbatches since, 2 before (no room)"
        also = {"resume", "replayable"} if state_moves else set()
        assert broken(trainer) == dict.fromkeys({"elastic", "isolated"} | also, because) | {"parity": "before"}
        with pytest.warns(UserWarning, match=r"8 in place of 4 .* Begin with num_microbatches=8 next time"):
            trainer.halve_microbatches("no room", state_moves=False)
        trainer.clock = Clock()


def test_what_is_measured_is_told_and_kept_until_it_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    told, events = Told(), list[str]()
    trainer = make(evaluation=measured(), observers=told, methods=[EMA(half_life="1ba")])
    trainer.trace = events.append
    with trainer:
        assert (trainer._metrics, trainer._evaluated_at) == ({}, None)
        trainer.clock = Clock(step=2)
        met: list[Any] = []
        monkeypatch.setattr(lifecycle, "meet", lambda *given: met.append(given))
        found = trainer.evaluate()
        assert met == [(trainer.assembly.ranks, "evaluate()")]
        assert (found, trainer._metrics, trainer._evaluated_at) == ({"it": 2.0}, {"it": 2.0}, trainer.clock)
        assert (events, trainer._num_averaged) == (["evaluate"], 0)
        assert trainer.stopwatch.seconds["evaluation"] > 0
        assert "checkpoint" not in trainer.stopwatch.seconds
        trainer.clock = Clock()
    assert told.told == [("start", 0), ("evaluation", 2, {"it": 2.0}, True), ("end", 0, "stopped")]
    assert trainer.evaluate() == {}
    assert trainer._metrics == {"it": 2.0}


@pytest.mark.parametrize("keeps", [False, True])
def test_what_is_measured_are_averages_where_there_are_any(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(evaluation=measured(), methods=[EMA(half_life="1ba")] if keeps else [])
    with trainer:
        assert trainer._run is not None
        told: list[Any] = []
        trainer.step(ROWS[0])
        monkeypatch.setattr(trainer._run, "evaluated", lambda *given: told.append(given))
        trainer.evaluate()
        assert told[0][:2] == (trainer.clock, {"it": 2.0})
    assert told[0][3] == (b"", "averaged" if keeps else "trained")


def test_a_checkpoint_is_written_once_a_step_after_a_look_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, met, events = list[Any](), list[Any](), list[str]()
    trainer = make(config={"run_folder": tmp_path, "num_checkpoints": 9})
    trainer.trace = events.append
    monkeypatch.setattr(lifecycle, "meet", lambda *given: met.append(given))
    with trainer:
        assert checkpoints(tmp_path) == [0]
        trainer.step(ROWS[0])
        met.clear()
        monkeypatch.setattr(trainer.finite, "look", lambda step: looked.append(("finite", step)))
        look = trainer.look_around
        monkeypatch.setattr(trainer, "look_around", lambda: (looked.append("around"), look()))  # type: ignore[func-returns-value]
        events.clear()
        trainer.save()
        trainer.save()
        assert events == ["checkpoint"]
        assert looked == [("finite", 1), "around"] * 2
        assert met == [(trainer.assembly.ranks, "save()")] * 2
        assert trainer.stopwatch.seconds["checkpoint"] > 0
    assert checkpoints(tmp_path) == [0, 1]
    assert outcome(tmp_path) == "stopped"


def test_without_a_folder_nothing_is_looked_at_for_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make()
    with trainer:
        monkeypatch.setattr(lifecycle, "meet", lambda *given: pytest.fail("nobody has to come"))
        trainer.save()


def test_others_hands_are_seen_with_and_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (None, tmp_path):
        trainer = make(config={"run_folder": folder})
        promise_all(trainer)
        asked: list[Any] = []
        monkeypatch.setattr(trainer._optimizer_watch, "refuse_unsavable", asked.append)
        trainer.look_around()
        assert [sorted(one) for one in asked] == ([] if folder is None else [["bias", "weight"]])
        trainer.assembly.optimizers[0].optimizer.register_step_pre_hook(lambda *_: None)
        trainer.look_around()
        assert set(broken(trainer)) >= {"resume", "replayable", "no_direct_write"}
        weight(trainer).requires_grad_(False)
        with pytest.raises(PlanError, match="weight"):
            trainer.look_around()


@pytest.mark.parametrize("what", ["weight", "optimizer"])
def test_what_is_not_finite_is_found_where_nothing_is_written(what: str) -> None:
    model = nn.Linear(3, 1)
    model.register_buffer("mask", torch.full((2,), -math.inf))
    trainer = make(model=model, optimizers=[torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)])
    with pytest.raises(DivergenceError, match="momentum_buffer" if what == "optimizer" else "weight"), trainer:  # noqa: PT012
        trainer.step(ROWS[0])
        trainer.check_finite()
        kept = trainer.assembly.optimizers[0].optimizer.state[model.weight]["momentum_buffer"]
        (model.weight.data if what == "weight" else kept).fill_(math.nan)
        trainer.check_finite()
    assert trainer._ended == "diverged"


def test_a_checkpoint_keeps_cuts_modes_and_what_is_broken(tmp_path: Path) -> None:
    trainer = make(config={"run_folder": tmp_path})
    with trainer:
        trainer.cuts.made.append((0, 1))
        trainer.step(ROWS[0])
        trainer.save()
        found = facts(tmp_path)
        assert (found["cuts"], found["modes"], found["clock"][0]) == ([[0, 1]], {}, 1)
        assert found["probe"]["losses"] is not None
        trainer.step(ROWS[1])
        trainer.model.eval()
        trainer._plan = trainer._plan.withdraw(Promise.RESUME, "by hand")
        trainer.save()
        trainer._run.settle()  # type: ignore[union-attr]
        found = facts(tmp_path)
        assert (found["modes"], found["probe"]["losses"], ["resume", "by hand"] in found["withdrawn"]) == (
            None, None, True,
        )  # fmt: skip


def test_what_a_checkpoint_compares_is_asked_of_its_step_and_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, asked = make(config={"run_folder": tmp_path}), list[Any]()
    with trainer:
        trainer.step(ROWS[0])
        assert trainer._continuity is not None
        compare = trainer._continuity.facts

        def told(*given: Any, **how: Any) -> dict[str, Any]:
            asked.append((given, how))
            return compare(*given, **how)

        monkeypatch.setattr(trainer._continuity, "facts", told)
        trainer.save()
        assert asked == [((1, trainer.plan), {"compare_code": trainer.plan.holds(Promise.RESUME), "keep_modes": True})]


def test_a_second_opening_ends_by_itself_and_begins_with_the_modes_of_its_model(tmp_path: Path) -> None:
    trainer = make(budget="1ba", config={"run_folder": tmp_path})
    trainer.model.eval()
    with trainer:
        assert facts(tmp_path)["modes"] is not None
    assert trainer._ended == "stopped"
    with trainer:
        trainer.step(ROWS[0])
    assert (trainer._ended, checkpoints(tmp_path)) == ("completed", [0, 1])


def test_nan_in_an_optimizers_options_is_never_published(tmp_path: Path) -> None:
    trainer = make(config={"run_folder": tmp_path})
    with pytest.raises(DivergenceError, match="weight_decay"), trainer:  # noqa: PT012
        trainer.step(ROWS[0])
        trainer.assembly.optimizers[0].optimizer.param_groups[0]["weight_decay"] = math.nan
        trainer.save()
    assert checkpoints(tmp_path) == [0]
    assert outcome(tmp_path) == "diverged"


def test_a_run_is_opened_once_and_its_numerics_end_with_it() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    trainer = make()
    with trainer as entered:
        assert entered is trainer
        run = trainer._run
        assert torch.are_deterministic_algorithms_enabled()
        assert trainer.__enter__() is trainer
        assert trainer._run is run
    assert torch.are_deterministic_algorithms_enabled() == before
    assert (trainer._run, trainer._opened) == (None, None)
    trainer.__exit__(None, None, None)
    assert trainer._ended == "stopped"


def test_a_resumed_run_has_what_it_measured_and_is_not_tried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"methods": [EMA(half_life="1ba")], "config": {"run_folder": tmp_path}, "budget": "1ba"}
    with make(evaluation=measured(3.0), **given) as first:
        first.step(ROWS[0])
        first.evaluate()
        kept = {name: one.clone() for name, one in first.states[0].items()}
        seconds = first.clock.seconds
    again = make(evaluation=measured(3.0), **given)
    monkeypatch.setattr(again, "_try_out", lambda: pytest.fail("it has begun"))
    with again:
        assert (again.clock.step, dict(again._metrics)) == (1, {"it": 3.0})
        assert again.states[0].keys() == kept.keys() == {"average/weight", "average/bias"}
        assert all(torch.equal(again.states[0][name], one) for name, one in kept.items())
        assert again.stopwatch.training_seconds() >= seconds > 0
        again._metrics = {"it": 4.0}
    with again:
        assert again._metrics == {"it": 4.0}, "what this process has measured is newer"
    assert again._ended == "completed"


def test_who_takes_a_step_of_a_run_that_goes_on_is_told(tmp_path: Path) -> None:
    given: dict[str, Any] = {"config": {"run_folder": tmp_path}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with make(**given) as first:
            first.step(ROWS[0])
        with make(**given):
            pass
        bare = make()
        bare.step(ROWS[0])
    again = make(**given)
    with pytest.warns(UserWarning, match=r"goes on at step 1, which was found .* `with trainer:`") as told:
        again.step(ROWS[1])
    assert told[0].filename == __file__
    with again:
        assert again._is_bare is False
    assert (again._ended, again.clock.step) == ("stopped", 2)


def test_before_the_first_step_one_batch_is_seen_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    asked: list[int] = []

    def metric(model: nn.Module, data: Any) -> float:
        asked.append(len(data[0]))
        return 0.0

    evaluation = evaluation_by(metric)
    trainer = make(ROWS, evaluation=evaluation, config={"run_folder": tmp_path})
    see = Continuity.see

    def sees(self: Continuity, data: Any) -> None:
        seen.append(data)
        see(self, data)

    def reads(assembly: Any) -> None:
        seen.append(checkpoints(tmp_path))
        read_back(assembly)

    monkeypatch.setattr(Continuity, "see", sees)
    monkeypatch.setattr(lifecycle, "read_back", reads)
    with trainer:
        (first, after) = seen
        assert torch.equal(first[0], ROWS[0][0])
        assert (after, asked, trainer._num_averaged) == ([0], [4], 0)


def test_of_a_first_step_in_microbatches_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(Continuity, "see", lambda _, data: seen.append(data))
    trainer = make(InMemory((torch.zeros(8, 3), torch.zeros(8, 1)), 4), config={"num_microbatches": 2})
    assert trainer.feed is not None
    assert len(list(trainer.feed.again(0))) == 2
    with trainer:
        assert [len(rows) for rows, _ in seen] == [2]


def evaluation_by(metric: Any) -> Evaluation:
    return Evaluation(ROWS[:2], {"it": metric})


@pytest.mark.parametrize(
    ("error", "ended"),
    [(ZeroDivisionError(), "failed"), (DivergenceError("it"), "diverged"), (NoLongerVouchedError("it"), "stopped")],
)
def test_a_loop_that_fails_is_closed_as_it_failed(error: Exception, ended: str, tmp_path: Path) -> None:
    told = Told()
    trainer = make(observers=told, config={"run_folder": tmp_path})
    with pytest.raises(type(error)), trainer:  # noqa: PT012
        trainer.step(ROWS[0])
        raise error
    assert (trainer._ended, outcome(tmp_path), checkpoints(tmp_path)) == (ended, ended, [0])
    assert told.told[-1] == ("end", 1, ended)


def test_an_error_of_a_loop_says_what_its_loss_was_given() -> None:
    trainer = make()
    with pytest.raises(TypeError) as caught, trainer:
        raise TypeError("Linear has no len()")
    assert "A loss is given the Linear itself" in caught.value.__notes__[0]


def test_a_run_that_can_not_be_opened_is_closed() -> None:
    told = Told()

    def metric(model: nn.Module, data: Any) -> float:
        raise DataError("no such column")

    trainer = make(observers=told, evaluation=evaluation_by(metric))
    with pytest.raises(DataError):
        trainer.__enter__()
    assert told.told == [("start", 0), ("end", 0, "failed")]
    assert (trainer._run, trainer._opened, trainer._ended) == (None, None, "failed")


def test_the_end_lets_data_go_and_stops_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, closed = make(ROWS), list[int]()
    assert trainer.feed is not None
    monkeypatch.setattr(trainer.feed, "close", lambda: closed.append(1))
    with trainer:
        assert trainer.stopwatch._since is not None
    assert closed == [1]
    assert trainer.stopwatch._since is None


@pytest.mark.parametrize("ended", ["stopped", "completed"])
def test_a_result_says_where_and_why_it_ended(ended: str, tmp_path: Path) -> None:
    trainer = make(config={"run_folder": tmp_path})
    assert trainer._result(ended).reason == ""
    with trainer:
        assert trainer._run is not None
        trainer._run.ask_to_stop("it is enough")
        trainer._metrics = {"it": 1.0}
        result = trainer._result(ended)
        assert result.reason == ("it is enough" if ended == "stopped" else "")
        assert (result.outcome, result.clock, result.metrics, result.run_folder) == (
            ended, trainer.clock, {"it": 1.0}, tmp_path,
        )  # fmt: skip
        assert result.seconds > 0
        assert result.seconds_by_part == trainer.stopwatch.seconds
        assert result.seconds_by_part is not trainer.stopwatch.seconds
        assert result.never_offered == {}


def test_a_trace_is_told_where_there_is_one() -> None:
    trainer, events = make(observers=History()), list[str]()
    trainer.tell("nobody hears it")
    trainer.trace = events.append
    trainer.tell("it")
    assert events == ["it"]


def test_norms_are_kept_where_somebody_is_told_of_them() -> None:
    for observers in ([], [History()]):
        trainer = make(observers=observers)
        with trainer:
            assert trainer._needs_outcome is trainer.finite.keeps_norms is bool(observers)


def test_data_that_cannot_be_closed_leave_a_run_that_has_ended_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise ValueError("I/O operation on closed file")

    trainer = make(ROWS, config={"run_folder": tmp_path})
    assert trainer.feed is not None
    monkeypatch.setattr(trainer.feed, "close", refuse)
    with pytest.raises(ValueError, match="closed file"):
        trainer.fit()
    assert (outcome(tmp_path), trainer._run) == ("failed", None)
    assert make(ROWS, config={"run_folder": tmp_path}).fit().clock.step == 4
