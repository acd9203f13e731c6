"""A span is taken again as the ledger tells it: its settings, policy, withdrawals and states, and no others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmati.core.plan import Guarantee, Promise
from cosmati.errors import CheckpointError, DivergenceError, LedgerError
from cosmati.provenance.voucher import Withdrawn
from cosmati.train import replay_span
from cosmati.train.config import LEARNING_CADENCES
from cosmati.train.facts import describe_environment
from cosmati.train.identity import CADENCES
from cosmati.train.observers.replayed import LedgerComparison, ReplayedLedger
from cosmati.train.recorded_vouchers import RecordedVouchers
from cosmati.train.replay_span import ReplayRequest, SpanAgain, furnish
from cosmati.train.run.checkpoints import (
    Checkpoint,
    list_checkpoints,
    publish_checkpoint,
    read_checkpoint,
    signed_digest_of,
    write_checkpoint,
)

POLICY = {
    "version": 1,
    "taxonomy": "software-licences",
    "regions": {"all": {"params": ["*"]}},
    "rules": [{"class": "open/**", "weight": 1}],
}
CPU = torch.device("cpu")
FACTS: Mapping[str, Any] = {
    "identity": {"seed": 1, "data.digest": "old"},
    "phases": [],
    "budget_was_read": False,
    "clock": [2, 8, 0, 0, 0.0, 1.0],
}


@dataclass(frozen=True)
class Prepared:
    """What a trainer has prepared, as far as a replay looks at it."""

    identity: Mapping[str, Any]
    assembly: Any
    data_digest: str = "d1"
    watch: Any = None


class Scratch:
    """A span whose trainer is made by hand."""

    def __init__(
        self,
        tmp_path: Path,
        *,
        recipe: Mapping[str, str] | None = None,
        identity: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        commitments: Mapping[str, bytes] | None = None,
        details: Mapping[str, Any] | None = None,
        forgotten: str = "",
        withdrawn: Sequence[tuple[int, Any]] = (),
        checkpoint: Checkpoint | None = None,
        guarantees: Sequence[Guarantee] = (),
        is_parallel: bool = False,
        states: Any = None,
    ) -> None:
        told = {**describe_environment(CPU), **(environment or {})}
        self.tables: Any = SimpleNamespace(
            details=dict(details or {}),
            policy=(),
            entry=SimpleNamespace(commitments=tuple((commitments or {}).items())),
        )
        self.span: Any = SimpleNamespace(
            recipe=dict(recipe or {}), environment=told, tables=self.tables, forgotten=forgotten
        )
        self.run: Any = SimpleNamespace(
            steps=lambda first, end: iter(range(first, end)),
            ledger=SimpleNamespace(details={}, tables=[self.tables]),
            withdrawn=list(withdrawn),
            states=states or (lambda step, request: set()),
        )
        self.comparison = LedgerComparison(self.run, range(8), None, keep_going=True)
        layout = SimpleNamespace(digest=lambda: b"L" * 32)
        self.assembly = SimpleNamespace(
            layout=layout,
            policy=None,
            device=CPU,
            ranks=SimpleNamespace(is_parallel=is_parallel),
        )
        plan = SimpleNamespace(guarantees=tuple(guarantees), facts=SimpleNamespace(has_ledger=True))
        self.assembly.plan = plan
        self.trainer: Any = SimpleNamespace(
            assembly=self.assembly,
            prepared=Prepared(dict(recipe or {}) if identity is None else identity, self.assembly, watch="today's"),
            policy_watch="today's",
            plan=plan,
            save=lambda: None,
            clock=SimpleNamespace(step=3),
        )
        self.requests: list[ReplayRequest] = []
        self.folder, self.checkpoint = tmp_path, checkpoint

    def make(self, request: ReplayRequest) -> Any:
        self.requests.append(request)
        return self.trainer

    def again(self) -> SpanAgain:
        return SpanAgain(self.run, self.span, self.comparison, self.folder, self.checkpoint, self.make)

    def differences(self) -> list[tuple[int | None, str, str, str]]:
        self.again()
        return [(one.step, one.what, one.logged, one.replayed) for one in self.comparison.differences]


def test_the_trainer_is_asked_for_with_what_the_ledger_says(tmp_path: Path) -> None:
    recipe = {"optimizers.1.schedule": "Cosine()", "cadence.details_every": "7", "seed": "1"}
    world = Scratch(tmp_path, recipe=recipe)
    again = world.again()
    (request,) = world.requests
    (observer,) = request.observers
    assert isinstance(observer, ReplayedLedger)
    assert observer._comparison is world.comparison
    assert observer._digest_of() == b"L" * 32
    assert (request.run_folder, request.policy, request.forgotten) == (tmp_path, None, "")
    assert request.settings == replay_span._settings(world.span)
    assert request.settings["details_every"] == 7
    assert request.schedules == {1: "Cosine()"}
    assert world.comparison.save is world.trainer.save
    assert world.comparison.unexplained == again._unexplained
    assert world.comparison.request == ""
    assert not world.comparison.differences


def test_a_request_of_a_plain_run_forgets_nothing(tmp_path: Path) -> None:
    request = ReplayRequest(run_folder=tmp_path, observers=[], policy=None, settings={})
    assert (request.forgotten, request.schedules) == ("", {})


def test_nobody_watches_a_replay_where_the_ledger_tells_of_no_withdrawal(tmp_path: Path) -> None:
    world = Scratch(tmp_path)
    world.again()
    assert world.trainer.prepared.watch is None
    assert world.trainer.policy_watch is None


def test_withdrawals_are_those_that_the_ledger_says(tmp_path: Path) -> None:
    facts = {"seen": "2026-01-01", "in_force": [], "archive": {"a": "b"}}
    world = Scratch(tmp_path, withdrawn=[(2, None), (5, facts)])
    world.again()
    watch = world.trainer.prepared.watch
    assert isinstance(watch, RecordedVouchers)
    assert watch._told == [(2, None), (5, Withdrawn("2026-01-01", (), {"a": "b"}))]
    assert watch._a is world.assembly


def change(**other: Any) -> dict[str, Any]:
    return {"step": 4, "text": POLICY, "by": "operator", "signed": "", "anchor": {}} | other


def test_a_watch_over_the_policy_goes_by_the_recorded_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Scratch(tmp_path, details={"policy_changes": [change()]})
    watches: list[Any] = []

    def watch_of(prepared: Any) -> Any:
        watches.append(prepared)
        return SimpleNamespace(recorded=None)

    monkeypatch.setattr(replay_span, "policy_watch_of", watch_of)
    world.again()
    assert world.trainer.policy_watch.recorded == [change()]
    assert watches == [world.trainer.prepared]
    assert watches[0].watch is None, "it's made after the watch over the data was put in place"


@pytest.mark.parametrize(
    "told",
    [
        [change(step=True)],
        [change(step="4")],
        [change(), change(anchor="x")],
        [{name: value for name, value in change().items() if name != "by"}],
        ["x"],
        "x",
        {"step": 4},
        7,
    ],
)
def test_changes_of_a_policy_that_are_none_are_refused(told: Any) -> None:
    span: Any = SimpleNamespace(tables=SimpleNamespace(details={"policy_changes": told}))
    with pytest.raises(LedgerError, match="What the ledger says of a changed policy is no change: "):
        replay_span._policy_changes(span)


def test_changes_of_a_policy_are_read_and_none_is_none() -> None:
    span: Any = SimpleNamespace(tables=SimpleNamespace(details={}))
    assert replay_span._policy_changes(span) == []
    span.tables.details["policy_changes"] = [change(), change(anchor=None, more=1)]
    assert replay_span._policy_changes(span) == [change(), change(anchor=None, more=1)]
    span.tables.details["policy_changes"] = [change(), change(text={"version": 1})]
    with pytest.raises(LedgerError, match="The ledger's text of a policy is none: "):
        replay_span._policy_changes(span)


def test_a_policy_is_that_of_the_digest_which_the_recipe_has() -> None:
    def tables(digest: str, text: Any) -> Any:
        commitments = (("data", b"\x01"), ("policy", bytes.fromhex(digest)))
        return SimpleNamespace(
            entry=SimpleNamespace(commitments=commitments), details={} if text is None else {"policy_text": text}
        )

    other = {**POLICY, "taxonomy": "content-licences"}
    bare: Any = SimpleNamespace(entry=SimpleNamespace(commitments=()), details={"policy_text": other})
    mine, run = "ab" * 32, SimpleNamespace(ledger=SimpleNamespace(tables=[]))
    span: Any = SimpleNamespace(recipe={"policy": mine})
    run.ledger.tables = [bare, tables("cd" * 32, other), tables(mine, None), tables(mine, POLICY)]
    found = replay_span._policy(run, span)  # type: ignore[arg-type]
    assert found == replay_span._policy_of(POLICY)
    assert found is not None
    assert found.taxonomy == "software-licences"
    run.ledger.tables = run.ledger.tables[:3]
    with pytest.raises(LedgerError, match=rf"commits to the policy {mine[:16]} and has no text of it"):
        replay_span._policy(run, span)  # type: ignore[arg-type]
    for recipe in ({}, {"policy": ""}):
        span.recipe = recipe
        assert replay_span._policy(run, span) is None  # type: ignore[arg-type]


def test_a_recipe_that_is_another_one_is_a_difference(tmp_path: Path) -> None:
    recipe = {"seed": "1", "gone": "x" * 300, "none": "", "cadence.details_every": "3", "data.digest": "a"}
    identity = {"seed": 2, "come": 0, "none": None, "cadence.details_every": 5, "data.digest": "b"}
    assert Scratch(tmp_path, recipe=recipe, identity=identity).differences() == [
        (None, "recipe, come", "nothing", "0"),
        (None, "recipe, data: digest", "a", "b"),
        (None, "recipe, gone", "x" * 200, "nothing"),
        (None, "recipe, seed", "1", "2"),
    ]


def test_what_a_schedule_is_called_is_compared_as_a_part_of_the_recipe(tmp_path: Path) -> None:
    recipe, identity = {"optimizers.0.lr": "0.5"}, {"optimizers.0.lr": 0.25}
    assert Scratch(tmp_path, recipe=recipe, identity=identity).differences() == [
        (None, "recipe, optimizers 0: learning rate", "0.5", "0.25")
    ]


def test_the_files_that_a_checkpoint_notes_are_no_difference(tmp_path: Path) -> None:
    noted = Checkpoint(2, {}, {}, {**FACTS, "files": {"files.__main__": "folder.script"}})
    recipe, identity = {"loss": "__main__.loss"}, {"loss": "folder.script.loss"}
    assert Scratch(tmp_path, recipe=recipe, identity=identity, checkpoint=noted).differences() == []
    unnoted = replace(noted, facts=FACTS)
    for start in (None, unnoted):
        found = Scratch(tmp_path, recipe=recipe, identity=identity, checkpoint=start).differences()
        assert found == [(None, "recipe, loss", "__main__.loss", "folder.script.loss")]


def test_contents_are_compared_where_they_were_computed_alike(tmp_path: Path) -> None:
    recipe, identity = {"model.contents.table": "a"}, {"model.contents.table": "b"}
    found = Scratch(tmp_path, recipe=recipe, identity=identity).differences()
    assert [one[1] for one in found] == ["recipe, model contents: table"]
    assert Scratch(tmp_path, recipe=recipe, identity=identity, environment={"torch": "1"}).differences() == []


def test_data_without_what_was_forgotten_are_compared_by_their_commitment(tmp_path: Path) -> None:
    recipe, identity = {"data.digest": "a", "seed": "1"}, {"data.digest": "b", "seed": 2}
    made = hashlib.sha256(b"d1").digest()
    seed = (None, "recipe, seed", "1", "2")
    given: dict[str, Any] = {"recipe": recipe, "identity": identity, "forgotten": "request"}
    assert Scratch(tmp_path, commitments={"data": made}, **given).differences() == [seed]
    other = bytes(range(32))
    what = "data without what was forgotten: commitment"
    assert Scratch(tmp_path, commitments={"data": other}, **given).differences() == [
        seed,
        (None, what, other.hex()[:16], made.hex()[:16]),
    ]
    assert Scratch(tmp_path, commitments={"policy": made}, **given).differences() == [
        seed,
        (None, what, "", made.hex()[:16]),
    ]
    given["forgotten"] = ""
    found = Scratch(tmp_path, commitments={"data": other}, **given).differences()
    assert [one[1] for one in found] == ["recipe, data: digest", "recipe, seed"]


def test_a_span_with_something_forgotten_asks_for_it(tmp_path: Path) -> None:
    world = Scratch(tmp_path, forgotten="request")
    world.again()
    assert world.requests[0].forgotten == "request"
    assert world.comparison.request == "request"


def holds(promise: Promise, *, is_so: bool) -> Guarantee:
    return Guarantee(promise, is_so, f"because of {promise}", None)


def test_doubts_are_another_environment_and_a_run_that_promises_nothing(tmp_path: Path) -> None:
    assert list(Scratch(tmp_path).again().doubts()) == []
    environment = {"torch": "1.0", "threads": "999", "platform": "a toaster", "kernels": ""}
    guarantees = [
        holds(Promise.PARITY, is_so=False),
        holds(Promise.REPLAYABLE, is_so=True),
        holds(Promise.REPLAYABLE, is_so=False),
    ]
    again = Scratch(tmp_path, environment=environment, guarantees=guarantees).again()
    here = describe_environment(CPU)
    assert list(again.doubts()) == [
        f"kernels is {here['kernels']}, and was ",
        f"torch is {here['torch']}, and was 1.0",
        "the run isn't promised to be replayable: because of replayable",
    ]
    assert again.broken() == ["the run isn't replayable: because of replayable"]
    kept = Scratch(tmp_path, guarantees=guarantees[:2]).again()
    assert (list(kept.doubts()), kept.broken()) == ([], [])


def test_a_device_differs_by_more_than_its_cores(tmp_path: Path) -> None:
    device = describe_environment(CPU)["device"]
    fewer = f"{device.rpartition(', ')[0]}, 999 cores"
    assert list(Scratch(tmp_path, environment={"device": fewer}).again().doubts()) == []
    found = list(Scratch(tmp_path, environment={"device": "an abacus, 2 cores"}).again().doubts())
    assert found == [f"device is {device.rpartition(', ')[0]}, and was an abacus"]


def test_an_environment_of_which_the_ledger_says_nothing_is_another_one(tmp_path: Path) -> None:
    world = Scratch(tmp_path)
    world.span.environment = {}
    found = [one.split(" ", 1)[0] for one in world.again().doubts()]
    told = [name for name in found if name != "cuda"]  # which may be empty here, too
    assert told == ["cpu_capability", "device", "kernels", "torch"]


@pytest.mark.parametrize(
    ("device", "bare"),
    [
        ("A, with a comma, 8 cores", "A, with a comma"),
        ("NVIDIA H200, big", "NVIDIA H200, big"),
        ("8 cores", ""),
        ("A, 8 cores", "A"),
        ("", ""),
    ],
)
def test_a_processor_is_told_without_its_cores(device: str, bare: str) -> None:
    assert replay_span._without_cores(device) == bare


def test_a_replay_on_several_ranks_is_refused(tmp_path: Path) -> None:
    again = Scratch(tmp_path, is_parallel=True).again()
    with pytest.raises(LedgerError, match=r"A replay runs on one rank.*without a launcher"):
        next(again.doubts())


def span(recipe: Mapping[str, str], threads: str = "") -> Any:
    return SimpleNamespace(recipe=recipe, environment={"threads": threads} if threads else {})


def test_each_cadence_and_the_budget_are_those_of_then() -> None:
    numbers = {name: str(number) for number, name in enumerate(("num_checkpoints", *LEARNING_CADENCES), 2)}
    times = {"checkpoint_every": "5ba", "evaluate_every": "1ep"}
    words = {"on_divergence": "skip"}
    told = {f"cadence.{name}": value for name, value in {**numbers, **times, **words}.items()}
    found = replay_span._settings(span({**told, "budget.span": "9ba", "budget.other": "1", "cadence.other": "1"}))
    assert found.items() >= {name: int(value) for name, value in numbers.items()}.items()
    assert found.items() >= {**times, **words, "budget": "9ba"}.items()
    assert "other" not in found
    assert set(found) - {"change", "ledger", "progress", "checkpoint_async", "checkpoint_to", "budget"} <= set(CADENCES)
    assert "num_threads" not in found


def test_a_cadence_that_was_none_is_none() -> None:
    found = replay_span._settings(span({"cadence.evaluate_every": "", "cadence.checkpoint_every": ""}))
    assert (found["evaluate_every"], found["checkpoint_every"]) == (None, None)
    assert "budget" not in found


@pytest.mark.parametrize(
    ("name", "text", "is_one"),
    [
        ("cadence.details_every", "999999999", True),
        ("cadence.details_every", "1000000000", False),
        ("cadence.details_every", "", False),
        ("cadence.num_checkpoints", "-1", False),
        ("cadence.num_checkpoints", "0", True),
        ("cadence.evaluate_every", "1e999ba", False),
        ("cadence.evaluate_every", "1e99ba", True),
        ("budget.span", "1e999ba", False),
        ("budget.span", "1e99ba", True),
        # No time, and no number: nothing to ask of it.
        ("cadence.on_divergence", "1e999ba", True),
        ("cadence.on_divergence", "whatever", True),
    ],
)
def test_a_cadence_is_a_number_of_nine_digits_at_most_or_a_finite_time(name: str, text: str, is_one: bool) -> None:
    own = "budget" if name == "budget.span" else name.partition(".")[2]
    if is_one:
        assert replay_span._settings(span({name: text}))[own] == (int(text) if text.isdecimal() else text)
        return
    with pytest.raises(LedgerError) as caught:
        replay_span._settings(span({name: text}))
    assert str(caught.value) == f"The ledger says that {own} was {text!r}, which it can't have been."


def test_a_recipe_is_what_a_table_tells_as_one() -> None:
    def tables(details: Any) -> Any:
        return SimpleNamespace(details=details)

    assert replay_span._recipe(tables({"recipe": {"a": "1"}})) == {"a": "1"}
    assert replay_span._recipe(tables({"recipe": ["a"]})) == {}
    assert replay_span._recipe(tables({})) == {}


def test_an_identity_is_told_as_the_tables_have_it() -> None:
    identity = {"seed": 1, "none": None, "lr": 0.5, "new": 3}
    recipe = {"seed": "1", "none": "", "lr": "0.25", "gone": "x"}
    tables: Any = SimpleNamespace(details={"recipe": recipe, "phases": [["a", 0, 5]]}, policy=((((1.0,), "admit"),),))
    told, phases = replay_span._as_told(identity, tables)
    assert told == {"seed": 1, "none": None, "lr": "0.25", "gone": "x"}
    assert phases == [["a", 0, 5]]
    tables.policy = ()
    assert replay_span._as_told(identity, tables)[1] == []
    bare: Any = SimpleNamespace(details={}, policy=((((1.0,), "admit"),),))
    assert replay_span._as_told(identity, bare) == ({}, [])


def made(facts: Mapping[str, Any] = FACTS, value: float = 1.0) -> Checkpoint:
    return Checkpoint(2, {"weight": torch.full((2,), value)}, {}, facts)


def test_a_state_that_differs_in_what_bits_do_not_rest_on_is_explained(tmp_path: Path) -> None:
    began = Checkpoint(0, {}, {}, {**FACTS, "identity": {"seed": 1, "recipe": "old.py"}, "phases": [["a", 0, 2]]})
    details = {"recipe": {"seed": "1", "lr": "0.1"}}
    world = Scratch(tmp_path, details=details, checkpoint=began)
    again, now = world.again(), made()

    def signed(**other: Any) -> bytes:
        return signed_digest_of(now.state_digest, {**FACTS, **other})

    explained = [
        signed(),
        signed(budget_was_read=True),
        signed(budget_use_is_told=False),
        signed(budget_was_read=True, budget_use_is_told=False),
        signed(identity={"seed": 1, "recipe": "old.py"}),
        signed(phases=[["a", 0, 2]]),
        signed(identity={"seed": 1, "lr": "0.1"}),
        signed(identity={"seed": 1, "lr": "0.1"}, budget_was_read=True),
    ]
    assert len(set(explained)) == 8
    assert again._left_of(now, explained) == []
    others = [signed(identity={"seed": 2}), signed(phases=[["b", 0, 2]]), made(value=2.0).signed_digest]
    assert again._left_of(now, [*others, *explained]) == sorted(others)
    assert Scratch(tmp_path, details=details).again()._left_of(now, explained) == sorted(explained[4:6])
    assert again._left_of(now, []) == []


def test_cadences_that_no_entry_tells_at_first_are_left_out(tmp_path: Path) -> None:
    name = f"cadence.{LEARNING_CADENCES[0]}"
    other = f"cadence.{LEARNING_CADENCES[1]}"
    world = Scratch(tmp_path, details={"recipe": {other: "1"}})
    later: Any = SimpleNamespace(details={"recipe": {name: "1", other: "1"}}, policy=())
    world.run.ledger.tables.append(later)
    again = world.again()
    facts = {**FACTS, "identity": {"seed": 1, name: 1, other: 1, "cadence.details_every": 3}}
    assert again._as_then(facts) == {**FACTS, "identity": {"seed": 1, other: 1, "cadence.details_every": 3}}
    now = made(facts)
    earlier = {**facts, "identity": {"seed": 1, other: 1, "cadence.details_every": 3}}
    assert again._left_of(now, [signed_digest_of(now.state_digest, earlier)]) == []


def published(folder: Path, checkpoint: Checkpoint) -> None:
    folder.mkdir(exist_ok=True)
    publish_checkpoint(write_checkpoint(folder, checkpoint), keep=9)


def test_what_a_signed_state_leaves_unexplained_is_asked_of_the_checkpoint_of_its_step(tmp_path: Path) -> None:
    again = Scratch(tmp_path).again()
    published(tmp_path / "checkpoints", made())
    published(tmp_path / "checkpoints", replace(made(value=2.0), step=3))
    mine, other = made().signed_digest, bytes(32)
    assert again._unexplained(2, {mine, other}) == [other]
    assert again._unexplained(3, {mine}) == [mine]


def test_the_newest_checkpoint_goes_on_without_what_is_forgotten(tmp_path: Path) -> None:
    asked: list[tuple[int, str]] = []
    other = bytes(range(32))

    def states(step: int, request: str) -> set[bytes]:
        asked.append((step, request))
        return {other}

    identity = {"seed": 1, "data.digest": "new"}
    recipe = {"seed": "1"}
    now_data = {"data": hashlib.sha256(b"d1").digest()}
    world = Scratch(
        tmp_path, recipe=recipe, identity=identity, forgotten="request", commitments=now_data, states=states
    )
    again, folder = world.again(), tmp_path / "checkpoints"
    published(folder, replace(made(), step=1))
    published(folder, made())
    again._go_on_without()
    after = read_checkpoint(folder / "step-00000002")
    assert after.facts["identity"] == identity
    assert torch.equal(after.model["weight"], made().model["weight"])
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000002"]
    assert asked == [(2, "request")]
    ((step, what, logged, replayed),) = [(d.step, d.what, d.logged, d.replayed) for d in world.comparison.differences]
    assert (step, what) == (None, "digest of weights, optimizers and averages after 2 steps")
    assert (logged, replayed) == (other.hex()[:16], after.signed_digest.hex()[:16])


def test_where_no_checkpoint_is_none_goes_on(tmp_path: Path) -> None:
    world = Scratch(tmp_path, forgotten="request", commitments={"data": hashlib.sha256(b"d1").digest()})
    again = world.again()
    (tmp_path / "checkpoints").mkdir()
    again._go_on_without()
    assert not world.comparison.differences


@pytest.mark.parametrize("forgotten", ["", "request"])
def test_a_span_goes_on_without_what_is_forgotten_before_it_is_taken(tmp_path: Path, forgotten: str) -> None:
    world = Scratch(tmp_path, forgotten=forgotten, commitments={"data": hashlib.sha256(b"d1").digest()})
    again = world.again()
    published(tmp_path / "checkpoints", made())
    seen: list[Any] = []

    def fit() -> Any:
        seen.append(read_checkpoint(tmp_path / "checkpoints/step-00000002").facts["identity"])
        return SimpleNamespace(outcome="stopped", clock=SimpleNamespace(step=3))

    world.trainer.fit = fit
    assert again.take(5) is True
    assert seen == [{"seed": 1} if forgotten else FACTS["identity"]]


def test_a_run_that_ends_early_says_where_and_how(tmp_path: Path) -> None:
    world = Scratch(tmp_path)
    again = world.again()
    world.trainer.fit = lambda: SimpleNamespace(outcome="completed", clock=SimpleNamespace(step=4))
    assert again.take(5) is False
    (found,) = world.comparison.differences
    assert (found.step, found.what, found.logged, found.replayed) == (
        4,
        "length of the run",
        "a step",
        "its end (completed)",
    )


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (DivergenceError("it's nan"), (3, "loss and gradients", "a step", "it's nan")),
        (CheckpointError("of another"), (None, "recipe or code", "another run", "of another")),
    ],
)
def test_a_run_that_fails_says_how(tmp_path: Path, error: Exception, told: tuple[int | None, str, str, str]) -> None:
    world = Scratch(tmp_path)
    again = world.again()

    def fit() -> Any:
        raise error

    world.trainer.fit = fit
    assert again.take(5) is False
    (found,) = world.comparison.differences
    assert (found.step, found.what, found.logged, found.replayed) == told
    assert world.comparison.is_over
    assert world.comparison.span_end == 5


def ledger_at(folder: Path, *, archive: bool) -> Path:
    folder.mkdir()
    (folder / "operator.vkey").write_text("key")
    if archive:
        (folder / "provenance").mkdir()
        (folder / "provenance/ab").write_text("manifest")
    return folder


def test_a_scratch_folder_is_furnished_as_a_run_that_goes_on_finds_its_own(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(cuts=[(3, 2)])
    furnish(tmp_path / "scratch", ledger_at(tmp_path / "ledger", archive=True), run, made())
    scratch = tmp_path / "scratch"
    assert (scratch / "ledger/operator.vkey").read_text() == "key"
    assert (scratch / "ledger/provenance/ab").read_text() == "manifest"
    assert json.loads((scratch / "cuts.json").read_text()) == [[3, 2]]
    assert read_checkpoint(scratch / "checkpoints/step-00000002").facts["identity"] == FACTS["identity"]


def test_a_scratch_folder_of_a_plain_run_has_the_key_alone(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(cuts=[])
    scratch = tmp_path / "below" / "scratch"
    furnish(scratch, ledger_at(tmp_path / "ledger", archive=False), run, None)
    assert sorted(str(path.relative_to(scratch)) for path in scratch.rglob("*")) == [
        "checkpoints",
        "ledger",
        "ledger/operator.vkey",
    ]
