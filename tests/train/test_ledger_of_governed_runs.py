"""A ledger says who vouches, what has changed, which rows were kept, what the clock says, and who has cosigned."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.core.clock import Budget, Clock, Time
from cosmati.errors import CheckpointError, LedgerError
from cosmati.ledger.details import details_digest
from cosmati.ledger.profile import LedgerProfile
from cosmati.ledger.reader import Scan, ScannedEntry, read_head, read_verifier_key
from cosmati.methods import SelectiveBackprop
from cosmati.provenance.artifact import Artifact
from cosmati.provenance.voucher import VouchedData, VouchedPolicy, Voucher, Withdrawal, Withdrawn
from cosmati.records.ledger import AmendEntry, CheckpointEntry, EndEntry, EvaluationEntry, ResumeEntry, TimeEntry
from cosmati.train.facts import PolicyChanges, RunFacts
from cosmati.train.identity import Change
from cosmati.train.observers import ledger as module
from cosmati.train.observers.ledger import LedgerObserver
from cosmati.train.outcome import StepOutcome
from cosmati.train.ranks import Ranks
from tests.ledger.row_oracle import Rows
from tests.train.hand_made import POLICY, Ticks, outcome, rows, run_facts

BUDGET = Budget(Time.parse("20ba"))
ROOT, STATE = b"R" * 32, b"S" * 32
VOUCHER = Voucher("ab", "tax/free/source/1", "cd", ("k",), "2027-01-01T00:00:00+00:00")
VOUCHED = VouchedData("2026-01-01T00:00:00+00:00", (VOUCHER,), {"ab/root.json": b"data"})
POLICY_VOUCHED = VouchedPolicy("2026-01-02T00:00:00+00:00", (VOUCHER,), {"ab/policy.json": b"policy"}, {"run": "x"})
PREPARED = VouchedData("2026-01-03T00:00:00+00:00", (VOUCHER,), {"ab/prepared.json": b"prepared"})
ARTIFACTS = Artifact("tokenizer", "ab"), Artifact("tokenizer", "cd", name="b", vouched=PREPARED)
WITHDRAWN = Withdrawn(
    "2026-01-04T00:00:00+00:00",
    (Withdrawal("tax/free/source/1", "expiry", "it has expired", "reject", 3),),
    {"ab/root.json": "ef"},
    {hashlib.sha256(b"later").hexdigest(): b"later"},
)
CHANGES = PolicyChanges(({"step": 3, "by": "us"},), {hashlib.sha256(b"change").hexdigest(): b"change"})


class Witnesses:
    """Notes what it's asked, and what the ledger has signed by then."""

    profile = LedgerProfile("attested", (), 0)

    def __init__(self, folder: Path, refusal: str = "", error: BaseException | None = None) -> None:
        self.asked: list[object] = []
        self._folder, self._refusal, self._error = folder, refusal, error

    def begin(self) -> None:
        self.asked.append(("begin", len(scan(self._folder))))
        if self._error is not None:
            raise self._error

    def refuse(self) -> str:
        return self._refusal

    def end(self, *, must: bool) -> None:
        self.asked.append(("end", must))

    def close(self) -> None:
        self.asked.append("close")


def observer_of(folder: Path, facts: RunFacts | None = None, **given: Any) -> LedgerObserver:
    folder.mkdir(exist_ok=True)
    return LedgerObserver(folder, facts or run_facts(), Ranks(), lambda: ROOT, **given)


def write(folder: Path, *outcomes: StepOutcome, facts: RunFacts | None = None, step: int = 0, **given: Any) -> None:
    """Open the ledger at a step, append some steps, and stop."""
    observer = observer_of(folder, facts, **given)
    observer.on_start(Clock(step=step), BUDGET)
    for one in outcomes:
        observer.on_step(one)
    observer.on_end(Clock(step=step + len(outcomes)), "stopped")


def scan(folder: Path) -> list[ScannedEntry]:
    ledger = folder / "ledger"
    return list(Scan(ledger, read_head(ledger, read_verifier_key(ledger))))


def kinds(folder: Path) -> list[type]:
    return [type(item.entry) for item in scan(folder)]


def told(item: ScannedEntry) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(item.details or b"{}")
    return found


def amendments(folder: Path) -> list[tuple[AmendEntry, dict[str, Any]]]:
    return [(item.entry, told(item)) for item in scan(folder) if isinstance(item.entry, AmendEntry)]


def plain(value: object) -> Any:
    """Return it as JSON has it."""
    return json.loads(json.dumps(value))


# ------------------------------------------------------------------------------------------------------- who vouches


GOVERNED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, bytes], list[bytes]]] = {
    "data": (
        {"vouched": VOUCHED, "data_text": "the data"},
        {"provenance": VOUCHED.facts, "data_text": "the data"},
        {"provenance": details_digest(VOUCHED.facts)},
        [b"data"],
    ),
    "withdrawn": ({"withdrawn": WITHDRAWN}, {"withdrawn": WITHDRAWN.facts}, {}, [b"later"]),
    "policy": (
        {"vouched_policy": POLICY_VOUCHED},
        {"policy_provenance": POLICY_VOUCHED.facts},
        {"policy_provenance": details_digest(POLICY_VOUCHED.facts)},
        [b"policy"],
    ),
    "artifacts": (
        {"artifacts": ARTIFACTS},
        {"artifacts": [one.facts for one in ARTIFACTS]},
        {"artifacts": details_digest({"artifacts": [one.facts for one in ARTIFACTS]})},
        [b"prepared"],
    ),
    "changes": ({"policy_changes": CHANGES}, {"policy_changes": list(CHANGES.told)}, {}, [b"change"]),
    "nothing": ({"data_text": "words that nobody vouches for"}, {}, {}, []),
}


@pytest.mark.parametrize("what", GOVERNED)
def test_entry_0_says_who_vouches_and_the_archive_bears_it_out(what: str, tmp_path: Path) -> None:
    given, said, committed, files = GOVERNED[what]
    write(tmp_path / "plain")
    write(tmp_path / "run", facts=run_facts(**given))
    (bare, *_), (first, *_) = scan(tmp_path / "plain"), scan(tmp_path / "run")
    before, after = told(bare), told(first)
    assert {name: one for name, one in after.items() if name not in before} == plain(said)
    own, was = dict(first.entry.commitments), dict(bare.entry.commitments)  # type: ignore[union-attr]
    assert {name: one for name, one in own.items() if name not in was} == committed
    archive = tmp_path / "run" / "ledger" / "provenance"
    kept = {path.name: path.read_bytes() for path in archive.iterdir()} if archive.exists() else {}
    assert kept == {hashlib.sha256(data).hexdigest(): data for data in files}


def test_the_run_s_folder_says_who_vouches_for_data_and_for_what_was_prepared(tmp_path: Path) -> None:
    write(tmp_path, facts=run_facts(vouched=VOUCHED, vouched_policy=POLICY_VOUCHED, artifacts=ARTIFACTS))
    assert json.loads((tmp_path / "vouched.json").read_bytes()) == [
        plain(VOUCHED.facts),
        plain(PREPARED.facts) | {"of": "tokenizer b"},
    ]


def test_entry_0_says_whether_data_and_policy_are_signed(tmp_path: Path) -> None:
    facts = run_facts()
    plan = replace(facts.plan, facts=replace(facts.plan.facts, provenance={"data": "declared"}))
    write(tmp_path, facts=replace(facts, plan=plan))
    assert told(scan(tmp_path)[0])["signed"] == {"data": "declared"}


def test_a_log_has_a_name_without_spaces_which_it_keeps(tmp_path: Path) -> None:
    write(tmp_path / "my  first+run")
    assert read_verifier_key(tmp_path / "my  first+run" / "ledger").name == "cosmati/my-first-run"
    assert told(scan(tmp_path / "my  first+run")[0])["run_id"] == "my-first-run"
    (tmp_path / "my  first+run").rename(tmp_path / "moved")
    write(tmp_path / "moved", facts=run_facts(data_digest="d2"))
    assert read_verifier_key(tmp_path / "moved" / "ledger").name == "cosmati/my-first-run"
    assert amendments(tmp_path / "moved")[0][1]["run_id"] == "my-first-run"


# ------------------------------------------------------------------------------------------------- a run that goes on


def test_a_run_that_goes_on_as_it_was_has_no_amendment(tmp_path: Path) -> None:
    write(tmp_path, outcome(0))
    write(tmp_path, step=1)
    assert kinds(tmp_path)[-2:] == [ResumeEntry, TimeEntry]


def test_what_has_changed_is_told_in_the_words_of_the_run_and_the_rest_by_commitments(tmp_path: Path) -> None:
    write(tmp_path, outcome(0))
    first = dict(scan(tmp_path)[0].entry.commitments)  # type: ignore[union-attr]
    changed = [Change("data.size", None, 7), Change("budget", "1ep", None)]
    facts = run_facts(data_digest="d2", environment={"torch": "3"}, policy=POLICY, model_root=b"N" * 32)
    write(tmp_path, facts=facts, step=1, changed=changed)
    ((entry, said),) = amendments(tmp_path)
    environment, data = hashlib.sha256(b"torch=3").digest(), hashlib.sha256(b"d2").digest()
    now = first | {"data": data, "environment": environment, "policy": b"P" * 32, "taxonomy": b"T" * 32}
    assert entry.step == 1
    assert list(entry.commitments) == sorted(now.items())  # The weights are still those that it began with.
    assert said["changes"] == [
        ["data.size", "", "7"],
        ["budget", "1ep", ""],
        ["environment", first["environment"].hex(), environment.hex()],
        ["policy", "00" * 32, (b"P" * 32).hex()],
        ["taxonomy", "00" * 32, (b"T" * 32).hex()],
    ]
    assert said["policy"] != []


def test_what_is_new_was_nothing(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, outcome(0), facts=run_facts(vouched=VOUCHED), step=0)
    ((_, said),) = amendments(tmp_path)
    assert said["changes"] == [["provenance", "", details_digest(VOUCHED.facts).hex()]]


def test_what_changed_in_words_alone_is_an_amendment_too(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, changed=[Change("budget", "1ep", "2ep")])
    ((_, said),) = amendments(tmp_path)
    assert said["changes"] == [["budget", "1ep", "2ep"]]


@pytest.mark.parametrize(("step", "has_checkpoint", "begins"), [(0, False, True), (0, True, False), (1, False, False)])
def test_only_a_run_that_begins_anew_has_new_weights(
    step: int, has_checkpoint: bool, begins: bool, tmp_path: Path
) -> None:
    observer = observer_of(tmp_path)
    observer.on_start(Clock(), BUDGET)
    observer.on_checkpoint(Clock(), STATE, ROOT)
    observer.on_step(outcome(0))
    observer.on_end(Clock(step=1), "stopped")
    write(tmp_path, facts=run_facts(model_root=b"N" * 32), step=step, state_digest=STATE if has_checkpoint else None)
    found = amendments(tmp_path)
    assert [dict(entry.commitments)["model"] for entry, _ in found] == [b"N" * 32] * begins


def test_a_checkpoint_that_the_ledger_has_not_signed_is_refused(tmp_path: Path) -> None:
    observer = observer_of(tmp_path)
    observer.on_start(Clock(), BUDGET)
    observer.on_step(outcome(0))
    observer.on_checkpoint(Clock(step=1), STATE, ROOT)
    observer.on_end(Clock(step=1), "stopped")
    before = len(scan(tmp_path))
    for step, state in ((1, b"X" * 32), (0, STATE)):
        with pytest.raises(CheckpointError, match=rf"checkpoint of step {step} isn't one that the ledger has signed"):
            write(tmp_path, step=step, state_digest=state)
    assert len(scan(tmp_path)) == before
    write(tmp_path, step=1, state_digest=STATE)


def test_rows_that_were_rejected_are_not_taken_again(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, facts=run_facts(withdrawn=WITHDRAWN), changed=[Change("withdrawn", None, "it")])
    with pytest.raises(LedgerError, match="rows of free are rejected from step 3 on"):
        write(tmp_path)
    write(tmp_path, facts=run_facts(withdrawn=WITHDRAWN))


# ----------------------------------------------------------------------------------------------- a change in mid-run


def test_a_change_without_a_stop_is_signed_at_once(tmp_path: Path) -> None:
    observer = observer_of(tmp_path, run_facts(policy=POLICY, vouched_policy=POLICY_VOUCHED))
    observer.on_start(Clock(), BUDGET)
    observer.on_step(outcome(0))
    first = dict(scan(tmp_path)[0].entry.commitments)  # type: ignore[union-attr]
    later = run_facts(
        policy=replace(POLICY, policy_digest=b"Q" * 32), vouched=VOUCHED, policy_changes=CHANGES, data_digest="d2"
    )
    observer.amend(Clock(step=1), [Change("policy", "a", None)], later)
    signed = kinds(tmp_path)
    observer.on_step(outcome(1))
    observer.on_end(Clock(step=2), "stopped")
    assert signed[-2:] == [ResumeEntry, AmendEntry]
    ((entry, said),) = amendments(tmp_path)
    gone = {name: one for name, one in first.items() if name != "policy_provenance"}
    now = gone | {"policy": b"Q" * 32, "provenance": details_digest(VOUCHED.facts)}
    assert (entry.step, list(entry.commitments)) == (1, sorted(now.items()))
    assert (said["changes"], said["policy_changes"]) == ([["policy", "a", ""]], plain(CHANGES.told))
    [*_, step] = [item.entry for item in scan(tmp_path) if not isinstance(item.entry, TimeEntry)]
    assert (step.step, step.attempt, step.policy_digest) == (1, 1, b"Q" * 32)  # type: ignore[union-attr]
    kept = {path.read_bytes() for path in (tmp_path / "ledger" / "provenance").iterdir()}
    assert kept == {b"policy", b"data", b"change"}


def test_a_policy_that_is_gone_is_nothing(tmp_path: Path) -> None:
    observer = observer_of(tmp_path, run_facts(policy=POLICY))
    observer.on_start(Clock(), BUDGET)
    observer.amend(Clock(), [], run_facts())
    observer.on_end(Clock(), "stopped")
    ((entry, said),) = amendments(tmp_path)
    assert (dict(entry.commitments)["policy"], said["classes"]) == (bytes(32), ["all"])


# -------------------------------------------------------------------------------------------------------------- rows


def test_rows_are_blinded_by_the_policy_s_class(tmp_path: Path) -> None:
    write(tmp_path, outcome(0), facts=run_facts(policy=POLICY))
    step = next(item.entry for item in scan(tmp_path) if hasattr(item.entry, "microbatches"))
    own = Rows(tmp_path)
    assert [cell.row_commitment for cell in step.microbatches] == [
        own.commitment("free", 0, 0, enumerate([0, 1, 2])),
        own.commitment("bound", 0, 1, enumerate([3, 4])),
    ]


def selected(*given: Sequence[int], **changed: Any) -> StepOutcome:
    """A step of which some rows were given, and [0, 2] and [4] were kept."""
    routes = [one._replace(num_rows=len(ids)) for one, ids in zip(outcome(0).routes, given, strict=True)]
    kept: dict[str, Any] = {"batches": [rows(2, 0), rows(4)], "given": [rows(*ids) for ids in given], "routes": routes}
    return outcome(0, **kept | changed)


def test_which_rows_were_kept_is_told_where_a_method_selects(tmp_path: Path) -> None:
    facts = run_facts(SelectiveBackprop(keep=0.5))
    write(tmp_path / "a", selected([0, 1, 2], [3, 4]), facts=facts)
    write(tmp_path / "b", selected([0, 1, 2], [3, 4]), facts=run_facts())
    write(tmp_path / "c", selected([0, 1, 2], [3, 4], given=()), facts=facts)
    found = [told(item).get("kept_rows") for name in "abc" for item in scan(tmp_path / name) if "loss" in told(item)]
    assert found == [{"0": [2, 0], "1": [1]}, None, None]


# ---------------------------------------------------------------------------------------------- figures and the clock


def test_what_was_measured_is_told_with_the_weights(tmp_path: Path) -> None:
    observer = observer_of(tmp_path)
    observer.on_start(Clock(), BUDGET)
    observer.evaluated(Clock(step=0), {"accuracy": 0.5, "loss": math.nan, "count": 3}, ROOT, "averaged")
    observer.on_end(Clock(), "stopped")
    [item] = [item for item in scan(tmp_path) if isinstance(item.entry, EvaluationEntry)]
    said = {"step": 0, "metrics": {"accuracy": 0.5, "loss": None, "count": 3.0}, "weights": "averaged"}
    assert (told(item), item.entry) == (said, EvaluationEntry(0, ROOT, details_digest(said)))


def test_the_clock_is_told_every_minute_at_checkpoints_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Ticks()
    monkeypatch.setattr(module, "time", clock)
    observer = observer_of(tmp_path)
    observer.on_start(Clock(), BUDGET)
    for step, seconds in enumerate((59.9, 0.1, 59.0, 1.0)):
        clock.pass_by(seconds)
        observer.on_step(outcome(step))
    clock.pass_by(30.5)
    observer.on_checkpoint(Clock(step=4), STATE, ROOT)
    clock.pass_by(59.0)
    observer.on_step(outcome(4))
    observer.on_end(Clock(step=5), "completed")
    entries = [item.entry for item in scan(tmp_path)]
    times = [(one.step, one.seconds) for one in entries if isinstance(one, TimeEntry)]
    assert times == [(0, 100), (2, 160), (4, 220), (4, 250), (5, 309)]
    place = entries.index(CheckpointEntry(4, STATE, ROOT))
    assert isinstance(entries[place - 1], TimeEntry)
    assert entries[-1] == EndEntry(5, "completed", ROOT)


# ---------------------------------------------------------------------------------------------------------- witnesses


def test_witnesses_are_asked_once_entry_0_and_the_time_are_signed(tmp_path: Path) -> None:
    witnesses = Witnesses(tmp_path)
    write(tmp_path, outcome(0), witnesses=witnesses)
    assert witnesses.asked == [("begin", 2), ("end", False)]
    first = scan(tmp_path)[0]
    assert told(first)["witnessing"] == plain(witnesses.profile.facts)
    assert dict(first.entry.commitments)["witnessing"] == details_digest(witnesses.profile.facts)  # type: ignore[union-attr]


def test_witnesses_who_refuse_the_beginning_leave_the_ledger_to_the_next(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, witnesses=Witnesses(tmp_path, error=KeyboardInterrupt()))
    write(tmp_path, outcome(0))  # The lock was given back.
    assert ResumeEntry in kinds(tmp_path)


@pytest.mark.parametrize("refusal", ["", "they refuse"])
def test_witnesses_who_refuse_later_stop_the_run(refusal: str, tmp_path: Path) -> None:
    observer, reasons = observer_of(tmp_path, witnesses=Witnesses(tmp_path, refusal)), list[str]()
    observer.on_open(SimpleNamespace(stop=reasons.append))  # type: ignore[arg-type]
    observer.on_start(Clock(), BUDGET)
    observer.on_step(outcome(0))
    observer.on_end(Clock(step=1), "stopped")
    assert reasons == [refusal] * bool(refusal)


@pytest.mark.parametrize(
    ("ended", "asked"), [("completed", ("end", True)), ("stopped", ("end", False)), ("failed", "close")]
)
def test_witnesses_have_to_see_the_end_of_a_complete_run_and_never_a_failed_one_s(
    ended: str, asked: object, tmp_path: Path
) -> None:
    witnesses = Witnesses(tmp_path)
    observer = observer_of(tmp_path, witnesses=witnesses)
    observer.on_start(Clock(), BUDGET)
    observer.on_end(Clock(), ended)
    assert witnesses.asked[1:] == [asked]
    assert kinds(tmp_path)[-1] is (EndEntry if ended == "completed" else TimeEntry)
