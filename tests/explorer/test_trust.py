"""The chain on the governance page: what it draws is what the ledger and the archive say, and it says `declared`."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.explorer.class_marks import class_marks, marks_of
from cosmati.explorer.report import render_report
from cosmati.explorer.run_figures import elided
from cosmati.explorer.trust import SignedSource, Trust
from cosmati.explorer.trust_drawing import MAX_REGIONS, MAX_RIBBONS, TrustDrawing, trust_drawing
from cosmati.records.governance import ContributionTotal, GovernanceFacts
from tests.explorer.samples import demo_facts, demo_run

pytestmark = pytest.mark.long

DECLARED = Trust(sources=(), opened="", policy=None, policy_digest="ab" * 32, operator="0f1e2d3c")
POLICY = SignedSource("policy/main/3", ("77" * 32,), "99" * 32, "2027-01-01", None)


def source(name: str, keys: tuple[str, ...], rows: int | None = 10) -> SignedSource:
    return SignedSource(f"taxonomy/{name}/rows/1", keys, "aa" * 32, "2027-01-01", rows)


def facts_of(rows: dict[tuple[str, str], int], classes: tuple[str, ...], regions: tuple[str, ...]) -> GovernanceFacts:
    return replace(
        demo_facts(),
        classes=classes,
        regions=regions,
        phases=("main",),
        weight={name: {"main": dict.fromkeys(regions, 1.0)} for name in classes},
        decision={name: {"main": "admit"} for name in classes},
        totals=tuple(ContributionTotal(c, r, 1, n, 1.0, 0.1) for (c, r), n in rows.items()),
    )


def area(path: str) -> float:
    """Return a ribbon's thickness at its start, from its corners."""
    ys = [float(y) for y in re.findall(r"M[\d.]+,([\d.]+)", path)]
    ends = [float(y) for y in re.findall(r"V([\d.]+)H", path)] or [float(path.rsplit(",", maxsplit=1)[-1].rstrip("Z"))]
    return abs(ends[-1] - ys[0])


@given(
    taught=st.dictionaries(
        st.tuples(st.integers(0, 19), st.integers(0, 14)), st.integers(0, 10**9), min_size=1, max_size=60
    ),
    signers=st.lists(st.integers(0, 3), min_size=20, max_size=20),
    is_narrow=st.booleans(),
    is_signed=st.booleans(),
)
def test_nothing_leaves_the_picture_and_no_ribbon_grows_at_the_policy(
    taught: dict[tuple[int, int], int], signers: list[int], is_narrow: bool, is_signed: bool
) -> None:
    classes, regions = tuple(f"c/{n}" for n in range(20)), tuple(f"r{n}" for n in range(15))
    rows = {(classes[c], regions[r]): n for (c, r), n in taught.items()}
    facts = facts_of(rows, classes, regions)
    sources = tuple(source(name, (f"{key:064d}",)) for name, key in zip(classes, signers, strict=True))
    trust = replace(DECLARED, sources=sources if is_signed else (), policy=POLICY if is_signed else None)
    found = trust_drawing(trust, facts, marks_of(classes), is_narrow=is_narrow)
    assert all(0 <= one.y <= one.y + one.height <= found.height for one in found.bars)
    assert all(0 <= one.x <= found.width and 0 < one.y < found.height for one in found.texts)
    before, after = dict[str, float](), dict[str, float]()
    for one in found.ribbons:
        side = before if "H" in one.path else after
        side[one.class_name] = side.get(one.class_name, 0.0) + area(one.path)
    assert len(before) <= MAX_RIBBONS
    for name, width in after.items():
        assert width <= before[name] + 0.8 * MAX_REGIONS
    taught_at_all = {name for (name, _), n in rows.items() if n}
    drawn = {one.class_name for one in found.ribbons if "H" in one.path}
    wanted = set(classes) if is_signed else {name for name, _ in rows}
    assert drawn | set(found.left_out) >= wanted
    cut = {one.class_name for one in found.ribbons if one.is_cut}
    assert not {name for name in cut & taught_at_all if not set(found.left_out) & set(regions)}


def words(drawing: TrustDrawing) -> list[str]:
    return [one.words for one in drawing.texts]


def test_a_class_that_is_denied_a_region_loses_that_part_of_its_width() -> None:
    regions = ("low", "high")
    rows = {("a", "low"): 100, ("a", "high"): 100, ("b", "low"): 0, ("b", "high"): 100}
    found = trust_drawing(DECLARED, facts_of(rows, ("a", "b"), regions), marks_of(("a", "b")))
    inner = {name: sum(area(o.path) for o in found.ribbons if o.class_name == name and "H" in o.path) for name in "ab"}
    outer = {name: sum(area(o.path) for o in found.ribbons if o.class_name == name and "C" in o.path) for name in "ab"}
    assert round(outer["a"], 1) == round(inner["a"], 1)
    assert round(outer["b"], 1) == round(inner["b"] / 2, 1)


def test_signers_are_grouped_and_named_by_their_keys() -> None:
    sources = (source("a", ("1" * 64,)), source("b", ("1" * 64,), 7), source("c", ("2" * 64, "3" * 64), None))
    facts = facts_of({("a", "low"): 5, ("b", "low"): 5, ("c", "low"): 0}, ("a", "b", "c"), ("low",))
    found = words(trust_drawing(replace(DECLARED, sources=sources, policy=POLICY), facts, marks_of(("a", "b", "c"))))
    assert f"signed by {'1' * 12}" in found
    assert f"signed by {'2' * 12} +1" in found
    assert [found.count(name) for name in ("a", "b", "c", "low")] == [1, 1, 1, 1]
    assert {"10 rows signed", "7 rows signed", "none came", "policy/main/3"} <= set(found)
    assert not any("declared" in text for text in found)


def test_two_signers_of_a_class_have_a_ribbon_each_by_their_rows() -> None:
    few, many = source("a", ("1" * 64,), 100), source("a", ("2" * 64,), 900)._replace(target="taxonomy/a/more/1")
    facts = facts_of({("a", "low"): 500}, ("a",), ("low",))
    drawing = trust_drawing(replace(DECLARED, sources=(few, many)), facts, marks_of(("a",)))
    before = [area(one.path) for one in drawing.ribbons if "H" in one.path]
    assert len(before) == 2
    assert before[1] / before[0] == pytest.approx(3, rel=0.02), "the root of nine times as many rows"


def test_what_nobody_has_signed_is_declared() -> None:
    facts = demo_facts()
    for is_narrow in (False, True):
        found = words(trust_drawing(DECLARED, facts, class_marks(demo_run()), is_narrow=is_narrow))
        assert sum("declared" in text for text in found) == 2
        taught = {one.class_name for one in facts.totals}
        assert {elided(name, 23) for name in taught} <= {elided(text, 23) for text in found}


def test_a_class_that_taught_without_a_signature_stands_beside_the_signed_ones() -> None:
    facts = facts_of({("a", "low"): 5, ("b", "low"): 5}, ("a", "b"), ("low",))
    trust = replace(DECLARED, sources=(source("a", ("1" * 64,)),), policy=POLICY)
    drawing = trust_drawing(trust, facts, marks_of(("a", "b")))
    assert [one.words for one in drawing.texts if one.style == "declared"] == [
        "declared: nobody has signed the classes"
    ]
    assert [one.style for one in drawing.bars].count("signer declared") == 1
    assert {one.class_name for one in drawing.ribbons} == {"a", "b"}


def test_the_page_says_declared_or_where_the_signatures_were_not_followed() -> None:
    page = render_report(title="t", run=replace(demo_run(), trust=DECLARED))
    assert page.count("<strong>Declared.</strong>") == 2
    assert page.count('<figure class="chain') == 2
    signed = replace(DECLARED, sources=(source("customer/pii", ("1" * 64,)),), policy=POLICY)
    page = render_report(title="t", run=replace(demo_run(), trust=replace(signed, missing="tuf")))
    assert "weren't followed here" in page
    assert "was followed through" not in page
    page = render_report(title="t", run=replace(demo_run(), trust=signed))
    assert "was followed through" in page


def test_nothing_is_drawn_of_signatures_that_do_not_hold() -> None:
    page = render_report(title="t", run=replace(demo_run(), trust=replace(DECLARED, problems=("another <key>",))))
    assert "another &lt;key&gt;" in page
    assert '<figure class="chain' not in page


def test_hostile_names_stay_text() -> None:
    name = '<script>alert(1)</script>"{{ 7*7 }}'
    facts = facts_of({(name, name): 3}, (name,), (name,))
    trust = replace(DECLARED, sources=(source(name, (name,)),), policy=POLICY._replace(target=name))
    page = render_report(title="t", run=replace(demo_run(), governance=facts, trust=trust, schedule=()))
    chain = page[page.index('id="chain"') : page.index('id="policy"')]
    assert "<script" not in chain
    assert "{{ 7*7 }}" in chain
