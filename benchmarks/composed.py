"""(g) Methods composed: this library's loop beside Composer's with the same five, and beside five functions.

`python -m benchmarks.composed --composer PYTHON [--clock wall] [--quick]`. PYTHON is the interpreter of an environment
that has Composer (`pip install mosaicml`) and the same PyTorch as this one, so that both call the same kernels.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.composed_task import NUM_CLASSES, Batches, Task
from benchmarks.measure import in_turns, write
from cosmati import Classification, RunConfig, Trainer
from cosmati import methods as m
from cosmati.core.method import Method

FIVE = (m.BlurPool(), m.ChannelsLast(), m.MixUp(), m.LabelSmoothing(), m.EMA(half_life="100ba"))
OTHER_FIVE = (
    m.SqueezeExcite(latent_channels=16, min_channels=32),
    m.ProgressiveResizing(),
    m.CutOut(),
    m.CutMix(),
    m.SAM(),
)
SETS: dict[str, tuple[Method, ...]] = {"none": (), "five": FIVE, "other five": OTHER_FIVE}
SMOOTHING, ALPHA, HALF_LIFE = 0.1, 0.2, 100
ROOT = Path(__file__).parents[1]


def ours(task: Task, methods: tuple[Method, ...]) -> float:
    """Time `Trainer.fit`."""

    def train(batches: Batches, num_batches: int) -> None:
        model = task.model()
        config = RunConfig(budget=f"{num_batches}ba")
        loss = Classification(NUM_CLASSES)
        Trainer(model, loss, batches, optimizers=[task.sgd(model)], methods=methods, config=config).fit()

    return task.seconds_a_step(train)


def bare(task: Task) -> float:
    """Time the loop that one writes by hand."""

    def train(batches: Batches, num_batches: int) -> None:
        model = task.model()
        optimizer = task.sgd(model)
        for _, (images, labels) in zip(range(num_batches), batches, strict=False):
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    return task.seconds_a_step(train)


def functional(task: Task) -> float:
    """Time that loop with the first five methods as functions, each doing what Composer's does."""

    def train(batches: Batches, num_batches: int) -> None:
        model = blurred(task.model()).to(memory_format=torch.channels_last)
        optimizer = task.sgd(model)
        averages = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for _, batch in zip(range(num_batches), batches, strict=False):
            images, labels, permuted, mixing = mixed(*batch)
            logits = model(images)
            target = (1 - mixing) * one_hot(labels) + mixing * one_hot(permuted)
            target = target * (1 - SMOOTHING) + SMOOTHING / NUM_CLASSES
            (-(target * logits.log_softmax(1)).sum(1).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            follow(averages, model, 2 ** (-1 / HALF_LIFE))

    return task.seconds_a_step(train)


class Blurred(nn.Module):
    """A strided convolution of an image that was blurred, with zeros around it."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution
        row = torch.tensor([1.0, 2.0, 1.0]) / 4
        self.register_buffer("filter", (row[:, None] * row).repeat(convolution.in_channels, 1, 1, 1))

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution."""
        return self.convolution(F.conv2d(input, self.filter, padding=1, groups=input.shape[1]))


def blurred(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Conv2d) and child.stride != (1, 1) and not isinstance(module, Blurred):
                setattr(module, name, Blurred(child))
    return model


def mixed(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    drawn = np.random.beta(ALPHA, ALPHA)  # noqa: NPY002  (as Composer draws)
    mixing = min(drawn, 1 - drawn)
    order = torch.randperm(len(images))
    return (1 - mixing) * images + mixing * images[order], labels, labels[order], mixing


def one_hot(labels: Tensor) -> Tensor:
    return torch.zeros(len(labels), NUM_CLASSES).scatter_(1, labels[:, None], 1.0)


@torch.no_grad()
def follow(averages: dict[str, Tensor], model: nn.Module, smoothing: float) -> None:
    for name, tensor in model.state_dict().items():
        averages[name].copy_(averages[name] * smoothing + tensor * (1 - smoothing))


class Peer:
    """Composer, in a process of its own that waits while others are timed."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.composed_peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env={"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"},
        )
        self.versions = self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None, "asked for"
        line = self._process.stdout.readline().strip()
        if not line:
            msg = "Composer's interpreter gave no answer. Try `PYTHON -m benchmarks.composed_peer` to see why."
            raise RuntimeError(msg)
        return line

    def __call__(self, task: Task, arm: str) -> float:
        """Let it train, and return the seconds of a step."""
        assert self._process.stdin is not None, "asked for"
        print(arm, task.side, task.batch_size, task.num_steps, task.clock, sep="\t", file=self._process.stdin)
        return float(self._answer())

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None, "asked for"
        self._process.stdin.close()
        self._process.wait()


def arms_of(task: Task, which: str, peer: Peer | None) -> dict[str, Callable[[], float]]:
    """Return the arms for a set of methods, the one to compare with first."""
    others: dict[str, Callable[[], float]] = {
        "none": {"bare loop": lambda: bare(task)},
        "five": {"bare loop, functional forms": lambda: functional(task)},
    }.get(which, {})
    if peer is not None:
        others = {f"Composer, {which}": lambda: peer(task, which), **others}
    if not others:
        return {}
    first, run = next(iter(others.items()))
    return {first: run, "the same again (A/A)": run, **others, f"Trainer.fit, {which}": lambda: ours(task, SETS[which])}


def run(*, quick: bool, composer: str | None = None, clock: str = "cpu") -> str:
    """Time the sets of methods on two tasks, and write a table each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rounds = 3 if quick else 15
    peer = None if composer is None else Peer(composer)
    suffix = ("_wall" if clock == "wall" else "") + ("_quick" if quick else "")
    tables = []
    try:
        for side, steps in ((32, 10), (8, 60)):
            task = Task(side, 64, max(2, steps // 5) if quick else steps, clock)
            for which, methods in SETS.items():
                arms = arms_of(task, which, peer)
                if not arms:
                    continue
                rows = in_turns(arms, rounds)
                notes = {
                    "command": "python -m benchmarks.composed --composer PYTHON"
                    + f" --clock {clock}" * (clock == "wall"),
                    "what": f"ResNet of 78 thousand parameters, {side} x {side} images, 64 rows, SGD with momentum",
                    "methods": ", ".join(type(method).__name__ for method in methods) or "none",
                    "clock": {"cpu": "processor time of the training thread", "wall": "wall time"}[clock]
                    + "; ratios are taken round by round",
                    "Composer, PyTorch there": peer.versions if peer else "not at hand",
                    "steps a round": task.num_steps,
                }
                tables.append(write(f"composed_{which.replace(' ', '_')}_{side}{suffix}", rows, notes))
                print(tables[-1], flush=True)
    finally:
        if peer is not None:
            peer.close()
        torch.set_num_threads(threads)
    return "\n".join(tables)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.composed", description=__doc__)
    parser.add_argument("--composer", metavar="PYTHON", help="interpreter of an environment with Composer")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it runs; not for quoting")
    run(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
