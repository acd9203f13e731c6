"""What users bring: optimizers and methods that act across regions, rates that are state, losses that hold some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cosmati.core.batch import Data
from cosmati.core.loss import Classification, Loss
from cosmati.core.method import Coupling, Method, Position, Stage
from cosmati.core.pieces import Pieces
from cosmati.core.plan import Promise
from cosmati.core.state import optimizer_tensors, restore_optimizer
from cosmati.errors import PlanError
from cosmati.optim import SGD, AdamW, Optimizer
from cosmati.optim.optimizers import Named
from cosmati.train import couplings
from cosmati.train.config import RunConfig
from cosmati.train.couplings import optimizer_coupling
from cosmati.train.trainer import Trainer
from tests.train.promises.swapped import MODELS, NUM_STEPS, PAIR, leaked, promised, trained

MLP = MODELS["MLP"]


class Own(torch.optim.Optimizer):
    """Plain descent, as the base of what users write."""

    couples: ClassVar[frozenset[Coupling]] = frozenset()

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"])


class DecaysAll(Own):
    """Decays parameters, whether they have a gradient or not."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.99)
        super().step()


class Adaptive(Own):
    """One estimate of the distance for all parameters, as D-Adaptation has it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.distance = 1e-3

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        grads = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        self.param_groups[0]["lr"] = self.distance
        super().step()
        self.distance = max(self.distance, 0.1 * float(torch.stack(torch._foreach_norm(grads)).norm()) if grads else 0)


class Clips(Own):
    """Clips by the norm over everything."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.01)
        super().step()


class LooksAhead(Own):
    """Draws all parameters to slow ones every five steps (Lookahead)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.count = 0
        self.slow: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.slow.setdefault(parameter, parameter.detach() + 1)
        super().step()
        self.count += 1
        if self.count % 5 == 0:
            for parameter, slow in self.slow.items():
                parameter.lerp_(slow, 0.5)


NO_GRADIENT, ACROSS = "moves what has no gradient", "lets one region's gradients act on another's parameters"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Own, ""), (DecaysAll, NO_GRADIENT), (Adaptive, ACROSS), (Clips, ACROSS), (LooksAhead, NO_GRADIENT)],
)
def test_an_optimizer_of_the_users_own_is_tried_out(kind: type[Own], reason: str) -> None:
    def build(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [kind(model.parameters())]

    one, other = (trained(MLP, build, swapped=swapped) for swapped in (None, NUM_STEPS - 1))
    (because,) = {g.because for g in one.plan.guarantees if g.pair == PAIR}
    assert promised(one) == (not reason)
    if reason:
        assert because == f"{kind.__name__} {reason}"
    assert not (promised(one) and leaked(one, other))


def test_the_trial_touches_nothing_of_the_real_one() -> None:
    parameters = list(MLP.build().parameters())
    weights, optimizer = [p.detach().clone() for p in parameters], LooksAhead(parameters)
    found = optimizer_coupling(optimizer, {id(p): i // 2 for i, p in enumerate(parameters)})
    assert found == f"LooksAhead {NO_GRADIENT}"
    assert all(map(torch.equal, parameters, weights))
    assert (optimizer.count, optimizer.slow, dict(optimizer.state)) == (0, {}, {})
    assert all(parameter.grad is None for parameter in parameters)


@pytest.mark.parametrize("kind", [Adaptive, Clips])
def test_what_the_trial_finds_does_leak(kind: type[Own]) -> None:
    """The control: one step too late for a number that the next step reads."""
    swapped = NUM_STEPS - 1 if kind is Clips else NUM_STEPS - 2
    one, other = (trained(MLP, lambda model: [kind(model.parameters())], swapped=s) for s in (None, swapped))
    assert leaked(one, other)


def test_pytorchs_own_optimizers_leave_regions_apart() -> None:
    """Against a trial of each: none of those that are believed moves anything across regions."""
    believed = couplings._APART
    assert torch.optim.LBFGS not in believed
    for kind in sorted(believed, key=lambda kind: kind.__name__):
        if kind is torch.optim.SparseAdam:  # takes sparse gradients only
            continue
        parameters = [nn.Parameter(torch.randn(4, 4)) for _ in range(4)]
        regions = {id(p): i // 2 for i, p in enumerate(parameters)}
        subclass: type[torch.optim.Optimizer] = type(f"Its{kind.__name__}", (kind,), {"couples": frozenset()})
        assert optimizer_coupling(subclass(parameters, lr=0.01), regions) == ""
        assert optimizer_coupling(kind(parameters, lr=0.01), regions) == ""


def test_what_is_declared_is_believed() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Declared(Optimizer):
        couples: ClassVar[frozenset[Coupling]] = frozenset({"regions"})

        def build(self, named_parameters: Named) -> torch.optim.Optimizer:
            return torch.optim.SGD([p for _, p in named_parameters], self.lr)

    trainer = trained(MLP, [Declared(lr=0.1)])
    assert not promised(trainer)
    assert "Declared couples regions" in str(trainer.plan)
    parameters = [nn.Parameter(torch.zeros(2))]
    assert optimizer_coupling(torch.optim.LBFGS(parameters), {id(parameters[0]): 0}) == "LBFGS couples regions"


def test_step_hooks_are_not_believed() -> None:
    def build(model: nn.Module) -> list[torch.optim.Optimizer]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def clip(*_: object) -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

        optimizer.register_step_pre_hook(clip)
        return [optimizer]

    one, other = (trained(MLP, build, swapped=swapped) for swapped in (None, NUM_STEPS - 1))
    assert leaked(one, other)
    assert not promised(one)


def test_who_patches_a_step_isnt_believed() -> None:
    def build(model: nn.Module) -> list[torch.optim.Optimizer]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        usual = optimizer.step

        def step(*given: Any) -> Any:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            return usual(*given)

        optimizer.step = step  # type: ignore[method-assign]
        return [optimizer]

    trainer = trained(MLP, build)
    assert not promised(trainer)
    assert "SGD has another `step` than its class" in str(trainer.plan)


def test_a_hook_on_all_optimizers_is_found() -> None:
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        assert not promised(trained(MLP, lambda model: [torch.optim.SGD(model.parameters(), lr=0.1)]))
    finally:
        handle.remove()


@dataclass(frozen=True, kw_only=True)
class Anneals(Method):
    """Clips by the norm of everything, after some steps: no trial sees it."""

    stage: ClassVar[Stage] = Stage.GRADIENT

    def gradients(self, gradients: Pieces, weights: Pieces, at: Position) -> Pieces:
        return gradients.scaled(1 / (gradients.norm() + 1e-6)) if at.clock.step > 1 else gradients


@dataclass(frozen=True, kw_only=True)
class Follows(Method):
    """Scales weights by a norm of all, after the commit."""

    stage: ClassVar[Stage] = Stage.GRADIENT

    def after(self, state: Any, weights: Pieces, at: Position, learnt: Any) -> Any:
        for weight in weights.tensors.values():
            weight.data.mul_(1 - 1e-3 * float(weights.norm().detach()))
        return state


class Undeclared(torch.optim.SGD):
    """A subclass of an optimizer that is known."""


@pytest.mark.parametrize("what", [Anneals(), Follows(), Undeclared])
def test_what_declares_nothing_is_promised_nothing(what: Any) -> None:
    if isinstance(what, Method):
        trainer = trained(MLP, [SGD(lr=0.1)], [what])
    else:
        trainer = trained(MLP, lambda model: [what(model.parameters(), lr=0.1)])
    assert not promised(trainer)
    assert "doesn't say what it couples" in str(trainer.plan)


def test_a_rate_that_follows_the_loss_is_found_out(tmp_path: Path) -> None:
    def run(folder: Path, patience: int) -> Trainer:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=patience, factor=0.1)
        config = RunConfig(budget="12ba", num_threads=1, run_folder=folder)
        with Trainer(model, Classification(3), optimizers=[optimizer], config=config) as trainer:
            for step in range(12):
                plateau.step(float(trainer.step(_rows(step)).loss))
        return trainer

    assert "the learning rate of SGD is changed from outside" in str(run(tmp_path / "one", 0).plan)
    assert not run(tmp_path / "two", 0).plan.holds(Promise.RESUME)
    assert run(tmp_path / "three", 100).plan.holds(Promise.RESUME)


def test_what_an_optimizer_keeps_beside_its_state_is_found_out(tmp_path: Path) -> None:
    trainer, _ = _own_loop(tmp_path / "one", lambda model: LooksAhead(model.parameters()), range(4))
    assert "LooksAhead.count, LooksAhead.slow isn't in a checkpoint" in str(trainer.plan)
    assert not trainer.plan.holds(Promise.RESUME)
    plain, _ = _own_loop(tmp_path / "two", lambda model: Own(model.parameters()), range(4))
    assert plain.plan.holds(Promise.RESUME)


def test_an_optimizer_that_cannot_be_tried_out_is_named() -> None:
    class Asks(Own):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if self.param_groups[0]["params"][0].shape[0] < 8:
                msg = "eight rows at least"
                raise ValueError(msg)
            super().step()

    trainer = trained(MLP, lambda model: [Asks(model.parameters())])
    assert "Asks can't be tried out (ValueError: eight rows at least)" in str(trainer.plan)
    assert not promised(trainer)


@dataclass(frozen=True, kw_only=True)
class Fills(Method):
    """Gives zeros to what has no gradient; decay then moves it."""

    stage: ClassVar[Stage] = Stage.GRADIENT

    def gradients(self, gradients: Pieces, weights: Pieces, at: Position) -> Pieces:
        return weights.having({n: gradients.tensors.get(n, torch.zeros_like(w)) for n, w in weights.tensors.items()})


@dataclass(frozen=True, kw_only=True)
class Norms(Method):
    """Divides by the norm over everything, and doesn't say so."""

    stage: ClassVar[Stage] = Stage.GRADIENT

    def gradients(self, gradients: Pieces, weights: Pieces, at: Position) -> Pieces:
        return gradients.scaled(1 / (gradients.norm() + 1e-6)) if gradients else gradients


@dataclass(frozen=True, kw_only=True)
class Signs(Method):
    """Couples nothing, and says so."""

    stage: ClassVar[Stage] = Stage.GRADIENT
    couples: ClassVar[frozenset[Coupling]] = frozenset()

    def gradients(self, gradients: Pieces, weights: Pieces, at: Position) -> Pieces:
        return gradients.map(torch.sign)


@dataclass(frozen=True, kw_only=True)
class Ahead(Method):
    """A second pass at another point."""

    stage: ClassVar[Stage] = Stage.AGAIN

    def perturbation(self, weights: Pieces, gradients: Pieces, at: Position) -> Pieces | None:
        return gradients.map(lambda gradient: gradient * 0.01)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (Fills(), "Fills() gives a gradient to what has none"),
        (Norms(), "Norms() lets one region's gradients act on another's"),
        (Ahead(), "Ahead() takes gradients where all regions' gradients have led to"),
        (Signs(), ""),
    ],
)
def test_a_method_of_the_users_own_is_tried_out(method: Method, reason: str) -> None:
    one, other = (trained(MLP, [SGD(lr=0.1)], [method], swapped=swapped) for swapped in (None, NUM_STEPS - 1))
    assert promised(one) == (not reason)
    assert reason in str(one.plan)
    assert bool(leaked(one, other)) == (isinstance(method, Norms | Ahead))


def _rows(step: int) -> Data:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)


def _own_loop(
    folder: Path, make: Callable[[nn.Module], torch.optim.Optimizer], steps: range, loss: Any = None
) -> tuple[Trainer, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = make(model)
    config = RunConfig(budget="8ba", num_threads=1, run_folder=folder)
    trainer = Trainer(model, loss or Classification(3), optimizers=[optimizer], config=config)
    with trainer:
        for step in steps:
            trainer.step(_rows(step))
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].mul_(0.5)
    return trainer, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_learning_rate_that_is_a_tensor_is_state(tmp_path: Path, kind: Any) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return kind(model.parameters(), lr=torch.tensor(0.1), foreach=False)  # type: ignore[no-any-return]

    _, whole = _own_loop(tmp_path / "whole", make, range(8))
    _own_loop(tmp_path / "run", make, range(3))
    trainer, found = _own_loop(tmp_path / "run", make, range(3, 8))
    assert trainer.clock.step == 8
    assert all(torch.equal(value, whole[name]) for name, value in found.items())
    assert trainer.assembly.optimizers[0].optimizer.param_groups[0]["lr"].item() == pytest.approx(0.1 * 0.5**8)


def test_a_torch_scheduler_takes_the_promise_to_resume(tmp_path: Path) -> None:
    schedulers = []

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 3))
        return optimizer

    trainer, _ = _own_loop(tmp_path, make, range(1))
    assert not trainer.plan.holds(Promise.RESUME)
    because = {g.because for g in trainer.plan.guarantees if g.promise is Promise.RESUME}
    assert "SGD has a torch scheduler, whose count no checkpoint holds" in because.pop()
    plain, _ = _own_loop(tmp_path / "plain", lambda model: torch.optim.SGD(model.parameters(), lr=0.1), range(1))
    assert plain.plan.holds(Promise.RESUME)


@pytest.mark.parametrize("flag", ["capturable", "fused", None])
def test_counters_go_where_the_kernels_read_them(flag: str | None) -> None:
    source, parameter = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2, device="meta"))
    trained, optimizer = (torch.optim.Adam([p], lr=torch.tensor(0.1), foreach=False) for p in (source, parameter))
    source.grad = torch.ones(2)
    trained.step()
    trained.param_groups[0]["lr"].fill_(0.25)
    rate = optimizer.param_groups[0]["lr"]
    for one in (trained, optimizer):
        one.param_groups[0] |= {flag: True} if flag else {}
    tensors, facts = optimizer_tensors(trained, {id(source): "w"})
    restore_optimizer(optimizer, {id(parameter): "w"}, tensors, facts)
    assert optimizer.state[parameter]["step"].device.type == ("meta" if flag else "cpu")
    assert optimizer.state[parameter]["exp_avg"].device.type == "meta"
    assert optimizer.param_groups[0]["lr"] is rate, "the tensor that a captured graph reads"
    assert rate.item() == 0.25


class Weighed(nn.Module):
    """A loss with a running mean in a buffer, and a scale that somebody hoped would learn."""

    def __init__(self, *, learns: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=learns)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> Loss:
        logits = model(data[0])
        self.mean.lerp_(logits.detach().mean(0), 0.5)
        return Classification(3).compare((logits - self.mean) * self.scale, data[1])


def test_parameters_of_a_loss_are_refused() -> None:
    def trainer(loss: Any) -> Trainer:
        return Trainer(nn.Linear(6, 3), loss, [_rows(0)], optimizers=[AdamW(lr=0.1)], config=RunConfig(budget="2ba"))

    learning = Weighed(learns=True)
    for loss in (learning, learning.forward):
        with pytest.raises(
            PlanError, match=r"loss Weighed has parameters of its own \(scale\), and nothing trains them"
        ):
            trainer(loss)
    assert trainer(Weighed(learns=False)).fit().outcome == "completed"


def test_a_loss_that_holds_the_model_brings_no_parameters_of_its_own() -> None:
    class Around(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> Loss:
            return Classification(3).compare(self.model(data[0]), data[1])

    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    config = RunConfig(budget="2ba", num_microbatches=2, num_threads=1)
    trainer = Trainer(model, Around(model), [_rows(0)], optimizers=[SGD(lr=0.1)], config=config)
    assert trainer.fit().outcome == "completed"
    assert trainer.plan.holds(Promise.ELASTIC)


def test_a_losss_buffers_are_in_the_checkpoint(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    _, whole = _own_loop(tmp_path / "whole", make, range(8), Weighed(learns=False))
    _own_loop(tmp_path / "run", make, range(3), Weighed(learns=False))
    _, found = _own_loop(tmp_path / "run", make, range(3, 8), Weighed(learns=False))
    assert all(torch.equal(value, whole[name]) for name, value in found.items())
