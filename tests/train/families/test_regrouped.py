"""A step whose rows are of several classes: regrouped by class into microbatches of unlike sizes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from cosmati.core.batch import TOMBSTONE, Batch, Lineage
from cosmati.errors import BatchError, PlanError
from cosmati.optim import SGD
from cosmati.train.step_rows import split_batch
from tests.train.families.samples import FAMILIES, TAXONOMY, WEIGHTS, in_double, oracle, policy, trainer


def mixed(class_ids: list[int], *, rows: torch.Tensor | None = None) -> Batch:
    num = len(class_ids)
    content = torch.arange(num) if rows is None else rows
    return Batch(content, Lineage(torch.arange(num) + 7, torch.tensor(class_ids)))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.sampled_from([1, 2, 4, 8]))
def test_each_row_is_in_one_microbatch_of_its_class(class_ids: list[int], num: int) -> None:
    batch, kinds = mixed(class_ids), len(set(class_ids))
    is_pure = len(class_ids) % num == 0 and all(
        len(set(class_ids[i : i + len(class_ids) // num])) == 1 for i in range(0, len(class_ids), len(class_ids) // num)
    )
    if not is_pure and not kinds <= num <= len(class_ids):
        with pytest.raises(PlanError, match=r"V = |another num_microbatches"):
            split_batch(batch, num, by_class=True)
        return
    parts = split_batch(batch, num, by_class=True)
    assert len(parts) == num
    assert sorted(row for part in parts for row in part.data.tolist()) == list(range(len(class_ids)))
    for part in parts:
        assert part.num_rows > 0
        assert part.lineage.row_ids.tolist() == [row + 7 for row in part.data.tolist()]
        assert part.data.tolist() == sorted(part.data.tolist())
        assert len({class_ids[row] for row in part.data.tolist()}) == 1
        assert is_pure or {part.class_id} == set(part.lineage.class_ids.tolist())
    if is_pure:
        assert [part.num_rows for part in parts] == [len(class_ids) // num] * num
        return
    for kind in set(class_ids):
        sizes = [part.num_rows for part in parts if part.class_id == kind]
        assert max(sizes) - min(sizes) <= 1


def test_the_largest_classes_get_more_microbatches() -> None:
    parts = split_batch(mixed([1] * 9 + [0] * 2 + [1] * 5), 4, by_class=True)
    assert [(part.class_id, part.num_rows) for part in parts] == [(0, 2), (1, 5), (1, 5), (1, 4)]


def test_rows_that_are_not_there_keep_their_class_or_go_with_the_first_that_has_one() -> None:
    for own, expected in ((2, [[0, 3], [1, 2]]), (TOMBSTONE, [[0, 2, 3], [1]])):
        batch = mixed([0, 2, own, 0])
        lineage = dataclasses.replace(batch.lineage, row_ids=torch.tensor([7, 8, TOMBSTONE, 10]))
        parts = split_batch(dataclasses.replace(batch, lineage=lineage), 2, by_class=True)
        assert [part.data.tolist() for part in parts] == expected


@pytest.mark.parametrize("name", ["transformer", "diffusion U-Net", "ResNet with frozen statistics"])
def test_a_mixed_step_learns_what_each_row_alone_may_teach(name: str) -> None:
    family = FAMILIES[name]
    network, other = family.model().double(), family.model().double()
    generator = torch.Generator().manual_seed(4)
    rows = 11
    class_ids = torch.randint(3, (rows,), generator=generator)
    whole = Batch(family.make(generator, rows), Lineage(torch.arange(rows), class_ids))
    (batch,) = in_double([whole])
    expected = oracle(family, other, split_batch(batch, 4, by_class=True), 0)
    made = trainer(family, network, [SGD(lr=1.0)], policy(family))
    made.step(batch)
    for parameter_name, parameter in other.named_parameters():
        moved = parameter - network.get_parameter(parameter_name)
        own = expected.get(parameter_name)
        torch.testing.assert_close(moved, torch.zeros_like(moved) if own is None else own, rtol=1e-9, atol=1e-12)


def test_a_scalar_over_unlike_microbatches_is_refused() -> None:
    """A mean of their means would weigh rows unequally, and a scalar tells no weight."""
    family = FAMILIES["ResNet"]
    generator = torch.Generator().manual_seed(4)
    data, lineage = family.make(generator, 7), Lineage(torch.arange(7), torch.tensor([0, 0, 1, 0, 2, 0, 0]))
    made = trainer(
        family, family.model(), [SGD(lr=1.0)], policy(family), loss=lambda m, d: F.cross_entropy(m(d[0]), d[1])
    )
    with pytest.raises(BatchError, match="weigh labels unequally"):
        made.step(Batch(data, lineage))


def test_more_classes_than_microbatches_are_refused() -> None:
    with pytest.raises(PlanError, match="6 rows of 3 classes for V = 2"):
        split_batch(mixed([0, 1, 2, 0, 1, 2]), 2, by_class=True)
    assert len(split_batch(mixed([0, 1, 2, 0, 1, 2]), 2)) == 2


def weights_of(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in network.named_parameters()}


def test_what_is_announced_as_one_class_is_not_regrouped() -> None:
    family = FAMILIES["transformer"]
    batch = Batch(family.make(torch.Generator().manual_seed(0), 4), Lineage.of_rows(0, 4), TAXONOMY.id_of("doubtful"))
    made = trainer(family, family.model(), [SGD(lr=1.0)], policy(family, WEIGHTS))
    before = weights_of(made.model)
    made.step(batch)
    after = weights_of(made.model)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if family.region_of(name) != "lower"
    }
