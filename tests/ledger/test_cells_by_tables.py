"""Which row of a policy, class and route a cell has follows from its tables; what isn't in them is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cosmati.errors import TamperError
from cosmati.ledger.details import details_digest, encode_details
from cosmati.ledger.reader import ScannedEntry
from cosmati.ledger.tables import Tables, check_step, in_force, read_tables
from cosmati.ledger.vouched import Taken
from cosmati.records.ledger import NO_DETAILS, AmendEntry, Entry, MicrobatchCell, RunEntry, StepEntry, TimeEntry

from .ledgers import digest

RUN = RunEntry("r", (), NO_DETAILS)
ONE, HALF, NONE = (1.0, 1.0), (0.0, 0.5), (0.0, 0.0)
PLAIN = Tables(3, RUN, {}, ("a", "b"), ("x", "y"), (ONE, HALF, NONE), (), (), ())
BANDED = replace(
    PLAIN,
    phases=((0, 5), (5, 9)),
    policy=(
        ((ONE, "admit"), (HALF, "gate")),
        ((NONE, "reject"), (NONE, "defer")),
        ((NONE, "reject"), (ONE, "gate")),
        ((HALF, "defer"), (HALF, "admit")),
    ),
    bands=("low", "high"),
)


def cell(class_id: int = 0, band: int = 0, phase: int = 0, route: int = 0, rows: int = 1) -> MicrobatchCell:
    return MicrobatchCell(class_id, band, phase, route, rows, 1.0, digest("rows"))


def item(entry: Entry = RUN, index: int = 7, **details: object) -> ScannedEntry:
    return ScannedEntry(index, b"", entry, encode_details(details) if details else None)


def test_a_class_has_a_row_for_each_band() -> None:
    for class_id in range(2):
        assert [PLAIN.row_of(cell(class_id, band), item()) for band in range(3)] == [class_id] * 3
        assert [BANDED.row_of(cell(class_id, band), item()) for band in range(2)] == [2 * class_id, 2 * class_id + 1]
    for band in (2, 3):
        with pytest.raises(TamperError, match=f"Entry 7 breaks .*: band {band} isn't in the tables of entry 3"):
            BANDED.row_of(cell(0, band), item())
    assert replace(PLAIN, bands=("only",)).row_of(cell(1), item()) == 1
    with pytest.raises(TamperError, match="band 1 isn't in"):
        replace(PLAIN, bands=("only",)).row_of(cell(0, 1), item())


def test_names_and_routes_are_those_of_the_tables() -> None:
    assert [PLAIN.class_of(cell(number), item()) for number in range(2)] == ["a", "b"]
    assert [PLAIN.route(cell(route=number), item()) for number in range(3)] == [ONE, HALF, NONE]
    assert PLAIN.route(cell(rows=0), item()) == NONE, "it has no rows"
    with pytest.raises(TamperError, match=r"Entry 7 breaks .*: class 2 isn't in the tables of entry 3"):
        PLAIN.class_of(cell(2), item())
    for rows in (0, 1):
        with pytest.raises(TamperError, match=r"Entry 7 breaks .*: route 3 isn't in the tables of entry 3"):
            PLAIN.route(cell(route=3, rows=rows), item())


def test_a_class_may_the_most_that_a_band_of_it_may() -> None:
    assert BANDED.policy_of_classes == (
        ((ONE, "admit"), (HALF, "gate")),
        ((HALF, "defer"), (ONE, "admit")),
    )
    assert PLAIN.policy_of_classes == ()
    assert replace(BANDED, bands=("",)).policy_of_classes == BANDED.policy


def test_what_was_prepared_is_found_by_its_label() -> None:
    told = [{"kind": "tokenizer", "name": ""}, {"kind": "base weights", "name": "b"}]
    assert replace(PLAIN, details={"artifacts": told}).artifacts == {"tokenizer": told[0], "base weights b": told[1]}
    assert PLAIN.artifacts == replace(PLAIN, details={"artifacts": None}).artifacts == {}


def test_no_step_stands_from_a_stop_on() -> None:
    taken = Taken("t", "a", "stop", 4)
    for number, action, is_refused in ((3, "stop", False), (4, "stop", True), (5, "stop", True), (5, "reject", False)):
        tables = replace(PLAIN, withdrawn=(taken._replace(action=action),))
        entry = StepEntry(number, 0, digest("p"), NO_DETAILS, None, ())
        if is_refused:
            with pytest.raises(TamperError, match=f"it is step {number}, .* stopped before it: see entry 3"):
                check_step(tables, item(entry), entry)
        else:
            check_step(tables, item(entry), entry)


@pytest.mark.parametrize(
    ("number", "one", "said"),
    [
        (4, cell(), ""),
        (5, cell(phase=1, route=1), ""),
        (8, cell(1, 1, 1, 1), ""),
        (0, cell(0, 1, 0, 2, 0), ""),
        (0, cell(1, 1, 0, 1, 0), ""),
        (0, cell(0, 1, 0, 2, 1), "has 1 rows of 'a', which the policy says to reject"),
        (0, cell(1, 1, 0, 1, 1), "has 1 rows of 'b', which the policy says to defer"),
        (0, cell(0, 1, 0, 0), r"has the weights \(1\.0, 1\.0\), and the policy in force \(entry 3\) gives 'a' \(0\.0"),
        (0, cell(0, 2), "band 2 isn't in"),
        (0, cell(2), "class 2 isn't in"),
        (0, cell(phase=2), "is in phase 2, which isn't in"),
        (5, cell(), "says phase 0, which goes from step 0 to 5"),
        (9, cell(phase=1, route=1), "says phase 1, which goes from step 5 to 9"),
    ],
)
def test_a_cell_goes_by_the_policy_of_its_band(number: int, one: MicrobatchCell, said: str) -> None:
    entry = StepEntry(number, 0, digest("p"), NO_DETAILS, None, (cell(1, 1, int(number >= 5), 1, 0), one))
    if said:
        with pytest.raises(TamperError, match=f"Entry 7 breaks the ledger's contract: .*{said}"):
            check_step(BANDED, item(entry), entry)
        check_step(replace(PLAIN, routes=(ONE,) * 3), item(entry), entry)  # without a policy classes say nothing
    else:
        check_step(BANDED, item(entry), entry)


BASE: dict[str, Any] = {"classes": ["a"], "regions": ["x"], "routes": [[1]]}
ARTIFACTS = [{"kind": "tokenizer", "name": "", "digest": "ab", "origin": "o", "state": "ungoverned"}]


def read(before: Tables | None = None, *commitments: tuple[str, bytes], **told: object) -> Tables:
    entry = RunEntry("r", commitments, NO_DETAILS)
    return read_tables(item(entry, **(BASE | told)), entry, before)


def test_what_was_prepared_has_to_be_what_is_committed_to() -> None:
    committed = details_digest({"artifacts": ARTIFACTS})
    assert read(None, ("artifacts", committed), artifacts=ARTIFACTS).artifacts == {"tokenizer": ARTIFACTS[0]}
    for commitments in ((), (("artifacts", digest("another")),)):
        with pytest.raises(TamperError, match="it commits to other preparation artifacts than it names"):
            read(None, *commitments, artifacts=ARTIFACTS)
    for told in ({}, {"artifacts": None}, {"artifacts": []}, {"artifacts": 3}):
        with pytest.raises(TamperError, match="is no list of them"):
            read(None, ("artifacts", committed), **told)
    assert read(artifacts=None).artifacts == {}


def test_what_was_rejected_stays_so() -> None:
    before = replace(PLAIN, withdrawn=(Taken("t", "a", "reject", 4),))
    with pytest.raises(TamperError, match="a was rejected from step 4 on, and isn't any more"):
        read(before)
    assert read(None).withdrawn == read(PLAIN).withdrawn == ()
    with pytest.raises(TamperError, match="isn't a list of target, class, action and step"):
        read(withdrawn={"in_force": []})


def test_entries_come_with_the_tables_before_them() -> None:
    first = item(RUN, 0, **BASE)
    entry = AmendEntry(0, (), NO_DETAILS)
    second = item(entry, 2, **(BASE | {"classes": ["b"], "changes": []}))
    time = item(TimeEntry(0, 5), 1)
    found = [(one.index, tables.index, tables.classes) for one, tables in in_force([first, time, second, time])]
    assert found == [(0, 0, ("a",)), (1, 0, ("a",)), (2, 2, ("b",)), (1, 2, ("b",))]
    with pytest.raises(TamperError, match=r"Entry 2 breaks .*: its details don't say what was changed"):
        list(in_force([first, item(entry, 2, **BASE)]))
    with pytest.raises(TamperError, match=r"Entry 0 breaks .* no list of distinct class and region names"):
        list(in_force([item(RUN, 0)]))


def test_kinds_bands_and_the_text_of_a_policy_are_read() -> None:
    found = read(bands=["low", "high"], kinds=[[0, {"m": "good"}], [1, {}]])
    assert (found.bands, found.kinds) == (("low", "high"), ((0, {"m": "good"}), (1, {})))
    assert (read(bands=[]).bands, read(kinds=[]).kinds, read().kinds) == (("",), (), ())
    with pytest.raises(TamperError, match="which band and grades"):
        read(bands=["low", "high"], kinds=[[0, {}]])
    text = digest('{"a":1}')
    assert read(None, ("policy", text), policy_text={"a": 1}).details["policy_text"] == {"a": 1}
    for commitments in ((), (("policy", digest("x")),)):
        with pytest.raises(TamperError, match="text of its policy isn't that of the digest"):
            read(None, *commitments, policy_text={"a": 1})
