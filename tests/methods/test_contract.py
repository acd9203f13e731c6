"""What every method owes: one suite over the list of them, on small real models and the real loop."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cosmati import methods as m
from cosmati.core.batch import Batch, Lineage, iterate_tensors
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Classification, LanguageModel
from cosmati.core.method import Position, Stage, overrides
from cosmati.core.plan import describe
from cosmati.errors import PlanError
from tests.methods.cases import (
    CASES,
    NUM_STEPS,
    Case,
    Losses,
    StopAt,
    digits,
    everything,
    network_of,
    plain_end,
    run_of,
    same,
    setting_of,
    text,
    trainer,
    without,
)

each_case = pytest.mark.parametrize("case", CASES, ids=str)


def test_every_method_is_under_contract() -> None:
    assert [type(case.on) for case in CASES] == list(m.ALL)


@pytest.mark.long
@each_case
def test_trains_and_acts(case: Case) -> None:
    losses = Losses()
    run = run_of(case, observers=[losses], budget="24ba")
    assert run.fit().outcome == "completed"
    assert (sum(losses.values[-4:]) < sum(losses.values[:4])) is case.learns
    assert not same(everything(run), plain_end(**setting_of(case), budget="24ba"))


@pytest.mark.parametrize("case", [case for case in CASES if case.off], ids=str)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_off_value_is_a_bit_exact_no_op(case: Case, num_microbatches: int) -> None:
    assert case.off is not None
    off = trainer([case.off], is_text=case.is_text, num_microbatches=num_microbatches)
    off.fit()
    assert same(everything(off), plain_end(is_text=case.is_text, num_microbatches=num_microbatches))


@pytest.mark.long
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
@each_case
def test_resumes_at_every_step_with_the_same_bits(case: Case, every: int, tmp_path: Path) -> None:
    """One run is stopped after each step, or each second one, which then has only what a checkpoint holds."""
    whole = run_of(case)
    whole.fit()
    for step in range(1, whole.clock.step, every):
        stopped = run_of(case, run_folder=tmp_path, observers=[StopAt(step)])
        assert (stopped.fit().outcome, stopped.clock.step) == ("stopped", step)
    resumed = run_of(case, run_folder=tmp_path)
    assert resumed.fit().outcome == "completed"
    assert same(everything(resumed), everything(whole))


def position(case: Case, step: int = 0) -> Position:
    model = network_of(case)
    loss = LanguageModel() if case.is_text else Classification(10)
    return Position(Clock(step=step), Budget(Time.parse(f"{NUM_STEPS}ba")), 0, 0, model, loss)


BATCH_CASES = [case for case in CASES if overrides(case.on, "batch")]


@pytest.mark.parametrize("case", BATCH_CASES, ids=str)
@pytest.mark.parametrize("step", range(NUM_STEPS))
def test_rows_permuted_or_declared_coupled(case: Case, step: int) -> None:
    data = text() if case.is_text else digits()
    batch = Batch(data, Lineage.of_rows(100, 64)).select(slice(0, 16))
    order = torch.randperm(16, generator=torch.Generator().manual_seed(step))
    changed = case.on.batch(batch, position(case, step))
    permuted = case.on.batch(batch.select(order), position(case, step))
    # Rows may be cut into pieces, which stay together.
    pieces = changed.num_rows // 16
    expected = changed.select((order[:, None] * pieces + torch.arange(pieces)).flatten()) if pieces else changed
    is_equivariant = pieces > 0 and all(
        torch.equal(a, b) for a, b in zip(iterate_tensors(permuted.data), iterate_tensors(expected.data), strict=True)
    )
    assert is_equivariant or "rows" in case.on.couples
    assert changed.num_rows == len(next(iterate_tensors(changed.data)))


@pytest.mark.parametrize("case", BATCH_CASES, ids=str)
@pytest.mark.parametrize("step", range(NUM_STEPS))
def test_lineage_names_every_row_that_is_in_the_content(case: Case, step: int) -> None:
    """Each row's content is its own id, so that what a row was made of can be read from it."""
    ids = torch.arange(1, 17)
    shape = (16, 15) if case.is_text else (16, 1, 8, 8)
    content = ids.view(-1, *[1] * (len(shape) - 1)).expand(shape).contiguous()
    target = content if case.is_text else ids % 10
    batch = Batch((content if case.is_text else content.float(), target), Lineage(ids, torch.zeros_like(ids)))
    if isinstance(case.on, m.AugMix | m.RandAugment):
        # What they make of a row's content is the row's alone, and doesn't tell its id.
        batch = batch.replace(input=batch.input / 16)
        assert case.on.batch(batch, position(case, step)).lineage is batch.lineage
        return
    changed = case.on.batch(batch, position(case, step))
    lineage = changed.lineage
    parents = lineage.row_ids[:, None] if lineage.parents is None else lineage.parents
    for row, own in zip(changed.input, parents, strict=True):
        values = row[row != 0].unique()
        low, high = float(own.min()) - 1e-4, float(own.max()) + 1e-4
        # Nothing but holes and one mixture of the parents, or pieces of them side by side.
        assert len(values) == 1 or set(values.tolist()) <= set(own.tolist())
        assert all(low <= value <= high for value in values.tolist())


def hooks(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    on_parameters = sum(len(p._backward_hooks or ()) for p in model.parameters())
    return on_parameters + sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@each_case
def test_leaves_no_hooks_and_the_users_own(case: Case) -> None:
    run = run_of(case)
    calls: list[int] = []
    run.model.register_forward_hook(lambda *_: calls.append(1))
    run.fit()
    assert hooks(run.model) == 1
    assert len(calls) >= 2 * run.clock.step
    assert all(p.requires_grad for p in run.model.parameters())


@pytest.mark.long
@each_case
def test_exports_to_a_plain_module(case: Case) -> None:
    run = run_of(case)
    run.fit()
    model = run.model.eval()
    example = (text() if case.is_text else digits())[0][:4]
    exported = torch.export.export(model, (example,)).module()
    assert not [module for module in exported.modules() if type(module).__module__.startswith("cosmati")]
    torch.testing.assert_close(exported(example), model(example))
    plain = network_of(case)
    fits = plain.state_dict().keys() == model.state_dict().keys()
    assert fits is not case.adds_parameters
    if fits:
        plain.load_state_dict(model.state_dict(), strict=True)


def pairs() -> Iterator[Any]:
    """Yield each pair on both models.

    By default each is looked at on one of them, in turn where it trains on both or on neither, and of those whose
    methods act in other stages, with nothing that both own, one in three: each method still meets at least ten others.
    """
    for number, (left, right) in enumerate(itertools.combinations(CASES, 2)):
        pair = left, right
        refused = [any(case.outcome(is_text=is_text) == "refused" for case in pair) for is_text in (False, True)]
        own = refused[0] if refused[0] != refused[1] else number % 2 == 1
        meets = left.on.stage is right.on.stage or bool(left.on.claims & right.on.claims)
        is_chosen = meets or (CASES.index(left) + CASES.index(right)) % 3 == 0
        for is_text in (False, True):
            name = f"{left}-{right}-{'language' if is_text else 'vision'}"
            marks = () if is_text is own and is_chosen else pytest.mark.slow
            yield pytest.param(pair, is_text, id=name, marks=marks)


@pytest.mark.filterwarnings("ignore:.* changes nothing")
@pytest.mark.parametrize(("pair", "is_text"), list(pairs()))
def test_pairs_compose_or_are_refused(pair: tuple[Case, Case], is_text: bool) -> None:
    chosen = [case.settings(is_text=is_text) for case in pair]
    if "refused" in {case.outcome(is_text=is_text) for case in pair}:
        with pytest.raises(PlanError, match=r"Remove it from the methods of this run"):
            trainer(chosen, is_text=is_text)
        return
    if chosen[0].claims & chosen[1].claims:
        with pytest.raises(PlanError, match=r"both own the .* Remove one of them"):
            trainer(chosen, is_text=is_text)
        return
    run = trainer(chosen, is_text=is_text, budget="2ba")
    assert [type(method) for method in run.plan.methods] == [
        type(method) for method in sorted(chosen, key=lambda method: method.stage)
    ]
    run.fit()
    assert run.clock.step == run.assembly.budget.num_steps
    assert all(bool(value.isfinite().all()) for value in run.model.state_dict().values())


@pytest.mark.parametrize("is_text", [False, True], ids=["vision", "language"])
@each_case
def test_says_where_it_has_nothing_to_do(case: Case, is_text: bool) -> None:
    chosen = case.settings(is_text=is_text)
    match case.outcome(is_text=is_text):
        case "trains":
            assert trainer([chosen], is_text=is_text).plan.methods == (chosen,)
        case "refused":
            with pytest.raises(PlanError, match=f"{type(chosen).__name__}.* Remove it"):
                trainer([chosen], is_text=is_text)
        case "nothing to change":
            with pytest.warns(UserWarning, match=f"{type(chosen).__name__} changes nothing"):
                trainer([chosen], is_text=is_text)


@pytest.mark.parametrize("case", [case for case in CASES if case.on.claims], ids=str)
def test_two_owners_of_one_thing_are_refused(case: Case) -> None:
    with pytest.raises(PlanError, match=f"both own the ({'|'.join(case.on.claims)})"):
        trainer([case.on, dataclasses.replace(case.on)], is_text=case.is_text)


@each_case
def test_the_plan_shows_it(case: Case) -> None:
    run = run_of(case)
    assert describe(case.on) in str(run.plan)
    assert run.plan.digest != without(case).plan.digest
    assert isinstance(case.on.stage, Stage)
