"""Unsigned data and policies say that they're declared, wherever a run is described; `require_signed` refuses them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati import InMemory, RunConfig, Trainer
from cosmati.cli.main import app
from cosmati.data.loader import StreamingLoader
from cosmati.data.packed import PackedSource
from cosmati.data.source import StreamingSource
from cosmati.errors import PlanError
from cosmati.explorer.report import render_report
from cosmati.explorer.run_view import read_run
from cosmati.ledger.query import VerifiedLedger
from cosmati.optim.optimizers import SGD
from cosmati.provenance.authority.errors import DeclaredOnlyError, UntrustedRootError
from cosmati.train.signed import vouched_of
from tests.provenance.authority.people import NEWS
from tests.provenance.authority.test_policies import PolicyPeople
from tests.train.vouched_world import POLICY, World, loss, revoke


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    World.made_in(root)
    return root


@pytest.fixture
def world(made: Path, tmp_path: Path) -> World:
    return World.found_in(Path(shutil.copytree(made, tmp_path / "world")))


def bare(data: Any, **config: Any) -> Trainer:
    settings: Any = {"budget": "2ba", "num_threads": 1} | config
    return Trainer(nn.Linear(1, 1), loss, data, optimizers=SGD(lr=1e-3), config=RunConfig(**settings))


def data_root(folder: Path) -> str:
    return str(json.loads((folder / "run.json").read_text())["digests"]["data_root"])


@pytest.mark.long
def test_what_is_declared_says_so_everywhere(world: World, tmp_path: Path) -> None:
    world.ask = False
    trainer = world.trainer(tmp_path / "run", {}, budget="2ba")
    assert "data: declared" in str(trainer.plan)
    assert "policy: declared" in str(trainer.plan)
    trainer.fit()
    assert data_root(tmp_path / "run") == "declared"
    signed = VerifiedLedger(tmp_path / "run" / "ledger").details["signed"]
    assert {name: words.partition(":")[0] for name, words in signed.items()} == {
        "data": "declared",
        "policy": "declared",
    }
    assert "declared" in CliRunner().invoke(app, ["ledger", "verify", str(tmp_path / "run")]).output
    page = render_report(title="Run", run=read_run(tmp_path / "run"))
    assert "The classes of the data are declared" in page


def test_what_is_signed_says_by_whom(world: World, tmp_path: Path) -> None:
    trainer = world.trainer(tmp_path / "run", {}, budget="2ba")
    trainer.fit()
    assert data_root(tmp_path / "run") == world.people.pin
    assert f"data: signed, of the authority {world.people.pin[:12]}" in str(trainer.plan)
    run = read_run(tmp_path / "run")
    assert not run.warnings
    assert f"signed, of the authority {world.people.pin[:12]}" in render_report(title="Run", run=run)
    record = tmp_path / "run" / "run.json"
    record.write_text(record.read_text().replace(world.people.pin, "declared"))
    assert any("who has signed the data" in one for one in read_run(tmp_path / "run").warnings)


def test_who_has_no_classes_reads_nothing_of_it() -> None:
    rows = torch.arange(16.0)
    assert "declared" not in str(bare(InMemory(rows, 8)).plan)
    assert "declared" not in str(bare([rows, rows]).plan)
    two = InMemory(rows, 8, torch.arange(16) % 2, ("a", "b"))
    assert "data: declared" in str(bare(two).plan)


def test_a_loop_of_ones_own_is_refused_beside_signed_data(world: World) -> None:
    trainer = bare(world.sources(), require_signed=True)
    with pytest.raises(DeclaredOnlyError, match=r"fit\(\)"):
        trainer.step(torch.arange(8))


class Renamed:
    """A source around a signed one, which gives its classes other names."""

    def __init__(self, source: StreamingSource) -> None:
        self.dataset, self.digest, self.order = source.dataset, source.digest, source.order
        self.class_names = tuple(reversed(source.class_names))


@pytest.mark.parametrize("around", [Renamed, lambda source: PackedSource(source, source.class_names[::-1])])
def test_classes_that_something_around_signed_data_names_are_declared(world: World, around: Any) -> None:
    data = around(world.sources())
    assert vouched_of(world.sources()) is not None
    assert vouched_of(data) is None, "the plan says `declared`, and nobody is asked again for what they never said"
    with pytest.raises(DeclaredOnlyError, match="authority="):
        bare(data, require_signed=True)


@pytest.mark.parametrize(
    "data", [None, InMemory(torch.arange(16.0), 8), [torch.arange(8.0)]], ids=["own loop", "in memory", "a list"]
)
def test_data_that_nobody_signs_are_refused(data: Any) -> None:
    with pytest.raises(DeclaredOnlyError, match="cosmati data sign"):
        bare(data, require_signed=True)


def test_unsigned_sources_are_refused_before_anything_trains(world: World, tmp_path: Path) -> None:
    world.ask = False
    with pytest.raises(DeclaredOnlyError, match="authority="):
        world.trainer(tmp_path / "run", {}, policy="", require_signed=True)
    assert not (tmp_path / "run").exists()


def test_a_signed_policy_is_taken_and_a_declared_one_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(DeclaredOnlyError, match="policy is only declared"):
        world.trainer(tmp_path / "run", {}, require_signed=True)
    board = PolicyPeople(tmp_path / "board").begin()
    board.let_sign("dora")
    board.sign_text(POLICY, "dora")
    own: dict[str, Any] = {"policy": board.open(), "require_signed": True, "budget": "2ba"}
    with pytest.raises(UntrustedRootError, match=board.pin):
        world.trainer(tmp_path / "run", {}, trusted_roots=(world.people.pin,), **own)
    trainer = world.trainer(tmp_path / "run", {}, trusted_roots=(world.people.pin, board.pin), **own)
    assert f"policy: signed, of the authority {board.pin[:12]}" in str(trainer.plan)
    trainer.fit()
    signed = VerifiedLedger(tmp_path / "run" / "ledger").details["signed"]
    assert signed["policy"] == f"signed, of the authority {board.pin[:12]}"
    record = tmp_path / "run" / "run.json"
    assert not read_run(tmp_path / "run").warnings
    record.write_text(record.read_text().replace(board.pin, "declared"))
    assert any("who has signed the policy" in one for one in read_run(tmp_path / "run").warnings)


@pytest.mark.long
def test_a_class_that_goes_takes_all_its_bands(world: World, tmp_path: Path) -> None:
    bands = "bands: {measure: length, names: [low, high], thresholds: [0.5]}\n"
    board = PolicyPeople(tmp_path / "board").begin()
    board.let_sign("dora")
    board.sign_text(f"{POLICY}{bands}grace: {{revocation: reject}}", "dora")
    world.trainer(tmp_path / "run", {4: revoke(NEWS)}, policy=board.open(), require_signed=True, budget="12ba").fit()
    first, *_, last = VerifiedLedger(tmp_path / "run" / "ledger").tables
    at = last.classes.index(NEWS)
    assert last.bands == ("low", "high")
    assert [[row[-1][1] for row in tables.policy[2 * at : 2 * at + 2]] for tables in (first, last)] == [
        ["admit", "admit"],
        ["reject", "reject"],
    ]
    said = CliRunner().invoke(app, ["ledger", "verify", str(tmp_path / "run")])
    assert (said.exit_code, "withdrawn" in said.output) == (0, True), said.output


def test_signed_data_of_those_who_are_trusted_are_taken(world: World, tmp_path: Path) -> None:
    pin = world.people.pin
    for trusted in ((), pin, f"sha256:{pin}", ("0" * 64, pin)):
        world.trainer(tmp_path / "run", {}, policy="", require_signed=True, trusted_roots=trusted)
    with pytest.raises(UntrustedRootError, match="trusted_roots"):
        world.trainer(tmp_path / "run", {}, policy="", require_signed=True, trusted_roots="0" * 64)
    with pytest.raises(PlanError, match="require_signed=True"):
        world.trainer(tmp_path / "run", {}, policy="", trusted_roots=pin)


def test_a_loader_of_signed_data_is_signed(world: World) -> None:
    data = world.sources().dataset
    trainer = bare(StreamingLoader(data, batch_size=8), require_signed=True)
    assert trainer.prepared.watch is not None
    world.ask = False
    with pytest.raises(DeclaredOnlyError):
        bare(StreamingLoader(world.sources().dataset, batch_size=8), require_signed=True)


class Odd(list[torch.Tensor]):
    """The user's own data, that call something of theirs so."""

    def __init__(self, sources: object) -> None:
        super().__init__([torch.arange(8.0)])
        self.sources = sources
        self.dataset = self


@pytest.mark.parametrize("sources", [3, "abc", [None, 1], {"a": 1}, lambda: None])
def test_what_others_call_sources_is_theirs(sources: object) -> None:
    assert bare(Odd(sources)).prepared.watch is None


def test_nothing_of_it_changes_the_run(world: World, tmp_path: Path) -> None:
    """Neither is a fact of the run: it may be asked for at a resume."""
    first = world.trainer(tmp_path / "run", {4: lambda _w: first.stop()}, policy="", budget="8ba", ledger=True)
    digest = first.plan.digest
    assert first.fit().outcome == "stopped"
    again = world.trainer(tmp_path / "run", {}, policy="", budget="8ba", ledger=True, require_signed=True)
    assert again.plan.digest == digest
    assert again.fit().outcome == "completed"


RECIPE = """
from pathlib import Path
from cosmati import RunConfig, StreamingDataset, StreamingSource
from cosmati.models.mlp import MLP
from cosmati.optim import SGD
from cosmati.recipes.recipe import Recipe

HERE = Path(__file__).parent


def data():
    urls = [HERE / "world" / "data" / name for name in ("ada", "bob", "carol")]
    return StreamingSource(StreamingDataset(urls, columns=("number",)), 8)


def loss(model, rows):
    return model(rows.float()[:, None]).square().mean()


def recipe():
    config = RunConfig(budget="2ba", num_threads=1)
    return Recipe(name="r", model=lambda: MLP((1, 1)), loss=loss, data=data, optimizers=(SGD(lr=1e-5),), config=config)
"""


def test_the_command_refuses_them_too(world: World, tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    run = CliRunner().invoke

    def train(*more: str) -> tuple[int, str]:
        result = run(app, ["train", str(tmp_path / "recipe.py"), *more])
        return result.exit_code, result.output + str(result.exception or "")

    assert train()[0] == 0
    code, said = train("--require-signed")
    assert code
    assert "only declared" in said
    code, said = train("--root", world.people.pin)
    assert code
    assert "require_signed=True" in said
