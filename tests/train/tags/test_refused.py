"""Where nobody can say which rows they are, a run under a policy refuses; and the lie that only content shows."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cosmati.core.batch import TOMBSTONE, Batch, Lineage
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Classification, LanguageModel
from cosmati.core.method import Method, Position, Stage
from cosmati.data.in_memory import InMemory
from cosmati.errors import BatchError, PlanError
from cosmati.methods import Alibi, LabelSmoothing, SeqLengthWarmup
from cosmati.optim import SGD
from cosmati.routing.policy_file import PolicyFile, load_policy
from cosmati.train.config import RunConfig
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome
from cosmati.train.trainer import Trainer
from tests.train.tags.content import CLASSES, NUM_ROWS, class_of, images, rows_in_image
from tests.train.tags.pipelines import POLICY, TAXONOMY

ADMITS_ONE = load_policy(
    "version: 1\ntaxonomy: t\nregions: {all: {params: '*'}}\nrules:\n  - {class: open, weight: 1.0}\n"
)


def run(
    data: Any, *methods: Method, policy: PolicyFile | None = POLICY, observers: Any = (), num_microbatches: int = 2
) -> Trainer:
    torch.manual_seed(0)
    made = Trainer(
        nn.Sequential(nn.Flatten(), nn.Linear(images()[0][0].numel(), NUM_ROWS)),
        Classification(NUM_ROWS),
        None if isinstance(data, Batch) else data,
        optimizers=[SGD(lr=0.01)],
        methods=methods,
        policy=policy,
        taxonomy=TAXONOMY if policy else None,
        observers=observers,
        config=RunConfig(budget="1ba", num_microbatches=num_microbatches, num_threads=1, progress=False),
    )
    if isinstance(data, Batch):
        made.step(data)
    else:
        made.fit()
    return made


def source() -> InMemory:
    return InMemory(images(), 8, torch.tensor([class_of(n) for n in range(NUM_ROWS)]), CLASSES)


Change = Callable[[Batch], Batch]


@dataclass(frozen=True)
class Custom(Method):
    """A method of somebody else's."""

    stage: ClassVar[Stage] = Stage.PERTURB
    change: Change

    def batch(self, batch: Batch, at: Position) -> Batch:
        del at
        return self.change(batch)


def _fewer(batch: Batch) -> Batch:
    return Batch((batch.input[:2], batch.target[:2]), batch.lineage, batch.class_id)


def _doubled(batch: Batch) -> Batch:
    both = tuple(torch.cat([one, one]) for one in (batch.input, batch.target))
    return Batch(both, batch.lineage, batch.class_id)


def _unknown(batch: Batch) -> Batch:
    return Batch(batch.data, Lineage.of_rows(0, batch.num_rows), batch.class_id)


def _of_another_class(batch: Batch) -> Batch:
    return replace(batch, lineage=replace(batch.lineage, class_ids=(batch.lineage.class_ids + 1) % 3))


def _mixed_with_another_class(batch: Batch) -> Batch:
    lineage = batch.lineage.mix(torch.arange(batch.num_rows))
    assert lineage.parent_class_ids is not None
    classes = lineage.parent_class_ids.clone()
    classes[:, 1] = (classes[:, 1] + 1) % 3
    return replace(batch, lineage=replace(lineage, parent_class_ids=classes))


def _mixed_with_nobody_knows_what(batch: Batch) -> Batch:
    lineage = batch.lineage.mix(torch.arange(batch.num_rows))
    return replace(batch, lineage=replace(lineage, parent_class_ids=None))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_fewer, "nobody can tell: The batch's data have 2 rows, and its lineage 4"),
        (_doubled, "nobody can tell: The batch's data have 8 rows, and its lineage 4"),
        (_unknown, "gave rows of unknown origin"),
        (_of_another_class, "they have no route"),
        (_mixed_with_another_class, "they have no route"),
        (_mixed_with_nobody_knows_what, "doesn't say of which classes"),
        (lambda batch: batch.data, "gave a tuple, and a Batch is wanted"),
    ],
)
def test_a_method_that_loses_track_of_its_rows_is_refused_under_a_policy(change: Change, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        run(source(), Custom(change))


@pytest.mark.parametrize("change", [_unknown, _of_another_class])
def test_without_a_policy_nobody_asks(change: Change) -> None:
    assert run(source(), Custom(change), policy=None).clock.step == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch.select(torch.arange(batch.num_rows).flip(0)),
        lambda batch: batch.select(torch.tensor([1, 3])),
        lambda batch: batch.select(torch.tensor([True, False, True, True])),
        lambda batch: replace(batch, lineage=batch.lineage.mix(torch.arange(batch.num_rows).flip(0))),
    ],
)
def test_a_method_that_keeps_data_and_lineage_together_is_taken(change: Change) -> None:
    assert run(source(), Custom(change)).clock.step == 1


class Kept(Observer):
    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def on_step(self, outcome: StepOutcome) -> None:
        self.batches += outcome.batches


def _swapped(batch: Batch) -> Batch:
    return batch.replace(input=batch.input.flip(0), target=batch.target.flip(0))


def test_rows_that_are_swapped_under_the_same_lineage_are_found_by_their_content_alone() -> None:
    """What the run sees agrees; that it lies shows in the rows themselves, and nowhere else."""
    lied = {}
    for name, methods in (("honest", ()), ("lie", (Custom(_swapped),))):
        kept = Kept()
        run(source(), *methods, observers=[kept])
        lied[name] = [
            rows_in_image(pixels) != {int(row)}
            for batch in kept.batches
            for pixels, row in zip(batch.input, batch.lineage.row_ids, strict=True)
        ]
    assert not any(lied["honest"])
    assert all(lied["lie"])


@pytest.mark.parametrize("collate", [None, torch.utils.data.default_collate])
def test_rows_out_of_a_foreign_loader_are_refused_under_a_policy(collate: Any) -> None:
    loader = DataLoader(TensorDataset(*images()), batch_size=8, collate_fn=collate)
    with pytest.raises(PlanError, match="A policy needs rows with classes, and DataLoader has none"):
        run(loader)


@pytest.mark.parametrize("index", [torch.arange(8).flip(0), slice(0, 8, 1), slice(None, None, 2), torch.ones(8) > 0])
def test_rows_of_unknown_origin_stay_so_whatever_is_done_with_them(index: Tensor | slice) -> None:
    """A selection of numbered rows must not become rows of the first class."""
    numbered = Batch(tuple(one[:8] for one in images()), Lineage.of_rows(0, 8))
    chosen = numbered.select(index)
    assert not chosen.lineage.is_known
    assert not pickle.loads(pickle.dumps(chosen.lineage)).is_known
    assert not numbered.lineage.mix(torch.arange(8)).is_known
    assert not numbered.lineage.without(torch.zeros(8, dtype=torch.bool)).is_known
    with pytest.raises(PlanError, match="no lineage"):
        run(chosen, policy=ADMITS_ONE, num_microbatches=1)


def _mixed_across_classes() -> Batch:
    first = [n for n in range(NUM_ROWS) if CLASSES[class_of(n)] == "open"][:4]
    other = [n for n in range(NUM_ROWS) if CLASSES[class_of(n)] == "personal"][:4]
    ids = torch.tensor(first + other)
    pixels, targets = images()
    lineage = Lineage(ids, torch.tensor([class_of(n) for n in ids.tolist()])).mix(torch.arange(8).roll(4))
    mixed = 0.5 * pixels[ids] + 0.5 * pixels[ids.roll(4)]
    return Batch((mixed, targets[ids]), lineage).select(slice(0, 4))


def test_rows_that_were_mixed_across_classes_are_of_both() -> None:
    """The first parent's class may teach; the other's, which hides in the rows, may not."""
    batch = _mixed_across_classes()
    assert {CLASSES[one] for one in batch.lineage.class_ids.tolist()} == {"open"}
    assert batch.lineage.parent_class_ids is not None
    with pytest.raises(PlanError, match="holds rows of classes"):
        run(batch, policy=ADMITS_ONE, num_microbatches=1)
    told_less = replace(batch, lineage=replace(batch.lineage, parent_class_ids=None))
    with pytest.raises(PlanError, match="doesn't say of which classes"):
        run(told_less, policy=ADMITS_ONE, num_microbatches=1)


@dataclass(frozen=True)
class Shorter:
    """A source whose microbatches have fewer rows than their lineage says, as where a transform leaves some out."""

    inner: InMemory
    class_names: tuple[str, ...] = CLASSES
    digest: str = "shorter"

    def order(self, **how: Any) -> Any:
        order = self.inner.order(**how)
        whole = order.microbatch

        def shorter(step: int, index: int) -> Batch:
            batch = whole(step, index)
            return replace(batch, data=tuple(one[:-1] for one in batch.data))

        order.microbatch = shorter
        return order


def test_a_source_that_leaves_rows_out_is_refused_under_a_policy() -> None:
    with pytest.raises(BatchError, match="3 rows, and its lineage 4"):
        run(Shorter(source()))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"parent_class_ids": torch.zeros(2, 2, dtype=torch.int64)}, "different parents"),
        ({"parents": torch.zeros(2, 2), "parent_class_ids": torch.zeros(2, 3)}, "different parents"),
        ({"parents": torch.zeros(3, 2)}, "different numbers of rows"),
        ({"parents": torch.zeros(2, 2)}, "parents is torch.float32"),
        ({"parents": torch.zeros(2, dtype=torch.int64)}, "num_parents"),
        (
            {"parents": torch.zeros(2, 1, dtype=torch.int64), "parent_class_ids": torch.full((2, 1), 0.5)},
            "parent_class_ids is torch.float32",
        ),
    ],
)
def test_a_lineage_that_contradicts_itself_is_refused(changed: dict[str, Tensor], why: str) -> None:
    lineage = replace(Lineage(torch.arange(2), torch.zeros(2, dtype=torch.int64)), **changed)
    with pytest.raises(BatchError, match=why):
        Batch(torch.zeros(2, 1), lineage).check()


def _position() -> Position:
    clock, budget = Clock(), Budget(Time.parse("4ba"))
    return Position(clock, budget, 0, 0, nn.Identity(), LanguageModel(20))


@pytest.mark.parametrize(
    "method",
    [
        SeqLengthWarmup(duration=0.0, min_seq_length=4, max_seq_length=4),
        SeqLengthWarmup(duration=0.0, min_seq_length=4, max_seq_length=4, truncate=False),
        Alibi(max_sequence_length=8, train_sequence_length_scaling=0.5),
    ],
)
def test_rows_that_are_cut_keep_band_class_and_the_tags_of_their_tokens(method: Method) -> None:
    tokens = torch.arange(1, 17).view(2, 8)
    lineage = Lineage(torch.tensor([5, TOMBSTONE]), torch.tensor([2, 2]), None, None, tokens % 3, tokens * 10)
    data = {"input": tokens, "target": tokens + 1}
    cut = method.batch(Batch(data, lineage, 2, band=3), _position())
    assert (cut.class_id, cut.band) == (2, 3)
    assert cut.input.shape[1] == 4
    assert torch.equal(cut.lineage.token_row_ids, cut.input * 10)  # type: ignore[arg-type]
    assert torch.equal(cut.lineage.token_class_ids, cut.input % 3)  # type: ignore[arg-type]
    assert cut.lineage.row_ids.tolist() == [5 if line[0] < 9 else TOMBSTONE for line in cut.input.tolist()]


def test_soft_labels_of_the_next_token_cut_the_last_one_off_the_lineage() -> None:
    tokens = torch.arange(1, 17).view(2, 8)
    lineage = Lineage(torch.arange(2), torch.zeros(2, dtype=torch.int64), token_class_ids=tokens % 3)
    made = LabelSmoothing(smoothing=0.1).batch(Batch(tokens, lineage, 1, band=2), _position())
    assert (made.class_id, made.band) == (1, 2)
    assert torch.equal(made.lineage.token_class_ids, tokens[:, :-1] % 3)  # type: ignore[arg-type]
