"""State and types where parameters are narrow, and options of single groups: float64 recurrences, resumes in bits."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from cosmati.errors import PlanError
from cosmati.optim import SGD, SGDW, AdamW, Lion, Sophia
from cosmati.optim.adamw import BoundedAdamW
from cosmati.optim.lion import SignMomentum
from cosmati.optim.muon import OrthogonalizedMomentum
from cosmati.optim.normuon import RowNormalizedMuon
from cosmati.optim.optimizers import Optimizer
from cosmati.optim.piecewise import demands_of
from cosmati.optim.schedule_free import ScheduleFree
from cosmati.optim.sgdw import DecoupledMomentum
from cosmati.optim.soap import EigenbasisAdam
from cosmati.optim.sophia import ClippedCurvature
from tests.optim.test_optimizer_contract import StopAt, everything, trainer

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def draws(num: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return gradients that a narrow type holds exactly."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).bfloat16().to(dtype) for _ in range(num)]


def step(optimizer: torch.optim.Optimizer, gradients: dict[Parameter, Tensor]) -> None:
    for parameter, gradient in gradients.items():
        parameter.grad = gradient.to(parameter.dtype)
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_schedule_free_averages_what_a_narrow_type_would_round_away(dtype: torch.dtype) -> None:
    start = draws(1, (16,))[0]
    w = Parameter(start.to(dtype))
    optimizer = ScheduleFree([w], 0.01, (0.9, 0.99), 1e-8, weight_decay=0.1)
    x, z, v, narrow = start.clone(), start.clone(), torch.zeros_like(start), start.to(dtype)
    for t, g in enumerate(draws(400, (16,))):
        y = 0.1 * z + 0.9 * x
        step(optimizer, {w: g})
        v = 0.99 * v + 0.01 * g * g
        z = z - 0.01 * (g / ((v / (1 - 0.99 ** (t + 1))).sqrt() + 1e-8) + 0.1 * y)
        x = x + (z - x) / (t + 1)
        narrow = narrow + ((z.to(dtype) - narrow) / (t + 1))
    found = optimizer.evaluation_weights()[w]
    state = optimizer.state[w]
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state["y"].double(), 0.1 * z + 0.9 * x, rtol=1e-4, atol=1e-5)
    assert torch.equal(w, state["y"].to(dtype)), "the parameter is y, rounded"
    assert (narrow.double() - x).abs().max() > 20 * (found.double() - x).abs().max(), (
        "a narrow average would be far off"
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_schedule_free_state_is_float32_at_least(dtype: torch.dtype) -> None:
    w = Parameter(torch.ones(3, dtype=dtype))
    optimizer = ScheduleFree([w])
    step(optimizer, {w: torch.ones(3)})
    wide = torch.promote_types(dtype, torch.float32)
    names = {"z", "exp_avg_sq"} | ({"y"} if dtype.itemsize == 2 else set())
    numbers = {"step", "weight_sum", "lr_max"}
    assert {name: v.dtype for name, v in optimizer.state[w].items()} == {
        **dict.fromkeys(names, wide),
        **dict.fromkeys(numbers, torch.float64),
    }
    assert optimizer.evaluation_weights()[w].dtype is wide


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Lion": lambda p: SignMomentum(p, lr=0.01),
    "Muon": lambda p: OrthogonalizedMomentum(p, lr=0.01),
    "NorMuon": lambda p: RowNormalizedMuon(p, lr=0.01),
    "ScheduleFree": lambda p: ScheduleFree(p, lr=0.01),
    "SGDW": lambda p: DecoupledMomentum(p, lr=0.01, momentum=0.9, weight_decay=0.01),
    "SOAP": lambda p: EigenbasisAdam(p, lr=0.01, precondition_frequency=2),
    "Sophia": lambda p: ClippedCurvature(p, lr=0.01, update_interval=2),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MAKERS)
def test_a_loaded_state_goes_on_with_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """PyTorch's own loading brings state to the parameters' type, which is lossy where state is wider."""
    gradients, again = draws(6, (4, 6)), draws(6, (3, 5))
    first, second = (Parameter(g[0].to(dtype)) for g in (gradients, again))
    optimizer = MAKERS[name]([{"params": [first]}, {"params": [second]}])
    kept = []
    for a, b in zip(gradients, again, strict=True):
        buffer = io.BytesIO()
        torch.save(([first.detach(), second.detach()], optimizer.state_dict()), buffer)
        kept.append(buffer.getvalue())
        step(optimizer, {first: a, second: b})
    for at in range(1, 6):
        weights, state = torch.load(io.BytesIO(kept[at]))
        parameters = [Parameter(weight) for weight in weights]
        resumed = MAKERS[name]([{"params": [p]} for p in parameters])
        resumed.load_state_dict(state)
        for a, b in zip(gradients[at:], again[at:], strict=True):
            step(resumed, dict(zip(parameters, (a, b), strict=True)))
        assert all(torch.equal(*pair) for pair in zip(parameters, (first, second), strict=True)), at
        for own, other in zip(parameters, (first, second), strict=True):
            assert {k: v.dtype for k, v in resumed.state[own].items()} == {
                k: v.dtype for k, v in optimizer.state[other].items()
            }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*MAKERS, "cautious AdamW", "AdamW on spheres"])
def test_a_gradient_of_zero_moves_nothing_in_any_type(name: str, dtype: torch.dtype) -> None:
    """float16 rounds an epsilon of 1e-8 to 0."""
    more: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "cautious AdamW": lambda p: BoundedAdamW(p, lr=0.01, cautious=True),
        "AdamW on spheres": lambda p: BoundedAdamW(p, lr=0.01, weight_decay=0.0, hyperball=True),
    }
    start = torch.full((4, 6), 0.5, dtype=dtype)
    still, partly = Parameter(start.clone()), Parameter(start.clone())
    optimizer = (MAKERS | more)[name]([still, partly])
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    gradient = draws(1, (4, 6), dtype)[0]
    gradient[0] = 0
    for _ in range(3):
        step(optimizer, {still: torch.zeros(4, 6), partly: gradient})
    torch.testing.assert_close(still.detach(), start, rtol=1e-6, atol=0)
    assert partly.isfinite().all()
    assert not torch.equal(partly[1:], start[1:])
    if name not in ("SOAP", "AdamW on spheres"):  # these turn or scale rows together
        torch.testing.assert_close(partly[0].detach(), start[0], rtol=1e-6, atol=1e-6)


def test_a_loaded_state_is_a_copy_and_numbers_stay_on_the_host() -> None:
    w, other = Parameter(torch.ones(3)), Parameter(torch.ones(3, device="meta"))
    optimizer, elsewhere = ScheduleFree([w]), ScheduleFree([other])
    step(optimizer, {w: torch.ones(3)})
    saved = optimizer.state_dict()
    elsewhere.load_state_dict(saved)
    assert {
        n: v.device.type for n, v in elsewhere.state[other].items() if n in ("step", "weight_sum", "lr_max", "z")
    } == {
        "step": "cpu",
        "weight_sum": "cpu",
        "lr_max": "cpu",
        "z": "meta",
    }
    copied = ScheduleFree([Parameter(torch.ones(3))])
    copied.load_state_dict(saved)
    [state] = copied.state.values()
    assert not {v.data_ptr() for v in state.values()} & {v.data_ptr() for v in optimizer.state[w].values()}


def test_a_float32_runs_state_serves_narrow_parameters() -> None:
    wide, narrow = Parameter(torch.ones(3)), Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer, other = ScheduleFree([wide], 0.1), ScheduleFree([narrow], 0.1)
    step(optimizer, {wide: torch.ones(3)})
    with torch.no_grad():
        narrow.copy_(wide)
    other.load_state_dict(optimizer.state_dict())
    for _ in range(3):
        step(optimizer, {wide: torch.ones(3)})
        step(other, {narrow: torch.ones(3)})
    assert other.state[narrow]["y"].dtype is torch.float32
    torch.testing.assert_close(
        other.evaluation_weights()[narrow], optimizer.evaluation_weights()[wide], rtol=0.01, atol=0
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["ScheduleFreeAdamW", "SOAP", "NorMuon"])
def test_a_bfloat16_model_resumes_with_the_same_bits(name: str, tmp_path: Path) -> None:
    whole = trainer(name, dtype=torch.bfloat16)
    whole.fit()
    expected = everything(whole)
    stopped = trainer(name, dtype=torch.bfloat16, run_folder=tmp_path, observers=[StopAt(3)])
    assert stopped.fit().outcome == "stopped"
    resumed = trainer(name, dtype=torch.bfloat16, run_folder=tmp_path)
    assert resumed.fit().outcome == "completed"
    found = everything(resumed)
    assert {key: value.dtype for key, value in found.items()} == {key: value.dtype for key, value in expected.items()}
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def test_sophia_leaves_the_curvature_to_its_estimates() -> None:
    """With an interval of 0, a float64 recurrence in which the curvature moves only where an estimate is given."""
    starts = draws(2, (3, 2))
    parameters = [Parameter(start.clone()) for start in starts]
    optimizer = ClippedCurvature(
        [{"params": parameters[:1]}, {"params": parameters[1:], "betas": (0.5, 0.75)}],
        0.1,
        (0.9, 0.8),
        0.5,
        num_labels=9,
        update_interval=0,
        weight_decay=0.2,
    )
    betas = ((0.9, 0.8), (0.5, 0.75))
    x, m, h = [s.clone() for s in starts], [torch.zeros(3, 2).double()] * 2, [torch.zeros(3, 2).double()] * 2
    for t, g in enumerate(draws(12, (2, 3, 2))):
        if t % 4 == 1:
            estimates = {
                p: (t + 1) * part.square()
                for p, part in zip(parameters, g, strict=True)
                if t != 5 or p is parameters[0]
            }
            optimizer.update_curvature(estimates)
            for i, p in enumerate(parameters):
                h[i] = betas[i][1] * h[i] + (1 - betas[i][1]) * estimates[p] if p in estimates else h[i]
        step(optimizer, dict(zip(parameters, g, strict=True)))
        for i in range(2):
            m[i] = betas[i][0] * m[i] + (1 - betas[i][0]) * g[i]
            x[i] = x[i] - 0.1 * 0.2 * x[i] - 0.1 * torch.clamp(m[i] / torch.clamp(0.5 * h[i], min=1e-12), -1, 1)
            torch.testing.assert_close(parameters[i].detach(), x[i], rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(optimizer.state[parameters[i]]["curvature"], h[i], rtol=1e-10, atol=0)
    assert (h[0] > 0).all()


@pytest.mark.parametrize("is_stepped", [False, True])
def test_sophia_refuses_estimates_that_fit_nothing_and_takes_none(*, is_stepped: bool) -> None:
    w, other = Parameter(torch.ones(2, 3)), Parameter(torch.ones(2, 3))
    optimizer = ClippedCurvature([w], update_interval=0)
    if is_stepped:
        optimizer.update_curvature({w: torch.full((2, 3), 5.0)})
        step(optimizer, {w: torch.ones(2, 3)})
    before = {name: value.clone() for name, value in optimizer.state.get(w, {}).items()}
    good = {w: torch.full((2, 3), 7.0)}
    for wrong, shape in (({other: torch.ones(2, 3)}, r"\(2, 3\)"), ({w: torch.ones(3)}, r"\(3,\)")):
        with pytest.raises(PlanError, match=rf"1 estimate\(s\) fit no parameter .*{shape}.* Give one of the"):
            optimizer.update_curvature({**good, **wrong})
    with pytest.raises(PlanError, match=r"2 estimate\(s\) fit no parameter"):
        optimizer.update_curvature({w: torch.ones(3, 2), other: torch.ones(2, 3)})
    after = optimizer.state.get(w, {})
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert other not in optimizer.state
    optimizer.update_curvature(good)
    expected = 0.01 * 7 + (0.99 * 0.01 * 5 if is_stepped else 0)
    torch.testing.assert_close(optimizer.state[w]["curvature"], torch.full((2, 3), expected))


def test_sophia_without_estimates_steps_by_signs() -> None:
    w = Parameter(torch.zeros(3, dtype=torch.float64))
    [built] = [Sophia(lr=0.1, num_labels=5, update_interval=0, weight_decay=0.0).build([("w", w)])]
    step(built, {w: torch.tensor([1e-3, -5.0, 0.0])})
    assert w.tolist() == [-0.1, 0.1, 0.0]
    assert not built.state[w]["curvature"].any()
    with pytest.raises(PlanError, match="update_interval=-1"):
        Sophia(lr=0.1, num_labels=5, update_interval=-1)


def test_normuon_takes_options_of_single_groups() -> None:
    gradients = draws(8, (4, 6))
    options: list[dict[str, float]] = [{}, {"beta2": 0.5}, {"eps": 0.1}, {"beta2": 0.0, "eps": 1.0}]
    together = [Parameter(gradients[0].clone()) for _ in options]
    groups = [{"params": [p], **own} for p, own in zip(together, options, strict=True)]
    optimizer = RowNormalizedMuon(groups[:-1], lr=0.1, beta2=0.9, eps=1e-6)
    optimizer.add_param_group(groups[-1])
    alone = [Parameter(gradients[0].clone()) for _ in options]
    single = [
        RowNormalizedMuon([p], lr=0.1, **{"beta2": 0.9, "eps": 1e-6, **own})
        for p, own in zip(alone, options, strict=True)
    ]
    for gradient in gradients:
        step(optimizer, dict.fromkeys(together, gradient))
        for parameter, other in zip(alone, single, strict=True):
            step(other, {parameter: gradient})
    assert [(g["beta2"], g["eps"]) for g in optimizer.param_groups] == [
        (0.9, 1e-6),
        (0.5, 1e-6),
        (0.9, 0.1),
        (0.0, 1.0),
    ]
    assert all(torch.equal(*pair) for pair in zip(together, alone, strict=True))
    assert len({tuple(p.flatten().tolist()) for p in together}) == len(options), "each option acts"


STEPPED = [
    SGD(lr=0.1, momentum=0.9),
    SGD(lr=0.1),
    SGDW(lr=0.1, momentum=0.9, nesterov=True),
    AdamW(lr=0.1),
    Lion(lr=0.1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", STEPPED, ids=lambda one: type(one).__name__)
def test_bits_do_not_follow_from_who_is_stepped_together(optimizer: Optimizer, dtype: torch.dtype) -> None:
    """Ranks that share an optimizer out step other parameters each, and some learn later than others."""

    def stepped(*, is_together: bool) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        weights = [Parameter(torch.randn(50, generator=generator).to(dtype)) for _ in range(3)]
        parts = [[*enumerate(weights)]] if is_together else [[one] for one in enumerate(weights)]
        built = [optimizer.build([(f"w{index}", weight) for index, weight in part]) for part in parts]
        for number in range(4):
            for index, weight in enumerate(weights):
                drawn = torch.randn(50, generator=generator).to(dtype)
                weight.grad = drawn if number >= index else None
            for one in built:
                one.step()
        return [weight.detach() for weight in weights]

    for one, other in zip(stepped(is_together=True), stepped(is_together=False), strict=True):
        assert torch.equal(one, other)


def test_a_ready_built_sgd_whose_bits_follow_from_its_list_keeps_it_on_one_rank() -> None:
    narrow, wide = ([Parameter(torch.zeros(4, dtype=t)) for _ in range(3)] for t in (torch.bfloat16, torch.float32))
    for options, is_together in (
        ({"momentum": 0.9, "foreach": True}, True),
        ({"momentum": 0.9}, False),
        ({"foreach": True}, False),
    ):
        demands = demands_of(torch.optim.SGD([*narrow, *wide], lr=0.1, **options))
        assert [[id(p) for p in unit] for unit in demands.together] == [[id(p) for p in narrow]] * is_together
        assert {id(p) for p in demands.divisible} == {id(p) for p in (wide if is_together else [*narrow, *wide])}
