"""`cosmati export`: the model that a run measured, for others to use."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from cosmati.cli.files import load_recipe
from cosmati.errors import CheckpointError, ExportError, RunError
from cosmati.export.formats import check_form, describe_files
from cosmati.export.publishing import NOTES, Origin
from cosmati.export.weights_alone import export_weights
from cosmati.recipes.recipe import Recipe
from cosmati.records.attempts import metrics_at
from cosmati.records.run import RunRecord
from cosmati.storage.lock import FileLock
from cosmati.train.continuity import CHECKPOINT_VERSION
from cosmati.train.exporting import RecordedRun, other_model, structure_digest
from cosmati.train.facts import describe_environment
from cosmati.train.identity import SURROUNDINGS
from cosmati.train.run.checkpoints import Checkpoint, list_checkpoints, read_checkpoint
from cosmati.train.script_names import note_files
from cosmati.train.trainer import Trainer


def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder, whose newest checkpoint is taken; or a checkpoint.")
    ],
    out: Annotated[Path, typer.Option(help="The folder to write; it must not be there yet.")],
    to: Annotated[str, typer.Option(metavar="FORM", help="torch, safetensors, hf or onnx.")] = "torch",
    recipe: Annotated[
        str | None,
        typer.Option(metavar="FILE[:FUNCTION]", help="The run's recipe: rebuilds its model and evaluation data."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="As the run had it: config.seed=3.")
    ] = None,
    keep_surgery: Annotated[bool, typer.Option("--keep-surgery", help="Don't fold surgery into plain layers.")] = False,
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, help="Within which metrics must agree; 1e-5 where no arithmetic moved.")
    ] = None,
) -> None:
    """Export the model that a run measured: its evaluated weights, in plain layers, checked before it says done.

    Averages (EMA, SWA, schedule-free) are put in, with BatchNorm's statistics for them. Layers that methods have put
    in become PyTorch's own where that's the same function; the card names all others. What was written is read back
    and evaluated again: where it isn't what the run recorded, nothing is exported and the command exits with 1.

    \b
    torch        model.safetensors, model.pt2 (torch.export: needs PyTorch alone), rebuild.py where layers changed
    safetensors  the same without model.pt2
    hf           save_pretrained, for models of transformers
    onnx         model.onnx, checked with onnxruntime: pip install 'cosmati[onnx]'

    Each form has a model card, README.md. The export is noted in RUN/exports.jsonl. Without --recipe there is no code
    of the model: only safetensors is possible, and the card says "unchecked".

    \b
    Examples:
      cosmati export runs/big-3 --recipe digits.py:big --set config.seed=3 --out big-3
      cosmati export runs/gpt2 --recipe gpt2.py --to hf --out gpt2-tuned
      cosmati export runs/big-3/checkpoints/step-00000100 --recipe digits.py:big --out big-at-100
    """  # noqa: D301  (\b is click's mark for lines to leave as they are)
    check_form(to)
    if recipe is None and to != "safetensors":
        msg = (
            f"--to {to} needs the model's code, and a checkpoint holds weights alone. Give the run's recipe: --recipe "
            "FILE[:FUNCTION]. Without it, --to safetensors writes the weights, unchecked."
        )
        raise ExportError(msg)
    if out.exists():
        raise ExportError(f"{out} is there already, and an export takes nobody's place. Give another --out.")
    folder, place = _checkpoint_of(run)
    record = _record(folder)
    with _held(folder):
        typer.echo(f"Reading {place}")
        checkpoint = _read(place)
        if recipe is None:
            _export_alone(checkpoint, record, folder, place, out)
        else:
            metrics = _recorded(folder, record, checkpoint.step)
            recorded = RecordedRun(record=record, folder=folder, checkpoint=place.name, metrics=metrics)
            trainer = _recalled(load_recipe(recipe, settings or []), checkpoint, place)
            trainer.export_recorded(recorded, out, to, fold=not keep_surgery, tolerance=tolerance, say=typer.echo)
        line = json.loads((folder / NOTES).read_text().splitlines()[-1])  # What was measured, as it was noted.
    _tell(out, record, checkpoint.step, line["metrics"], is_checked=line["checked"])


def _read(place: Path) -> Checkpoint:
    checkpoint = read_checkpoint(place)
    if checkpoint.facts.get("version") != CHECKPOINT_VERSION:
        raise CheckpointError(f"{place} is of another release of Cosmati. Export with the release that wrote it.")
    return checkpoint


def _export_alone(checkpoint: Checkpoint, record: RunRecord, folder: Path, place: Path, out: Path) -> None:
    """Export weights without code."""
    identity = checkpoint.facts["identity"]
    origin = Origin(
        record=record,
        folder=folder,
        checkpoint=place.name,
        step=checkpoint.step,
        structure=structure_digest(identity),
    )
    export_weights(checkpoint.model, checkpoint.state, identity, out, origin)


def _tell(
    out: Path, record: RunRecord, step: int, metrics: Mapping[str, float | None] | None, *, is_checked: bool
) -> None:
    told = f"{record.recipe_name} after {step} steps is in {out}: {', '.join(describe_files(out))}"
    typer.echo(told)
    if record.outcome not in ("completed", "exhausted"):
        typer.echo(
            f"The run is recorded as {record.outcome}: these are the weights after {step} steps, not a finished run's"
        )
    if metrics is not None:
        figures = "  ".join(f"{n} {'not finite' if v is None else f'{v:.4f}'}" for n, v in metrics.items())
        compared = "which agrees with what the run recorded (see the card)"
        if not is_checked:
            compared = "the run recorded nothing at this step to compare with (see the card)"
        typer.echo(f"Measured again on the export: {figures}; {compared}")
    else:
        typer.echo("Unchecked: there was nothing to evaluate on")


def _checkpoint_of(run: Path) -> tuple[Path, Path]:
    """Return a run's folder, and the checkpoint that a path names: the newest where it's the run."""
    run = run.expanduser().absolute()
    if run.parent.name == "checkpoints" and run.name.startswith("step-"):
        folder, place = run.parent.parent, run
        if not place.is_dir():
            there = ", ".join(one.name for one in list_checkpoints(run.parent)[:3]) or "none"
            raise CheckpointError(f"There is no checkpoint {place}. Newest first, there are: {there}.")
        return folder, place
    if not (run / "run.json").is_file():
        raise RunError(f"{run} is no run folder: it has no run.json. Give what --run-folder or RunConfig named.")
    found = list_checkpoints(run / "checkpoints")
    if not found:
        msg = (
            f"{run} holds no checkpoint, so there are no weights to export. Train it again with the same recipe and "
            "folder: the end of a run is always kept."
        )
        raise CheckpointError(msg)
    return run, found[0]


def _record(folder: Path) -> RunRecord:
    try:
        return RunRecord.from_json((folder / "run.json").read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{folder}/run.json can't be read: {error}. Give a whole run folder.") from error


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Keep others from training in the folder: checkpoints come and go under a run."""
    try:
        lock = FileLock(folder / "lock")
    except BlockingIOError as error:
        msg = f"{folder} is running: a process trains in it. Wait for its end, or stop it with Ctrl-C, and export then."
        raise RunError(msg) from error
    except OSError as error:
        msg = f"{folder} can't be written, and exports are noted in it: {error}. Make it writable, or copy it."
        raise RunError(msg) from error
    with lock:
        yield


def _recorded(folder: Path, record: RunRecord, step: int) -> dict[str, float] | None:
    """Return the metrics that a run recorded at a step; None where it evaluated at others."""
    found = metrics_at(folder, step)
    if not found and record.num_steps == step:
        found = {name: math.nan if value is None else value for name, value in (record.metrics or {}).items()}
    return found or None


def _recalled(recipe: Recipe, checkpoint: Checkpoint, place: Path) -> Trainer:
    """Return a trainer of the recipe with a checkpoint's state.

    Raises:
        ExportError: the recipe isn't the run's.
    """
    device = recipe.config.device
    if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
        device = "cpu"
    config = dataclasses.replace(
        recipe.config, run_folder=None, ledger=False, load_weights=None, change=(), progress=False, device=device
    )
    trainer = dataclasses.replace(recipe, config=config).trainer()
    around, was = describe_environment(trainer.assembly.device), checkpoint.facts["environment"]
    is_elsewhere = any(around.get(name, "") != was.get(name, "") for name in SURROUNDINGS)
    facts, identity = checkpoint.facts, trainer.prepared.identity
    begun = {**facts["identity"], **facts.get("files", {})}
    found = other_model(begun, {**identity, **note_files(identity)}, is_elsewhere=is_elsewhere)
    if found:
        told = "; ".join(map(str, found[:5])) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
        msg = (
            f"The recipe isn't the one of {place}: {told}. Give the recipe, and the --set, that the run was trained "
            "with."
        )
        raise ExportError(msg)
    trainer.recall(checkpoint)
    # Threads cut sums otherwise, within the tolerance.
    is_there = all(around.get(name, "") == was.get(name, "") for name in SURROUNDINGS if name != "threads")
    other = trainer.other_code(checkpoint) if is_there else ""
    if other:
        msg = (
            f"The code isn't the one of {place}: from the same weights, a fixed microbatch has the loss {other}. The "
            "model's forward, the loss, or what they read has changed, or training moved what no checkpoint holds. "
            "Export with the code that trained it."
        )
        raise ExportError(msg)
    return trainer
