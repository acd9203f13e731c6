"""10,000 random tamperings with all that a run hands out: each is found, or has changed nothing that is covered.

By default a sample; all of them with `pytest -m slow tests/tampering`. Trees and proofs are judged by Go's `sumdb`,
too, where it's installed: what it takes has to be what was signed, and what it refuses ours has to refuse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .ledger_trials import ForkTarget, LedgerTarget
from .proof_trials import ConsistencyTarget, InclusionTarget
from .sumdb import Sumdb, has_sumdb, sumdb
from .trials import FOUND, HARMLESS, Target, campaign

pytestmark = pytest.mark.long

Making = Callable[[Path, Sumdb | None], Target]


def _tables(folder: Path, _: Sumdb | None) -> Target:
    pytest.importorskip("duckdb", reason="the extra `queries` isn't installed")
    from .table_trials import TablesTarget

    return TablesTarget(folder)


def _weights(folder: Path, _: Sumdb | None) -> Target:
    from .weight_trials import WeightsTarget

    return WeightsTarget(folder)


def _bundle(folder: Path, _: Sumdb | None) -> Target:
    pytest.importorskip("tuf", reason="the extra `authority` isn't installed")
    pytest.importorskip("model_signing", reason="the extra `audit` isn't installed")
    from .bundle_trials import BundleTarget

    return BundleTarget(folder)


TARGETS: dict[str, tuple[Making, int, int]] = {
    "ledger": (lambda folder, outside: LedgerTarget(folder, 12, outside), 50, 4000),
    "long ledger": (lambda folder, outside: LedgerTarget(folder, 270, outside), 4, 500),
    "fork": (ForkTarget, 20, 1000),
    "inclusion": (InclusionTarget, 100, 1500),
    "consistency": (ConsistencyTarget, 100, 500),
    "checkpoint": (_weights, 40, 1000),
    "tables": (_tables, 4, 500),
    "bundle": (_bundle, 5, 1000),
}
"""What makes each, and how often it's tampered with by default and in the whole campaign."""


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sumdb | None]:
    with sumdb(tmp_path_factory.mktemp("sumdb")) as found:
        yield found


def _run(name: str, folder: Path, outside: Sumdb | None, seeds: range) -> Counter[tuple[str, str, str]]:
    target = TARGETS[name][0](folder, outside)
    target.check_untouched()
    counts, wrong = campaign(target, seeds)
    assert wrong == [], counts
    assert {how for _, how, _ in counts} <= {FOUND, HARMLESS}
    return counts


@pytest.mark.parametrize("name", TARGETS)
def test_a_sample_of_tamperings_is_found_or_harmless(name: str, tmp_path: Path, outside: Sumdb | None) -> None:
    counts = _run(name, tmp_path, outside, range(TARGETS[name][1]))
    assert sum(number for (_, how, _), number in counts.items() if how == FOUND) >= counts.total() / 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TARGETS)
def test_ten_thousand_tamperings_are_found_or_harmless(
    name: str, tmp_path: Path, outside: Sumdb | None, capsys: pytest.CaptureFixture[str]
) -> None:
    number = TARGETS[name][2]
    counts = _run(name, tmp_path, outside, range(number))
    with capsys.disabled():
        for (kind, how, by), num in sorted(counts.items()):
            print(f"{name} | {kind} | {how} | outside: {by or 'not asked'} | {num}")  # noqa: T201
    found = sum(num for (_, how, _), num in counts.items() if how == FOUND)
    assert number / 3 <= found <= number
    assert counts.total() == number


def test_the_whole_campaign_is_ten_thousand() -> None:
    assert sum(number for _, _, number in TARGETS.values()) == 10_000


@pytest.mark.skipif(not has_sumdb(), reason="Go's sumdb isn't there: apt-get install golang-go golang-golang-x-mod-dev")
def test_other_peoples_verifier_says_the_same_of_trees_and_proofs(tmp_path: Path, outside: Sumdb | None) -> None:
    assert outside is not None
    for name, num in (("fork", 20), ("inclusion", 100), ("consistency", 100)):
        counts = _run(name, tmp_path / name, outside, range(10_000, 10_000 + num))
        told = Counter(by for (_, how, by), number in counts.items() for _ in range(number) if how == FOUND)
        assert told[FOUND] > told["taken"], (name, "details aren't the tree's, and most tamperings are with the tree")
        assert not any(by == FOUND for _, how, by in counts if how == HARMLESS)
