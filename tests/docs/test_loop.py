"""The drawing in docs/loop.md, replayed against the trace of a real run."""

import copy
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from cosmati import Classification, Evaluation, InMemory, Method, Position, RunConfig, Stage, Trainer, batches
from cosmati.core.loss import LossFunction
from cosmati.core.method import State
from cosmati.methods import (
    EMA,
    SAM,
    CutOut,
    GradientClipping,
    LabelSmoothing,
    MixUp,
    ProgressiveResizing,
    SelectiveBackprop,
    StochasticDepth,
)
from cosmati.models.resnet import ResNet, ResNetConfig
from cosmati.optim.optimizers import SGD
from cosmati.routing.regions import partition_parameters
from cosmati.train.layout.whole import Whole
from cosmati.train.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class SameLoss(Method):
    """Leaves the loss as it is."""

    stage: ClassVar[Stage] = Stage.LOSS

    def loss(self, loss: LossFunction, state: State, at: Position) -> LossFunction:
        return loss


PAGE = (Path(__file__).parents[2] / "docs" / "loop.md").read_text()
DRAWING = PAGE.split("```text\n")[1].split("```")[0]
V = 4


def grammar() -> re.Pattern[str]:
    """Turn the drawing into a regular expression over the trace, a word an event."""
    lines = [(len(line) - len(line.lstrip()), line.strip()) for line in DRAWING.splitlines()]

    def below(index: int) -> list[int]:
        inner = []
        for later in range(index + 1, len(lines)):
            if lines[later][0] <= lines[index][0]:
                break
            if lines[later][0] == lines[index][0] + 2:
                inner.append(later)
        return inner

    def words(text: str) -> str:
        return "".join(
            f"(?:{word.rstrip('?*')} ){word[-1] if word[-1] in '?*' else ''}"
            if word.rstrip("?*") != "pass"
            else passing
            for word in text.split()
        )

    def line(index: int) -> str:
        text = lines[index][1]
        if text == "pass":
            return passing
        if text.startswith("V x "):
            return f"(?:{words(text[4:])}){{{V}}}"
        if text == "again? pass":
            return f"(?:again {passing})?"
        return words(text) + "".join(line(i) for i in below(index))

    inside = next(i for i, (_, text) in enumerate(lines) if text == "pass")
    passing = ""
    passing = "".join(line(i) for i in below(inside))
    return re.compile(f"(?:{''.join(line(i) for i in below(0))})+(?:evaluate )?(?:checkpoint )?")


def trace(folder: Path) -> list[str]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    rows, targets = torch.randn(64, 1, 8, 8, generator=generator), torch.randint(0, 4, (64,), generator=generator)
    methods = [
        EMA(),
        SAM(interval=2),
        LabelSmoothing(),
        SameLoss(),
        MixUp(),
        CutOut(),
        ProgressiveResizing(size_increment=1),
        SelectiveBackprop(start=0.0, end=1.0, interrupt=0),
        StochasticDepth(target_layer_name="ResidualBlock"),
        GradientClipping(clipping_type="value", clipping_threshold=1.0),
    ]
    trainer = Trainer(
        ResNet(ResNetConfig(num_classes=4, in_channels=1, widths=(8, 16), blocks_per_stage=1)),
        Classification(4),
        InMemory((rows, targets), 16),
        optimizers=[SGD(lr=0.05)],
        methods=methods,
        evaluation=Evaluation(batches((rows, targets), 32), {"loss": Classification(4)}),
        config=RunConfig(
            budget="4ba", num_microbatches=V, run_folder=folder, evaluate_every="2ba", checkpoint_every="2ba"
        ),
    )
    events: list[str] = []
    trainer.trace = events.append
    trainer.fit()
    return events


@pytest.mark.long
def test_a_real_run_follows_the_drawing(tmp_path: Path) -> None:
    events = trace(tmp_path / "run")
    pattern = grammar()
    assert pattern.fullmatch(" ".join(events) + " "), events
    # Every event of the drawing was seen, and no other.
    drawn = set(re.findall(r"[a-z]+", DRAWING)) - {"fit", "pass", "x"}
    assert drawn == set(events)
    # Controls: a shuffled trace and one with an event left out are refused.
    shuffled = random.Random(0).sample(events, len(events))
    assert not pattern.fullmatch(" ".join(shuffled) + " ")
    without = [event for i, event in enumerate(events) if i != events.index("leaf")]
    assert not pattern.fullmatch(" ".join(without) + " ")


def test_the_pages_example_of_a_layout_runs() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    layout = Whole(model, partition_parameters(model), Ranks(), 2)
    microbatches = [torch.randn(4, 3), torch.randn(4, 3)]

    def loss(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return model(rows).square().sum()

    before = copy.deepcopy(model)
    scope = {
        "layout": layout,
        "routes": [(1.0,), (1.0,)],
        "learns": frozenset({0, 1}),
        "denominators": torch.tensor([8.0], dtype=torch.float64),
        "loss": loss,
        "model": model,
        "microbatches": microbatches,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    exec(compile(PAGE.split("```python\n")[1].split("```")[0], "loop.md", "exec"), scope)
    (sum(loss(before, rows) for rows in microbatches) / 8).backward()
    for moved, was in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(moved, was - 0.1 * was.grad)
