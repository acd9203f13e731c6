"""In how many pieces microbatches are cut, from which step on, and what an attempt knows of the one before it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cosmati.core.batch import Batch, Lineage
from cosmati.errors import OutOfMemoryError
from cosmati.train.cutting import Cuts, piece_of, refuse_uncut, shortage


def rows(first: int, num: int) -> Batch:
    return Batch(torch.arange(first, first + num), Lineage.of_rows(first, num), None)


def test_each_cut_halves_and_the_last_one_counts() -> None:
    cuts = Cuts()
    assert cuts.pieces == 1
    for step, pieces in ((3, 2), (3, 4), (7, 8)):
        cuts.halve(step)
        assert cuts.pieces == pieces
    assert cuts.made == [(3, 2), (3, 4), (7, 8)]


def test_an_attempt_cuts_where_the_one_before_it_did(tmp_path: Path) -> None:
    first = Cuts()
    for step in (2, 5, 5, 9):
        first.halve(step)
    first.keep(tmp_path)
    # It goes on from a checkpoint of step 4, which knows of the cut at step 2.
    again = Cuts.found(tmp_path, [[2, 2]], 4)
    assert [step for step in range(12) if again.is_due(step)] == [5, 9]
    again.halve(5)
    assert (again.pieces, again.made) == (8, [(2, 2), (5, 8)]), "as the earlier attempt needed"
    assert [step for step in range(12) if again.is_due(step)] == [9]
    again.halve(6)
    assert again.pieces == 16
    assert not any(map(again.is_due, range(12)))
    again.keep(tmp_path)
    assert json.loads((tmp_path / "cuts.json").read_text()) == [[2, 2], [5, 8], [6, 16], [9, 16]]
    assert Cuts.found(tmp_path, [], 9).is_due(9)
    assert not Cuts.found(tmp_path, [], 10).is_due(9)
    for folder in (None, tmp_path / "elsewhere"):
        assert Cuts.found(folder, [[2, 4]], 4).pieces == 4


@pytest.mark.parametrize(("cuts", "pieces"), [(0, 1), (1, 2), (2, 4)])
def test_pieces_come_one_of_each_microbatch_after_the_other(cuts: int, pieces: int) -> None:
    own = Cuts()
    for _ in range(cuts):
        own.halve(0)
    found = [batch.data.tolist() for batch in own.cut([rows(0, 8), rows(8, 8)])]
    size = 8 // pieces
    starts = [first + k * size for k in range(pieces) for first in (0, 8)]
    assert found == [list(range(start, start + size)) for start in starts]
    assert piece_of(rows(0, 8), 1, 2).lineage.row_ids.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("nums", "pieces", "said"),
    [
        ((8, 8), 1, ""),
        ((8, 8), 2, ""),
        ((8, 8), 4, ""),
        ((8, 8), 8, "also with microbatches of 1 rows: short They aren't cut further: 1 rows can't be cut in two"),
        ((8, 6), 2, "also with microbatches of 3 rows: short They aren't cut further: 3 rows can't"),
        ((6, 8), 1, ""),
        ((3, 4), 1, "also with microbatches of 3 rows"),
    ],
)
def test_what_cannot_be_halved_once_more_is_told(nums: tuple[int, ...], pieces: int, said: str) -> None:
    batches = [rows(0, num) for num in nums]
    if not said:
        refuse_uncut(batches, pieces, 7, "short")
        with pytest.raises(OutOfMemoryError, match="step 7: short It can't be taken anew"):
            refuse_uncut(batches, pieces, 7, "short", have_changed=True)
        return
    with pytest.raises(OutOfMemoryError, match=f"Memory is too short for step 7, {said}"):
        refuse_uncut(batches, pieces, 7, "short")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nmore"), "CUDA out of memory."),
        (MemoryError(), "MemoryError"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "DefaultCPUAllocator"),
        (RuntimeError("shapes differ"), ""),
        (ValueError(), ""),
    ],
)
def test_a_shortage_is_known_by_its_words(error: Exception, text: str) -> None:
    found = shortage(error)
    assert found.startswith(text)
    assert bool(found) == bool(text)
    assert "\n" not in found
