"""A small run whose data and policy are signed in a rehearsal, made anew in a folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from cosmati import RunConfig, StreamingDataset, StreamingSource, Trainer, software_licences
from cosmati.cli.quickstart_rehearsal import rehearse
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.manifest import SourceFacts
from cosmati.optim import SGD
from cosmati.routing.policy_file import load_policy

POLICY = """
version: 1
taxonomy: software-licences
regions: {low: {params: "0.*"}, high: {params: "1.*"}}
rules:
  - {class: "open/**", weight: 1}
  - {class: open/psf, region: low, weight: 0}
"""
CLASSES = ("open/permissive", "open/psf", "unknown")
ORIGIN = "a place called <b>Here & there</b>"


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    output: Tensor = model(rows.float()[:, None] / 32)
    return output.square().mean()


def make_run(folder: Path, *, budget: str = "6ba", is_signed: bool = True) -> Path:
    """Write data of three classes, and train on them; see `trained`."""
    write_dataset(
        [{"number": number} for number in range(40)],
        folder / "data",
        {"number": "int"},
        class_of=lambda row: CLASSES[min(2, int(row["number"]) // 16)],
        source="rows",
        facts=SourceFacts(origin=ORIGIN, obtained="licensed", licence="MIT", licence_valid_until="2999-12-31"),
    )
    return trained(folder, budget=budget, is_signed=is_signed)


def trained(folder: Path, policy_text: str = POLICY, *, budget: str = "6ba", is_signed: bool = True) -> Path:
    """Have a folder's data and a policy signed unless told otherwise, train on them, and return the run's folder."""
    policy = load_policy(policy_text)
    authority, signed = rehearse(folder / "rehearsal", folder / "data", policy)
    dataset = StreamingDataset(folder / "data", columns=("number",), authority=authority if is_signed else None)
    torch.manual_seed(0)
    Trainer(
        nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1)),
        loss,
        StreamingSource(dataset, 8),
        optimizers=SGD(lr=1e-3),
        policy=signed if is_signed else policy,
        taxonomy=software_licences(),
        config=RunConfig(budget=budget, num_threads=1, num_microbatches=2, run_folder=folder / "run"),
    ).fit()
    return folder / "run"
