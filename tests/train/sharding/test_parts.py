"""Checkpoints in parts: real processes over gloo, and the digests of one plain process."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from tests.processes import begin_ranks, launch_ranks
from tests.train.sharding import parts_worker

pytestmark = pytest.mark.long

MIB = 1 << 20


ASYNC = "checkpoint_async=true"


def launch(folder: Path, world: int, sharding: str, stop: int = 0, *settings: str, **more: str) -> list[dict[str, Any]]:
    """Let a run go on, on so many ranks; return what each says."""
    if world == 1:
        given = {name: json.loads(text) for name, _, text in (one.partition("=") for one in settings)}
        return [parts_worker.run(folder, sharding, stop, **given)]
    said = launch_ranks([parts_worker.__file__, folder, sharding, str(stop), *settings], world, **more)
    return [json.loads(one) for one in said]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[int, str]]:
    """Signed digests after each step of one plain process."""

    @cache
    def given(kind: str) -> dict[int, str]:
        folder = tmp_path_factory.mktemp(kind)
        launch(folder, 1, "replicated")
        checkpoints = map(read_checkpoint, list_checkpoints(folder / "run" / "checkpoints"))
        return {one.step: one.signed_digest.hex() for one in checkpoints}

    return given


@pytest.mark.parametrize(
    ("kind", "ways"),
    [
        ("even", [("full", 2), ("replicated", 1)]),
        *(
            pytest.param(kind, ways, marks=pytest.mark.slow)
            for kind, ways in (
                ("even", [("full", 4), ("full", 2), ("replicated", 1), ("full", 4)]),
                ("even", [("optimizer", 4), ("full", 2), ("optimizer", 2), ("full", 4)]),
                ("even", [("replicated", 1), ("optimizer", 4), ("replicated", 2), ("full", 2)]),
                ("odd", [("optimizer", 4), ("optimizer", 2), ("replicated", 1), ("optimizer", 2)]),
            )
        ),
    ],
)
def test_parts_are_read_on_any_ranks_under_any_sharding(
    tmp_path: Path, plain: Callable[[str], dict[int, str]], kind: str, ways: list[tuple[str, int]]
) -> None:
    for at, (sharding, world) in enumerate(ways, 1):
        stop = 0 if at == len(ways) else at
        told = launch(tmp_path / kind, world, sharding, stop)
        step = parts_worker.STEPS if stop == 0 else stop
        assert {(one["step"], one["signed"]) for one in told} == {(step, plain(kind)[step])}
        assert len({one["root"] for one in told}) == 1
        # Each rank's own code may have written to them.
        assert [one["buffers"] for one in told] == [2] + [2 * (sharding == "replicated")] * (len(told) - 1)
        files, size = told[0]["files"], told[0]["bytes"]
        parts = [files[name] for name in files if name.startswith("part-")]
        assert ("model.safetensors" in files) == (not parts)
        assert len(parts) == (world if sharding != "replicated" else 0)
        # Its share but for what has one owner: here a matrix's state, and the convolution's.
        assert all(part < size / world + 4 * MIB for part in parts)
        assert sum(parts) < size + MIB / 4
        counted = [one["counted"] for one in told if "counted" in one]
        assert all(one["saves"] > 0 and one["whole"] == 0 for one in counted), "a parameter was gathered"
        # What is cut in another order than its elements' is gathered, one tensor at a time.
        assert all((one["wholes"] > 0) == ((kind, sharding) == ("odd", "optimizer")) for one in counted)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["replicated", "optimizer", "full"])
def test_parts_that_are_written_beside_the_loop(
    tmp_path: Path, plain: Callable[[str], dict[int, str]], sharding: str
) -> None:
    """Each one is as it would have been, though a rank is late with its part and the others train on."""
    launch(tmp_path / "even", 2, sharding, 0, ASYNC, WRITES="slow")
    found = {one.step: one.signed_digest.hex() for one in map(read_checkpoint, checkpoints_in(tmp_path))}
    assert found == plain("even")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), (ASYNC,)])
def test_a_rank_that_is_killed_as_it_writes_its_part(
    tmp_path: Path, plain: Callable[[str], dict[int, str]], settings: tuple[str, ...]
) -> None:
    ranks = begin_ranks([parts_worker.__file__, tmp_path / "even", "full", "0", *settings], 2, WRITES="killed")
    try:
        ranks[1].communicate(120)
        ranks[0].communicate(120)
        assert ranks[1].wait() == -signal.SIGKILL
        assert ranks[0].wait() != 0
    finally:
        for rank in ranks:
            rank.kill()
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000000"]
    told = launch(tmp_path / "even", 1, "replicated")
    assert told[0]["signed"] == plain("even")[parts_worker.STEPS]
    assert not list((tmp_path / "even" / "run" / "checkpoints").glob(".draft-*"))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), (ASYNC,)])
def test_a_full_disk_on_the_first_rank_ends_all(tmp_path: Path, settings: tuple[str, ...]) -> None:
    ranks = begin_ranks([parts_worker.__file__, tmp_path / "even", "full", "0", *settings], 2, WRITES="full")
    try:
        said = [rank.communicate(120)[1] for rank in ranks]
        assert all(rank.wait() != 0 for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert "No space left on device" in said[0]
    if not settings:  # Beside the loop the first rank is alone with it, and its end is the others'.
        assert "CheckpointError: Another rank couldn't write its part of the checkpoint" in said[1]
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000000"]


@pytest.mark.slow
def test_copies_of_parts_are_gone_on_from_by_one_process(
    tmp_path: Path, plain: Callable[[str], dict[int, str]]
) -> None:
    copied = f"checkpoint_to={json.dumps(str(tmp_path / 'elsewhere'))}"
    launch(tmp_path / "even", 2, "full", 2, copied, ASYNC)
    shutil.rmtree(tmp_path / "even" / "run" / "checkpoints")
    told = launch(tmp_path / "even", 1, "replicated", 0, copied)
    assert told[0]["signed"] == plain("even")[parts_worker.STEPS]
    there = list_checkpoints(tmp_path / "elsewhere" / "run")
    assert [read_checkpoint(path).step for path in there] == [4, 3, 2, 1, 0]


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the published ones, newest first."""
    return list_checkpoints(folder / "even" / "run" / "checkpoints")
