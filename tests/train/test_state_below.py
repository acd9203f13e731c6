"""A part of a checkpoint's tensors, by what their names begin with, is a mapping as any other."""

from __future__ import annotations

import torch

from cosmati.train.snapshot import _Below


def test_a_part_of_the_state_is_told_without_what_its_names_begin_with() -> None:
    state = {f"{part}/{name}": torch.tensor(float(n)) for n, part in enumerate("ab") for name in ("x", "y/z", "a/x")}
    part = _Below(state, "a/")
    assert list(part) == ["x", "y/z", "a/x"]
    assert len(part) == 3
    assert {name: value.item() for name, value in part.items()} == dict.fromkeys(part, 0.0)
    assert len(_Below(state, "c/")) == 0
    assert not _Below(state, "c/")
