"""Steps that are run again are those of the ledger, digest by digest; and what isn't is found, and named."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cosmati.errors import CheckpointError, LedgerError, RefutedError
from cosmati.ledger.writer import details_digest
from cosmati.optim import SGD, AdamW, Linear
from cosmati.records.ledger import StepEntry
from cosmati.storage.atomic import replace_file
from cosmati.train.replay import nearest_checkpoint
from cosmati.train.run.checkpoints import Checkpoint, list_checkpoints, publish_checkpoint, read_checkpoint, write_checkpoint
from tests.train import replay_world as world
from tests.train.replay_world import again, build, entries, opened, replayed, sign_again
from tests.train.test_amended_run import StopAt

NUM_STEPS = 12


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "run"
    build("routed", folder).fit()
    return folder


@pytest.fixture
def run(once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(once, tmp_path / "run"))


def stop_at(kind: str, folder: Path, step: int, **options: Any) -> None:
    stop = StopAt(step)
    stop.trainer = build(kind, folder, observers=[stop], **options)
    assert stop.trainer.fit().outcome == "stopped"


def random_segments(seed: int, number: int) -> list[tuple[int, int]]:
    draws = random.Random(seed)
    return [(first, draws.randint(first + 1, NUM_STEPS)) for first in (draws.randrange(NUM_STEPS) for _ in range(number))]


@pytest.mark.parametrize("v", [1, 4])
@pytest.mark.parametrize("kind", world.KINDS)
def test_random_segments_come_out_the_same(kind: str, v: int, tmp_path: Path) -> None:
    check_segments(kind, v, tmp_path / "run", random_segments(v, 1))


@pytest.mark.slow
@pytest.mark.parametrize("v", [1, 4])
@pytest.mark.parametrize("kind", world.KINDS)
def test_fifty_random_segments_come_out_the_same(kind: str, v: int, tmp_path: Path) -> None:
    """Eight runs; 7 segments of each."""
    check_segments(kind, v, tmp_path / "run", random_segments(10 + v, 7))


def check_segments(kind: str, v: int, folder: Path, segments: list[tuple[int, int]]) -> None:
    build(kind, folder, num_microbatches=v).fit()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    for first, end in segments:
        found = replayed(folder, first, end, again(kind, num_microbatches=v))
        assert (found.outcome, found.differences, found.skipped) == ("equal", (), ())
        assert (found.start, found.num_steps) == (first // 4 * 4, end - first // 4 * 4)
        assert found.num_roots == end // 4 - found.start // 4 + (end == NUM_STEPS)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_replay_takes_as_many_forward_passes_as_training(run: Path) -> None:
    counts = []

    def counting(asked: Any) -> Any:
        made = again("routed")(asked)
        made.model.register_forward_hook(lambda *_: counts.append(1))
        return made

    plain = build("routed", run.parent / "plain", budget="6ba", checkpoint_every=None)
    num_plain = []
    plain.model.register_forward_hook(lambda *_: num_plain.append(1))
    plain.fit()
    # A hook is a fact of the model: the difference is kept going over.
    replayed(run, 0, 6, counting, with_checkpoints=False, keep_going=True)
    # The looks at the code before each checkpoint, on a fixed microbatch, are the rest of both.
    assert 6 * 4 <= len(counts) <= len(num_plain) + 4
