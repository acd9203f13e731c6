"""A copy that is written beside the loop is none of its tensors, and takes the memory of the copy before."""

from __future__ import annotations

from typing import Any

import torch

from cosmati.train.run.saving import Saver


def writer() -> Any:
    made: Any = object.__new__(Saver)
    made._kept = {}
    return made


def test_a_copy_goes_where_the_last_one_was_if_it_fits() -> None:
    made, weight, grown = writer(), torch.ones(2, 3, requires_grad=True), torch.zeros(2)
    first = made._copied("model", {"w": weight, "g": grown})
    assert torch.equal(first["w"], weight)
    assert first["w"].data_ptr() != weight.data_ptr()
    assert not first["w"].requires_grad
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    with torch.no_grad():
        weight.add_(1)
    second = made._copied("model", {"w": weight, "g": torch.ones(3)})
    assert second["w"].data_ptr() == places["w"]
    assert torch.equal(second["w"], weight.detach())
    assert second["g"].tolist() == [1, 1, 1]
    third = made._copied("model", {"w": weight.detach().double()})
    assert third["w"].dtype == torch.float64
    other = made._copied("state", {"w": weight})
    assert other["w"].data_ptr() not in (second["w"].data_ptr(), third["w"].data_ptr())


def test_what_is_sparse_is_handed_on_to_be_refused() -> None:
    sparse = torch.ones(2, 2).to_sparse()
    assert writer()._copied("model", {"s": sparse})["s"] is sparse
