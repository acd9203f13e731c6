"""When a run first had rows that are to be forgotten, read from the data as the run itself would read them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmati.core.batch import TOMBSTONE, Batch, bury
from cosmati.core.loss import as_loss, without_tombstones
from cosmati.core.source import Source
from cosmati.errors import BatchError, ForgetError
from cosmati.forget.past_run import Gone, PastRun
from cosmati.forget.past_trainers import PastTrainers
from cosmati.records.joint_classes import joint_name
from cosmati.train.evaluation import kept_state
from cosmati.train.identity import check_resume
from cosmati.train.lifecycle import Lifecycle
from cosmati.train.run.checkpoints import Checkpoint
from cosmati.train.script_names import note_files


@dataclass(frozen=True)
class Contact:
    """What a run had of some rows.

    Attributes:
        first_step: with any of them; None where none was given to it.
        classes: names of theirs.
        num_rows: how many of those that were asked for the run was given.
    """

    first_step: int | None
    classes: frozenset[str]
    num_rows: int


def refuse_another(run: PastRun, trainer: Lifecycle, checkpoint: Checkpoint | None) -> None:
    """Compare a recipe with a run.

    Raises:
        CheckpointError: it isn't the run's, by name.
    """
    if checkpoint is not None:
        identity = trainer.prepared.identity
        was = {**checkpoint.facts["identity"], **checkpoint.facts.get("files", {})}
        now = {**identity, **note_files(identity)}
        check_resume(was, now, asked=(), where=f"The checkpoint of step {checkpoint.step} in {run.folder}")


def contact_of(run: PastRun, trainers: PastTrainers, rows: Collection[int], classes: Collection[str] = ()) -> Contact:
    """Read a run's rows again until all that are asked for were found, or its steps end.

    Args:
        run: of which it's asked.
        trainers: made as the run's own were.
        rows: ids.
        classes: in place of rows: names of the data's; the first step with any row of them ends the search.

    Raises:
        ForgetError: its rows can't be read again.
    """
    data = trainers.last.prepared.given.data
    if trainers.last.feed is None or not isinstance(data, Source):
        msg = (
            f"The run's data are a {type(data).__name__}, and only a Source's rows are read by position. Which rows "
            "others gave is nowhere, so what learnt from them can't be told; train anew without them."
        )
        raise ForgetError(msg)
    names = data.class_names
    wanted, seen, first = torch.tensor(sorted(rows), dtype=torch.int64), set[int](), None
    # Of packs a class has an id for each kind of its rows.
    own = torch.tensor([index for index, name in enumerate(names) if name in classes], dtype=torch.int64)
    met = set[str]()
    for step in range(run.num_steps):
        for batch in trainers.again(step):
            ids, class_ids = ids_of(batch)
            found = torch.isin(ids, wanted) | (torch.isin(class_ids, own) & (ids != TOMBSTONE))
            seen |= set(ids[found].tolist())
            met |= {names[index] for index in class_ids[found].unique().tolist()}
        first = step if met and first is None else first
        if first is not None and len(seen) >= len(wanted):
            break
    return Contact(first, frozenset(met), len(seen))


def rows_of_classes(run: PastRun, trainer: Lifecycle, classes: Collection[str]) -> frozenset[int]:
    """Read a run's rows again, and return the ids of all that are of some classes; of packs, of their documents.

    Args:
        run: of which it's asked.
        trainer: made as the run's own was, over a `Source`.
        classes: names of the data's.
    """
    data, found = trainer.prepared.given.data, set[int]()
    assert trainer.feed is not None, "a run that was replayed is read by position"
    assert isinstance(data, Source)
    own = torch.tensor([index for index, name in enumerate(data.class_names) if name in classes], dtype=torch.int64)
    for step in range(run.num_steps):
        for batch in trainer.feed.again(step):
            ids, class_ids = ids_of(batch)
            found |= set(ids[torch.isin(class_ids, own)].unique().tolist())
    return frozenset(found - {TOMBSTONE})


def ids_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the ids and classes of a microbatch's rows, or of its packs' tokens."""
    lineage = batch.lineage
    if lineage.token_class_ids is not None:
        assert lineage.token_row_ids is not None, "packs of a source know their rows"
        return lineage.token_row_ids.flatten(), lineage.token_class_ids.flatten()
    return lineage.row_ids, lineage.class_ids


def without_rows(trainers: PastTrainers, step: int, gone: Gone) -> str:
    """Say why the loss can't do without some rows of a microbatch; empty where it can, or nobody can tell.

    Found here it costs a forward pass; found by the replay, the run has been succeeded by one that can't be trained.

    Args:
        trainers: made as the run's own were.
        step: that has some of them.
        gone: what is to be forgotten.
    """
    trainer = trainers.at(step)
    a, data = trainer.assembly, trainer.prepared.given.data
    names = data.class_names if isinstance(data, Source) else ()
    classes = torch.tensor([index for index, name in enumerate(names) if joint_name([name]) in gone.classes])
    for batch in trainers.again(step):
        lineage = batch.lineage
        mask = torch.isin(lineage.class_ids, classes) | torch.isin(lineage.row_ids, torch.tensor(sorted(gone.rows)))
        is_run = bool(mask.any()) and (a.num_microbatches == 1 or not bool(mask.all()))
        if lineage.token_class_ids is None and is_run:
            buried = bury(batch, mask).to(a.device)
            losses = [turn.loss for turn in a.turns]
            with kept_state(a.model, losses), a.generators.restored(), a.config.autocast(a.device):
                try:
                    without_tombstones(as_loss(losses[0](a.model, buried.data)), buried.present)
                except BatchError as error:
                    return f"the loss can't leave rows out: {error}"
                except Exception:  # noqa: BLE001  (code of the user's, which may want what a step prepares)
                    return ""
            break
    return ""
