"""What is wrong is said, by name, or handled: every method that reads batches, on batches that nobody planned for."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cosmati import methods as m
from cosmati.core.batch import Batch, Lineage, first_tensor, iterate_tensors
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Classification, LanguageModel
from cosmati.core.method import Position, Stage, overrides
from cosmati.errors import CosmatiError, PlanError
from tests.methods.cases import CASES, NUM_STEPS, Case, network

BATCH_CASES = [case for case in CASES if overrides(case.on, "batch") and case.on.stage is not Stage.REPLACE]


def images(rows: int = 8, *, channels: int = 1, size: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    draws = torch.rand(rows, channels, size, size, generator=torch.Generator().manual_seed(0))
    return (draws * 255).to(dtype) if not dtype.is_floating_point else draws.to(dtype)


def classes(rows: int = 8) -> torch.Tensor:
    return torch.arange(rows) % 10


def tokens(rows: int = 8, length: int = 15) -> torch.Tensor:
    return torch.arange(rows * length).view(rows, length) % 256


BATCHES: dict[str, Callable[[], Any]] = {
    "images": lambda: (images(), classes()),
    "one row": lambda: (images(1), classes(1)),
    "no rows": lambda: (images(0), classes(0)),
    "one pixel": lambda: (images(size=1), classes()),
    "three channels": lambda: (images(channels=3), classes()),
    "float64": lambda: (images(dtype=torch.float64), classes()),
    "bfloat16": lambda: (images(dtype=torch.bfloat16), classes()),
    "bytes": lambda: (images(dtype=torch.uint8), classes()),
    "no channels": lambda: (images()[:, 0], classes()),
    "features": lambda: (images().flatten(1), classes()),
    "numbers": lambda: (images()[:, 0, 0, 0], classes()),
    "video": lambda: (images()[:, :, None].expand(-1, -1, 3, -1, -1), classes()),
    "soft targets": lambda: (images(), nn.functional.one_hot(classes(), 10).float()),
    "small integers as targets": lambda: (images(), classes().to(torch.uint8)),
    "targets by pixel": lambda: (images(), classes()[:, None, None].expand(8, 8, 8)),
    "targets out of range": lambda: (images(), classes() + 5),
    "tokens": lambda: (tokens(), tokens()),
    "tokens of one row": lambda: (tokens(1), tokens(1)),
    "one token each": lambda: (tokens(length=1), tokens(length=1)),
    "tokens alone": lambda: tokens(length=16),
    "named": lambda: {"input": images(), "target": classes()},
    "named tokens": lambda: {"input_ids": tokens(), "labels": tokens(), "attention_mask": torch.ones_like(tokens())},
    "no target": lambda: (images(),),
    "two inputs": lambda: ((images(), images()), classes()),
}


def position(step: int, *, is_text: bool) -> Position:
    loss = LanguageModel() if is_text else Classification(10)
    return Position(Clock(step=step), Budget(Time.parse(f"{NUM_STEPS}ba")), 0, 0, network(is_text=is_text), loss)


def fits(at: Position, data: Any) -> bool:
    try:
        at.loss(at.model, data)
    except Exception:  # noqa: BLE001  (whatever a model says of data that aren't for it)
        return False
    return True


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("case", BATCH_CASES, ids=str)
def test_says_what_is_wrong_or_does_right(case: Case, name: str) -> None:
    data = BATCHES[name]()
    rows = len(next(iterate_tensors(data)))
    batch = Batch(data, Lineage.of_rows(0, rows))
    is_text = "token" in name
    for step in range(NUM_STEPS):
        at = position(step, is_text=is_text)
        if isinstance(case.on, m.SelectiveBackprop) and not fits(at, data):
            continue  # The model itself can't read it, and says so.
        try:
            changed = case.on.batch(batch, at)
        except CosmatiError as error:
            said = str(error)
            # Who, and how to mend it.
            assert type(case.on).__name__ in said or "batch" in said.lower(), said
            assert len(said) > 40, said
            continue
        lengths = {len(tensor) for tensor in iterate_tensors(changed.data) if tensor.ndim}
        assert lengths <= {changed.num_rows}
        read = first_tensor(changed.data)
        assert read.dtype == first_tensor(data).dtype
        assert not read.is_floating_point() or bool(read.isfinite().all())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_unknown_options_are_refused(case: Case) -> None:
    with pytest.raises(TypeError, match="strength"):
        type(case.on)(strength=1)  # type: ignore[call-arg]
    for field in dataclasses.fields(case.on):
        if isinstance(getattr(case.on, field.name), str) and field.name != "target_layer_name":
            with pytest.raises(CosmatiError):
                dataclasses.replace(case.on, **{field.name: "no such thing"})


NUMBERS = [
    (case, field.name)
    for case in CASES
    for field in dataclasses.fields(case.on)
    if isinstance(getattr(case.on, field.name), int | float)
    and not isinstance(getattr(case.on, field.name), bool)
    and field.name not in ("depth", "seed")
]


@pytest.mark.parametrize(("case", "option"), NUMBERS, ids=str)
@pytest.mark.parametrize("value", [-1, float("nan")])
def test_numbers_out_of_range_are_refused(case: Case, option: str, value: float) -> None:
    with pytest.raises(PlanError, match=option):
        dataclasses.replace(case.on, **{option: value})


@pytest.mark.parametrize("case", [case for case in CASES if case.on.stage in (Stage.REPLACE, Stage.CAST)], ids=str)
def test_a_model_with_nothing_to_replace_is_said(case: Case) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Sigmoid())
    before = str(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            changed = case.on.apply(model)
        except CosmatiError as error:
            assert type(case.on).__name__ in str(error)  # noqa: PT017
            return
    if isinstance(case.on, m.ChannelsLast | m.NoOpModel):
        return
    assert str(changed) == before
    assert any(f"{type(case.on).__name__} changes nothing" in str(warning.message) for warning in said)
