"""Checkpoints in parts, made in one process: as so many ranks would write them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from threading import Event

from torch import Tensor

from cosmati.train.layout.shares import Held, RunContent, SharePlan, share_out
from cosmati.train.layout.span import HeldSpan
from cosmati.train.run.checkpoints import (
    Checkpoint,
    Roots,
    draft_folder,
    finish_checkpoint,
    publish_checkpoint,
    read_checkpoint,
)
from cosmati.train.run.parts import Share, write_part


def planned(tensors: Mapping[str, Tensor], world: int) -> SharePlan:
    """Deal tensors out that each of so many ranks holds whole."""
    return share_out(
        {
            key: (one.dtype, tuple(one.shape), [Held(rank, 0, one.numel()) for rank in range(world)])
            for key, one in tensors.items()
        },
        world,
    )


def write_in_parts(folder: Path, checkpoint: Checkpoint, world: int) -> Roots:
    """Write and publish a checkpoint; return its digests."""
    tensors = {f"{kind}/{name}": one for kind in ("model", "state") for name, one in getattr(checkpoint, kind).items()}
    plan = planned(tensors, world)
    draft = draft_folder(folder, checkpoint.step, None)
    draft.mkdir(parents=True)
    for rank in range(world):
        share = Share()
        share.fill(
            plan,
            rank,
            (
                RunContent(key, run, HeldSpan.of(tensors[key]).content(run.start, run.stop))
                for key, one in plan.items()
                for run in one.runs
                if run.writer == rank
            ),
        )
        write_part(draft, rank, world, plan, share)
    roots = finish_checkpoint(draft, checkpoint.step, checkpoint.facts, plan, world, 0.0, Event())
    publish_checkpoint(draft, keep=99)
    return roots


def put_into_parts(path: Path, world: int = 3) -> Path:
    """Put a checkpoint in parts in the place of a published one."""
    checkpoint = read_checkpoint(path)
    shutil.rmtree(path)
    write_in_parts(path.parent, checkpoint, world)
    return path
