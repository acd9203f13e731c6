"""What one rank fails at ends all, and one that comes alone to what all have to do says so."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from cosmati.errors import PlanError
from cosmati.storage.lock import FileLock
from cosmati.train import all_ranks
from cosmati.train.collectives import run_alike
from cosmati.train.ranks import Ranks
from tests.launch.slurm_cluster import until
from tests.processes import begin_ranks, launch_ranks

pytestmark = pytest.mark.long

SCRIPT = """
import os, sys, torch
from pathlib import Path
from cosmati import Classification, InMemory, RunConfig, Trainer
from cosmati.models.mlp import MLP
from cosmati.optim import AdamW

rank = int(os.environ["RANK"])
generator = torch.Generator().manual_seed(1)
data = InMemory((torch.randn(64, 6, generator=generator), torch.randint(3, (64,), generator=generator)), 16)
torch.manual_seed(0)
config = RunConfig(budget="2ba", num_microbatches=4, num_threads=1, run_folder=Path(sys.argv[1]))
try:
    trainer = Trainer(MLP((6, 8, 3)), Classification(3), data, optimizers=[AdamW(lr=0.01)], config=config)
    BODY
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""
ALONE = """
    import cosmati.train.all_ranks
    cosmati.train.all_ranks._PATIENCE_SECONDS = 0.5
    sys.stderr = Path(sys.argv[1] + f".{rank}").open("w")
    with trainer:
        if rank == 0:
            trainer.save()
        import time
        time.sleep(60)
"""


def _script(folder: Path, body: str) -> Path:
    path = folder / "script.py"
    path.write_text(SCRIPT.replace("    BODY", body.strip("\n") if body.startswith("\n") else f"    {body}"))
    return path


def test_a_folder_that_another_run_has_is_told_by_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lock = FileLock(tmp_path / "run" / "lock")
    try:
        first, second = launch_ranks([_script(tmp_path, "trainer.fit()"), tmp_path / "run"], 2)
    finally:
        lock.release()
    assert first.startswith("RunError: Another process is training")
    assert second.startswith("RunError: Rank 0 couldn't go on, and so the others don't. RunError: Another process is")


def test_a_folder_that_cannot_be_written_is_told_by_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").mkdir()  # in the place of a file
    first, second = launch_ranks([_script(tmp_path, "trainer.fit()"), tmp_path / "run"], 2)
    assert "run.json" in first
    assert second.startswith(f"RunError: Rank 0 couldn't go on, and so the others don't. {first.strip()[:40]}")


def test_one_rank_alone_in_save_says_that_it_waits(tmp_path: Path) -> None:
    ranks = begin_ranks([_script(tmp_path, ALONE), tmp_path / "run"], 2)
    try:
        said = tmp_path / "run.0"
        until(lambda: said.exists() and "under `if rank == 0`" in said.read_text())
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert said.read_text().startswith("Rank 0 has waited for other ranks in save() for 0 s. All ranks have a part in")


def test_who_waits_says_for_what_and_only_where_somebody_does_not_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    has_said, say = threading.Event(), all_ranks._say_who_waits
    monkeypatch.setattr(all_ranks, "_say_who_waits", lambda *told: [say(*told), has_said.set()])
    monkeypatch.setattr(Ranks, "agree", lambda *_, **__: False)
    ranks = Ranks()
    ranks.rank, ranks.world, ranks.is_parallel = 1, 2, True
    all_ranks.meet(ranks, "save()")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(all_ranks, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(Ranks, "agree", lambda *_, **__: has_said.wait(60))
    all_ranks.meet(ranks, "save()")
    assert capsys.readouterr().err == (
        "Rank 1 has waited for other ranks in save() for 0 s. All ranks have a part in it: call save() on every rank, "
        "not under `if rank == 0`.\n"
    )
    ranks.is_parallel = False
    all_ranks.meet(ranks, "save()")
    assert capsys.readouterr().err == ""


def test_one_process_is_like_itself() -> None:
    assert (Ranks().unlike(b"own"), Ranks().all_equal(b"own")) == ([], True)


def test_ranks_that_would_meet_nobody_in_a_step_are_refused_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that has called collectives, and a step in which the second rank has nothing to run."""
    monkeypatch.setattr(Ranks, "agree", lambda _, flag: flag)
    ranks, ran = Ranks(), list[int]()
    ranks.world, ranks.is_parallel = 2, True
    own = [lambda: ran.append(1)] * 2
    for offered, is_refused in (([True] * 4, False), ([True, True, False, True], True)):
        for has_met in (False, True):
            ranks.has_met = has_met
            ran.clear()
            with pytest.raises(PlanError, match="would wait for them") if is_refused and has_met else nullcontext():
                assert run_alike(ranks, offered, own, runs_model=False) == ([None, None], None)
            assert len(ran) == (0 if is_refused and has_met else 2)
