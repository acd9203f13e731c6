"""Row keys after a deletion by two ranks from a run of two: whose are gone and where, whichever rank dies when."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from cosmati.forget.certificate import verify_certificate
from cosmati.ledger.row_keys import RowKeys
from tests.forget import dying_recipe as own
from tests.forget import recipe as publisher
from tests.forget.samples import differing, rows_of_step, tensors
from tests.processes import begin_ranks, launch_ranks

pytestmark = pytest.mark.slow
RECIPE = str(Path(own.__file__))
TRAINS = """
import sys
from tests.forget import dying_recipe as own
getattr(own, sys.argv[1])().trainer(run_folder=sys.argv[2]).fit()
"""


def keys_of(run: Path) -> RowKeys:
    return RowKeys.load(run / "private" / "rows.keys")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("ranks") / "run"
    launch_ranks(["-c", TRAINS, "recipe", run], 2)
    return run


@pytest.fixture(scope="module")
def truth(trained: Path) -> Path:
    """The successor that one process makes, which keeps its keys."""
    run = Path(shutil.copytree(trained, trained.with_name("single") / "run"))
    launch_ranks(command(run, run.with_name("out")), 1)
    return run.with_name("out")


def command(run: Path, out: Path, *more: str, recipe: str = "recipe") -> list[str | Path]:
    out.parent.mkdir(exist_ok=True)
    asked = more
    if not more:
        (file := out.with_suffix(".txt")).write_text("\n".join(map(str, rows_of_step(publisher.data(), 3))))
        asked = ("--rows", str(file))
    told = ["-m", "cosmati", "forget", run, *asked, "--recipe", f"{RECIPE}:{recipe}", "--method", "replay"]
    return [*told, "--yes", "--out", out]


def dies(given: list[str | Path], rank: int, place: str) -> None:
    """Have a rank killed; the other one is, too, as a launcher does, unless it ends before."""
    ranks = begin_ranks(given, 2, DIES=f"{rank} {place}")
    try:
        assert ranks[rank].wait(120) == -signal.SIGKILL, ranks[rank].communicate(1)
        for _ in range(50):
            if all(one.poll() is not None for one in ranks):
                break
            time.sleep(0.1)
    finally:
        for one in ranks:
            one.kill()
            one.communicate()


@pytest.mark.parametrize(
    "deaths",
    [
        [],
        [(0, "training"), (1, "training")],
        [(0, "request"), (0, "request")],
        [(0, "0"), (0, "1"), (0, "certificate")],
    ],
    ids=["nobody", "in training", "while the request is written, twice", "between files of keys"],
)
def test_keys_are_gone_in_every_copy_and_others_are_as_they_were(
    deaths: list[tuple[int, str]], trained: Path, truth: Path, tmp_path: Path
) -> None:
    run, out = Path(shutil.copytree(trained, tmp_path / "run")), tmp_path / "out"
    whole = keys_of(run)
    given = [*command(run, out), "--delete-superseded"]
    if deaths:  # One who gives another --out afterwards.
        dies([*command(run, tmp_path / "elsewhere/first"), "--delete-superseded"], 0, "request")
    for rank, place in deaths:
        dies(given, rank, place)
    launch_ranks(given, 2)
    gone = rows_of_step(publisher.data(), 3)
    copies = [*tmp_path.rglob("rows.keys*")]
    assert sorted(copies) == [out / "private/rows.keys", run / "private/rows.keys"]
    for copy in copies:
        keys = RowKeys.load(copy)
        assert [row for row in range(96) if not keys.has(row)] == sorted(gone)
        assert all(keys.of(row) == whole.of(row) for row in range(96) if row not in gone)
    last = max((out / "certificates").glob("*.json"))
    assert [json.loads(one.read_text())["row_keys"] for one in sorted(last.parent.glob("*.json"))] == [
        "kept",
        "shredded",
    ]
    assert verify_certificate(last, out / "ledger")
    assert not differing(tensors(out), tensors(truth))


def test_which_rows_are_a_classs_the_first_rank_finds_out_by_itself(tmp_path: Path) -> None:
    """Without a policy the data tell, and the other ranks have ended by then."""
    run, out = tmp_path / "run", tmp_path / "out"
    launch_ranks(["-c", TRAINS, "without_policy", run], 2)
    given = command(run, out, "--class", "personal", recipe="without_policy")
    launch_ranks([*given, "--delete-superseded"], 2, timeout=100)
    for one in (run, out):
        keys = keys_of(one)
        assert [row for row in range(48) if not keys.has(row)] == [row for row in range(48) if row % 3 == 1]
