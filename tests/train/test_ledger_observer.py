"""The ledger's observer, without a trainer: what entry 0 commits to, what a step's cells say, and who may go on."""

from __future__ import annotations

import hashlib
import json
import math
import stat
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import blake3
import pytest
import torch

from cosmati.core.clock import Budget, Clock, Time
from cosmati.errors import LedgerError
from cosmati.ledger.keys import load_or_create_key
from cosmati.ledger.reader import Scan, ScannedEntry, read_head, read_verifier_key
from cosmati.ledger.row_keys import RowKeys
from cosmati.ledger.writer import LedgerWriter
from cosmati.records.ledger import (
    AmendEntry,
    CheckpointEntry,
    EndEntry,
    MicrobatchCell,
    ResumeEntry,
    RunEntry,
    StepEntry,
    TimeEntry,
)
from cosmati.routing.policy import CompiledPolicy
from cosmati.train.facts import RunFacts
from cosmati.train.observers.ledger import LedgerObserver
from cosmati.train.outcome import StepOutcome
from cosmati.train.ranks import Ranks
from tests.ledger.row_oracle import Rows
from tests.train.hand_made import POLICY, REGIONS, SecondOfTwo, outcome, rows, run_facts

BUDGET = Budget(Time.parse("20ba"))
ROOT = b"R" * 32


def _observer(folder: Path, facts: RunFacts | None = None, ranks: Ranks | None = None) -> LedgerObserver:
    return LedgerObserver(folder, facts or run_facts(), ranks or Ranks(), lambda: ROOT)


def _write(folder: Path, *outcomes: StepOutcome, facts: RunFacts | None = None, step: int = 0) -> None:
    """Open the ledger at a step, append some steps, and stop."""
    folder.mkdir(exist_ok=True)
    observer = _observer(folder, facts)
    observer.on_start(Clock(step=step), BUDGET)
    for one in outcomes:
        observer.on_step(one)
    observer.on_end(Clock(step=step + len(outcomes)), "stopped")


def _scan(folder: Path) -> list[ScannedEntry]:
    ledger = folder / "ledger"
    return list(Scan(ledger, read_head(ledger, read_verifier_key(ledger))))


def _run_entry(folder: Path, facts: RunFacts) -> tuple[dict[str, bytes], dict[str, Any]]:
    _write(folder, facts=facts)
    first, *_ = _scan(folder)
    assert isinstance(first.entry, RunEntry)
    assert first.entry.run_id == folder.name
    return dict(first.entry.commitments), json.loads(first.details or b"")


def _cells(folder: Path) -> list[tuple[MicrobatchCell, ...]]:
    return [item.entry.microbatches for item in _scan(folder) if isinstance(item.entry, StepEntry)]


# ---------------------------------------------------------------------------------------------------------- entry 0


def test_entry_0_commits_to_each_fact(tmp_path: Path) -> None:
    facts = run_facts(policy=POLICY)
    commitments, _ = _run_entry(tmp_path / "run", facts)
    salt = (tmp_path / "run" / "private" / "rows.salt").read_bytes()
    assert commitments == {
        "data": hashlib.sha256(b"d1").digest(),
        "environment": hashlib.sha256(b"python=3\ntorch=2").digest(),
        "model": b"M" * 32,
        "plan": bytes.fromhex(facts.plan.digest),
        "policy": b"P" * 32,
        "rows_keys": blake3.blake3(b"cosmati row keys root" + Rows(tmp_path / "run").root).digest(),
        "rows_salt": hashlib.sha256(b"cosmati rows salt" + salt).digest(),
        "taxonomy": b"T" * 32,
    }


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"data_digest": "d2"}, {"data"}),
        ({"environment": {"torch": "2", "python": "4"}}, {"environment"}),
        ({"environment": {"torch": "2"}}, {"environment"}),
        ({"model_root": b"N" * 32}, {"model"}),
        ({"plan": run_facts(has_ledger=False).plan}, set()),  # the digest is of methods and settings
        ({"plan": replace(run_facts().plan, facts=replace(run_facts().plan.facts, settings={"lr": 1}))}, {"plan"}),
        ({"policy": replace(POLICY, policy_digest=b"Q" * 32)}, {"policy"}),
        ({"policy": replace(POLICY, taxonomy_digest=b"U" * 32)}, {"taxonomy"}),
        ({"policy": None}, {"policy", "taxonomy"}),
        ({"hardware": "another"}, set()),
    ],
)
def test_a_changed_fact_changes_its_own_commitment(tmp_path: Path, changed: dict[str, Any], names: set[str]) -> None:
    (tmp_path / "b" / "private").mkdir(parents=True)
    first, _ = _run_entry(tmp_path / "a", run_facts(policy=POLICY))
    for name in ("rows.salt", "rows.keys"):
        (tmp_path / "b" / "private" / name).write_bytes((tmp_path / "a" / "private" / name).read_bytes())
    second, _ = _run_entry(tmp_path / "b", run_facts(**{"policy": POLICY} | changed))
    assert {name for name in first | second if first[name] != second[name]} == names


def test_without_a_policy_nothing_is_committed_for_it(tmp_path: Path) -> None:
    commitments, _ = _run_entry(tmp_path / "run", run_facts())
    assert (commitments["policy"], commitments["taxonomy"]) == (bytes(32), bytes(32))


def test_another_run_has_another_salt_and_other_keys(tmp_path: Path) -> None:
    one, other = (_run_entry(tmp_path / name, run_facts())[0] for name in "ab")
    assert one["rows_salt"] != other["rows_salt"]
    assert one["rows_keys"] != other["rows_keys"]
    salt, keys = (tmp_path / "a" / "private" / name for name in ("rows.salt", "rows.keys"))
    assert len(salt.read_bytes()) == 32
    assert [stat.S_IMODE(path.stat().st_mode) for path in (salt, keys)] == [0o600, 0o600]
    assert stat.S_IMODE(salt.parent.stat().st_mode) == 0o700


def test_the_details_of_entry_0_name_what_cells_point_to(tmp_path: Path) -> None:
    facts = run_facts(
        policy=POLICY,
        parameters=REGIONS.parameters,
        policy_text={"name": "halves"},
        identity={"settings.seed": 7, "settings.tail": None},
    )
    _, details = _run_entry(tmp_path / "run", facts)
    assert details == {
        "run_id": "run",
        "seed": 7,
        "classes": ["free", "bound", "late"],
        "regions": ["body", "head"],
        "routes": [[0, 0], [0, 0.5], [0, 1], [1, 1]],
        "phases": [["first", 0, 10], ["second", 10, 20]],
        "policy": [
            [[[1, 1], [1, 1]], ["admit", "admit"]],
            [[[0, 1], [0, 0.5]], ["admit", "gate"]],
            [[[0, 0], [1, 1]], ["defer", "admit"]],
        ],
        "plan": list(facts.plan.lines),
        "environment": {"torch": "2", "python": "3"},
        "num_microbatches": 2,
        "rows_version": 3,
        "parameters": [["0.weight"], ["1.weight"]],
        "policy_text": {"name": "halves"},
        "recipe": {"settings.seed": "7", "settings.tail": ""},
    }


@pytest.mark.parametrize(("num_steps", "end"), [(20, 20), (None, 0)])
def test_without_a_policy_there_is_one_class_one_route_one_phase(
    tmp_path: Path, num_steps: int | None, end: int
) -> None:
    _, details = _run_entry(tmp_path / "run", run_facts(num_steps=num_steps))
    assert (details["classes"], details["routes"], details["policy"]) == (["all"], [[1, 1]], [])
    assert details["phases"] == [["main", 0, end]]


# ------------------------------------------------------------------------------------------------------------ a step


@pytest.mark.parametrize(("policy", "digest"), [(POLICY, b"P" * 32), (None, bytes(32))])
def test_a_step_has_a_cell_for_each_microbatch(tmp_path: Path, policy: CompiledPolicy | None, digest: bytes) -> None:
    _write(tmp_path, outcome(0), outcome(1), facts=run_facts(policy=policy))
    steps = [item.entry for item in _scan(tmp_path) if isinstance(item.entry, StepEntry)]
    assert [(step.step, step.attempt, step.policy_digest, step.parameter_root) for step in steps] == [
        (0, 0, digest, None),
        (1, 0, digest, None),
    ]
    for step in steps:
        found = [(c.class_id, c.band, c.phase, c.route_id, c.num_rows, c.weight) for c in step.microbatches]
        # The routes of `outcome` are (id 1, phase 0, class 0) and (id 2, phase 1, class 1).
        assert found == [(0, 0, 0, 1, 3, 3.0), (1, 0, 1, 2, 2, 2.5)]


@pytest.mark.parametrize("lacking", ["weights", "num_rows"])
def test_a_step_of_the_short_road_has_one_cell(tmp_path: Path, lacking: str) -> None:
    short = outcome(0, batches=[rows(0, 1, 2, 3)], routes=[], **{lacking: None})
    _write(tmp_path, short, facts=run_facts(num_microbatches=1))
    ((cell,),) = _cells(tmp_path)
    assert (cell.class_id, cell.band, cell.phase, cell.route_id, cell.num_rows, cell.weight) == (0, 0, 0, 0, 4, 4.0)


def _commitment(own: Rows, step: int, microbatch: int, leaves: list[tuple[int, list[int], bytes]]) -> bytes:
    """The commitment by its definition, from slot, ids and content of each row that is there."""
    hashes = [own.leaf("all", step, microbatch, slot, ids, content) for slot, ids, content in leaves]
    return hashlib.sha256(b"".join(hashes)).digest()


def test_rows_are_committed_to_with_their_keys_place_and_content(tmp_path: Path) -> None:
    digests = torch.arange(96, dtype=torch.uint8).view(3, 32)
    mixed = rows(5, 6, 7, parents=torch.tensor([[5, 6], [-1, -1], [7, 5]]), digests=digests)
    _write(tmp_path, outcome(0), outcome(1, batches=[mixed, rows(8, -1, 9)]))
    own = Rows(tmp_path)
    content = [bytes(range(start, start + 32)) for start in (0, 32, 64)]
    expected = [
        [(0, 0, [(0, [0], b""), (1, [1], b""), (2, [2], b"")]), (0, 1, [(0, [3], b""), (1, [4], b"")])],
        [(1, 0, [(0, [5, 6], content[0]), (2, [7, 5], content[2])]), (1, 1, [(0, [8], b""), (2, [9], b"")])],
    ]
    assert [[cell.row_commitment for cell in cells] for cells in _cells(tmp_path)] == [
        [_commitment(own, *place) for place in places] for places in expected
    ]


def test_the_details_of_a_step_hold_loss_and_norms(tmp_path: Path) -> None:
    norms = torch.tensor([[1.5, math.nan], [math.inf, 2.0]], dtype=torch.float64)
    measured = outcome(0, loss=0.25, norms=norms, update_norms=torch.tensor([0.5, math.nan]))
    _write(tmp_path, measured, outcome(1, loss=math.nan))
    first, second = (json.loads(i.details or b"") for i in _scan(tmp_path) if isinstance(i.entry, StepEntry))
    assert first == {
        "step": 0,
        "gradient_norm": {"0": [1.5, None], "1": [None, 2]},
        "update_norm": [0.5, None],
        "loss": 0.25,
    }
    assert second == {"step": 1, "gradient_norm": {}, "update_norm": None, "loss": None}


# --------------------------------------------------------------------------------------- checkpoints, end and resume


def test_a_checkpoint_is_signed_before_the_observer_returns(tmp_path: Path) -> None:
    observer = _observer(tmp_path)
    observer.on_start(Clock(), BUDGET)
    assert len(_scan(tmp_path)) == 1, "entry 0 is signed at once"
    observer.on_step(outcome(0))
    observer.on_checkpoint(Clock(step=1), b"S" * 32, ROOT)
    assert _scan(tmp_path)[-1].entry == CheckpointEntry(1, b"S" * 32, ROOT)
    observer.on_end(Clock(step=1), "stopped")


def test_only_a_completed_run_has_an_end_and_only_one(tmp_path: Path) -> None:
    for _ in range(2):
        observer = _observer(tmp_path)
        observer.on_start(Clock(), BUDGET)
        observer.on_end(Clock(), "completed")
        assert _scan(tmp_path)[-1].entry == EndEntry(0, "completed", ROOT)
        observer.on_end(Clock(), "completed")
    _write(tmp_path)
    kinds = [type(item.entry) for item in _scan(tmp_path) if not isinstance(item.entry, TimeEntry)]
    assert kinds == [RunEntry, EndEntry, ResumeEntry, EndEntry, ResumeEntry]


def test_a_run_that_goes_on_supersedes_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    _write(tmp_path, *(outcome(step) for step in range(3)))
    _write(tmp_path, outcome(1), outcome(2), step=1)
    _write(tmp_path, outcome(3), step=3)
    entries = [item.entry for item in _scan(tmp_path)]
    assert [e for e in entries if isinstance(e, ResumeEntry)] == [ResumeEntry(1, 3, 1), ResumeEntry(3, 9, 2)]
    steps = [(e.step, e.attempt) for e in entries if isinstance(e, StepEntry)]
    assert steps == [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (3, 2)]
    commitments = {e.microbatches[0].row_commitment for e in entries if isinstance(e, StepEntry) and e.step == 2}
    assert len(commitments) == 1, "the same rows under the same keys"


# ---------------------------------------------------------------------------------------------------------- the salt


@pytest.mark.parametrize("name", ["rows.salt", "rows.keys"])
def test_another_secret_than_entry_0_commits_to_is_refused(tmp_path: Path, name: str) -> None:
    _write(tmp_path, outcome(0))
    path = tmp_path / "private" / name
    if name == "rows.salt":
        path.write_bytes(bytes(32))
    else:
        RowKeys(bytes(32)).save(path)
    with pytest.raises(LedgerError, match=rf"{name} isn't the (salt|tree of row keys) that entry 0"):
        _write(tmp_path, step=1)
    path.unlink()
    with pytest.raises(LedgerError, match=rf"{name} (is gone|isn't the tree)"):
        _write(tmp_path, step=1)
    assert len(_scan(tmp_path)) == 3


@pytest.mark.parametrize("lost", ["checkpoint", "wal"])
def test_a_salt_is_never_drawn_anew_where_there_is_a_ledger(tmp_path: Path, lost: str) -> None:
    """Whichever of the ledger's files is left says that rows have been salted."""
    _write(tmp_path, outcome(0))
    (tmp_path / "ledger" / "wal").touch()
    (tmp_path / "ledger" / lost).unlink()
    (tmp_path / "private" / "rows.salt").unlink()
    with pytest.raises(LedgerError, match=r"rows\.salt is gone.*Put the run's own salt back"):
        _write(tmp_path, step=1)
    assert not (tmp_path / "private" / "rows.salt").exists()


def test_a_run_that_was_begun_under_a_salt_goes_on_under_it(tmp_path: Path) -> None:
    """As releases wrote it before rows had keys: its entry 0 commits to the salt alone."""
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "rows.salt").write_bytes(bytes(32))
    key = load_or_create_key(tmp_path / "private" / "operator.key", name=f"cosmati/{tmp_path.name}")
    LedgerWriter.create(tmp_path / "ledger", origin=key.name, key=key).close()
    _write(tmp_path, outcome(0))
    _write(tmp_path, outcome(1), facts=run_facts(data_digest="d2"), step=1)
    assert not (tmp_path / "private" / "rows.keys").exists()
    tables = [item for item in _scan(tmp_path) if isinstance(item.entry, RunEntry | AmendEntry)]
    assert [json.loads(one.details or b"")["rows_version"] for one in tables] == [2, 2]
    assert all("rows_keys" not in dict(one.entry.commitments) for one in tables)
    for step, ((first, _),) in enumerate(zip(_cells(tmp_path), strict=True)):
        stream = blake3.blake3(f"cosmati rows {step}/0".encode(), key=bytes(32))
        ids = [3 * 0 + n for n in range(3)]
        leaves = [
            hashlib.sha256(bytes(2) + stream.digest(length=32, seek=32 * n) + struct.pack("<q", row)).digest()
            for n, row in enumerate(ids)
        ]
        assert first.row_commitment == hashlib.sha256(b"".join(leaves)).digest()


@pytest.mark.parametrize("size", [0, 31, 33])
@pytest.mark.parametrize(("has_ledger", "mend"), [(False, "Delete it"), (True, "Put the run's own salt back")])
def test_a_salt_that_a_crash_has_cut_is_refused(tmp_path: Path, size: int, has_ledger: bool, mend: str) -> None:
    if has_ledger:
        _write(tmp_path, outcome(0))
    (tmp_path / "private").mkdir(exist_ok=True)
    (tmp_path / "private" / "rows.salt").write_bytes(bytes(size))
    with pytest.raises(LedgerError, match=rf"rows\.salt holds {size} bytes, and a salt has 32: .*{mend}"):
        _write(tmp_path, step=int(has_ledger))
    assert (tmp_path / "ledger").exists() == has_ledger


# --------------------------------------------------------------------------------------------------------- two ranks


def test_the_second_rank_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "rows.salt").write_bytes(bytes(32))
    digests = []
    observer = LedgerObserver(tmp_path, run_facts(), SecondOfTwo(), lambda: digests.append(1) or ROOT)
    observer.on_start(Clock(), BUDGET)
    observer.on_step(outcome(0, batches=[rows(3, 4, 5)]))
    observer.on_checkpoint(Clock(step=1), b"S" * 32, ROOT)
    observer.on_end(Clock(step=1), "completed")
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        "private",
        "private/rows.salt",
    ]
    assert digests == [1], "the digest takes every rank"


def test_the_second_rank_commits_to_its_own_microbatches(tmp_path: Path) -> None:
    """Rank 1 of 2 holds microbatch 1 of V = 2, and hands its commitment to the gather."""
    (tmp_path / "private").mkdir()
    RowKeys(bytes(32)).save(tmp_path / "private" / "rows.keys")
    own, gathered = Rows(tmp_path, origin=f"cosmati/{tmp_path.name}"), []

    class Keeps(SecondOfTwo):
        def gather(self, rows: torch.Tensor) -> torch.Tensor:
            gathered.append(bytes(rows.flatten().tolist()))
            return super().gather(rows)

    observer = _observer(tmp_path, ranks=Keeps())
    observer.on_start(Clock(), BUDGET)
    observer.on_step(outcome(4, batches=[rows(3, 4)]))
    assert gathered == [_commitment(own, 4, 1, [(0, [3], b""), (1, [4], b"")]) + b"\0"], "and the band"
