"""Full sharding: real processes over gloo, and the bits of one plain process."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.processes import launch_ranks
from tests.train.sharding.full_worker import CASES, COMPILED

pytestmark = pytest.mark.long

QUICK = ("everything", "muon", "tied rounded", "shared")


def launch(
    folder: Path, world: int, cases: tuple[str, ...], *, stop: int = 0, sharding: str = "full", **more: str
) -> dict[str, Any]:
    """Run cases on so many ranks, and return what came out."""
    command = ["-m", "tests.train.sharding.full_worker", folder, ",".join(cases), str(stop), sharding]
    launch_ranks(command, world, **more)
    return json.loads((folder / f"{stop}.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one rank gives that holds everything."""

    @cache
    def given(cases: tuple[str, ...]) -> dict[str, Any]:
        return launch(tmp_path_factory.mktemp("plain"), 1, cases, sharding="replicated")

    return given


def test_two_ranks_give_the_bits_of_one_plain_process(tmp_path: Path, plain: Any) -> None:
    alone = plain(QUICK)
    assert not any("elastic" in why for facts in alone.values() for why in facts["withdrawn"])
    # A copy is meant to lie on more ranks than there are: then it lies on all.
    assert launch(tmp_path, 2, QUICK, SHARD_RANKS="4") == alone


@pytest.mark.slow
def test_replicas_of_shards_give_the_bits_of_one_plain_process(tmp_path: Path, plain: Any) -> None:
    cases = ("everything", "muon")
    assert launch(tmp_path, 4, cases, SHARD_RANKS="2") == {case: plain(QUICK)[case] for case in cases}


@pytest.mark.slow
@pytest.mark.parametrize(("world", "shards"), [(4, 2), (8, 2), (8, 4)])
def test_replicas_fold_subtrees_of_several_slots(tmp_path: Path, world: int, shards: int) -> None:
    for name in ("plain", "cut"):
        (tmp_path / name).mkdir()
    alone = launch(tmp_path / "plain", 1, QUICK, sharding="replicated", V="8")
    assert launch(tmp_path / "cut", world, QUICK, V="8", SHARD_RANKS=str(shards)) == alone


@pytest.mark.slow
def test_replicas_that_take_every_other_microbatch_give_other_bits(tmp_path: Path, plain: Any) -> None:
    """The control: what meets within a replica isn't a subtree."""
    found = launch(tmp_path, 4, ("everything",), SHARD_RANKS="2", CONTROL="scattered replicas")
    assert found["everything"]["model"] != plain(QUICK)["everything"]["model"]


@pytest.mark.slow
def test_ranks_and_sharding_may_change_in_mid_run(tmp_path: Path, plain: Any) -> None:
    cases = ("everything", "muon")
    first = launch(tmp_path, 4, cases, stop=2)
    assert {(facts["outcome"], facts["step"]) for facts in first.values()} == {("stopped", 2)}
    launch(tmp_path, 2, cases, stop=3)
    launch(tmp_path, 4, cases, stop=4, SHARD_RANKS="2")
    launch(tmp_path, 2, cases, stop=5, SHARD_RANKS="4")
    assert launch(tmp_path, 1, cases, sharding="replicated") == {case: plain(QUICK)[case] for case in cases}


@pytest.mark.slow
def test_a_replicated_run_goes_on_sharded(tmp_path: Path, plain: Any) -> None:
    launch(tmp_path, 2, QUICK, stop=3, sharding="replicated")
    assert launch(tmp_path, 2, QUICK) == plain(QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("control", ["all_reduce", "left_fold"])
def test_what_the_tree_prevents_happens_without_it(tmp_path: Path, plain: Any, control: str) -> None:
    """The controls: sums in the collective's own order, or ranks' parts added from left to right."""
    found = launch(tmp_path, 4, ("everything",), CONTROL=control)
    assert found["everything"]["model"] != plain(QUICK)["everything"]["model"]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "more"), [(2, {}), (4, {}), (4, {"SHARD_RANKS": "2"})])
def test_each_case_has_the_bits_of_one_plain_process(
    tmp_path: Path, plain: Any, world: int, more: dict[str, str]
) -> None:
    cases = tuple(case for case in CASES if case not in COMPILED)
    alone, found = plain(cases), launch(tmp_path, world, cases, **more)
    assert {case for case in cases if found[case] != alone[case]} == set()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fifty_runs_of_two_ranks_end_well(tmp_path: Path, plain: Any) -> None:
    for number in range(50):
        (tmp_path / str(number)).mkdir()
        assert launch(tmp_path / str(number), 2, ("everything",))["everything"] == plain(QUICK)["everything"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(("world", "more"), [(2, {}), (4, {"SHARD_RANKS": "2"})])
def test_compiled_blocks_have_the_bits_of_one_plain_process(
    tmp_path: Path, plain: Any, world: int, more: dict[str, str]
) -> None:
    alone = plain(COMPILED)
    assert launch(tmp_path, world, COMPILED, **more) == alone
    eager = plain(("as compiled",))["as compiled"]
    assert alone["compiled"]["model"] != eager["model"], "they are compiled"
