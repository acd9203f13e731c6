"""State that a forward pass changes: found by name, whatever kind it is, and the promises that it breaks are gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cosmati.core.loss import Classification, Loss
from cosmati.core.plan import Promise
from cosmati.optim import SGD, AdamW
from cosmati.routing.regions import Regions
from cosmati.train.config import RunConfig
from cosmati.train.forward_watch import ForwardWatch
from cosmati.train.ranks import Ranks
from cosmati.train.trainer import Trainer
from tests.train.promises.swapped import NUM_STEPS, PAIR, Case, leaked, promised, trained

pytestmark = pytest.mark.long


class Carried(nn.Module):
    """Two linear layers, and between them something that one microbatch leaves for the next."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def carry(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.second(self.carry(self.first(rows)))
        return output


class Counted(Carried):
    """A plain number: layers behave otherwise after three calls."""

    count = 0

    def carry(self, hidden: Tensor) -> Tensor:
        self.count += 1
        return hidden * 2 if self.count > 3 else hidden


class Remembered(Carried):
    """A plain tensor: the mean of the rows before, as memory has it."""

    memory: Tensor | None = None

    def carry(self, hidden: Tensor) -> Tensor:
        before, self.memory = self.memory, hidden.detach().mean(0)
        return hidden if before is None else hidden + before


class Listed(Carried):
    """A container that holds what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: deque[float] = deque([0.0], maxlen=4)

    def carry(self, hidden: Tensor) -> Tensor:
        scale = 1 + sum(self.seen)
        self.seen.append(float(hidden.detach().mean()) / 10)
        return hidden * scale


class Array(Carried):
    """A NumPy array."""

    def __init__(self) -> None:
        super().__init__()
        self.level = np.zeros(1)

    def carry(self, hidden: Tensor) -> Tensor:
        scale = 1 + float(self.level[0])
        self.level += float(hidden.detach().mean()) / 10
        return hidden * scale


class Late(Carried):
    """A buffer that first moves in step 2."""

    forward_caches = ("step",)
    step = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(8))

    def carry(self, hidden: Tensor) -> Tensor:
        if Late.step >= 2:
            self.centre.lerp_(hidden.detach().mean(0), 0.5)
        return hidden - self.centre


CARRIED: dict[str, Callable[[], nn.Module]] = {"count": Counted, "memory": Remembered, "seen": Listed, "level": Array}
NEAR = ("first.*",), ("second.*",)


@pytest.mark.parametrize("name", CARRIED)
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_what_is_carried_over_is_found_by_name(name: str, num_microbatches: int) -> None:
    case = Case(CARRIED[name], *NEAR)
    trainer = trained(case, [SGD(lr=0.1)], num_microbatches=num_microbatches)
    broken = {g.promise: g.because for g in trainer.plan.guarantees if not g.holds}
    for promise in (Promise.NO_DIRECT_WRITE, Promise.RESUME):
        assert broken[promise].startswith(f"forward changes the attributes {name} (in `forward_caches`")
    if num_microbatches > 1:
        assert f"forward changes the attributes {name}" in broken[Promise.ELASTIC]
        # A count leaks no content, but all others do: the control.
        other = trained(case, [SGD(lr=0.1)], swapped=NUM_STEPS - 1)
        assert bool(leaked(trainer, other)) == (name != "count")


def test_a_buffer_that_first_moves_in_step_two_is_found() -> None:
    def run(swapped: int | None) -> Trainer:
        torch.manual_seed(0)
        calls = 0

        def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor | Loss:
            nonlocal calls
            Late.step, calls = calls // 4, calls + 1
            return Classification(3)(model, data)

        loss.forward_caches = ("calls", "Late")  # type: ignore[attr-defined]
        return trained(Case(Late, *NEAR, loss=loss), [SGD(lr=0.1)], swapped=swapped)

    one = run(None)
    assert not promised(one)
    (because,) = {g.because for g in one.plan.guarantees if g.pair == PAIR}
    assert because == "forward changes the buffers centre"
    assert not one.plan.holds(Promise.ELASTIC)
    assert one.plan.holds(Promise.RESUME)  # a buffer is in the checkpoint
    assert leaked(one, run(NUM_STEPS - 1))


class Instance(nn.Module):
    """Statistics that a kernel writes without marking them, in one region or the other."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        self.near = nn.Sequential(nn.Linear(6, 8), nn.Unflatten(1, (2, 4)), norm if first else nn.Identity())
        self.far = nn.Sequential(nn.Identity() if first else norm, nn.Flatten(), nn.Linear(8, 3))

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.far(self.near(rows))
        return output


@pytest.mark.parametrize("first", [True, False])
def test_instance_norm_is_seen_where_it_lies(first: bool) -> None:
    case = Case(lambda: Instance(first=first), ("near.*",), ("far.*",))
    one, other = (trained(case, [SGD(lr=0.1)], swapped=swapped) for swapped in (None, NUM_STEPS - 1))
    assert not one.plan.holds(Promise.ELASTIC)
    # Training doesn't read its statistics: they're a leak in their own region only.
    assert promised(one) == (not first)
    assert bool(leaked(one, other)) == first


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_between_regions_is_told_at_setup(affine: bool) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=affine), nn.ReLU(), nn.Linear(8, 3))

    case = Case(build, ("0.*", "1.*"), ("3.*",)) if affine else Case(build, ("0.*",), ("3.*",))
    one, other = (trained(case, [SGD(lr=0.1)], swapped=swapped) for swapped in (None, NUM_STEPS - 1))
    assert promised(one) == affine
    assert bool(leaked(one, other)) == (not affine)
    if not affine:
        assert "the statistics of 1 lie in no one region" in str(one.assembly.plan)


def test_batch_norm_without_parameters_follows_the_module_around_it() -> None:
    def build() -> nn.Module:
        near = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=False), nn.ReLU())
        return nn.Sequential(near, nn.Linear(8, 3))

    case = Case(build, ("0.*",), ("1.*",))
    one, other = (trained(case, [SGD(lr=0.1)], swapped=swapped) for swapped in (None, NUM_STEPS - 1))
    assert promised(one)
    assert not leaked(one, other)


class Balanced(nn.Module):
    """A loss with state of its own, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(3))

    def forward(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> Loss:
        logits = model(data[0]) - self.offset
        self.offset.lerp_(logits.detach().mean(0), 0.1)
        return Classification(3).compare(logits, data[1])


def test_a_loss_with_state_is_watched_too() -> None:
    case = Case(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), ("0.*",), ("2.*",), loss=Balanced())
    one = trained(case, [SGD(lr=0.1)])
    assert not promised(one)
    assert "forward changes the buffers loss.offset" in str(one.plan)
    fresh = Case(case.build, case.near_input, case.near_output, loss=Balanced())
    again = Case(case.build, case.near_input, case.near_output, loss=Balanced())
    assert leaked(trained(fresh, [SGD(lr=0.1)]), trained(again, [SGD(lr=0.1)], swapped=NUM_STEPS - 1))


def test_what_follows_from_shapes_may_be_declared() -> None:
    class Cached(Carried):
        forward_caches = ("mask",)
        mask: Tensor | None = None

        def carry(self, hidden: Tensor) -> Tensor:
            self.mask = torch.ones(hidden.shape[1])
            return hidden * self.mask

    case = Case(Cached, *NEAR)
    one, other = (trained(case, [AdamW(lr=0.1)], swapped=swapped) for swapped in (None, NUM_STEPS - 1))
    assert promised(one)
    assert one.plan.holds(Promise.ELASTIC)
    assert not leaked(one, other)


@pytest.mark.parametrize("moves", [True, False])
def test_a_large_buffer_is_compared_by_its_marks(moves: bool) -> None:
    class Large(Carried):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(1 << 20, 2))

        def carry(self, hidden: Tensor) -> Tensor:
            if moves:
                self.table[0, 0] += 1
            return hidden + self.table[0, 0]

    trainer = trained(Case(Large, *NEAR), [SGD(lr=0.1)], num_steps=1)
    assert promised(trainer) == (not moves)
    assert ("forward changes the buffers table" in str(trainer.plan)) == moves


def test_steps_are_looked_at_ever_more_rarely() -> None:
    watch = ForwardWatch(nn.Linear(1, 1), [], (), Regions(("all",), (("weight", "bias"),), (("all",),)), Ranks())
    found = []
    for step in range(70):
        watch.step_begins(step)
        found += [step] if watch.is_on else []
    assert found == [0, 1, 2, 4, 8, 16, 32, 64]


def test_models_that_keep_nothing_keep_their_promises() -> None:
    """Recurrent layers, attention, dropout and a mask with infinities: nothing of theirs moves."""

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 3)
            self.attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
            self.register_buffer("nothing", torch.full((1,), torch.nan), persistent=False)

        def forward(self, rows: Tensor) -> Tensor:
            hidden = self.rnn(torch.stack([rows, rows], 1))[0]
            output: Tensor = self.head(self.attention(hidden, src_mask=self.mask).mean(1))
            return output

    rows = (torch.randn(16, 6), torch.randint(3, (16,)))
    config = RunConfig(budget="3ba", num_microbatches=2, num_threads=1)
    trainer = Trainer(Kept(), Classification(3), [rows], optimizers=[SGD(lr=0.1)], config=config)
    trainer.fit()
    assert trainer.plan.holds(Promise.ELASTIC)
    assert trainer.plan.holds(Promise.RESUME)
