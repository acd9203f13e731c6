"""MLflow's runs: the folders of its file store (`mlruns`), or the CSV that `search_runs` and `mlflow runs` write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from cosmati.store.importing.columns import read_csv
from cosmati.store.importing.imported import ImportedRun, measure_name, merged, number, whole

META_FILE = "meta.yaml"
_OUTCOMES = {
    "3": "completed",
    "FINISHED": "completed",
    "4": "failed",
    "FAILED": "failed",
    "5": "stopped",
    "KILLED": "stopped",
    "1": "stopped",
    "RUNNING": "stopped",
    "2": "stopped",
    "SCHEDULED": "stopped",
}


def mlflow_runs(source: Path, note: Callable[[str], None]) -> Iterator[ImportedRun]:
    """Yield the runs of a file store, of an experiment's or a run's folder, or of a CSV; deleted ones are left out."""
    if source.is_file():
        yield from _of_table(source, note)
        return
    for path in sorted(source.rglob(META_FILE)):
        meta = _yaml(path)
        if ".trash" in path.parts or meta.get("lifecycle_stage") == "deleted":
            continue
        if "run_id" in meta or "run_uuid" in meta:
            yield _of_folder(path.parent, meta, note)


def is_mlflow(folder: Path) -> bool:
    """Say whether MLflow kept runs or experiments below a folder; their artifacts may be files of any other tool."""
    return any({"run_id", "run_uuid", "experiment_id"} & _yaml(path).keys() for path in folder.rglob(META_FILE))


def _of_folder(folder: Path, meta: dict[str, Any], note: Callable[[str], None]) -> ImportedRun:
    identity = folder.name  # the run's id, which YAML may take for a number
    tags = _texts(folder / "tags")
    started, ended = (number(meta.get(name)) for name in ("start_time", "end_time"))
    points = [
        (step, measure_name(name), value)
        for name, text in _texts(folder / "metrics").items()
        for step, value in _points(text, f"{folder}/metrics/{name}", note)
    ]
    user = str(meta.get("user_id") or tags.get("mlflow.user") or "")
    commit = tags.get("mlflow.source.git.commit", "")
    return ImportedRun(
        name=str(meta.get("run_name") or tags.get("mlflow.runName") or identity),
        identity=identity,
        recipe_name=str(_yaml(folder.parent / META_FILE).get("name") or folder.parent.name),
        lines=merged(points),
        params=_texts(folder / "params"),
        started=None if started is None else started / 1000,
        ended=None if ended is None else ended / 1000,
        outcome=_OUTCOMES.get(str(meta.get("status")), "stopped"),
        facts={name: text for name, text in (("user", user), ("commit", commit)) if text},
    )


def _points(text: str, where: str, note: Callable[[str], None]) -> Iterator[tuple[int, float]]:
    """Yield step and value from lines `time value step`; before MLflow 1.0 there was no step."""
    for place, line in enumerate(text.splitlines()):
        parts = line.split()
        value = number(parts[1]) if len(parts) > 1 else None
        step = whole(parts[2]) if len(parts) > 2 else place
        if value is None or step is None:
            note(f"Line {place + 1} of {where} is left out: it isn't `time value step`.")
        else:
            yield step, value


def _of_table(source: Path, note: Callable[[str], None]) -> Iterator[ImportedRun]:
    for row in read_csv(source, note):
        parts: dict[str, dict[str, str]] = {"metrics": {}, "params": {}, "tags": {}}
        for name, text in row.items():
            kind, dot, rest = name.partition(".")
            if dot and kind in parts and text:
                parts[kind][rest] = text
        identity = row.get("run_id", "")
        started, ended = _time(row.get("start_time", "")), _time(row.get("end_time", ""))
        yield ImportedRun(
            name=parts["tags"].get("mlflow.runName") or row.get("run_name") or identity or source.stem,
            identity=identity,
            recipe_name=f"experiment {row.get('experiment_id', '')}".strip(),
            metrics={
                measure_name(name): value
                for name, text in parts["metrics"].items()
                if (value := number(text)) is not None
            },
            params=parts["params"],
            started=started,
            ended=ended,
            outcome=_OUTCOMES.get(row.get("status", ""), "stopped"),
        )


def _time(text: str) -> float | None:
    """Return seconds since 1970 from milliseconds or a date."""
    milliseconds = number(text)
    if milliseconds is not None:
        return milliseconds / 1000
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _texts(folder: Path) -> dict[str, str]:
    """Return the files' texts by their names, which may hold slashes."""
    if not folder.is_dir():
        return {}
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8", errors="replace") for path in files}


def _yaml(path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}
