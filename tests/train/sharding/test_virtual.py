"""Virtual shards: real processes over gloo, however microbatches and their parts are shared out, have the same bits."""

from __future__ import annotations

import json
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cosmati.train.replay import ReplayRequest
from cosmati.train.trainer import Trainer
from tests.processes import begin_ranks, launch_ranks
from tests.train.replay_world import replayed
from tests.train.sharding.virtual_worker import CASES, STEPS, make_trainer

pytestmark = pytest.mark.long

QUICK = ("everything", "routed")


def launch(
    folder: Path,
    ranks: tuple[int, int],
    cases: tuple[str, ...],
    *,
    stop: int = 0,
    shards: int = 4,
    sharding: str = "replicated",
    **more: str,
) -> dict[str, Any]:
    """Run cases on D replicas of T ranks, and return what came out."""
    replicas, degree = ranks
    numbers = map(str, (stop, shards, degree))
    command = ["-m", "tests.train.sharding.virtual_worker", folder, ",".join(cases), *numbers, sharding]
    launch_ranks(command, replicas * degree, **more)
    return json.loads((folder / f"{stop}.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one process gives that computes all parts."""

    @cache
    def given(cases: tuple[str, ...]) -> dict[str, Any]:
        return launch(tmp_path_factory.mktemp("alone"), (1, 1), cases)

    return given


def test_replicas_of_several_ranks_give_the_bits_of_one_process(tmp_path: Path, alone: Any) -> None:
    assert launch(tmp_path, (2, 2), QUICK) == alone(QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (2, 2), (1, 4)])
def test_optimizer_state_may_be_shared_out_over_all_ranks(tmp_path: Path, alone: Any, ranks: tuple[int, int]) -> None:
    assert launch(tmp_path, ranks, QUICK, sharding="optimizer") == alone(QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("control", ["all_reduce", "left_fold"])
def test_what_the_tree_prevents_happens_without_it(tmp_path: Path, alone: Any, control: str) -> None:
    """The controls: parts summed in the collective's own order, or from left to right."""
    found = launch(tmp_path, (1, 4), ("everything",), CONTROL=control)
    assert found["everything"]["model"] != alone(QUICK)["everything"]["model"]


@pytest.mark.slow
def test_what_the_tree_prevents_would_be_seen_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="tensor_parallel=4, GPT computes other bits than in one process"):
        launch(tmp_path, (1, 4), ("everything",), CONTROL="all_reduce", COMPARES="1")


@pytest.mark.slow
@pytest.mark.parametrize("shards", [0, 2])
def test_other_numbers_of_shards_have_other_bits_of_the_same_function(tmp_path: Path, alone: Any, shards: int) -> None:
    found, whole = launch(tmp_path, (1, 1), QUICK[:1], shards=shards)[QUICK[0]], alone(QUICK)[QUICK[0]]
    assert found["model"] != whole["model"]
    assert found["metrics"] == pytest.approx(whole["metrics"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 2), (1, 4), (4, 2)])
def test_each_case_has_the_bits_of_one_process(tmp_path: Path, alone: Any, ranks: tuple[int, int]) -> None:
    cases = tuple(CASES)
    whole, found = alone(cases), launch(tmp_path, ranks, cases)
    assert {case for case in cases if found[case] != whole[case]} == set()


@pytest.mark.slow
def test_a_run_whose_rank_is_killed_goes_on_with_another_degree(tmp_path: Path, alone: Any) -> None:
    case = QUICK[1]
    command = ["-m", "tests.train.sharding.virtual_worker", tmp_path, case, "0", "4", "4", "replicated"]
    ranks = begin_ranks(command, 4, DIES_AT="2 150")
    try:
        ranks[2].communicate(120)
        for rank in (ranks[0], ranks[1], ranks[3]):
            rank.communicate(60)
        ended = [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ended[2] == -signal.SIGKILL
    assert all(ended[rank] not in (0, -signal.SIGKILL) for rank in (0, 1, 3))
    kept = sorted(path.name for path in (tmp_path / case / "checkpoints").glob("step-*"))
    assert kept == ["step-00000000", "step-00000002"]
    stopped = launch(tmp_path, (1, 1), (case,), stop=4)[case]
    assert (stopped["outcome"], stopped["step"]) == ("stopped", 4)
    assert launch(tmp_path, (1, 2), (case,))[case] == alone(QUICK)[case]


@pytest.mark.slow
def test_one_process_replays_what_several_computed_together(tmp_path: Path) -> None:
    launch(tmp_path, (1, 2), ("routed",))

    def again(asked: ReplayRequest) -> Trainer:
        return make_trainer("routed", asked.run_folder, 4, 2, observers=asked.observers, **asked.settings)

    found = replayed(tmp_path / "routed", 1, STEPS, again)
    assert (found.outcome, found.differences, found.skipped) == ("equal", (), ())
