"""Legal holds refuse, whichever way the same rows are named, until they're released."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmati.errors import ForgetError
from cosmati.forget import holds
from cosmati.forget.asked import ToForget
from cosmati.forget.past_run import PastRun
from cosmati.forget.replay import Make
from cosmati.forget.request import Request
from tests.forget.samples import bare, forgotten, maker, rows_of_step, trained
from tests.train.isolated.samples import source

CASE = bare("MLP, low rank")
DATA = source(CASE)
MAKE = maker(CASE, DATA)
"""Of class `personal` are the rows 1, 4, 7 ...; of `open` 0, 3, 6."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(MAKE, tmp_path_factory.mktemp("held") / "run")


@pytest.fixture(autouse=True)
def nothing_held(run: Path) -> None:
    (run / "private" / "holds.jsonl").unlink(missing_ok=True)


def rows(*ids: int) -> ToForget:
    return ToForget(rows=frozenset(ids))


def classes(*names: str) -> ToForget:
    return ToForget(classes=names)


def opened(run: Path, asked: ToForget, make: Make | None = MAKE) -> Request:
    return Request.open(PastRun(run), asked, make)


@pytest.mark.parametrize(
    ("held", "asked", "is_refused"),
    [
        (classes("personal"), classes("personal"), True),
        (classes("personal"), classes("open"), False),
        (rows(4, 6), rows(6, 9), True),
        (rows(4), rows(6), False),
        (rows(4), classes("personal"), True),
        (rows(4), classes("open"), False),
        (classes("personal"), rows(3, 4), True),
        (classes("personal"), rows(3, 6), False),
        (ToForget(rows=frozenset({4}), subject="ada"), ToForget(rows=frozenset({6}), subject="ada"), True),
        (ToForget(rows=frozenset({4}), subject="ada"), ToForget(rows=frozenset({6}), subject="bob"), False),
    ],
)
def test_what_is_held_is_refused_by_name(run: Path, held: ToForget, asked: ToForget, *, is_refused: bool) -> None:
    holds.hold(run, held, "case 12")
    if not is_refused:
        assert opened(run, asked).contact.first_step is not None
        return
    with pytest.raises(ForgetError, match=r"Legal hold 1 is on .*, because case 12 .*cosmati forget release") as raised:
        opened(run, asked)
    assert "--recipe" not in str(raised.value)
    holds.release(run, 1, "settled")
    assert opened(run, asked).contact.first_step is not None
    assert holds.all_holds(run)[0].released.startswith("settled (")


def test_without_the_recipe_what_may_be_held_is(run: Path) -> None:
    """Whether a row belongs to a class, the data say."""
    holds.hold(run, rows(4), "case 12")
    with pytest.raises(ForgetError, match="Whether these are its rows the run's recipe can tell: --recipe"):
        opened(run, classes("open"), None)


def test_a_damaged_file_may_be_a_hold(run: Path) -> None:
    holds.hold(run, rows(4), "case 12")
    path = run / "private" / "holds.jsonl"
    for damage in (path.read_text()[:-9], '{"action": "hold"}\n', "\n", '{"action": "release", "number": "1"}'):
        path.write_text(damage)
        with pytest.raises(ForgetError, match="may be a hold"):
            opened(run, rows(6))


def test_a_hold_has_a_reason_and_a_number(run: Path) -> None:
    with pytest.raises(ForgetError, match="because of something"):
        holds.hold(run, rows(1), "  ")
    assert [holds.hold(run, rows(n), "x").number for n in (1, 2)] == [1, 2]
    with pytest.raises(ForgetError, match=r"No hold 3 is in force. In force: 1, 2"):
        holds.release(run, 3, "x")
    holds.release(run, 1, "x")
    with pytest.raises(ForgetError, match=r"No hold 1 is in force. In force: 2"):
        holds.release(run, 1, "x")
    assert holds.hold(run, rows(3), "x").number == 3


@pytest.mark.long
def test_holds_go_with_the_run_to_its_successor(tmp_path: Path) -> None:
    run = trained(MAKE, tmp_path / "run")
    holds.hold(run, rows(4), "case 12")
    done = forgotten(run, ToForget(rows=rows_of_step(DATA, 4) - {4}), MAKE, tmp_path / "out")
    with pytest.raises(ForgetError, match="Legal hold 1"):
        opened(done.out, rows(4))


@pytest.mark.long
def test_a_hold_that_comes_in_between_stops_what_was_begun(tmp_path: Path) -> None:
    """After a kill in the middle, and before what's superseded is deleted."""
    run, out = trained(MAKE, tmp_path / "run"), tmp_path / "out"
    holds.hold(run, rows(6), "of others")
    asked = rows(4, 7)
    forgotten(run, asked, MAKE, out)
    holds.hold(out, classes("personal"), "case 13")
    with pytest.raises(ForgetError, match=r"Legal hold 2 of .*out may be on it, because case 13"):
        forgotten(run, asked, MAKE, out, delete=True)
    assert len(list((run / "checkpoints").iterdir())) == 4
    holds.release(out, 2, "settled")
    forgotten(run, asked, MAKE, out, delete=True)
    assert len(list((run / "checkpoints").iterdir())) < 4


def test_another_recipe_does_not_tell_whose_rows_are_held(run: Path) -> None:
    holds.hold(run, rows(4), "case 12")
    with pytest.raises(ForgetError, match="Legal hold 1"):
        opened(run, classes("open"), maker(CASE, DATA, methods=[]))
