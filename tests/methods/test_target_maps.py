"""Which targets count as maps of their images."""

from __future__ import annotations

import pytest
import torch

from cosmati.core.batch import Batch, Data, Lineage
from cosmati.core.loss import MixedTarget
from cosmati.errors import PlanError
from cosmati.methods.building_blocks.target_maps import refuse_target_map

IMAGES = torch.zeros(5, 3, 4, 6)


def of(data: Data) -> Batch:
    return Batch(data, Lineage(torch.arange(5), torch.zeros(5, dtype=torch.int64)))


def refuse(batch: Batch, size: tuple[int, int] | None = None) -> None:
    refuse_target_map(batch, "It moves images", "Leave it out.", size=size)


@pytest.mark.parametrize("shape", [(5,), (5, 10), (5, 6), (5, 6, 4), (5, 2, 4, 3)])
def test_other_targets_are_let_through(shape: tuple[int, ...]) -> None:
    refuse(of((IMAGES, torch.zeros(shape))))


@pytest.mark.parametrize("shape", [(5, 4, 6), (5, 1, 4, 6), (5, 10, 4, 6)])
@pytest.mark.parametrize("kind", [torch.int64, torch.float32])
def test_maps_are_refused(shape: tuple[int, ...], kind: torch.dtype) -> None:
    target = torch.zeros(shape, dtype=kind)
    for given in (target, MixedTarget(target, target, torch.tensor(0.5))):
        batch = of((IMAGES, target)).replace(target=given)
        with pytest.raises(PlanError, match=r"It moves images, and the target .* each of their pixels. Leave it out."):
            refuse(batch)


def test_images_that_came_smaller_are_compared_in_full_size() -> None:
    batch = of((IMAGES, torch.zeros(5, 8, 12)))
    refuse(batch)
    with pytest.raises(PlanError, match="each of their pixels"):
        refuse(batch, size=(8, 12))


def test_a_batch_without_a_target_or_an_image_is_let_through() -> None:
    refuse(of(IMAGES))
    refuse(of(([1, 2, 3, 4, 5], torch.zeros(5, 4, 6))))
