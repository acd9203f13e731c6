"""`elastic` over 1 to 8 ranks in a governed run: the same bits, and the same ledger byte for byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.verify import verify_ledger
from cosmati.records.ledger import TimeEntry
from tests.processes import launch_ranks
from tests.train import elastic_more_worker
from tests.train.elastic_more_worker import STEPS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _launch(folder: Path, world: int, *, stop: int = 0, sharding: str = "replicated") -> dict[str, Any]:
    """Start or go on with the run in a folder on so many ranks, and return what rank 0 found."""
    launch_ranks([elastic_more_worker.__file__, folder, str(stop), sharding], world)
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return facts


def _with_secrets_of(folder: Path, other: Path) -> Path:
    """Give a run to come the operator's key and the rows' salt of another, so that both write the same ledger."""
    (folder / "run").mkdir(parents=True)
    shutil.copytree(other / "run" / "private", folder / "run" / "private")
    return folder


def _entries(folder: Path) -> list[tuple[bytes, bytes | None]]:
    """Return entries and their details but for those that say what the clock said."""
    ledger = VerifiedLedger(folder / "run" / "ledger")
    return [(one.data, one.details) for one in ledger.entries() if not isinstance(one.entry, TimeEntry)]


def _ledger(folder: Path) -> dict[str, bytes]:
    ledger = folder / "run" / "ledger"
    # Each writer draws an `epoch` of its own, to notice a second one.
    files = [path for path in ledger.rglob("*") if path.is_file() and path.name != "epoch"]
    return {str(path.relative_to(ledger)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The run on one rank."""
    folder = tmp_path_factory.mktemp("alone")
    facts = _launch(folder, 1)
    assert facts["elastic"]
    assert (facts["outcome"], facts["step"]) == ("completed", STEPS)
    return folder, facts


@pytest.fixture(
    scope="module", params=[(2, "replicated"), (4, "replicated"), (8, "replicated"), (2, "optimizer"), (4, "optimizer")]
)
def together(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, alone: tuple[Path, dict[str, Any]]
) -> tuple[Path, dict[str, Any]]:
    """The run on several ranks, with the secrets of the run on one."""
    world, sharding = request.param
    folder = _with_secrets_of(tmp_path_factory.mktemp(f"world-{world}"), alone[0])
    return folder, _launch(folder, world, sharding=sharding)


def test_state_and_metrics_have_the_bits_of_one_rank(
    alone: tuple[Path, dict[str, Any]], together: tuple[Path, dict[str, Any]]
) -> None:
    differing = {name for name in alone[1] if together[1][name] != alone[1][name]} - {"drawn"}
    assert differing == set()


def test_the_ledger_has_the_bytes_of_one_rank(
    alone: tuple[Path, dict[str, Any]], together: tuple[Path, dict[str, Any]]
) -> None:
    one, many = _entries(alone[0]), _entries(together[0])
    assert one == many
    told = map(json.loads, _ledger(alone[0])["details.jsonl"].splitlines())
    details = [line for line in told if "gradient_norm" in line]
    assert len(details) == STEPS
    assert all(len(line["gradient_norm"]) == 8 and line["loss"] > 0 for line in details)
    assert [line["step"] for line in details if line["update_norm"]] == list(range(0, STEPS, 3))
    for name, every in {"direction": 2, "update_direction": 6, "region_digests": 4, "entropy": 5}.items():
        assert [line["step"] for line in details if line.get(name)] == list(range(0, STEPS, every))


def test_metrics_of_a_model_that_draws_before_batchnorm(
    alone: tuple[Path, dict[str, Any]], together: tuple[Path, dict[str, Any]]
) -> None:
    assert together[1]["drawn"] == alone[1]["drawn"]


def test_four_two_eight_one_in_one_run(tmp_path: Path, alone: tuple[Path, dict[str, Any]]) -> None:
    for world, stop, sharding in ((4, 3, "optimizer"), (2, 7, "replicated"), (8, 12, "optimizer")):
        facts = _launch(tmp_path, world, stop=stop, sharding=sharding)
        assert (facts["outcome"], facts["step"]) == ("stopped", stop)
    assert _launch(tmp_path, 1) == alone[1]
    report = verify_ledger(tmp_path / "run" / "ledger")
    assert (report.num_steps, report.num_attempts, report.num_superseded) == (STEPS, 4, 0)
    assert report.has_ended
    recorded = [
        [line for line in folder["details.jsonl"].splitlines() if b'"gradient_norm":' in line]
        for folder in (_ledger(tmp_path), _ledger(alone[0]))
    ]
    assert len(recorded[0]) == STEPS
    assert recorded[0] == recorded[1]
