"""When rows that aren't those of the ledger are an error, and when nothing can be said of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmati.errors import LedgerError
from cosmati.train import rows_taught
from cosmati.train.rows_taught import _Again


class Rows:
    def __init__(self, num: int, *, has_gaps: bool) -> None:
        self.num, self.present = num, torch.ones(num) if has_gaps else None
        self.lineage = SimpleNamespace(token_class_ids=None)

    def select(self, slots: torch.Tensor) -> Rows:
        return Rows(len(slots), has_gaps=self.present is not None)


@pytest.mark.parametrize("is_theirs", [True, False])
@pytest.mark.parametrize("changes_rows", [True, False])
@pytest.mark.parametrize("kept", [None, [0, 2]])
@pytest.mark.parametrize("has_gaps", [True, False])
@pytest.mark.parametrize("blinds", [[b"b"], [b"b", None], []])
def test_other_rows_are_refused_where_it_is_known_which_took_part(
    is_theirs: bool,
    changes_rows: bool,
    kept: list[int] | None,
    has_gaps: bool,
    blinds: list[bytes | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of rows chosen among gaps the ledger's numbers say nothing; nor can those without blinds be opened."""
    details = {} if kept is None else {"kept_rows": {"0": kept}}
    monkeypatch.setattr(rows_taught, "decode_details", lambda _: details)
    monkeypatch.setattr(rows_taught, "rows_in", lambda batch, *_: batch.num)
    monkeypatch.setattr(rows_taught, "commit", lambda num, _: bytes([num]))
    again: Any = object.__new__(_Again)
    again._changes_rows, again._secrets = changes_rows, SimpleNamespace(blinds=lambda _: blinds)
    again._given = lambda _step, num: [Rows(3, has_gaps=has_gaps)] * num
    again._num_chosen = lambda batch, *_: batch.num
    took_part = 3 if kept is None else 2
    cell = SimpleNamespace(num_rows=took_part, row_commitment=bytes([took_part]) if is_theirs else b"other")
    entry: Any = SimpleNamespace(step=5, microbatches=[cell])
    item: Any = SimpleNamespace(details=b"some")
    tables: Any = SimpleNamespace(class_of=lambda *_: "a")
    is_known = not changes_rows and (kept is None or not has_gaps) and None not in blinds
    if is_known and not is_theirs:
        with pytest.raises(LedgerError, match="The rows of microbatch 0 of step 5 aren't those"):
            list(again.cells(item, entry, tables))
    else:
        assert list(again.cells(item, entry, tables)) == [(0, took_part, is_theirs)]
