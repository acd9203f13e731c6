"""A buffer that has grown since takes the saved tensor where parameters are cut, as it does where they're whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cosmati.errors import CheckpointError
from cosmati.train.layout.sharded import Sharded


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(1))
        self.register_buffer("none", None)


def test_buffers_of_a_run_that_goes_on_may_have_grown() -> None:
    layout: Any = object.__new__(Sharded)
    layout._locals, layout._model = {}, Grows()
    layout.load({"bank": torch.arange(3.0), "none": torch.ones(2)})
    assert {name: value.tolist() for name, value in layout._model.named_buffers()} == {
        "bank": [0.0, 1.0, 2.0],
        "none": [1.0, 1.0],
    }
    with pytest.raises(CheckpointError, match="other isn't in the model"):
        layout.load({"bank": torch.ones(1), "other": torch.ones(1)})
