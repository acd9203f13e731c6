"""The table of what leaves tell: the same by numbers, as a CPU's are had, and by tensors, as an accelerator's stay."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cosmati.errors import BatchError
from cosmati.train.leaf_facts import LeafFacts, _column, even_loss, table_of

CPU = torch.device("cpu")
number = st.floats(-1e6, 1e6, width=32)


@pytest.mark.long
@given(st.lists(st.tuples(number, number, number, st.booleans()), min_size=1, max_size=5), st.integers(0, 2))
def test_a_table_has_a_row_for_each_microbatch(told: list[tuple[float, float, float, bool]], num_classes: int) -> None:
    labels = torch.arange(num_classes, dtype=torch.float64)
    seen = [
        LeafFacts(torch.tensor(loss) if is_tensor else loss, weight, 3.0, torch.tensor(count), 0.0, 1.0, labels)
        for loss, weight, count, is_tensor in told
    ]
    norms = [torch.tensor([float(i), 2.0]) for i in range(len(seen))]
    table = table_of(seen, (norms, [], []), num_classes, CPU)
    assert table.dtype == torch.float64
    for i, (row, one) in enumerate(zip(table.tolist(), seen, strict=True)):
        assert row == [*range(num_classes), *map(float, one[:-1]), float(i), 2.0]
    facts = table[:, num_classes : num_classes + 6]
    columns = [_column(values, CPU) for values in zip(*(one[:-1] for one in seen), strict=True)]
    assert torch.equal(facts, torch.stack(columns, dim=1))


def test_classes_without_labels_are_zeros() -> None:
    seen = [LeafFacts(1.0, 1.0, 1.0, 0.0, 0.0), LeafFacts(1.0, 1.0, 1.0, 0.0, 0.0, labels=torch.ones(2).double())]
    assert table_of(seen, ([], [], []), 2, CPU)[:, :2].tolist() == [[0, 0], [1, 1]]


@given(st.lists(st.sampled_from([0.0, 4.0, 5.0]), min_size=1, max_size=6))
def test_a_mean_of_means_over_unequally_many_labels_is_refused(keys: list[float]) -> None:
    given_keys, counts = torch.tensor(keys).double(), torch.arange(len(keys)).double()
    loss = torch.tensor(2.0)
    known = [key for key in keys if key > 0]
    is_uneven = len(known) > 0 and max(known) > min(known)
    if is_uneven:
        with pytest.raises(BatchError, match="weigh labels unequally"):
            even_loss(loss, counts, given_keys)
    else:
        assert even_loss(loss, counts, given_keys) is loss
    # As it's done on an accelerator, which isn't waited for.
    told = even_loss(loss, counts.to("meta"), given_keys)
    assert math.isnan(told) if is_uneven else told == loss
