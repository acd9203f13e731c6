"""Recipes of which one rank dies in the middle of a deletion, as DIES says: its number, and where."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from cosmati.core.loss import Classification
from cosmati.data.in_memory import InMemory
from cosmati.forget import deletion
from cosmati.forget.shredding import SHREDDED
from cosmati.forget.succession import REQUEST
from cosmati.ledger.row_keys import RowKeys
from cosmati.optim import SGD
from cosmati.recipes.recipe import Recipe
from cosmati.train.config import RunConfig
from tests.forget import recipe as publisher
from tests.train.isolated.samples import CLASSES


def recipe() -> Recipe:
    """Return the sample's."""
    if os.environ.get("DIES") == f"{os.environ.get('RANK')} training":
        return publisher.killed()
    _die_when_told()
    return publisher.recipe()


def without_policy() -> Recipe:
    """Return one whose ledger calls all rows one class, though its data have three."""
    _die_when_told()
    config = RunConfig(budget="6ba", num_microbatches=4, num_threads=1, ledger=True, checkpoint_every="2ba")
    return Recipe(
        name="no policy",
        model=lambda: torch.nn.Linear(4, 3),
        loss=Classification(3),
        data=_rows,
        optimizers=(SGD(lr=0.1),),
        config=config,
    )


def _rows() -> InMemory:
    labels = torch.arange(48) % 3
    inputs = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    return InMemory((inputs, labels), 16, labels, CLASSES)


def _die_when_told() -> None:
    rank, _, place = os.environ.get("DIES", "").partition(" ")
    if rank != os.environ.get("RANK"):
        return
    if place == "request":
        _tear_the_request()
    elif place == "certificate":
        certify = deletion.certify

        def of_the_rest(*given: Any) -> object:
            return _die() if given[-1].status == SHREDDED else certify(*given)

        deletion.certify = of_the_rest  # type: ignore[assignment]
    elif place:
        _die_after_saves(int(place))


def _die_after_saves(number: int) -> None:
    """Die where so many files of keys were stored, the next one half written."""
    save, saves = RowKeys.save, []

    def counted(keys: RowKeys, path: Path) -> None:
        if len(saves) == number:
            path.with_name(f"{path.name}.tmp").write_bytes(keys.to_bytes()[:999])
            _die()
        save(keys, path)
        saves.append(path)

    RowKeys.save = counted  # type: ignore[method-assign]


def _tear_the_request() -> None:
    write = Path.write_text

    def torn(path: Path, text: str, *given: object) -> int:
        if path.name == REQUEST:
            write(path, text[: len(text) // 2])
            _die()
        return write(path, text, *given)  # type: ignore[arg-type]

    Path.write_text = torn  # type: ignore[assignment,method-assign]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
