"""Random pipelines: a source, how it's batched, what methods do, and what becomes of the run on its way."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn

from cosmati.core.batch import Batch
from cosmati.core.loss import Classification, LanguageModel
from cosmati.core.method import Method
from cosmati.data.in_memory import InMemory
from cosmati.data.loader import StreamingLoader
from cosmati.data.packed import PackedSource, pack_tensors, read_packs
from cosmati.data.packing import Packing, pack, pack_columns
from cosmati.data.rows import RowBatch
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.methods import CropAndFlip, CutMix, CutOut, LabelSmoothing, MixUp, SelectiveBackprop, SeqLengthWarmup
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.optim import SGD
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import load_policy
from cosmati.train.config import RunConfig
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome
from cosmati.train.trainer import Trainer
from tests.train.tags import content
from tests.train.tags.content import CLASSES, LENGTH, NUM_ROWS, SIDE, VOCABULARY

TAXONOMY = Taxonomy("t", "1", tuple((name, name) for name in CLASSES))
POLICY = load_policy(
    "version: 1\ntaxonomy: t\nregions: {all: {params: '*'}}\nrules:\n"
    "  - {class: open, weight: 1.0}\n  - {class: licensed, weight: 0.5}\n  - {class: personal, weight: 1.0}\n"
)


def written(folder: Path) -> None:
    """Write the rows as images, as sequences and as packs of several classes, in shards of a few rows."""
    numbers = range(NUM_ROWS)
    columns = {"image": f"ndarray:float32:{NUM_ROWS},{SIDE},{SIDE}", "target": "int"}
    pictures = ({"image": content.image(n), "target": n} for n in numbers)
    write_dataset(pictures, folder / "images", columns, class_of=_class_path, source="s", size_limit=8000)
    sequences = ({"tokens": content.tokens(n), "target": n} for n in numbers)
    columns = {"tokens": f"ndarray:int64:{LENGTH + 1}", "target": "int"}
    write_dataset(sequences, folder / "tokens", columns, class_of=_class_path, source="s", size_limit=300)
    packs = (one.to_row() for one in packed(cut_rows=True))
    write_dataset(packs, folder / "packs", pack_columns(LENGTH, "int64"), class_of="mixture", source="s")


def _class_path(row: Mapping[str, Any]) -> str:
    return CLASSES[content.class_of(row["target"])]


def packed(*, cut_rows: bool) -> list[Any]:
    return list(pack(content.documents(), Packing(LENGTH, class_pure=False, cut_rows=cut_rows)))


def number_of(dataset: StreamingDataset, row_id: int) -> int:
    """Return the number of a streamed row by its place in its source, as it was written."""
    source, place = dataset.where(row_id)
    of_class = [n for n in range(NUM_ROWS) if CLASSES[content.class_of(n)] == source.class_path]
    return of_class[place]


def _pictures(rows: RowBatch) -> tuple[Tensor, Tensor]:
    return rows.tensor("image"), rows.tensor("target")


def _sequences(rows: RowBatch) -> Tensor:
    return rows.tensor("tokens")


@dataclass(frozen=True)
class Again:
    """Batches of rows of any class, from something that can only be iterated over."""

    batches: Sequence[Any]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


@dataclass(frozen=True)
class Pipeline:
    """What a run is made of."""

    kind: str
    road: str
    num_microbatches: int
    rows_each: int
    tail: str
    is_governed: bool
    methods: tuple[Method, ...]
    short_of_memory: bool
    resumed: bool
    seed: int
    repeats: float

    def dataset(self, folder: Path) -> StreamingDataset:
        transform: Any = {"images": _pictures, "tokens": _sequences, "packs": read_packs}[self.kind]
        repeats = {} if self.kind == "packs" else {"open": self.repeats}
        return StreamingDataset(folder / self.kind, transform=transform, repeats=repeats, seed=self.seed, window_rows=4)

    @property
    def rows_per_step(self) -> int:
        return self.rows_each * self.num_microbatches

    def data(self, folder: Path) -> Any:
        if self.road in ("streamed", "workers"):
            workers = 2 if self.road == "workers" else 0
            streamed: Any = StreamingSource(self.dataset(folder), self.rows_per_step, self.tail, workers)  # type: ignore[arg-type]
            return PackedSource(streamed, CLASSES) if self.kind == "packs" else streamed
        if self.road == "loader":
            return StreamingLoader(self.dataset(folder), self.rows_per_step, rank=0, world=1, tail="drop")
        held = self._in_memory()
        if self.road == "memory":
            return held
        order = replace(held, rows_per_step=self.rows_per_step).order(
            seed=self.seed, num_microbatches=1, route_pure=False
        )
        batches = [order.microbatch(step, 0) for step in range(order.steps_per_epoch)]
        return batches if self.road == "list" else Again(batches)

    def _in_memory(self) -> Any:
        classes = torch.tensor([content.class_of(n) for n in range(NUM_ROWS)])
        tail: Any = "drop" if self.tail == "carry" else self.tail
        if self.kind == "packs":
            return PackedSource(InMemory(pack_tensors(packed(cut_rows=False)), self.rows_per_step, tail="pad"), CLASSES)
        rows = content.images() if self.kind == "images" else content.sequences()
        return InMemory(rows, self.rows_per_step, classes, CLASSES, tail=tail)


SELECT = SelectiveBackprop(start=0.0, end=1.0, keep=0.5, interrupt=0)
SHORTER = SeqLengthWarmup(duration=1.0, min_seq_length=2, max_seq_length=LENGTH, step_size=1, truncate=False)
PIPELINES = [
    Pipeline("images", "streamed", 4, 4, "pad", True, (MixUp(alpha=3.0), SELECT), False, False, 1, 1.5),
    Pipeline("images", "list", 2, 4, "pad", False, (MixUp(alpha=3.0),), False, False, 2, 1.0),
    Pipeline("tokens", "streamed", 4, 2, "carry", False, (LabelSmoothing(smoothing=0.1), SHORTER), False, True, 3, 2.0),
    Pipeline("tokens", "memory", 2, 4, "pad", True, (), True, False, 4, 1.0),
    Pipeline("packs", "streamed", 4, 2, "pad", True, (SHORTER, SELECT), False, False, 5, 1.0),
    Pipeline("packs", "memory", 2, 4, "pad", True, (), True, True, 6, 1.0),
]
"""One or two of each stage."""


@st.composite
def pipelines(draw: st.DrawFn, *, num_workers: bool = False) -> Pipeline:
    """Draw a pipeline in which something is trained."""
    kind = draw(st.sampled_from(["images", "tokens", "packs"]))
    roads = ["workers"] if num_workers else ["memory", "streamed"]
    if kind != "packs" and not num_workers:
        roads += ["list", "iterable", "loader"]
    road = draw(st.sampled_from(roads))
    is_source = road in ("memory", "streamed", "workers")
    return Pipeline(
        kind=kind,
        road=road,
        num_microbatches=draw(st.sampled_from([1, 2, 4])) if is_source else draw(st.sampled_from([1, 2])),
        rows_each=draw(st.sampled_from([2, 4])),
        tail=draw(st.sampled_from(["pad", "carry"])),
        is_governed=is_source and draw(st.booleans()),
        methods=draw(_methods(kind)),
        short_of_memory=draw(st.booleans()),
        resumed=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        repeats=draw(st.sampled_from([1.0, 2.0, 1.5])),
    )


def _methods(kind: str) -> st.SearchStrategy[tuple[Method, ...]]:
    """Draw methods that change batches; at most one of those that exclude each other."""
    chosen: dict[str, list[Sequence[Method]]] = {
        "images": [
            [(), CropAndFlip(padding=1)], [(), CutOut(length=0.3)], [(), LabelSmoothing(smoothing=0.1)],
            [(), MixUp(alpha=3.0), CutMix(length=0.5), MixUp(alpha=3.0, interpolate_loss=True)],
        ],
        "tokens": [[(), LabelSmoothing(smoothing=0.1)], [(), *_shortening()]],
        "packs": [[(), LabelSmoothing(smoothing=0.1)], [(), *_shortening()]],
    }  # fmt: skip
    options = [*chosen[kind], [(), SELECT]]
    drawn = st.tuples(*(st.sampled_from(one) for one in options))
    return drawn.map(lambda found: tuple(method for method in found if isinstance(method, Method)))


def _shortening() -> list[Method]:
    lengths: dict[str, Any] = {"duration": 1.0, "min_seq_length": 2, "max_seq_length": LENGTH, "step_size": 1}
    return [SeqLengthWarmup(**lengths), SeqLengthWarmup(**lengths, truncate=False)]


class Seen(Observer):
    """Keeps the batches that were trained on, and which pieces of memory's shortage they were."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def on_step(self, outcome: StepOutcome) -> None:
        self.batches += outcome.batches


def short(loss: Any) -> Any:
    """Return a loss without room for more than two whole rows."""
    per_row = NUM_ROWS * SIDE * SIDE if isinstance(loss, Classification) else LENGTH + 1

    def call(self: Any, model: nn.Module, data: Any) -> Any:
        del self
        if torch.is_grad_enabled() and content.input_in(data).numel() > 2 * per_row:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss(model, data)

    return type("Short", (type(loss),), {"__call__": call})(loss.num_classes)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()


def trained(pipeline: Pipeline, shards: Path, folder: Path) -> list[Batch]:
    """Run a pipeline for three steps, and return the batches as they were trained on."""

    def run() -> list[Batch]:
        torch.manual_seed(0)
        seen = Seen()
        if pipeline.kind == "images":
            model: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(NUM_ROWS * SIDE * SIDE, NUM_ROWS))
            loss: Any = Classification(NUM_ROWS)
        else:
            model = GPT(
                GPTConfig(vocabulary_size=VOCABULARY, sequence_length=LENGTH, width=4, num_blocks=1, num_heads=1)
            )
            loss = LanguageModel(VOCABULARY)
        governed = pipeline.is_governed
        Trainer(
            model,
            short(loss) if pipeline.short_of_memory else loss,
            pipeline.data(shards),
            optimizers=[SGD(lr=0.01)],
            methods=pipeline.methods,
            policy=POLICY if governed else None,
            taxonomy=TAXONOMY if governed else None,
            observers=[seen],
            config=RunConfig(
                budget="3ba",
                num_microbatches=pipeline.num_microbatches,
                seed=pipeline.seed,
                num_threads=1,
                run_folder=folder if pipeline.resumed or pipeline.short_of_memory else None,
                checkpoint_every="1ba" if pipeline.resumed else None,
                num_checkpoints=9,
                progress=False,
            ),
        ).fit()
        return seen.batches

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = run()
        if pipeline.resumed:
            _wait()
            for checkpoint in sorted((folder / "checkpoints").iterdir())[2:] if _is_first() else ():
                shutil.rmtree(checkpoint)
            _wait()
            batches += run()
    return batches
