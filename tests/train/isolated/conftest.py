"""Worlds in which somebody takes back what they have signed; a file of tests may have a `made` of its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from torch import Tensor

if TYPE_CHECKING:
    from tests.train.vouched_world import World


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.train.vouched_world import World

    root = tmp_path_factory.mktemp("world")
    World.made_in(root)
    return root


@pytest.fixture
def world(made: Path, tmp_path: Path) -> World:
    from tests.train.vouched_world import World

    return World.found_in(Path(shutil.copytree(made, tmp_path / "world")))


@pytest.fixture(scope="module")
def never(made: Path) -> dict[str, Tensor]:
    """What everything else comes to in the run that never saw the class."""
    from tests.train.isolated.revoked_world import shared, tensors, trainer
    from tests.train.vouched_world import World

    run = trainer(World.found_in(made), None, {}, gone=True)
    run.fit()
    return shared(tensors(run))
