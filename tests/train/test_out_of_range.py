"""Labels and ids that a model has no place for: a sentence with the label, how many there may be, and the mend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.core.batch import Data
from cosmati.core.loss import Classification, LanguageModel, Loss
from cosmati.core.out_of_range import look_once
from cosmati.data.in_memory import InMemory
from cosmati.errors import BatchError
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation
from cosmati.train.trainer import Trainer

Rows = tuple[Tensor, Tensor]


def _rows(labels: Sequence[int]) -> Rows:
    return torch.ones(len(labels), 4), torch.tensor(labels)


def _own(model: nn.Module, data: Data) -> Tensor:
    return F.cross_entropy(model(data[0]), data[1])


def _of_logs(model: nn.Module, data: Data) -> Tensor:
    return F.nll_loss(F.log_softmax(model(data[0]), 1), data[1], ignore_index=-7)


def _fit(
    loss: Callable[..., object], rows: Rows, held_out: Rows | None = None, num_outputs: int = 5, pieces: int = 1
) -> None:
    evaluation = None if held_out is None else Evaluation([held_out], {"own": _own})
    config = RunConfig(budget="1ba", num_microbatches=pieces)
    data = InMemory(rows, rows_per_step=len(rows[1]))
    model = nn.Linear(4, num_outputs)
    Trainer(model, loss, data, optimizers=SGD(lr=0.1), evaluation=evaluation, config=config).fit()  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", [Classification(5), _own, _of_logs])
@pytest.mark.parametrize("pieces", [1, 2])
def test_labels_beyond_the_models_classes(loss: Callable[..., object], pieces: int) -> None:
    with pytest.raises(BatchError, match=r"Labels from [02] to 9 .* 5 classes: 0 to 4\. Give it 10 outputs"):
        _fit(loss, _rows([0, 9, 2, 9]), pieces=pieces)


def test_labels_below_0_are_told_of_the_ignored_one() -> None:
    with pytest.raises(BatchError, match=r"Labels from -1 to 3 .*number the labels from 0\. .* has -100"):
        _fit(_own, _rows([0, -1, 3, -100]), num_outputs=3)
    _fit(Classification(3, ignore_index=-1), _rows([0, -1, 2, -1]), num_outputs=3)


def test_labels_that_only_an_evaluation_has() -> None:
    with pytest.raises(BatchError, match="Labels from 0 to 7"):
        _fit(Classification(5), _rows([0, 1]), _rows([0, 7]))


def test_ids_beyond_the_vocabulary() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    config = RunConfig(budget="1ba")
    tokens = torch.tensor([[0, 1, 11, 2], [3, 4, 5, 6]])
    trainer = Trainer(model, LanguageModel(8), InMemory(tokens, 2), optimizers=SGD(lr=0.1), config=config)
    with pytest.raises(BatchError, match=r"Ids from 0 to 11 .* has 8 rows: 0 to 7"):
        trainer.fit()


def test_an_index_error_of_ones_own_stays_what_it_is() -> None:
    def loss(model: nn.Module, data: Data) -> Tensor:
        return torch.as_tensor(model(data[0]).sum() * data[2])

    with pytest.raises(IndexError, match="tuple index out of range"):
        _fit(loss, _rows([0, 1]))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8])
def test_any_integers_are_labels(dtype: torch.dtype) -> None:
    logits, target = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    want = F.cross_entropy(logits, target)
    torch.testing.assert_close(Classification(3).compare(logits, target.to(dtype)).mean(), want)


def test_labels_of_another_shape_are_told_which_one() -> None:
    with pytest.raises(BatchError, match=r"Labels \(4, 1\) don't fit logits \(4, 3\).* \(4,\)"):
        Classification(3).compare(torch.randn(4, 3), torch.tensor([[0], [2], [1], [1]]))


def test_an_accelerators_labels_are_looked_at_once() -> None:
    model, logits = nn.Linear(4, 5), torch.randn(3, 5)
    look_once(model, logits, torch.tensor([0, 4, -100]), -100)
    look_once(model, logits, torch.tensor([0, 9, -100]), -100)
    for wrong in (5, -1):
        with pytest.raises(BatchError, match="the model gives 5 classes"):
            look_once(nn.Linear(4, 5), logits, torch.tensor([0, wrong, -100]), -100)


def test_tensors_without_content_have_a_loss_as_ever() -> None:
    model = nn.Linear(4, 3, device="meta")
    data = torch.ones(2, 4, device="meta"), torch.zeros(2, dtype=torch.long, device="meta")
    assert Classification(3)(model, data).sum.is_meta


class TwoHeads(Classification):
    """Takes the first of a model's outputs, and counts labels from 1."""

    def compare(self, logits: Any, target: Any) -> Loss:
        return super().compare(logits[0], target - 1)


def test_labels_of_ones_own_meaning_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cpu", False)
    data = _rows([1, 2, 3])
    model = nn.Linear(4, 3)
    assert TwoHeads(3)(lambda x: (model(x), x), data).weight == 3  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="Labels from 1 to 3"):
        Classification(3)(model, data)
    look_once(nn.Linear(4, 1), torch.ones(2, 1), torch.tensor([[1], [0]]), -100)  # one-hot


def test_no_byte_is_taken_for_the_ignored_label() -> None:
    target = torch.tensor([156, 1, 2], dtype=torch.uint8)
    assert Classification(300).compare(torch.randn(3, 300), target).weight == 3
    target[0] = 255
    assert Classification(300, ignore_index=255).compare(torch.randn(3, 300), target).weight == 2


def test_255_may_be_what_has_no_label() -> None:
    with pytest.raises(BatchError, match=r"Labels from 1 to 255 .* ignore_index"):
        Classification(3).compare(torch.randn(2, 3), torch.tensor([1, 255]))


class Refusing(Tensor):
    """Logits of one's own kind, whose loss raises an error of one's own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.cross_entropy:
            raise IndexError("nothing is out of range")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_an_error_among_labels_that_are_in_range_stays_what_it_is() -> None:
    with pytest.raises(IndexError, match="nothing is out of range"):
        Classification(3).compare(torch.randn(2, 3).as_subclass(Refusing), torch.tensor([1, 2]))
    with pytest.raises(IndexError, match="no dimensions"):
        Classification(3).compare(torch.tensor(1.0), torch.tensor(0))


class Looks(nn.Module):
    """Two tables, of which the second one's ids may be wrong, or none."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.one, self.two, self.fails = nn.Embedding(4, 2), nn.Embedding(3, 2), fails

    def forward(self, ids: Tensor) -> Tensor:
        found = self.one(ids)
        if self.fails:
            return found[:, [0, 1, 9]]  # type: ignore[no-any-return]  # an error of its own
        return found + self.two(ids)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ([0, 3], "Ids from 0 to 3 in this batch, and the model's embedding has 3 rows: 0 to 2. Give the model"),
        ([-1, 2], "Ids from -1 to 2 in this batch, and the model's embedding has 4 rows: 0 to 3. Give the model"),
        ([1, 4], "Ids from 1 to 4 in this batch, and the model's embedding has 4 rows: 0 to 3. Give the model"),
    ],
)
def test_ids_that_an_embedding_has_no_row_for(ids: list[int], told: str) -> None:
    with pytest.raises(BatchError, match=told):
        _run_once(Looks(fails=False), ids)


def test_another_index_that_is_none_is_left_to_who_reads_it() -> None:
    with pytest.raises(IndexError, match="index 9 is out of bounds"):
        _run_once(Looks(fails=True), [0, 3])


@pytest.mark.parametrize("ids", [[0, 3], []])
def test_an_embedding_with_ids_that_it_has_is_not_blamed(ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch raises in `F.embedding` for another reason: here somebody has put an error in its place."""

    def broken(*_: Any, **__: Any) -> Tensor:
        raise IndexError("of another kind")

    monkeypatch.setattr(torch, "embedding", broken)
    with pytest.raises(IndexError, match="of another kind"):
        _run_once(Looks(fails=False), ids)


def _run_once(model: nn.Module, ids: list[int]) -> None:
    data = [{"ids": torch.tensor(ids, dtype=torch.long)}]
    config = RunConfig(budget="1ba")
    Trainer(model, lambda m, b: m(b["ids"]).sum(), data, optimizers=SGD(lr=0.1), config=config).fit()
