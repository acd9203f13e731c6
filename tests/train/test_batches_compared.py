"""A loader's first and last batches are compared at a resume whatever they're made of, and a list's all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from cosmati.errors import DataError
from cosmati.train.content import content_digest
from tests.train.test_other_run_more import LABELS, ROWS, assert_goes_on, is_refused, run

Row = tuple[Tensor, Tensor]


class Scaled(Dataset[Row]):
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Row:
        return ROWS[index] * self.scale, LABELS[index]


class Rows:
    """A batch object, with a private store, as graph libraries have it."""

    def __init__(self, rows: list[Row]) -> None:
        self._store = {"x": torch.stack([x for x, _ in rows]), "y": torch.stack([y for _, y in rows])}

    def to(self, device: torch.device) -> Rows:
        return self


def as_arrays(rows: list[Row]) -> Any:
    return np.stack([x.numpy() for x, _ in rows]), [int(y) for _, y in rows]


def as_strings(rows: list[Row]) -> Any:
    return {"x": [" ".join(map(str, x.tolist())) for x, _ in rows], "y": [int(y) for _, y in rows]}


def loss(model: nn.Module, data: Any) -> Tensor:
    if isinstance(data, Rows):
        return cross_entropy(model(data._store["x"]), data._store["y"])
    x, y = data.values() if isinstance(data, dict) else data
    if isinstance(x, list):
        x = [[float(number) for number in row.split()] for row in x]
    return cross_entropy(model(torch.as_tensor(x)), torch.as_tensor(y))


@pytest.mark.parametrize("collate", [as_arrays, as_strings, Rows])
@pytest.mark.parametrize("stop_at", [3, 6])
def test_a_loaders_batches_are_compared(tmp_path: Path, collate: Callable[..., Any], stop_at: int) -> None:
    def loading(scale: float) -> dict[str, Any]:
        data = lambda: DataLoader(Scaled(scale), 8, shuffle=True, collate_fn=collate)  # noqa: E731
        return {"data": data, "loss": loss, "budget": "9ba"}

    run(tmp_path / "run", stop_at=stop_at, **loading(1.0))
    with pytest.raises(DataError, match=r"first batch isn't the one|is another one now"):
        run(tmp_path / "run", **loading(3.0))
    assert_goes_on(tmp_path / "run", loading(1.0))


def test_a_list_of_batch_objects_is_compared(tmp_path: Path) -> None:
    def listed(changed: float) -> dict[str, Any]:
        def data() -> list[Rows]:
            return [
                Rows([(ROWS[j] + (changed if i == 32 else 0), LABELS[j]) for j in range(i, i + 8)])
                for i in range(0, 48, 8)
            ]

        return {"data": data, "loss": loss}

    is_refused(tmp_path / "run", "data: content", listed(0.0), listed(1.0))


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: object) -> None:
        self.x = x


ONE = torch.arange(6.0).reshape(2, 3)


def nested(length: int) -> Tensor:
    return torch.nested.nested_tensor([ONE[0], ONE[1, :length]], layout=torch.jagged)


UNLIKE: list[object] = [
    ONE, ONE.T, ONE.double(), ONE + 1, ONE.numpy(), [0.0], [1], [True], (1,), {"a": 1}, {"b": 1}, {1}, {1, 2}, "1",
    b"1", None, Slotted(1), Slotted(2), np.array(["a", "b"]), np.array([{"a": 1}], dtype=object), ONE.to_sparse(),
    nested(2), nested(1),
    torch.nn.utils.rnn.pack_sequence([ONE[0]]), torch.empty(0), torch.empty(0, 2), ONE.to(torch.complex64).conj(),
]  # fmt: skip


def test_content_has_digests_of_its_own() -> None:
    digests = [content_digest(one) for one in UNLIKE]
    assert len({*digests}) == len(UNLIKE)
    assert content_digest(ONE.T.contiguous()) == content_digest(ONE.T)
    huge = torch.sparse_coo_tensor(torch.tensor([[0, 0, 1 << 40]]), torch.ones(3), (1 << 41,), check_invariants=True)
    assert content_digest(huge) == content_digest(huge.coalesce()) != content_digest(huge * 2)
    assert content_digest({"a", "b", "c"}) == content_digest({"c", "b", "a"})
    assert content_digest({"a": 1, "b": {2: 3, 1: 4}}) == content_digest({"b": {1: 4, 2: 3}, "a": 1})
    assert content_digest({"a": 1, "b": 2}) != content_digest({"a": 2, "b": 1})
    itself: list[object] = []
    itself.append(itself)
    assert content_digest(itself) == content_digest(itself)


@pytest.mark.parametrize("as_loader", [False, True])
def test_the_order_of_names_makes_no_other_batch(tmp_path: Path, as_loader: bool) -> None:
    """It may follow from a set's, which each process has of its own: `{name: full[name] for name in full & wanted}`."""

    def data(names: str) -> Any:
        rows = [{name: {"x": ROWS[i : i + 8], "y": -ROWS[i : i + 8]}[name] for name in names} for i in range(0, 48, 8)]
        return DataLoader(rows, batch_size=None, collate_fn=lambda batch: batch) if as_loader else rows  # type: ignore[arg-type]

    def named(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"]).square().mean() + model(batch["y"]).mean()

    run(tmp_path, stop_at=3, data=lambda: data("yx"), loss=named)
    assert run(tmp_path, data=lambda: data("xy"), loss=named).clock.step > 3
