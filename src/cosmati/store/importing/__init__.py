"""Runs of other tools, as run folders of a store: CSV, TensorBoard, W&B, MLflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from cosmati.errors import RunError
from cosmati.store.importing.columns import csv_runs
from cosmati.store.importing.imported import ImportedRun, write_imported
from cosmati.store.importing.mlflow import is_mlflow, mlflow_runs
from cosmati.store.importing.tensorboard import EVENT_FILES, tensorboard_runs
from cosmati.store.importing.wandb import wandb_runs

ImportNote = Callable[[str], None]
_READERS: Mapping[str, Callable[[Path, ImportNote], Iterator[ImportedRun]]] = {
    "csv": csv_runs,
    "tensorboard": tensorboard_runs,
    "wandb": wandb_runs,
    "mlflow": mlflow_runs,
}
FORMATS = tuple(_READERS)


def import_runs(source: Path, to: Path, form: str = "") -> tuple[int, list[str]]:
    """Write the runs of another tool's file or folder as run folders; the same source again writes the same ones.

    Args:
        source: what the tool wrote or exported.
        to: the store's folder, made where it isn't there.
        form: one of `FORMATS`; empty finds it out.

    Returns:
        How many runs were written, and what was left out, in words.

    Raises:
        RunError: there's no such source or format, or nothing in it can be read. MissingExtraError: W&B's Parquet
            needs DuckDB, and it isn't installed.
    """
    source = source.expanduser().resolve()  # the same one by whatever path
    if not source.exists():
        msg = f"{source} isn't there. Give the file or folder that the other tool wrote."
        raise RunError(msg)
    num, notes = 0, list[str]()
    if not form:
        form, *others = _forms_of(source)
        notes += [f"It holds files of {one} too, which aren't read: import them with --format {one}." for one in others]
    if form not in _READERS:
        msg = f"There's no format {form!r} to import. Choose one of {', '.join(FORMATS)}."
        raise RunError(msg)
    try:
        for run in _READERS[form](source, notes.append):
            if run.lines or run.metrics:
                write_imported(run, form, source, to)
                num += 1
            else:
                notes.append(f"{run.name!r:.80} is left out: no numbers were found in it.")
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{source} can't be read: {error}. Make it readable, or restore it from a copy."
        raise RunError(msg) from error
    if not num:
        said = " ".join(notes[:4]) or f"Nothing in it looks like what {form} writes."
        msg = f"{source} holds no run that can be imported as {form}. {said} Name another format: --format"
        raise RunError(msg)
    return num, notes


def _forms_of(source: Path) -> list[str]:
    """Find out who wrote a source, the most likely one first."""
    if source.is_file():
        with source.open("rb") as file:
            head = file.readline(1 << 16)
        if "tfevents" in source.name:
            return ["tensorboard"]
        if b"metrics." in head and b"run_id" in head:
            return ["mlflow"]
        is_wandb = source.suffix in (".jsonl", ".parquet") or b"_step" in head or b'"Step"' in head or b"__MIN" in head
        return ["wandb" if is_wandb else "csv"]
    found = ["mlflow"] if is_mlflow(source) else []
    if next(source.rglob(EVENT_FILES), None):
        found.append("tensorboard")
    if next(source.rglob("wandb-summary.json"), None) or next(source.rglob("*.parquet"), None):
        found.append("wandb")
    return found or ["csv"]
