"""The passes of a step over an assembly made by hand, which notes what it's asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from cosmati.core.clock import Clock
from cosmati.core.loss import Loss
from cosmati.train.gradients import StepPasses
from cosmati.train.passing import Around
from cosmati.train.routes import Route
from cosmati.train.timing import Stopwatch

ROUTE = Route(0, 0, 0, (1.0,), offered=True)


def packs(*mixed: int) -> Route:
    tokens: Any = SimpleNamespace(mixed=frozenset(mixed), weights=None)
    return ROUTE._replace(tokens=tokens)


@dataclass
class World:
    """Passes over an assembly that notes what it's asked."""

    degree: int = 1
    in_lockstep: bool = False
    can_tell: bool = False
    has_met: bool = False
    is_on: bool = True
    compiles: bool = False
    policy: object = "a policy"
    couplings: Sequence[str] = ()
    told: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = nn.Linear(1, 1)
        self.ranks = SimpleNamespace(
            degree=self.degree,
            in_lockstep=self.in_lockstep,
            can_tell=self.can_tell,
            has_met=self.has_met,
            slots=lambda num: [list(range(i, num, 2)) for i in range(2)],
            counting=lambda: self.noted("counting"),
        )
        self.assembly: Any = SimpleNamespace(
            ranks=self.ranks,
            policy=self.policy,
            model=self.model,
            device="the device",
            layout=SimpleNamespace(parameters="the parameters"),
            plan=SimpleNamespace(methods="the methods", facts="the facts"),
            generators=SimpleNamespace(restored=lambda: self.noted("draws"), seed=lambda key: None),
            router=SimpleNamespace(num_classes=2, running=self.running),
            config=SimpleNamespace(seed=3, autocast=self.noted, compile_blocks=self.compiles),
        )
        self.watch = SimpleNamespace(
            is_on=self.is_on,
            note=lambda what: self.told.append(("note", what)),
            note_read=lambda what: self.told.append(("read", what)),
        )
        self.passes = object.__new__(StepPasses)
        own: dict[str, Any] = {
            "_a": self.assembly,
            "watch": self.watch,
            "_roots": {"": self.model},
            "_looked_at": -1,
            "_has_compared": False,
            "_bound": lambda loss, position: loss,
            "_stopwatch": Stopwatch(),
            "_tell": lambda what: self.told.append(("tell", what)),
            "_apart": SimpleNamespace(settled=self.settled),
            "_passing": SimpleNamespace(around=self.around),
        }
        for name, value in own.items():
            setattr(self.passes, name, value)
        self.turn: Any = SimpleNamespace(loss=lambda model, data: Loss(model(data).sum(), 2.0))

    @contextmanager
    def noted(self, what: object) -> Iterator[None]:
        self.told.append(("in", what))
        yield
        self.told.append(("out", what))

    def running(self, route: Route, batch: Any, device: object) -> Any:
        assert device == "the device"
        return self.noted(("running", batch.name))

    @contextmanager
    def around(self, batch: Any, position: Any, route: Route) -> Iterator[Around]:
        with self.noted(("around", batch.name, position.microbatch)):
            yield Around(lambda objective: self.told.append(("look", float(objective.detach()))), frozenset({"zeroed"}))

    def settled(self, run: Callable[[], Any], tokens: object) -> Any:
        self.told.append(("settled", tokens))
        return run()

    def step(self, *routes: Route, number: int = 4) -> Any:
        positions = [SimpleNamespace(clock=Clock(step=number), microbatch=i) for i in range(len(routes))]
        batches = [
            SimpleNamespace(name=f"b{i}", data=torch.ones(2, 1), present=None, num_rows=2) for i in range(len(routes))
        ]
        return SimpleNamespace(routes=routes, positions=positions, batches=batches, num_tokens=2)
