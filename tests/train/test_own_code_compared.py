"""Code of optimizers, methods and schedules of the user's own is compared at a resume, as that of functions is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from cosmati.core.method import Method, Stage
from cosmati.errors import CheckpointError
from cosmati.methods import GradientClipping
from cosmati.optim import SGD
from cosmati.train.user_code import names_filled
from tests.train.test_other_run_more import assert_goes_on, is_refused, loss, make_model, run

STRENGTH = 1.0
FACTORS: dict[Any, float] = {}
BY_KIND: dict[Any, dict[Any, float]] = {torch.float32: {}}
COUNTS: dict[str, int] = {}
HERE = "tests.train.test_own_code_compared"


def derived(is_other: bool) -> Any:
    class Mine(torch.optim.SGD):
        """Adds nothing."""

        if is_other:

            def step(self, closure: Any = None) -> Any:
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.grad.sign_()
                return super().step(closure)
        else:

            def step(self, closure: Any = None) -> Any:
                return super().step(closure)

    return lambda model: [Mine(model.parameters(), 0.1)]


def decorated(is_other: bool) -> Any:
    class Mine(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        if is_other:

            @torch.no_grad()
            def step(self, closure: Any = None) -> Any:
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.sub_(parameter.grad.sign(), alpha=group["lr"])
        else:

            @torch.no_grad()
            def step(self, closure: Any = None) -> Any:
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.sub_(parameter.grad, alpha=group["lr"])

    return lambda model: [Mine(model.parameters())]


def by_helper(is_other: bool) -> Any:
    class Mine(torch.optim.SGD):
        def _change(self, gradient: Any) -> None:
            gradient.mul_(3.0 if is_other else STRENGTH)

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self._change(parameter.grad)
            return super().step(closure)

    return lambda model: [Mine(model.parameters(), 0.1)]


def schedule(is_other: bool) -> Any:
    @dataclass(frozen=True)
    class Falling:
        power: float = 1.0

        if is_other:

            def multiplier(self, elapsed: float, budget: Any) -> float:
                return 1.0 - elapsed
        else:

            def multiplier(self, elapsed: float, budget: Any) -> float:
                return 1.0 - elapsed * elapsed

    return lambda _: [SGD(lr=0.1, schedule=Falling())]


def own_method(is_other: bool) -> Any:
    @dataclass(frozen=True, kw_only=True)
    class Own(Method):
        """Scales."""

        stage = Stage.GRADIENT

        if is_other:

            def gradients(self, gradients: Any, weights: Any, at: Any) -> Any:
                return gradients.map(lambda gradient: gradient * 3)
        else:

            def gradients(self, gradients: Any, weights: Any, at: Any) -> Any:
                return gradients.map(lambda gradient: gradient * 1)

    return [Own()]


def derived_method(is_other: bool) -> Any:
    class Own(GradientClipping):
        """Clips, or doesn't."""

        if is_other:

            def gradients(self, gradients: Any, weights: Any, at: Any) -> Any:
                return gradients

    return [Own(clipping_type="norm", clipping_threshold=0.1)]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (derived, "optimizers 0: code"),
        (decorated, "optimizers 0: code"),
        (schedule, r"optimizers 0 schedule: code.*change=.*schedule"),
    ],
)
def test_code_of_an_optimizer_is_compared(tmp_path: Path, make: Any, told: str) -> None:
    is_refused(tmp_path / "run", told, {"optimizers": make(False)}, {"optimizers": make(True)})


@pytest.mark.parametrize("make", [own_method, derived_method])
def test_code_of_a_method_is_compared(tmp_path: Path, make: Any) -> None:
    is_refused(tmp_path / "run", "method_options 0: code", {"methods": make(False)}, {"methods": make(True)})


def test_a_global_that_an_optimizer_reads_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "run", stop_at=3, optimizers=by_helper(False))
    monkeypatch.setattr("tests.train.test_own_code_compared.STRENGTH", 2.0)
    with pytest.raises(Exception, match=r"optimizers 0 globals: STRENGTH 2\.0, was 1\.0"):
        run(tmp_path / "run", optimizers=by_helper(False))


class Kept:
    """A class that keeps what its users fill."""

    factors: ClassVar[dict[Any, float]] = {}


class Caching(torch.optim.Optimizer):
    """Works factors out once for each shape, in four places, and keeps the parameter that it treats apart."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.head = self.param_groups[0]["params"][-1]
        self.most = [self.head]

    def _fill(self, parameter: torch.Tensor) -> None:
        key = parameter.shape
        if tuple(key) not in FACTORS:
            FACTORS[tuple(key)] = STRENGTH
        BY_KIND[parameter.dtype][key] = Kept.factors[str(torch.Size(key))] = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self._fill(parameter)
                factor = FACTORS[tuple(parameter.shape)] * BY_KIND[parameter.dtype][parameter.shape]
                parameter.sub_(parameter.grad, alpha=group["lr"] * factor * Kept.factors[str(parameter.shape)])


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test begin as a process of its own does."""
    monkeypatch.setattr(f"{HERE}.FACTORS", {})
    monkeypatch.setattr(f"{HERE}.COUNTS", {"steps": 0})
    monkeypatch.setattr(f"{HERE}.SEEN", set())
    monkeypatch.setattr(f"{HERE}.BY_KIND", {torch.float32: {}})
    monkeypatch.setattr(Kept, "factors", {})


@pytest.mark.usefixtures("emptied")
def test_a_global_that_an_optimizer_fills_is_no_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first: dict[str, Any] = {"optimizers": lambda model: [Caching(model.parameters())]}
    stopped = run(tmp_path / "run", stop_at=3, **first)
    assert stopped.plan.holds("resume")
    assert len(FACTORS) == len(Kept.factors) == 4
    assert_goes_on(tmp_path / "run", first)
    run(tmp_path / "other", stop_at=3, **first)
    monkeypatch.setattr(f"{HERE}.STRENGTH", 2.0)
    with pytest.raises(CheckpointError, match=r"optimizers 0 globals: STRENGTH 2\.0, was 1\.0"):
        run(tmp_path / "other", **first)


SEEN: set[Any] = set()


def adding(model: Any, data: Any) -> Any:
    SEEN.add(data[0].shape)
    FACTORS.setdefault(data[0].dtype, STRENGTH)
    COUNTS.update(steps=len(SEEN))
    return loss(model, data)


@pytest.mark.usefixtures("emptied")
def test_a_global_that_a_loss_adds_to_is_no_option(tmp_path: Path) -> None:
    run(tmp_path / "run", stop_at=3, loss=adding)
    assert len(SEEN) == len(FACTORS) == COUNTS["steps"] == 1
    assert run(tmp_path / "run", loss=adding).changed == []


FILLED = ["D[k]=v", "D[k,v]=v", "D[f(k,*v)]=v", "D[k][v]=1", "D[k:v]=v", "x=D[k]=v", "m.D[k]=v", "D[(k:=v)]=v"]
FILLED += ["D[len(k.x)],x=v,k", "D[-k]=v=k", "D[k if v else 0]=v", "D[k or 1]=v", "D[k<v<3]=v", "for D[k] in v: pass"]
FILLED += ["D.add(k)", "D.setdefault(k, []).append(v)"]
READ = ["D[k]+=1", "del D[k]", "k[D['a']]=v", "k[D]=v", "k[0]=D", "D.get(k)[v]=1", "D(k)[v]=1", "k.x=D[v]", "k.add(D)"]
READ += ["D.get(k)", "D.index.add(k)", "m.D.add(k)", "TABLE.add(D)"]


@pytest.mark.parametrize("source", FILLED + READ)
def test_what_code_fills_is_told_by_its_name(source: str) -> None:
    names: dict[str, Any] = {"D": {}, "TABLE": torch.ones(1)}
    exec(f"def fill(k, v):\n    {source}", names)
    assert ("D" in names_filled([names["fill"]])) == (source in FILLED)
    assert "TABLE" not in names_filled([names["fill"]])


class Counting(torch.optim.SGD):
    """Counts up what lies in a global beside, it may be, options."""

    def step(self, closure: Any = None) -> Any:
        COUNTS["steps"] += 1
        return super().step(closure)


class CountingLayers(nn.Sequential):
    """Likewise."""

    def forward(self, inputs: Any) -> Any:
        COUNTS["steps"] += 1
        return super().forward(inputs)


class CountingLoss:
    """Likewise."""

    def __call__(self, model: Any, data: Any) -> Any:
        COUNTS["steps"] += 1
        return loss(model, data)


@pytest.mark.usefixtures("emptied")
@pytest.mark.parametrize(
    ("kind", "first"),
    [
        (Counting, {"optimizers": lambda model: [Counting(model.parameters(), 0.1)]}),
        (CountingLayers, {"model": lambda: CountingLayers(*make_model())}),
        (CountingLoss, {"loss": CountingLoss()}),
    ],
)
def test_what_is_counted_in_a_global_can_be_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type, first: dict[str, Any]
) -> None:
    run(tmp_path / "run", stop_at=3, **first)
    with pytest.raises(CheckpointError, match=r"globals COUNTS: steps [0-9]+, was 0.*forward_caches = \('COUNTS',\)"):
        run(tmp_path / "run", **first)
    monkeypatch.setattr(kind, "forward_caches", ("COUNTS",), raising=False)
    assert run(tmp_path / "run", **first).changed == []


@pytest.mark.parametrize("make", [derived, decorated, by_helper, schedule])
def test_the_same_code_written_once_more_goes_on(tmp_path: Path, make: Any) -> None:
    run(tmp_path / "run", stop_at=3, optimizers=make(False))
    assert_goes_on(tmp_path / "run", {"optimizers": make(False)})
