"""A lineage follows its rows whatever is done to them, keeps whose names its classes have, and refuses the rest."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmati.core.lineage import TOMBSTONE, Lineage, check_lineage, renumbered
from cosmati.errors import BatchError

FIELDS = (
    "row_ids", "class_ids", "parents", "digests", "token_class_ids", "token_row_ids", "parent_class_ids", "bands",
)  # fmt: skip


def whole(**changes: Any) -> Lineage:
    """Every tensor there is, each with values of its own."""
    rows = torch.arange(3)
    given = {
        "row_ids": rows + 10,
        "class_ids": torch.tensor([0, 1, 0]),
        "parents": torch.arange(6).view(3, 2) + 20,
        "digests": torch.arange(96).view(3, 32).byte(),
        "token_class_ids": torch.arange(12).view(3, 4) % 2,
        "token_row_ids": torch.arange(12).view(3, 4) + 40,
        "parent_class_ids": torch.arange(6).view(3, 2) % 2,
        "bands": rows + 5,
    }
    return Lineage(**{**given, **changes})


def told(lineage: Lineage) -> dict[str, Any]:
    return {name: None if (own := getattr(lineage, name)) is None else own.tolist() for name in FIELDS}


@pytest.mark.parametrize("indices", [slice(1, 3), torch.tensor([2, 0]), torch.tensor([True, False, True])])
@pytest.mark.parametrize("is_known", [True, False])
def test_selection_and_pickling_keep_every_field_in_its_place(indices: Any, is_known: bool) -> None:
    names = ("a", "b")
    lineage = whole(is_known=is_known, class_names=names)
    part = lineage.select(indices)
    assert told(part) == {name: getattr(lineage, name)[indices].tolist() for name in FIELDS}
    assert (part.is_known, part.class_names) == (is_known, names)
    again = pickle.loads(pickle.dumps(lineage))
    assert (told(again), again.is_known, again.class_names) == (told(lineage), is_known, names)
    assert again.numbered_by(("b", "a")).class_ids.tolist() == [1, 0, 1]
    few = Lineage(torch.arange(3), torch.zeros(3).long()).select(indices)
    assert [name for name, own in told(few).items() if own is not None] == ["row_ids", "class_ids"]


def test_tokens_and_class_ids_are_told_together() -> None:
    lineage = whole()
    assert lineage.by_token == (lineage.token_class_ids, lineage.token_row_ids)
    expected = (lineage.class_ids, lineage.parent_class_ids, lineage.token_class_ids)
    assert all(one is other for one, other in zip(lineage.class_id_tensors, expected, strict=True))


def test_buried_rows_keep_their_classes_and_bands_alone() -> None:
    lineage, gone = whole(is_known=False, class_names=("a", "b")), torch.tensor([False, True, False])
    found, before = lineage.without(gone), told(lineage)
    for name, own in told(found).items():
        empty = {"digests": [0] * 32, "row_ids": TOMBSTONE}.get(
            name, [TOMBSTONE] * len(torch.tensor(before[name][1:2]).flatten())
        )
        kept = name in ("class_ids", "parent_class_ids", "bands")
        assert own == [before[name][0], before[name][1] if kept else empty, before[name][2]], name
    assert (found.is_known, found.class_names) == (False, ("a", "b"))
    plain = Lineage(torch.arange(2), torch.zeros(2).long()).without(torch.tensor([True, False]))
    assert [name for name, own in told(plain).items() if own is not None] == ["row_ids", "class_ids"]
    assert (plain.row_ids.tolist(), plain.is_known) == ([TOMBSTONE, 1], True)


def test_a_mixed_row_has_the_parents_of_both_and_their_classes_where_these_are_known() -> None:
    lineage = whole(token_class_ids=None, token_row_ids=None, is_known=False, class_names=("a", "b"))
    found, other = lineage.mix(torch.tensor([2, 2, 0])), [2, 2, 0]
    assert lineage.parents is not None
    assert lineage.parent_class_ids is not None
    parents, classes = lineage.parents.tolist(), lineage.parent_class_ids.tolist()
    assert told(found) == told(lineage) | {
        "parents": [parents[i] + parents[other[i]] for i in range(3)],
        "parent_class_ids": [classes[i] + classes[other[i]] for i in range(3)],
    }
    assert (found.is_known, found.class_names) == (False, ("a", "b"))
    unknown = whole(token_class_ids=None, token_row_ids=None, parent_class_ids=None).mix(torch.tensor([0, 1, 2]))
    assert (unknown.parent_class_ids, unknown.is_known) == (None, True)
    fresh = Lineage(torch.tensor([7, 8]), torch.tensor([1, 0])).mix(torch.tensor([1, 1]))
    assert (told(fresh)["parents"], told(fresh)["parent_class_ids"]) == ([[7, 8], [8, 8]], [[1, 0], [0, 0]])
    with pytest.raises(BatchError, match="Packs aren't mixed"):
        whole().mix(torch.tensor([0, 1, 2]))


def test_rows_cut_off_or_into_pieces_follow() -> None:
    lineage = whole(class_names=("a", "b"), is_known=False)

    def halved(tokens: Tensor) -> Tensor:
        return tokens.reshape(6, 2)

    pieces = lineage.cut(halved, pieces=2)
    rows = torch.tensor([0, 0, 1, 1, 2, 2])
    for name in FIELDS:
        own = getattr(lineage, name)
        expected = halved(own) if name.startswith("token") else own[rows]
        assert getattr(pieces, name).tolist() == expected.tolist(), name
    assert (pieces.class_names, pieces.is_known) == (("a", "b"), False)
    assert pieces.numbered_by(("b", "a")).class_ids.tolist() == (1 - lineage.class_ids[rows]).tolist()
    short = lineage.cut(lambda tokens: tokens[:, :1])
    assert told(short) == told(lineage) | {
        name: [row[:1] for row in told(lineage)[name]] for name in ("token_class_ids", "token_row_ids")
    }
    alone = whole(token_row_ids=None).cut(lambda tokens: tokens[:, :1])
    assert alone.token_row_ids is None
    plain = Lineage(torch.tensor([5, 6]), torch.tensor([0, 1]))
    assert plain.cut(halved) is plain
    assert plain.cut(halved, pieces=3).row_ids.tolist() == [5, 5, 5, 6, 6, 6]
    with pytest.raises(BatchError, match="different numbers of rows"):
        lineage.cut(halved)


def test_numbered_rows_are_made_when_somebody_looks() -> None:
    lineage = Lineage.of_rows(7, 4)
    assert (lineage.row_ids.tolist(), lineage.class_ids.tolist()) == ([7, 8, 9, 10], [0, 0, 0, 0])
    assert (lineage.is_known, lineage.class_names, lineage.row_ids.dtype) == (False, None, torch.int64)
    assert [name for name in FIELDS if getattr(lineage, name) is not None] == ["row_ids", "class_ids"]
    for cut, ids in (
        (slice(1, 3), [8, 9]), (slice(None), [7, 8, 9, 10]), (slice(-2, None), [9, 10]), (slice(3, 1), []),
        (slice(1, 99, 1), [8, 9, 10]), (slice(0, 4, 2), [7, 9]), (torch.tensor([3, 0]), [10, 7]),
    ):  # fmt: skip
        part = lineage.select(cut)
        assert (part.row_ids.tolist(), part.class_ids.tolist(), part.is_known) == (ids, [0] * len(ids), False)
    again = pickle.loads(pickle.dumps(lineage))
    assert (type(again), again.row_ids.tolist()) == (type(lineage), [7, 8, 9, 10])
    assert type(lineage.select(slice(1, 3, 1))) is type(lineage.select(slice(1, 3))) is type(lineage)


def test_ids_are_numbered_by_other_names_and_tombstones_stay() -> None:
    ids = torch.tensor([[0, 2], [TOMBSTONE, 1]], dtype=torch.int32)
    assert renumbered(ids, ("a", "b", "c"), ("c", "x", "a", "b")).tolist() == [[2, 0], [TOMBSTONE, 3]]
    assert renumbered(torch.tensor(1), ("a", "b"), ("b",)).tolist() == 0
    assert renumbered(torch.tensor([0]), ("a", "unused"), ("a",)).tolist() == [0], "only classes with rows are asked"
    with pytest.raises(BatchError, match=r"Rows are of b, c, and the run's classes are a, d. Give a taxonomy that has"):
        renumbered(torch.tensor([2, 1, 0]), ("a", "b", "c"), ("a", "d"))
    for wrong in ([-2, 0], [0, 2]):
        with pytest.raises(
            BatchError, match=rf"has class ids {wrong[0]} to {wrong[1]}, and its source names 2 classes"
        ):
            renumbered(torch.tensor(wrong), ("a", "b"), ("a", "b"))


def test_every_class_id_follows_the_names() -> None:
    lineage = whole(class_names=("a", "b"))
    found = lineage.numbered_by(["b", "z", "a"])
    table = [2, 0]
    for name in ("class_ids", "parent_class_ids", "token_class_ids"):
        assert getattr(found, name).tolist() == torch.tensor(table)[getattr(lineage, name)].tolist()
    for name in ("row_ids", "parents", "digests", "token_row_ids", "bands"):
        assert getattr(found, name) is getattr(lineage, name)
    assert found.class_names == ("b", "z", "a")
    assert found.numbered_by(("a", "b")).class_ids.tolist() == [0, 1, 0]
    assert lineage.numbered_by(["a", "b"]) is lineage
    plain = whole()
    assert plain.numbered_by(("a", "b")) is plain
    assert lineage.by_names(None).class_names is None
    assert lineage.class_names == ("a", "b"), "by_names gives another"


REPLACED = "class names weren't: of which list are they"


def test_ids_that_are_replaced_or_written_to_have_names_no_more() -> None:
    for name in ("class_ids", "parent_class_ids", "token_class_ids"):
        lineage = whole(class_names=("a", "b"))
        other = dataclasses.replace(lineage, **{name: getattr(lineage, name).clone()})
        written = whole(class_names=("a", "b"))
        getattr(written, name).zero_()
        for wrong in (other, other.select(slice(0, 2)), pickle.loads(pickle.dumps(other)), written):
            with pytest.raises(BatchError, match=REPLACED):
                wrong.numbered_by(("a", "b"))
        assert other.by_names(("b", "a")).numbered_by(("a", "b")).class_names == ("a", "b")
    lineage = whole(class_names=("a", "b"))
    for fine in (
        dataclasses.replace(lineage, row_ids=torch.arange(3)),
        dataclasses.replace(lineage, token_class_ids=None, token_row_ids=None),
        dataclasses.replace(lineage, class_ids=lineage.class_ids.clone(), class_names=("a", "b")),
    ):
        assert fine.numbered_by(("a", "b")) is fine
    with torch.inference_mode():
        inside = Lineage(torch.arange(2), torch.tensor([1, 0]), class_names=("a", "b"))
    assert inside.numbered_by(("b", "a")).class_ids.tolist() == [0, 1]


FLOATS, BOOLS = torch.ones(3), torch.ones(3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"row_ids": FLOATS}, r"Lineage.row_ids is torch.float32 \(3,\), and ids are whole numbers, one a row: int64"),
        ({"class_ids": BOOLS}, r"Lineage.class_ids is torch.bool \(3,\)"),
        ({"class_ids": FLOATS.to(torch.complex64)}, "Lineage.class_ids is torch.complex64"),
        ({"class_ids": torch.zeros(3, 1).long()}, r"Lineage.class_ids is torch.int64 \(3, 1\)"),
        ({"bands": FLOATS}, "Lineage.bands is torch.float32"),
        ({"class_ids": torch.zeros(2).long()}, "different numbers of rows: row_ids 3, class_ids 2, bands 3, parents 3"),
        ({"bands": torch.zeros(2).long()}, "class_ids 3, bands 2, parents 3"),
        ({"digests": torch.zeros(2, 32).byte()}, "digests 2, token_class_ids 3"),
        ({"token_row_ids": torch.zeros(4, 4).long()}, "token_row_ids 4, parent_class_ids 3. Give one of each"),
        ({"bands": torch.tensor([0, -1, 3])}, r"bands has -1 to 3, and bands go from 0 to 65535. Give rows of which"),
        ({"bands": torch.tensor([0, 1, 65536])}, "bands has 0 to 65536"),
        ({"parents": None}, r"different parents: parents None and classes \(3, 2\). Give one class for each parent"),
        ({"parents": torch.zeros(3, 1).long()}, r"different parents: parents \(3, 1\) and classes \(3, 2\)"),
        ({"parents": torch.zeros(3, 2)}, r"Lineage.parents is torch.float32 \(3, 2\), and isn't int64 \[rows, num_par"),
        ({"parent_class_ids": torch.zeros(3, 2).bool()}, "Lineage.parent_class_ids is torch.bool"),
        ({"parents": torch.zeros(3).long(), "parent_class_ids": None}, r"Lineage.parents is torch.int64 \(3,\)"),
        ({"token_row_ids": torch.zeros(3, 5).long()}, r"tokens: token_class_ids \(3, 4\) and token_row_ids \(3, 5\)"),
        (
            {"token_class_ids": torch.zeros(3, 4)},
            r"token_class_ids is torch.float32 \(3, 4\), and isn't int64 \[rows, t",
        ),
        ({"token_class_ids": torch.zeros(3).long(), "token_row_ids": None}, r"token_class_ids is torch.int64 \(3,\)"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BatchError, match=said):
        check_lineage(whole(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bands": torch.tensor([0, 65535, 7])},
        {"bands": None, "digests": None},
        {"parents": None, "parent_class_ids": None},
        {"parent_class_ids": None},
        {"token_row_ids": None},
        {"token_class_ids": None},
        {"row_ids": torch.arange(3, dtype=torch.int32), "class_ids": torch.zeros(3, dtype=torch.uint8)},
    ],
)
def test_what_fits_together_is_left_alone(changes: dict[str, Any]) -> None:
    check_lineage(whole(**changes))
    check_lineage(Lineage.of_rows(0, 0))
