"""Settings of a run, and the process around it: threads, kernels, generators and signals, found again as they were."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from cosmati.core.clock import Budget
from cosmati.core.loss import Regression
from cosmati.core.method import Method, Stage
from cosmati.errors import PlanError
from cosmati.optim import SGD
from cosmati.train.assembly import Assembly
from cosmati.train.config import RunConfig
from cosmati.train.prepare import Ingredients, prepare
from cosmati.train.run.environment import StopSignal, environment


@dataclass(frozen=True, kw_only=True)
class Shapes(Method):
    """Says that it gives so many shapes."""

    num: int
    stage: ClassVar[Stage] = Stage.SHAPE

    def shapes(self, budget: Budget) -> int:
        return self.num


def _assembly(model: nn.Module | None = None, methods: Any = (), **config: Any) -> Assembly:
    settings = RunConfig(**{"budget": "1ba"} | config)
    with torch.random.fork_rng(devices=[]):
        model = model or nn.Linear(2, 1)
    return prepare(Ingredients(model, Regression(), None, [SGD(lr=0.1)], methods, None, None, settings)).assembly


def _state() -> tuple[Any, ...]:
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        sys.modules["torch.utils.deterministic"].fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
        torch._dynamo.config.recompile_limit,
        torch._dynamo.config.fail_on_recompile_limit_hit,
        torch.get_rng_state().tolist(),
    )


@pytest.fixture
def unusual() -> Iterator[tuple[Any, ...]]:
    """A process whose settings are none of the defaults."""
    before, settings = _state(), sys.modules["torch.utils.deterministic"]
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    settings.fill_uninitialized_memory = True
    torch.backends.cudnn.benchmark = True
    yield _state()
    torch.set_num_threads(before[0])
    torch.use_deterministic_algorithms(before[1], warn_only=before[2])
    settings.fill_uninitialized_memory, torch.backends.cudnn.benchmark = before[3], before[4]


@pytest.mark.parametrize("fails", [True, False])
def test_a_run_sets_the_process_and_leaves_it_as_it_was(unusual: tuple[Any, ...], fails: bool) -> None:
    def run() -> None:
        with environment(_assembly(num_threads=1)):
            assert _state()[:5] == (1, True, False, False, False)
            torch.rand(1)
            if fails:
                raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError):
            run()
    else:
        run()
    assert _state() == unusual


def test_what_a_run_leaves_to_the_user_stays(unusual: tuple[Any, ...]) -> None:
    with environment(_assembly(deterministic=False)):
        assert _state()[:7] == unusual[:7]
        torch.rand(1)
    assert _state() == unusual


def test_recompilation_beyond_the_limit_fails_and_the_limit_counts_blocks_and_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mark(self: nn.Module, **options: bool) -> None:
        self._compiled_call_impl = self._call_impl

    monkeypatch.setattr(nn.Module, "compile", mark)

    def limits(num_blocks: int, *methods: Method) -> tuple[int, bool]:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_blocks)))
        with environment(_assembly(model, methods, compile_blocks=True)):
            return torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit

    before = _state()[:7]
    assert limits(1) == (8, True)  # PyTorch's own
    assert limits(5) == (10, True)  # in training and in evaluation
    assert limits(5, Shapes(num=2), Shapes(num=3)) == (60, True)
    assert _state()[:7] == before


@pytest.mark.parametrize(("setting", "accepted"), [(":4096:8", True), (":16:8", True), (":8:8", False), (None, False)])
def test_cublas_needs_its_workspace_before_the_process_starts(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, accepted: bool
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", setting)
    on_gpu = replace(_assembly(), device=torch.device("cuda"))
    entered: list[bool] = []

    def enter(assembly: Assembly) -> None:
        with environment(assembly):
            entered.append(torch.are_deterministic_algorithms_enabled())

    if accepted:
        enter(on_gpu)
    else:
        with pytest.raises(PlanError, match="CUBLAS_WORKSPACE_CONFIG=:4096:8"):
            enter(on_gpu)
    enter(replace(on_gpu, config=replace(on_gpu.config, deterministic=False)))
    assert entered == [True, False][1 - accepted :]
    assert not torch.are_deterministic_algorithms_enabled()


def test_signals_ask_to_stop_and_the_handlers_come_back() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before, stop = [signal.getsignal(number) for number in numbers], StopSignal()
    with stop.listening():
        assert not stop.is_set
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set
    assert [signal.getsignal(number) for number in numbers] == before
    other = StopSignal()
    with other.listening():
        signal.raise_signal(signal.SIGINT)
        assert other.is_set
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_another_thread_does_not_listen() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with StopSignal().listening():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.mark.parametrize("name", ["max_ranks", "details_every", "update_norm_every", "check_every", "num_checkpoints"])
def test_counts_are_at_least_one(name: str) -> None:
    assert getattr(RunConfig(**{name: 1}), name) == 1
    with pytest.raises(PlanError, match=rf"RunConfig\.{name} = 0; it must be at least 1"):
        RunConfig(**{name: 0})


@pytest.mark.parametrize("number", [-2, 0, 3, 6, 12])
def test_microbatches_that_are_no_power_of_two_are_refused(number: int) -> None:
    with pytest.raises(PlanError, match=rf"V = {number} microbatches is not a power of two"):
        RunConfig(num_microbatches=number)


@pytest.mark.parametrize("name", ["budget", "checkpoint_every", "evaluate_every"])
def test_spans_are_time_strings(name: str) -> None:
    with pytest.raises(PlanError, match="'soon' is not a time"):
        RunConfig(**{name: "soon"})


def test_precisions_are_two() -> None:
    with pytest.raises(PlanError, match="Precision 'float16' is not known"):
        RunConfig(precision="float16")
    cpu = torch.device("cpu")
    with RunConfig(precision="bfloat16").autocast(cpu):
        assert nn.Linear(1, 1)(torch.ones(1, 1)).dtype is torch.bfloat16
    with RunConfig().autocast(cpu):
        assert nn.Linear(1, 1)(torch.ones(1, 1)).dtype is torch.float32


@pytest.mark.parametrize(
    ("options", "plain", "governed"),
    [
        ({}, 1, 8),
        ({"elastic": True}, 8, 8),
        ({"num_microbatches": 2}, 2, 2),
        ({"num_microbatches": 2, "elastic": True}, 2, 2),
        ({"max_ranks": 2}, 2, 8),
        ({"max_ranks": 3}, 4, 8),
        ({"max_ranks": 16}, 16, 16),
        ({"num_microbatches": 4, "max_ranks": 9}, 16, 16),
    ],
)
def test_the_number_of_microbatches_follows_from_what_is_asked(
    options: dict[str, Any], plain: int, governed: int
) -> None:
    config = RunConfig(**options)
    found = (config.resolve_microbatches(governed=False), config.resolve_microbatches(governed=True))
    assert found == (plain, governed)
