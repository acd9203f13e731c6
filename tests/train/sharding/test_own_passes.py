"""What models and losses do by themselves has the bits of one process under each sharding, or is refused by name."""

from __future__ import annotations

import json

import pytest

from tests.processes import launch_ranks
from tests.train.sharding import own_passes_worker

pytestmark = pytest.mark.long

FROZEN = "trained, and doesn't now: a loss has frozen it, or the forward pass, and what teaches it leaves it so"
REFUSED = {
    "full, reentrant": "A function of the model runs a backward pass within its own",
    "full, reversible": "A function of the model runs a backward pass within its own",
    "full, reentrant after a layer": "A function of the model runs a backward pass within its own",
    "full, a moving teacher": "The forward pass changes teacher.0.weight",
    "full, a view": "view is a view of head.weight, whose memory sharding='full' cuts",
    "full, freezing": "blocks.0.0.weight trained, and the forward pass has frozen it",
    "full, freezing within": "blocks.0.0.bias trained, and the forward pass has frozen it",
    "optimizer, freezing within": f"blocks.0.0.bias {FROZEN}",
    "replicated, freezing within": f"blocks.0.0.bias {FROZEN}",
    "full, a penalty": "The loss differentiates through the model by itself",
    "full, replaced": "The model isn't what was planned: head.bias is another tensor",
}
ALONE_TOO = {
    "full, a container": "The model is a Apart, which has no forward of its own",
    "full, a view": REFUSED["full, a view"],
    "full, replaced": REFUSED["full, replaced"],
    "full, freezing": f"blocks.0.0.weight {FROZEN}",
    "full, freezing within": f"blocks.0.0.bias {FROZEN}",
    "optimizer, freezing within": f"blocks.0.0.bias {FROZEN}",
    "replicated, freezing within": f"blocks.0.0.bias {FROZEN}",
}


def _found(world: int) -> dict[str, str]:
    found: dict[str, str] = json.loads(launch_ranks([own_passes_worker.__file__], world)[0])
    return found


@pytest.mark.timeout(300)
def test_passes_of_one_s_own_have_the_bits_of_one_process_or_are_refused() -> None:
    alone, both = _found(1), _found(2)
    assert alone.keys() == both.keys()
    for name, outcome in both.items():
        if message := (ALONE_TOO | REFUSED).get(name):
            assert outcome.startswith(f"PlanError: {message}"), name
        else:
            assert outcome == alone[name], name
        assert alone[name].startswith(f"PlanError: {ALONE_TOO[name]}" if name in ALONE_TOO else "["), name
    for sharding in ("replicated", "optimizer"):
        for more in ("", ", after a layer"):
            kinds = {
                alone[f"{sharding}, {kind}{more}"] for kind in ("plain", "checkpointed", "reentrant", "reversible")
            }
            assert len(kinds) == 1, "how a gradient is computed changes none"
    for more in ("nothing in a parameter", "a parameter with gaps"):
        assert alone[f"replicated, {more}"] == alone[f"optimizer, {more}"]
    assert alone["full, plain"] == alone["full, checkpointed"]
