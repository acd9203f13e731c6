"""New parameters in the groups of old ones."""

from __future__ import annotations

import torch
from torch import nn

from cosmati.methods.building_blocks.surgery import join_groups


def test_joins_every_group_that_holds_the_parameter() -> None:
    old, other, new = (nn.Parameter(torch.full((2,), value)) for value in (1.0, 1.0, 3.0))
    first = torch.optim.SGD([{"params": [other], "lr": 0.1}, {"params": [old], "lr": 0.2}])
    second, third = torch.optim.Adam([("old", old)]), torch.optim.SGD([other], lr=0.1)
    join_groups([first, second, third], old, {"new": new})
    assert [len(group["params"]) for group in first.param_groups] == [1, 2], "equal values aren't the same parameter"
    assert first.param_groups[1]["params"][1] is new
    assert second.param_groups[0]["param_names"] == ["old", "new"]
    assert len(third.param_groups[0]["params"]) == 1
    single = torch.optim.SGD([old], lr=0.5)
    join_groups(single, old, {"new": new})
    join_groups(None, old, {"new": new})
    new.sum().backward()
    single.step()
    assert new.tolist() == [2.5, 2.5]
