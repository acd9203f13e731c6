"""From a file's own fields to the ledger: rows are graded, written, verified, signed and trained on by their grade."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati import RunConfig, Trainer, load_policy
from cosmati.cli.main import app
from cosmati.core.loss import Loss
from cosmati.data.people import rows_by
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.ledger.query import VerifiedLedger, contributions
from cosmati.optim.optimizers import SGD
from cosmati.provenance.authority.errors import TamperedManifestError
from cosmati.provenance.authority.trusted import Authority
from cosmati.train.rows_taught import regions_taught_by
from tests.provenance.authority.people import NEWS, PII, TAXONOMY, People

pytestmark = pytest.mark.long

POLICY = """
version: 1
taxonomy: firm
regions: {lower: {params: "0.*"}, upper: {params: "1.*"}}
measures: {trust: {grades: [low, middle, high], thresholds: [0.3, 0.7]}}
rules:
  - {class: "**", weight: 1}
  - {class: customer/pii, region: upper, weight: 0}
attenuate:
  - {class: "**", measure: trust, grade: middle, factor: 0.5}
  - {class: "**", measure: trust, grade: low, region: lower, factor: 0}
"""
FACTORS = {"low": (0.0, 1.0), "middle": (0.5, 0.5), "high": (1.0, 1.0)}


def call(*said: str | Path) -> str:
    done = CliRunner().invoke(app, [str(one) for one in said])
    assert done.exit_code == 0, done.output + repr(done.exception)
    return done.output


@pytest.fixture
def people(tmp_path: Path) -> People:
    made = People(tmp_path).begin()
    made.delegate(NEWS, "ada")
    return made


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    found = [
        {"number": n, "trust": n * 7 % 40 / 40, "who": "bob" if n % 3 else "eve", "of": [PII] if n % 5 == 0 else []}
        for n in range(64)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return found


@pytest.fixture
def corpus(people: People, rows: list[dict[str, Any]]) -> Path:
    """Signed by the command that its owner calls."""
    assert rows
    folder = people.root
    (folder / "policy.yaml").write_text(POLICY)
    fields = ["--grade-field", "trust=trust", "--also-field", "of", "--by-field", "annotator=who"]
    given: list[str | Path] = [folder / "rows.jsonl", "--class", NEWS, "--policy", folder / "policy.yaml"]
    call("data", "write", folder / "corpus", *given, *fields)
    call("data", "verify", folder / "corpus")
    keys: list[str | Path] = ["--keys", folder / "own", "--keys", folder / "ada"]
    said = call("data", "sign", folder / "corpus", "--authority", people.folder, *keys)
    assert said.count(": signed") == 6, "three grades, with and without the further class"
    return folder / "corpus"


def loss(model: nn.Module, given: Tensor) -> Loss:
    per_row = model(given.float()[:, None] / 64).square().sum(1)
    return Loss(per_row.sum(), torch.tensor(float(len(given))), per_row, torch.ones(len(given)))


def trained(people: People, corpus: Path) -> Trainer:
    torch.manual_seed(0)
    authority = Authority(people.folder, people.pin, state=people.root / "seen")
    data = StreamingDataset(corpus, columns=("number",), authority=authority)
    return Trainer(
        nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1)),
        loss,
        StreamingSource(data, 8, tail="pad"),
        optimizers=SGD(lr=1e-3),
        policy=load_policy(POLICY),
        taxonomy=TAXONOMY,
        config=RunConfig(budget="1ep", num_microbatches=4, num_threads=1, run_folder=people.root / "run"),
    )


def expected(row: dict[str, Any]) -> tuple[str, str, tuple[float, float]]:
    """Class, grade and weight of each region, from the line of the file alone."""
    grade = "low" if row["trust"] < 0.3 else "middle" if row["trust"] < 0.7 else "high"
    lower, upper = FACTORS[grade]
    return (f"{PII}&{NEWS}" if row["of"] else NEWS), grade, (lower, 0.0 if row["of"] else upper)


def test_the_ledger_counts_what_the_file_says(people: People, corpus: Path, rows: list[dict[str, Any]]) -> None:
    trained(people, corpus).fit()
    call("ledger", "verify", people.root / "run")
    ledger = VerifiedLedger(people.root / "run" / "ledger")
    (tables,) = ledger.tables
    found, wanted = Counter[tuple[str, str, tuple[float, ...]]](), Counter(map(expected, rows))
    for item, step, _ in ledger.steps():
        for cell in step.microbatches:
            grade = tables.kinds[cell.band][1]["trust"]
            found[tables.classes[cell.class_id], grade, tables.route(cell, item)] += cell.num_rows
    # Where nothing may be learnt from rows, they take no part: from low ones of both classes.
    assert +found == {key: num for key, num in wanted.items() if any(key[2])}
    num_rows, weights = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for (name, _, route), num in wanted.items():
        for region, own in zip(("lower", "upper"), route, strict=True):
            num_rows[name, region] += num if own else 0
            weights[name, region] += num * own  # type: ignore[assignment]
    table = {(one.class_name, one.region): one for one in contributions(people.root / "run" / "ledger").cells}
    assert {key: one.num_rows for key, one in table.items() if one.num_rows} == +num_rows
    assert {key: one.weight for key, one in table.items() if one.num_rows} == pytest.approx(+weights)


@pytest.mark.parametrize("who", ["bob", "eve"])
def test_what_somebodys_rows_taught(people: People, corpus: Path, rows: list[dict[str, Any]], who: str) -> None:
    trained(people, corpus).fit()
    dataset = StreamingDataset(corpus)
    taught = regions_taught_by(trained(people, corpus), rows_by(dataset, "annotator", who))
    own = [expected(row)[2] for row in rows if row["who"] == who]
    assert {one.region: one.num_rows for one in taught} == {
        region: sum(bool(weights[column]) for weights in own) for column, region in enumerate(("lower", "upper"))
    }


def test_a_source_that_takes_anothers_name_is_refused(people: People, corpus: Path) -> None:
    """Sources of one class differ in their names: the manifest of one can't stand for another's."""
    first, second = (corpus / f"{NEWS}{number}" for number in ("", ".2"))
    manifest = json.loads((second / "manifest.json").read_bytes())
    manifest["source"] = json.loads((first / "manifest.json").read_bytes())["source"]
    (second / "manifest.json").write_text(json.dumps(manifest, sort_keys=True, separators=(",", ":")))
    with pytest.raises(TamperedManifestError):
        trained(people, corpus)


def test_what_is_appended_is_signed_beside_what_was(people: People) -> None:
    """A class's second source has a name of its own, and both are vouched for."""
    for name in ("one", "two"):
        (people.root / f"{name}.txt").write_text(name)
        more = ["--append"] if name == "two" else []
        call("data", "write", people.root / "corpus", people.root / f"{name}.txt", "--class", NEWS, *more)
    keys: list[str | Path] = ["--keys", people.folder.parent / "own", "--keys", people.root / "ada"]
    assert call("data", "sign", people.root / "corpus", "--authority", people.folder, *keys).count(": signed") == 2
    authority = Authority(people.folder, people.pin, state=people.root / "seen")
    data = StreamingDataset(people.root / "corpus", authority=authority)
    assert {row["text"] for row in data} == {"one", "two"}
