"""A signed policy in mid-run: its next version is taken from the authority, and a policy taken back ends the run."""

from __future__ import annotations

import json
import shutil
import signal
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati import Trainer, load_policy
from cosmati.errors import CheckpointError, ProvenanceError
from cosmati.explorer.run_view import read_run
from cosmati.explorer.trust import read_trust
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.verify import verify_ledger
from cosmati.provenance.authority import ceremony
from cosmati.provenance.authority.errors import NoLongerVouchedError, OutOfScopeError
from cosmati.provenance.authority.names import PolicyName
from cosmati.provenance.authority.signing import sign_targets
from cosmati.routing.proposals import proposals
from cosmati.train.policy_watch import REFUSED_FILE
from tests.processes import PythonProcess, launch_ranks
from tests.provenance.authority.people import People
from tests.train import followed_worker
from tests.train.followed_world import World, made_in
from tests.train.policy_world import AFTER, BEFORE, POLICY, leave
from tests.train.policy_world import trainer as world_trainer
from tests.train.test_policy_watch import in_force, story, verify, weights

pytestmark = pytest.mark.long

MORE = BEFORE.replace("region: body, weight: 0.5", "region: body, weight: 0.75")
WORKER = followed_worker.__file__


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_in(tmp_path_factory.mktemp("policies")).root


@pytest.fixture
def world(made: Path, tmp_path: Path) -> World:
    root = Path(shutil.copytree(made, tmp_path / "world"))
    return World(root, pin=(root / "pin").read_text())


def withdrawn(folder: Path) -> list[tuple[str, str, str, int]]:
    facts = VerifiedLedger(folder / "ledger").tables[-1].details.get("withdrawn") or {"in_force": []}
    return [(one["of"], one["reason"], one["action"], one["step"]) for one in facts["in_force"]]


def stopped(run: Trainer, step: int) -> None:
    run.observers[0]._events[step] = lambda own: own.stop()  # type: ignore[attr-defined]
    assert run.fit().outcome == "stopped"


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the run comes to if an operator leaves the same policy."""
    folder = tmp_path_factory.mktemp("changed") / "run"
    world_trainer(folder, {4: leave(AFTER)}).fit()
    return folder


def test_the_next_version_is_taken_as_a_change_is(world: World, tmp_path: Path, changed: Path) -> None:
    folder = tmp_path / "run"
    world.trainer(folder, {4: world.sign(AFTER)}).fit()
    assert weights(folder) == weights(changed)
    assert story(folder) == story(changed)
    said = verify(folder)
    assert f"policy.to_come: from step 5 on, by the authority {world.pin[:12]}, policy/main/2, who only tight" in said
    assert "policy    from step 5 on, policy/main/2, signed by" in said
    decided = {(one.class_name, one.start_step): one for one in proposals(VerifiedLedger(folder / "ledger"))}
    assert (decided["cold", 5].decision, decided["cold", 5].end_step) == ("reject", 12)
    trust = read_trust(folder / "ledger", verify_ledger(folder / "ledger"))
    assert trust is not None
    assert (trust.problems, trust.policy and trust.policy.target) == ((), "policy/main/2")
    assert not read_run(folder).warnings


def test_what_loosens_acts_where_its_signers_meant_it(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    world.trainer(folder, {4: world.meant(folder, MORE, step=8)}).fit()
    assert [step for step, _ in in_force(folder)] == [0, 8]
    assert f"by the authority {world.pin[:12]}, policy/main/2" in verify(folder)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({}, "for the run (none)"),
        ({"previous": "0" * 64}, "for the previous 0000"),
        ({"from_step": 1}, ""),
    ],
)
def test_what_loosens_is_asked_what_a_change_is_asked(
    world: World, tmp_path: Path, said: dict[str, Any], why: str
) -> None:
    folder = tmp_path / "run"
    sign = world.meant(folder, MORE, step=6, **said) if said else world.sign(MORE)
    run = world.trainer(folder, {4: sign, 7: lambda: None, 8: lambda: None})
    if not why:
        run.fit()
        assert [step for step, _ in in_force(folder)] == [0, 5]
        return
    with pytest.warns(UserWarning, match="goes on with the policy that it has") as told:
        run.fit()
    assert len([one for one in told if "goes on with" in str(one.message)]) == 1, "each version once"
    refused = json.loads((folder / REFUSED_FILE).read_text())
    assert why in refused["why"]
    assert refused["given"] == "policy/main/2"
    assert len(in_force(folder)) == 1


def test_who_readmits_alone_is_refused(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    again = BEFORE.replace("region: body, weight: 0}", "region: body, weight: 0.1}")
    with pytest.warns(UserWarning, match="takes two signers"):
        world.trainer(folder, {4: world.meant(folder, again, step=6)}).fit()
    assert len(in_force(folder)) == 1


def test_a_version_for_another_run_is_passed_over(world: World, tmp_path: Path, changed: Path) -> None:
    folder = tmp_path / "run"
    events = {3: world.sign(MORE, run="another+1+key", previous="0", from_step=3), 4: world.sign(AFTER)}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run = world.trainer(folder, {**events, 8: lambda: None})
        run.fit()
    assert not (folder / REFUSED_FILE).exists()
    assert [one.facts["sources"][0]["target"] for one in verify_ledger(folder / "ledger").policies if one.facts] == [
        "policy/main/1",
        "policy/main/3",
    ]
    verify(folder)


def test_a_number_that_is_left_out_is_waited_for(world: World, tmp_path: Path) -> None:
    """Whoever drops a version that was signed gets no later one in."""
    third = PolicyName("main", 3)

    def skip() -> None:
        content = load_policy(POLICY + AFTER).canonical
        sign_targets(world.repository, world.ring("ada"), third.role, {third.target: content}, what="main")

    world.trainer(tmp_path / "run", {4: skip, 8: lambda: None}).fit()
    assert len(in_force(tmp_path / "run")) == 1


def test_a_next_version_that_is_no_policy_is_told_once_and_the_one_in_force_holds(world: World, tmp_path: Path) -> None:
    second, folder = PolicyName("main", 2), tmp_path / "run"

    def sign() -> None:
        sign_targets(world.repository, world.ring("ada"), second.role, {second.target: b"{}"}, what="main")

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        world.trainer(folder, {3: sign, 4: lambda: None, 6: lambda: None}).fit()
    assert len([one for one in told if "goes on with the policy that it has" in str(one.message)]) == 1
    assert json.loads((folder / REFUSED_FILE).read_text())["why"]
    assert len(in_force(folder)) == 1
    world_trainer(tmp_path / "undisturbed", policy=load_policy(POLICY + BEFORE)).fit()
    assert weights(folder) == weights(tmp_path / "undisturbed")


@pytest.mark.parametrize("grace", ["", "{revocation: reject, expiry: reject}", "{expiry: {finish: 3ba}}"])
@pytest.mark.parametrize("what", ["revoke", "hide", "go_on", "replace"])
def test_a_policy_that_is_taken_back_stops_the_run(tmp_path: Path, what: str, grace: str) -> None:
    """Of a policy nothing can be left out: to reject it is to stop."""
    world = made_in(tmp_path / "world", grace=grace)
    data = People(tmp_path / "data").begin()

    def replace() -> None:
        """Let the authority of data stand in for that of policies."""
        world.hide()
        shutil.copytree(data.folder, world.folder)

    events = {"revoke": world.revoke, "hide": world.hide, "go_on": world.go_on, "replace": replace}
    folder, reason = tmp_path / "run", "revocation" if what == "revoke" else "expiry"
    end = 8 if "finish" in grace and reason == "expiry" else 5
    with pytest.raises(NoLongerVouchedError, match="the policy policy/main/1 being withdrawn"):
        world.trainer(folder, {4: events[what]}).fit()
    assert withdrawn(folder) == [("policy", reason, "stop", end)]
    said = verify(folder)
    shown = {"revoke": "it isn't signed any more", "go_on": "it had expired"}.get(what, "nobody could be asked")
    assert f"withdrawn policy/main/1 ({reason}), stop from step {end} on: {shown}" in said
    assert len(story(folder)) == end
    assert not read_run(folder).warnings


def test_another_content_under_the_same_number_is_not_what_was_given(world: World, tmp_path: Path) -> None:
    """An authority that signs the number anew has taken back what it had signed."""

    def swap() -> None:
        first = PolicyName("main", 1)
        with world.repository.change(world.ring("ada")) as change:
            change.targets(first.role).targets.pop(first.target)
            change.add_target(first.role, first.target, load_policy(POLICY + AFTER).canonical)

    folder = tmp_path / "run"
    with pytest.raises(NoLongerVouchedError, match="Another policy is signed as policy/main/1"):
        world.trainer(folder, {4: swap}).fit()
    assert withdrawn(folder) == [("policy", "revocation", "stop", 5)]
    assert "policy/main/1 (revocation), stop from step 5 on: it isn't signed any more" in verify(folder)
    num_tables = len(VerifiedLedger(folder / "ledger").tables)
    with pytest.raises(NoLongerVouchedError, match="policy/main/1 being withdrawn"):
        world.trainer(folder, {}, run=folder).fit()
    assert num_tables == len(VerifiedLedger(folder / "ledger").tables), "nothing is answered anew"


def test_once_it_is_mended_the_run_goes_on(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(NoLongerVouchedError):
        world.trainer(folder, {4: world.hide}).fit()
    with pytest.raises(ProvenanceError):
        world.opened()
    world.show()
    world.trainer(folder, {}).fit()
    assert not withdrawn(folder)
    assert "vouched for again" in verify(folder)
    world_trainer(tmp_path / "undisturbed", policy=load_policy(POLICY + BEFORE)).fit()
    assert weights(folder) == weights(tmp_path / "undisturbed")


def test_who_resumes_says_for_which_run(world: World, tmp_path: Path, changed: Path) -> None:
    """The newest version is in force by then; the run was begun with the first one."""
    folder = tmp_path / "run"
    events: dict[int, Callable[[], object]] = {4: world.sign(AFTER)}
    stopped(world.trainer(folder, events), 8)
    with pytest.raises(CheckpointError, match=r"signed_policy\(\.\.\., run="):
        world.trainer(folder, {}).fit()
    again = world.opened(run=folder)
    assert again.digest == load_policy(POLICY + BEFORE).digest
    world.trainer(folder, {}, policy=again).fit()
    assert weights(folder) == weights(changed)
    assert story(folder) == story(changed)
    assert [step for step, _ in in_force(folder)] == [0, 5]
    verify(folder)


def test_a_resume_goes_by_what_the_run_has_kept(tmp_path: Path) -> None:
    world = made_in(tmp_path / "world", grace="{expiry: {finish: 3ba}}")
    folder = tmp_path / "run"
    stopped(world.trainer(folder, {}), 6)
    world.hide()
    with pytest.raises(ProvenanceError):
        world.opened()
    kept = world.opened(run=folder)
    with pytest.raises(NoLongerVouchedError, match="is for going on with that run"):
        world.trainer(tmp_path / "other", {}, policy=kept)
    with pytest.raises(NoLongerVouchedError):
        world.trainer(folder, {}, policy=kept).fit()
    assert withdrawn(folder) == [("policy", "expiry", "stop", 9)]
    verify(folder)
    for file in (folder / "ledger" / "provenance").iterdir():
        file.write_bytes(file.read_bytes()[:-1] + b" ")
    with pytest.raises(ProvenanceError, match="doesn't hold"):
        world.opened(run=folder)


def test_what_is_revoked_is_kept_for_that_run_alone(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stopped(world.trainer(folder, {}), 6)
    world.revoke()
    with pytest.raises(OutOfScopeError):
        world.opened()
    with pytest.raises(NoLongerVouchedError, match="policy/main/1 being withdrawn"):
        world.trainer(folder, {}, run=folder).fit()
    others = made_in(tmp_path / "others")
    assert others.opened(run=folder).signed_root == others.pin, "what was kept is another authority's"


def test_an_older_state_between_two_looks_is_as_expiry(world: World, tmp_path: Path) -> None:
    """Who puts the repository back to before the tightening doesn't get the looser policy again."""
    shutil.copytree(world.folder, tmp_path / "before")

    def roll_back() -> None:
        shutil.rmtree(world.folder)
        shutil.copytree(tmp_path / "before", world.folder)

    folder = tmp_path / "run"
    with pytest.raises(NoLongerVouchedError, match="older state than was seen here before"):
        world.trainer(folder, {4: world.sign(AFTER), 8: roll_back}).fit()
    assert [step for step, _ in in_force(folder)] == [0, 5]
    assert withdrawn(folder) == [("policy", "expiry", "stop", 9)]
    verify(folder)


def test_a_clock_that_is_set_back_lifts_nothing_in_mid_run(tmp_path: Path) -> None:
    world = made_in(tmp_path / "world", grace="{expiry: {finish: 6ba}}")

    def back() -> None:
        world.ahead = timedelta(days=-3)

    with pytest.raises(NoLongerVouchedError):
        world.trainer(tmp_path / "run", {4: world.go_on, 8: back}).fit()
    assert withdrawn(tmp_path / "run") == [("policy", "expiry", "stop", 11)]
    verify(tmp_path / "run")


def test_other_keys_are_an_entry(world: World, tmp_path: Path) -> None:
    def rotate() -> None:
        (keyid,) = next(one.keyids for one in ceremony.status(world.repository) if one.role == "policy.main")
        bob = world.person("bob")
        with world.repository.change(world.ring("bob")) as change:
            ceremony.replace_key(change, keyid, bob)

    folder = tmp_path / "run"
    world.trainer(folder, {4: rotate}).fit()
    first, second = verify_ledger(folder / "ledger").policies
    assert (first.step, second.step, first.digest) == (0, 4, second.digest)
    assert first.facts is not None
    assert second.facts is not None
    assert first.facts["sources"][0]["keyids"] != second.facts["sources"][0]["keyids"]
    verify(folder)


def test_the_key_of_the_version_in_force_is_what_counts(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(NoLongerVouchedError, match="policy/main/2"):
        world.trainer(folder, {4: world.sign(AFTER), 8: world.revoke}).fit()
    assert [step for step, _ in in_force(folder)] == [0, 5]
    verify(folder)


def test_nobody_is_asked_about_a_policy_out_of_a_file(tmp_path: Path) -> None:
    assert world_trainer(tmp_path / "run").prepared.watch is None


def test_a_thread_asks_every_so_often(world: World, tmp_path: Path) -> None:
    run = world.trainer(tmp_path / "run", {}, refresh=0.01, budget="20000ba", checkpoint_every=None)
    world.sign(AFTER)()

    def stop_once_it_acts(own: Trainer) -> None:
        assert own.policy_watch is not None
        if own.policy_watch._num_made:
            own.stop()

    events = run.observers[0]._events  # type: ignore[attr-defined]
    events.update(dict.fromkeys(range(20, 20_000, 20), stop_once_it_acts))
    run.fit()
    assert [
        one.facts and one.facts["sources"][0]["target"] for one in verify_ledger(tmp_path / "run/ledger").policies
    ] == [
        "policy/main/1",
        "policy/main/2",
    ]


@pytest.mark.slow
def test_two_ranks_do_the_same_at_the_same_step(made: Path, tmp_path: Path) -> None:
    for ranks in (1, 2):
        shutil.copytree(made, tmp_path / f"world{ranks}")
        launch_ranks([WORKER, tmp_path / f"world{ranks}", tmp_path / f"run{ranks}", "4:sign", "7:revoke"], ranks)
    assert weights(tmp_path / "run1") == weights(tmp_path / "run2")
    assert story(tmp_path / "run1") == story(tmp_path / "run2")
    assert withdrawn(tmp_path / "run1") == withdrawn(tmp_path / "run2") != []
    verify(tmp_path / "run2")


@pytest.mark.slow
@pytest.mark.parametrize("kill", [5, 6, 8])
def test_a_run_that_is_killed_goes_on_by_the_entry(made: Path, tmp_path: Path, changed: Path, kill: int) -> None:
    shutil.copytree(made, tmp_path / "world")
    command = [WORKER, str(tmp_path / "world"), str(tmp_path / "run")]
    killed = PythonProcess([*command, "4:sign", f"{kill}:kill"])
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    again = PythonProcess(command)
    _, errors = again.communicate()
    assert again.returncode == 0, errors
    assert weights(tmp_path / "run") == weights(changed)
    assert story(tmp_path / "run") == story(changed)
    verify(tmp_path / "run")
