from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmati.errors import LedgerError, RefutedError, TamperError
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.query import (
    VerifiedLedger,
    classes_of_region,
    contributions,
    direct_write_exclusion,
    direct_write_exclusions,
    logged_steps,
    regions_of_class,
)
from cosmati.ledger.writer import LedgerWriter, details_digest
from cosmati.records.ledger import MicrobatchCell, RunEntry, StepEntry

from .ledgers import CLASSES, ORIGIN, POLICY, REGIONS, append_steps, digest, write_run
from .test_verify import Item, items, write_signed

KEY = SigningKey.generate(ORIGIN)
NAMES = ["a", "b"]
AREAS = ["in", "mid", "out"]
TABLE = [[1.0, 1.0, 1.0], [0.0, 0.25, 2.0], [0.0, 0.0, 0.0]]

cells = st.tuples(
    st.integers(0, 1),
    st.integers(0, 2),
    st.integers(0, 5),
    st.sampled_from([0.0, 0.5, 3.0, 8.0]),
    st.floats(0, 100) | st.none(),
)
runs = st.lists(st.lists(cells, max_size=4), max_size=8)


def build(run: list[list[tuple[Any, ...]]]) -> list[Item]:
    details: dict[str, object] = {
        "classes": NAMES,
        "regions": AREAS,
        "routes": TABLE,
        "phases": [],
        "seed": 0,
    }
    built: list[Item] = [(RunEntry("r", (), details_digest(details)), details)]
    for step, row in enumerate(run):
        norms = {
            str(i): [None if w == 0 else norm + r for r, w in enumerate(TABLE[route])]
            for i, (_, route, _, _, norm) in enumerate(row)
            if norm is not None
        }
        step_details: dict[str, object] = {
            "step": step,
            "gradient_norm": norms,
            "update_norm": None,
            "loss": None,
        }
        microbatches = tuple(MicrobatchCell(c, 0, 0, route, n, w, digest("r")) for c, route, n, w, _ in row)
        policy = digest(f"policy {step // 3}")
        built.append((StepEntry(step, 0, policy, details_digest(step_details), None, microbatches), step_details))
    return built


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(run=runs)
def test_contributions_are_those_of_a_plain_recomputation(
    run: list[list[tuple[Any, ...]]], tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.mktemp("run") / "l"
    write_signed(path, build(run), KEY)
    table = contributions(path, vkey=KEY.verifier.text)
    assert [(c.class_name, c.region) for c in table.cells] == [(c, r) for c in NAMES for r in AREAS]
    for cell in table.cells:
        class_id, region = NAMES.index(cell.class_name), AREAS.index(cell.region)
        hits = [
            (step, m[2], m[3] * TABLE[m[1]][region], m[4])
            for step, row in enumerate(run)
            for m in row
            if m[0] == class_id and m[2] > 0 and m[3] > 0 and TABLE[m[1]][region] > 0
        ]
        norms = [h[3] + region for h in hits if h[3] is not None]
        assert cell.num_steps == len({h[0] for h in hits})
        assert cell.num_microbatches == len(hits)
        assert cell.num_rows == sum(h[1] for h in hits)
        assert cell.weight == pytest.approx(math.fsum(h[2] for h in hits))
        assert cell.num_norms == len(norms)
        assert cell.norm_sum == pytest.approx(math.fsum(norms))
        if norms:
            assert cell.norm_rms == pytest.approx(math.sqrt(math.fsum(n * n for n in norms) / len(norms)))
        else:
            assert cell.norm_rms is None
        total = math.fsum(
            m[4] + region
            for row in run
            for m in row
            if m[4] is not None and m[2] > 0 and m[3] > 0 and TABLE[m[1]][region] > 0
        )
        assert cell.norm_share == (pytest.approx(math.fsum(norms) / total) if total else None)
    for name in NAMES:
        assert regions_of_class(path, name) == tuple(
            c for c in table.cells if c.class_name == name and c.num_microbatches
        )
    for area in AREAS:
        assert classes_of_region(path, area) == tuple(c for c in table.cells if c.region == area and c.num_microbatches)


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(run=runs)
def test_an_exclusion_is_stated_exactly_where_no_microbatch_wrote(
    run: list[list[tuple[Any, ...]]], tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.mktemp("run") / "l"
    write_signed(path, build(run), KEY)
    for class_id, name in enumerate(NAMES):
        for region, area in enumerate(AREAS):
            wrote = any(m[0] == class_id and m[2] and m[3] and TABLE[m[1]][region] for row in run for m in row)
            if wrote or any(
                m[0] == class_id and TABLE[m[1]][region] and m[4] is not None and m[4] + region > 0
                for row in run
                for m in row
            ):
                with pytest.raises(RefutedError, match="statement is false"):
                    direct_write_exclusion(path, name, area)
                continue
            statement = direct_write_exclusion(path, name, area)
            assert statement.tree_size == len(run) + 1
            assert statement.num_steps_scanned == len(run)
            assert statement.num_class_microbatches == sum(m[0] == class_id for row in run for m in row)
            assert list(statement.policy_digests) == [digest(f"policy {p}").hex() for p in range(-(-len(run) // 3))]
            assert statement.evidence_level.startswith("L0")


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(run=runs)
def test_logged_steps_are_those_of_a_plain_recomputation(
    run: list[list[tuple[Any, ...]]], tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.mktemp("run") / "l"
    write_signed(path, build(run), KEY)
    found = list(logged_steps(VerifiedLedger(path, KEY.verifier.text)))
    assert [one.step for one in found] == list(range(len(run)))
    for one, row in zip(found, run, strict=True):
        assert one.class_names == tuple(NAMES[m[0]] for m in row if m[2] > 0)
        expected: dict[tuple[str, str], list[float]] = {}
        for class_id, route, _, _, norm in row:
            for r, weight in enumerate(TABLE[route]):
                if norm is not None and weight:
                    expected.setdefault((NAMES[class_id], AREAS[r]), []).append(norm + r)
        assert one.norms == pytest.approx({key: sum(norms) for key, norms in expected.items()})


def test_superseded_steps_are_not_among_the_logged(tmp_path: Path) -> None:
    writer = write_run(tmp_path / "l", KEY, 6)
    writer.append(writer.resume_entry(2))
    append_steps(writer, range(2, 4), attempt=1, salt="again")
    writer.close()
    assert [one.step for one in logged_steps(tmp_path / "l")] == [0, 1, 2, 3]


def test_many_exclusions_are_the_single_ones(tmp_path: Path) -> None:
    write_signed(tmp_path / "l", build([[(0, 1, 3, 1.0, None), (1, 2, 2, 1.0, None)]] * 3), KEY)
    pairs = [("a", "in"), ("b", "out"), ("b", "in")]
    found = direct_write_exclusions(tmp_path / "l", pairs)
    assert found == tuple(direct_write_exclusion(tmp_path / "l", *pair) for pair in pairs)
    assert [(one.class_name, one.region, one.num_class_microbatches) for one in found] == [(*p, 3) for p in pairs]
    assert direct_write_exclusions(tmp_path / "l", []) == ()
    with pytest.raises(RefutedError, match=r"gave rows of 'a' weight 0\.25 in 'mid'"):
        direct_write_exclusions(tmp_path / "l", [*pairs, ("a", "mid")])


@pytest.mark.parametrize("pairs", [[("a", "mid"), ("b", "in")], [("b", "in"), ("a", "mid")]])
def test_the_first_microbatch_that_wrote_is_named_whichever_pair_it_belongs_to(tmp_path: Path, pairs: Any) -> None:
    write_signed(tmp_path / "l", build([[(0, 1, 3, 1.0, None), (1, 0, 2, 1.0, None)]] * 3), KEY)
    with pytest.raises(RefutedError, match=r"step 0\), microbatch 0, gave rows of 'a' weight 0\.25 in 'mid'"):
        direct_write_exclusions(tmp_path / "l", pairs)
    write_signed(tmp_path / "other", build([[(1, 0, 2, 1.0, None), (0, 1, 3, 1.0, None)]] * 3), KEY)
    with pytest.raises(RefutedError, match=r"step 0\), microbatch 0, gave rows of 'b' weight 1\.0 in 'in'"):
        direct_write_exclusions(tmp_path / "other", pairs)


def test_superseded_steps_do_not_contribute_and_still_deny_an_exclusion(tmp_path: Path) -> None:
    with write_run(tmp_path / "l", KEY, 4) as writer:
        append_steps(writer, range(4, 8))
        writer.append(writer.resume_entry(4))
        append_steps(writer, range(4, 5), attempt=1)
    write_run(tmp_path / "straight", KEY, 5).close()
    assert contributions(tmp_path / "l").cells == contributions(tmp_path / "straight").cells

    path = tmp_path / "regretted"
    with LedgerWriter.create(path, origin=ORIGIN, key=KEY) as writer:
        built = build([[(0, 0, 1, 1.0, None)]])
        writer.append(*built[0])
        writer.append(*built[1])
        writer.append(writer.resume_entry(0))
    assert regions_of_class(path, "a") == ()
    with pytest.raises(RefutedError, match="statement is false"):
        direct_write_exclusion(path, "a", "in")


def test_the_answer_carries_the_tree_it_was_drawn_from(tmp_path: Path) -> None:
    with write_run(tmp_path / "l", KEY, 6) as writer:
        head = writer.checkpoint()
    table = contributions(tmp_path / "l")
    assert (table.origin, table.tree_size, table.root) == (ORIGIN, head.size, head.root.hex())
    assert (table.num_steps, table.classes, table.regions) == (6, tuple(CLASSES), tuple(REGIONS))
    statement = direct_write_exclusion(tmp_path / "l", "private", "near_input")
    assert (statement.root, statement.policy_digests) == (head.root.hex(), (POLICY.hex(),))
    with pytest.raises(RefutedError, match=r"step 0.*microbatch 1.*'news'"):
        direct_write_exclusion(tmp_path / "l", "news", "near_output")


def test_unknown_names_and_empty_ledgers_are_named(tmp_path: Path) -> None:
    write_run(tmp_path / "l", KEY, 1).close()
    with pytest.raises(LedgerError, match=r"no class 'x'.*open, news, private"):
        regions_of_class(tmp_path / "l", "x")
    with pytest.raises(LedgerError, match="no region 'x'"):
        classes_of_region(tmp_path / "l", "x")
    with pytest.raises(LedgerError, match="no region 'x'"):
        direct_write_exclusion(tmp_path / "l", "news", "x")
    write_signed(tmp_path / "empty", [], KEY)
    with pytest.raises(LedgerError, match="is empty"):
        contributions(tmp_path / "empty")


@pytest.mark.parametrize("query", [contributions, lambda p: direct_write_exclusion(p, "news", "near_input")])
def test_no_answer_is_drawn_from_a_ledger_that_does_not_verify(tmp_path: Path, query: Any) -> None:
    write_signed(tmp_path / "l", items(4), KEY)
    query(tmp_path / "l")
    details = (tmp_path / "l/details.jsonl").read_bytes()
    (tmp_path / "l/details.jsonl").write_bytes(details.replace(b'"step":3', b'"step":4'))
    with pytest.raises(TamperError, match="byte"):
        query(tmp_path / "l")


@pytest.mark.parametrize(
    "change",
    [
        {"gradient_norm": {"0": [1.0]}},
        {"gradient_norm": {"0": [1.0, -1.0, 0.0]}},
        {"gradient_norm": {"0": [1.0, True, 0.0]}},
        {"gradient_norm": {"1": [1.0, 1.0, 1.0]}},
        {"gradient_norm": {"00": [1.0, 1.0, 1.0]}},
        {"gradient_norm": {"x": [1.0, 1.0, 1.0]}},
    ],
)
def test_details_that_break_the_contract_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    built = build([[(0, 0, 1, 1.0, 1.0)]])
    entry, details = built[1]
    assert isinstance(entry, StepEntry)
    assert details is not None
    details = {**details, **change}
    entry = StepEntry(0, 0, entry.policy_digest, details_digest(details), None, entry.microbatches)
    write_signed(tmp_path / "l", [built[0], (entry, details)], KEY)
    with pytest.raises(TamperError, match="contract"):
        contributions(tmp_path / "l")


@pytest.mark.parametrize(
    "change",
    [
        {"classes": None},
        {"regions": ["in", "in", "out"]},
        {"routes": [[1.0]]},
        {"routes": [[1.0, 1.0, -1.0]]},
    ],
)
def test_tables_that_break_the_contract_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    details = json.loads(json.dumps(build([])[0][1])) | change
    write_signed(tmp_path / "l", [(RunEntry("r", (), details_digest(details)), details)], KEY)
    with pytest.raises(TamperError, match="contract"):
        contributions(tmp_path / "l")


def test_a_microbatch_outside_of_the_tables_is_refused(tmp_path: Path) -> None:
    write_signed(tmp_path / "l", build([[(1, 2, 1, 1.0, None)]])[:1] + [step_of(5, 0), step_of(0, 7)][:1], KEY)
    with pytest.raises(TamperError, match="isn't in the tables"):
        contributions(tmp_path / "l")


def step_of(class_id: int, route_id: int) -> Item:
    details: dict[str, object] = {"step": 0, "gradient_norm": {}, "update_norm": None, "loss": None}
    cell = MicrobatchCell(class_id, 0, 0, route_id, 1, 1.0, digest("r"))
    return StepEntry(0, 0, POLICY, details_digest(details), None, (cell,)), details
