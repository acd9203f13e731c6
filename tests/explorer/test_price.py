"""What a policy costs: pairs by seed, Student's interval by another formula, and what can't be compared."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from cosmati.errors import RunError
from cosmati.explorer.opening import opening_sentences
from cosmati.explorer.price import Price, paired, price_of, runs_below
from cosmati.explorer.report import render_report
from cosmati.explorer.run_view import RunView
from cosmati.records.about import RunAbout
from tests.explorer.samples import demo_record, demo_run
from tests.explorer.test_report import HOSTILE, Page, plain

T_2 = 4.302652729749462
"""Student's t at 95 %, two-sided, with 2 degrees of freedom, from a printed table."""
LICENSED = "licensed/news"


def run_of(seed: int, quality: float, *, governed: bool, seconds: float = 10.0) -> RunView:
    record = demo_record()
    digests = dict(record.digests) if governed else {**record.digests, "policy": ""}
    metrics = {"loss/all": 1.0 + quality, f"loss/{LICENSED}": 2.0 + quality, "bits_per_byte": quality}
    changed = replace(
        record, seed=seed, digests=digests, metrics=metrics, seconds_by_part={"forward": seconds, "evaluation": 99.0}
    )
    about = RunAbout(quality="bits_per_byte", higher_is_better=False)
    return replace(demo_run(), record=changed, about=about if governed else None)


GOVERNED = (2.50, 2.53, 2.58)
PLAIN = (2.40, 2.45, 2.45)


def priced(governed: tuple[float, ...] = GOVERNED, without: tuple[float, ...] = PLAIN) -> Price:
    shown, *others = (run_of(seed, value, governed=True, seconds=20.0) for seed, value in enumerate(governed))
    return price_of(shown, [*others, *(run_of(seed, value, governed=False) for seed, value in enumerate(without))])


def test_the_interval_is_students_over_the_pairs() -> None:
    differences = [one - other for one, other in zip(GOVERNED, PLAIN, strict=True)]
    found = paired(differences)
    half = T_2 * statistics.stdev(differences) / math.sqrt(3)
    assert found.value == pytest.approx(statistics.fmean(differences))
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half), rel=1e-6)
    assert found.n == 3


def test_the_quality_comes_first_and_says_what_it_costs() -> None:
    price = priced()
    first = price.rows[0]
    assert (first.name, first.governed, first.ungoverned, first.verdict) == ("bits per byte", "2.537", "2.433", "worse")
    assert first.difference.startswith("+0.103 (0.0408 to 0.166, n\u00a0=\u00a03")
    assert [(one.name, one.class_name) for one in price.rows[1:]] == [
        ("loss", ""),
        ("loss", LICENSED),
        ("training time", ""),
    ]
    assert price.rows[-1].difference.startswith("2.00×"), "without evaluation"
    assert "The policy costs quality: +0.103" in price.sentence
    cost = opening_sentences([], demo_run(), price)[2]
    assert (
        "the policy costs bits per byte, 2.537 with it against 2.433 without: +0.103 (95 % interval 0.0408 to 0.166"
        in cost
    )


def test_where_no_difference_is_shown_the_opening_has_no_figure() -> None:
    price = priced((2.50, 2.40, 2.45), (2.45, 2.48, 2.41))
    assert price.rows[0].verdict == "no difference shown"
    assert "No difference is shown" in price.sentence
    assert (
        "that the policy costs bits per byte isn't shown, with 3 seeds." in opening_sentences([], demo_run(), price)[2]
    )


def test_one_seed_is_no_measure() -> None:
    price = priced(GOVERNED[:1], PLAIN[:1])
    assert price.rows[0].verdict == "one seed"
    assert "one seed shows no spread" in price.sentence
    assert "isn't shown, with 1 seed." in opening_sentences([], demo_run(), price)[2]


def test_what_has_no_partner_is_left_out_and_named() -> None:
    price = priced(GOVERNED, PLAIN[:2])
    assert price.seeds == (0, 1)
    assert price.notes[-1] == "Seeds 2 have no partner and are left out."
    assert price.twin is not None
    assert not price.twin.is_governed


def test_of_a_metric_whose_direction_nobody_told_no_verdict_is_given() -> None:
    shown, other = run_of(0, 2.5, governed=True), run_of(0, 2.4, governed=False)
    more = [run_of(1, 2.6, governed=True), run_of(1, 2.5001, governed=False)]
    price = price_of(replace(shown, about=None), [other, *more])
    assert {one.name: one.verdict for one in price.rows}["bits per byte"] == "differs"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_steps": 7}, "took 7 steps, and the governed run 1,000"),
        ({"outcome": "stopped"}, "hasn't completed"),
        ({"digests": {**demo_record().digests, "data": "other"}}, "trained on other data"),
        ({"digests": {**demo_record().digests, "policy": "other"}}, "had another policy"),
        ({"seed": 5}, "No run without a policy has a seed of the governed ones"),
        ({"metrics": {"f1": 0.5}}, "no metric in common"),
    ],
)
def test_what_cannot_be_compared_is_refused(changes: dict[str, object], words: str) -> None:
    other = run_of(0, 2.4, governed=False)
    record = replace(other.record, **changes)  # type: ignore[arg-type]
    with pytest.raises(RunError, match=words):
        price_of(run_of(0, 2.5, governed=True), [replace(other, record=record)])


def test_a_seed_twice_and_an_ungoverned_run_are_refused() -> None:
    shown, other = run_of(0, 2.5, governed=True), run_of(0, 2.4, governed=False)
    with pytest.raises(RunError, match="Two runs without the policy have the seed 0"):
        price_of(shown, [other, other])
    with pytest.raises(RunError, match="had no policy"):
        price_of(other, [other])


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is no run folder"):
        runs_below([tmp_path])


def test_the_page_shows_the_price_and_escapes_it() -> None:
    price = priced()
    rows = (replace(price.rows[0], name=HOSTILE), *price.rows[1:])
    source = plain(render_report(title="t", run=demo_run(), price=replace(price, rows=rows)))
    page = Page(source)
    assert "price" in page.ids
    assert HOSTILE in page.text
    assert source.count("<script") == 3
    assert "What the policy costs" in page.text
    assert "held out, without the policy" not in source, "the demo run has no loss on held-out rows"
