"""The quickstart's deletion: one package leaves the governed run, exactly, and what that changed is measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from cosmati.cli.forget import held, maker
from cosmati.corpora.python_library import PackageSource, PythonLibrary
from cosmati.data.people import ChosenRows
from cosmati.data.rows import RowBatch
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import RunError
from cosmati.export.publishing import Say
from cosmati.forget.asked import ToForget
from cosmati.forget.attacks import extracted, membership_auc
from cosmati.forget.certificate import read_certificate
from cosmati.forget.contact import ids_of
from cosmati.forget.deletion import Deletion, begin, begun_in, carry_out
from cosmati.forget.past_run import PastRun
from cosmati.forget.request import Request
from cosmati.recipes.language import LanguageTask
from cosmati.recipes.recipe import Recipe
from cosmati.records.deleted import DELETED_FILE, DeletedRecord, MeasureRecord, TaughtRecord
from cosmati.records.run import RunRecord, training_seconds
from cosmati.storage.atomic import replace_file
from cosmati.train.rows_taught import regions_taught_by
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint

WITHOUT = "without-a-package"
"""Name of the folder of the run that never had it."""
NUM_CANDIDATES = 3
PROMPT_BYTES, CONTINUED_BYTES, MAX_MEASURED = 64, 8, 256
NOTE = (
    "These are simple attacks, and what they don't find says little: stronger ones are known. The package is out since "
    "its rows were never run, not since nobody finds them; what the new model still goes on with, others wrote too."
)


@dataclass(frozen=True)
class Leaving:
    """The package that leaves.

    Attributes:
        package: what was taken from it.
        row_ids: of its rows in the data set, int64 [rows].
        given: of those that the run was given, int64 [rows].
        steps: that had any.
    """

    package: PackageSource
    row_ids: NDArray[np.int64]
    given: NDArray[np.int64]
    steps: tuple[int, ...]

    @property
    def name(self) -> str:
        """Its name and version."""
        return f"{self.package.name} {self.package.version}"


def forget_a_package(task: LanguageTask, recipe: Recipe, run: Path, out: Path, say: Say) -> None:
    """Have a governed run forget one package by replay, and write what it came to; what is done isn't done again.

    Args:
        task: whose data the run has.
        recipe: of the run.
        run: its folder.
        out: of the run that never had the package.
        say: told of what's done, a line at a time.

    Raises:
        RunError: `out` isn't of this run. KeyboardInterrupt: somebody stopped the replay, and the same call goes on.
    """
    if (out / DELETED_FILE).exists():
        return
    leaving = leaving_package(task, recipe, run)
    say(f"{leaving.name} leaves: {len(leaving.given)} rows, in {len(leaving.steps)} of its steps")
    done = _forgotten(leaving, recipe, run, out, say)
    if done.certificate is None:
        raise KeyboardInterrupt
    told = DeletedRecord(
        certificate=read_certificate(done.certificate)[1],
        what=leaving.name,
        class_name=leaving.package.licence.class_path,
        num_rows=len(leaving.row_ids),
        steps=leaving.steps,
        taught=tuple(_taught(leaving, recipe, run)),
        measures=tuple(_measured(leaving, task, recipe, run, out)),
        seconds=training_seconds(RunRecord.from_json((out / "run.json").read_text()).seconds_by_part),
        notes=(NOTE,),
    )
    replace_file(out / DELETED_FILE, told.to_json().encode())


def leaving_package(task: LanguageTask, recipe: Recipe, run: Path) -> Leaving:
    """Choose the package: of the few of which the run read most, the one that it met last, which costs least to forget.

    Args:
        task: whose data the run has.
        recipe: of the run.
        run: its folder, of a run that has ended.
    """
    library = task.library()
    package_of = _package_ids(task, library)
    trainer = recipe.trainer(run_folder=run)
    assert trainer.feed is not None, "the recipe has a source"
    steps, given = defaultdict[int, list[int]](list), defaultdict[int, set[int]](set)
    try:
        for step in range(RunRecord.from_json((run / "run.json").read_text()).num_steps):
            for batch in trainer.feed.again(step):
                for row in ids_of(batch)[0].tolist():
                    package = int(package_of[row])
                    given[package].add(row)
                    steps[package] += [] if step in steps[package][-1:] else [step]
    finally:
        trainer.feed.close()
    by_size = sorted(given, key=lambda one: (library.packages[one].name.startswith("python/"), -len(given[one]), one))
    chosen = max(by_size[:NUM_CANDIDATES], key=lambda one: steps[one][0])
    return Leaving(
        library.packages[chosen],
        np.flatnonzero(package_of == chosen),
        np.asarray(sorted(given[chosen])),
        tuple(steps[chosen]),
    )


def _package_ids(task: LanguageTask, library: PythonLibrary) -> NDArray[np.int64]:
    """Return the package of each row of the data set, int64 [rows]: index into the library's packages."""
    dataset = StreamingDataset(task.shards(), columns=("manifest_row",))
    found, rows = np.empty(len(dataset), np.int64), library.train
    of_row = dict(zip(rows.row_ids.tolist(), rows.package_ids.tolist(), strict=True))

    def note(batch: RowBatch) -> NDArray[np.bool_]:
        found[batch.row_ids] = [of_row[row] for row in np.asarray(batch.columns["manifest_row"]).tolist()]
        return np.zeros(len(batch), bool)

    dataset.ids_where(note)
    return found


def _forgotten(leaving: Leaving, recipe: Recipe, run: Path, out: Path, say: Say) -> Deletion:
    # Measured at its end alone: the curve on the way is the other run's.
    asked = ToForget(rows=frozenset(leaving.row_ids.tolist()))
    make = maker(replace(recipe, config=replace(recipe.config, evaluate_every=None)))
    with held(run):
        past, begun = PastRun(run.resolve()), begun_in(out)
        if begun is None:
            begun = begin(Request.open(past, asked, make), "replay", out)
        elif not begun.is_of(asked.digest(past.salt), "replay", 0):
            raise RunError(f"{out} was left of another run than {run}. Remove it, and run the quickstart again.")
        return carry_out(past, asked, begun, make, out, delete_superseded=False, say=say)


def _taught(leaving: Leaving, recipe: Recipe, run: Path) -> Iterator[TaughtRecord]:
    chosen = ChosenRows(leaving.row_ids, np.empty((0, 2), np.int64))
    for one in regions_taught_by(recipe.trainer(run_folder=run), chosen):
        yield TaughtRecord(one.region, one.num_rows, len(one.steps))


def _measured(leaving: Leaving, task: LanguageTask, recipe: Recipe, run: Path, out: Path) -> Iterator[MeasureRecord]:
    """Yield what both models come to: on held-out rows as the runs measured it, and on the package's own."""
    before, after = (RunRecord.from_json((folder / "run.json").read_text()).metrics for folder in (run, out))
    own, others = _tokens(leaving, task)
    attacked = [_attacked(recipe, folder, own, others) for folder in (run, out)]
    yield MeasureRecord("bits per byte, held out", before["bits_per_byte"], after["bits_per_byte"])
    for name in sorted(set(before) & set(after)):
        if name.startswith("loss/"):
            yield MeasureRecord(f"nats a byte of {name.removeprefix('loss/')}, held out", before[name], after[name])
    for name, had in attacked[0].items():
        yield MeasureRecord(name, had, attacked[1][name], is_attack=True)


def _tokens(leaving: Leaving, task: LanguageTask) -> tuple[Tensor, Tensor]:
    """Return rows of the package that the run was given, and rows of it that it wasn't."""
    dataset = StreamingDataset(task.shards(), columns=("tokens",))
    others = np.setdiff1d(leaving.row_ids, leaving.given)

    def read(row_ids: NDArray[np.int64]) -> Tensor:
        chosen = row_ids[np.unique(np.linspace(0, len(row_ids) - 1, min(len(row_ids), MAX_MEASURED)).astype(int))]
        found = np.empty((0, task.sequence_length + 1), np.uint8)

        def note(batch: RowBatch) -> NDArray[np.bool_]:
            nonlocal found
            is_chosen = np.isin(batch.row_ids, chosen)
            found = np.concatenate([found, np.asarray(batch.columns["tokens"])[is_chosen]])
            return np.zeros(len(batch), bool)

        if len(row_ids):
            dataset.ids_where(note)
        return torch.from_numpy(found).long()

    return read(leaving.given), read(others)


def _attacked(recipe: Recipe, folder: Path, own: Tensor, others: Tensor) -> Mapping[str, float]:
    """Return what the last checkpoint's model gives away of the package's rows."""
    trainer = recipe.trainer()
    trainer.recall(read_checkpoint(list_checkpoints(folder / "checkpoints")[0]))
    prompt = min(PROMPT_BYTES, own.shape[1] // 2)
    ends = prompt + CONTINUED_BYTES
    with trainer.averaged() as model:
        losses = _row_losses(model, own)
        found = {f"nats a byte of {len(own)} rows that were given": float(losses.mean())}
        if len(others):
            score = membership_auc(-losses, -_row_losses(model, others))
            found[f"membership by the loss, against {len(others)} rows that weren't given (0.5 tells nothing)"] = score
        continued = extracted(model, own[:, :prompt], own[:, prompt:ends])
        found[f"rows of {len(own)} that it goes on with verbatim, {CONTINUED_BYTES} bytes after {prompt}"] = float(
            continued.sum()
        )
    return found


@torch.no_grad()
def _row_losses(model: nn.Module, tokens: Tensor) -> NDArray[Any]:
    logits = torch.cat([model(part[:, :-1]) for part in tokens.split(64)]).float()
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1).double().numpy()
