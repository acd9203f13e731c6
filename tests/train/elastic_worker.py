"""One rank of `test_elastic.py`: runs every case, and rank 0 writes what came out as JSON.

Arguments: folder, name of the launch, steps to stop at (0: to the end), control (`none`, `all_reduce`, `left_fold`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosmati.core.batch import count_rows
from cosmati.core.loss import Classification
from cosmati.core.state import parameter_root
from cosmati.data.in_memory import InMemory
from cosmati.data.rows import RowBatch
from cosmati.data.shards.writer import ShardWriter
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.methods import EMA, MixUp
from cosmati.optim import SGD, AdamW, Cosine, Muon
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation, accuracy, batches
from cosmati.train.layout.pair_sum import clear
from cosmati.train.layout.tree import Leaf
from cosmati.train.layout.whole import Whole
from cosmati.train.observers import Observer, StepReport
from cosmati.train.ranks import Ranks
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.trainer import Trainer

STEPS = 12


class ConvNet(nn.Module):
    """A convolution, BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.hidden = nn.Linear(4 * 36, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(images))).flatten(1)
        hidden = nn.functional.dropout(torch.relu(self.hidden(hidden)), 0.2, self.training)
        return self.head(hidden)


class StopAt(Observer):
    """Ask the run to stop, as Ctrl-C does, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, report: StepReport) -> None:
        if report.clock.step == self.step:
            os.kill(os.getpid(), 2)


class FoldedSum:
    """The control: sums that depend on the number of ranks."""

    def __init__(self, ranks: Ranks, tensors: Sequence[nn.Parameter], kind: str) -> None:
        self._ranks, self._tensors, self._kind = ranks, tensors, kind
        self._leaves: list[list[Tensor]] = []

    def lend(self) -> None:
        clear(self._tensors)

    def fold(self, widened: Mapping[int, Tensor]) -> None:
        assert not widened, "every parameter is float32"
        self._leaves.append([tensor.grad for tensor in self._tensors if tensor.grad is not None])
        self.lend()

    def root(self) -> Leaf:
        own = [sum(column[1:], start=column[0]) for column in zip(*self._leaves, strict=True)]
        if not self._ranks.is_parallel:
            return list(own)
        if self._kind == "all_reduce":
            for gradient in own:
                dist.all_reduce(gradient)
            return list(own)
        folded: Leaf = []
        for gradient in own:
            parts = [torch.empty_like(gradient) for _ in range(self._ranks.world)]
            dist.all_gather(parts, gradient.contiguous())
            folded.append(sum(parts[1:], start=parts[0]))
        return folded


OPTIMIZERS = {
    "sgd": [SGD(lr=0.1, momentum=0.9, schedule=Cosine())],
    "adamw": [AdamW(lr=1e-2, weight_decay=0.1, schedule=Cosine())],
    "muon": [Muon(lr=0.02, schedule=Cosine()), AdamW(lr=1e-2)],
    "streamed": [SGD(lr=0.1, momentum=0.9, schedule=Cosine())],
}


def noisy(batch: RowBatch) -> tuple[Tensor, Tensor]:
    """Add noise that belongs to the rows, in whichever worker."""
    return batch.tensor("image") + batch.uniform("noise").view(-1, 1, 1, 1).float() / 10, batch.tensor("label")


def streamed(folder: Path, images: Tensor, labels: Tensor) -> StreamingSource:
    """Write this rank's own copy of the shards, and stream them through worker processes."""
    own = folder / f"rows-{os.getpid()}"
    columns = {"image": "ndarray:float32:1,8,8", "label": "int"}
    with ShardWriter(own, columns, class_path="unknown", source="elastic", size_limit=16_384, salt=bytes(32)) as writer:
        for image, label in zip(images.numpy(), labels.tolist(), strict=True):
            writer.write({"image": image, "label": label})
    return StreamingSource(StreamingDataset(own, transform=noisy, window_rows=80), 40, num_workers=2)


def run(case: str, folder: Path, stop: int) -> dict[str, object]:
    """Train one case, and return digests and metrics."""
    generator = torch.Generator().manual_seed(1)
    data = (torch.randn(240, 1, 8, 8, generator=generator), torch.randint(5, (240,), generator=generator))
    assert count_rows(data) == 240
    torch.manual_seed(0)
    trainer = Trainer(
        ConvNet(),
        Classification(num_classes=5),
        streamed(folder.parent, *data) if case == "streamed" else InMemory(data, rows_per_step=40),
        optimizers=OPTIMIZERS[case],
        methods=[MixUp(), EMA(half_life="3ba")],
        evaluation=Evaluation(batches(data, 32), {"accuracy": accuracy, "loss": Classification(num_classes=5)}),
        observers=[StopAt(stop)],
        config=RunConfig(budget=f"{STEPS}ba", num_microbatches=4, num_threads=1, run_folder=folder),
    )
    result = trainer.fit()
    last = read_checkpoint(list_checkpoints(folder / "checkpoints")[0])
    return {
        "elastic": trainer.plan.holds("elastic"),
        "outcome": result.outcome,
        "model": parameter_root(last.model).hex(),
        "state": {name: parameter_root({name: value}).hex() for name, value in sorted(last.state.items())},
        "metrics": dict(result.metrics),
        "step": last.step,
    }


def main() -> None:
    """Run all cases under one process group."""
    base, name, stop, control = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    if control != "none":
        Whole.new_sum = lambda own, _: FoldedSum(own.ranks, own.tensors, control)  # type: ignore[method-assign,assignment,return-value]
    cases = list(OPTIMIZERS) if control == "none" else ["sgd"]
    facts = {case: run(case, base / case, stop) for case in cases}
    if os.environ["RANK"] == "0":
        (base / f"{name}.json").write_text(json.dumps(facts))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
