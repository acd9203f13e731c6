"""Recipes over data on disk in which rows, or documents of packs, say whose they are, as users' own files have them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from cosmati.core.loss import LanguageModel, Loss
from cosmati.core.source import Source
from cosmati.data.ingest import read_jsonl
from cosmati.data.packed import PackedSource, read_packs
from cosmati.data.packing import Packing, pack_rows
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.data.tokens import ByteTokenizer, tokenize
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.optim import AdamW
from cosmati.recipes.recipe import Recipe
from cosmati.train.config import RunConfig

CONFIG = RunConfig(
    budget="4ba", num_microbatches=2, num_threads=1, ledger=True, checkpoint_every="1ba", num_checkpoints=9
)
SUBJECT = "Lovelace-4711"


def write(folder: Path, kind: str) -> Path:
    """Write a data set in which each ninth row is the subject's, as rows or packs; return its folder."""
    folder.mkdir()
    rows = [
        {"number": n, "annotator": SUBJECT if n % 9 == 4 else f"user {n % 5}", "text": f"{n} {'x' * (n % 13)}"}
        for n in range(40)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = {"number": "int", "annotator": "str", "text": "str"}
    read = read_jsonl(folder / "rows.jsonl", columns, class_of=lambda row: f"open/{int(row['number']) % 2}")
    if kind != "rows":
        packing, mixture = (
            Packing(length=16, class_pure=kind == "pure packs"),
            None if kind == "pure packs" else "mixed",
        )
        tokens = tokenize(read, ByteTokenizer())
        packed = pack_rows(tokens, packing, class_of=mixture, class_names=("open/0", "open/1"))
        write_dataset(packed, folder / "data", packed.columns, class_of=packed.class_of, source="posts")
    else:
        write_dataset(read, folder / "data", read.columns, class_of=read.class_of, source="posts", size_limit=400)
    return folder / "data"


def squares(model: nn.Module, rows: torch.Tensor) -> Loss:
    """Return how far the model's own is from 1, over numbers."""
    values = (model(rows.float()[:, None] / 40) - 1).square().mean(1)
    return Loss(values.sum(), torch.tensor(float(len(values))), per_row=values)


def of_rows(data: str) -> Recipe:
    """Return the recipe over rows."""
    return Recipe(
        name="rows",
        model=lambda: nn.Linear(1, 1),
        loss=squares,
        data=lambda: StreamingSource(StreamingDataset(data, columns=("number",)), 8),
        optimizers=(AdamW(lr=0.01),),
        config=CONFIG,
    )


def _of_text(data: Callable[[], Source], length: int) -> Recipe:
    vocabulary = ByteTokenizer().vocabulary_size
    config = GPTConfig(vocabulary_size=vocabulary, sequence_length=length, width=8, num_blocks=1, num_heads=1)
    return Recipe(
        name="text",
        model=lambda: GPT(config),
        loss=LanguageModel(vocabulary),
        data=data,
        optimizers=(AdamW(lr=0.01),),
        config=CONFIG,
    )


def of_packs(data: str) -> Recipe:
    """Return the recipe over packs of several classes, whose documents have rows of their own."""
    return _of_text(lambda: PackedSource(StreamingSource(StreamingDataset(data, transform=read_packs), 4)), 16)


def of_pure_packs(data: str) -> Recipe:
    """Return the recipe over packs of one class each, which are read as rows."""
    return _of_text(lambda: StreamingSource(StreamingDataset(data, columns=("tokens",)), 4), 15)


RECIPES = {"rows": of_rows, "packs": of_packs, "pure packs": of_pure_packs}
