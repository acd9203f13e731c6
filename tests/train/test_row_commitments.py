"""What the ledger says of the rows of a microbatch depends on which they are and on what is in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cosmati.core.batch import Batch, Lineage
from cosmati.core.loss import Classification
from cosmati.ledger.reader import Scan, read_head, read_verifier_key
from cosmati.ledger.row_keys import RowKeys
from cosmati.models.mlp import MLP
from cosmati.optim import SGD
from cosmati.records.ledger import StepEntry
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer

NUM_ROWS, NUM_CELLS = 16, 4
IDS, CLASSES = torch.arange(NUM_ROWS), torch.zeros(NUM_ROWS, dtype=torch.int64)


def _commitments(folder: Path, digests: Tensor | None, ids: Tensor = IDS, root: bytes = bytes(32)) -> list[bytes]:
    """Train one epoch of 16 rows in 4 microbatches, and return their commitments; the parameters never differ."""
    folder /= "run"  # its name goes into all of them
    (folder / "private").mkdir(parents=True)
    RowKeys(root).save(folder / "private/rows.keys")
    torch.manual_seed(0)
    rows = Batch((torch.zeros(NUM_ROWS, 3), CLASSES), Lineage(ids, CLASSES, digests=digests), None)
    Trainer(
        MLP((3, 2)),
        Classification(2),
        [rows.select(slice(0, 8)), rows.select(slice(8, 16))],
        optimizers=[SGD(lr=0.1)],
        config=RunConfig(budget="1ep", num_microbatches=2, num_threads=1, run_folder=folder, ledger=True),
    ).fit()
    ledger = folder / "ledger"
    entries = [item.entry for item in Scan(ledger, read_head(ledger, read_verifier_key(ledger)))]
    cells = [cell for entry in entries if isinstance(entry, StepEntry) for cell in entry.microbatches]
    assert [cell.num_rows for cell in cells] == [4] * NUM_CELLS
    return [cell.row_commitment for cell in cells]


def _num_equal(one: list[bytes], other: list[bytes]) -> int:
    return sum(a == b for a, b in zip(one, other, strict=True))


@pytest.mark.long
def test_commitments_follow_content_ids_and_keys(tmp_path: Path) -> None:
    digests = torch.arange(NUM_ROWS * 32, dtype=torch.int64).view(NUM_ROWS, 32).to(torch.uint8)
    changed, ids = digests.clone(), IDS.clone()
    changed[5, 31] ^= 1
    ids[5] = 99
    found = _commitments(tmp_path / "a", digests)
    assert len(set(found)) == NUM_CELLS
    assert _num_equal(found, _commitments(tmp_path / "same", digests)) == NUM_CELLS
    # Each row is in one microbatch of the epoch, so another row changes one commitment.
    assert _num_equal(found, _commitments(tmp_path / "content", changed)) == NUM_CELLS - 1
    assert _num_equal(found, _commitments(tmp_path / "id", digests, ids)) == NUM_CELLS - 1
    assert _num_equal(found, _commitments(tmp_path / "none", None)) == 0
    assert _num_equal(found, _commitments(tmp_path / "keys", digests, root=b"s" * 32)) == 0
