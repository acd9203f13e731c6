"""Language models on the Python source of this machine: a tuned AdamW baseline, and a composition."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from cosmati.core.batch import Data
from cosmati.core.loss import LanguageModel, Loss
from cosmati.corpora.python_library import PythonLibrary, load_python_library
from cosmati.corpora.python_shards import write_python_shards
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.data.vouching import Vouches
from cosmati.methods import SeqLengthWarmup
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.optim import WSD, AdamW, Muon
from cosmati.provenance.taxonomy import software_licences
from cosmati.recipes.language_samples import loss_by_class
from cosmati.recipes.recipe import Recipe
from cosmati.routing.policy_file import PolicyFile
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import AnyMetric, Evaluation, batches

LANGUAGE = "Next-byte prediction on the Python source of this machine; packages are held out whole"
"""What the recipes of this file learn."""
BASELINE_LR = 8e-3
COMPOSED_LR = 0.06
"""Muon's."""
REST_LR = 1.2e-2
"""AdamW's in the composition, for what isn't a hidden matrix."""


@dataclass(frozen=True, kw_only=True)
class LanguageTask:
    """Next-byte prediction on the Python source library, with the size of its model.

    Args:
        sequence_length: bytes that a row predicts.
        rows_per_step: rows in a step.
        max_bytes: upper bound of the corpus.
        num_validation_rows: rows of held-out packages to measure on, evenly spaced.
        width: of the residual stream.
        num_blocks: blocks of the model.
        num_heads: attention heads.
    """

    sequence_length: int = 128
    rows_per_step: int = 16
    max_bytes: int = 6_000_000
    num_validation_rows: int = 384
    width: int = 64
    num_blocks: int = 3
    num_heads: int = 4

    def library(self) -> PythonLibrary:
        """Return the corpus; read once a process."""
        return _library(self.sequence_length, self.max_bytes)

    def data(self, authority: Vouches | None = None) -> StreamingSource:
        """Return the training rows, streamed from shards by licence class; written once a machine.

        Args:
            authority: that has signed them; None asks nobody.
        """
        dataset = StreamingDataset(self.shards(), columns=("tokens",), authority=authority)
        return StreamingSource(dataset, self.rows_per_step)

    def shards(self) -> Path:
        """Return the folder of the training rows' shards, which are written if they aren't there."""
        return write_python_shards(self.library())

    def evaluation(self) -> Evaluation:
        """Return bits per byte on rows of held-out packages."""
        tokens = self.library().validation.tokens
        chosen = torch.linspace(0, len(tokens) - 1, min(self.num_validation_rows, len(tokens))).long()
        return Evaluation(batches(tokens[chosen], 64), {"bits_per_byte": bits_per_byte})

    def evaluation_by_class(self) -> Evaluation:
        """Return bits per byte on the same rows, and their mean loss in nats by licence class as `loss/CLASS`."""
        library = self.library()
        rows = library.validation
        chosen = torch.linspace(0, len(rows.tokens) - 1, min(self.num_validation_rows, len(rows.tokens))).long()
        tokens = rows.tokens[chosen]
        data = (tokens[:, :-1], tokens[:, 1:], rows.class_ids[chosen])
        metrics: dict[str, AnyMetric] = {"bits_per_byte": bits_per_byte, "loss": loss_by_class(library.class_names)}
        return Evaluation(batches(data, 64), metrics)

    def gpt(self, config: GPTConfig) -> GPTConfig:
        """Return a model's options at this task's size."""
        return dataclasses.replace(
            config,
            sequence_length=self.sequence_length,
            width=self.width,
            num_blocks=self.num_blocks,
            num_heads=self.num_heads,
        )


@lru_cache(maxsize=2)
def _library(sequence_length: int, max_bytes: int) -> PythonLibrary:
    return load_python_library(sequence_length=sequence_length, max_bytes=max_bytes)


def bits_per_byte(model: nn.Module, data: Data) -> Loss:
    """Return the cross-entropy of the next byte in bits, weighted by bytes."""
    loss = LanguageModel()(model, data)
    return Loss(loss.sum / math.log(2), loss.weight)


@dataclass(frozen=True)
class BuildGPT:
    """Makes a GPT of a configuration."""

    config: GPTConfig

    def __call__(self) -> GPT:
        """Return the model."""
        return GPT(self.config)


def python_gpt_baseline(
    task: LanguageTask | None = None, *, num_steps: int = 200, seed: int = 0, lr: float = BASELINE_LR
) -> Recipe:
    """Return the baseline: AdamW with decoupled decay on matrices, warm-up, and a linear decay to zero."""
    task = task or LanguageTask()
    schedule = WSD(warmup="0.05dur", decay="0.5dur")
    return Recipe(
        name="python-gpt-baseline",
        model=BuildGPT(task.gpt(GPTConfig())),
        loss=LanguageModel(),
        data=task.data,
        optimizers=(AdamW(lr=lr, betas=(0.9, 0.98), decay_vectors=False, schedule=schedule),),
        evaluation=task.evaluation,
        config=RunConfig(budget=f"{num_steps}ba", seed=seed, evaluate_every="0.5dur"),
        task=LANGUAGE,
    )


def python_gpt_composed(
    task: LanguageTask | None = None,
    *,
    num_steps: int = 200,
    seed: int = 0,
    lr: float = COMPOSED_LR,
    sequence_warmup: bool = True,
    policy: PolicyFile | None = None,
) -> Recipe:
    """Return the composition: Muon for the hidden matrices, zero-init projections and sequence warm-up.

    QK-norm and squared ReLU aren't in it: at this size and these budgets they made it worse (3.28 bits per byte with
    them, 3.06 without, 150 steps, one seed).

    Args:
        task: data and size of the model.
        num_steps: budget; the schedules are dilated with it.
        seed: keys every draw.
        lr: Muon's.
        sequence_warmup: start with shorter rows, cut up so that no byte is dropped.
        policy: which licence class may teach which region; the run then keeps a ledger in its folder.
    """
    task = task or LanguageTask()
    schedule = WSD(warmup="0.05dur", decay="0.5dur")
    options = GPTConfig(zero_init_projections=True)
    warmup = SeqLengthWarmup(
        duration=0.4,
        min_seq_length=task.sequence_length // 4,
        max_seq_length=task.sequence_length,
        step_size=task.sequence_length // 4,
        truncate=False,
    )
    return Recipe(
        name="python-gpt-composed",
        model=BuildGPT(task.gpt(options)),
        loss=LanguageModel(),
        data=task.data,
        optimizers=(
            Muon(lr=lr, schedule=schedule),
            AdamW(lr=REST_LR, betas=(0.9, 0.98), weight_decay=0.0, schedule=schedule),
        ),
        methods=(warmup,) if sequence_warmup else (),
        evaluation=task.evaluation,
        config=RunConfig(
            budget=f"{num_steps}ba", seed=seed, evaluate_every="0.5dur", num_microbatches=4 if policy else 1
        ),
        policy=policy,
        taxonomy=software_licences() if policy else None,
        task=LANGUAGE,
    )
