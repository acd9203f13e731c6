"""What can't be regrouped under a policy, and what nobody can say the class of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from cosmati.core.batch import TOMBSTONE, Batch, Lineage
from cosmati.data.loader import StreamingLoader
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import BatchError, DataError, PlanError
from cosmati.optim import SGD
from cosmati.train.step_rows import split_batch
from tests.train.mixed.test_bands_and_sources import Together
from tests.train.mixed.world import (
    BANDED,
    CLASS_OF,
    INPUTS,
    ONES,
    POLICY,
    TARGETS,
    chosen,
    fitted,
    loader,
    run,
    weights,
)

# ------------------------------------------------------------------------------------------------------------ refused


def as_they_come(batches: Any) -> Any:
    class Given:
        def __iter__(self) -> Iterator[Any]:
            return iter(batches)

        def __len__(self) -> int:
            return len(batches)

    return Given()


NUMBERED = Batch((INPUTS[:10], TARGETS[:10]), Lineage.of_rows(0, 10), 0)


@pytest.mark.parametrize("given", [(INPUTS[:10], TARGETS[:10]), NUMBERED, {"input": INPUTS, "target": TARGETS}])
def test_batches_without_lineage_are_refused(given: Any) -> None:
    for data, when in (([given], "made"), ((given, given), "made"), (as_they_come([chosen(range(10)), given]), "run")):
        if when == "made":
            with pytest.raises(PlanError, match=rf"A policy needs rows with classes, and {type(data).__name__} has"):
                run(data)
            continue
        made = run(data)
        with pytest.raises(PlanError, match="A policy needs rows with classes, and Given has none"):
            made.fit()
        assert made.clock.step == 1


def relabelled(class_id: int) -> Batch:
    batch = chosen(range(10))
    kinds = batch.lineage.class_ids.clone()
    kinds[3] = class_id
    return Batch(batch.data, Lineage(batch.lineage.row_ids, kinds))


def test_what_cannot_be_regrouped_is_refused() -> None:
    for batch, options, error, why in (
        (chosen(range(10)), {"num_microbatches": 2}, PlanError, "10 rows of 3 classes for V = 2"),
        (chosen(range(3)), {}, PlanError, "3 rows of . classes for V = 4"),
        (relabelled(3), {}, PlanError, "names no class"),
        (relabelled(-1), {}, PlanError, "-1 doesn't wrap"),
        (Batch((INPUTS[:9], TARGETS[:9]), chosen(range(10)).lineage), {}, BatchError, "9 rows, and its lineage 10"),
        (
            chosen(range(10)),
            {"loss": lambda m, d: nn.functional.cross_entropy(m(d[0]), d[1]), "policy": ONES},
            BatchError,
            "weigh labels unequally",
        ),
    ):
        made = run(as_they_come([batch]), **options)
        with pytest.raises(error, match=why):
            made.fit()
        assert made.clock.step == 0


def test_a_class_with_one_row_and_batch_norm_is_explained() -> None:
    rows = torch.cat([(CLASS_OF == 2).nonzero()[:7, 0], (CLASS_OF == 1).nonzero()[:1, 0]])
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="more than 1 value") as raised:
        fitted([chosen(rows)], model=model, policy=ONES)
    assert "one class may have a single row in a step" in raised.value.__notes__[0]


def test_rows_that_are_regrouped_cannot_wait() -> None:
    phases = "phases:\n  - {name: warm, until: 4ba}\n  - {name: main}\n"
    text = POLICY.replace("rules:", phases + "rules:") + "  - {class: closed, phase: warm, decision: defer}\n"
    text += "  - {class: closed, phase: main, weight: 1}\n"
    for data in (loader(), Together()):
        with pytest.raises(PlanError, match=r"defers closed, and a step's rows are regrouped .* can't wait"):
            run(data, policy=text)


def test_packs_and_bands_and_our_own_shards_are_refused(tmp_path: Path) -> None:
    tokens = torch.ones(8, 4, dtype=torch.int64)
    pack = Batch({"input": tokens, "target": tokens}, Lineage(torch.arange(8), tokens[:, 0] - 2, None, None, tokens))
    with run([pack], policy=BANDED) as made, pytest.raises(PlanError, match="packs don't say those of their tokens"):
        made.fit()
    write_dataset([{"x": 1.0}] * 8, tmp_path, {"x": "float32"}, class_of="open", source="s")
    dataset = StreamingDataset(tmp_path)
    for data in (StreamingLoader(dataset, 4), DataLoader(dataset, 4, collate_fn=chosen)):  # type: ignore[var-annotated]
        with pytest.raises(DataError, match=r"StreamingSource\(dataset, .* not by a (StreamingLoader|DataLoader)"):
            run(data)


def test_a_run_whose_length_nobody_knows_is_refused() -> None:
    with pytest.raises(PlanError, match="number of steps is known"):
        run((batch for batch in [chosen(range(10))]), budget="2ep")
    with pytest.raises(DataError, match="gives rows one by one"):
        run({"input": INPUTS})


def test_rows_of_one_class_that_do_not_divide_are_cut_unlike() -> None:
    """Which classes a batch of a loader happens to hold is nothing that a run should end by."""
    pure = (CLASS_OF == 0).nonzero().flatten()[:10]
    parts = split_batch(chosen(pure), 4, by_class=True)
    assert [part.num_rows for part in parts] == [3, 3, 2, 2]
    assert torch.cat([part.lineage.row_ids for part in parts]).tolist() == (pure + 100).tolist()


def test_a_step_of_nothing_but_tombstones_teaches_nothing() -> None:
    gone = chosen(range(10))
    gone = Batch((torch.zeros(10, 4), torch.zeros(10, dtype=torch.int64)), gone.lineage.without(torch.ones(10) > 0))
    made = run([gone], optimizers=[SGD(lr=0.1, weight_decay=0.5)], budget="1ba")
    before = weights(made)
    made.fit()
    assert torch.equal(before, weights(made))
    assert bool((gone.lineage.row_ids == TOMBSTONE).all())
