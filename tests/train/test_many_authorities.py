"""Several authorities in one data set: each is pinned, archived and asked for itself, and takes back its own."""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati import RunConfig, StreamingDataset, StreamingSource, Trainer, load_policy
from cosmati.cli.main import app
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.upload import Destination
from cosmati.data.signing import sign_sources
from cosmati.errors import ProvenanceError
from cosmati.explorer.run_view import read_run
from cosmati.explorer.trust import read_trust
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.verify import verify_ledger
from cosmati.optim import SGD
from cosmati.provenance.authority import ceremony
from cosmati.provenance.authority.errors import (
    ExpiredMetadataError,
    NoLongerVouchedError,
    OutOfScopeError,
    UntrustedRootError,
)
from cosmati.provenance.authority.trusted import Authority
from cosmati.train import asking
from cosmati.train.asking import Asking
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome
from tests.provenance.authority.people import NEWS, PII, TAXONOMY, People
from tests.train.test_authority_watch import in_force, verify, weights
from tests.train.vouched_world import OPEN, loss, rows_by_step

pytestmark = pytest.mark.long

CLASSES = {"news": NEWS, "pii": PII, "open": OPEN}


@dataclasses.dataclass
class Firms:
    """Three firms, each with an authority of its own, one class and one source; and how far its clock is ahead."""

    root: Path
    ahead: dict[str, timedelta] = dataclasses.field(default_factory=dict)

    def people(self, name: str) -> People:
        found = People(self.root / name)
        pin = self.root / name / "pin"
        found.pin = pin.read_text() if pin.exists() else ""
        return found

    def make(self) -> Firms:
        for name, path in CLASSES.items():
            people = self.people(name).begin()
            people.delegate(path, "ada")
            rows = [{"number": number} for number in range(24)]
            place = Destination(str(self.root / name / "data"))
            write_dataset(rows, place, {"number": "int"}, class_of=path, source="rows")
            list(sign_sources(str(self.root / name / "data"), people.folder, people.ring("ada")))
            (self.root / name / "pin").write_text(people.pin)
        return self

    def url(self, name: str) -> Path:
        return self.root / name / "data"

    def authority(self, name: str, **more: Any) -> Authority:
        def now() -> datetime:
            return datetime.now(UTC) + self.ahead.get(name, timedelta())

        people = self.people(name)
        return Authority(people.folder, people.pin, state=people.root / "seen", clock=now, **more)

    def data(self, names: Mapping[str, str] | None = None, **more: Any) -> StreamingDataset:
        """Return the data of all, each vouched for by its own firm, or by another one that is named for it."""
        whose = {self.url(name): self.authority((names or {}).get(name, name), **more) for name in CLASSES}
        return StreamingDataset([self.url(name) for name in CLASSES], columns=("number",), authority=whose)

    def trainer(
        self, folder: Path | None, events: Mapping[int, Callable[[], object]], grace: str = "", **more: Any
    ) -> Trainer:
        torch.manual_seed(0)
        own = {name: more.pop(name) for name in ("run", "refresh") if name in more}
        is_governed = not more.get("require_signed")  # a policy would have to be signed, too
        policy = f"version: 1\ntaxonomy: firm\nrules: [{{class: '**', weight: 1}}]\n{grace and 'grace: ' + grace}"
        seen = Happening(events)
        settings: Any = {"budget": "24ba", "num_threads": 1, "num_microbatches": 4, "checkpoint_every": "3ba"}
        seen.trainer = Trainer(
            nn.Linear(1, 1),
            loss,
            StreamingSource(self.data(**own), 8),
            optimizers=SGD(lr=1e-3, momentum=0.9),
            policy=load_policy(policy) if is_governed else None,
            taxonomy=TAXONOMY,
            observers=seen,
            config=RunConfig(**settings | {"run_folder": folder} | more),
        )
        return seen.trainer

    def revoke(self, name: str) -> None:
        people = self.people(name)
        (keyid,) = next(one.keyids for one in ceremony.status(people.repository) if one.role == CLASSES[name])
        with people.repository.change(people.ring()) as change:
            ceremony.replace_key(change, keyid, None)

    def hide(self, name: str) -> None:
        self.people(name).folder.rename(self.root / name / "hidden")


class Happening(Observer):
    """Lets things happen after given steps, and asks all authorities then and there."""

    def __init__(self, events: Mapping[int, Callable[[], object]]) -> None:
        self._events = events
        self.trainer: Trainer | None = None

    def on_step(self, outcome: StepOutcome) -> None:
        if outcome.clock.step in self._events:
            self._events[outcome.clock.step]()
            assert self.trainer is not None
            assert self.trainer.prepared.watch is not None
            self.trainer.prepared.watch.look()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Firms(tmp_path_factory.mktemp("firms")).make().root


@pytest.fixture
def firms(made: Path, tmp_path: Path) -> Firms:
    return Firms(Path(shutil.copytree(made, tmp_path / "firms")))


def test_each_is_pinned_and_archived(firms: Firms, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    firms.trainer(folder, {}, budget="2ba", require_signed=True).fit()
    roots = {firms.people(name).pin for name in CLASSES}
    (facts,) = verify_ledger(folder / "ledger").provenance
    assert {one["root"] for one in facts["sources"]} == roots
    assert "rehears" not in verify(folder)
    assert {name.partition("/")[0] for name in facts["archive"]} - {"manifests"} == roots
    said = verify(folder)
    for name, path in CLASSES.items():
        assert f"firm/{path}/rows/1, signed by" in said
        assert f"of {firms.people(name).pin[:12]}" in said
    for file in (folder / "ledger" / "provenance").iterdir():
        kept = file.read_bytes()
        file.write_bytes(kept[:-1] + b" ")
        assert CliRunner().invoke(app, ["ledger", "verify", str(folder)]).exit_code == 1, file
        file.write_bytes(kept)


def test_only_those_who_are_trusted_are_taken(firms: Firms, tmp_path: Path) -> None:
    pins = [firms.people(name).pin for name in CLASSES]
    with pytest.raises(UntrustedRootError, match=pins[2][:12]):
        firms.trainer(None, {}, require_signed=True, trusted_roots=tuple(pins[:2]), checkpoint_every=None)
    firms.trainer(None, {}, require_signed=True, trusted_roots=tuple(pins), checkpoint_every=None)


def test_nobody_vouches_for_what_is_anothers(firms: Firms) -> None:
    with pytest.raises(OutOfScopeError):
        firms.data({"news": "pii"})
    one = firms.authority("news")
    for authority, said in (
        ({firms.url("news"): one}, "has no authority"),
        ({firms.url(name): one for name in (*CLASSES, "more")}, "isn't among the data"),
        ({firms.url(name): None if name == "pii" else one for name in CLASSES}, "has no authority"),
    ):
        with pytest.raises(ProvenanceError, match=said):
            StreamingDataset([firms.url(name) for name in CLASSES], columns=("number",), authority=authority)  # type: ignore[arg-type]


def test_each_is_asked_once(firms: Firms, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = Authority.refresh, list[str]()

    def refresh(one: Authority) -> Any:
        asked.append(one.root)
        return real(one)

    monkeypatch.setattr(Authority, "refresh", refresh)
    firms.data()
    assert sorted(asked) == sorted(firms.people(name).pin for name in CLASSES)


@pytest.mark.parametrize("what", ["expiry", "unreachable", "revocation"])
def test_one_that_takes_its_own_back_touches_no_other(firms: Firms, tmp_path: Path, what: str) -> None:
    def event() -> None:
        if what == "expiry":
            firms.ahead["pii"] = timedelta(days=8)
        elif what == "unreachable":
            firms.hide("pii")
        else:
            firms.revoke("pii")

    folder, reason = tmp_path / "run", "revocation" if what == "revocation" else "expiry"
    firms.trainer(folder, {5: event}, "{expiry: reject, revocation: reject}").fit()
    assert in_force(folder) == [(PII, reason, "reject", 9)]
    assert not any(rows_by_step(folder, PII)[9:])
    assert all(rows_by_step(folder, NEWS))
    assert all(rows_by_step(folder, OPEN))
    said = verify(folder)
    shown = {"expiry": "it had expired", "unreachable": "nobody could be asked", "revocation": "it isn't signed any"}
    assert shown[what] in said
    assert not read_run(folder).warnings
    trust = read_trust(folder / "ledger", verify_ledger(folder / "ledger"))
    assert trust is not None
    assert not trust.problems
    assert {one.root for one in trust.sources} == {firms.people(name).pin for name in CLASSES}


def test_a_run_goes_on_by_what_it_has_kept_of_the_one(firms: Firms, tmp_path: Path) -> None:
    grace, folder = "{revocation: reject}", tmp_path / "run"
    events: dict[int, Callable[[], object]] = {}
    first = firms.trainer(folder, events, grace)
    events[6] = first.stop
    first.fit()
    firms.revoke("pii")
    with pytest.raises(OutOfScopeError):
        firms.trainer(folder, {}, grace)
    assert firms.trainer(folder, {}, grace, run=folder).fit().outcome == "completed"
    assert in_force(folder) == [(PII, "revocation", "reject", 6)]
    verify(folder)
    whole = Firms(Path(shutil.copytree(firms.root, tmp_path / "others")))
    assert weights(folder) != ""
    with pytest.raises(OutOfScopeError):
        whole.data()


def test_two_lose_one_after_the_other_and_a_stop_is_lifted(firms: Firms, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    events = {5: lambda: firms.revoke("pii"), 9: lambda: firms.hide("news")}
    with pytest.raises(NoLongerVouchedError, match=f"firm/{NEWS}"):
        firms.trainer(folder, events, "{revocation: reject}").fit()
    assert in_force(folder) == [(PII, "revocation", "reject", 9), (NEWS, "expiry", "stop", 13)]
    (firms.root / "news" / "hidden").rename(firms.people("news").folder)
    firms.trainer(folder, {}, "{revocation: reject}", run=folder).fit()
    assert in_force(folder) == [(PII, "revocation", "reject", 9)]
    assert "vouched for again" in verify(folder)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return what lets the authority with a root answer no more: it's as if it had been asked an hour before.

    Others have all the time that they have in a run, and take some.
    """
    answer, real, deaf = threading.Event(), Authority.refresh, set[str]()
    real_answer, early = Asking._answer, set[int]()

    def refresh(one: Authority) -> Any:
        if one.root in deaf:
            answer.wait()
        time.sleep(0.05)
        return real(one)

    def answered(one: Asking) -> Any:
        if one._authority.root in deaf:
            early.add(threading.get_ident())
        return real_answer(one)

    monkeypatch.setattr(asking, "monotonic", lambda: time.monotonic() - 3600 * (threading.get_ident() in early))
    monkeypatch.setattr(Asking, "_answer", answered)
    monkeypatch.setattr(Authority, "refresh", refresh)
    yield deaf.add
    answer.set()


def test_who_does_not_answer_holds_up_nobody(firms: Firms, tmp_path: Path, silent: Callable[[str], None]) -> None:
    """Its own are lost, and the others are asked on: a key that is taken back later is found."""
    folder, grace = tmp_path / "run", "{expiry: reject, revocation: stop}"
    trainer = firms.trainer(folder, {}, grace, refresh=0.01, budget="1000000ba", checkpoint_every=None)
    silent(firms.people("pii").pin)
    events = {12: lambda: firms.revoke("news")}

    class Later(Observer):
        def on_step(self, outcome: StepOutcome) -> None:
            watch = trainer.prepared.watch
            assert watch is not None
            if events and any(one.action == "reject" for one in watch.withdrawals):
                events.popitem()[1]()

    trainer.observers.append(Later())
    with pytest.raises(NoLongerVouchedError, match=f"firm/{NEWS}"):
        trainer.fit()
    told = [(one[0], one[1], one[2]) for one in in_force(folder)]
    assert told == [(PII, "expiry", "reject"), (NEWS, "revocation", "stop")]


def test_other_keys_of_one_leave_the_others_as_they_were(firms: Firms, tmp_path: Path) -> None:
    def rotate() -> None:
        people = firms.people("pii")
        (keyid,) = next(one.keyids for one in ceremony.status(people.repository) if one.role == PII)
        dora = people.person("dora")
        with people.repository.change(people.ring("dora")) as change:
            ceremony.replace_key(change, keyid, dora)

    folder = tmp_path / "run"
    firms.trainer(folder, {5: rotate}).fit()
    before, after = [
        {one["root"]: one["keyids"] for one in tables.details["provenance"]["sources"]}
        for tables in VerifiedLedger(folder / "ledger").tables
    ]
    assert {root for root in before if before[root] != after[root]} == {firms.people("pii").pin}
    verify(folder)


def test_one_that_has_expired_is_refused_at_opening(firms: Firms) -> None:
    firms.ahead["open"] = timedelta(days=8)
    with pytest.raises(ExpiredMetadataError):
        firms.data()
