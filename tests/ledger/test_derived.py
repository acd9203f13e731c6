"""Answers from derived tables against plain loops over the same run, and tables that aren't the ledger's."""

from __future__ import annotations

import csv
import json
import math
import shutil
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmati.errors import LedgerError, RefutedError, TamperError
from cosmati.ledger.derived import folder
from cosmati.ledger.derived.answers import num_standing, policy_effects, steps_taught, taught
from cosmati.ledger.derived.folder import place_of
from cosmati.ledger.derived.opened import DerivedLedger, fingerprint, open_derived, open_proven
from cosmati.ledger.derived.views import COLUMNS, run_sql, written
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.query import contributions, direct_write_exclusion
from cosmati.records.ledger import CheckpointEntry, EndEntry, ResumeEntry

from .ledgers import ORIGIN
from .random_runs import PlainRun, hits, random_run, spans_by_loops, taught_by_loops
from .test_verify import Item, write_signed

duckdb = pytest.importorskip("duckdb", reason="the extra `queries` isn't installed")

pytestmark = pytest.mark.long
KEY = SigningKey.generate(ORIGIN)
seeds = st.integers(0, 1 << 30)


def check_taught(derived: DerivedLedger, run: PlainRun, steps: list[Any], **asked: Any) -> None:
    expected = taught_by_loops(run, steps, asked.get("each", ""))
    found = taught(derived, **asked)
    assert {(o.group, o.contribution.class_name, o.contribution.region) for o in found} >= set(expected)
    sums = {key: sum(e["norms"]) for key, e in expected.items()}
    for one in found:
        cell = one.contribution
        key = one.group, cell.class_name, cell.region
        e = expected.get(key, {"steps": set(), "microbatches": 0, "rows": 0, "weight": 0.0, "norms": []})
        assert (cell.num_steps, cell.num_microbatches) == (len(e["steps"]), e["microbatches"])
        assert (cell.num_rows, cell.num_norms) == (e["rows"], len(e["norms"]))
        assert cell.weight == pytest.approx(e["weight"])
        assert cell.norm_sum == pytest.approx(sum(e["norms"]))
        assert (one.first_step, one.last_step) == (min(e["steps"], default=-1), max(e["steps"], default=-1))
        total = sum(v for (group, _, region), v in sums.items() if (group, region) == (one.group, cell.region))
        assert cell.norm_share == (pytest.approx(sum(e["norms"]) / total) if total else None)
        if e["norms"]:
            assert cell.norm_rms == pytest.approx((sum(n * n for n in e["norms"]) / len(e["norms"])) ** 0.5)


@settings(max_examples=8, deadline=None)
@given(seed=seeds)
def test_every_question_is_answered_as_by_plain_loops(seed: int, tmp_path_factory: Any) -> None:
    run, path = random_run(seed), tmp_path_factory.mktemp("run") / "ledger"
    write_signed(path, run.items, KEY)
    with open_derived(path) as derived:
        for each in ("", "phase", "policy"):
            check_taught(derived, run, run.standing, each=each)
        for entry, step, standing in run.checkpoints:
            at = next(one for one in derived.milestones if one.entry == entry)
            assert (at.step, num_standing(derived, at)) == (step, step)
            check_taught(derived, run, standing, at=at)
            reached = {one.step for one, *_ in hits(run, standing)}
            assert list(steps_taught(derived, at=at)) == spans_by_loops(reached)
        assert num_standing(derived) == len(run.standing)
        found = list(hits(run, run.standing))
        for name in derived.classes:
            for region in derived.regions:
                steps = {one.step for one, _, own, r, _ in found if r == region and name in (own, *own.split("&"))}
                assert list(steps_taught(derived, name, region)) == spans_by_loops(steps)
                own = {one.step for one, _, c, r, _ in found if (c, r) == (name, region)}
                assert list(steps_taught(derived, name, region, joint=False)) == spans_by_loops(own)
    table = contributions(path)
    assert [c.num_rows for c in table.cells] == [o.contribution.num_rows for o in _plain_taught(path)]


@settings(max_examples=8, deadline=None)
@given(seed=seeds)
def test_checkpoints_and_ends_are_told_with_their_entry_and_step(seed: int, tmp_path_factory: Any) -> None:
    run, path = random_run(seed), tmp_path_factory.mktemp("run") / "ledger"
    items = list(run.items)
    last = next((e.step for e, _ in reversed(items) if isinstance(e, CheckpointEntry)), None)
    if last is not None and isinstance(items[-1][0], CheckpointEntry):
        items.append((EndEntry(last, "completed", bytes(range(32))), None))
    write_signed(path, items, KEY)
    expected = [
        (n, e.step, e.state_digest.hex() if isinstance(e, CheckpointEntry) else "", e.parameter_root.hex())
        for n, (e, _) in enumerate(items)
        if isinstance(e, CheckpointEntry | EndEntry)
    ]
    with open_derived(path) as derived:
        assert [(one.entry, one.step, one.state_digest, one.root) for one in derived.milestones] == expected
        latest = {step: number for number, step, _, _ in expected}
        assert {step: derived.milestone(step=step).entry for step in latest} == latest
        by_state = {digest: number for number, _, digest, _ in expected if digest}
        assert {digest: derived.milestone(state_digest=digest).entry for digest in by_state} == by_state
        with pytest.raises(LedgerError, match=r"no checkpoint with the digest 00000000\. It has some after "):
            derived.milestone(state_digest="00000000", step=next(iter(latest), None))
        ended = [one.outcome for one in derived.milestones if one.outcome]
    assert ended == [e.outcome for e, _ in items if isinstance(e, EndEntry)]


def _plain_taught(path: Path) -> Any:
    with open_derived(path) as derived:
        return taught(derived)


@settings(max_examples=40, deadline=None)
@given(seed=seeds)
def test_an_exclusion_is_stated_exactly_where_no_step_ever_wrote(seed: int, tmp_path_factory: Any) -> None:
    run, path = random_run(seed), tmp_path_factory.mktemp("run") / "ledger"
    write_signed(path, run.items, KEY)
    wrote = {(name, region) for _, _, own, region, _ in hits(run, run.seen) for name in {own, *own.split("&")}}
    for one in run.seen:
        t = run.tables[one.epoch]
        for cell, row in one.norms.items():
            own = t.classes[one.cells[cell][0]]
            wrote |= {(n, r) for r, v in zip(t.regions, row, strict=True) if v for n in {own, *own.split("&")}}
    for name in {name for t in run.tables for name in t.classes}:
        for region in {region for t in run.tables for region in t.regions}:
            if (name, region) in wrote:
                with pytest.raises(RefutedError, match="The statement is false"):
                    direct_write_exclusion(path, name, region)
            else:
                found = direct_write_exclusion(path, name, region)
                cells = [run.tables[o.epoch].classes[c[0]] for o in run.seen for c in o.cells]
                assert found.num_class_microbatches == sum(name in {own, *own.split("&")} for own in cells)
                assert found.num_steps_scanned == len(run.seen)
                without = [o for o in run.seen if region not in run.tables[o.epoch].regions]
                assert found.num_steps_without_region == len(without)


@settings(max_examples=10, deadline=None)
@given(seed=seeds)
def test_what_a_change_of_policy_did_is_the_difference_of_its_tables(seed: int, tmp_path_factory: Any) -> None:
    run, path = random_run(seed, 40), tmp_path_factory.mktemp("run") / "ledger"
    write_signed(path, run.items, KEY)
    begins = [0, *(entry.step for entry, _ in run.items if type(entry).__name__ == "AmendEntry")]  # type: ignore[union-attr]
    expected = set()
    for epoch, begin in list(enumerate(begins))[1:]:
        for phase, (name, _, end) in enumerate(run.tables[0].phases):
            if end > begin and run.tables[epoch].policy:
                was, now = (_cells(run, number, phase) for number in (epoch - 1, epoch))
                keys = {key for key in {*was, *now} if was.get(key) != now.get(key)}
                expected |= {(epoch, name, *key, was.get(key), now.get(key)) for key in keys}
    with open_derived(path) as derived:
        found = {
            (
                *(e.policy_epoch, e.phase, e.class_name, e.band, e.region),
                None if e.before is None else (e.before, e.decision_before),
                None if e.after is None else (e.after, e.decision_after),
            )
            for e in policy_effects(derived)
        }
    assert found == expected


def _cells(run: PlainRun, epoch: int, phase: int) -> dict[tuple[str, str, str], tuple[float, str]]:
    t = run.tables[epoch]
    bands = t.bands or [""]
    return {
        (name, band, region): (weights[phase][column], decisions[phase])
        for i, name in enumerate(t.classes)
        for j, band in enumerate(bands)
        for weights, decisions in [t.policy[i * len(bands) + j]]
        for column, region in enumerate(t.regions)
    }


@settings(max_examples=6, deadline=None)
@given(seed=seeds)
def test_sql_sees_what_each_cell_taught(seed: int, tmp_path_factory: Any) -> None:
    run, path = random_run(seed), tmp_path_factory.mktemp("run") / "ledger"
    write_signed(path, run.items, KEY)
    expected = []
    for one, cell, name, region, weight in hits(run, run.seen):
        t = run.tables[one.epoch]
        norm = one.norms.get(cell, [None] * 3)[t.regions.index(region)]
        band = t.bands[one.cells[cell][1]] if t.bands else ""
        phase = one.cells[cell][2]
        named = t.phases[phase][0] if phase < len(t.phases) else ""
        row = (one.entry, one.step, one in run.standing, one.epoch, cell, name, band, named, region, one.cells[cell][4])
        expected.append((*row, pytest.approx(weight), norm))
    sql = (
        "SELECT entry, step, stands, policy_epoch, cell, class, band, phase, region, rows, weight, gradient_norm "
        "FROM taught ORDER BY entry, cell, region"
    )
    assert asked(path, sql) == sorted(expected, key=lambda row: (row[0], row[4], row[8]))
    steps = [(one.entry, one.step, one in run.standing, len(one.cells)) for one in run.seen]
    joined = "steps s LEFT JOIN cells c USING (entry)"
    counted = f"SELECT s.entry, s.step, s.stands, count(c.cell) FROM {joined} GROUP BY ALL ORDER BY 1"
    assert asked(path, counted) == steps


@settings(max_examples=8, deadline=None)
@given(seed=seeds)
def test_sql_sees_where_each_attempt_began_and_which_of_its_steps_stand(seed: int, tmp_path_factory: Any) -> None:
    run, path = random_run(seed, 40), tmp_path_factory.mktemp("run") / "ledger"
    write_signed(path, run.items, KEY)
    begun = [(0, 0)] + [(n, one.from_step) for n, (one, _) in enumerate(run.items) if isinstance(one, ResumeEntry)]
    # Of an attempt, those steps stand that no later one has taken up, by whichever it was.
    ends = [min((step for _, step in begun[number + 1 :]), default=None) for number in range(len(begun))]
    expected = [(number, *start, end) for number, (start, end) in enumerate(zip(begun, ends, strict=True))]
    assert asked(path, "SELECT * FROM attempts ORDER BY 1") == expected


def asked(path: Path, sql: str, **options: Any) -> list[tuple[Any, ...]]:
    with open_derived(path) as derived:
        return list(run_sql(derived, sql, **options)[1])


# --------------------------------------------------------------------------------------------- as the ledger grows


def long_run(seed: int) -> list[Item]:
    return random_run(seed, 900).items


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_tables_that_grow_with_the_ledger_are_those_made_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(folder, "PART_ROWS", 1)
    items = long_run(seed)
    path = tmp_path / "grown" / "ledger"
    for size in (1, 3, 255, 256, 257, 600, 768, len(items)):
        write_signed(path, items[:size], KEY)
        with open_derived(path) as derived:
            assert derived.index.tree_size == size
            ends = [part.end for part in derived.index.parts]
            assert ends == sorted({*range(256, size, 256), size})
    write_signed(tmp_path / "once" / "ledger", items, KEY)
    with open_derived(path) as grown, open_derived(tmp_path / "once" / "ledger") as once:
        assert fingerprint(grown, below=len(items)) == fingerprint(once, below=len(items))
        assert taught(grown, each="policy") == taught(once, each="policy")
        num_rows = sum(one.files["steps"][1] for one in grown.index.parts)
        assert num_rows == sum(type(entry).__name__ == "StepEntry" for entry, _ in items)


def test_only_what_is_new_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "PART_ROWS", 1)
    items, path = long_run(5), tmp_path / "ledger"
    write_signed(path, items[:700], KEY)
    with open_derived(path):
        pass
    write_signed(path, items, KEY)
    bundles = list[int]()
    read = folder.ColumnScan._read_bundle
    monkeypatch.setattr(folder.ColumnScan, "_read_bundle", lambda self, n: (bundles.append(n), read(self, n))[1])
    with open_derived(path):
        assert bundles == [2, 3]
    with open_derived(path):
        assert bundles == [2, 3], "nothing is new"


# ----------------------------------------------------------------------------------------- tables that aren't its own


@pytest.fixture
def path(tmp_path: Path) -> Path:
    items = random_run(11, 60).items
    write_signed(tmp_path / "ledger", items, KEY)
    with open_derived(tmp_path / "ledger"):
        return tmp_path / "ledger"


def changed_index(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = place_of(path) / "tables.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


def refused(path: Path, match: str) -> None:
    with pytest.raises(TamperError, match=match) as error, open_derived(path) as derived:
        taught(derived)
    assert "ledger derive RUN --anew" in str(error.value)
    with open_derived(path, anew=True) as derived:
        taught(derived)
    with open_derived(path) as derived:
        taught(derived)


def test_a_changed_missing_or_exchanged_file_is_found(path: Path) -> None:
    files = sorted(place_of(path).glob("*.parquet"))
    assert {file.name.split("-")[0] for file in files} == {"steps", "cells", "norms", "learnt"}
    for file in files:
        data = file.read_bytes()
        file.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        refused(path, "was changed since it was derived")
    file.unlink()
    refused(path, "is missing")


def test_tables_of_another_run_are_refused(path: Path, tmp_path: Path) -> None:
    for key, match in ((SigningKey.generate(ORIGIN), "under another key"), (KEY, "aren't the first entries")):
        other = tmp_path / match / "ledger"
        write_signed(other, random_run(12, 30).items, key)
        with open_derived(other):
            pass
        for file in place_of(path).iterdir():
            file.unlink()
        for file in place_of(other).iterdir():
            (place_of(path) / file.name).write_bytes(file.read_bytes())
        refused(path, match)


def test_tables_of_a_ledger_that_was_cut_back_or_rewritten_are_refused(path: Path) -> None:
    items = random_run(11, 60).items
    for others, match in (
        (items[:40], "the ledger was cut back"),
        (random_run(13, 80).items, "aren't the first entries"),
    ):
        shutil.rmtree(path)
        write_signed(path, others, KEY)
        refused(path, match)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda index: index.update(format="cosmati-derived/9"), "this release reads"),
        (lambda index: index.update(root="00" * 32), "aren't the first entries"),
        (lambda index: index.pop("sets"), "is damaged"),
        (lambda index: index["rare"].pop(0), "doesn't fit the ledger"),
        (lambda index: index["rare"][0].update(details_at=3), "doesn't fit the ledger"),
        (lambda index: index["rare"][0].update(data="!"), "doesn't fit the ledger"),
        (lambda index: index.update(sets=index["sets"][:1]), "don't say what derived tables say"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(
    path: Path, change: Callable[[dict[str, Any]], None], match: str
) -> None:
    changed_index(path, change)
    refused(path, match)


def test_a_forger_of_tables_and_index_is_found_by_reading_the_entries(path: Path) -> None:
    """Nothing signs the tables: so a quick answer may be a forger's, and a proof never is."""
    with open_derived(path) as derived:
        honest = taught(derived)
    with open_proven(path) as (derived, was_other):
        assert not was_other
    index = folder.read_index(place_of(path))
    assert index is not None
    file = place_of(path) / index.parts[0].name_of("cells")
    with duckdb.connect() as database:
        database.execute(f"CREATE TABLE t AS SELECT * REPLACE (0 AS reaches, 0 AS opens) FROM '{file}'")
        database.execute(f"COPY t TO '{file}' (FORMAT parquet)")
    digest = folder.hashlib.sha256(file.read_bytes()).hexdigest()
    changed_index(path, lambda index: index["parts"][0]["files"]["cells"].__setitem__(0, digest))
    with open_derived(path) as derived:
        assert taught(derived) != honest
    with open_proven(path) as (derived, was_other):
        assert was_other
        assert taught(derived) == honest


def test_no_table_is_made_of_a_ledger_that_does_not_verify(tmp_path: Path) -> None:
    write_signed(tmp_path / "ledger", random_run(11, 60).items, KEY)
    details = tmp_path / "ledger" / "details.jsonl"
    details.write_bytes(details.read_bytes().replace(b'"loss":0.5', b'"loss":0.4', 1))
    with pytest.raises(TamperError, match="doesn't hold the details"), open_derived(tmp_path / "ledger"):
        pass
    assert not (place_of(tmp_path / "ledger") / "tables.json").exists()
    write_signed(tmp_path / "empty", [], KEY)
    with pytest.raises(LedgerError, match="is empty"), open_derived(tmp_path / "empty"):
        pass


# ----------------------------------------------------------------------------------------------------------- SQL alone


REFUSED = (
    "SELECT * FROM read_text('/etc/passwd')",
    "SELECT * FROM read_parquet('https://example.com/x.parquet')",
    "COPY (SELECT 1 AS x) TO '{cells}'",
    "ATTACH '{folder}/new.db'",
    "SET enable_external_access = true",
    "WITH gone AS (DELETE FROM classes RETURNING *) SELECT * FROM gone",
    "SELECT 1; SELECT 2",
)
REFUSED_TOO = (
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM '/etc/passwd'",
    "SELECT * FROM glob('/etc/*')",
    "COPY (SELECT 1) TO '{folder}/new.csv'",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SET lock_configuration = false",
    "EXPORT DATABASE '{folder}/new'",
    "INSERT INTO classes VALUES (9, 9, 'x')",
    "CREATE TABLE mine (x INTEGER)",
    "DROP VIEW cells",
    "PRAGMA database_list",
    "COMMIT",
    "",
    "SELECT nonsense FROM cells",
    "SELECT * FROM columns",
    "not SQL",
)


@pytest.mark.parametrize("sql", [*REFUSED, *(pytest.param(one, marks=pytest.mark.slow) for one in REFUSED_TOO)])
def test_sql_reads_the_tables_and_can_do_nothing_else(path: Path, sql: str) -> None:
    (cells,) = place_of(path).glob("cells-*.parquet")
    before = {file: file.read_bytes() for file in place_of(path).iterdir()}
    with pytest.raises(LedgerError):
        asked(path, sql.format(folder=path.parent, cells=cells))
    assert {file: file.read_bytes() for file in place_of(path).iterdir()} == before
    assert {file.name for file in path.parent.iterdir()} == {"ledger", "derived"}


def test_sql_that_takes_too_long_is_stopped(path: Path) -> None:
    sql = "SELECT count(*) FROM range(100000000) a, range(100000000) b WHERE a.range * b.range = -1"
    with pytest.raises(LedgerError, match=r"longer than 0\.2 seconds"):
        asked(path, sql, seconds=0.2)


def test_every_view_has_the_columns_that_the_docs_promise(path: Path) -> None:
    text = Path("docs/queries.md").read_text()
    with open_derived(path) as derived:
        names = {name: run_columns(derived.ledger, name) for name in COLUMNS}
    for name, columns in COLUMNS.items():
        assert names[name] == list(columns)
        line = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        assert [column for column in columns if f"`{column}`" not in line] == []


def run_columns(ledger: Path, view: str) -> list[str]:
    with open_derived(ledger) as derived:
        return run_sql(derived, f"SELECT * FROM {view} LIMIT 0")[0]


def test_rows_are_written_for_people_for_tables_and_for_programs() -> None:
    rows = [(1, 0.123456789, "=1+1", None), (2, math.inf, 'a "b"', {7: [math.nan, (1, Decimal("0.5"))]})]
    names = ("n", "x", "text", "more")
    told = [json.loads(line) for line in written(names, iter(rows), "json")]
    assert told == [
        {"n": 1, "x": 0.123456789, "text": "=1+1", "more": None},
        {"n": 2, "x": "inf", "text": 'a "b"', "more": {"7": ["nan", [1, "0.5"]]}},
    ]
    table = list(csv.reader(written(names, iter(rows), "csv")))
    assert table[:2] == [[*names], ["1", "0.123456789", "'=1+1", ""]]
    assert table[2][:3] == ["2", "inf", 'a "b"']
    lines = list(written(names[:3], iter([row[:3] for row in rows]), "table"))
    assert [line.split(None, 2) for line in lines[1:]] == [["1", "0.123457", "=1+1"], ["2", "inf", 'a "b"']]
    assert len({line.index(word) for line, word in zip(lines, ("text", "=1+1", 'a "b"'), strict=True)}) == 1


def test_what_is_asked_of_unknown_names_is_refused(path: Path) -> None:
    with open_derived(path) as derived:
        for names, kind in (("nobody", derived.regions[0]), "class"), ((derived.classes[0], "nowhere"), "region"):
            with pytest.raises(LedgerError, match=kind):
                steps_taught(derived, *names)
