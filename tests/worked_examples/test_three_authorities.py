"""Three people answer for three kinds of data; while a run learns from them, a licence ends and a key is taken back.

Ada answers for articles that were bought until a day, Bob for letters of customers, Carol for what is nobody's. The run
trains under a policy that says beforehand what follows when one of them vouches no longer: it goes on without what the
licence was for, and stops where a key is taken back. Dora takes Bob's place, and the same run goes on to its end. What
happened is read from its ledger alone, by the command that an auditor runs and entry by entry.

No clock is waited for: the day is given, and the authority is asked after the step at which something happens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from typer.testing import CliRunner

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati import RunConfig, StreamingDataset, StreamingSource, Taxonomy, Trainer, load_policy
from cosmati.cli.main import app
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.manifest import SourceFacts
from cosmati.data.shards.upload import Destination
from cosmati.errors import ProvenanceError
from cosmati.explorer.run_view import read_run
from cosmati.ledger.query import VerifiedLedger, direct_write_exclusion
from cosmati.ledger.tables import in_force
from cosmati.optim import SGD
from cosmati.provenance.authority.errors import NoLongerVouchedError
from cosmati.provenance.authority.trusted import Authority
from cosmati.records.ledger import AmendEntry, EndEntry, ResumeEntry, RunEntry, StepEntry
from cosmati.train.observers import Observer
from cosmati.train.outcome import StepOutcome

pytestmark = pytest.mark.long

CLASSES = """
name: publisher
version: "1"
classes:
  customer: {letters: Of customers.}
  licensed: {articles: "Bought, until a day."}
  public-domain: {books: Nobody's any more.}
"""
OWNERS = {"customer/letters": "bob", "licensed/articles": "ada", "public-domain/books": "carol"}
POLICY = """
version: 1
taxonomy: publisher
regions:
  body: {params: "0.*"}
  head: {params: "2.*"}
rules:
  - {class: "**", weight: 1}
  - {class: customer/letters, region: body, weight: 0}
grace:
  licence: reject
  revocation: stop
  expiry: {finish: 10ba}
"""
LICENCE_ENDS, KEY_IS_REVOKED, STEPS = 10, 26, 40


class Story(Observer):
    """Lets something happen after some steps, and the run's authority be asked then."""

    def __init__(self, events: dict[int, Callable[[], object]]) -> None:
        self._events = events
        self.ask: Callable[[], object] = lambda: None

    def on_step(self, outcome: StepOutcome) -> None:
        if outcome.clock.step in self._events:
            self._events[outcome.clock.step]()
            self.ask()


class Publisher:
    """The folder in which all of it happens, and the day that it is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # What is signed holds from the day of the signature, which is today's.
        self.today = datetime.now(UTC)
        (folder / "classes.yaml").write_text(CLASSES)
        said = self.cosmati("keys", "init", "authority", "--taxonomy", "classes.yaml")
        (self.root,) = re.findall(r"^  ([0-9a-f]{64})$", said, re.MULTILINE)
        licence_ends = (self.today + timedelta(days=3)).date().isoformat()
        for path, name in OWNERS.items():
            self.appoint(name, path)
            until = licence_ends if path.startswith("licensed") else ""
            write_dataset(
                [{"number": number} for number in range(32)],
                Destination(str(folder / name / "data")),
                {"number": "int"},
                class_of=lambda _row, path=path: path,  # type: ignore[misc]
                source=path.rpartition("/")[2],
                facts=SourceFacts(licence="by contract", licence_valid_until=until),
            )
            self.sign(name, name)

    def cosmati(self, *command: str) -> str:
        """Run a command, as a person does."""
        with pytest.MonkeyPatch.context() as here:
            here.chdir(self.folder)
            result = CliRunner().invoke(app, list(command))
        assert result.exit_code == 0, result.output + repr(result.exception)
        return result.output

    def appoint(self, name: str, path: str) -> None:
        self.cosmati("keys", "new", name, "--keys", f"{name}/keys")
        self.cosmati("keys", "delegate", "authority", path, "--to", f"{name}/keys/{name}.pub.pem")

    def sign(self, name: str, data: str) -> None:
        keys = ("--keys", f"{name}/keys", "--keys", "authority-keys")
        self.cosmati("data", "sign", f"{data}/data", "--authority", "authority", *keys)

    def licence_ends(self) -> None:
        self.today += timedelta(days=4)

    def bobs_key_is_revoked(self) -> None:
        self.cosmati("keys", "revoke", "authority", "bob/keys/bob.pub.pem")

    def authority(self, run: Path | None = None) -> Authority:
        state = self.folder / "seen"
        return Authority(self.folder / "authority", self.root, state=state, run=run, clock=lambda: self.today)

    def trainer(self, events: dict[int, Callable[[], object]]) -> Trainer:
        run, story = self.folder / "run", Story(events)
        urls = [self.folder / name / "data" for name in OWNERS.values()]
        torch.manual_seed(0)
        trainer = Trainer(
            nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)),
            loss,
            StreamingSource(StreamingDataset(urls, columns=("number",), authority=self.authority(run)), 12),
            optimizers=SGD(lr=0.01, momentum=0.9),
            policy=load_policy(POLICY),
            taxonomy=Taxonomy.from_mapping(yaml.safe_load(CLASSES)),
            observers=story,
            config=RunConfig(budget=f"{STEPS}ba", num_microbatches=4, num_threads=1, run_folder=run),
        )
        assert trainer.prepared.watch is not None
        story.ask = trainer.prepared.watch.look
        return trainer


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    output: Tensor = model(rows.float()[:, None] / 32)
    return (output - 1).square().mean()


@pytest.fixture(scope="module")
def publisher(tmp_path_factory: pytest.TempPathFactory) -> Publisher:
    """All of it, once: each test reads what is left."""
    made = Publisher(tmp_path_factory.mktemp("publisher"))
    events = {LICENCE_ENDS: made.licence_ends, KEY_IS_REVOKED: made.bobs_key_is_revoked}
    with pytest.raises(NoLongerVouchedError, match=r"the run stops from step 29 on.*letters.*revocation"):
        made.trainer(events).fit()
    made.appoint("dora", "customer/letters")
    with pytest.raises(ProvenanceError, match="aren't signed by the keys that may"):
        StreamingDataset(made.folder / "bob" / "data", authority=made.authority())
    made.sign("dora", "bob")
    assert made.trainer({}).fit().outcome == "completed"
    return made


def steps_of(run: Path) -> dict[int, dict[str, int]]:
    """Rows that each class had part in, of each step that stands."""
    ledger, found = VerifiedLedger(run / "ledger"), dict[int, dict[str, int]]()
    for item, entry, tables in ledger.steps():
        if item.index in ledger.standing:
            rows = dict.fromkeys(OWNERS, 0)
            for cell in entry.microbatches:
                rows[tables.class_of(cell, item)] += cell.num_rows
            found[entry.step] = rows
    return found


def test_the_run_does_what_the_policy_says(publisher: Publisher) -> None:
    steps = steps_of(publisher.folder / "run")
    assert sorted(steps) == list(range(STEPS)), "each step stands once"
    articles = [rows["licensed/articles"] for rows in steps.values()]
    assert all(articles[:13])
    assert not any(articles[13:]), "found at step 12, the next one goes by it"
    assert all(rows["public-domain/books"] and rows["customer/letters"] for rows in steps.values())
    # What the policy said from the beginning holds through all of it.
    assert direct_write_exclusion(publisher.folder / "run" / "ledger", "customer/letters", "body").num_steps_scanned


def test_an_auditor_reads_the_story(publisher: Publisher) -> None:
    said = publisher.cosmati("ledger", "verify", "run")
    story = [
        r"data +publisher/customer/letters/letters/1, signed by",
        r"from step 12 on, provenance: rows of licensed/articles are rejected from step 13 on",
        r"from step 28 on, provenance: the run stops from step 29 on, publisher/customer/letters/letters/1",
        r"from step 29 on, provenance: vouched for again, was the run stops from step 29 on",
        r"withdrawn publisher/licensed/articles/articles/1 \(licence\), reject from step 13 on: the manifest says",
        r"withdrawn publisher/customer/letters/letters/1 \(revocation\), stop from step 29 on: it isn't signed",
    ]
    for line in story:
        assert re.search(line, said), f"{line}\n{said}"


def test_the_page_tells_it(publisher: Publisher) -> None:
    trust = read_run(publisher.folder / "run").trust
    assert trust is not None
    assert not trust.problems
    articles, letters = "publisher/licensed/articles/articles/1", "publisher/customer/letters/letters/1"
    assert trust.history == (
        f"Found at step 12: {articles} is withdrawn (licence), its rows are rejected from step 13 on.",
        f"Found at step 28: {letters} is withdrawn (revocation), the run stops from step 29 on.",
        f"From step 29 on: {letters} is vouched for again.",
    )


def test_the_entries_tell_it_in_their_order(publisher: Publisher) -> None:
    ledger = VerifiedLedger(publisher.folder / "run" / "ledger")
    told: list[Any] = []
    for item, tables in in_force(ledger.entries()):
        if isinstance(item.entry, RunEntry):
            told.append("begins")
        elif isinstance(item.entry, AmendEntry):
            told.append((item.entry.step, [(one.class_name, one.action, one.step) for one in tables.withdrawn]))
        elif isinstance(item.entry, StepEntry | ResumeEntry):
            continue
        elif isinstance(item.entry, EndEntry):
            told.append(f"{item.entry.outcome} at {item.entry.step}")
    articles, letters = ("licensed/articles", "reject", 13), ("customer/letters", "stop", 29)
    assert told == [
        "begins",
        (12, [articles]),
        (28, [articles, letters]),
        (29, [articles]),
        f"completed at {STEPS}",
    ]


def test_the_archive_bears_it_out(publisher: Publisher) -> None:
    """Each of its files is needed: without one, the story isn't believed."""
    archive = publisher.folder / "run" / "ledger" / "provenance"
    for path in sorted(archive.iterdir()):
        content = path.read_bytes()
        path.unlink()
        result = CliRunner().invoke(app, ["ledger", "verify", str(publisher.folder / "run")])
        path.write_bytes(content)
        assert result.exit_code == 1, path
    publisher.cosmati("ledger", "verify", "run")
