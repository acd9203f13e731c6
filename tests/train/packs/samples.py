"""A small GPT, packs of several classes, and policies over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch
from cosmati.core.labels import IGNORED
from cosmati.core.loss import LanguageModel, Loss, LossFunction
from cosmati.core.source import Source
from cosmati.data.in_memory import InMemory
from cosmati.data.packed import PackedSource, pack_tensors
from cosmati.data.packing import Pack, Packing, pack
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.optim import SGD
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import PolicyFile, load_policy
from cosmati.testing.packs import gradients_by_document
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer

LENGTH, VOCABULARY = 12, 11
CLASSES = ("open", "doubtful", "personal")
TAXONOMY = Taxonomy("t", "1", tuple((name, name) for name in CLASSES))
REGIONS = {
    "embedding": "'*', exclude: ['blocks.*', 'norm.*', 'head.*']",
    "lower": "['blocks.0.*']",
    "upper": "['blocks.1.*', 'norm.*']",
    "head": "[head.*]",
}
WEIGHTS = {
    "open": dict.fromkeys(REGIONS, 1.0),
    "doubtful": {"embedding": 0.0, "lower": 0.0, "upper": 1.0, "head": 1.0},
    "personal": {"embedding": 0.5, "lower": 0.25, "upper": 0.0, "head": 1.0},
}


def policy(weights: Mapping[str, Mapping[str, float]] = WEIGHTS, regions: Mapping[str, str] = REGIONS) -> PolicyFile:
    told = "".join(f"  {name}: {{params: {globs}}}\n" for name, globs in regions.items())
    rules = "".join(
        f"  - {{class: {c}, region: {r}, weight: {w}}}\n" for c, row in weights.items() for r, w in row.items()
    )
    return load_policy(f"version: 1\ntaxonomy: t\nregions:\n{told}rules:\n{rules}")


def model(**options: Any) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(
        vocabulary_size=VOCABULARY, sequence_length=LENGTH, width=8, num_blocks=2, num_heads=2, **options
    )
    return GPT(config)


def documents(number: int = 24, *, swapped: Sequence[int] = (), seed: int = 0, turns: int = 1) -> list[Pack]:
    """Return packs of documents whose classes take turns; those of the classes swapped have other tokens.

    Args:
        number: of documents.
        swapped: classes.
        seed: of the tokens and lengths.
        turns: documents of one class in a row.
    """
    generator = np.random.default_rng(seed)
    rows = []
    for index in range(number):
        tokens = generator.integers(0, VOCABULARY, int(generator.integers(2, 7)))
        class_id = index // turns % 3
        if class_id in swapped:
            tokens = (tokens + 3) % VOCABULARY
        rows.append({"tokens": tokens, "row_id": index, "class_id": class_id})
    return list(pack(rows, Packing(LENGTH, class_pure=False)))


def source(packs: Sequence[Pack], rows_per_step: int = 4) -> PackedSource:
    return PackedSource(InMemory(pack_tensors(packs), rows_per_step, tail="pad"), CLASSES)


def trainer(
    network: nn.Module,
    data: Any,
    chosen: PolicyFile | None,
    *,
    loss: Any = None,
    optimizers: Any = None,
    budget: str = "1ba",
    num_microbatches: int = 2,
    **options: Any,
) -> Trainer:
    config = RunConfig(budget=budget, num_microbatches=num_microbatches, num_threads=1, **options.pop("config", {}))
    return Trainer(
        network,
        loss or LanguageModel(VOCABULARY),
        data,
        optimizers=[SGD(lr=1.0)] if optimizers is None else optimizers,
        policy=chosen,
        taxonomy=TAXONOMY if chosen else None,
        config=config,
        **options,
    )


def exact(network: nn.Module, data: Any) -> Loss:
    """Cross-entropy in the model's own type: `LanguageModel` takes it in float32."""
    logits = network(data["input"], data["documents"])
    values = nn.functional.cross_entropy(logits.flatten(0, 1), data["target"].flatten(), reduction="none")
    per_row, weight = values.view(data["target"].shape).sum(1), (data["target"] != IGNORED).double().sum(1)
    return Loss(per_row.sum(), weight.sum(), per_row, weight)


def oracle(
    network: nn.Module,
    microbatches: Sequence[Batch],
    weight_of: Callable[[int, str], float],
    loss: LossFunction = exact,
) -> dict[str, Tensor]:
    return gradients_by_document(network, microbatches, weight_of, loss)


def region_of(name: str) -> str:
    first = {"embedding": "embedding", "position": "embedding", "ngram_embedding": "embedding", "head": "head"}
    return first.get(name.split(".", maxsplit=1)[0], "lower" if name.startswith("blocks.0.") else "upper")


def first_step(data: Source, num_microbatches: int = 2) -> list[Batch]:
    order = data.order(seed=0, num_microbatches=num_microbatches, route_pure=True)
    return [order.microbatch(0, index) for index in range(num_microbatches)]


def values(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
