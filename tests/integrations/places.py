"""Where trackers store: how each is made in a folder, and how what it stored is read back by the tool's own reader.

Only wandb's offline file has none in the package: it is read here, by its format (LevelDB's log, protocol buffers).
"""

from __future__ import annotations

import importlib
import json
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep

import pytest

from cosmati.integrations import Tracker, tracker_of


@dataclass
class Stored:
    """What is stored of an attempt: every value that stands there by name and step, and all words."""

    values: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    words: str = ""

    def add(self, name: str, step: int, value: float) -> None:
        self.values.setdefault((name, int(step)), []).append(float(value))


Attempts = dict[int, Stored]


@dataclass(frozen=True)
class Place:
    """A tool: the packages that it needs, how it's made in a folder, and how it's read."""

    packages: tuple[str, ...]
    make: Callable[[Path], Tracker]
    read: Callable[[Path], Attempts]


def _tensorboard(root: Path) -> Attempts:
    reading = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found: Attempts = {}
    for folder in sorted((root / "logs").glob("*/attempt-*")):
        events = reading.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
        events.Reload()
        one = found.setdefault(int(folder.name.partition("-")[2]), Stored())
        for tag in events.Tags()["scalars"]:
            for point in events.Scalars(tag):
                one.add(tag, point.step, point.value)
        for tag in events.Tags()["tensors"]:
            one.words += "".join(str(point.tensor_proto.string_val) for point in events.Tensors(tag))
    return found


def _mlflow(root: Path) -> Attempts:
    client = importlib.import_module("mlflow.tracking").MlflowClient(f"sqlite:///{root}/mlflow.db")
    (experiment,) = [one for one in client.search_experiments() if one.name == "small"]
    found: Attempts = {}
    for run in client.search_runs([experiment.experiment_id]):
        one = found.setdefault(int(run.data.tags["cosmati.attempt"]), Stored())
        one.words = f"{run.data.tags} {run.data.params} {run.info.status}"
        for name in run.data.metrics:
            for point in client.get_metric_history(run.info.run_id, name):
                one.add(name, point.step, point.value)
    return found


def _records(path: Path) -> Iterator[bytes]:
    """LevelDB's log after a header of 7 bytes: blocks of 32 KiB; a chunk is CRC (4), length (2), type (1) and data."""
    data, place, parts = path.read_bytes(), 7, []
    while place + 7 <= len(data):
        left = (1 << 15) - place % (1 << 15)
        if left < 7:
            place += left
            continue
        size, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        parts.append(data[place + 7 : place + 7 + size])
        place += 7 + size
        if kind in (1, 4):  # full, last
            yield b"".join(parts)
            parts = []


def _whole(path: Path) -> list[bytes]:
    """wandb's own process writes the file, and may be at it when `finish` returns: wait for the record of the end."""
    record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    for _ in range(200):
        found = list(_records(path))
        if found and record.FromString(found[-1]).WhichOneof("record_type") == "exit":
            break
        sleep(0.05)
    return found


def _wandb(root: Path) -> Attempts:
    record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    found: Attempts = {}
    for path in sorted(root.glob("wandb/offline-run-*/run-*.wandb")):
        (attempt,) = re.findall(r"a(\d+)\.wandb$", path.name)
        one = found.setdefault(int(attempt), Stored())
        for data in _whole(path):
            item = record.FromString(data)
            one.words += str(item.run) + str(item.summary)
            step = item.history.step.num
            for value in item.history.item:
                name = value.key or "/".join(value.nested_key)
                if not name.startswith("_"):
                    one.add(name, step, json.loads(value.value_json))
    return found


def _trackio(root: Path) -> Attempts:
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    found: Attempts = {}
    for name in storage.get_runs("small"):
        attempts = re.findall(r"\(attempt (\d+)\)", name)
        one = found.setdefault(int(attempts[0]) if attempts else 0, Stored())
        for line in storage.get_logs("small", name):
            one.words += " ".join(f"{key}={value}" for key, value in line.items())
            for key, value in line.items():
                if isinstance(value, float):
                    one.add(key, line["step"], value)
    return found


PLACES = {
    "tensorboard": Place(("tensorboard",), lambda root: tracker_of(f"tensorboard:folder={root}/logs"), _tensorboard),
    "mlflow": Place(
        ("mlflow", "sqlalchemy", "alembic"),
        lambda root: tracker_of(f"mlflow:uri=sqlite:///{root}/mlflow.db,experiment=small"),
        _mlflow,
    ),
    "wandb": Place(("wandb",), lambda root: tracker_of(f"wandb:project=small,mode=offline,folder={root}"), _wandb),
    "trackio": Place(("trackio",), lambda _: tracker_of("trackio:project=small"), _trackio),
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A tool that is installed, storing in the test's folder and nowhere else."""
    for package in PLACES[request.param].packages:
        pytest.importorskip(package, reason=f"{package} isn't installed", exc_type=ImportError)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    if request.param == "trackio":
        for module in ("trackio.utils", "trackio.sqlite_storage"):
            monkeypatch.setattr(importlib.import_module(module), "TRACKIO_DIR", tmp_path / "trackio", raising=False)
    return PLACES[request.param]
