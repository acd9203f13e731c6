"""A model learns from what is everybody's, what was licensed, and what persons wrote; a licence ends, and one asks.

The publisher's texts taught nothing but an adapter of their own, so that what they gave is dropped when the licence
ends, at once. What persons wrote taught the whole model: when Ada asks, and a legal hold that stood on her letters is
released, the run is trained again from before its first contact with them. Both are certified. An auditor checks it in
another folder, from a copy of the ledger, the certificates and the operator's key, which they have had from the start.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.core.loss import Classification
from cosmati.core.source import Source
from cosmati.data.in_memory import InMemory
from cosmati.data.tombstoned import Tombstoned
from cosmati.ledger.verify import verify_ledger
from cosmati.methods import EMA, IsolatedAdapters
from cosmati.optim import AdamW
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.recipes.recipe import Recipe
from cosmati.routing.policy_file import load_policy
from cosmati.train.config import RunConfig
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint

pytestmark = pytest.mark.long

CLASSES = ("licensed/press", "open/permissive", "personal/letters")
AUTHORS = ("Ada", "Bob", "Carol", "Dora")
"""Of the letters, in turns."""
POLICY = """
version: 1
taxonomy: publisher
regions:
  shared: {params: "*", exclude: "*.isolated.*"}
  press:  {tag: isolated/licensed/press}
rules:
  - {class: "**", weight: 1}
  - {class: "**", region: press, weight: 0}
  - {class: licensed/press, region: shared, weight: 0}
  - {class: licensed/press, region: press, weight: 1}
"""
EVERYTHING = "version: 1\ntaxonomy: publisher\nregions: {all: {params: '*'}}\nrules: [{class: '**', weight: 1}]\n"
NUM_ROWS = 96


def rows() -> InMemory:
    """Return the rows of all, in turns."""
    draw = torch.Generator().manual_seed(3)
    data = torch.randn(NUM_ROWS, 6, generator=draw), torch.randint(3, (NUM_ROWS,), generator=draw)
    return InMemory(data, 16, torch.arange(NUM_ROWS) % 3, CLASSES)


def letters_of(author: str) -> list[int]:
    """Return the ids of somebody's letters, as the publisher's own books have them."""
    letters = range(CLASSES.index("personal/letters"), NUM_ROWS, 3)
    return [row for number, row in enumerate(letters) if AUTHORS[number % 4] == author]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def recipe(data: Source | None = None, *, has_press: bool = True) -> Recipe:
    """Return the publisher's recipe."""
    return Recipe(
        name="publisher",
        model=model,
        loss=Classification(3),
        data=rows if data is None else lambda: data,
        optimizers=(AdamW(lr=0.02),),
        methods=(IsolatedAdapters(classes="licensed/press" if has_press else (), rank=2), EMA(half_life="2ba")),
        config=RunConfig(budget="8ba", num_microbatches=4, num_threads=1, checkpoint_every="2ba", num_checkpoints=9),
        policy=load_policy(POLICY if has_press else EVERYTHING),
        taxonomy=Taxonomy("publisher", "1", tuple((name, name) for name in CLASSES)),
    )


def cosmati(*command: object, expected: int = 0) -> str:
    """Run a command, as a person does."""
    result = CliRunner().invoke(app, list(map(str, command)))
    assert result.exit_code == expected, result.output + repr(result.exception)
    return result.output


def test_a_licence_ends_and_a_person_asks(tmp_path: Path) -> None:
    """Both are done, and certified; the auditor finds it so from copies."""
    run = tmp_path / "runs" / "model"
    recipe().trainer(run_folder=run).fit()
    office = tmp_path / "auditor"
    office.mkdir()
    trusted, pinned = ((run / "ledger" / name).read_text() for name in ("operator.vkey", "checkpoint"))

    # A court has Ada's letters kept, and she has to wait.
    (asked := tmp_path / "ada.txt").write_text("\n".join(map(str, letters_of("Ada"))))
    forget_ada = ("forget", run, "--rows", asked, "--recipe", __file__)
    cosmati("forget", "hold", run, "--rows", asked, "--because", "case 12 of the court of X")
    assert "because case 12 of the court of X" in cosmati(*forget_ada, expected=1)
    assert "Legal hold 1" in cosmati("forget", run, "--class", "personal", "--recipe", __file__, expected=1)
    cosmati("forget", "release", run, 1, "--because", "the court has ruled")

    # What would it take? Nothing is dropped of rows; the letters came early.
    plan = cosmati(*forget_ada)
    assert "forget 8 rows" in plan
    assert "replay     exact with respect to content; that rows were there, and where, remains" in plan
    assert "rows are asked for, and what can be dropped is a class's own as a whole" in plan
    without_ada = tmp_path / "runs" / "without-ada"
    said = cosmati(*forget_ada, "--method", "replay", "--yes", "--out", without_ada, "--delete-superseded")
    assert "exact with respect to content" in said

    # The licence ends. The plan needs no recipe, and nothing is trained.
    forget_press = ("forget", without_ada, "--class", "licensed/press")
    plan = json.loads(cosmati(*forget_press, "--json"))
    assert [(one["method"], one["is_possible"], one["num_steps"]) for one in plan["options"]] == [
        ("drop", True, 0),
        ("replay", False, 0),
        ("ablate", False, 0),
    ]
    clean = tmp_path / "runs" / "clean"
    cosmati(*forget_press, "--yes", "--out", clean, "--delete-superseded")
    assert "weights" in cosmati("ledger", "check-weights", clean)

    # What is left is, bit for bit, what a run is that never had the adapter, the press's texts, nor Ada's letters.
    retained = Tombstoned(rows(), classes=["licensed/press"], rows=letters_of("Ada"))
    recipe(retained, has_press=False).trainer(run_folder=tmp_path / "truth").fit()
    found, truth = (read_checkpoint(list_checkpoints(one / "checkpoints")[0]) for one in (clean, tmp_path / "truth"))
    assert found.model.keys() == truth.model.keys()
    assert all(torch.equal(value, truth.model[name]) for name, value in found.model.items())
    averages = {name.partition("/average/")[2]: value for name, value in truth.state.items() if "/average/" in name}
    kept = {name.partition("/average/")[2]: value for name, value in found.state.items()}
    assert kept.keys() == averages.keys()
    assert all(torch.equal(value, averages[name]) for name, value in kept.items())

    # Nothing that had it is left in the folders; the certificates say what may be elsewhere.
    gone = [list_checkpoints(one / "checkpoints") for one in (run, without_ada)]
    assert [[path.name for path in one] for one in gone] == [["step-00000002", "step-00000000"], []], (
        "from before each had it"
    )
    copies = (clean / "certificates" / "0004-notices" / "copies.txt").read_text()
    assert "class licensed/press" in copies

    # The auditor: another folder, nothing but copies, and what was had from the start.
    shutil.copytree(clean / "ledger", office / "ledger")
    shutil.copytree(clean / "certificates", office / "certificates", ignore=shutil.ignore_patterns("*-notices"))
    shutil.rmtree(tmp_path / "runs")
    verify_ledger(office / "ledger", vkey=trusted.strip(), pinned=pinned)
    for number, words in enumerate(("forget 8 rows", "forget 8 rows", "forget class licensed", "licensed/press"), 1):
        certificate = office / "certificates" / f"{number:04d}.json"
        said = cosmati("forget", "verify", certificate, "--ledger", office / "ledger", "--vkey", trusted.strip())
        assert words in said
        assert "L0: consistent in itself, operator-asserted" in said
    assert "hold 1 was released: the court has ruled" in (office / "certificates" / "0001.json").read_text()
    forged = (office / "certificates" / "0002.json").read_text().replace("8 rows", "9 rows")
    (office / "forged.json").write_text(forged)
    cosmati("forget", "verify", office / "forged.json", "--ledger", office / "ledger", expected=1)


def test_the_rows_are_whose_they_are() -> None:
    """The story's own premise: the letters have four authors, and every author letters."""
    found = [letters_of(author) for author in AUTHORS]
    assert sorted(row for one in found for row in one) == list(range(2, NUM_ROWS, 3))
    assert {len(one) for one in found} == {8}
    with pytest.raises(ValueError, match="no class"):
        Tombstoned(rows(), classes=["personal"])
