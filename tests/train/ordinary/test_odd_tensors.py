"""Sparse, nested and packed rows: as given at V = 1, refused by name where they would have to be cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from cosmati import RunConfig, Trainer
from cosmati.core.batch import count_rows, count_rows_and_tokens
from cosmati.errors import BatchError
from cosmati.optim import SGD
from cosmati.train.written import Written

ROWS, LABELS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
FORMS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "sparse": (lambda rows: rows.to_sparse(), "torch.sparse_coo tensor"),
    "compressed": (lambda rows: rows.to_sparse_csr(), "torch.sparse_csr tensor"),
    "nested": (lambda rows: torch.nested.nested_tensor([*rows]), "nested tensor"),
    "jagged": (lambda rows: torch.nested.nested_tensor([*rows], layout=torch.jagged), "nested tensor"),
    "packed": (lambda rows: pack_sequence([row[None].expand(3, -1) for row in rows]), "PackedSequence"),
}


def _dense(rows: Any) -> Tensor:
    if isinstance(rows, PackedSequence):
        return pad_packed_sequence(rows, batch_first=True)[0][:, 0]
    return rows.to_padded_tensor(0.0) if rows.is_nested else rows.to_dense()


def _loss(model: nn.Module, data: Any) -> Tensor:
    return cross_entropy(model(_dense(data["rows"])), data["labels"])


@pytest.mark.filterwarnings("ignore:.*(nested|Sparse).*:UserWarning")
@pytest.mark.parametrize("name", FORMS)
def test_what_can_not_be_cut_is_given_or_refused(tmp_path: Path, name: str) -> None:
    make, told = FORMS[name]

    def weights(make: Callable[[Tensor], Any], num_microbatches: int = 1, *, order: int = 1) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        batch = dict([("rows", make(ROWS)), ("labels", LABELS)][::order])
        config = RunConfig(budget="2ba", num_microbatches=num_microbatches, num_threads=1)
        Trainer(model, _loss, [batch], optimizers=[SGD(lr=0.1)], config=config).fit()
        return list(model.parameters())

    expected = weights(lambda rows: rows.to_sparse())
    for order in (1, -1):
        assert all(map(torch.allclose, weights(make, order=order), expected))
    with pytest.raises(BatchError, match=rf"A {told} in the batch can't be cut into rows.*V = 1"):
        weights(make, 2)


def test_packed_rows_are_counted_as_rows() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    assert count_rows(packed) == count_rows((packed, torch.zeros(2))) == 2
    assert count_rows_and_tokens((packed, torch.zeros(2)))[0] == count_rows_and_tokens(packed)[0] == 2


def test_a_tilde_is_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config = RunConfig(run_folder="~/runs/a", load_weights="~/w.safetensors")
    assert (config.run_folder, config.load_weights) == (tmp_path / "runs" / "a", tmp_path / "w.safetensors")


@pytest.mark.filterwarnings("ignore:.*(nested|Sparse).*:UserWarning")
@pytest.mark.parametrize("name", FORMS)
def test_what_a_step_has_left_is_known_beside_odd_tensors(name: str) -> None:
    batch, plain, written = FORMS[name][0](ROWS), torch.zeros(3), Written()
    written.add([plain])
    assert not written.has_part_of((batch, LABELS))
    assert written.has_part_of((batch, plain))
    if isinstance(batch, Tensor):
        written.add([batch])
        assert written.has_part_of((batch, LABELS))
