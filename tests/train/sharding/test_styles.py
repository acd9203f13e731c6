"""Models that are cut from outside by styles: PyTorch's own function, and the same bits from as many ranks."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.processes import begin_ranks, launch_ranks
from tests.train.sharding.styles_worker import CASES

pytestmark = pytest.mark.long

WORKER = "tests.train.sharding.styles_worker"
QUICK = ("plain", "routed")


def launch(
    folder: Path,
    ranks: tuple[int, int],
    cases: tuple[str, ...],
    *,
    stop: int = 0,
    degree: int = 0,
    sharding: str = "replicated",
) -> dict[str, Any]:
    """Run cases on D replicas of T ranks, and return what came out; a degree is what's asked for instead of T."""
    replicas, own = ranks
    command = ["-m", WORKER, "train", folder, ",".join(cases), str(stop), str(degree or own), sharding]
    launch_ranks(command, replicas * own)
    return json.loads((folder / f"{stop}.json").read_text())  # type: ignore[no-any-return]


def test_the_function_is_that_of_pytorchs_own_styles() -> None:
    for said in launch_ranks(["-m", WORKER, "peer"], 2):
        assert json.loads(said) < 1e-13


def test_bits_follow_from_the_degree_and_not_from_the_replicas_or_a_resume(tmp_path: Path) -> None:
    whole = launch(tmp_path / "whole", (1, 2), QUICK)
    stopped = launch(tmp_path / "other", (2, 2), QUICK, stop=3)
    assert {one["step"] for one in stopped.values()} == {3}
    assert launch(tmp_path / "other", (1, 2), QUICK) == whole
    for found in whole.values():
        told = {line.partition(":")[0] for line in found["withdrawn"]}
        assert {"elastic", "parity", "replayable"} <= told
        assert "resume" not in told, found["withdrawn"]


SOUND = (
    "none",
    "rows in fours",
    "its own copy",
    "an autocast of its own",
    "standardised over rows",
    "odd in two rows",
    "a complex buffer",
)
REFUSED = {
    "a norm": ("no", "the loss"),
    "draws": ("no", "draws"),
    "a parameter": ("no", "the gradient of scale."),
    "a parameter before zeros": ("some", "the gradient of scale."),  # there's none before the first step
    "a parameter of little weight": ("no", "the gradient of scale."),
    "a parameter, no labels at first": ("no", "the gradient of scale."),
    "a parameter, no loss at first": ("no", "the gradient of scale."),
    "a buffer": ("no", "the buffer largest."),
}


def test_slips_are_refused_by_all_ranks_and_what_is_sound_is_not() -> None:
    for said in launch_ranks(["-m", WORKER, "slips", "2"], 2):
        found = json.loads(said)
        for slip in SOUND:
            assert found[slip] == "completed, ColwiseLinear, RowwiseLinear, in lockstep: True", slip
        for slip, (steps, what) in REFUSED.items():
            begins = f"PlanError after {steps} steps: With tensor_parallel=2, Slip computes something else than in one"
            assert found[slip].startswith(f"{begins} process: {what}"), slip
        for slip in ("a fixed number of heads", "only one", "the other one"):
            told = "PlanError after no steps: With tensor_parallel=2 and these parallel_styles, Slip fails"
            assert found[slip].startswith(told), slip
        assert found["fails alone too"].startswith("RuntimeError after no steps: mat1 and mat2 shapes"), (
            "it isn't the styles'"
        )


def test_a_rank_that_is_lost_while_ranks_are_compared_is_not_blamed_on_the_plan() -> None:
    first, second = begin_ranks(["-m", WORKER, "dies"], 2)
    try:
        assert second.communicate(120) == ("", "")
        said, errors = first.communicate(120)
    finally:
        first.kill()
        second.kill()
    assert second.wait() == -signal.SIGKILL
    assert said.endswith(", of others: True"), (said, errors)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(1, 2), (2, 2), (1, 4)])
def test_one_process_computes_the_same_function(tmp_path: Path, ranks: tuple[int, int]) -> None:
    cases = tuple(CASES)
    alone = launch(tmp_path / "alone", (1, 1), cases, degree=ranks[1])
    found = launch(tmp_path / "several", ranks, cases)
    for case in cases:
        assert found[case]["metrics"] == pytest.approx(alone[case]["metrics"], rel=1e-2 if case == "muon" else 1e-4)
        assert found[case]["model"] != alone[case]["model"], "the control: sums are taken in another order"
        assert found[case]["withdrawn"] == alone[case]["withdrawn"]


@pytest.mark.slow
def test_optimizer_state_may_be_shared_out(tmp_path: Path) -> None:
    cases = tuple(CASES)
    assert launch(tmp_path / "a", (2, 2), cases, sharding="optimizer") == launch(tmp_path / "b", (1, 2), cases)


@pytest.mark.slow
def test_a_run_whose_rank_is_killed_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    command = ["-m", WORKER, "train", tmp_path / "killed", "routed", "0", "2", "replicated"]
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
    kept = sorted(path.name for path in (tmp_path / "killed" / "routed" / "checkpoints").glob("step-*"))
    assert kept[-1] in ("step-00000002", "step-00000004"), "in mid-run"
    found = launch(tmp_path / "killed", (1, 2), ("routed",))
    assert found == launch(tmp_path / "whole", (2, 2), ("routed",))
