"""Batches whose source numbers its classes in its own way, in a loop of one's own: names say which class it is."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader

from cosmati.core.batch import TOMBSTONE, Batch, Lineage
from cosmati.core.lineage import check_lineage, renumbered
from cosmati.data.in_memory import InMemory
from cosmati.data.loader import StreamingLoader
from cosmati.data.packed import PackedSource, pack_tensors
from cosmati.data.people import ChosenRows
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import BatchError, DataError
from cosmati.ledger.query import VerifiedLedger, regions_of_class
from cosmati.train.rows_taught import regions_taught_by
from tests.train.mixed.world import CLASS_OF, CLASSES, INPUTS, STEP, TARGETS, chosen, run, weights
from tests.train.packs import samples

OWN = ("open", "closed", "doubtful")
"""The taxonomy has them in another order."""
OWN_IDS = torch.tensor([OWN.index(CLASSES[c]) for c in CLASS_OF.tolist()])


def in_memory(folder: Path) -> Iterator[Batch]:
    """Batches of a source's order, each of one class."""
    order = InMemory((INPUTS, TARGETS), 8, OWN_IDS, OWN, torch.arange(len(INPUTS)) + 100).order(
        seed=0, num_microbatches=1, route_pure=True
    )
    return (order.microbatch(step, 0) for step in range(4))


def dataset(folder: Path, names: tuple[str, ...] = ("doubtful", "open")) -> StreamingDataset:
    # Ids count the classes that there are rows of, so that these are 0 and 1.
    for name in names:
        rows = [
            {"input": INPUTS[i].numpy(), "target": int(TARGETS[i]), "number": i}
            for i in range(len(INPUTS))
            if CLASSES[CLASS_OF[i]] == name
        ]
        kinds = {"input": "ndarray:float32:4", "target": "int", "number": "int"}
        write_dataset(rows, folder / name, kinds, class_of=name, source=name)
    return StreamingDataset([folder / name for name in names], columns=("input", "target"))


def told(batch: Any) -> Batch:
    """Return the batch with the data as the loss wants them."""
    return dataclasses.replace(batch, data=(batch.data[0], batch.data[1].long()))


def plain_loader(folder: Path) -> Iterator[Batch]:
    rows = dataset(folder)
    assert rows.class_names == ("doubtful", "open")
    return map(told, DataLoader(rows, STEP, collate_fn=rows.collate))


def loader_processes(folder: Path) -> Iterator[Batch]:
    return map(told, StreamingLoader(dataset(folder), STEP, num_workers=1))


def numbered_by_hand(batch: Batch) -> Batch:
    """The same rows with the taxonomy's ids, found by what they hold."""
    places = [int((row == INPUTS).all(1).nonzero()) for row in batch.input]
    return Batch(batch.data, Lineage(batch.lineage.row_ids, CLASS_OF[places]))


@pytest.mark.parametrize("batches", [in_memory, plain_loader, loader_processes])
def test_a_loop_of_ones_own_knows_classes_by_their_names(
    batches: Callable[[Path], Iterator[Batch]], tmp_path: Path
) -> None:
    made = list(batches(tmp_path / "data"))
    own, expected = run(None, folder=tmp_path / "run"), run(None)
    with own, expected:
        for batch in made[:4]:
            own.step(batch)
            expected.step(numbered_by_hand(batch))
    assert torch.equal(weights(own), weights(expected))
    ledger = VerifiedLedger(tmp_path / "run" / "ledger")
    taught = {name: {part.region for part in regions_of_class(ledger, name)} for name in CLASSES}
    assert taught == {"closed": set(), "doubtful": {"head"}, "open": {"body", "head"}}


def test_rows_of_a_list_are_found_again_by_their_classes_names(tmp_path: Path) -> None:
    """The run has regrouped its steps by the taxonomy's ids, and so does who asks later what a row has taught."""
    steps = [torch.arange(STEP * step, STEP * (step + 1)) for step in range(4)]
    data = [Batch((INPUTS[i], TARGETS[i]), Lineage(i + 100, OWN_IDS[i]).by_names(OWN)) for i in steps]
    trainer = run(data, folder=tmp_path, budget="4ba")
    trainer.fit()
    rows = torch.arange(3, 40, 4)
    found = regions_taught_by(trainer, ChosenRows((rows + 100).numpy(), np.zeros((0, 2), np.int64)))
    by_class = torch.bincount(CLASS_OF[rows], minlength=3).tolist()
    assert {one.region: one.num_rows for one in found} == {"body": by_class[2], "head": by_class[1] + by_class[2]}
    assert not any(one.num_unopened for one in found)


def test_rows_that_another_data_set_collates_keep_the_names_of_their_own(tmp_path: Path) -> None:
    own, other = dataset(tmp_path / "own"), dataset(tmp_path / "other", ("closed", "open"))
    assert other.class_names == ("closed", "open")
    batch = next(iter(DataLoader(own, STEP, shuffle=True, collate_fn=other.collate)))
    assert torch.equal(numbered_by_hand(batch).lineage.class_ids, batch.numbered_by(CLASSES).lineage.class_ids)
    assert {*batch.lineage.class_ids.tolist()} == {0, 1}


def test_single_rows_of_several_data_sets_are_refused_with_what_to_do(tmp_path: Path) -> None:
    own, other = dataset(tmp_path / "own"), dataset(tmp_path / "other", ("closed", "open"))
    joined: Any = ConcatDataset([own, other])
    with pytest.raises(DataError, match=r"a list of single ones, as a ConcatDataset.*to one StreamingDataset"):
        next(iter(DataLoader(joined, STEP, collate_fn=own.collate)))


def test_tokens_of_packs_are_known_by_their_classes_names() -> None:
    names = ("personal", "open", "doubtful")
    packs = samples.documents()
    ids = torch.tensor([names.index(name) for name in samples.CLASSES])
    tensors = pack_tensors(packs)
    classes = tensors["token_class_ids"]
    other = tensors | {"token_class_ids": torch.where(classes < 0, classes, ids[classes])}
    found = []
    for data, own in ((tensors, samples.CLASSES), (other, names)):
        source = PackedSource(InMemory(data, 4, tail="pad"), own)
        batch = source.order(seed=0, num_microbatches=1, route_pure=False).microbatch(0, 0)
        network = samples.model()
        trainer = samples.trainer(network, None, samples.policy())
        with trainer:
            trainer.step(batch)
        found.append(torch.cat([p.detach().flatten() for p in network.parameters()]))
    assert torch.equal(*found)


def test_a_class_that_the_run_lacks_is_named() -> None:
    source = InMemory((INPUTS, TARGETS), STEP, OWN_IDS, ("open", "secret", "doubtful"))
    batch = source.order(seed=0, num_microbatches=1, route_pure=False).microbatch(0, 0)
    trainer = run(None)
    with trainer, pytest.raises(BatchError, match=r"Rows are of secret, and the run's classes are closed, doubtful"):
        trainer.step(batch)


def test_the_class_that_a_batch_announces_is_of_its_names_too() -> None:
    lineage = Lineage(torch.arange(3), torch.tensor([0, 0, TOMBSTONE])).by_names(OWN)
    batch = Batch(torch.zeros(3, 1), lineage, 0, band=4).numbered_by(CLASSES)
    assert (batch.class_id, batch.band, batch.lineage.class_ids.tolist()) == (2, 4, [2, 2, TOMBSTONE])
    assert batch.numbered_by(CLASSES) is batch
    assert (plain := chosen(range(3))).numbered_by(OWN) is plain  # Ids without names are the taxonomy's.


NAMES = st.permutations(["a", "b", "c&d", "e"]).map(tuple)


@given(NAMES, NAMES, st.lists(st.integers(-1, 3), min_size=1, max_size=9))
def test_numbers_of_another_list_name_the_same_classes(
    own: tuple[str, ...], others: tuple[str, ...], ids: list[int]
) -> None:
    others = tuple("d&c" if name == "c&d" else name for name in others)
    found = renumbered(torch.tensor(ids), own, others).tolist()
    assert [one if one < 0 else sorted(others[one]) for one in found] == [
        one if one < 0 else sorted(own[one]) for one in ids
    ]


@pytest.mark.parametrize("one", [-2, 4])
def test_an_id_without_a_name_is_refused(one: int) -> None:
    with pytest.raises(BatchError, match=f"class ids .*{one}.* 4 classes"):
        renumbered(torch.tensor([one, 1 if one < 0 else 0]), ("a", "b", "c", "d"), ("a",))


def everything() -> Lineage:
    """Rows with parents and tokens; no source gives both."""
    tokens = torch.tensor([[0, 1], [2, TOMBSTONE]])
    return Lineage(
        torch.arange(2), torch.tensor([0, 2]), torch.tensor([[0, 1], [1, 0]]), None, tokens, tokens, tokens
    ).by_names(OWN)


KEPT: dict[str, Callable[[Lineage], Lineage]] = {
    "select": lambda own: own.select(slice(0, 2)),
    "cut": lambda own: own.cut(lambda ids: ids[:, :1]),
    "without": lambda own: own.without(torch.tensor([True, False])),
    "pickle": lambda own: pickle.loads(pickle.dumps(own)),
    "mix": lambda own: (
        dataclasses.replace(own, token_class_ids=None, token_row_ids=None).by_names(OWN).mix(torch.tensor([1, 0]))
    ),
}


def test_ids_of_inference_mode_have_names_too() -> None:
    with torch.inference_mode():
        own = Lineage(torch.arange(3), torch.tensor([0, 1, 2])).by_names(OWN)
    assert own.numbered_by(CLASSES).class_ids.tolist() == [2, 0, 1]


@pytest.mark.parametrize("change", KEPT)
def test_what_is_made_of_a_lineage_has_its_names(change: str) -> None:
    made = KEPT[change](everything())
    check_lineage(made)
    assert made.class_names == OWN
    banded = dataclasses.replace(made, bands=torch.zeros(len(made.row_ids), dtype=torch.int64))
    assert banded.numbered_by(CLASSES).class_ids.tolist() == made.numbered_by(CLASSES).class_ids.tolist()
    for name in ("class_ids", "parent_class_ids", "token_class_ids"):
        if (ids := getattr(made, name)) is not None:
            others = dataclasses.replace(made, **{name: ids.clone()})
            sent = pickle.loads(pickle.dumps(others))
            for lineage in (others, sent, others.select(slice(0, 1)), others.without(torch.tensor([False, False]))):
                with pytest.raises(BatchError, match="class ids of a batch were replaced"):
                    Batch(torch.zeros(len(lineage.row_ids), 1), lineage).numbered_by(OWN)
            assert others.by_names(OWN).numbered_by(OWN).class_names == OWN
            written = KEPT[change](everything())
            getattr(written, name)[:] = ids.flip(0)
            with pytest.raises(BatchError, match="class ids of a batch were replaced"):
                written.numbered_by(CLASSES)
            assert written.by_names(OWN).numbered_by(OWN).class_names == OWN, "whoever says so again"
    other = made.numbered_by(CLASSES)
    places = torch.tensor([2, 0, 1, TOMBSTONE])

    def same(old: Tensor | None, new: Tensor | None) -> bool:
        return new is None if old is None else new is not None and torch.equal(new, places[old])

    assert same(made.class_ids, other.class_ids)
    assert same(made.token_class_ids, other.token_class_ids)
    assert same(made.parent_class_ids, other.parent_class_ids)
    assert torch.equal(made.row_ids, other.row_ids)
