"""Rows that a loop of one's own gives while their class is deferred: left out, and counted until they come again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cosmati import Classification, InMemory, load_policy
from cosmati.core.batch import Batch, Lineage
from cosmati.ledger.query import VerifiedLedger
from cosmati.routing.proposals import proposals
from cosmati.train.policy_watch import FILE
from cosmati.train.trainer import Trainer
from tests.train.mixed.world import CLASS_OF, POLICY, chosen, run, weights
from tests.train.packs import samples

pytestmark = pytest.mark.long

DEFERRING = (
    POLICY.replace("rules:", "phases: [{name: warm, until: 4ba}, {name: main}]\nrules:")
    + "  - {class: closed, phase: warm, decision: defer}\n  - {class: closed, phase: main, weight: 1}\n"
)
CLOSED = (CLASS_OF == 0).nonzero()[:, 0]
OTHERS = (CLASS_OF != 0).nonzero()[:, 0]


def made(folder: Path | None = None, **options: Any) -> Trainer:
    with pytest.warns(UserWarning, match=r"defers closed in warm, and a loop of your own can't be rescheduled"):
        return run(None, policy=DEFERRING, folder=folder, **options)


def given(step: int, closed: list[int]) -> Batch:
    """Return a step's rows: eight of the others, and some of the class that is deferred in steps 0 to 3."""
    others = OTHERS[torch.arange(8 * step, 8 * step + 8) % len(OTHERS)]
    return chosen(torch.cat([others, CLOSED[closed]]))


def taken(trainer: Trainer, steps: list[list[int]]) -> list[int]:
    """Take the steps that are left, and return how many rows wait after each."""
    waiting = []
    with trainer:
        for step in range(trainer.clock.step, len(steps)):
            outcome = trainer.step(given(step, steps[step]))
            waiting.append(trainer.assembly.deferred_rows.num_waiting.get("closed", 0))
            assert [r.offered for r in outcome.routes if r.class_id == 0] == [step >= 4] * bool(steps[step])
    return waiting


def test_rows_of_a_deferred_class_are_told_until_they_come_again() -> None:
    trainer = made()
    told = "never offered, being deferred: rows of closed in warm that your loop doesn't give again later"
    assert told in trainer.plan.lines
    with pytest.warns(UserWarning, match=r"Never offered, being deferred: 2 rows of closed\. The loop gave them"):
        assert taken(trainer, [[0, 1], [1, 2], [3], [], [], [0, 1, 9]]) == [2, 3, 4, 4, 4, 2]


def test_a_loop_that_gives_them_again_ends_in_silence() -> None:
    trainer = made()
    assert taken(trainer, [[0, 1], [], [], [], [1], [0]]) == [2, 2, 2, 2, 1, 0]


REJECTING = DEFERRING.replace("{name: main}", "{name: main, until: 6ba}, {name: late}").replace(
    "phase: main, weight: 1", "phase: main, decision: reject}\n  - {class: closed, phase: late, weight: 1"
)


def test_rows_that_come_again_while_their_class_is_rejected_wait_on() -> None:
    with pytest.warns(UserWarning, match="defers closed in warm"):
        trainer = run(None, policy=REJECTING)

    def waiting() -> Iterator[int]:
        with trainer:
            for step, closed in enumerate([[0, 1], [], [], [], [0, 2], [1], [1]]):
                trainer.step(given(step, closed))
                yield trainer.assembly.deferred_rows.num_waiting["closed"]

    with pytest.warns(UserWarning, match="Never offered, being deferred: 1 row"):
        assert [*waiting()] == [2, 2, 2, 2, 2, 2, 1], "row 2, which came while they're rejected, waits for nothing"


def test_the_count_outlives_a_stop_and_the_ledger_has_the_microbatches(tmp_path: Path) -> None:
    steps = [[0, 1], [2], [], [], [2], []]
    for last, told, waiting in ((3, "3 rows of closed", [2, 3, 3]), (6, "2 rows of closed", [3, 2, 2])):
        trainer = made(tmp_path)
        with pytest.warns(UserWarning, match=rf"Never offered, being deferred: {told}\."):
            assert taken(trainer, steps[:last]) == waiting
    found = {one.start_step: one for one in proposals(VerifiedLedger(tmp_path / "ledger"), "closed")}
    assert [found[0].decision, found[0].num_microbatches, found[0].num_rows] == ["defer", 2, 0]
    assert [found[4].decision, found[4].num_microbatches, found[4].num_rows] == ["admit", 1, 1]


def test_rows_of_a_deferred_class_teach_nothing() -> None:
    learnt = []
    for closed in ([0, 1], [5, 9]):
        trainer = made()
        with pytest.warns(UserWarning, match="2 rows of closed"):
            taken(trainer, [closed])
        learnt.append(weights(trainer))
    assert torch.equal(*learnt)


def changing(trainer: Trainer, last: int, text: str) -> list[int]:
    """Take steps up to one, leave another policy before step 4, and return how many rows wait after each."""
    waiting, watch, folder = list[int](), trainer.policy_watch, trainer.assembly.config.run_folder
    assert watch is not None
    assert folder is not None
    with trainer:
        for step in range(trainer.clock.step, last):
            if step == 4:
                (folder / FILE).write_text(json.dumps({"policy": load_policy(text).to_mapping()}))
                watch.look()
            trainer.step(given(step, [step, 0]))
            waiting.append(trainer.assembly.deferred_rows.num_waiting.get("closed", 0))
    return waiting


def test_a_policy_that_defers_from_the_middle_on_is_told_too(tmp_path: Path) -> None:
    """Over a stop as well, and what waits is crossed off under a policy that defers nothing any more."""
    phases = POLICY.replace("rules:", "phases: [{name: warm, until: 8ba}, {name: main}]\nrules:")
    admitting = phases + "  - {class: closed, weight: 1}\n"
    deferring = admitting + "  - {class: closed, phase: warm, decision: defer}\n"
    waiting = list[int]()
    for last, match in ((7, "Step 5 was given rows of closed"), (9, "Step 7 was given rows of closed")):
        trainer = run(None, policy=admitting, folder=tmp_path, budget="10ba")
        with pytest.warns(UserWarning, match="Never offered"), pytest.warns(UserWarning, match=match):
            waiting += changing(trainer, last, deferring)
    assert waiting == [0, 0, 0, 0, 0, 2, 3, 4, 3]
    other = admitting.replace("weight: 0.5", "weight: 0.25")
    with run(None, policy=other, folder=tmp_path, budget="10ba", change=("policy",)) as trainer:
        trainer.step(given(9, [5, 6, 7]))
        assert trainer.assembly.deferred_rows.num_waiting == {}


PHASES = (
    "phases: [{name: warm, until: 2ba}, {name: main}]\nrules:\n  - {class: personal, phase: warm, decision: defer}\n"
)
LATE = load_policy("version: 1\ntaxonomy: t\n" + PHASES + "  - {class: '**', weight: 1}\n")


def test_a_step_beside_a_source_tells_at_the_first_row() -> None:
    """The source reschedules its own rows, so nothing was said at the start."""
    ids = torch.arange(12)
    rows = torch.randn(12, 4), ids % 2
    source = InMemory(rows, 4, class_ids=ids % 3, class_names=samples.CLASSES)
    trainer = samples.trainer(nn.Linear(4, 2), source, LATE, loss=Classification(2), budget="4ba", num_microbatches=4)
    batch = Batch(rows, Lineage(ids + 100, ids % 3))
    with pytest.warns(UserWarning, match="Step 0 was given rows of personal, which the policy defers there"):
        trainer.step(batch)
    trainer.step(batch)
    assert trainer.assembly.deferred_rows.num_waiting == {"personal": 4}
    trainer.step(batch)
    assert trainer.assembly.deferred_rows.num_waiting == {}


def test_packs_count_documents_over_a_stop(tmp_path: Path) -> None:
    (batch,) = samples.first_step(samples.source(samples.documents(24)), 1)
    told = zip(*(ids.flatten().tolist() for ids in batch.lineage.by_token if ids is not None), strict=True)
    expected = len({row for class_id, row in told if class_id == 2})

    def waiting(trainer: Trainer) -> dict[str, int]:
        with trainer:
            if trainer.clock.step == 0:
                trainer.step(batch)
            return trainer.assembly.deferred_rows.num_waiting

    for _ in range(2):
        with pytest.warns(UserWarning, match="defers personal in warm"):
            trainer = samples.trainer(samples.model(), None, LATE, budget="4ba", config={"run_folder": tmp_path})
        with pytest.warns(UserWarning, match=f"Never offered, being deferred: {expected} rows of personal"):
            assert waiting(trainer) == {"personal": expected}
