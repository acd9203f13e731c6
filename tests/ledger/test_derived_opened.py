"""What opened tables say of attempts, milestones and names, and whose ledger they have to be of."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.cosigned import keep_cosigned
from cosmati.ledger.derived.folder import INDEX_FILE, place_of
from cosmati.ledger.derived.opened import (
    NEVER,
    DerivedLedger,
    Milestone,
    _check_beginning,
    fingerprint,
    open_derived,
    open_proven,
    readable,
)
from cosmati.ledger.derived.rows import TABLES
from cosmati.ledger.evidence import LEVEL_0, TrustedEvidence
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import TreeHead, checkpoint_text
from cosmati.ledger.reader import read_head
from cosmati.records.ledger import ResumeEntry

from .ledgers import ORIGIN, digest
from .test_small_views import run_items
from .test_verify import KEY, items, write_signed

duckdb = pytest.importorskip("duckdb", reason="the extra `queries` isn't installed")

WITNESS = SigningKey.generate("w.example")


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "ledger"
    write_signed(path, run_items(), KEY)
    return path


@pytest.fixture(scope="module")
def shared(ledger: Path) -> Iterator[DerivedLedger]:
    with open_derived(ledger) as derived:
        yield derived


def head_of(ledger: Path) -> TreeHead:
    return read_head(ledger, KEY.verifier)


# ------------------------------------------------------------------------------------------------------ what they say


def test_names_come_in_the_order_of_their_first_appearance(shared: DerivedLedger, ledger: Path) -> None:
    assert shared.classes == ("a", "b", "c", "new&b")
    assert shared.regions == ("low", "high", "top")
    assert shared.origin_line == f"Derived from tree of size 13, root {head_of(ledger).root.hex()}; level {LEVEL_0}"
    assert [(number, one.from_step) for number, one in shared.resumes] == [(6, 3)]
    assert (shared.ledger, shared.folder) == (ledger, place_of(ledger))
    assert [one.index for one in shared.tables] == [0, 7]


def test_milestones_are_checkpoints_and_ends(shared: DerivedLedger) -> None:
    at4 = Milestone(5, 4, digest("state 4").hex(), digest("root 4").hex())
    at6 = Milestone(11, 6, digest("state 6").hex(), digest("root 6").hex())
    end = Milestone(12, 6, "", digest("end").hex(), "completed")
    assert shared.milestones == [at4, at6, end]
    assert shared.milestone(step=4) == shared.milestone(state_digest=at4.state_digest) == at4
    assert shared.milestone(step=6) == end, "the latest"
    # The state goes before the step.
    assert shared.milestone(step=4, state_digest=at6.state_digest) == at6
    for asked, what in (
        ({"step": 5}, r"after 5 steps\. It has some after 4, 6 steps"),
        ({"step": 4, "state_digest": "ab" * 32}, f"with the digest {'ab' * 8}. It has some after 4, 6 steps"),
    ):
        with pytest.raises(LedgerError, match=f"The ledger has no checkpoint {what}"):
            shared.milestone(**cast("dict[str, Any]", asked))
    with pytest.raises(dataclasses.FrozenInstanceError):
        at4.step = 5  # type: ignore[misc]
    assert not hasattr(at4, "__dict__")


def resumed(*resumes: tuple[int, int]) -> DerivedLedger:
    """Return what has these resumes, each by the index of its entry and the step it goes on from."""
    entries = [(number, ResumeEntry(step, 0, attempt)) for attempt, (number, step) in enumerate(resumes, 1)]
    return cast("DerivedLedger", SimpleNamespace(resumes=entries))


def test_an_attempts_steps_stand_up_to_the_first_that_a_later_one_took_up() -> None:
    asked = DerivedLedger.cuts
    assert asked(resumed(), None) == [NEVER]
    assert asked(resumed((9, 5)), None) == [5, NEVER]
    assert asked(resumed((9, 5), (20, 7), (30, 3)), None) == [3, 3, 3, NEVER]
    assert asked(resumed((9, 5), (20, 7), (30, 8)), None) == [5, 7, 8, NEVER]
    # At a checkpoint nothing is there that comes after it, in the log or by its step.
    resumes = (9, 5), (20, 7), (30, 3)
    for entry, step, cuts in (
        (8, 6, [6, 0, 0, 0]),
        (9, 6, [6, 0, 0, 0]),
        (10, 6, [5, 6, 0, 0]),
        (10, 4, [4, 4, 0, 0]),
        (25, 9, [5, 7, 9, 0]),
        (31, 9, [3, 3, 3, 9]),
    ):
        assert asked(resumed(*resumes), Milestone(entry, step, "", "")) == cuts


def test_what_stands_is_as_of_a_moment_or_of_the_head(ledger: Path) -> None:
    with open_derived(ledger) as derived:
        told = [derived.database.execute("SELECT * FROM cuts").fetchall()]
        for moment in (derived.milestones[0], None):
            derived.set_cuts(moment)
            told.append(derived.rows("SELECT * FROM cuts ORDER BY attempt"))
        assert told == [[(0, 3), (1, NEVER)], [(0, 4), (1, 0)], [(0, 3), (1, NEVER)]]
        derived.put("mine", {"x": np.asarray([1, 2])})
        derived.put("mine", {"x": np.asarray([3])})
        assert derived.rows("SELECT x FROM mine WHERE x > ?", [2]) == [(3,)]
        assert derived.rows("SELECT x FROM mine WHERE x > ?", (5,)) == []
        with pytest.raises(AssertionError):
            derived.put("mine", {})


def test_tables_without_a_file_are_empty_and_have_their_columns(shared: DerivedLedger) -> None:
    assert {table for table, files in shared.files.items() if not files} >= {"directions", "entropies", "sealed"}
    for table, files in shared.files.items():
        (number,) = shared.rows(f"SELECT count(*) FROM {table}_file")
        assert (number[0] > 0) == bool(files)
    told = {name: kind for name, kind, *_ in shared.rows("DESCRIBE updates_file")}
    assert {name: told[name] for name in ("entry", "attempt", "norm", "before", "d0")} == {
        "entry": "UBIGINT",
        "attempt": "UINTEGER",
        "norm": "DOUBLE",
        "before": "VARCHAR",
        "d0": "FLOAT",
    }


def test_what_tables_cannot_say_is_told_with_what_to_do(ledger: Path, shared: DerivedLedger) -> None:
    def number_of_nothing() -> None:
        with readable(ledger):
            raise LookupError("no such number")

    for fail in (number_of_nothing, lambda: shared.rows("SELECT nothing FROM cells_file")):
        with pytest.raises(TamperError, match="The tables don't say what derived tables say: ") as caught:
            fail()
        assert str(caught.value).endswith("derive it anew: cosmati ledger derive RUN --anew.")
        assert f"Remove {place_of(ledger)}" in str(caught.value)


# ---------------------------------------------------------------------------------------------------- whose they are


def test_an_empty_ledger_has_no_tables_and_another_key_is_refused(tmp_path: Path, ledger: Path) -> None:
    write_signed(tmp_path / "ledger", [])
    with pytest.raises(LedgerError, match=r"ledger is empty\. Query it once the run has begun") as caught:
        open_derived(tmp_path / "ledger").__enter__()
    assert not isinstance(caught.value, TamperError)
    assert not place_of(tmp_path / "ledger").exists()
    with pytest.raises(TamperError, match="and you trust"):
        open_derived(ledger, vkey=SigningKey.generate(ORIGIN).verifier.text).__enter__()
    with open_derived(ledger, vkey=KEY.verifier.text) as derived:
        assert derived.index.tree_size == 13


def test_what_somebody_has_seen_is_the_beginning_of_what_is_signed(tmp_path: Path) -> None:
    heads = []
    for number in (1, 3, 6):
        write_signed(tmp_path, items(number))
        heads.append(head_of(tmp_path))
    for old in heads:
        _check_beginning(tmp_path, old, heads[-1])
    one, _, last = heads
    for old, new in (
        (TreeHead(4, bytes(32)), last),
        (TreeHead(7, bytes(32)), last),
        (TreeHead(8, last.root), last),
        (last, one),
    ):
        with pytest.raises(TamperError) as caught:
            _check_beginning(tmp_path, old, new)
        assert str(caught.value).startswith(
            f"The checkpoint in {tmp_path} covers {new.size} entries, and doesn't go on "
        )
        assert f"from an earlier one of {old.size} that others have seen" in str(caught.value)


def cosigned(ledger: Path, head: TreeHead, key: SigningKey = KEY) -> None:
    text = checkpoint_text(ORIGIN, head)
    keep_cosigned(ledger, key.sign_note(text), WITNESS.cosign(text, 1000), WITNESS.witness)


def test_what_a_witness_saw_raises_the_level_or_refutes(tmp_path: Path) -> None:
    path, trusted = tmp_path / "ledger", TrustedEvidence((WITNESS.witness,))
    write_signed(path, items(4))
    cosigned(path, head_of(path))
    with open_derived(path, witnesses=trusted) as derived:
        assert derived.evidence_level == "L1: witnessed at 1970-01-01T00:16:40Z by 1 of 1"
        assert derived.origin_line.endswith(f"; level {derived.evidence_level}")
    with open_derived(path) as derived:
        assert derived.evidence_level == LEVEL_0
    write_signed(path, items(5))
    with open_derived(path, witnesses=trusted) as derived:
        assert derived.evidence_level.startswith(f"{LEVEL_0}; the first 5 of its 6 entries were witnessed")
    cosigned(path, TreeHead(3, bytes(32)))
    with pytest.raises(TamperError, match="from an earlier one of 3 that others have seen"):
        open_derived(path).__enter__()


def test_what_somebody_else_signed_is_no_checkpoint_of_the_operators(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    write_signed(path, items(4))
    cosigned(path, head_of(path), SigningKey.generate(ORIGIN))
    with pytest.raises(TamperError, match="isn't signed by the operator"):
        open_derived(path).__enter__()


# ------------------------------------------------------------------------------------------------- against the entries


def proven(ledger: Path) -> bool:
    with open_proven(ledger) as (derived, was_other):
        assert derived.index.tree_size == head_of(ledger).size
        return was_other


def changed(ledger: Path, **values: Any) -> None:
    file = place_of(ledger) / INDEX_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_tables_that_were_there_said_the_same_or_something_else(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    write_signed(path, items(4))
    assert proven(path) is False, "there were none"
    assert proven(path) is False
    write_signed(path, items(6))
    assert proven(path) is False, "the ledger has grown since"
    changed(path, format="cosmati-derived/1")
    assert proven(path) is False, "nothing can be compared with them"
    changed(path, format="cosmati-derived/9")
    assert proven(path) is True
    (steps,) = place_of(path).glob("steps-*.parquet")
    steps.write_bytes(b"changed")
    assert proven(path) is True
    assert proven(path) is False


def test_a_fingerprint_is_of_the_entries_below_a_number(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    write_signed(path, items(4))
    with open_derived(path) as derived:
        four = fingerprint(derived, below=5)
        assert fingerprint(derived, below=4) != four
        assert fingerprint(derived, below=99) == four
    write_signed(path, items(6))
    with open_derived(path) as derived:
        assert fingerprint(derived, below=5) == four
        assert fingerprint(derived, below=7) != four
    log = items(4)
    write_signed(path, [*log[:4], items(5)[4]])
    with open_derived(path, anew=True) as derived:
        assert fingerprint(derived, below=5) == four
        sums, rare = cast("tuple[list[tuple[int, ...]], list[tuple[int, str]]]", fingerprint(derived, below=0))
        assert [one[0] for one in sums] == [0] * len(TABLES)
        assert rare == []


def test_the_numbers_of_sets_are_no_part_of_it(ledger: Path) -> None:
    with open_derived(ledger) as derived:
        before = fingerprint(derived, below=13)
        sets = derived.index.sets
        assert len(sets) > 2
        order = [0, *range(len(sets) - 1, 0, -1)]
        renumbered = {old: new for new, old in enumerate(order)}
        cells = "SELECT * REPLACE (CASE reaches {0} END AS reaches, CASE opens {1} END AS opens)"
        cases = [
            " ".join(f"WHEN {old} THEN {new}::UINTEGER" for old, new in renumbered.items())
            for _ in ("reaches", "opens")
        ]
        derived.database.execute(f"CREATE TABLE other AS {cells.format(*cases)} FROM cells_file")
        derived.database.execute("CREATE OR REPLACE VIEW cells_file AS SELECT * FROM other")
        assert fingerprint(derived, below=13) != before
        derived.index = type(derived.index)(
            **{name: getattr(derived.index, name) for name in derived.index.__struct_fields__}
            | {"sets": [sets[old] for old in order]}
        )
        assert fingerprint(derived, below=13) == before
