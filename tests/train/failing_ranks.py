"""Two ranks of which one fails at its own microbatch, catches that and goes on; each prints what it saw."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from cosmati import LanguageModel, Loss, Method, RunConfig, Stage, Trainer
from cosmati.core.batch import Batch
from cosmati.core.method import Position
from cosmati.core.pieces import Pieces
from cosmati.core.plan import Promise
from cosmati.errors import words_of
from cosmati.optim import AdamW
from tests.train.packs import samples as packs

RANK = int(os.environ.get("RANK", "0"))
FAILS_AT, FAILS_LATE = 2, 5


class Breaks(torch.autograd.Function):
    """Goes through, and fails on the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ArithmeticError("on the way back")


class Fickle:
    """A loss that fails once, at the second microbatch of a rank in one step.

    Args:
        fail: what it does instead of its work, given the loss; None where this rank doesn't fail.
    """

    forward_caches = ("num_calls",)

    def __init__(self, fail: Callable[[nn.Module, Loss, Any], Any] | None) -> None:
        self._fail = fail
        self.num_calls = 0

    def __call__(self, model: nn.Module, data: Any) -> Any:
        rows, targets = data
        summed = Loss(mse_loss(model(rows), targets, reduction="sum"), float(len(rows)))
        self.num_calls += 1
        if self._fail is not None and self.num_calls == 2 * FAILS_AT + 2:
            return self._fail(model, summed, data)
        return summed


class Meeting(Fickle):
    """One that meets the other rank's each time."""

    def __call__(self, model: nn.Module, data: Any) -> Any:
        found = super().__call__(model, data)
        dist.all_reduce(torch.zeros(1))
        return found


class Refusing(Method):
    """A method that refuses a microbatch of rank 1 once."""

    stage = Stage.MIX

    def __init__(self) -> None:
        self.num_refused = 0

    def batch(self, batch: Batch, position: Position) -> Batch:
        if position.clock.step == FAILS_AT and position.microbatch == 3 and not self.num_refused:
            self.num_refused += 1
            raise ValueError("no such row")
        return batch


def key_error(*_: Any) -> Any:
    words: dict[str, Any] = {}
    return words["words"]


class WordlessError(Exception):
    def __str__(self) -> str:
        raise TypeError("no words")


def wordless(*_: Any) -> Any:
    raise WordlessError


def negative(model: nn.Module, loss: Loss, data: Any) -> Loss:
    return Loss(loss.sum, -1.0)


def broken(rows: Tensor) -> Any:
    return Breaks.apply(rows)  # type: ignore[no-untyped-call]


def on_the_way_back(model: nn.Module, loss: Loss, data: Any) -> Loss:
    return Loss(mse_loss(model(broken(data[0].requires_grad_())), data[1], reduction="sum"), loss.weight)


def in_a_hook(model: nn.Module, loss: Loss, data: Any) -> Loss:
    def fail(_: Tensor) -> None:
        raise ArithmeticError("on the way back")

    loss.sum.register_hook(fail)
    return loss


def short(*_: Any) -> Any:
    raise torch.OutOfMemoryError("out of memory")


CASES: dict[str, tuple[Any, Any]] = {
    "nothing": (None, None),
    "an exception": (None, key_error),
    "of the first": (key_error, None),
    "a negative weight": (None, negative),
    "on the way back": (None, on_the_way_back),
    "of no words": (None, wordless),
    "both": (negative, key_error),
    "while another is short of memory": (short, key_error),
    "a method": (None, None),
}


def meeting_unseen(model: nn.Module, loss: Loss, data: Any) -> Loss:
    getattr(dist, "all_" + "reduce")(torch.zeros(1))
    return loss


class Committing(Method):
    """A method that fails on rank 1 where the others commit."""

    stage = Stage.GRADIENT

    def __init__(self) -> None:
        self.has_failed = False

    def gradients(self, gradients: Pieces, weights: Pieces, at: Position) -> Pieces:
        if at.clock.step == FAILS_LATE and RANK == 1 and not self.has_failed:
            self.has_failed = True
            raise ValueError("too late")
        return gradients


APART = {
    "full": (None, in_a_hook),
    "ranks that meet": (None, key_error),
    "ranks that meet unseen": (meeting_unseen, key_error),
}
TOO_LATE = "too late"


def run(case: str, sharding: Literal["replicated", "optimizer", "full"]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(8)]
    loss = (Meeting if case == "ranks that meet" else Fickle)((CASES | APART).get(case, (None, None))[RANK])
    methods: list[Method] = [Refusing()] if case == "a method" else [Committing()] if case == TOO_LATE else []
    config = RunConfig(budget="8ba", num_microbatches=4, seed=3, num_threads=1, sharding=sharding)
    told: list[str] = []
    with Trainer(model, loss, optimizers=[AdamW(lr=0.1)], methods=methods, config=config) as trainer:
        while not trainer.should_stop and not told[1:]:
            try:
                trainer.step(batches[trainer.clock.step])
            except Exception as error:  # noqa: BLE001  (what this is about)
                after = f" after {type(error.__cause__).__name__}" if error.__cause__ else ""
                told.append(f"{trainer.clock.step} {type(error).__name__}: {words_of(error)}{after}")
                if sharding == "full" or case in APART:
                    _end(told)
                if "Ranks are" in told[-1]:
                    break
        weights = [value.tolist() for value in model.state_dict().values()]
    return {"told": told, "weights": weights, "elastic": trainer.plan.holds(Promise.ELASTIC)}


def look(*, fails: bool) -> dict[str, Any]:
    """Train on packs, whose documents are looked at after the first microbatch of all."""

    class Loss(LanguageModel):
        forward_caches = ("num_calls",)
        num_calls = 0

        def __call__(self, model: nn.Module, data: Any) -> Any:
            self.num_calls += 1
            if fails and RANK == 1 and self.num_calls == 2:
                raise KeyError("looked at")
            return super().__call__(model, data)

    network, data = packs.model(), packs.first_step(packs.source(packs.documents()))
    loss, told = Loss(packs.VOCABULARY), list[str]()
    with packs.trainer(network, None, packs.policy(), loss=loss, budget="2ba") as trainer:
        while not trainer.should_stop:
            try:
                trainer.step_microbatches([data[RANK]], [None, None])
            except Exception as error:  # noqa: BLE001
                told.append(f"{trainer.clock.step} {type(error).__name__}: {error}")
        weights = [value.tolist() for value in network.state_dict().values()]
    return {"told": told, "weights": weights, "calls": loss.num_calls}


def main(cases: list[str]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    found = {}
    for case in cases:
        found[f"{case}, replicated"] = run(case, "replicated")
        found[f"{case}, optimizer"] = run(case, "optimizer")
    found[TOO_LATE] = run(TOO_LATE, "replicated")
    found["look"], found["no look"] = look(fails=True), look(fails=False)
    sys.stdout.write(json.dumps(found))
    dist.destroy_process_group()


def end_apart(case: str) -> None:
    """Fail where another rank waits within its own pass."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    run(case, "full" if case == "full" else "replicated")


def _end(told: list[str]) -> NoReturn:
    """End without a word to the other, which still waits."""
    sys.stdout.write(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:]) if sys.argv[1] not in APART else end_apart(sys.argv[1])
