"""Options at the edges of what is allowed: the last value that works and the first that doesn't."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from cosmati import optim
from cosmati.core.clock import Budget, Time
from cosmati.errors import PlanError
from cosmati.optim import (
    SGD,
    SOAP,
    WSD,
    CosineWarmRestarts,
    Exponential,
    Linear,
    Lion,
    MultiStep,
    NorMuon,
    Polynomial,
    Step,
    muon,
)
from cosmati.optim.aurora import EvenRowMuon
from cosmati.optim.lion import SignMomentum
from cosmati.optim.muon import OrthogonalizedMomentum
from cosmati.optim.normuon import RowNormalizedMuon
from cosmati.optim.optimizers import matrices, parameter_groups
from cosmati.optim.schedule_free import ScheduleFree
from cosmati.optim.schedules import Constant, progress_from
from cosmati.optim.soap import EigenbasisAdam
from cosmati.optim.sophia import ClippedCurvature
from cosmati.optim.stepping import check_options


def weight() -> list[Parameter]:
    return [Parameter(torch.eye(2))]


ALLOWED: dict[str, Callable[[], object]] = {
    "a rate of 0": lambda: SGD(lr=0),
    "Muon": lambda: OrthogonalizedMomentum(weight(), lr=0, momentum=0, weight_decay=0, num_iterations=1),
    "NorMuon": lambda: NorMuon(lr=0, beta2=0, eps=1e-30),
    "Lion": lambda: SignMomentum(weight(), 0, (0, 0), 0),
    "Lion's configuration": lambda: Lion(lr=0, betas=(0, 0), weight_decay=0),
    "SOAP": lambda: EigenbasisAdam(weight(), 0, (0, 0), 0, 1e-30, 0, 1, 1),
    "SOAP's configuration": lambda: SOAP(lr=0, betas=(0, 0), gram_beta=0, weight_decay=0, precondition_frequency=1),
    "a factor of 0": lambda: Step(every="1ba", factor=0),
    "a growth of 1": lambda: CosineWarmRestarts(cycle="1ba", growth=1),
    "an end at 0": lambda: Linear(final=0),
}
REFUSED: dict[str, Callable[[], object]] = {
    "Muon's momentum of 1": lambda: OrthogonalizedMomentum(weight(), lr=0.1, momentum=1.0),
    "a momentum below 0": lambda: OrthogonalizedMomentum(weight(), lr=0.1, momentum=-1e-9),
    "no iteration": lambda: OrthogonalizedMomentum(weight(), lr=0.1, num_iterations=0),
    "an eps of 0": lambda: NorMuon(lr=0.1, eps=0),
    "SOAP's eps of 0": lambda: SOAP(lr=0.1, eps=0),
    "no step between bases": lambda: SOAP(lr=0.1, precondition_frequency=0),
    "a span of 0": lambda: Step(every="0ba"),
    "a cycle of 0": lambda: CosineWarmRestarts(cycle="0dur"),
    "a growth below 1": lambda: CosineWarmRestarts(cycle="1ba", growth=0.999),
    "endless growth": lambda: CosineWarmRestarts(cycle="1ba", growth=math.inf),
    "an infinite factor": lambda: MultiStep(milestones=(), factor=math.inf),
    "a factor of nothing": lambda: Exponential(factor=0),
    "a power of 0": lambda: Polynomial(power=0),
    "an infinite power": lambda: Polynomial(power=math.inf),
    "an infinite end": lambda: Linear(final=math.inf),
    "an end below 0": lambda: Linear(final=-1e-9),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_the_last_that_works(name: str) -> None:
    assert ALLOWED[name]() is not None


@pytest.mark.parametrize("name", REFUSED)
def test_the_first_that_does_not(name: str) -> None:
    with pytest.raises(PlanError):
        REFUSED[name]()


def test_options_are_checked_each_by_itself() -> None:
    check_options("X", (0, 0.999), decay=0)
    for betas, decay in (((0, 1), 0), ((-0.1, 0), 0), ((0.5, 0.5), -1)):
        with pytest.raises(PlanError, match=rf"X can't use betas=\({betas[0]}, {betas[1]}\), decay={decay}\."):
            check_options("X", betas, decay=decay)


def test_a_matrix_has_two_rows_and_two_columns_at_least() -> None:
    shapes = {(2, 2): True, (2, 1): False, (1, 2): False, (2, 1, 1): False, (2, 1, 2): True, (4,): False}
    shapes |= dict.fromkeys([(0, 5), (5, 0), (0, 0), (0, 3, 3), (0,)], False)
    assert {shape: matrices("w", Parameter(torch.zeros(shape))) for shape in shapes} == shapes


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (0, 3, 3), (3, 0, 3)])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (OrthogonalizedMomentum, {}),
        (OrthogonalizedMomentum, {"scale": "rms"}),
        (OrthogonalizedMomentum, {"bfloat16": True}),
        (OrthogonalizedMomentum, {"weight_decay": 0.1, "cautious": True}),
        (RowNormalizedMuon, {}),
        (EvenRowMuon, {}),
    ],
)
def test_an_empty_matrix_is_taken_and_the_others_step_as_without_it(
    kind: Callable[..., OrthogonalizedMomentum], options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    empty, beside, alone = Parameter(torch.zeros(shape)), *[Parameter(torch.eye(3)) for _ in range(2)]
    together, single = kind([empty, beside], lr=0.1, **options), kind([alone], lr=0.1, **options)
    for number in range(3):
        empty.grad = torch.zeros(shape)
        beside.grad = alone.grad = torch.arange(9.0).view(3, 3).sub(4 - number)
        together.step()
        single.step()
    assert torch.equal(beside, alone)
    assert not torch.equal(alone, torch.eye(3))
    assert empty.shape == shape
    assert all(value.isfinite().all() for value in together.state[empty].values())


def test_groups_split_where_vectors_are_spared_something() -> None:
    named = [("w", Parameter(torch.ones(2, 2))), ("b", Parameter(torch.ones(2))), ("k", Parameter(torch.ones(2, 1, 1)))]
    (w, b, k) = (parameter for _, parameter in named)
    assert parameter_groups(named, 0.1, decay_vectors=True) == [{"params": [w, b, k], "weight_decay": 0.1}]
    assert parameter_groups(named, 0.0, decay_vectors=False) == [{"params": [w, b, k], "weight_decay": 0.0}]
    split = parameter_groups(named, 0.1, decay_vectors=False)
    assert [[id(p) for p in group["params"]] for group in split] == [[id(w), id(k)], [id(b)]]
    assert [group["weight_decay"] for group in split] == [0.1, 0.0]
    assert len(parameter_groups(named[:1], 0.1, decay_vectors=False)) == 1


def budget(text: str = "10ba") -> Budget:
    return Budget(Time.parse(text))


def test_a_warm_up_may_take_all_but_the_end() -> None:
    assert Constant(warmup="9.99ba").multiplier(0.9, budget()) == 1
    with pytest.raises(PlanError, match="whole run"):
        Constant(warmup="1dur").multiplier(0.0, budget())


def test_warm_up_and_decay_may_meet() -> None:
    met = WSD(warmup="0.3dur", decay="0.7dur")
    assert met.multiplier(0.3, budget()) == pytest.approx(1)
    with pytest.raises(PlanError, match="longer than the run"):
        WSD(warmup="0.3dur", decay="0.70001dur").multiplier(0.3, budget())


def test_the_way_to_the_end() -> None:
    assert [progress_from(e, 0.5) for e in (0.0, 0.5, 0.75, 1.0, 1.1)] == [0, 0, 0.5, 1, 1]
    assert [progress_from(e, 1.0) for e in (0.0, 0.999, 1.0)] == [0, 0, 1], "a decay of no length is a fall at the end"


def test_a_milestone_is_passed_where_it_stands() -> None:
    schedule = MultiStep(milestones=("0.1dur", "0.3dur"), factor=0.5)
    rates = [schedule.multiplier(e, budget("90sec")) for e in (0.0999, 0.1, 0.1 + 0.2, 0.3)]
    assert rates == [1, 0.5, 0.25, 0.25]
    falls = Step(every="0.1dur", factor=0.5)
    assert [falls.multiplier(e, budget("90sec")) for e in (0.0999, 0.1, 0.7, 0.1 * 7)] == [1, 0.5, 2**-7, 2**-7]


def test_a_cycle_starts_again_where_it_ends() -> None:
    for growth, starts in ((1.0, (0.0, 0.1, 0.3, 0.7)), (2.0, (0.0, 0.1, 0.3, 0.7))):
        schedule = CosineWarmRestarts(cycle="0.1dur", growth=growth, final=0.2)
        assert [schedule.multiplier(start, budget("90sec")) for start in starts] == pytest.approx([1] * 4)
    growing = CosineWarmRestarts(cycle="0.1dur", growth=2.0, final=0.2)
    assert growing.multiplier(0.2, budget("90sec")) == pytest.approx(0.6), "the middle of the second cycle"
    assert growing.multiplier(0.2999, budget("90sec")) == pytest.approx(0.2, abs=1e-5)


OPTIMIZERS = ("SGD", "SGDW", "AdamW", "Aurora", "Lion", "Muon", "NorMuon", "ScheduleFreeAdamW", "Sophia", "SOAP")


@pytest.mark.parametrize("rate", [-1e-9, math.nan])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_configuration_refuses_a_rate_below_0(name: str, rate: float) -> None:
    required = {"num_labels": 1} if name == "Sophia" else {}
    with pytest.raises(PlanError, match="learning rate is a number >= 0"):
        getattr(optim, name)(lr=rate, **required)


def test_matrices_of_one_shape_are_orthogonalized_together_and_an_absent_one_is_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on an accelerator, with the tensors of a CPU."""
    shapes, generator = [(3, 4), (3, 4), (4, 3)], torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator).double() for shape in shapes]
    gradients = [torch.randn(shape, generator=generator).double() for shape in shapes]

    def stepped(present: tuple[int, ...]) -> list[torch.Tensor]:
        parameters = [Parameter(weight.clone()) for weight in start]
        for index in present:
            parameters[index].grad = gradients[index]
        OrthogonalizedMomentum(parameters, lr=0.1).step()
        return [parameter.detach() for parameter in parameters]

    one_by_one = {present: stepped(present) for present in ((0,), (1, 2), (0, 1, 2))}
    monkeypatch.setattr(muon, "_batches", lambda group: [group["params"][:2], group["params"][2:]])
    for present, expected in one_by_one.items():
        found = stepped(present)
        for index in range(3):
            torch.testing.assert_close(found[index], expected[index])
            assert torch.equal(found[index], start[index]) is (index not in present)


def test_an_accelerator_batches_by_shape() -> None:
    parameters = [torch.empty(shape, device="meta") for shape in ((3, 4), (4, 3), (3, 2, 2), (4, 3))]
    assert [[p is parameters[0] or p is parameters[2] for p in b] for b in muon._batches({"params": parameters})] == [
        [True, True],
        [False, False],
    ]
    on_cpu = {"params": [torch.empty(3, 4), torch.empty(3, 4)]}
    assert [len(batch) for batch in muon._batches(on_cpu)] == [1, 1]
    assert [len(batch) for batch in muon._batches(on_cpu | {"bfloat16": True})] == [2]


@pytest.mark.parametrize(
    "name",
    ["Constant", "Linear", "Cosine", "WSD", "Step", "MultiStep", "Exponential", "CosineWarmRestarts", "Polynomial"],
)
def test_every_schedule_refuses_a_warm_up_that_is_no_time(name: str) -> None:
    required = {"Step": {"every": "1ba"}, "MultiStep": {"milestones": ()}, "CosineWarmRestarts": {"cycle": "1ba"}}
    with pytest.raises(PlanError, match="'soon' is not a time"):
        getattr(optim, name)(warmup="soon", **required.get(name, {}))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ScheduleFree(weight(), -1.0),
        lambda: ScheduleFree(weight(), betas=(0.0, 0.9)),
        lambda: RowNormalizedMuon(weight(), 0.1, beta2=1.0),
        lambda: RowNormalizedMuon(weight(), -0.1),
        lambda: ClippedCurvature(weight(), gamma=0.0),
        lambda: ClippedCurvature(weight(), -1.0),
        lambda: SignMomentum(weight(), -1.0),
        lambda: EigenbasisAdam(weight(), -1.0),
    ],
)
def test_what_is_built_by_hand_is_checked_too(make: Callable[[], object]) -> None:
    with pytest.raises(PlanError, match="can't use"):
        make()
