"""A run under a signed policy: its ledger says who signed it, and its archive bears that out years later."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati import InMemory, PolicyFile, RunConfig, Taxonomy, Trainer, load_policy
from cosmati.cli.files import load_recipe, under_policy
from cosmati.cli.main import app
from cosmati.core.loss import Classification
from cosmati.explorer.run_view import read_run
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.verify import verify_ledger
from cosmati.optim import SGD
from cosmati.provenance.authority.audit import audit_policy
from cosmati.recipes.recipe import Recipe
from tests.provenance.authority.test_policies import PolicyPeople

ROWS = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 3
TAXONOMY = Taxonomy("two", "1", (("cold", "cold rows"), ("hot", "hot rows")))
POLICY = """
version: 1
taxonomy: two
regions: {{body: {{params: ["0.*"]}}, head: {{params: ["2.*"]}}}}
rules:
  - {{class: "**", weight: 1}}
  - {{class: cold, region: body, weight: {weight}}}
"""


def text(weight: float) -> str:
    return POLICY.format(weight=weight)


@pytest.fixture
def people(tmp_path: Path) -> PolicyPeople:
    made = PolicyPeople(tmp_path).begin()
    made.let_sign("ada")
    made.sign_text(text(0.5), "ada")
    return made


def trainer(folder: Path, policy: PolicyFile, **config: Any) -> Trainer:
    torch.manual_seed(1)
    observers = config.pop("observers", ())
    return Trainer(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        Classification(3),
        InMemory(ROWS, 16, torch.arange(32) % 2, TAXONOMY.classes),
        optimizers=SGD(lr=0.01),
        policy=policy,
        taxonomy=TAXONOMY,
        observers=observers,
        config=RunConfig(
            **{"budget": "6ba", "num_threads": 1, "num_microbatches": 2, "run_folder": folder, "ledger": True} | config
        ),
    )


def verify(folder: Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["ledger", "verify", str(folder)])
    return result.exit_code, result.output


def test_everything_says_who_signed_the_policy(people: PolicyPeople, tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", people.open(), budget="2ba")
    key = people.keys["ada"].keyid[:12]
    signed = f"policy/main/1, signed by {key} of {people.pin[:12]}"
    run.fit()
    code, said = verify(tmp_path / "run")
    assert (code, f"policy    {signed}" in said) == (0, True), said
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["digests"]["policy_root"] == people.pin
    (policy,) = verify_ledger(tmp_path / "run" / "ledger").policies
    assert policy.digest == load_policy(text(0.5)).digest
    assert "policy_provenance" in dict(VerifiedLedger(tmp_path / "run" / "ledger").tables[0].entry.commitments)
    assert "was signed, says the ledger" in " ".join(read_run(tmp_path / "run").notes)


@pytest.mark.long
def test_an_unsigned_policy_is_declared_and_has_the_same_bits(people: PolicyPeople, tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", load_policy(text(0.5)), budget="2ba")
    run.fit()
    code, said = verify(tmp_path / "run")
    assert (code, "declared: nobody has signed it" in said) == (0, True), said
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["digests"]["policy_root"] == "declared"
    assert not (tmp_path / "run" / "ledger" / "provenance").exists()
    assert "is declared" in " ".join(read_run(tmp_path / "run").notes)
    other = trainer(tmp_path / "signed", people.open(), budget="2ba")
    other.fit()
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), other.model.parameters(), strict=True))
    assert other.plan.digest == run.plan.digest


def test_an_archive_that_was_changed_is_told(people: PolicyPeople, tmp_path: Path) -> None:
    trainer(tmp_path / "run", people.open(), budget="1ba").fit()
    for path in sorted((tmp_path / "run" / "ledger" / "provenance").iterdir()):
        content = path.read_bytes()
        path.write_bytes(content.replace(b'"', b"'", 1))
        code, said = verify(tmp_path / "run")
        assert (code, "isn't the file that the ledger names" in said) == (1, True)
        path.write_bytes(content)
    assert verify(tmp_path / "run")[0] == 0


def _another_policy(facts: dict[str, Any]) -> None:
    """The archive holds it as it says, and it's none that the signers have signed."""
    digest = next(digest for name, digest in facts["archive"].items() if "root.json" in name)
    facts["archive"][f"manifests/{digest}.json"] = digest
    facts["sources"][0]["manifest_sha256"] = digest


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "no source": lambda facts: facts.update(sources=[]),
    "two": lambda facts: facts.update(sources=facts["sources"] * 2),
    "years later": lambda facts: facts.update(opened="2126-01-01T00:00:00+00:00"),
    "another key": lambda facts: facts["sources"][0].update(keyids=["0" * 64]),
    "another root": lambda facts: facts["sources"][0].update(root="0" * 64),
    "another name": lambda facts: facts["sources"][0].update(target="policy/other/1"),
    "another number": lambda facts: facts["sources"][0].update(target="policy/main/2"),
    "a source's path": lambda facts: facts["sources"][0].update(target="two/cold/main/1"),
    "a statement": lambda facts: facts.update(statement={"from_step": 1}),
    "no statement": lambda facts: facts.pop("statement"),
    "one that nobody signed": _another_policy,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forged")
    made = PolicyPeople(folder).begin()
    made.let_sign("ada")
    made.sign_text(text(0.5), "ada")
    trainer(folder / "run", made.open(), budget="1ba").fit()
    return folder / "run" / "ledger"


@pytest.mark.parametrize("what", FORGED)
def test_what_a_ledger_claims_is_borne_out(trained: Path, what: str) -> None:
    (policy,) = verify_ledger(trained).policies
    forged = json.loads(json.dumps(policy.facts))
    assert not audit_policy(trained / "provenance", forged, policy.digest)
    FORGED[what](forged)
    assert audit_policy(trained / "provenance", forged, policy.digest)


def test_steps_under_another_policy_than_was_signed_are_told(trained: Path) -> None:
    (policy,) = verify_ledger(trained).policies
    assert policy.facts is not None
    (problem,) = audit_policy(trained / "provenance", policy.facts, bytes(32))
    assert "which isn't the one that was signed" in problem


WORDS = ("", "-root", "-name")
RECIPE = """
import torch
from cosmati import InMemory, RunConfig, Taxonomy
from cosmati.core.loss import Classification
from cosmati.optim import SGD
from cosmati.recipes.recipe import Recipe

def recipe():
    rows = torch.randn(32, 4), torch.arange(32) % 3
    names = ("cold", "hot")
    return Recipe(
        name="signed",
        model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)),
        loss=Classification(3),
        data=lambda: InMemory(rows, 16, torch.arange(32) % 2, names),
        optimizers=(SGD(lr=0.01),),
        taxonomy=Taxonomy("two", "1", tuple((name, "") for name in names)),
        config=RunConfig(budget="2ba", num_threads=1, num_microbatches=2),
    )
"""


def test_the_command_takes_a_signed_policy(
    people: PolicyPeople, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "recipe.py").write_text(RECIPE)

    def asked(*words: str) -> Recipe:
        url, root, name = (dict(zip(words[::2], words[1::2], strict=True)).get(f"--policy{one}") for one in WORDS)
        return under_policy(load_recipe(str(tmp_path / "recipe.py"), []), url, name or "main", root or "")

    there = ("--policy", str(people.folder), "--policy-root", people.pin)
    assert asked(*there).policy == people.open()
    people.sign_text(text(0), "ada")
    assert asked(*there).policy == people.open(number=2)
    assert asked(*there, "--policy-name", "main/1").policy == people.open(number=1)
    assert asked().policy is None
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "recipe.py"), *there])
    assert "no_direct_write(cold, body)" in result.output
    for words, why in (
        (there[:2], "trusted by its root: --policy-root"),
        (there[2:], "give its repository too"),
        ((*there, "--policy-name", "main/x"), "is a version's number"),
        ((*there, "--policy-name", "other"), "lets nobody sign 'other'"),
        ((*there[:3], "0" * 64), "another authority's"),
    ):
        result = CliRunner().invoke(app, ["plan", str(tmp_path / "recipe.py"), *words])
        assert (result.exit_code, why in result.output) == (1, True), result.output
