"""Runs with a sensitive class that go on otherwise than they began: other cadences, more classes sealed, no ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cosmati.errors import CosmatiError
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.sealing import COLUMNS, SealedClasses
from cosmati.ledger.verify import verify_ledger
from tests.train.replay_world import build
from tests.train.test_sealed_run import EVERY, SEEN, SENSITIVE, details_of, keys_of, leaks, watchers

pytestmark = pytest.mark.long

Told = set[float | str]


@pytest.fixture(scope="module", params=[4, 1], ids=["mixed", "alone"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """The same training with everything in the open, measured in every step."""
    run = tmp_path_factory.mktemp("plain") / "run"
    build("routed", run, **SEEN | {"num_microbatches": request.param}).fit()
    return request.param, run


def secrets_from(run: Path, first: Mapping[str, int]) -> Told:
    """Return what mustn't be told of classes, each from a step on; what is of no one class, from the first of these."""
    ledger, found = VerifiedLedger(run / "ledger"), Told()
    for (_, entry, tables), told in zip(ledger.steps(), details_of(run), strict=True):
        names = [tables.classes[cell.class_id] for cell in entry.microbatches]
        hidden = [first.get(name, 99) <= entry.step for name in names]
        by_cell = [told[column] for column in ("gradient_norm", "direction", "entropy")]
        found |= {
            value for rows in by_cell for n, is_so in enumerate(hidden) if is_so for value in rows[str(n)] if value
        }
        if min(first.values()) <= entry.step:
            found |= {*told["update_norm"], *told["update_direction"]} - {None}
        if all(hidden):
            found.add(told["loss"])
    return found


def parts(run: Path, number: int, each: Sequence[Mapping[str, Any]], **options: Any) -> None:
    """Train 10 steps in parts, each with settings of its own."""
    for part, settings in enumerate(each):
        budget = {"budget": f"{(3, 6, 10)[part]}ba", **({"change": "budget"} if part else {})}
        build(
            "routed", run, observers=watchers(), **SEEN | {"num_microbatches": number} | budget | options | settings
        ).fit()


def told_in(run: Path, values: Told) -> dict[str, list[float | str]]:
    files = [path for path in run.rglob("*") if path.is_file() and "private" not in path.parts]
    return {path.name: found for path in files if (found := leaks(path.read_bytes(), values))}


OFTEN, RARELY = (dict.fromkeys(EVERY, every) for every in (1, 3))
NEVER = dict.fromkeys(EVERY, 0) | {"details_every": 7, "update_norm_every": 7}


@pytest.mark.parametrize(
    "each", [(NEVER, OFTEN, RARELY), (RARELY, NEVER, OFTEN)], ids=["begun late", "left and taken up"]
)
def test_another_cadence_at_a_resume_opens_nothing(
    each: Sequence[Mapping[str, Any]], plain: tuple[int, Path], tmp_path: Path
) -> None:
    number, truth = plain
    parts(tmp_path / "run", number, each, taxonomy=SENSITIVE)
    secret = secrets_from(truth, {"hot": 0})
    assert len(secret) > 20
    assert not told_in(tmp_path / "run", secret)
    # And what was measured is there, for who has the keys.
    verify_ledger(tmp_path / "run/ledger")
    ledger = VerifiedLedger(tmp_path / "run/ledger")
    classes, keys = SealedClasses.of(ledger.details, ledger.classes, ledger.key.name), keys_of(tmp_path / "run")
    known, count = {one["step"]: one for one in details_of(truth)}, 0
    for told in details_of(tmp_path / "run"):
        opened, left = classes.open(told, told["step"], keys)
        assert not left
        due = {name: value for name, value in opened.items() if name in COLUMNS and value and value != [None, None]}
        assert {name: known[told["step"]][name] for name in due} == due
        count += len(due)
    assert count > 20


def test_more_classes_at_each_resume_are_sealed_from_there_on(plain: tuple[int, Path], tmp_path: Path) -> None:
    number, truth = plain
    parts(tmp_path / "run", number, [{}, {"sensitive": "hot"}, {"sensitive": ("hot", "cold")}])
    assert not told_in(tmp_path / "run", secrets_from(truth, {"hot": 3, "cold": 6}))
    before = secrets_from(truth, {"hot": 0}) - secrets_from(truth, {"hot": 3})
    assert {*told_in(tmp_path / "run", before)["details.jsonl"]} == before, "the search finds what was in the open"


@pytest.mark.parametrize("less", [{}, {"sensitive": "cold"}, {"ledger": False}], ids=["none", "another", "no ledger"])
def test_less_is_refused_before_anything_is_told(
    less: Mapping[str, Any], plain: tuple[int, Path], tmp_path: Path
) -> None:
    number, truth = plain
    with pytest.raises(CosmatiError, match=r"are sealed in this ledger|ledger False, was True"):
        parts(tmp_path / "run", number, [{"sensitive": "hot"}, less])
    assert not told_in(tmp_path / "run", secrets_from(truth, {"hot": 0}))


def test_steps_taken_again_with_another_cadence_open_nothing(plain: tuple[int, Path], tmp_path: Path) -> None:
    number, truth = plain
    run, options = tmp_path / "run", SEEN | {"num_microbatches": number, "taxonomy": SENSITIVE}
    build("routed", run, **options).fit()
    for path in sorted((run / "checkpoints").iterdir())[2:]:
        path.rename(tmp_path / path.name)
    build("routed", run, **options | RARELY).fit()
    assert not told_in(run, secrets_from(truth, {"hot": 0}))
    report = verify_ledger(run / "ledger")
    assert (report.num_attempts, report.diverged_steps) == (2, ())
