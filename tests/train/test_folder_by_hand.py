"""A run's folder: who may write there, what is told of who may not, and each line of what it says of a run."""

from __future__ import annotations

import dataclasses
import gc
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.core.clock import Clock
from cosmati.core.plan import Promise
from cosmati.errors import RunError
from cosmati.methods import EMA, LabelSmoothing
from cosmati.provenance.artifact import Artifact
from cosmati.records.launched import NOTE_VARIABLE
from cosmati.records.run import GuaranteeRecord, PlanLine
from cosmati.storage.lock import FileLock, is_locked
from cosmati.train.identity import Change
from cosmati.train.run import folder as folder_module
from cosmati.train.run.folder import RunFolder, describe_run
from cosmati.train.run.result import RunResult
from tests.train.hand_made import POLICY, Ticks, run_facts

FACTS = run_facts()
RESULT = RunResult("completed", Clock(step=4), {"loss": 0.5}, 2.0, {"forward": 1.5}, None)


def vouched(*roots: str) -> Any:
    made = [SimpleNamespace(root=root) for root in roots]
    return SimpleNamespace(vouchers=made, voucher=made[0])


# ----------------------------------------------------------------------------------------------------------- who writes


def test_a_folder_that_was_succeeded_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "succeeded.json").write_text('{"by": "the next one"}')
    with pytest.raises(RunError, match=rf"^{tmp_path} was succeeded by the next one, which had to forget something\."):
        RunFolder.open(tmp_path, FACTS)
    assert not (tmp_path / "lock").exists()


def test_each_that_opens_it_has_the_next_number(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        folder = RunFolder.open(tmp_path / "a" / "b", FACTS)
        assert folder.epoch == number
        folder.unlock()
        folder.unlock()
    assert (tmp_path / "a" / "b" / "checkpoints").is_dir()


@pytest.mark.long
def test_another_of_this_process_is_told_from_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.open(tmp_path, FACTS)
    with pytest.raises(RunError, match=rf"^Another Trainer of this process has {tmp_path} open\. End its") as caught:
        RunFolder.open(tmp_path, FACTS)
    assert isinstance(caught.value.__cause__, BlockingIOError)
    monkeypatch.setattr(folder_module, "is_held_here", lambda path: path != tmp_path / "lock")
    with pytest.raises(RunError, match=rf"^Another process is training in {tmp_path}\. Wait for it"):
        RunFolder.open(tmp_path, FACTS)
    folder.unlock()
    RunFolder.open(tmp_path, FACTS).unlock()


def test_what_can_not_be_opened_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(NOTE_VARIABLE, str(tmp_path / "file" / "note"))
    with pytest.raises(OSError, match="file") as caught:
        RunFolder.open(tmp_path, FACTS)
    assert not is_locked(tmp_path / "lock"), "though the error still holds all that it went through"
    assert caught.tb is not None


def test_who_has_lost_its_place_writes_nothing_more(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path, FACTS)
    folder.check()
    folder.write("running", FACTS.plan, Clock(), None)
    before = (tmp_path / "run.json").read_bytes()
    (tmp_path / "epoch").write_text("9 another")
    for work in (
        folder.check,
        lambda: folder.write("failed", FACTS.plan, Clock(), None),
        lambda: folder.note(Clock(), [Change("a", 1, 2)]),
        lambda: folder.close(RESULT, FACTS.plan),
    ):
        with pytest.raises(
            RunError, match=rf"stale: {tmp_path}/epoch says that another one trains in {tmp_path} since"
        ):
            work()
    assert (tmp_path / "run.json").read_bytes() == before
    assert not (tmp_path / "changes.jsonl").exists()
    assert not is_locked(tmp_path / "lock"), "it has been closed"
    (tmp_path / "epoch").unlink()
    with pytest.raises(RunError, match=rf"^{tmp_path} isn't there any more, or epoch in it, as where a disk is lost"):
        folder.check()


def test_a_collection_of_one_s_own_is_made_once_where_nobody_else_collects(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    collect = gc.collect
    monkeypatch.setattr(gc, "collect", lambda: made.append(1) or collect())
    before = list(gc.callbacks)
    folder_module._collect_garbage()
    assert (len(made), gc.callbacks) == (1, before)


@pytest.mark.parametrize(
    ("phase", "generation", "own", "ends"),
    [("stop", 2, True, True), ("start", 2, True, False), ("stop", 1, True, False), ("stop", 2, False, False)],
)
def test_only_a_whole_collection_of_this_thread_s_counts(
    monkeypatch: pytest.MonkeyPatch, phase: str, generation: int, *, own: bool, ends: bool
) -> None:
    """Others are waited for, but not for ever."""
    clock, slept, collected = Ticks(), list[float](), list[int]()

    def collect() -> None:
        collected.append(1)
        for one in [one for one in gc.callbacks if one not in before]:
            call = threading.Thread(target=one, args=(phase, {"generation": generation}))
            if own:
                call.run()
            else:
                call.start()
                call.join()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.pass_by(5.0)

    before = list(gc.callbacks)
    monkeypatch.setattr(folder_module, "gc", SimpleNamespace(collect=collect, callbacks=gc.callbacks))
    monkeypatch.setattr(folder_module, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
    gc.disable()
    try:
        folder_module._collect_garbage()
    finally:
        gc.enable()
    assert (len(collected), slept) == ((1, []) if ends else (4, [0.01] * 3)), "at 0, 5, 10 and 15 s"
    assert gc.callbacks == before


def test_a_lock_that_is_free_is_taken_without_a_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(folder_module, "_collect_garbage", lambda: made.append(1))
    with folder_module._locked(tmp_path / "lock"):
        assert made == []
        with pytest.raises(BlockingIOError):
            folder_module._locked(tmp_path / "lock")
        assert made == [1]
    FileLock(tmp_path / "lock").release()


# ---------------------------------------------------------------------------------------------------------- its record


def test_only_what_is_changed_is_noted_each_on_a_line(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path, FACTS)
    folder.note(Clock(step=3), [])
    assert not (tmp_path / "changes.jsonl").exists()
    folder.note(Clock(step=3), [Change("a", 1, None), Change("b", "x", "y")])
    folder.note(Clock(step=5), [Change("a", None, 2)])
    folder.unlock()
    assert [json.loads(line) for line in (tmp_path / "changes.jsonl").read_text().splitlines()] == [
        {"step": 3, "changes": [["a", 1, None], ["b", "x", "y"]]},
        {"step": 5, "changes": [["a", None, 2]]},
    ]


def test_where_a_checkpoint_is_the_record_keeps_its_start_and_its_first_model(tmp_path: Path) -> None:
    earlier = dataclasses.replace(described(), started="2001-02-03T04:05:06+00:00")
    (tmp_path / "run.json").write_text(earlier.to_json())
    begun = RunFolder.open(tmp_path, FACTS)
    assert (begun._started == earlier.started, begun._model_digest) == (False, (b"M" * 32).hex())
    begun.unlock()
    (tmp_path / "checkpoints" / "step-00000003").mkdir()
    resumed = RunFolder.open(tmp_path, FACTS)
    assert (resumed._started, resumed._model_digest) == (earlier.started, "mm")
    resumed.unlock()


def test_what_governs_may_be_another_and_the_rest_stays(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path, FACTS)
    governing: dict[str, Any] = {
        "policy": POLICY,
        "vouched": vouched("r"),
        "vouched_policy": vouched("p"),
        "artifacts": (Artifact("tokenizer", "ab"),),
    }
    folder.restate(dataclasses.replace(FACTS, seed=99, num_microbatches=4, **governing))
    folder.unlock()
    assert folder._facts == dataclasses.replace(FACTS, **governing)


def described(**changed: Any) -> Any:
    facts = run_facts(**changed)
    return describe_run(facts, facts.plan, Clock(step=3), run_id="it", model_digest="mm")


def test_a_run_without_a_folder_is_described_without_times() -> None:
    record = described()
    assert (record.run_id, record.recipe_name, record.num_steps, record.seed) == ("it", "by hand", 3, 7)
    assert (record.outcome, record.started, record.ended, record.cost) == ("running", "", None, None)
    assert (record.metrics, record.seconds_by_part) == ({}, {})
    assert (record.num_microbatches, record.hardware, record.environment) == (2, "an abacus", FACTS.environment)
    assert record.digests == {"plan": FACTS.plan.digest, "model": "mm", "data": "d1", "policy": ""}


@pytest.mark.parametrize("task", ["", "digits from pixels"])
def test_a_recipe_is_told_in_the_order_of_its_names_with_its_task(task: str) -> None:
    facts = run_facts(EMA(half_life="2ba"), LabelSmoothing(smoothing=0.25), task=task)
    record = describe_run(facts, facts.plan, Clock(), run_id="", model_digest="")
    told = {"lr": 0.5, "methods": ["LabelSmoothing(smoothing=0.25)", "EMA(half_life='2ba')"]}
    assert record.recipe_text == json.dumps(told | ({"task": task} if task else {}), indent=1)
    first_lines = [(kind.__doc__ or "").strip().splitlines()[0] for kind in (LabelSmoothing, EMA)]
    assert record.plan == (
        PlanLine("label", "LabelSmoothing(smoothing=0.25)", first_lines[0]),
        PlanLine("average", "EMA(half_life='2ba')", first_lines[1]),
    )
    assert record.guarantees == tuple(GuaranteeRecord(g.name, g.holds, g.because) for g in facts.plan.guarantees)


@pytest.mark.parametrize(
    ("changed", "digests"),
    [
        ({"policy": POLICY}, {"policy": (b"P" * 32).hex(), "policy_root": "declared"}),
        ({"policy": POLICY, "vouched_policy": vouched("pp")}, {"policy": (b"P" * 32).hex(), "policy_root": "pp"}),
        ({"vouched_policy": vouched("pp"), "vouched": vouched("r")}, {}),
        ({"artifacts": (Artifact("tokenizer", "ab", "here", "bytes"),)}, {"artifact tokenizer bytes": "ab, here"}),
    ],
)
def test_who_vouches_for_what_is_among_the_digests(changed: dict[str, Any], digests: dict[str, str]) -> None:
    found = described(**changed).digests
    own = {name: one for name, one in found.items() if name not in ("plan", "model", "data")}
    if "artifacts" in changed:
        (artifact,) = changed["artifacts"]
        assert list(own) == ["policy", next(name for name in own if name.endswith(artifact.label))]
        assert own[list(own)[1]] == str(artifact)
    else:
        assert own == {"policy": "", **digests}


@pytest.mark.parametrize(("roots", "told"), [((), "declared"), (("r",), "r"), (("z", "a", "z"), "a,z")])
def test_data_with_provenance_name_their_roots(roots: tuple[str, ...], told: str) -> None:
    plan = dataclasses.replace(FACTS.plan, facts=dataclasses.replace(FACTS.plan.facts, provenance={"data": "signed"}))
    assert described(plan=plan, vouched=vouched(*roots) if roots else None).digests["data_root"] == told


def test_the_end_has_its_promises_and_numbers_and_the_beginning_none(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path, FACTS)
    folder.write("running", FACTS.plan, Clock(step=1), None)
    begun = json.loads((tmp_path / "run.json").read_text())
    assert (begun["metrics"], begun["seconds_by_part"], begun["ended"], begun["num_steps"]) == ({}, {}, None, 1)
    folder.close(RESULT, FACTS.plan.withdraw(Promise.RESUME, "a reason"))
    ended = json.loads((tmp_path / "run.json").read_text())
    assert (ended["metrics"], ended["seconds_by_part"]) == ({"loss": 0.5}, {"forward": 1.5})
    assert (ended["outcome"], ended["num_steps"], ended["started"]) == ("completed", 4, begun["started"])
    assert ended["ended"].endswith("+00:00")
    assert "a reason" in json.dumps(ended["guarantees"])
    assert ended["digests"]["model"] == (b"M" * 32).hex()
