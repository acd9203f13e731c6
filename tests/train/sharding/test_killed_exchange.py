"""SIGKILL within the exchange, of one rank or of all: the run goes on from its last checkpoint to the same bits."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from cosmati.ledger.verify import verify_ledger
from tests.processes import begin_ranks
from tests.train.sharding.full_worker import STEPS
from tests.train.sharding.test_full import launch

CASE, NUM_KILLS = "everything", 3
"""In each of twelve campaigns: 36 in all."""


def _killed(folder: Path, world: int, sharding: str, victims: list[int], at: int, when: str) -> bool:
    """Go on with the run and kill ranks at an exchange; return whether they came to it. Others end by themselves."""
    command = ["-m", "tests.train.sharding.full_worker", folder, CASE, "0", sharding]
    ranks = begin_ranks(command, world, KILLED=f"{','.join(map(str, victims))} {at} {when}")
    try:
        for rank in (*(ranks[victim] for victim in victims), *ranks):
            if not rank.stdout.closed:
                rank.communicate(60)
        ended = [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if ended == [0] * world:
        return False
    assert {ended[victim] for victim in victims} == {-signal.SIGKILL}
    assert all(code not in (0, -signal.SIGKILL) for rank, code in enumerate(ended) if rank not in victims)
    return True


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came out of one plain process that nobody killed."""
    found = launch(tmp_path_factory.mktemp("whole"), 1, (CASE,), sharding="replicated", KILLED="none")
    assert [step for step, *_ in found[CASE]["ledger"]] == list(range(STEPS))
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("who", ["one", "all"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sharding", ["replicated", "optimizer", "full"])
def test_ranks_that_are_killed_in_the_exchange(tmp_path: Path, whole: Any, sharding: str, world: int, who: str) -> None:
    (tmp_path / "counted").mkdir()
    launch(tmp_path / "counted", world, (CASE,), sharding=sharding, KILLED="none")
    num_exchanges = int((tmp_path / "counted" / "exchanges").read_text())
    draw, kills, folder = random.Random(f"{sharding} {world} {who}"), 0, tmp_path / "0"
    folder.mkdir()
    while kills < NUM_KILLS:
        victims = [draw.randrange(world)] if who == "one" else list(range(world))
        at, when = draw.randrange(1, num_exchanges), draw.choice(("before", "after"))
        if _killed(folder, world, sharding, victims, at, when):
            kills += 1
            continue
        assert json.loads((folder / "0.json").read_text()) == whole
        folder = tmp_path / str(kills)
        folder.mkdir(exist_ok=True)
    assert launch(folder, world, (CASE,), sharding=sharding, KILLED="none") == whole
    report = verify_ledger(folder / CASE / "ledger")
    assert (report.num_steps, report.has_ended, report.diverged_steps) == (STEPS, True, ())
