"""Policies are held against the model that trains: after the surgery of the recipe's methods."""

from pathlib import Path

from typer.testing import CliRunner

from cosmati.cli.main import app

RECIPE = """
import torch

from cosmati import Classification, InMemory, RunConfig, Taxonomy
from cosmati.methods import IsolatedAdapters
from cosmati.models.mlp import MLP
from cosmati.optim import SGD
from cosmati.recipes.recipe import Recipe


def recipe():
    data = InMemory((torch.randn(16, 3), torch.randint(2, (16,))), 8)
    return Recipe(name="small", model=lambda: MLP((3, 4, 2)), loss=Classification(2), data=data,
                  optimizers=[SGD(lr=0.1)], methods=[IsolatedAdapters(classes="customer/pii")],
                  taxonomy=Taxonomy("t", "1", (("open", ""), ("customer/pii", ""))), config=RunConfig(budget="2ba"))
"""
POLICY = """version: 1
taxonomy: t
regions:
  shared: {params: "*", exclude: "*.isolated.*"}
  pii: {tag: isolated/customer/pii}
rules:
  - {class: "**", weight: 1}
  - {class: "**", region: pii, weight: 0}
  - {class: customer/pii, region: shared, weight: 0}
  - {class: customer/pii, region: pii, weight: 1}
"""


def test_what_a_class_has_of_its_own_is_a_region(tmp_path: Path) -> None:
    recipe, policy = tmp_path / "recipe.py", tmp_path / "policy.yaml"
    recipe.write_text(RECIPE)
    policy.write_text(POLICY)
    done = CliRunner().invoke(app, ["policy", "check", str(policy), "--recipe", str(recipe)])
    assert (done.exit_code, done.output[:6]) == (0, "Sound:"), done.output
    policy.write_text(POLICY.replace("tag: isolated/customer/pii", "tag: isolated/customer"))
    done = CliRunner().invoke(app, ["policy", "check", str(policy), "--recipe", str(recipe)])
    assert done.exit_code
    assert "tag isolated/customer matches nothing" in done.output
