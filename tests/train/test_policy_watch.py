"""A policy that changes without a stop: at one step on all ranks, on record, and to the same bits after a crash."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cosmati import Trainer, load_policy
from cosmati.cli.main import app
from cosmati.core.plan import Promise
from cosmati.errors import CheckpointError
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.verify import verify_ledger
from cosmati.routing.proposals import proposals
from cosmati.train.authority_watch import LOOK_EVERY
from cosmati.train.policy_watch import FILE, MOST_BYTES, REFUSED_FILE
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.run.session import OpenRun
from tests.processes import PythonProcess, launch_ranks
from tests.train import policy_worker
from tests.train.policy_world import AFTER, BEFORE, POLICY, leave, trainer

pytestmark = pytest.mark.long

WORKER = policy_worker.__file__
BEGIN = 5
"""What is left after step 4 is found at the border of step 4, and acts from step 5 on."""
AS_PHASES = f"""phases: [{{name: before, until: {BEGIN}ba}}, {{name: after}}]
rules:
  - {{class: "**", phase: before, weight: 1}}
  - {{class: cold, phase: before, region: body, weight: 0.5}}
  - {{class: "**", phase: after, weight: 0.5}}
  - {{class: cold, phase: after, decision: reject}}
  - {{class: warm, phase: "*", region: body, weight: 0}}
  - {{class: warm, phase: [before, after], region: body, weight: 0}}
"""


def weights(folder: Path) -> str:
    """Weights of the newest checkpoint."""
    tensors = read_checkpoint(list_checkpoints(folder / "checkpoints")[0]).model
    return json.dumps({name: tensor.tolist() for name, tensor in sorted(tensors.items())})


def story(folder: Path) -> list[list[object]]:
    """What the steps that stand say, but for salts."""
    ledger = VerifiedLedger(folder / "ledger")
    return [
        [
            entry.step,
            entry.policy_digest.hex(),
            [(tables.class_of(c, item), tables.route(c, item), c.num_rows, c.weight) for c in entry.microbatches],
        ]
        for item, entry, tables in ledger.steps()
        if item.index in ledger.standing
    ]


def in_force(folder: Path) -> list[tuple[int, str]]:
    return [(one.step, one.digest.hex()[:8]) for one in verify_ledger(folder / "ledger").policies]


def verify(folder: Path) -> str:
    result = CliRunner().invoke(app, ["ledger", "verify", str(folder)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("changed") / "run"
    run = trainer(folder, {4: leave(AFTER)})
    run.fit()
    assert {g.pair for g in run.plan.guarantees if g.promise is Promise.NO_DIRECT_WRITE and g.holds} == {
        ("warm", "body")
    }
    return folder


def test_it_acts_from_a_step_on_as_a_phase_would(changed: Path, tmp_path: Path) -> None:
    trainer(tmp_path / "phases", text=AS_PHASES).fit()
    assert weights(changed) == weights(tmp_path / "phases")
    trainer(tmp_path / "before").fit()
    assert weights(changed) != weights(tmp_path / "before")
    assert not (changed / FILE).exists()


def test_the_ledger_says_when_it_was_found_and_when_it_acts(changed: Path) -> None:
    said = verify(changed)
    assert "from step 4 on, policy.to_come: from step 5 on, by the operator" in said
    assert "from step 5 on, policy: " in said
    assert [step for step, _ in in_force(changed)] == [0, 5]
    digests = [digest for _, digest, _ in story(changed)]
    assert len(set(digests[:5])) == len(set(digests[5:])) == 1 != len(set(digests))
    decided = {(one.class_name, one.start_step): one for one in proposals(VerifiedLedger(changed / "ledger"))}
    assert decided["cold", 4].decision == "gate"
    assert (decided["cold", 5].decision, decided["cold", 5].end_step) == ("reject", 12)
    assert decided["cold", 5].because == (
        "class cold: reject (on class, region and phase it's at least as specific as each of the others)",
    )


def test_who_resumes_goes_on_under_it(changed: Path, tmp_path: Path) -> None:
    """Under the recipe that the run was begun with: before the change acts, and after it."""
    for stop in (4, 5, 8):
        folder = tmp_path / str(stop)
        events = {4: leave(AFTER)}
        run = trainer(folder, {**events, stop: lambda own: own.stop()} if stop != 4 else events)
        if stop == 4:
            with run:
                while run.clock.step < 5:
                    run._get_ready()
                    run._take(*run._next(run.feed))  # type: ignore[arg-type, misc]
                run.save()
        else:
            run.fit()
        trainer(folder).fit()
        assert weights(folder) == weights(changed), stop
        assert story(folder) == story(changed)
        verify(folder)


def test_who_goes_back_to_the_step_at_which_it_was_found_heeds_the_entry(changed: Path, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path / "run", {4: leave(AFTER), 6: lambda _run: 1 // 0}, checkpoint_every="4ba").fit()
    trainer(tmp_path / "run", checkpoint_every="4ba").fit()
    assert weights(tmp_path / "run") == weights(changed)
    assert story(tmp_path / "run") == story(changed)


def test_two_changes_one_after_the_other(tmp_path: Path) -> None:
    last = AFTER.replace('"**", weight: 0.5', '"**", weight: 0.25')
    run = trainer(tmp_path / "run", {4: leave(AFTER), 8: leave(last), 10: lambda own: own.stop()})
    run.fit()
    trainer(tmp_path / "run").fit()
    assert [step for step, _ in in_force(tmp_path / "run")] == [0, 5, 9]
    undisturbed = trainer(tmp_path / "other", {4: leave(AFTER), 8: leave(last)})
    undisturbed.fit()
    assert weights(tmp_path / "run") == weights(tmp_path / "other")


def test_the_same_policy_is_no_change(tmp_path: Path) -> None:
    trainer(tmp_path / "run", {4: leave(BEFORE)}).fit()
    assert len(in_force(tmp_path / "run")) == 1
    assert not (tmp_path / "run" / FILE).exists()


def test_a_promise_that_it_breaks_is_taken_back(tmp_path: Path) -> None:
    run = trainer(
        tmp_path / "run", {4: leave(BEFORE.replace("region: body, weight: 0}", "region: body, weight: 0.1}"))}
    )
    run.fit()
    (broken,) = [g for g in run.plan.guarantees if g.pair == ("warm", "body")]
    assert (broken.holds, broken.because) == (False, "from step 5 on another policy lets rows of warm teach body")
    again = trainer(tmp_path / "run", budget="14ba", change=("budget",))
    again.fit()
    (broken,) = [g for g in again.plan.guarantees if g.pair == ("warm", "body")]
    assert not broken.holds


PUT_OFF = "phases: [{name: a, until: 8ba}, {name: b}]\nrules:\n  - {class: '**', weight: 1}\n"
REFUSED: dict[str, tuple[Any, str]] = {
    "other regions": (
        {"policy": {"version": 1, "taxonomy": "three", "rules": [{"class": "**", "weight": 1}]}},
        "other regions than the run has",
    ),
    "puts off": (PUT_OFF + "  - {class: cold, phase: a, decision: defer}\n", "defers cold from step 5 on"),
    "unknown class": ("rules: [{class: blue, weight: 1}]\n", "no class 'blue'"),
    "no policy": ({"policy": {"version": 1}}, "can't be read"),
    "not JSON's": ({"rules": []}, "can't be read"),
    "a list": (b"[]", "can't be read"),
    "too deep": (b"[" * 100_000, "can't be read"),
    "too long": (b" " * (MOST_BYTES + 1), "longer than"),
    "nothing": (b"", "can't be read"),
    "no text": (bytes(range(128, 256)), "can't be read"),
    "a number": (b"1", "can't be read"),
    "a policy's name alone": ({"url": "policies", "name": "main"}, "can't be read"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_may_not_be_made_without_a_stop_leaves_the_run_as_it_is(tmp_path: Path, what: str) -> None:
    left, why = REFUSED[what]
    with pytest.warns(UserWarning, match=f"(?s)goes on with the policy that it has.*{why}"):
        trainer(tmp_path / "run", {4: leave(left)}).fit()
    assert why in json.loads((tmp_path / "run" / REFUSED_FILE).read_text())["why"]
    assert not (tmp_path / "run" / FILE).exists()
    assert len(in_force(tmp_path / "run")) == 1


def test_what_is_left_after_the_last_look_is_told(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def late(_run: Trainer) -> None:
        (run / FILE).write_text(json.dumps({"policy": load_policy(POLICY + AFTER).to_mapping()}))

    trainer(run, {11: late, 9: lambda own: own.stop()}).fit()
    late(trainer(run))
    assert (run / FILE).exists(), "who was stopped heeds it when it goes on"
    (run / FILE).unlink()
    with pytest.warns(UserWarning, match="was completed before it looked"):
        trainer(run, {11: late}).fit()
    assert "longer budget" in json.loads((run / REFUSED_FILE).read_text())["why"]
    assert not (run / FILE).exists()
    assert len(in_force(run)) == 1


def test_a_policy_isnt_left_where_nobody_looks(changed: Path, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY + AFTER)
    result = CliRunner().invoke(app, ["policy", "change", str(changed), str(tmp_path / "policy.yaml")])
    assert result.exit_code == 1
    assert "was completed, and nothing looks for a policy there" in result.output
    assert not (changed / FILE).exists()


def test_a_class_that_the_order_has_no_rows_of_is_refused(tmp_path: Path) -> None:
    text = BEFORE + "  - {class: hot, decision: reject}\n"
    with pytest.warns(UserWarning, match="admits hot, of which the run has no rows in its order"):
        trainer(tmp_path / "run", {4: leave(BEFORE)}, text=text, budget="6ba").fit()


def test_until_the_entry_is_on_disk_the_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = OpenRun.amend
    with monkeypatch.context() as broken:
        broken.setattr(OpenRun, "amend", lambda *_, **__: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            trainer(tmp_path / "run", {4: leave(AFTER)}).fit()
    assert OpenRun.amend is real
    assert (tmp_path / "run" / FILE).exists()
    trainer(tmp_path / "run").fit()
    assert not (tmp_path / "run" / FILE).exists()
    assert len(in_force(tmp_path / "run")) == 2


def test_what_comes_in_the_place_of_a_file_that_was_read_isnt_lost(tmp_path: Path) -> None:
    last = AFTER.replace('"**", weight: 0.5', '"**", weight: 0.25')

    def twice(run: Trainer) -> None:
        leave(AFTER)(run)
        (tmp_path / "run" / FILE).write_text(json.dumps({"policy": load_policy(POLICY + last).to_mapping()}))

    def read(run: Trainer) -> None:
        assert run.policy_watch is not None
        run.policy_watch.look()

    trainer(tmp_path / "run", {4: twice, 8: read}).fit()
    assert [step for step, _ in in_force(tmp_path / "run")] == [0, 5, 9]


def test_a_run_that_takes_only_what_is_signed_takes_no_other(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", {4: leave(AFTER)}, budget="6ba")
    assert run.policy_watch is not None
    given = run.policy_watch._given
    config = dataclasses.replace(given.config, require_signed=True)
    run.policy_watch._given = dataclasses.replace(given, config=config)
    with pytest.warns(UserWarning, match="require_signed=True, and"):
        run.fit()


def test_a_change_after_the_end_is_refused(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="from step 5 on, and the run ends before it"):
        trainer(tmp_path / "run", {4: leave(AFTER)}, budget="5ba").fit()


def test_another_policy_isnt_given_while_one_is_to_come(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path / "run", {4: leave(AFTER), 5: lambda _run: 1 // 0}).fit()
    with pytest.raises(CheckpointError, match="another policy acts from step 5 on, and the run is at step 3"):
        trainer(tmp_path / "run", text=AFTER, change=("policy",)).fit()


def test_a_policy_given_at_a_resume_takes_its_place(changed: Path, tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", {4: leave(AFTER), 8: lambda own: own.stop()})
    run.fit()
    last = AFTER.replace('"**", weight: 0.5', '"**", weight: 0.25')
    trainer(tmp_path / "run", {10: lambda own: own.stop()}, text=last, change=("policy",)).fit()
    trainer(tmp_path / "run", text=last).fit()
    assert [step for step, _ in in_force(tmp_path / "run")] == [0, 5, 8]
    verify(tmp_path / "run")


def test_what_earlier_policies_let_a_class_teach_no_later_one_promises(tmp_path: Path) -> None:
    during = BEFORE.replace("body, weight: 0.5", "body, weight: 0").replace(
        "warm, region: body, weight: 0", "warm, weight: 0.1"
    )
    trainer(tmp_path / "run", {4: leave(during), 8: lambda own: own.stop()}).fit()
    last = BEFORE.replace("body, weight: 0.5", "body, weight: 0")
    run = trainer(tmp_path / "run", {10: lambda own: own.stop()}, text=last, change=("policy",))
    run.fit()
    because = {g.pair: g.because for g in run.plan.guarantees if g.promise is Promise.NO_DIRECT_WRITE}
    assert because == {
        ("cold", "body"): "an earlier policy let rows of cold teach 'body' in steps 0 to 4",
        ("warm", "body"): "from step 5 on another policy lets rows of warm teach body",
    }
    checkpoint = read_checkpoint(list_checkpoints(tmp_path / "run" / "checkpoints")[0])
    assert [(one["first"], one["end"]) for one in checkpoint.facts["past_policies"]] == [(0, 5), (5, 8), (8, 10)]
    assert not any(g.holds for g in run.plan.guarantees if g.pair)


def test_changes_are_known_after_two_resumes(changed: Path, tmp_path: Path) -> None:
    trainer(tmp_path / "run", {4: leave(AFTER), 6: lambda own: own.stop()}).fit()
    trainer(tmp_path / "run", {8: lambda own: own.stop()}).fit()
    trainer(tmp_path / "run", {10: lambda own: own.stop()}).fit()
    trainer(tmp_path / "run").fit()
    assert weights(tmp_path / "run") == weights(changed)
    assert story(tmp_path / "run") == story(changed)


def test_a_change_after_another_policy_was_given_is_known_too(tmp_path: Path) -> None:
    last = AFTER.replace('"**", weight: 0.5', '"**", weight: 0.25')
    trainer(tmp_path / "run", {3: lambda own: own.stop()}).fit()
    given = {"text": AFTER, "change": ("policy",)}
    trainer(tmp_path / "run", {4: leave(last), 8: lambda own: own.stop()}, **given).fit()
    trainer(tmp_path / "run", {10: lambda own: own.stop()}, text=AFTER).fit()
    trainer(tmp_path / "run", text=AFTER).fit()
    assert [step for step, _ in in_force(tmp_path / "run")] == [0, 3, 5]
    verify(tmp_path / "run")


def test_a_thread_reads_what_the_command_leaves(tmp_path: Path) -> None:
    (tmp_path / "after.yaml").write_text(POLICY + AFTER)

    def ask(*words: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["policy", "change", *map(str, words)])
        return result.exit_code, result.output

    run = trainer(tmp_path / "run", budget="40ba", checkpoint_every="40ba")
    with run:
        for words, why in (
            ((tmp_path / "run",), "Give a policy file, or --authority"),
            ((tmp_path / "run", "--authority", "here"), "with --policy-root"),
            ((tmp_path / "other", tmp_path / "after.yaml"), "has no ledger"),
        ):
            code, said = ask(*words)
            assert (code, why in said) == (1, True), said
        code, said = ask(tmp_path / "run", tmp_path / "after.yaml")
        assert (code, "every 4 steps" in said) == (0, True), said
        assert "waits to be taken up" in ask(tmp_path / "run", tmp_path / "after.yaml")[1]
        watch = run.policy_watch
        assert watch is not None
        for _ in range(2 * LOOK_EVERY + 2):  # it's noticed, read, put on record, and acts
            run._get_ready()
            run._take(*run._next(run.feed))  # type: ignore[arg-type, misc]
            if watch._thread is not None:
                watch._thread.join()
    assert not (tmp_path / "run" / FILE).exists()
    assert len(in_force(tmp_path / "run")) == 2


@pytest.mark.slow
def test_two_ranks_do_the_same_at_the_same_step(changed: Path, tmp_path: Path) -> None:
    launch_ranks([WORKER, tmp_path / "two", "4:leave"], 2)
    assert weights(tmp_path / "two") == weights(changed)
    assert story(tmp_path / "two") == story(changed)
    verify(tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("kill", [5, 6, 8, 11])
def test_a_run_that_is_killed_goes_on_by_the_entry(changed: Path, tmp_path: Path, kill: int) -> None:
    """Between the entry and its step, after that step, and after a checkpoint that knows of both."""
    killed = PythonProcess([WORKER, str(tmp_path / "run"), "4:leave", f"{kill}:kill"])
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    again = PythonProcess([WORKER, str(tmp_path / "run")])
    _, errors = again.communicate()
    assert again.returncode == 0, errors
    assert weights(tmp_path / "run") == weights(changed)
    assert story(tmp_path / "run") == story(changed)
    verify(tmp_path / "run")
