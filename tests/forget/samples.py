"""Runs over in-memory rows, what is asked of them, and what to compare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosmati.core.source import Source
from cosmati.data.tombstoned import Tombstoned
from cosmati.forget.ablation import Wrap
from cosmati.forget.asked import ToForget
from cosmati.forget.deletion import Deletion, begin, begun_in, carry_out
from cosmati.forget.past_run import PastRun
from cosmati.forget.replay import Make
from cosmati.forget.request import Request
from cosmati.methods import EMA, IsolatedAdapters
from cosmati.optim import AdamW, Muon
from cosmati.routing.policy_file import PolicyFile, load_policy
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.trainer import Trainer
from tests.train.isolated.samples import CASES, Case, policy, trainer
from tests.train.packs import samples as packs

PLAIN = load_policy("version: 1\ntaxonomy: t\nregions: {all: {params: '*'}}\nrules: [{class: '**', weight: 1}]\n")
ISOLATED = policy()
KEPT = {"checkpoint_every": "2ba", "num_checkpoints": 9}


def bare(name: str) -> Case:
    """Return a case in which no class has anything of its own."""
    case = CASES[name]
    return Case(case.build, case.rows, IsolatedAdapters(), case.loss)


def maker(
    case: Case, data: Source, *, chosen: PolicyFile | None = PLAIN, methods: Sequence[Any] | None = None, **options: Any
) -> Make:
    """Return what makes a run's trainer over its data, wrapped."""
    settings = {**KEPT, **options.pop("config", {})}

    def make(wrap: Wrap, folder: Path | None, /, **changes: Any) -> Trainer:
        own = [EMA(half_life="2ba")] if methods is None else methods
        config = {**settings, "run_folder": folder, **changes}
        return trainer(case, wrap(data), [Muon(lr=0.02), AdamW(lr=0.01)], own, chosen=chosen, config=config, **options)

    return make


def packed() -> Make:
    """Return what makes a run over packs of documents of several classes."""
    data = packs.source(packs.documents())

    def make(wrap: Wrap, folder: Path) -> Trainer:
        optimizers = [Muon(lr=0.02), AdamW(lr=0.01)]
        config = {**KEPT, "run_folder": folder}
        methods = [EMA(half_life="2ba")]
        return packs.trainer(
            packs.model(),
            wrap(data),
            packs.policy(),
            optimizers=optimizers,
            budget="5ba",
            methods=methods,
            config=config,
        )

    return make


def unwrapped(source: object) -> Source:
    """Return a source as it is."""
    assert isinstance(source, Source)
    return source


def without(**gone: Any) -> Wrap:
    """Return what puts tombstones into a source: the retain-only run, made without the code that's tested."""
    return lambda source: Tombstoned(source, **gone)  # type: ignore[arg-type]


def trained(make: Make, folder: Path, wrap: Wrap = unwrapped) -> Path:
    """Train a run to its end, and return its folder."""
    make(wrap, folder).fit()
    return folder


def forgotten(
    folder: Path, asked: ToForget, make: Make | None, out: Path, method: str = "replay", *, delete: bool = False
) -> Deletion:
    """Do a deletion, or go on with it, as the command does."""
    run = PastRun(folder)
    begun = begun_in(out) or begin(Request.open(run, asked, make), method, out)
    return carry_out(run, asked, begun, make, out, delete_superseded=delete, say=lambda _: None)


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a run's last checkpoint: weights, buffers, optimizers, methods, averages."""
    found = read_checkpoint(list_checkpoints(folder / "checkpoints")[0])
    return {**found.model, **found.state}


def differing(one: dict[str, Tensor], two: dict[str, Tensor]) -> list[str]:
    """Return names of what isn't equal in every bit."""
    assert one.keys() == two.keys()
    return [name for name in one if not torch.equal(one[name], two[name])]


def rows_of_step(data: Source, step: int, num: int = 2) -> frozenset[int]:
    """Return the ids of some rows that a run of the samples has at a step, and not before."""
    order = data.order(seed=0, num_microbatches=4, route_pure=True)
    return frozenset(order.microbatch(step, 1).lineage.row_ids.tolist()[:num])
