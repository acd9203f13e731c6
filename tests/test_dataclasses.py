"""Values, not state: what the rooms' dataclasses promise, over all of them."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pkgutil
from functools import cache

import pytest

from cosmati.core.method import Method
from cosmati.optim.optimizers import Optimizer
from cosmati.optim.schedules import WarmedUp

ROOMS = ("core", "data", "ledger", "methods", "models", "optim", "provenance", "records", "routing", "train")
CHANGES = {
    "data.packing._Open",
    "ledger.derived.answers._Total",
    "ledger.derived.folder._State",
    "ledger.exclusion._Looking",
    "ledger.query.ContributionSum",
    "ledger.query._Sum",
    "train.observers.observer.History",
}
"""Those that count something up."""
AUTHORITY = "provenance.authority.repository.RepositoryChange"
"""Gathers what is signed at its end; its room's packages are of an extra (`make extras`)."""
HAS_AUTHORITY = importlib.util.find_spec("tuf") is not None


@cache
def dataclasses_of(room: str) -> dict[str, type]:
    """Every dataclass that a room defines, by its name below `cosmati`."""
    package = importlib.import_module(f"cosmati.{room}")
    modules = [info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    needing = ("cosmati.provenance.authority.", "cosmati.data.signing")
    modules = [name for name in modules if HAS_AUTHORITY or not name.startswith(needing)]
    return {
        f"{module.removeprefix('cosmati.')}.{name}": kind
        for module in [package.__name__, *modules]
        for name, kind in vars(importlib.import_module(module)).items()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == module
    }


@pytest.mark.parametrize("room", ROOMS)
def test_values_are_frozen(room: str) -> None:
    found = dataclasses_of(room)
    mutable = {name for name, kind in found.items() if not kind.__dataclass_params__.frozen}  # type: ignore[attr-defined]
    known = CHANGES | ({AUTHORITY} if HAS_AUTHORITY else set())
    assert mutable == {name for name in known if name.startswith(f"{room}.")}


def test_configurations_are_written_with_names() -> None:
    """`AdamW(1e-3, 0.9)` would change its meaning with the next option."""
    found = dataclasses_of("methods") | dataclasses_of("optim") | dataclasses_of("core")
    configurations = {name: kind for name, kind in found.items() if issubclass(kind, Method | Optimizer | WarmedUp)}
    assert len(configurations) > 30
    positional = {
        name: [field.name for field in dataclasses.fields(kind) if not field.kw_only]
        for name, kind in configurations.items()
    }
    assert {name: fields for name, fields in positional.items() if fields} == {}


def test_facts_of_a_run_are_written_with_names() -> None:
    """More fields than anybody can keep in order."""
    for name in ("core.plan.Facts", "train.config.RunConfig"):
        kind = dataclasses_of(name.split(".")[0])[name]
        assert all(field.kw_only for field in dataclasses.fields(kind)), name
        with pytest.raises(TypeError):
            kind(1, 2)


def test_what_there_are_many_of_has_no_dictionary() -> None:
    named = {"core.batch.Batch", "core.lineage.Lineage", "core.loss.Loss"}
    many = named | set(dataclasses_of("ledger"))
    found = dataclasses_of("core") | dataclasses_of("ledger")
    assert len(many) > 10
    assert {name for name in many if "__slots__" not in vars(found[name])} == set()
