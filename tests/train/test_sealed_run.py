"""Runs with a sensitive class: what is measured of it is nowhere in the open, and all else is as it was."""

from __future__ import annotations

import json
import re
import struct
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmati.errors import LedgerError, PlanError
from cosmati.explorer.report import write_report
from cosmati.explorer.run_view import read_run
from cosmati.ledger.derived.learning import learning, region_moves
from cosmati.ledger.derived.opened import open_derived
from cosmati.ledger.derived.opened_columns import open_columns
from cosmati.ledger.details import details_digest
from cosmati.ledger.learning import SKETCH_WIDTH, decode_direction
from cosmati.ledger.query import VerifiedLedger, contributions
from cosmati.ledger.row_blinds import secrets_of_run
from cosmati.ledger.sealing import SEALED, OperatorKeys, SealedClasses, open_box, sealed
from cosmati.ledger.verify import verify_ledger
from cosmati.records.ledger import StepEntry
from cosmati.storage.duck import connection
from cosmati.train.observers.monitors import (
    ActivationStatistics,
    GradientNorms,
    LossHealth,
    Monitors,
    UpdateNorms,
)
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome
from cosmati.train.replay import ReplayFound, replay
from tests.train.replay_world import TAXONOMY, again, build, entries, opened, sign_again

pytestmark = pytest.mark.long

EVERY = ("details_every", "update_norm_every", "direction_every", "update_direction_every", "entropy_every")
SEEN: dict[str, Any] = dict.fromkeys(EVERY, 1) | {"budget": "10ba"}
SENSITIVE = replace(TAXONOMY, sensitive=("hot",))


def watchers() -> list[Observer]:
    return [Monitors([GradientNorms(), UpdateNorms(), LossHealth(), ActivationStatistics()], every=1)]


def details_of(run: Path) -> list[dict[str, Any]]:
    lines = (run / "ledger/details.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if "gradient_norm" in one]


def keys_of(run: Path) -> OperatorKeys:
    return OperatorKeys((run / "private/columns.key").read_bytes(), VerifiedLedger(run / "ledger").key.name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The same training in the open and sealed: with both classes in each step, and with one class in each."""
    root = tmp_path_factory.mktemp("runs")
    for number, name in ((4, "mixed"), (1, "alone")):
        options = SEEN | {"num_microbatches": number}
        build("routed", root / f"{name}-open", observers=watchers(), **options).fit()
        build("routed", root / f"{name}-sealed", observers=watchers(), taxonomy=SENSITIVE, **options).fit()
    return {path.name: path for path in root.iterdir()}


def secrets_of(runs: Mapping[str, Path], kind: str) -> set[float | str]:
    """Return what the run in the open tells, and the sealed one mustn't: all that the rules seal."""
    ledger = VerifiedLedger(runs[f"{kind}-open"] / "ledger")
    found = set[float | str]()
    for (_, entry, tables), told in zip(ledger.steps(), details_of(runs[f"{kind}-open"]), strict=True):
        hot = [n for n, cell in enumerate(entry.microbatches) if tables.classes[cell.class_id] == "hot"]
        by_cell = [told[column] for column in ("gradient_norm", "direction", "entropy")]
        found |= {value for rows in by_cell for n in hot for value in rows[str(n)] if value}
        found |= {*told["update_norm"], *told["update_direction"]} - {None}
        if len(hot) == len(entry.microbatches):
            found.add(told["loss"])
    return found


NUMBER = re.compile(rb"(?:0\.0*)?(\d+(?:\.\d+)?)(?:e[+-]?\d+)?")
"""With its digits from the first one that counts."""


def forms_of(value: float | str) -> Iterator[bytes]:
    """Yield a value as eight bytes, and a sketch as all of its own, and as text too."""
    if isinstance(value, str):
        yield from (value.encode(), b64decode(value), decode_direction(value).tobytes())
        return
    yield from (struct.pack(f"{order}d", value) for order in "<>")


def leaks(data: bytes, values: set[float | str]) -> list[float | str]:
    """Return the values that are told: as bytes, or as text of six digits or more, all of which are the value's.

    A time in seconds has six digits in common with one of many values every now and then, and then goes on otherwise.
    Four bytes of a key or a signature are one of hundreds of values in one run of a hundred: it's two that tell.
    """
    told: dict[str, list[tuple[int, float]]] = {}
    for found in NUMBER.finditer(data):
        if (digits := len(found[1].replace(b".", b""))) >= 6:
            told.setdefault(f"{float(found[0]):.4e}", []).append((min(digits, 15), float(found[0])))

    def is_told(value: float) -> bool:
        near = [f"{value * (1 + shift):.4e}" for shift in (-1e-6, 0.0, 1e-6)]
        pairs = [pair for key in {*near} for pair in told.get(key, ())]
        own = value, struct.unpack("f", struct.pack("f", value))[0]
        return any(abs(number - one) <= 10.0 ** (1 - digits) * abs(one) for digits, number in pairs for one in own)

    singles = {
        value
        for value in values
        if not isinstance(value, str) and any(struct.pack(f"{order}f", value) in data for order in "<>")
    }
    return [
        value
        for value in sorted(values, key=str)
        if any(form in data for form in forms_of(value))
        or (value in singles and (len(singles) > 1 or len(values) < 10))
        or (not isinstance(value, str) and is_told(abs(value)))
    ]


def test_a_value_is_found_however_it_is_written_and_no_other_for_it() -> None:
    secret = 0.0381230004131794
    for text in (
        "0.0381230004131794",
        "0.0381230",
        "3.81230e-02",
        '{"x":-0.03812300}',
        "[0.0381230004]",
        "0.03812300041",
    ):
        assert leaks(text.encode(), {secret}) == [secret], text
    for text in ("0.0381", "0.038123", "0.0381234918", "0.0381230123", "0.381230004131794", "1.0381230004", "381"):
        assert leaks(text.encode(), {secret}) == [], text
    assert leaks(struct.pack("<f", 0.1), {0.1}) == leaks(b"0.10000000149011612", {0.1}) == [0.1]
    assert leaks(b"123456.5", {123456.5}) == [123456.5]
    many = {0.1 + number / 64 for number in range(20)}
    one, other = sorted(many)[:2]
    assert leaks(struct.pack("<f", one), many) == [], "chance"
    assert leaks(struct.pack("<f", one) + b"x" + struct.pack(">f", other), many) == [one, other]
    assert leaks(struct.pack(">d", other), many) == [other]


@pytest.mark.parametrize("kind", ["mixed", "alone"])
def test_nothing_measured_of_a_sensitive_class_lies_outside_the_private_folder(
    runs: Mapping[str, Path], kind: str, tmp_path: Path
) -> None:
    secret = secrets_of(runs, kind)
    assert len(secret) > 20
    told = (runs[f"{kind}-open"] / "ledger/details.jsonl").read_bytes()
    assert leaks(told, secret) == sorted(secret, key=str), "the search finds what there is"
    run = runs[f"{kind}-sealed"]
    for path in run.rglob("*"):
        if path.is_file() and "private" not in path.parts:
            assert not leaks(path.read_bytes(), secret), path
    page = write_report(tmp_path / "page.html", title="x", run=read_run(run))
    assert "sealed" in page.read_text()
    assert not leaks(page.read_bytes(), secret)
    totals = {
        f"{c.norm_sum:,.4g}" for c in contributions(runs[f"{kind}-open"] / "ledger").cells if c.class_name == "hot"
    }
    shown = write_report(tmp_path / "open.html", title="x", run=read_run(runs[f"{kind}-open"])).read_text()
    assert all(f">{one}<" in shown for one in totals)
    assert not any(f">{one}<" in page.read_text() for one in totals)


@pytest.mark.parametrize("kind", ["mixed", "alone"])
def test_the_derived_tables_hold_none_of_it(runs: Mapping[str, Path], kind: str) -> None:
    run, secret = runs[f"{kind}-sealed"], secrets_of(runs, kind)
    with open_derived(run / "ledger") as derived:
        files = [path for paths in derived.files.values() for path in paths]
        assert derived.rows("SELECT count(*) FROM sealed_file")[0][0] == sum(
            c.num_sealed for c in contributions(run / "ledger").cells
        )
    with connection() as database:
        for path in files:
            for column, values in database.execute(f"FROM read_parquet('{path}')").fetchnumpy().items():
                kept = {*np.asarray(values, np.float64).tolist()} if values.dtype.kind == "f" else set()
                assert not kept & secret, (path, column)
        directions = [row for one in files if "directions" in one.name for row in sketches_in(database, one)]
        known = {tuple(decode_direction(text).tolist()) for text in secret if isinstance(text, str)}
        assert not {*directions} & known
        assert directions, "those of the other class are there"


def sketches_in(database: Any, path: Path) -> list[tuple[float, ...]]:
    columns = ", ".join(f"d{number}" for number in range(SKETCH_WIDTH))
    return database.execute(f"SELECT {columns} FROM read_parquet('{path}')").fetchall()


def test_who_has_the_keys_is_told_of_learning_as_in_the_open(runs: Mapping[str, Path]) -> None:
    with open_derived(runs["mixed-open"] / "ledger") as plain, open_derived(runs["mixed-sealed"] / "ledger") as closed:
        told, hidden = learning(plain), learning(closed)
        open_columns(closed, keys_of(runs["mixed-sealed"]))
        assert learning(closed) == told
        assert region_moves(closed) == region_moves(plain)
    assert {one.class_name for one in told} == {"cold", "hot"}
    assert {one.class_name for one in hidden} == {"cold"}


def test_all_else_is_told_as_it_was(runs: Mapping[str, Path]) -> None:
    for kind in ("mixed", "alone"):
        plain, closed = (VerifiedLedger(runs[f"{kind}-{how}"] / "ledger") for how in ("open", "sealed"))
        for (_, one, _), (_, other, _) in zip(plain.steps(), closed.steps(), strict=True):
            assert [replace(c, row_commitment=bytes(32)) for c in one.microbatches] == [
                replace(c, row_commitment=bytes(32)) for c in other.microbatches
            ]
        verify_ledger(closed.directory)
        closed.keys = keys_of(runs[f"{kind}-sealed"])
        assert contributions(closed).cells == contributions(plain).cells
        classes = SealedClasses.of(closed.details, closed.classes, closed.key.name)
        told = [classes.open(one, one["step"], closed.keys)[0] for one in details_of(runs[f"{kind}-sealed"])]
        assert told == details_of(runs[f"{kind}-open"])


def test_a_region_with_something_sealed_has_no_shares_and_a_sum_is_none(runs: Mapping[str, Path]) -> None:
    cells = contributions(runs["mixed-sealed"] / "ledger").cells
    assert {one.norm_share for one in cells} == {None}
    for one in cells:
        assert (one.num_sealed > 0, bool(np.isnan(one.norm_sum))) == (one.class_name == "hot",) * 2
    ledger = VerifiedLedger(runs["mixed-sealed"] / "ledger")
    keys = keys_of(runs["mixed-sealed"])
    # Keys of other columns open nothing here.
    ledger.keys = lambda name, column, block: keys(name, column, block) if column == "loss" else None
    assert contributions(ledger).cells[-1].num_sealed


def test_watchers_are_told_what_isnt_of_the_sensitive_class_alone(runs: Mapping[str, Path]) -> None:
    def lines(name: str, file: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (runs[name] / file).read_text().splitlines()]

    for told in lines("mixed-sealed", "steps.jsonl"):
        assert (told["loss"] is not None, told["gradient_norm"]) == (True, None)
    classes = [[tables.classes[c.class_id] for c in entry.microbatches] for _, entry, tables in steps_of(runs, "alone")]
    for told, plain in zip(lines("alone-sealed", "steps.jsonl"), lines("alone-open", "steps.jsonl"), strict=True):
        is_hot = classes[told["step"] - 1] == ["hot"]
        assert told["loss"] == (None if is_hot else plain["loss"])
        assert told["gradient_norm"] == (None if is_hot else plain["gradient_norm"])
    measured = lines("alone-sealed", "monitors.jsonl")
    assert {one["losses_not_finite"] for one in measured} == {0}, "withheld isn't infinite"
    for one in measured:
        tells = any(name.startswith(("gradient_norm/", "activation/")) for name in one)
        assert tells == (classes[one["step"] - 1] != ["hot"])
        assert not any(name.startswith("update_norm/") for name in one), "momentum is in all of them"
    assert sum(one == ["hot"] for one in classes) == 5


def steps_of(runs: Mapping[str, Path], kind: str) -> Iterator[Any]:
    return VerifiedLedger(runs[f"{kind}-sealed"] / "ledger").steps()


def test_a_users_own_watcher_is_told_no_more(tmp_path: Path) -> None:
    class Keeps(Observer):
        def __init__(self) -> None:
            self.seen: list[StepOutcome] = []

        def on_step(self, outcome: StepOutcome) -> None:
            self.seen.append(outcome)

    keeps = Keeps()
    build("routed", tmp_path / "run", observers=[keeps], **SEEN, num_microbatches=1, sensitive="hot").fit()
    for outcome in keeps.seen:
        is_hot = outcome.routes[0].class_id == 1
        assert bool(np.isnan(float(outcome.loss))) == bool(np.isnan(float(outcome.sub_losses[0]))) == is_hot
        assert {one is None for one in (outcome.norms, outcome.sketches, outcome.entropies)} == {is_hot}
        assert outcome.update_norms is outcome.update_sketches is None, "momentum is in all of them"
        assert tuple(outcome.withheld) == (("norms", "loss") if is_hot else ("updates",))


def replayed_with(run: Path, keys: OperatorKeys | None) -> ReplayFound:
    steps = opened(run)
    steps.ledger.keys = keys
    blinds = secrets_of_run(steps, run / "private")
    return replay(steps, range(1, 5), again("routed", **SEEN, taxonomy=SENSITIVE), ledger=run / "ledger", blinds=blinds)


def test_a_replay_compares_what_it_can_open_and_names_the_rest(runs: Mapping[str, Path]) -> None:
    run = runs["mixed-sealed"]
    found = replayed_with(run, keys_of(run))
    assert (found.outcome, found.skipped) == ("equal", ())
    without = replayed_with(run, None)
    assert without.outcome == "equal"
    columns = ("direction", "entropy", "gradient_norm", "update_direction", "update_norm")
    assert without.skipped == tuple(f"{column} of hot, which is sealed" for column in columns)


Details = dict[str, Any]


def forge(told: Details, keys: OperatorKeys) -> None:
    """Put another norm into a box, as an operator can."""
    box = told[SEALED]["hot"]["gradient_norm"]
    norms = open_box(box, keys("hot", "gradient_norm", 0), keys.origin, "hot", "gradient_norm", 2)
    norms["1"][0] += 0.5
    told[SEALED]["hot"] |= sealed({}, {"hot": {"gradient_norm": norms}}, keys, 2)[SEALED]["hot"]


def drop(told: Details, keys: OperatorKeys) -> None:
    """Leave a box out."""
    del told[SEALED]["hot"]["gradient_norm"], keys


def show(told: Details, keys: OperatorKeys) -> None:
    """Put what is sealed in the open."""
    classes = SealedClasses(keys.origin, ("", "hot"), 1024)
    clear, _ = classes.open(told, 2, keys)
    del told[SEALED]
    told |= clear


@pytest.mark.parametrize("change", [forge, drop, show])
def test_a_lie_in_a_box_or_about_what_is_sealed_is_found(
    tmp_path: Path, change: Callable[[Details, OperatorKeys], None]
) -> None:
    run = tmp_path / "run"
    build("routed", run, **SEEN | {"budget": "5ba"}, taxonomy=SENSITIVE).fit()
    items = entries(run)
    for number, (entry, details) in enumerate(items):
        if isinstance(entry, StepEntry) and entry.step == 2 and details is not None:
            change(details, keys_of(run))
            items[number] = replace(entry, details_digest=details_digest(details)), details
    sign_again(run, items)
    found = replayed_with(run, keys_of(run))
    assert {one.step for one in found.differences} == {2}
    whats = {one.what for one in found.differences}
    assert any(one.startswith(("gradient norm of region body", "sealed")) for one in whats), whats
    told = [(one, one.without_sealed()) for one in found.differences]
    for one, words in told:
        is_value = one.what.startswith(("gradient norm", "loss", "direction"))
        assert (one.logged in words) == (one.replayed in words) == (not is_value)
        assert one.what in words


def test_a_run_goes_on_with_its_secret_and_not_without(tmp_path: Path) -> None:
    run = tmp_path / "run"
    build("routed", run, **SEEN | {"budget": "4ba"}, taxonomy=SENSITIVE).fit()
    key = run / "private/columns.key"
    assert (key.stat().st_mode & 0o777, key.stat().st_size) == (0o600, 32)
    own = key.read_bytes()
    more = SEEN | {"budget": "8ba", "change": "budget"}
    key.unlink()
    with pytest.raises(LedgerError, match="is gone"):
        build("routed", run, **more, taxonomy=SENSITIVE).fit()
    key.write_bytes(bytes(32))
    with pytest.raises(LedgerError, match="isn't the secret"):
        build("routed", run, **more, taxonomy=SENSITIVE).fit()
    key.write_bytes(own[:7])
    with pytest.raises(LedgerError, match="has 7 bytes"):
        build("routed", run, **more, taxonomy=SENSITIVE).fit()
    key.write_bytes(own)
    build("routed", run, **more, taxonomy=SENSITIVE).fit()
    ledger = VerifiedLedger(run / "ledger", keys=keys_of(run))
    assert len(ledger.standing) == 8
    assert not any(one.num_sealed for one in contributions(ledger).cells)


def test_a_secret_that_a_crash_has_cut_is_drawn_anew_where_nothing_is_sealed_with_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "private").mkdir(parents=True)
    (run / "private/columns.key").write_bytes(b"cut")
    build("routed", run, **SEEN | {"budget": "2ba"}, taxonomy=SENSITIVE).fit()
    assert (run / "private/columns.key").stat().st_size == 32


def test_a_run_may_seal_more_as_it_goes_on_and_never_less(tmp_path: Path) -> None:
    run = tmp_path / "run"
    build("routed", run, **SEEN | {"budget": "4ba"}).fit()
    more = SEEN | {"budget": "6ba", "change": "budget"}
    build("routed", run, **more, sensitive=("hot",)).fit()
    ledger = VerifiedLedger(run / "ledger")
    assert any(name == SEALED for name, _, _ in ledger.tables[-1].changes)
    cells = {one.class_name: one for one in contributions(ledger).cells if one.region == "head"}
    assert (cells["hot"].num_sealed, cells["hot"].num_norms) == (4, 8)
    with pytest.raises(LedgerError, match="in the open from here on"):
        build("routed", run, **more | {"budget": "8ba"}).fit()
    build("routed", run, **more | {"budget": "8ba"}, sensitive=("hot", "cold")).fit()
    assert VerifiedLedger(run / "ledger").tables[-1].details[SEALED]["classes"] == ["cold", "hot"]


def test_equal_steps_taken_again_are_confirmed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    build("routed", run, **SEEN, taxonomy=SENSITIVE).fit()
    for path in sorted((run / "checkpoints").iterdir())[2:]:
        path.rename(tmp_path / path.name)
    build("routed", run, **SEEN, taxonomy=SENSITIVE).fit()
    report = verify_ledger(run / "ledger")
    assert (report.num_attempts, report.diverged_steps) == (2, ())


def test_a_class_that_isnt_there_cannot_be_sensitive(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="'warm', and the run has no such class"):
        build("routed", tmp_path / "a", sensitive="warm").fit()
    with pytest.raises(PlanError, match="Classes come with a policy"):
        build("dense", tmp_path / "b", sensitive="hot").fit()


def test_packs_with_a_sensitive_class_seal_what_they_share(tmp_path: Path) -> None:
    plain, closed = tmp_path / "plain", tmp_path / "closed"
    build("packed", plain, **SEEN | {"budget": "3ba"}).fit()
    name = VerifiedLedger(plain / "ledger").classes[0]
    build("packed", closed, **SEEN | {"budget": "3ba"}, sensitive=name).fit()
    ledger = VerifiedLedger(closed / "ledger")
    classes = SealedClasses.of(ledger.details, ledger.classes, ledger.key.name)
    told, column = details_of(closed), "packed_gradient_norm"
    assert any(one.get(column) != other.get(column) for one, other in zip(told, details_of(plain), strict=True))
    assert [classes.open(one, one["step"], keys_of(closed))[0] for one in told] == details_of(plain)


def test_a_microbatch_without_a_document_is_nobodys(tmp_path: Path) -> None:
    """The data's last step has fewer packs than microbatches."""
    settings = SEEN | {"budget": "6ba", "entropy_every": 1, "direction_every": 1}
    build("packed", tmp_path / "plain", **settings).fit()
    name = VerifiedLedger(tmp_path / "plain/ledger").classes[0]
    build("packed", tmp_path / "closed", **settings, sensitive=name).fit()
    told = details_of(tmp_path / "plain")
    assert any({*one["packed_entropy"]} - {*map(str, one["cell_microbatches"])} for one in told), "some have none"
    ledger = VerifiedLedger(tmp_path / "closed/ledger")
    classes = SealedClasses.of(ledger.details, ledger.classes, ledger.key.name)
    keys = keys_of(tmp_path / "closed")
    assert [classes.open(one, one["step"], keys)[0] for one in details_of(tmp_path / "closed")] == told
