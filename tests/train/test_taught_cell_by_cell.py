"""Which regions rows taught follows, cell by cell, from who took part, the weights of routes, and what is compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cosmati.core.batch import TOMBSTONE, Batch, Lineage
from cosmati.core.method import Method, Stage
from cosmati.data.people import ChosenRows
from cosmati.errors import LedgerError
from cosmati.ledger.row_secrets import RowsAt, commit
from cosmati.methods import LayerFreezing, MixUp
from cosmati.train import rows_taught
from cosmati.train.rows_taught import RegionTaught, _Again, regions_taught_by


def chosen_of(*row_ids: int, documents: Sequence[tuple[int, int]] = ()) -> ChosenRows:
    return ChosenRows(np.array(row_ids, np.int64), np.array(documents, np.int64).reshape(-1, 2))


class Blinds:
    """The same blind for each row, and none for those that were forgotten."""

    def __init__(self, forgotten: Sequence[int] = ()) -> None:
        self.forgotten, self.asked = forgotten, list[RowsAt]()

    certificates: Mapping[str, int] = MappingProxyType({})

    def blinds(self, rows: RowsAt) -> list[bytes | None]:
        self.asked.append(rows)
        return [None if row in self.forgotten else bytes(32) for row in rows.ids[:, -1].tolist()]


def again_of(
    *batches: Batch,
    chosen: ChosenRows | None = None,
    methods: Sequence[Method] = (),
    secrets: Any = None,
    classes: Sequence[str] = ("a", "b"),
    kinds: Sequence[Any] = (),
    num_microbatches: int | None = None,
) -> _Again:
    policy = SimpleNamespace(classes=[*reversed(classes)]) if classes else None
    plan = SimpleNamespace(with_hook=lambda hook: [one for one in methods if hook == "batch"])
    trainer: Any = SimpleNamespace(
        assembly=SimpleNamespace(plan=plan, policy=policy, num_microbatches=num_microbatches or len(batches) or 1),
        prepared=SimpleNamespace(
            class_map=range(len(classes))[::-1], given=SimpleNamespace(data=SimpleNamespace(row_kinds=kinds))
        ),
        feed=SimpleNamespace(again=lambda step: [*batches] if step == 7 else []),
    )
    return _Again(trainer, secrets or Blinds(), chosen or chosen_of())


def tables_of(*, bands: Sequence[str] = ("",), kinds: Sequence[tuple[int, Mapping[str, str]]] = ()) -> Any:
    return SimpleNamespace(bands=tuple(bands), kinds=tuple(kinds), class_of=lambda cell, item: cell.name)


def rows(first: int, num: int, gap: int | None = None) -> Batch:
    """Rows from a first id on, of which one may be a tombstone."""
    ids = torch.arange(first, first + num)
    if gap is not None:
        ids[gap] = TOMBSTONE
    return Batch([torch.zeros(num, 2)], Lineage(ids, (ids != TOMBSTONE).float()), None)


def pack(classes: list[list[int]], row_ids: list[list[int]] | None = None, first: int = 50) -> Batch:
    ids = torch.tensor(classes)
    own = None if row_ids is None else torch.tensor(row_ids)
    packs, ones = torch.arange(first, first + len(ids)), torch.ones(len(ids))
    return Batch([torch.zeros(ids.shape)], Lineage(packs, ones, token_class_ids=ids, token_row_ids=own), None)


def cell(committed: bytes | None, num_rows: int = 4, name: str = "a", band: int = 0) -> Any:
    return SimpleNamespace(row_commitment=committed, num_rows=num_rows, name=name, band=band)


def item_of(monkeypatch: pytest.MonkeyPatch, **details: Any) -> Any:
    monkeypatch.setattr(rows_taught, "decode_details", lambda given: given)
    return SimpleNamespace(details=details or None)


def commitment(ids: Sequence[Sequence[int]], m: int, name: str = "a", slots: Sequence[int] | None = None) -> Any:
    own = np.array(ids, np.int64)
    at = RowsAt(7, m, name, np.array(range(len(ids)) if slots is None else slots), own)
    return commit(at, [bytes(32)] * len(ids))


def entry_of(*cells: Any, step: int = 7) -> Any:
    return SimpleNamespace(step=step, microbatches=cells)


def test_whole_rows_are_counted_and_compared_in_each_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = Blinds()
    again = again_of(rows(0, 4), rows(4, 4), rows(8, 4), chosen=chosen_of(1, 2, 9, 77), secrets=secrets)
    cells = [
        cell(commitment([[n] for n in range(4)], 0)),
        cell(b"", 0),
        cell(commitment([[n] for n in range(8, 12)], 2)),
    ]
    found = list(again.cells(item_of(monkeypatch), entry_of(*cells), tables_of()))
    assert found == [(0, 2, True), (2, 1, True)]
    assert [(at.step, at.microbatch, at.class_name) for at in secrets.asked] == [(7, 0, "a"), (7, 2, "a")]


@pytest.mark.parametrize(
    ("methods", "secrets", "is_refused"),
    [
        ((), Blinds(), True),
        ((LayerFreezing(freeze_level=0.5),), Blinds(), True),
        ((MixUp(alpha=0.2),), Blinds(), False),
        ((), Blinds(forgotten=[2]), False),
    ],
)
def test_rows_that_nobody_changed_and_that_are_others_are_refused(
    monkeypatch: pytest.MonkeyPatch, methods: Sequence[Method], secrets: Blinds, is_refused: bool
) -> None:
    again = again_of(rows(0, 4), chosen=chosen_of(3), methods=methods, secrets=secrets)
    found = again.cells(item_of(monkeypatch), entry_of(cell(bytes(32))), tables_of())
    if is_refused:
        with pytest.raises(LedgerError, match="rows of microbatch 0 of step 7 aren't those that the ledger commits to"):
            list(found)
    else:
        assert list(found) == [(0, 1, False)]


@pytest.mark.parametrize("stage", [Stage.MIX, Stage.SHAPE, Stage.LABEL])
@pytest.mark.parametrize("module", ["mine", "cosmati.methods.x"])
def test_methods_that_mix_or_shape_or_are_the_users_own_change_rows(stage: Stage, module: str) -> None:
    method = type("Own", (Method,), {"stage": stage, "__module__": module})()
    assert again_of(methods=[method])._changes_rows == (stage is not Stage.LABEL or module == "mine")
    assert not again_of()._changes_rows


def test_rows_that_were_kept_are_those_of_their_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    again = again_of(rows(0, 4), rows(4, 4), chosen=chosen_of(4, 5, 6, 7))
    item = item_of(monkeypatch, kept_rows={"1": [0, 3]})
    cells = [cell(commitment([[n] for n in range(4)], 0)), cell(commitment([[4], [7]], 1))]
    assert list(again.cells(item, entry_of(*cells), tables_of())) == [(0, 0, True), (1, 2, True)]
    with pytest.raises(LedgerError):
        list(again.cells(item, entry_of(cells[0], cell(commitment([[4], [5]], 1))), tables_of()))
    for kept, is_refused in (({"0": [0, 1]}, False), ({}, True)):
        gaps, item = again_of(rows(0, 4, gap=2), chosen=chosen_of(0, 3)), item_of(monkeypatch, kept_rows=kept)
        others = gaps.cells(item, entry_of(cell(bytes(32))), tables_of())
        if is_refused:
            with pytest.raises(LedgerError):
                list(others)
        else:
            assert list(others) == [(0, 1, False)], "which of them were kept is nowhere, where a row is absent"


def test_documents_of_packs_are_told_by_the_cells_class(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pack([[0, 0, 1], [1, 1, 0]], [[10, 11, 12], [13, 13, 14]])
    chosen = chosen_of(50, 51, documents=[(50, 10), (50, 12), (51, 13)])
    again, item = again_of(batch, chosen=chosen), item_of(monkeypatch, cell_microbatches=[0, 0])
    own = [[[50, 10], [50, 11], [51, 14]], [[50, 12], [51, 13]]]
    cells = [
        cell(commitment(own[0], 0, "a", [0, 1, 4]), name="a"),
        cell(commitment(own[1], 0, "b", [2, 3]), name="b"),
    ]
    assert list(again.cells(item, entry_of(*cells), tables_of())) == [(0, 1, True), (1, 2, True)]
    assert not list(again.cells(item, entry_of(cell(b"", 0), cell(b"", 0)), tables_of()))
    whole = again.cells(item_of(monkeypatch), entry_of(cell(commitment([[50], [51]], 0))), tables_of())
    assert list(whole) == [(0, 5, True)], "without a class for each cell packs are rows, and their documents count too"


def test_of_a_class_the_documents_that_are_there_take_part() -> None:
    batch = pack([[0, 0, 2, 1, TOMBSTONE]], [[10, TOMBSTONE, 12, 13, TOMBSTONE]])
    at = _Again._of_cell(batch, [0, 1], 7, 3, "a")
    assert (at.step, at.microbatch, at.class_name) == (7, 3, "a")
    assert at.ids.tolist() == [[50, 10], [50, 13]]
    assert _Again._of_cell(batch, [2], 7, 3, "c").ids.tolist() == [[50, 12]]
    assert not len(_Again._of_cell(batch, [], 7, 3, "c").ids)


def kind(band: int = 0, **grades: str) -> Any:
    return SimpleNamespace(band=band, grades=tuple(grades.items()))


def test_class_ids_of_a_cell_are_of_its_name_band_and_grades() -> None:
    names = ("a", "a", "b", "a")
    kinds = [kind(0, g="x"), kind(1, g="x"), kind(0, g="x"), kind(0, h="z")]
    again, item = again_of(classes=names, kinds=kinds), None
    ids: Any = again._ids_of

    def of(tables: Any, name: str = "a", band: int = 0) -> list[int]:
        return ids(cell(b"", name=name, band=band), item, tables)  # type: ignore[no-any-return]

    assert (of(tables_of()), of(tables_of(), "b"), of(tables_of(), "c")) == ([0, 1, 3], [2], [])
    banded = tables_of(bands=("low", "high"))
    assert (of(banded), of(banded, band=1), of(banded, band=2)) == ([0, 3], [1], [])
    graded = tables_of(bands=("x", "none"), kinds=[(0, {"g": "x"}), (0, {"g": ""})])
    assert of(graded) == [0, 1], "kinds of which none has a band tell bands apart no more"
    assert of(graded, band=1) == [3]
    both = tables_of(bands=("x", "y", "z"), kinds=[(0, {"g": "x"}), (1, {"g": "x"}), (0, {"h": "z", "g": ""})])
    assert [of(both, band=band) for band in range(3)] == [[0], [1], [3]]


def test_sources_without_kinds_or_policy_have_plain_classes() -> None:
    assert [one.band for one in again_of()._kinds] == [0, 0]
    without = again_of(classes=())
    assert (without._classes, len(without._kinds)) == ([], 0)


def test_microbatches_that_were_cut_are_cut_again_piece_by_piece() -> None:
    again = again_of(rows(0, 4), rows(4, 4))
    ids = [[*batch.lineage.row_ids.tolist()] for batch in again._given(7, 2)]
    assert ids == [[0, 1, 2, 3], [4, 5, 6, 7]]
    pieces = [[*batch.lineage.row_ids.tolist()] for batch in again._given(7, 4)]
    assert pieces == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_a_steps_cells_say_into_how_many_pieces_it_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    again = again_of(rows(0, 4), chosen=chosen_of(2))
    cells = [cell(commitment([[0], [1]], 0)), cell(commitment([[2], [3]], 1))]
    assert list(again.cells(item_of(monkeypatch), entry_of(*cells), tables_of())) == [(0, 0, True), (1, 1, True)]


def test_rows_that_cannot_be_had_again_are_told() -> None:
    again = again_of(rows(0, 4))
    for feed in (again._feed, None):
        again._feed = feed
        with pytest.raises(LedgerError, match="rows of step 8 can't be had again: only a Source is read by position"):
            again._given(8, 1)


def test_an_answer_stays_as_it_was_given() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RegionTaught("low", (1,), 1, 0).num_rows = 2  # type: ignore[misc]


TABLES: Any = SimpleNamespace(regions=("low", "high", "none"), route=lambda cell, item: cell)


class Ledger:
    """Steps with the weights of the route of each cell, of which some stand."""

    regions = ("high", "none", "low")
    key = SimpleNamespace(name="origin")
    standing = frozenset({1, 2, 3, 5})

    def __init__(self, folder: Path, vkey: str | None) -> None:
        self.given = folder, vkey
        self.numbers = ((1, 0), (4, 1), (2, 1), (3, 1), (5, 2))

    def steps(self) -> Any:
        for index, step in self.numbers:
            cells = ((1.0, 0.5, 1.0), (0.0, 1.0, 1.0))
            yield SimpleNamespace(index=index), SimpleNamespace(step=step, microbatches=cells), TABLES


def test_a_region_is_taught_where_route_and_learning_let_chosen_rows_reach_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[Ledger] = []
    told = {1: [(0, 2, True), (1, 3, False)], 2: [(0, 0, True), (1, 1, True)], 3: [(0, 5, False)], 4: [(0, 9, False)],
            5: [(1, 1, True)]}  # fmt: skip

    def ledger(folder: Path, vkey: str | None) -> Ledger:
        made.append(Ledger(folder, vkey))
        return made[-1]

    def again(trainer: Any, secrets: Any, chosen: Any) -> Any:
        assert (trainer, secrets, chosen) == (run, (tmp_path / "private", "origin"), rows_chosen)
        return SimpleNamespace(cells=lambda item, entry, tables: told[item.index])

    monkeypatch.setattr(rows_taught, "VerifiedLedger", ledger)
    monkeypatch.setattr(rows_taught, "open_secrets", lambda *given: given)
    monkeypatch.setattr(rows_taught, "_Again", again)
    learnt = {5: ((1, 1, 0), (0, 0, 0))}
    monkeypatch.setattr(
        rows_taught, "learnt_weights", lambda item, entry, num: learnt.get(item.index, ((1, 1, 0),) * 2)[: num + 1]
    )
    run: Any = SimpleNamespace(assembly=SimpleNamespace(config=SimpleNamespace(run_folder=tmp_path)))
    rows_chosen = chosen_of(1)
    for missing in ("ledger", "private"):
        with pytest.raises(LedgerError, match=r"doesn't have both\. Give the run's own run_folder"):
            regions_taught_by(run, rows_chosen)
        (tmp_path / missing).mkdir()
    with pytest.raises(LedgerError, match=r"rows\.salt, which only"):
        regions_taught_by(run, rows_chosen)
    (tmp_path / "private" / "rows.salt").write_bytes(b"")
    assert regions_taught_by(run, rows_chosen, vkey="v") == (
        RegionTaught("high", (0, 1), 2 + 3 + 1 + 5, 2),
        RegionTaught("low", (0, 1), 2 + 5, 1),
    )
    assert made[-1].given == (tmp_path / "ledger", "v")
    (tmp_path / "ledger").rmdir()
    with pytest.raises(LedgerError, match="Give the run's own run_folder"):
        regions_taught_by(run, rows_chosen)
    nowhere: Any = SimpleNamespace(assembly=SimpleNamespace(config=SimpleNamespace(run_folder=None)))
    with pytest.raises(LedgerError, match="and None doesn't have both"):
        regions_taught_by(nowhere, rows_chosen)
