"""A run over data that an authority vouches for: its ledger says who, and its archive bears that out years later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati import RunConfig, Trainer
from cosmati.cli.main import app
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.manifest import SourceFacts
from cosmati.data.shards.upload import Destination
from cosmati.data.signing import sign_sources
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.ledger.verify import verify_ledger
from cosmati.optim.optimizers import SGD
from cosmati.provenance.authority import ceremony
from cosmati.provenance.authority.audit import audit
from cosmati.provenance.authority.trusted import Authority
from tests.provenance.authority.people import NEWS, People

pytestmark = pytest.mark.long


@pytest.fixture
def people(tmp_path: Path) -> People:
    return made_in(tmp_path)


def made_in(tmp_path: Path) -> People:
    made = People(tmp_path).begin()
    made.delegate(NEWS, "ada")
    write_dataset(
        [{"number": number} for number in range(32)],
        Destination(str(tmp_path / "corpus")),
        {"number": "int"},
        class_of=lambda _row: NEWS,
        source="corpus",
        facts=SourceFacts(),
    )
    list(sign_sources(str(tmp_path / "corpus"), made.folder, made.ring("ada")))
    return made


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    output: Tensor = model(rows.float()[:, None])
    return output.square().mean()


def train(people: People, budget: str, *, is_signed: bool = True) -> Path:
    torch.manual_seed(0)
    authority = Authority(people.folder, people.pin, state=people.root / "seen") if is_signed else None
    data = StreamingDataset(people.root / "corpus", columns=("number",), authority=authority)
    folder = people.root / "run"
    change = ("budget",) if folder.exists() else ()
    config = RunConfig(budget=budget, run_folder=folder, num_threads=1, ledger=True, change=change)
    Trainer(nn.Linear(1, 1), loss, StreamingSource(data, 8), optimizers=SGD(lr=1e-4), config=config).fit()
    return folder


def verify(folder: Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["ledger", "verify", str(folder)])
    return result.exit_code, result.output


def test_the_ledger_says_who_vouched(people: People) -> None:
    folder = train(people, "3ba")
    (facts,) = verify_ledger(folder / "ledger").provenance
    (source,) = facts["sources"]
    manifest = (people.root / "corpus" / NEWS / "manifest.json").read_bytes()
    assert source["target"] == f"firm/{NEWS}/corpus/1"
    assert source["manifest_sha256"] == hashlib.sha256(manifest).hexdigest()
    assert (source["root"], source["keyids"]) == (people.pin, [people.keys["ada"].keyid])
    archive = folder / "ledger" / "provenance"
    assert (archive / source["manifest_sha256"]).read_bytes() == manifest
    code, said = verify(folder)
    assert code == 0, said
    assert f"firm/{NEWS}/corpus/1, signed by {people.keys['ada'].keyid[:12]}" in said


def test_without_an_authority_data_are_declared(people: People) -> None:
    folder = train(people, "3ba", is_signed=False)
    assert not verify_ledger(folder / "ledger").provenance
    assert not (folder / "ledger" / "provenance").exists()
    assert "declared: nobody vouches" in verify(folder)[1]


def test_an_archive_that_was_changed_is_told(people: People) -> None:
    folder = train(people, "3ba")
    for path in sorted((folder / "ledger" / "provenance").iterdir()):
        content = path.read_bytes()
        path.write_bytes(content.replace(b'"', b"'", 1))
        code, said = verify(folder)
        assert code == 1, path
        assert "isn't the file that the ledger names" in said
        path.unlink()
        code, said = verify(folder)
        assert code == 1
        assert "can't be read" in said
        path.write_bytes(content)
    assert verify(folder)[0] == 0


def test_a_resume_says_what_is_vouched_for_then(people: People) -> None:
    folder = train(people, "2ba")
    people.person("carol")
    with people.repository.change(people.ring("carol")) as change:
        ceremony.replace_key(change, people.keys["ada"].keyid, people.keys["carol"])
    train(people, "4ba")
    before, after = verify_ledger(folder / "ledger").provenance
    assert before["sources"][0]["keyids"] == [people.keys["ada"].keyid]
    assert after["sources"][0]["keyids"] == [people.keys["carol"].keyid]
    assert verify(folder)[0] == 0, "both archives stand"


def test_a_resume_that_asks_nobody_is_told(people: People) -> None:
    folder = train(people, "2ba")
    train(people, "4ba", is_signed=False)
    code, said = verify(folder)
    assert code == 0, said
    assert f"firm/{NEWS}/corpus/1, signed by" in said
    assert "from step 2 on, declared" in said


def test_a_resume_that_asks_for_the_first_time_says_nothing_of_before(people: People) -> None:
    folder = train(people, "2ba", is_signed=False)
    train(people, "4ba")
    code, said = verify(folder)
    assert code == 0, said
    assert "declared" in said.partition("signed by")[0], "what the first steps learned from nobody has signed"
    assert f"from step 2 on, firm/{NEWS}/corpus/1, signed by" in said


def _name_another_file(facts: dict[str, Any]) -> None:
    """The archive holds it as it says, and it's no manifest that the signers have signed."""
    digest = next(digest for name, digest in facts["archive"].items() if "root.json" in name)
    facts["archive"][f"manifests/{digest}.json"] = digest
    facts["sources"][0]["manifest_sha256"] = digest


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "no source": lambda facts: facts.update(sources=[]),
    "no archive": lambda facts: facts.pop("archive"),
    "time": lambda facts: facts.update(opened="soon"),
    "no zone": lambda facts: facts.update(opened="2026-01-01T00:00:00"),
    "outside": lambda facts: facts["archive"].update({"x": "../../run.json"}),
    "source": lambda facts: facts["sources"][0].pop("keyids"),
    "type": lambda facts: facts.update(sources={"a": 1}),
    "years later": lambda facts: facts.update(opened="2126-01-01T00:00:00+00:00"),
    "another key": lambda facts: facts["sources"][0].update(keyids=["0" * 64]),
    "another root": lambda facts: facts["sources"][0].update(root="0" * 64),
    "another class": lambda facts: facts["sources"][0].update(target="firm/customer/pii/corpus/1"),
    "no manifest": lambda facts: [facts["archive"].pop(name) for name in [*facts["archive"]] if "manifests/" in name],
    "one that nobody signed": _name_another_file,
    "another manifest": lambda facts: facts["sources"][0].update(manifest_sha256="0" * 64),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(made_in(tmp_path_factory.mktemp("forged")), "1ba")


@pytest.mark.parametrize("what", FORGED)
def test_what_a_ledger_claims_is_borne_out(trained: Path, what: str) -> None:
    (facts,) = verify_ledger(trained / "ledger").provenance
    archive, forged = trained / "ledger" / "provenance", json.loads(json.dumps(facts))
    assert not audit(archive, facts)
    FORGED[what](forged)
    assert audit(archive, forged)


def test_resumed_and_unbroken_runs_have_the_same_bits(people: People, tmp_path: Path) -> None:
    train(people, "2ba")
    train(people, "4ba")
    resumed = json.loads((people.root / "run" / "run.json").read_text())["digests"]
    (people.root / "run").rename(tmp_path / "resumed")
    train(people, "4ba", is_signed=False)
    assert json.loads((people.root / "run" / "run.json").read_text())["digests"]["model"] == resumed["model"]
