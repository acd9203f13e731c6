"""Digests don't follow from the order in which somebody has named things."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from cosmati.core.plan import Facts, make_plan
from cosmati.train.exporting import structure_digest
from cosmati.train.identity import _content_digest
from cosmati.train.opening import _digest
from cosmati.train.run.checkpoints import signed_digest_of

FACTS = {"identity": {"model.a": "1", "model.b": "2"}, "phases": ["x", "y"], "feed": {"position": 3, "epoch": 1}}
FACTS |= {"optimizers": [{"lr": 0.1, "betas": [0.9, 0.99]}], "clock": [1, 2, 3, 4, 5, 6.5, 7.5]}  # type: ignore[dict-item]

PLANNED = Facts(num_microbatches=1, rows_per_microbatch=1, positional_data=True)


def turned(thing: Any) -> Any:
    """The same, with each mapping named from its end."""
    if isinstance(thing, Mapping):
        return {name: turned(value) for name, value in reversed(thing.items())}
    return [turned(one) for one in thing] if isinstance(thing, list) else thing


@pytest.mark.parametrize(
    ("digest", "changed"),
    [
        (lambda facts: signed_digest_of(b"state", facts), {**FACTS, "phases": ["y", "x"]}),
        (_digest, {**FACTS, "phases": ["y", "x"]}),
        (lambda facts: structure_digest(facts["identity"]), {"identity": {"model.a": "2", "model.b": "1"}}),
        (lambda facts: _content_digest([facts]), {**FACTS, "feed": {}}),
        (lambda facts: make_plan([], replace(PLANNED, settings=facts)).digest, {**FACTS, "feed": {}}),
    ],
    ids=["checkpoint", "ranks", "structure", "batches", "plan"],
)
def test_names_in_another_order_have_the_same_digest(digest: Callable[[Any], object], changed: object) -> None:
    assert turned(FACTS) == FACTS
    assert list(turned(FACTS)) != list(FACTS)
    assert digest(turned(FACTS)) == digest(FACTS)
    assert digest(changed) != digest(FACTS)


def test_tensors_under_names_in_another_order_have_the_same_digest() -> None:
    batch = {"x": torch.arange(3), "y": [torch.arange(2), {"b": torch.ones(1), "a": torch.zeros(1)}]}
    assert _content_digest([turned(batch)]) == _content_digest([batch])
    assert _content_digest([batch | {"x": batch["y"], "y": batch["x"]}]) != _content_digest([batch])


def test_seconds_of_a_clock_arent_signed() -> None:
    assert signed_digest_of(b"s", FACTS | {"clock": [1, 2, 3, 4, 5, 0.0]}) == signed_digest_of(b"s", FACTS)
    assert signed_digest_of(b"s", FACTS | {"clock": [1, 2, 3, 4, 6]}) != signed_digest_of(b"s", FACTS)
