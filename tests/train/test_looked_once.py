"""A batch is looked at once after its step: what its owner does to it later is no step's doing."""

from __future__ import annotations

import pytest
import torch

from cosmati.errors import DataError
from cosmati.train.seen import LastGiven


def test_a_buffer_that_is_filled_anew_after_the_look_was_changed_by_no_step() -> None:
    buffer = torch.zeros(4)
    last = LastGiven()
    last.note(buffer)
    last.look()
    buffer.fill_(1)
    last.look()
    last.note(buffer)
    buffer.fill_(2)  # a step does it
    last.look()
    with pytest.raises(DataError, match="was changed in place since a step was given it"):
        last.note(buffer)
