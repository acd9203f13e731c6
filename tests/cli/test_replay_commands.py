"""`cosmati ledger replay` and `spot-check`, as an auditor calls them: exit codes, words, and the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cosmati.cli.files import load_recipe
from cosmati.cli.main import app
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.replay_result import ReplayResult
from cosmati.ledger.row_keys import RowKeys
from cosmati.ledger.spot_check import choose_segments

pytestmark = pytest.mark.long

RECIPE = '''
import torch
from torch import nn
from cosmati import InMemory, RunConfig, Taxonomy, load_policy
from cosmati.recipes.recipe import Recipe
from cosmati.core.loss import Classification
from cosmati.optim import AdamW

POLICY = """
version: 1
taxonomy: two
regions: {body: {params: ["0.*"]}, head: {params: ["2.*"]}}
rules:
  - {class: "**", weight: 1}
  - {class: cold, region: body, weight: 0.5}
"""

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

def data():
    rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return InMemory((rows, torch.arange(64) % 3), 16, torch.arange(64) % 2, ("cold", "hot"))

def recipe():
    config = RunConfig(budget="10ba", num_microbatches=4, checkpoint_every="4ba", num_checkpoints=9)
    taxonomy = Taxonomy("two", "1", (("cold", ""), ("hot", "")))
    return Recipe(name="small", model=model, loss=Classification(3), data=data, optimizers=(AdamW(lr=0.01),),
                  policy=load_policy(POLICY), taxonomy=taxonomy, config=config)
'''


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replayed")
    (folder / "small.py").write_text(RECIPE)
    load_recipe(str(folder / "small.py"), []).trainer(run_folder=folder / "run").fit()
    return folder


def ask(folder: Path, *arguments: object) -> tuple[int, str]:
    told = ["ledger", str(arguments[0]), *map(str, arguments[1:]), "--recipe", str(folder / "small.py")]
    result = CliRunner().invoke(app, told)
    return result.exit_code, " ".join(result.output.split())


def test_a_segment_that_comes_out_the_same(once: Path, tmp_path: Path) -> None:
    code, said = ask(once, "replay", once / "run", "--steps", "5:7", "--out", tmp_path / "found.json")
    assert (code, said.endswith("Yes. Equal in every digest.")) == (0, True)
    assert "from the checkpoint of step 4; 3 steps and 0 signed states compared" in said
    assert "evidence L0: replayed" in said
    found = ReplayResult.from_bytes((tmp_path / "found.json").read_bytes())
    assert [(one.first, one.end, one.start, one.outcome) for one in found.segments] == [(5, 7, 4, "equal")]


def test_the_ledger_alone_says_nothing_of_rows(once: Path, tmp_path: Path) -> None:
    shutil.copytree(once / "run/ledger", tmp_path / "copy")
    code, said = ask(once, "replay", tmp_path / "copy", "--steps", ":3")
    assert (code, "row commitments weren't compared" in said) == (2, True)
    code, said = ask(once, "replay", tmp_path / "copy", "--steps", ":3", "--without-rows")
    assert (code, "Equal in every digest but those of rows." in said) == (0, True)
    assert "evidence none" in said
    given = "--rows", once / "run/private/rows.keys", "--checkpoint", once / "run/checkpoints/step-00000004"
    code, said = ask(once, "replay", tmp_path / "copy", "--steps", "4:", *given)
    assert (code, "from the checkpoint of step 4; 6 steps and 3 signed states compared" in said) == (0, True)


def test_blinds_of_some_steps_open_these_and_no_others(once: Path, tmp_path: Path) -> None:
    shutil.copytree(once / "run/ledger", tmp_path / "copy")
    file = tmp_path / "blinds.json"
    code, said = ask(once, "blinds", once / "run", "--steps", "2:4", "--out", file)
    assert code == 0, said
    keys = RowKeys.load(once / "run/private/rows.keys")
    own = [key for node, key in keys.nodes()] + [keys.of(row) for row in range(64)]
    assert not any(key.hex() in file.read_text() for key in [*own, keys.of_class("cold"), keys.of_class("hot")] if key)
    # Steps 0 and 1 are on the way, and nobody has asked for them.
    code, said = ask(once, "replay", tmp_path / "copy", "--steps", "2:4", "--rows", file)
    assert (code, said.endswith("Yes. Equal in every digest.")) == (0, True)
    code, said = ask(once, "replay", tmp_path / "copy", "--steps", "2:5", "--rows", file)
    assert (code, "row commitments weren't compared" in said) == (2, True)
    # Nobody has to believe them: others don't fit.
    blinds = json.loads(file.read_bytes())
    blinds["blinds"]["3/1"] = "00" * 32 + blinds["blinds"]["3/1"][64:]
    file.write_text(json.dumps(blinds, separators=(",", ":")))
    code, said = ask(once, "replay", tmp_path / "copy", "--steps", "2:4", "--rows", file)
    assert (code, "No. The first that differs is step 3, row commitment, microbatch 1: " in said) == (1, True)
    for wrong in (b'{"', b"salt", json.dumps(blinds | {"origin": "another"}, separators=(",", ":")).encode()):
        file.write_bytes(wrong)
        assert ask(once, "replay", tmp_path / "copy", "--steps", "2:4", "--rows", file)[0] == 2
    code, said = ask(once, "blinds", tmp_path / "copy", "--steps", "2:4", "--out", file)
    assert (code, "no row keys beside it" in said) == (2, True)
    told = ["ledger", "blinds", str(once / "run"), "--steps", "2:4", "--out", str(file)]
    result = CliRunner().invoke(app, told)  # which rows it had, nobody says
    assert (result.exit_code, "--recipe FILE[:FUNCTION]" in result.output) == (2, True)
    other = "--set", "config.seed=4", "--out", file
    code, said = ask(once, "blinds", once / "run", "--steps", "2:4", *other)
    assert (code, "so these aren't its rows" in said) == (2, True)


def test_a_recipe_that_fails_is_no_answer(once: Path, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(RECIPE.replace("def model():", "def model():\n    raise ValueError('no')"))
    code, said = ask(tmp_path, "replay", once / "run", "--steps", "2:4")
    assert (code, "The recipe fails where its steps are taken again: ValueError('no')" in said) == (2, True)


def test_the_whole_run_is_level_3(once: Path, tmp_path: Path) -> None:
    shutil.copytree(once / "run/ledger", tmp_path / "copy")
    code, said = ask(once, "replay", tmp_path / "copy", "--rows", once / "run/private/rows.keys")
    assert (code, "evidence L3: the whole run was replayed" in said) == (0, True)


def test_another_recipe_is_a_no_and_what_cannot_be_read_is_none(once: Path) -> None:
    code, said = ask(once, "replay", once / "run", "--steps", "5:7", "--set", "optimizers.0.lr=0.02")
    assert code == 1
    assert "No. The first that differs is recipe, optimizers 0: learning rate: 0.02, and the ledger says 0.01." in said
    for steps in ("5", "a:b", "7:5", "5:99"):
        assert ask(once, "replay", once / "run", "--steps", steps)[0] == 2
    assert ask(once, "replay", once / "nothing")[0] == 2
    assert ask(once, "replay", once / "run", "--vkey", "no key")[0] == 2


def test_a_spot_check_says_what_it_chose_and_writes_what_it_found(once: Path, tmp_path: Path) -> None:
    given = "--auditor-seed", "dice", "--segments", 3, "--length", 2, "--out"
    code, said = ask(once, "spot-check", once / "run", *given, tmp_path / "one.json")
    assert code == 0, said
    head = VerifiedLedger(once / "run/ledger").head
    chosen = choose_segments(head, "dice", num_steps=10, number=3, length=2)
    assert f"steps {', '.join(f'{one.start}:{one.stop}' for one in chosen)} of 10" in said
    assert said.index("Chosen by the head") < said.index("replaying") or "replaying" not in said
    found = json.loads((tmp_path / "one.json").read_bytes())
    assert (found["size"], found["root"], found["seed"]) == (head.size, head.root.hex(), "dice")
    assert [(one["first"], one["end"], one["outcome"]) for one in found["segments"]] == [
        (one.start, one.stop, "equal") for one in chosen
    ]
    # No witness cosigned the head, so nobody knows when it was made.
    assert (found["is_witnessed"], found["evidence_level"][:2]) == (False, "L0")
    ask(once, "spot-check", once / "run", *given, tmp_path / "two.json")
    assert (tmp_path / "two.json").read_bytes() == (tmp_path / "one.json").read_bytes()


def test_a_spot_check_of_another_run_says_no(once: Path, tmp_path: Path) -> None:
    given = "--auditor-seed", "dice", "--segments", 2, "--length", 2, "--set", "config.seed=4"
    code, said = ask(once, "spot-check", once / "run", *given, "--out", tmp_path / "found.json")
    assert (code, "settings: seed: 4, and the ledger says 0" in said) == (1, True)
    assert json.loads((tmp_path / "found.json").read_bytes())["evidence_level"].startswith("none")
    code, _ = ask(once, "spot-check", once / "run", "--auditor-seed", "dice", "--length", 11)
    assert code == 2
