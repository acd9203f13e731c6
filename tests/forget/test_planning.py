"""What a plan says: what's possible and what it costs, why something isn't, by name, and what nothing covers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmati.core.loss import Classification
from cosmati.errors import ForgetError
from cosmati.forget.asked import ToForget, read_ids
from cosmati.forget.deletion import begin
from cosmati.forget.derived import _checkpoints
from cosmati.forget.past_run import PastRun
from cosmati.forget.planning import EXACT, FROM_ENTRY_0, DeletionPlan, plan_deletion
from cosmati.forget.replay import Make
from cosmati.forget.request import Request
from cosmati.ledger.reader import ScannedEntry
from cosmati.optim import SGD
from cosmati.records.ledger import MicrobatchCell, StepEntry
from cosmati.train.artifacts import artifact
from cosmati.train.config import RunConfig
from cosmati.train.run.checkpoints import publish_checkpoint, read_checkpoint, write_checkpoint
from cosmati.train.trainer import Trainer
from tests.forget.samples import (
    ISOLATED,
    bare,
    differing,
    forgotten,
    maker,
    rows_of_step,
    tensors,
    trained,
    without,
)
from tests.train.isolated.samples import CASES, CLASSES, policy, source

pytestmark = pytest.mark.long

CASE = bare("MLP, low rank")
DATA = source(CASE)
PERSONAL = ToForget(classes=("personal",))


def planned(run: Path, asked: ToForget, make: Make | None) -> DeletionPlan:
    return plan_deletion(Request.open(PastRun(run), asked, make))


def why_not(plan: DeletionPlan, method: str) -> str:
    option = plan.option(method)
    assert option is not None
    assert not option.is_possible
    return "; ".join(option.why_not)


def test_a_plan_has_the_cheapest_first(tmp_path: Path) -> None:
    case = CASES["MLP, low rank"]
    make = maker(case, source(case), chosen=ISOLATED)
    run = trained(make, tmp_path / "run")
    plan = planned(run, PERSONAL, make)
    assert [(one.method, one.num_steps, one.strength) for one in plan.options] == [
        ("drop", 0, EXACT),
        ("replay", 6 - plan.options[1].from_step, EXACT),
        ("ablate", 0, ""),
    ]
    assert "region own runs for its class alone" in why_not(plan, "ablate")
    drop, replay, _ = plan.options
    assert (drop.minutes, plan.classes, plan.num_rows) == (None, ("personal",), 0)
    seconds = PastRun(run).seconds_per_step
    assert replay.minutes == pytest.approx(replay.num_steps * (seconds or 0) / 60)
    assert replay.minutes
    assert plan.to_mapping() == json.loads(json.dumps(plan.to_mapping())) | {
        name: getattr(plan, name) for name in ("classes", "not_covered", "notes")
    } | {k: plan.to_mapping()[k] for k in ("options", "derived")}
    rows = planned(run, ToForget(rows=frozenset({4})), make)
    assert [one.method for one in rows.options] == ["replay", "drop", "ablate"]
    assert all("rows are asked for" in why_not(rows, method) for method in ("drop", "ablate"))
    assert rows.classes == ("personal",)


def test_without_a_recipe_what_needs_none_is_planned(tmp_path: Path) -> None:
    run = trained(maker(CASE, DATA), tmp_path / "run")
    plan = planned(run, PERSONAL, None)
    assert "needs the run's recipe: --recipe" in why_not(plan, "replay")
    assert "personal isn't isolated: it has no region of its own (IsolatedAdapters)" in why_not(plan, "drop")
    with pytest.raises(ForgetError, match="Which steps had which rows is told by the data"):
        planned(run, ToForget(rows=frozenset({4})), None)
    with pytest.raises(ForgetError, match=r"no class 'persnal'. It has open, other, personal"):
        planned(run, ToForget(classes=("persnal",)), None)
    with pytest.raises(ForgetError, match="drop isn't possible: class personal isn't isolated"):
        begin(Request.open(PastRun(run), PERSONAL, None), "drop", tmp_path / "out")
    with pytest.raises(ForgetError, match=r"no method 'melt' here. Take one of drop, replay, ablate"):
        begin(Request.open(PastRun(run), PERSONAL, None), "melt", tmp_path / "out")


def test_another_recipe_is_named(tmp_path: Path) -> None:
    run = trained(maker(CASE, DATA), tmp_path / "run")
    plan = planned(run, PERSONAL, maker(CASE, DATA, methods=[]))
    assert "is of another run: methods" in why_not(plan, "replay")
    plan = planned(run, PERSONAL, maker(CASE, source(CASE, swapped=True)))
    assert "data: digest" in why_not(plan, "replay")


def test_a_promise_that_was_taken_back_is_named(tmp_path: Path) -> None:
    """Isolation, by a policy that let it through; replay, by an observer's word in the record or in the ledger."""
    case = CASES["MLP, low rank"]
    loose = maker(case, source(case), chosen=policy(trunk="0.5"))
    run = trained(loose, tmp_path / "loose")
    assert "isolated(personal, own) isn't the run's throughout" in why_not(planned(run, PERSONAL, loose), "drop")
    make = maker(CASE, DATA)
    run = trained(make, tmp_path / "run")
    record = PastRun(run).record
    said = tuple(
        dataclasses.replace(one, holds=False, because="resumed with threads") if one.name == "replayable" else one
        for one in record.guarantees
    )
    (run / "run.json").write_text(dataclasses.replace(record, guarantees=said).to_json())
    assert "replayable was taken back: resumed with threads" in why_not(planned(run, PERSONAL, make), "replay")


def test_a_record_that_claims_isolation_is_held_against_the_ledger(tmp_path: Path) -> None:
    """`run.json` isn't signed, nor what a checkpoint says was taken back: they alone aren't believed."""
    case = CASES["MLP, low rank"]
    loose = maker(case, source(case), chosen=policy(trunk="0.5"))
    run = trained(loose, tmp_path / "loose")
    record = PastRun(run).record
    said = tuple(dataclasses.replace(one, holds=True) for one in record.guarantees)
    (run / "run.json").write_text(dataclasses.replace(record, guarantees=said).to_json())
    state = run / "checkpoints" / "step-00000006" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "withdrawn": []}))
    told = why_not(planned(run, PERSONAL, None), "drop")
    assert "entry 0 of the ledger (from step 0 on) doesn't promise isolated(personal, own)" in told
    assert "gave rows of 'personal' weight 0.5 in 'trunk'" in told


def test_only_checkpoints_from_before_first_contact_are_begun_from(tmp_path: Path) -> None:
    make = maker(CASE, DATA)
    run = trained(make, tmp_path / "run")
    for step, begins in ((5, 4), (4, 4), (3, 2), (2, 2), (1, 0)):
        option = planned(run, ToForget(rows=rows_of_step(DATA, step)), make).option("replay")
        assert option is not None
        assert option.from_step == begins
    damaged = run / "checkpoints" / "step-00000004" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    option = planned(run, ToForget(rows=rows_of_step(DATA, 4)), make).option("replay")
    assert option is not None
    assert option.from_step == 2
    assert any("passed over: Checkpoint" in note and "damaged" in note for note in option.notes)
    other = run / "checkpoints" / "step-00000002"
    checkpoint = read_checkpoint(other)
    model = {name: value + 1 for name, value in checkpoint.model.items()}
    publish_checkpoint(write_checkpoint(other.parent, dataclasses.replace(checkpoint, model=model)), keep=9)
    option = planned(run, ToForget(rows=rows_of_step(DATA, 4)), make).option("replay")
    assert option is not None
    assert option.from_step == 0
    assert "passed over: step-00000002 isn't one that the ledger has signed" in option.notes


def test_what_a_run_was_prepared_with_limits_the_strength(tmp_path: Path) -> None:
    prepared = [artifact("tokenizer", [1, 2, 3]), artifact("evaluation data", [4])]
    make = maker(CASE, DATA, config={"artifacts": prepared})
    plan = planned(trained(make, tmp_path / "run"), PERSONAL, make)
    option = plan.option("replay")
    assert option is not None
    assert option.strength == FROM_ENTRY_0
    assert any(note.startswith("the tokenizer isn't made again, and nobody says") for note in option.notes)
    assert plan.not_covered[-1] == "the evaluation data, which may hold it: nothing learnt from it"


def test_what_is_derived_is_listed(tmp_path: Path) -> None:
    make = maker(CASE, DATA)
    run = trained(make, tmp_path / "run")
    child = maker(CASE, DATA, config={"load_weights": run})
    trained(child, tmp_path / "child")
    line = {"out": "/elsewhere/model", "step": 6, "weights": "ab"}
    (run / "exports.jsonl").write_text(json.dumps(line) + "\n")
    (run / "checkpoints" / "damaged-1-step-00000004").mkdir()
    plan = planned(run, ToForget(rows=rows_of_step(DATA, 3)), make)
    assert [(one.kind, one.step, one.status) for one in plan.derived] == [
        ("checkpoint", 0, "never had it"),
        ("checkpoint", 2, "never had it"),
        ("checkpoint", 4, "not covered"),
        ("checkpoint", 6, "not covered"),
        ("damaged checkpoint", 4, "not covered"),
        ("export", 6, "not covered"),
        ("run that began from it", 6, "not covered"),
    ]


def test_what_a_killed_process_has_left_counts_by_its_own_step(tmp_path: Path) -> None:
    """A draft's name ends with its writer's number, which is smaller than any contact."""
    places = tmp_path / "checkpoints"
    for name in (".draft-00000012-1", ".draft-00000002-7", ".erasing-step-00000012", "damaged-1-step-00000012"):
        (places / name).mkdir(parents=True)
    for name in ("step-00000012.bak", "step-00000002.bak", "mine"):  # a copy that somebody has made, and what not
        (places / name).mkdir()
    found = list(_checkpoints(tmp_path, 5))
    assert {one.path.removeprefix("checkpoints/"): (one.step, one.status, one.is_own) for one in found} == {
        ".draft-00000012-1": (12, "not covered", True),
        ".draft-00000002-7": (2, "never had it", True),
        ".erasing-step-00000012": (12, "not covered", True),
        "damaged-1-step-00000012": (12, "not covered", True),
        "step-00000012.bak": (12, "not covered", False),
        "step-00000002.bak": (2, "never had it", False),
        "mine": (0, "not covered", False),
    }


def test_a_run_without_ledger_or_order_is_refused(tmp_path: Path) -> None:
    """A list of batches is read by position in its first pass, and has no rows that could be told apart."""

    def make(_wrap: Any, folder: Path, *, ledger: bool = True) -> Trainer:
        batches = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(3)]
        torch.manual_seed(0)
        config = RunConfig(budget="3ba", num_microbatches=2, run_folder=folder, ledger=ledger, num_threads=1)
        return Trainer(torch.nn.Linear(6, 3), Classification(3), batches, optimizers=[SGD(lr=0.1)], config=config)

    make(None, tmp_path / "none", ledger=False).fit()
    with pytest.raises(ForgetError, match="keeps no ledger"):
        PastRun(tmp_path / "none")
    torch.manual_seed(0)
    make(None, tmp_path / "list").fit()
    with pytest.raises(ForgetError, match="The run's data are a list, and only a Source's rows"):
        planned(tmp_path / "list", ToForget(rows=frozenset({1})), make)
    with pytest.raises(ForgetError, match="its ledger tells no classes apart"):
        planned(tmp_path / "list", PERSONAL, None)


def test_rows_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ids"
    path.write_text('17\n\n {"row_id": 4}\n')
    assert read_ids(path) == ("rows", {17, 4})
    for odd in (
        "x",
        "1.5",
        "-1",
        "[1]",
        "true",
        '{"row": 1}',
        '{"pack": 1, "document": 1}',
        '{"pack": "1"}',
        str(1 << 63),
    ):
        path.write_text(f"1\n{odd}\n")
        with pytest.raises(ForgetError, match=r"line 2: .* is no row"):
            read_ids(path)
    path.write_text('{"document": 17}\n{"document": 4, "by": "ada"}\n')
    assert read_ids(path) == ("documents", {17, 4})
    path.write_text('{"pack": 17}\n')
    assert read_ids(path) == ("packs", {17})
    path.write_text('{"pack": 17}\n17\n')
    with pytest.raises(ForgetError, match="has ids of packs and of rows, and a number means another one"):
        read_ids(path)
    path.write_text("\n")
    with pytest.raises(ForgetError, match="names no row"):
        read_ids(path)
    with pytest.raises(ForgetError, match="can't be read"):
        read_ids(tmp_path / "none")


def test_one_thing_is_asked_for() -> None:
    for options in ({}, {"classes": ("a",), "rows": frozenset({1})}):
        with pytest.raises(ForgetError, match="one of the two"):
            ToForget(**options)  # type: ignore[arg-type]
    with pytest.raises(ForgetError, match="no rows in the index"):
        ToForget(subject="stranger")
    assert ToForget(classes=("a",)).names_in(["a/b", "a", "ab", "a&c", "c&a/b", "c"]) == ("a/b", "a", "a&c", "c&a/b")


def test_a_loss_that_cannot_leave_rows_out_is_found_before_anything_is_begun(tmp_path: Path) -> None:
    def mean(model: torch.nn.Module, data: Any) -> torch.Tensor:
        return CASE.loss(model, data).mean()  # type: ignore[union-attr]

    make = maker(CASE, DATA, loss=mean)
    run = trained(make, tmp_path / "run")
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    plan = planned(run, ToForget(rows=frozenset({4})), make)
    assert "the loss can't leave rows out: The batch has tombstone rows" in why_not(plan, "replay")
    assert before == {p: p.stat().st_mtime_ns for p in run.rglob("*")}


def test_without_a_policy_the_data_tell_the_classes(tmp_path: Path) -> None:
    """A plain run that keeps a ledger, at V = 1."""

    def make(wrap: Any, folder: Path) -> Trainer:
        torch.manual_seed(0)
        config = RunConfig(budget="6ba", run_folder=folder, ledger=True, num_threads=1, checkpoint_every="1ba")
        return Trainer(CASE.build(), CASE.loss, wrap(DATA), optimizers=[SGD(lr=0.1)], config=config)

    run = trained(make, tmp_path / "run")
    personal = ToForget(classes=("personal",))
    option = planned(run, personal, make).option("replay")
    assert option is not None
    assert option.is_possible
    done = forgotten(run, personal, make, tmp_path / "out")
    truth = trained(make, tmp_path / "truth", without(classes=["personal"]))
    assert not differing(tensors(done.out), tensors(truth))
    assert differing(tensors(run), tensors(truth))


@pytest.mark.parametrize(
    ("details", "name", "num_rows", "expected"),
    [
        ({}, "personal", 2, True),
        ({}, "personal", 0, False),
        ({}, "open", 2, False),
        ({"kept_rows": {"0": []}}, "personal", 0, True),
        ({"left_out": "not finite"}, "personal", 0, True),
        ({"left_out": "not finite"}, "open", 0, False),
        ({"kept_rows": {"0": [1]}, "cell_microbatches": [0]}, "open", 1, True),
        ({"cell_microbatches": [0]}, "open", 1, False),
    ],
)
def test_contact_is_what_may_have_had_a_say(
    details: dict[str, Any], name: str, num_rows: int, *, expected: bool
) -> None:
    """Scored and not kept, left out with its step, in a pack that wasn't kept: the entry can't tell, so it counts."""
    cell = MicrobatchCell(CLASSES.index(name), 0, 0, 0, num_rows, float(num_rows), bytes(32))
    item = ScannedEntry(1, b"", StepEntry(7, 0, bytes(32), bytes(32), None, (cell,)), json.dumps(details).encode())
    tables = SimpleNamespace(class_of=lambda cell, _item: CLASSES[cell.class_id])
    run = object.__new__(PastRun)
    run.ledger = SimpleNamespace(steps=lambda: iter([(item, item.entry, tables)]))  # type: ignore[assignment]
    assert run.first_contact(["personal"]) == (7 if expected else None)
