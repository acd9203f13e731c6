"""What a run does when those who vouch for its data take something back: all ranks at one step, on record, for good."""

from __future__ import annotations

import json
import shutil
import threading
import warnings
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati import load_policy
from cosmati.cli.main import app
from cosmati.core.state import parameter_root
from cosmati.data.signing import sign_sources
from cosmati.data.vouching import LicenceExpiredError
from cosmati.errors import LedgerError, ProvenanceError
from cosmati.explorer.report import render_report
from cosmati.explorer.run_view import read_run
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.verify import verify_ledger
from cosmati.provenance.authority.audit import audit_withdrawn
from cosmati.provenance.authority.errors import ExpiredMetadataError, NoLongerVouchedError
from cosmati.provenance.authority.trusted import Authority
from cosmati.train import asking
from cosmati.train.policy_watch import FILE
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from tests.provenance.authority.people import NEWS, PII, People
from tests.train.vouched_world import (
    OPEN,
    PEOPLE,
    POLICY,
    Events,
    World,
    go_on,
    hide,
    revoke,
    rotate,
    rows_by_step,
    show,
)

pytestmark = pytest.mark.long

LICENCE_DAYS = 3
STEPS = 24


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    World.made_in(root, news_until=(datetime.now(UTC) + timedelta(days=LICENCE_DAYS)).date().isoformat())
    return root


@pytest.fixture
def world(made: Path, tmp_path: Path) -> World:
    return World.found_in(Path(shutil.copytree(made, tmp_path / "world")))


@pytest.fixture(scope="module")
def undisturbed(made: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the run comes to if nobody takes anything back."""
    root = tmp_path_factory.mktemp("undisturbed")
    world = World.found_in(Path(shutil.copytree(made, root / "world")))
    world.trainer(root / "run", {}).fit()
    return weights(root / "run")


def weights(folder: Path) -> str:
    """Digest of the newest checkpoint's weights."""
    newest = list_checkpoints(folder / "checkpoints")[0]
    tensors = read_checkpoint(newest).model
    return json.dumps({name: tensor.tolist() for name, tensor in sorted(tensors.items())})


def verify(folder: Path) -> str:
    result = CliRunner().invoke(app, ["ledger", "verify", str(folder)])
    assert result.exit_code == 0, result.output
    return result.output


def in_force(folder: Path) -> list[tuple[str, str, str, int]]:
    *_, (_, facts) = verify_ledger(folder / "ledger").withdrawn_from
    return [
        (one["class"], one["reason"], one["action"], one["step"]) for one in (facts or {"in_force": []})["in_force"]
    ]


def stopped(world: World, folder: Path, events: Events, **more: Any) -> str:
    with pytest.raises(NoLongerVouchedError) as caught:
        world.trainer(folder, events, **more).fit()
    return str(caught.value)


PHASED = """
version: 1
taxonomy: firm
phases: [{{name: before, until: {step}ba}}, {{name: after}}]
rules:
  - {{class: "**", weight: 1}}
  - {{class: {path}, phase: after, decision: reject}}
"""


@pytest.mark.parametrize(("path", "reason"), [(NEWS, "licence"), (PII, "revocation")])
def test_a_rejected_class_teaches_no_more_and_the_rest_goes_on(
    world: World, tmp_path: Path, path: str, reason: str
) -> None:
    event = go_on(LICENCE_DAYS + 1) if reason == "licence" else revoke(PII)
    trainer = world.trainer(tmp_path / "run", {9: event}, grace=f"{{{reason}: reject}}")
    assert trainer.fit().outcome == "completed"
    taught = rows_by_step(tmp_path / "run", path)
    assert all(taught[:13])
    assert not any(taught[13:]), "found at step 12, and in force from the next one on"
    assert in_force(tmp_path / "run") == [(path, reason, "reject", 13)]
    assert f"({reason}), reject from step 13 on" in verify(tmp_path / "run")

    # A policy that has said so from the beginning, of data that nobody is asked about, gives the same bits.
    other = World.found_in(world.people.root)
    other.ask = False
    other.trainer(tmp_path / "phased", {}, policy=PHASED.format(step=13, path=path)).fit()
    assert weights(tmp_path / "run") == weights(tmp_path / "phased")


@pytest.mark.parametrize(
    ("event", "reason"),
    [(go_on(LICENCE_DAYS + 1), "licence"), (revoke(PII), "revocation"), (go_on(8), "expiry"), (hide, "expiry")],
    ids=["licence", "revoked", "expired", "unreachable"],
)
@pytest.mark.parametrize("policy", [POLICY, ""], ids=["governed", "without a policy"])
def test_a_run_stops_with_a_checkpoint(world: World, tmp_path: Path, event: Any, reason: str, policy: str) -> None:
    said = stopped(world, tmp_path / "run", {5: event}, policy=policy)
    assert "start the run again" in said
    assert reason in said
    (newest, *_) = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert newest.name == "step-00000009"
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["outcome"], record["num_steps"]) == ("stopped", 9)
    assert {(kind, action, step) for _, kind, action, step in in_force(tmp_path / "run")} >= {(reason, "stop", 9)}
    shown = {"licence": "the manifest says until", "revocation": "it isn't signed any more", "expiry": "it had expired"}
    unreachable = "nobody could be asked, so the operator says"
    assert (unreachable if event is hide else shown[reason]) in verify(tmp_path / "run")


def test_a_run_may_finish_what_it_was_given_for(world: World, tmp_path: Path) -> None:
    stopped(world, tmp_path / "run", {5: hide}, grace="{expiry: {finish: 0.25dur}}")
    assert {step for *_, step in in_force(tmp_path / "run")} == {9 + STEPS // 4}
    assert len(rows_by_step(tmp_path / "run", NEWS)) == 15
    assert "nobody could be asked, so the operator says" in verify(tmp_path / "run")


def test_a_run_that_was_stopped_goes_on_once_it_is_mended(world: World, tmp_path: Path, undisturbed: str) -> None:
    stopped(world, tmp_path / "run", {5: hide})
    with pytest.raises(ProvenanceError):
        world.trainer(tmp_path / "run", {})
    show(world)
    assert world.trainer(tmp_path / "run", {}).fit().outcome == "completed"
    assert weights(tmp_path / "run") == undisturbed
    assert not in_force(tmp_path / "run")
    assert "vouched for again" in verify(tmp_path / "run")


def test_a_class_stays_rejected(world: World, tmp_path: Path) -> None:
    """Also where a resume finds all well again: nothing is admitted twice."""
    grace = "{licence: reject}"
    trainer = world.trainer(tmp_path / "whole", {9: go_on(LICENCE_DAYS + 1)}, grace=grace)
    trainer.fit()
    world.set_back()
    events: Events = {9: go_on(LICENCE_DAYS + 1), 14: lambda _world: trainer.stop()}
    trainer = world.trainer(tmp_path / "run", events, grace=grace)
    assert trainer.fit().outcome == "stopped"
    world.set_back()
    with pytest.warns(UserWarning, match="the run's ledger knows of"):
        assert world.trainer(tmp_path / "run", {}, grace=grace).fit().outcome == "completed"
    assert in_force(tmp_path / "run") == [(NEWS, "licence", "reject", 13)]
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    verify(tmp_path / "run")


@pytest.fixture
def rejected(world: World, tmp_path: Path) -> Path:
    """A run that has rejected a class, and was stopped."""
    trainer = world.trainer(
        tmp_path / "run", {5: revoke(PII), 10: lambda _w: trainer.stop()}, grace="{revocation: reject}"
    )
    assert trainer.fit().outcome == "stopped"
    return tmp_path / "run"


def test_a_resume_goes_by_what_the_run_has_kept(world: World, rejected: Path) -> None:
    with pytest.raises(ProvenanceError, match="keys delegate"):
        world.trainer(rejected, {}, grace="{revocation: reject}")
    trainer = world.trainer(rejected, {}, grace="{revocation: reject}", run=rejected)
    assert trainer.fit().outcome == "completed"
    assert not any(rows_by_step(rejected, PII)[9:])
    verify(rejected)


@pytest.mark.parametrize("change", [{"opened": "2126-01-01T00:00:00+00:00"}, {"sources": [3]}, {"archive": {}}, {}])
def test_what_was_kept_has_to_be_borne_out(world: World, rejected: Path, change: dict[str, Any]) -> None:
    path = rejected / "vouched.json"
    facts = [one | change for one in json.loads(path.read_text())] if change else "no list"
    path.write_text(json.dumps(facts))
    with pytest.raises(ProvenanceError, match="Restore the run's folder"):
        world.trainer(rejected, {}, grace="{revocation: reject}", run=rejected)
    path.unlink()
    with pytest.raises(ProvenanceError, match="keys delegate"):
        world.trainer(rejected, {}, grace="{revocation: reject}", run=rejected)


def test_what_was_kept_of_others_is_not_taken(world: World, tmp_path: Path) -> None:
    """Who has a run of an authority of their own, over the same data, has nothing of the one that is trusted."""
    others = World(People(tmp_path / "others").begin())
    for path, name in PEOPLE.items():
        others.people.delegate(path, name)
        shutil.copytree(world.people.root / "data" / name, others.people.root / "data" / name)
        list(sign_sources(str(others.people.root / "data" / name), others.people.folder, others.people.ring(name)))
    first = others.trainer(tmp_path / "run", {6: lambda _w: first.stop()}, grace="{revocation: reject}")
    first.fit()
    revoke(PII)(world)
    with pytest.raises(ProvenanceError, match="keys delegate"):
        world.trainer(tmp_path / "run", {}, grace="{revocation: reject}", run=tmp_path / "run")


def test_no_other_run_goes_by_it(world: World, rejected: Path, tmp_path: Path) -> None:
    with pytest.raises(NoLongerVouchedError, match="for going on with that run"):
        world.trainer(tmp_path / "new", {}, grace="{revocation: reject}", run=rejected)


def test_a_rejected_class_is_not_taken_again(world: World, rejected: Path) -> None:
    grace = "{revocation: reject}"
    world.ask = False
    with pytest.raises(LedgerError, match="resume with the data's authority"):
        world.trainer(rejected, {}, grace=grace).fit()
    world.ask = True
    other = POLICY + "  - {class: customer/pii, weight: 0.5}\n"
    trainer = world.trainer(rejected, {}, policy=other, grace=grace, run=rejected, change=("policy",))
    assert trainer.fit().outcome == "completed"
    assert not any(rows_by_step(rejected, PII)[9:]), "whatever another policy says"
    verify(rejected)


def test_a_resume_finds_what_has_happened_meanwhile(world: World, tmp_path: Path) -> None:
    first = world.trainer(tmp_path / "run", {6: lambda _w: first.stop()}, grace="{revocation: reject}")
    assert first.fit().outcome == "stopped"
    revoke(PII)(world)
    world.trainer(tmp_path / "run", {}, grace="{revocation: reject}", run=tmp_path / "run").fit()
    assert in_force(tmp_path / "run") == [(PII, "revocation", "reject", 6)]
    assert [bool(rows) for rows in rows_by_step(tmp_path / "run", PII)] == [True] * 6 + [False] * 18
    verify(tmp_path / "run")


def test_nothing_left_to_learn_from_is_a_stop(world: World, tmp_path: Path) -> None:
    stopped(world, tmp_path / "run", {5: hide}, grace="{expiry: reject}")
    assert {(action, step) for _, _, action, step in in_force(tmp_path / "run")} == {("stop", 9)}


def test_without_a_ledger_nothing_is_rejected(world: World, tmp_path: Path) -> None:
    """Who resumes would have to know of it."""
    stopped(world, tmp_path / "run", {5: revoke(PII)}, grace="{revocation: reject}", ledger=False)


def test_other_keys_are_an_entry_and_no_more(world: World, tmp_path: Path, undisturbed: str) -> None:
    world.trainer(tmp_path / "run", {5: rotate(PII)}).fit()
    assert weights(tmp_path / "run") == undisturbed
    report = verify_ledger(tmp_path / "run" / "ledger")
    before, after = report.provenance
    (amendment,) = report.amendments
    assert [(name, was.partition(": ")[0]) for name, was, _ in amendment.changes] == [
        ("provenance", f"firm/{PII}/bob/1")
    ]
    assert [one["target"] for one in before["sources"]] == [one["target"] for one in after["sources"]]
    keys = {one["target"]: one["keyids"] for one in after["sources"]}
    assert keys[f"firm/{PII}/bob/1"] == [world.people.keys["dora"].keyid]
    verify(tmp_path / "run")


def test_another_version_is_an_entry_and_no_more(world: World, tmp_path: Path, undisturbed: str) -> None:
    def sign(world: World) -> None:
        world.people.sign(PII, "bob", source="bob", version="2")
        world.people.sign(PII, "bob", source="bobby", version="3")

    world.trainer(tmp_path / "run", {5: sign}).fit()
    assert weights(tmp_path / "run") == undisturbed
    before, after = verify_ledger(tmp_path / "run" / "ledger").provenance
    others = [
        {one["target"]: one["others"] for one in facts["sources"]}[f"firm/{PII}/bob/1"] for facts in (before, after)
    ]
    assert others == [[], ["2"]]
    assert "as version 2 is" in verify(tmp_path / "run")


def test_two_classes_are_taken_back_one_after_the_other(world: World, tmp_path: Path) -> None:
    events: Events = {5: revoke(PII), 13: go_on(LICENCE_DAYS + 1)}
    world.trainer(tmp_path / "run", events, grace="{revocation: reject, licence: reject}").fit()
    assert in_force(tmp_path / "run") == [(PII, "revocation", "reject", 9), (NEWS, "licence", "reject", 17)]
    assert not any(rows_by_step(tmp_path / "run", PII)[9:])
    assert [bool(rows) for rows in rows_by_step(tmp_path / "run", NEWS)] == [True] * 17 + [False] * 7
    assert all(rows_by_step(tmp_path / "run", OPEN))
    assert verify(tmp_path / "run").count("withdrawn") >= 2


def test_one_class_is_signed_again_while_another_is_lost(world: World, tmp_path: Path) -> None:
    grace = "{revocation: reject, licence: reject}"
    events: Events = {5: revoke(PII), 9: rotate(NEWS), 14: lambda _world: first.stop()}
    first = world.trainer(tmp_path / "run", events, grace=grace)
    assert first.fit().outcome == "stopped"
    assert [len(one["sources"]) for one in verify_ledger(tmp_path / "run" / "ledger").provenance] == [3, 2]
    people = world.people
    people.delegate(PII, "dora")
    manifest = next((people.root / "data" / "bob").rglob("manifest.json")).read_bytes()
    people.sign(PII, "dora", source="bob", data=manifest)
    world.ahead = timedelta(days=LICENCE_DAYS + 1)
    world.trainer(tmp_path / "run", {}, grace=grace, run=tmp_path / "run").fit()
    assert in_force(tmp_path / "run") == [(PII, "revocation", "reject", 9), (NEWS, "licence", "reject", 14)]
    assert not any(rows_by_step(tmp_path / "run", PII)[9:]), "signed again, and rejected for good"
    verify(tmp_path / "run")


def test_without_a_folder_it_is_the_same(world: World, tmp_path: Path, made: Path) -> None:
    kept = world.trainer(tmp_path / "run", {9: revoke(PII)}, grace="{revocation: reject}")
    kept.fit()
    other = World.found_in(Path(shutil.copytree(made, tmp_path / "other")))
    free = other.trainer(None, {9: revoke(PII)}, grace="{revocation: reject}")
    free.fit()
    assert parameter_root(dict(free.model.state_dict())) == parameter_root(dict(kept.model.state_dict()))


def test_the_page_of_such_a_run(world: World, tmp_path: Path) -> None:
    world.trainer(tmp_path / "run", {9: revoke(PII)}, grace="{revocation: reject}").fit()
    run = read_run(tmp_path / "run")
    assert not run.warnings
    assert run.governance is not None
    assert run.governance.decision[PII] == {"main": "admit", "main from 13": "reject"}
    assert "rejected from step 13 on" in render_report(title="Run", run=run)


def test_who_asks_nobody_is_not_watched(world: World, tmp_path: Path) -> None:
    world.ask = False
    trainer = world.trainer(tmp_path / "run", {})
    assert trainer.prepared.watch is None
    with trainer:
        assert not [one for one in threading.enumerate() if one.name == "cosmati-authority"]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds nothing asks again without a pause."""
    monkeypatch.setattr(asking, "_AGAIN_SECONDS", (0.001, 0.001))


@pytest.mark.usefixtures("at_once")
def test_the_authority_is_asked_every_so_often(world: World, tmp_path: Path) -> None:
    trainer = world.trainer(tmp_path / "run", {}, refresh=0.01, budget="1000000ba", checkpoint_every=None)
    hide(world)
    with pytest.raises(NoLongerVouchedError):
        trainer.fit()
    assert not [one for one in threading.enumerate() if one.name == "cosmati-authority"], "it ends with the run"


@pytest.mark.usefixtures("at_once")
def test_the_authority_is_asked_at_each_phase(world: World, tmp_path: Path) -> None:
    policy = PHASED.format(step=6, path=OPEN)
    trainer = world.trainer(tmp_path / "run", {}, policy=policy, budget="1000000ba", checkpoint_every=None)
    hide(world)
    with pytest.raises(NoLongerVouchedError):
        trainer.fit()


@pytest.mark.usefixtures("at_once")
def test_data_that_were_opened_long_ago_are_looked_at_first(world: World, tmp_path: Path) -> None:
    trainer = world.trainer(tmp_path / "run", {}, policy="", budget="1000000ba", checkpoint_every=None)
    go_on(8)(world)
    with pytest.raises(NoLongerVouchedError, match="expiry"):
        trainer.fit()


@pytest.mark.usefixtures("at_once")
def test_one_failure_is_none(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that breaks, and a repository that is read while it's changed, are asked again."""
    answers, found = threading.Event(), Authority.refresh
    asked = list[int]()

    def refresh(authority: Authority) -> Any:
        asked.append(len(asked))
        if len(asked) == 1:
            raise OSError("a blip")
        answers.set()
        return found(authority)

    trainer = world.trainer(tmp_path / "run", {}, refresh=0.001)
    monkeypatch.setattr(Authority, "refresh", refresh)
    with trainer:
        assert answers.wait(60)
        assert trainer.fit().outcome == "completed"
    assert not in_force(tmp_path / "run")


def test_who_does_not_answer_vouches_for_nothing(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(asking, "_PATIENCE_SECONDS", 0.02)
    trainer = world.trainer(tmp_path / "run", {}, refresh=0.01, budget="1000000ba", checkpoint_every=None)
    monkeypatch.setattr(Authority, "refresh", lambda _authority: answer.wait())
    try:
        with pytest.raises(NoLongerVouchedError, match="hasn't answered"):
            trainer.fit()
    finally:
        answer.set()


@pytest.mark.parametrize("refresh", [0, -1, float("nan"), "soon", "10", "", True, "10 parsecs"])
def test_a_time_that_is_none_is_refused(world: World, refresh: Any) -> None:
    with pytest.raises(ProvenanceError, match="10m"):
        Authority(world.people.folder, world.people.pin, refresh=refresh)


@pytest.mark.parametrize(("refresh", "seconds"), [(5, 5), ("10m", 600), ("600sec", 600), ("1.5h", 5400)])
def test_a_time_is_read(world: World, refresh: Any, seconds: float) -> None:
    assert Authority(world.people.folder, world.people.pin, refresh=refresh).refresh_seconds == seconds


def test_what_was_not_withdrawn_is_told(world: World, tmp_path: Path) -> None:
    """An operator who says that somebody else has taken a class away is refuted by the archive."""
    grace = "{revocation: reject, licence: reject}"
    world.trainer(tmp_path / "run", {5: revoke(PII), 9: go_on(LICENCE_DAYS + 1)}, grace=grace).fit()
    report = verify_ledger(tmp_path / "run" / "ledger")
    facts = report.withdrawn[-1]
    manifests = {one["target"]: one["manifest_sha256"] for one in report.provenance[0]["sources"]}
    archive = tmp_path / "run" / "ledger" / "provenance"

    def refuted(**changes: Any) -> bool:
        told = {**facts, "in_force": [{**one, **changes} for one in facts["in_force"]]}
        return any(is_refuted for _, is_refuted in audit_withdrawn(archive, told, manifests))

    assert not refuted()
    assert refuted(target=f"firm/{OPEN}/carol/1")
    assert refuted(reason="licence")
    assert refuted(step=None, target=3)
    assert refuted(target=f"firm/{NEWS}/ada/1", reason="revocation")
    earlier = {**facts, "seen": "2020-01-01T00:00:00+00:00"}
    assert any(is_refuted for _, is_refuted in audit_withdrawn(archive, earlier, manifests))


def test_what_was_taken_back_stays_so_under_another_policy(world: World, tmp_path: Path) -> None:
    """A policy that is left for the run, and what is withdrawn from it, before and after."""
    less = {
        "policy": load_policy(f"{POLICY}grace: {{revocation: reject}}".replace("weight: 1", "weight: 0.5")).to_mapping()
    }

    def left(_world: World) -> None:
        (tmp_path / "run" / FILE).write_text(json.dumps(less))
        assert trainer.policy_watch is not None
        trainer.policy_watch.look()

    for steps in ((5, 10), (10, 5)):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        own = World.found_in(Path(shutil.copytree(world.people.root, tmp_path / f"world{steps[0]}")))
        events: Events = dict(zip(steps, (left, revoke(PII)), strict=True))
        trainer = own.trainer(tmp_path / "run", events, grace="{revocation: reject}")
        trainer.fit()
        (taken,) = in_force(tmp_path / "run")
        assert (taken[0], taken[2]) == (PII, "reject")
        assert not any(rows_by_step(tmp_path / "run", PII)[taken[3] :])
        assert any(rows_by_step(tmp_path / "run", PII)[: taken[3]])
        said = verify(tmp_path / "run")
        assert "policy.changed_by" in said
        assert len({one.digest for one in verify_ledger(tmp_path / "run" / "ledger").policies}) == 2
        weights_ = {
            w for tables in VerifiedLedger(tmp_path / "run" / "ledger").tables[-1:] for r in tables.routes for w in r
        }
        assert weights_ == {0.0, 0.5}


@pytest.mark.parametrize(("days", "reason"), [(LICENCE_DAYS + 1, "licence"), (8, "expiry")])
def test_a_clock_that_is_set_back_lifts_no_stop(world: World, tmp_path: Path, days: int, reason: str) -> None:
    """Whatever a machine that has never asked before says, the ledger knows a later time."""
    stopped(world, tmp_path / "run", {5: go_on(days)})
    before = in_force(tmp_path / "run")
    world.set_back()
    with pytest.warns(UserWarning, match="the run's ledger knows of"):
        said = stopped(world, tmp_path / "run", {})
    assert f"({reason})" in said
    assert in_force(tmp_path / "run") == before
    world.ahead = timedelta(days=days)
    with pytest.raises((ProvenanceError, LicenceExpiredError)):
        world.trainer(tmp_path / "run", {})


def test_a_clock_that_is_set_back_is_on_record(world: World, tmp_path: Path, undisturbed: str) -> None:
    """Where all still holds as of the time that the ledger knows of, the run goes on, and says so."""
    world.ahead = timedelta(days=2)
    first = world.trainer(tmp_path / "run", {6: lambda _w: first.stop()})
    first.fit()
    later = verify_ledger(tmp_path / "run" / "ledger").provenance[0]["opened"]
    world.set_back()
    with pytest.warns(UserWarning, match="Set the clock right"):
        world.trainer(tmp_path / "run", {}).fit()
    assert weights(tmp_path / "run") == undisturbed
    assert "clock: asked as of" in verify(tmp_path / "run")
    assert all(one["opened"] >= later for one in verify_ledger(tmp_path / "run" / "ledger").provenance)


@pytest.mark.parametrize("ahead", [timedelta(), timedelta(seconds=30)])
def test_a_clock_that_is_right_is_no_word_worth(world: World, tmp_path: Path, ahead: timedelta) -> None:
    """Two machines' clocks are never quite equal."""
    world.ahead = ahead
    first = world.trainer(tmp_path / "run", {6: lambda _w: first.stop()})
    first.fit()
    world.ahead = timedelta()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        world.trainer(tmp_path / "run", {}).fit()
    assert "clock: asked" not in verify(tmp_path / "run")


def test_who_asks_has_seen_a_later_time(world: World) -> None:
    """Without a run, too: what was seen of an authority is kept with when."""
    world.ahead = timedelta(days=8)
    with pytest.raises(ExpiredMetadataError):
        world.sources()
    world.ahead = timedelta()
    for _ in range(2):
        with pytest.warns(UserWarning, match="seen/asked knows of"), pytest.raises(ExpiredMetadataError):
            world.sources()
    (world.people.root / "seen" / "asked").write_text("long ago")
    with pytest.raises(ProvenanceError, match="says no time"):
        world.sources()
    (world.people.root / "seen" / "asked").unlink()
    assert world.sources()
