"""Steps of rows of unlike bands, and of sources that announce no class."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cosmati import InMemory
from cosmati.core.batch import Batch, Lineage
from cosmati.core.plan import Promise
from cosmati.errors import BatchError, PlanError, PolicyError
from cosmati.ledger.query import contributions
from cosmati.train.step_rows import split_batch
from tests.ledger.plain_answers import check_answers
from tests.train.mixed.world import BANDED, CLASS_OF, INPUTS, NUM, STEP, TARGETS, Seen, chosen, fitted, run, weights

pytestmark = pytest.mark.long

# ------------------------------------------------------------------------------------------------------------ bands


def test_rows_of_unlike_bands_are_regrouped_by_band() -> None:
    bands = torch.arange(NUM) % 2
    batches = [chosen(range(STEP * i, STEP * i + STEP), band=bands) for i in range(6)]
    seen = Seen()
    made = fitted(batches, policy=BANDED, budget="6ba", num_microbatches=8, observers=[seen])
    own = run(None, policy=BANDED, num_microbatches=8)
    with own:
        for batch, one in zip(batches, seen.steps, strict=True):
            lineage = batch.lineage
            kinds = sorted(set(zip(lineage.class_ids.tolist(), lineage.bands.tolist(), strict=True)))  # type: ignore[union-attr]
            told = [(b.class_id, b.band) for b in one.batches]
            assert sorted(set(told)) == kinds
            parts = []
            for number, (kind, band) in enumerate(told):
                # By hand: this kind's rows, the first of its microbatches with one more where they don't divide.
                rows = ((lineage.class_ids == kind) & (lineage.bands == band)).nonzero().flatten()
                place = number - told.index((kind, band))
                ids = rows.tensor_split(told.count((kind, band)))[place]
                parts.append(Batch(tuple(d[ids] for d in batch.data), Lineage(ids, lineage.class_ids[ids]), kind, band))
            own.step_microbatches(parts, [part.class_id for part in parts])
            assert [r.offered for r in one.routes] == [(kind, band) != (1, 0) for kind, band in told]
    assert torch.equal(weights(made), weights(own))


def test_bands_that_say_nothing_new_change_nothing() -> None:
    plain = [chosen(range(STEP * i, STEP * i + STEP)) for i in range(6)]
    banded = [chosen(range(STEP * i, STEP * i + STEP), band=torch.zeros(NUM, dtype=torch.int64)) for i in range(6)]
    assert torch.equal(*(weights(fitted(batches, policy=BANDED, budget="6ba")) for batches in (plain, banded)))


def test_a_microbatch_that_lies_about_its_bands_is_refused() -> None:
    lied = chosen([0, 1], band=torch.ones(NUM, dtype=torch.int64))
    lied = Batch(lied.data, Lineage(lied.lineage.row_ids, torch.zeros(2, dtype=torch.int64), bands=lied.lineage.bands))
    with run(None, policy=BANDED, num_microbatches=1) as made, pytest.raises(PlanError, match=r"band 0 .* bands \[1\]"):
        made.step_microbatches([lied], [0])
    mixed = Batch(lied.data, lied.lineage.mix(torch.tensor([1, 0])))
    with run(None, policy=BANDED) as made, pytest.raises(PlanError, match="don't tell the bands"):
        made.step(mixed)
    with run([chosen(range(10), band=torch.full((NUM,), 7))], policy=BANDED) as made, pytest.raises(PolicyError):
        made.fit()


@pytest.mark.parametrize("odd", [-1, 1 << 16, 1 << 40])
def test_a_number_that_is_no_band_is_refused_before_its_step(tmp_path: Path, odd: int) -> None:
    """Also where the policy has no bands: -1 is what many write for what nobody has measured."""
    bands = torch.zeros(NUM, dtype=torch.int64)
    bands[13] = odd
    made = run([chosen(range(STEP * i, STEP * i + STEP), band=bands) for i in range(2)], folder=tmp_path)
    with pytest.raises(BatchError, match="bands go from 0 to 65535"):
        made.fit()
    assert made.clock.step == 1


# ------------------------------------------------------------------------------------------------------------ sources


@dataclass(frozen=True)
class Together:
    """A source of somebody's own, whose microbatches hold rows of all classes."""

    class_names: tuple[str, ...] = ("doubtful", "closed", "open")
    digest: str = "00" * 32

    def order(self, *, seed: int, num_microbatches: int, route_pure: bool, classes: Any = None) -> Any:
        del route_pure, classes
        inner = InMemory((INPUTS, TARGETS), STEP, row_ids=torch.arange(NUM) + 100)  # refuses V = 4
        return _Mixed(inner.order(seed=seed, num_microbatches=num_microbatches, route_pure=False))


class _Mixed:
    def __init__(self, inner: Any) -> None:
        self._inner, self.steps_per_epoch, self.rows_per_step = inner, inner.steps_per_epoch, inner.rows_per_step

    def class_id(self, step: int, index: int) -> None:
        return None

    def microbatch(self, step: int, index: int) -> Batch:
        batch = self._inner.microbatch(step, index)
        ids = batch.lineage.row_ids
        of_class = torch.tensor([1, 0, 2])[CLASS_OF[ids - 100]]
        return Batch(batch.data, Lineage(ids, of_class))


def test_a_source_whose_steps_mix_classes_is_regrouped(tmp_path: Path) -> None:
    """By its own numbers of classes."""
    seen = Seen()
    made = fitted(Together(), observers=[seen])
    assert not made.plan.holds(Promise.ELASTIC)
    assert made.plan.holds(Promise.RESUME)
    own = run(None)
    with own:
        for outcome in seen.steps:
            ids = torch.cat([b.lineage.row_ids for b in outcome.batches]) - 100
            order = ids[CLASS_OF[ids].sort(stable=True).indices]
            assert len(ids) == STEP
            own.step(chosen(order))
    torch.testing.assert_close(weights(own), weights(made), rtol=1e-4, atol=1e-6)
    stopped = run(Together(), folder=tmp_path)
    with stopped:
        for _ in range(4):
            stopped._take(*stopped._next(stopped.feed))  # type: ignore[arg-type, misc]
        stopped.save()
    again = fitted(Together(), folder=tmp_path)
    assert torch.equal(weights(again), weights(made))
    told = {(c.class_name, c.region) for c in contributions(tmp_path / "ledger").cells if c.weight}
    assert told == {("open", "body"), ("open", "head"), ("doubtful", "head")}
    check_answers(tmp_path / "ledger")


KINDS = st.tuples(st.integers(0, 2), st.integers(0, 2))


@given(st.lists(KINDS, min_size=1, max_size=24), st.sampled_from([1, 2, 4, 8]))
def test_each_row_goes_to_one_microbatch_of_its_class_and_band(kinds: list[tuple[int, int]], num: int) -> None:
    rows, told = torch.arange(len(kinds)), torch.tensor(kinds)
    batch = Batch(rows, Lineage(rows + 7, told[:, 0], bands=told[:, 1]))
    announced = Batch(rows, Lineage(rows + 7, torch.full_like(rows, 1), bands=told[:, 1]), 1)
    for given_batch, expected in ((batch, kinds), (announced, [(1, band) for _, band in kinds])):
        if not len(set(expected)) <= num <= len(kinds):
            with pytest.raises(PlanError, match=r"V = |another num_microbatches"):
                split_batch(given_batch, num, by_class=True)
            continue
        parts = split_batch(given_batch, num, by_class=True)
        assert sorted(row for part in parts for row in part.data.tolist()) == rows.tolist()
        for part in parts:
            assert {expected[row] for row in part.data.tolist()} == {(part.class_id, part.band)}
            assert part.lineage.bands is not None
            assert set(part.lineage.bands.tolist()) == {part.band}


def test_rows_that_are_gone_or_mixed_keep_their_band() -> None:
    lineage = Lineage(torch.arange(3), torch.zeros(3, dtype=torch.int64), bands=torch.tensor([2, 0, 1]))
    for changed in (
        lineage.without(torch.tensor([True, False, True])),
        lineage.mix(torch.tensor([1, 2, 0])),
        pickle.loads(pickle.dumps(lineage)),
    ):
        assert changed.bands is not None
        assert changed.bands.tolist() == [2, 0, 1]
    with pytest.raises(BatchError, match="bands"):
        Batch(torch.zeros(3), replace(lineage, bands=torch.zeros(3))).check()
    with pytest.raises(BatchError, match="bands 2"):
        Batch(torch.zeros(3), replace(lineage, bands=torch.zeros(2, dtype=torch.int64))).check()
