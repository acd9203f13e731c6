"""What a replay finds: substituted rows, routes, settings, checkpoints and measurements, each named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmati.core.loss import Classification
from cosmati.core.state import parameter_root
from cosmati.data.ingest import read_jsonl
from cosmati.data.ingest.rows import class_by_field
from cosmati.data.rows import RowBatch
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import CheckpointError, CosmatiError, LedgerError, RefutedError
from cosmati.ledger.row_keys import RowKeys
from cosmati.ledger.verify import verify_ledger
from cosmati.ledger.writer import details_digest
from cosmati.methods import EMA
from cosmati.optim import AdamW
from cosmati.records.ledger import CheckpointEntry, EndEntry, ResumeEntry, StepEntry
from cosmati.train import replay_span, settings
from cosmati.train.config import LEARNING_CADENCES, RunConfig
from cosmati.train.facts import describe_environment
from cosmati.train.identity import CADENCES
from cosmati.train.replay import ReplayRequest, nearest_checkpoint
from cosmati.train.run.checkpoints import publish_checkpoint, read_checkpoint, write_checkpoint
from cosmati.train.trainer import Trainer
from tests.ledger.test_verify import Item
from tests.train.replay_world import (
    ROWS,
    TAXONOMY,
    again,
    build,
    entries,
    mlp,
    opened,
    replayed,
    routed_policy,
    sign_again,
)

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "run"
    build("routed", folder).fit()
    return folder


@pytest.fixture
def run(once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(once, tmp_path / "run"))


def other_rows(row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows with another one in the place of one."""
    values = ROWS[0].clone()
    values[row] += 1
    return values, ROWS[1]


def changed(items: list[Item], step: int, details: Mapping[str, Any] | None = None, **cell: Any) -> list[Item]:
    """Return a ledger in which a step says something else, in its details or of its second microbatch."""
    made = list(items)
    index, (entry, told) = next(
        one for one in enumerate(items) if isinstance(one[1][0], StepEntry) and one[1][0].step == step
    )
    assert isinstance(entry, StepEntry)
    told = dict(told or {}) | dict(details or {})
    cells = [*entry.microbatches]
    cells[1] = replace(cells[1], **cell)
    made[index] = replace(entry, details_digest=details_digest(told), microbatches=tuple(cells)), told
    return made


def norms(items: list[Item], step: int, microbatch: str, region: int, value: float) -> dict[str, Any]:
    told = next(told for entry, told in items if isinstance(entry, StepEntry) and entry.step == step)
    assert told is not None
    found = {m: list(row) for m, row in told["gradient_norm"].items()}  # type: ignore[attr-defined]
    found[microbatch][region] = value
    return {"gradient_norm": found}


def told_as(honest: list[Item], true: list[Item]) -> list[Item]:
    """Return what an operator writes who has trained one run, and says that it's the other one."""
    both = zip(honest, true, strict=True)
    after = StepEntry | CheckpointEntry | EndEntry
    made = [one if isinstance(one[0], after) else said for said, one in both]
    first = next(index for index, (entry, _) in enumerate(honest) if isinstance(entry, CheckpointEntry))
    made[first] = honest[first]  # the checkpoint before the first step, whose digest covers the recipe, too
    digest = {entry.policy_digest for entry, _ in honest if isinstance(entry, StepEntry)}
    (policy,) = digest
    return [(replace(e, policy_digest=policy) if isinstance(e, StepEntry) else e, d) for e, d in made]


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ({"details": "norm"}, "step 6, gradient norm of region head, microbatch 1: "),
        ({"details": {"loss": 0.25}}, "step 6, loss: "),
        ({"details": {"update_norm": [1.0, 2.0]}}, "step 6, update norm of region body: "),
        ({"num_rows": 3}, "step 6, num rows, microbatch 1: 4, and the ledger says 3"),
        ({"weight": 4.5}, "step 6, weight, microbatch 1: 4.0, and the ledger says 4.5"),
        ({"row_commitment": bytes(32)}, "step 6, row commitment, microbatch 1: "),
    ],
)
def test_a_step_that_is_signed_otherwise_is_found_and_named(run: Path, what: dict[str, Any], named: str) -> None:
    items = entries(run)
    details = norms(items, 6, "1", 1, 0.5) if what.get("details") == "norm" else what.get("details")
    sign_again(run, changed(items, 6, **what | {"details": details}))
    assert verify_ledger(run / "ledger").num_steps == 12  # it's consistent in itself
    found = replayed(run, 5, 9, again("routed"))
    assert (found.outcome, found.num_steps) == ("different", 3)  # 4 to 6, and no further
    assert str(found.differences[0]).startswith(named)
    assert {one.step for one in found.differences} == {6}
    kept = replayed(run, 5, 9, again("routed"), keep_going=True)
    assert (kept.num_steps, kept.differences) == (5, found.differences)


def test_a_cell_of_another_class_and_route_is_found_and_named(run: Path) -> None:
    items = entries(run)
    step = next(e for e, _ in items if isinstance(e, StepEntry) and e.step == 2)
    mine, other = (
        step.microbatches[1],
        next(c for c in step.microbatches if c.class_id != step.microbatches[1].class_id),
    )
    sign_again(run, changed(items, 2, class_id=other.class_id, route_id=other.route_id))
    assert mine.route_id != other.route_id
    told = list(map(str, replayed(run, 0, 3, again("routed")).differences))
    names = ("cold", "hot")
    assert told[0].startswith("step 2, class, microbatch 1: '")
    assert {*names} <= {*told[0].replace("'", " ").split()}
    weights = {"cold": 0.5, "hot": 1.0}
    assert told[1] == (
        f"step 2, weight of its route in region body, microbatch 1: {weights[names[mine.class_id]]}, and the ledger "
        f"says {weights[names[other.class_id]]}"
    )


@pytest.mark.parametrize(
    ("lie", "step", "named"),
    [
        ({"optimizers": [AdamW(lr=0.02)]}, 0, "update norm of region body"),
        ({"policy": routed_policy(0.25)}, 0, "update norm of region body"),
        ({"rows": other_rows(5)}, None, "loss"),
        ({"methods": [EMA(half_life="5ba")]}, None, "digest of weights, optimizers and averages after 4 steps"),
        ({"seed": 3}, 0, "row commitment, microbatch 0"),
    ],
)
def test_who_has_trained_otherwise_than_he_says_is_found(
    tmp_path: Path, lie: dict[str, Any], step: int | None, named: str
) -> None:
    """The ledger says of itself what an honest run would say; its steps are those of the other one."""
    told = {"methods": [EMA(half_life="2ba")]} if "methods" in lie else {}
    build("routed", tmp_path / "honest", **told).fit()
    (tmp_path / "run/private").mkdir(parents=True)
    for name in ("rows.salt", "rows.keys", "operator.key"):
        shutil.copy2(tmp_path / "honest/private" / name, tmp_path / "run/private" / name)
    build("routed", tmp_path / "run", **told | lie).fit()
    true = entries(tmp_path / "run")
    sign_again(tmp_path / "run", told_as(entries(tmp_path / "honest"), true))
    assert verify_ledger(tmp_path / "run/ledger").num_steps == 12
    found = replayed(tmp_path / "run", 0, 12, again("routed", **told), with_checkpoints=False)
    assert found.outcome == "different"
    assert named in " ".join(map(str, found.differences))
    assert step is None or found.differences[0].step == step


def test_a_recipe_that_the_ledger_does_not_commit_to_is_named_before_a_step_is_taken(run: Path) -> None:
    found = replayed(run, 5, 9, again("routed", optimizers=[AdamW(lr=0.02)]))
    assert (found.outcome, found.num_steps) == ("different", 0)
    assert [str(one) for one in found.differences] == [
        "recipe, optimizers 0: learning rate: 0.02, and the ledger says 0.01"
    ]


def test_a_recipe_that_ends_before_the_ledger_does_is_a_difference(run: Path) -> None:
    def shorter(asked: ReplayRequest) -> Trainer:
        policy = {} if asked.policy is None else {"policy": asked.policy}
        settings = {**asked.settings, **policy, "budget": "6ba"}
        return build("routed", asked.run_folder, observers=asked.observers, **settings)

    found = replayed(run, 0, 9, shorter, with_checkpoints=False, keep_going=True)
    assert (found.outcome, found.num_steps) == ("different", 6)
    assert str(found.differences[-1]) == (
        "step 6, length of the run: its end (completed), and the ledger says a step"
    ), found.differences


def test_a_row_that_was_exchanged_is_found_and_its_microbatch_named(run: Path) -> None:
    """The auditor's data aren't the operator's: by their digest, and by row where somebody wants to know."""
    make = again("routed", rows=other_rows(5))
    (one,) = replayed(run, 0, 4, make).differences
    assert one.what == "recipe, data: digest"
    kept = replayed(run, 0, 4, make, with_checkpoints=False, keep_going=True)
    build("routed", run.parent / "other", rows=other_rows(5)).fit()
    other = [told["loss"] for entry, told in entries(run.parent / "other") if isinstance(entry, StepEntry) and told]
    own = [told["loss"] for entry, told in entries(run) if isinstance(entry, StepEntry) and told]
    first = next(step for step, both in enumerate(zip(own, other, strict=True)) if both[0] != both[1])
    assert next(one.step for one in kept.differences if one.step is not None) == first


def shards_of(folder: Path, other: int | None = None) -> Path:
    """Write 32 rows of two classes, one of them with other content."""
    folder.mkdir()
    rows = [{"number": n + 100 * (n == other), "class": ("cold", "hot")[n % 2]} for n in range(32)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = read_jsonl(folder / "rows.jsonl", {"number": "int", "class": "str"}, class_of=class_by_field("class"))
    write_dataset(read, folder / "out", read.columns, class_of=read.class_of, source="s")
    return folder / "out"


def vectors(rows: RowBatch) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = rows.tensor("number")
    return torch.stack([(numbers >> bit) % 2 for bit in range(4)], 1).float(), numbers % 3


def streamed(shards: Path, folder: Path, **options: Any) -> Trainer:
    torch.manual_seed(1)
    settings = {"budget": "4ba", "num_threads": 1, "num_microbatches": 4, "run_folder": folder}
    own = {"policy": routed_policy(), "observers": ()} | {
        n: options.pop(n) for n in ("policy", "observers") if n in options
    }
    source = StreamingSource(StreamingDataset(shards, transform=vectors), rows_per_step=16)
    rest = {"optimizers": [AdamW(lr=0.01)], "taxonomy": TAXONOMY, "config": RunConfig(**settings | options)}
    return Trainer(mlp(), Classification(3), source, **own, **rest)


def test_a_row_of_a_shard_that_was_exchanged_is_found_in_its_microbatch(tmp_path: Path) -> None:
    """The operator trains on other content of row 9, and logs the honest data's digest."""
    honest, true, run = shards_of(tmp_path / "honest"), shards_of(tmp_path / "true", other=9), tmp_path / "run"
    (tmp_path / "said/private").mkdir(parents=True)
    streamed(true, run).fit()
    for name in ("rows.salt", "rows.keys", "operator.key"):
        shutil.copy2(run / "private" / name, tmp_path / "said/private" / name)
    streamed(honest, tmp_path / "said").fit()
    sign_again(run, told_as(entries(tmp_path / "said"), entries(run)))

    def make(asked: ReplayRequest) -> Trainer:
        own = {"policy": asked.policy, "observers": asked.observers}
        return streamed(honest, asked.run_folder, **own, **asked.settings)

    found = replayed(run, 0, 4, make, with_checkpoints=False)
    assert found.outcome == "different"
    (rows,) = [one for one in found.differences if one.what.startswith("row commitment")]
    assert rows.step == found.differences[0].step
    feed = streamed(honest, tmp_path / "look").feed
    assert feed is not None
    given = [(step, m, batch.data) for step in range(4) for m, batch in enumerate(feed.again(step))]
    bits = torch.tensor([1.0, 0, 0, 1])  # of 9, whose label tells it from 25
    at = [(step, m) for step, m, (x, y) in given if bool(((x == bits).all(1) & (y == 9 % 3)).any())]
    place = min(at)
    assert (rows.step, rows.what) == (place[0], f"row commitment, microbatch {place[1]}")


def forge(path: Path, checkpoints: Path) -> None:
    """Change a weight, and make the digests of the files anew."""
    checkpoint = read_checkpoint(path)
    model = dict(checkpoint.model)
    name = next(iter(model))
    model[name] = model[name] + 1
    publish_checkpoint(write_checkpoint(checkpoints, replace(checkpoint, model=model)), keep=99)


def test_a_checkpoint_that_was_exchanged_is_found(run: Path) -> None:
    checkpoints = run / "checkpoints"
    path = checkpoints / "step-00000004"
    forge(path, checkpoints)
    found = replayed(run, 5, 9, again("routed"))
    assert (found.outcome, found.num_steps) == ("different", 0)
    assert found.differences[0].what == "digest of the checkpoint step-00000004"
    # Who keeps going takes the one before it, and sees that the steps are right.
    kept = replayed(run, 5, 9, again("routed"), keep_going=True)
    assert (kept.start, kept.num_steps, kept.num_differences) == (0, 9, 1)
    with pytest.raises(RefutedError, match="exchanged"):
        nearest_checkpoint(opened(run), 5, path)


def test_a_forged_checkpoint_that_the_operator_has_signed_is_found_by_replaying_over_it(run: Path) -> None:
    """Steps after it follow from it, as they would; those before don't lead to it."""
    path = run / "checkpoints/step-00000004"
    forge(path, run / "checkpoints")
    forged, items = read_checkpoint(path), entries(run)
    lie = CheckpointEntry(4, forged.signed_digest, parameter_root(forged.model))
    sign_again(run, [(lie if isinstance(e, CheckpointEntry) and e.step == 4 else e, d) for e, d in items])
    found = replayed(run, 2, 6, again("routed"))
    assert str(found.differences[0]).startswith("root of parameters and buffers after 4 steps: ")


def test_other_weights_at_the_end_than_training_came_to(run: Path) -> None:
    items = entries(run)
    sign_again(run, [(replace(e, parameter_root=bytes(32)) if isinstance(e, EndEntry) else e, d) for e, d in items])
    at_12, found = replayed(run, 9, 12, again("routed")).differences
    assert str(at_12).startswith("root of parameters and buffers after 12 steps: ")
    assert str(found).startswith("step 11, root of the weights at the end: ")
    assert replayed(run, 9, 11, again("routed")).outcome == "equal"


@pytest.mark.parametrize("step", [0, 3, 8, 12])
@pytest.mark.parametrize("is_end", [False, True])
def test_other_weights_that_are_signed_beside_those_of_a_step(run: Path, step: int, is_end: bool) -> None:
    """The ledger may say two things of one step; whoever is handed the others finds their root signed."""
    items, other = entries(run), bytes(32)
    steps = [i for i, (entry, _) in enumerate(items) if isinstance(entry, StepEntry)]
    first = steps[step] if step < len(steps) else len(items) - 1
    if is_end:  # and goes on from there
        after = [(in_attempt(entry), told) for entry, told in items[first:]]
        items[first:] = [(EndEntry(step, "completed", other), None), (ResumeEntry(step, first + 1, 1), None), *after]
    else:
        items.insert(first, (CheckpointEntry(step, other, other), None))
    sign_again(run, items)
    assert verify_ledger(run / "ledger").size == len(items)
    found = replayed(run, 0, 12, again("routed"))
    assert [str(one).partition(":")[0] for one in found.differences] == [
        f"root of parameters and buffers after {step} steps"
    ]


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("step", [4, 12])
def test_another_state_that_is_signed_beside_that_of_a_step(run: Path, step: int, is_first: bool) -> None:
    """With the same weights, and other moments of the optimizer: a run that goes on from it comes out otherwise."""
    items = entries(run)
    at = next(i for i, (one, _) in enumerate(items) if isinstance(one, CheckpointEntry) and one.step == step)
    own = items[at][0]
    assert isinstance(own, CheckpointEntry)
    items.insert(at + (not is_first), (replace(own, state_digest=bytes(32)), None))
    sign_again(run, items)
    assert verify_ledger(run / "ledger").size == len(items)
    found = replayed(run, 0, 12, again("routed"))
    what, made = f"digest of weights, optimizers and averages after {step} steps", own.state_digest.hex()[:16]
    assert [str(one) for one in found.differences] == [f"{what}: {made}, and the ledger says {'0' * 16}"]


def in_attempt(entry: Any) -> Any:
    return replace(entry, attempt=1) if isinstance(entry, StepEntry) else entry


def test_a_policy_that_is_left_out_of_the_tables_is_found(run: Path) -> None:
    (entry, details), *rest = entries(run)
    details = dict(details or {}) | {"policy": []}
    sign_again(run, [(replace(entry, details_digest=details_digest(details)), details), *rest])  # type: ignore[call-arg]
    found = replayed(run, 0, 2, again("routed")).differences
    assert found[0].what.startswith("table policy.")


def test_a_damaged_checkpoint_is_passed_over(run: Path) -> None:
    (run / "checkpoints/step-00000004/state.json").write_text("{}")
    found = replayed(run, 5, 6, again("routed"))
    assert (found.outcome, found.start) == ("equal", 0)
    with pytest.raises(CheckpointError, match="damaged"):
        nearest_checkpoint(opened(run), 5, run / "checkpoints/step-00000004")


def test_without_the_salt_nothing_is_said_of_rows(run: Path) -> None:
    found = replayed(run, 0, 2, again("routed"), with_salt=False)
    assert found.outcome == "equal, rows not compared"
    sign_again(run, changed(entries(run), 1, row_commitment=bytes(32)))
    assert replayed(run, 0, 2, again("routed"), with_salt=False).outcome == "equal, rows not compared"
    assert replayed(run, 0, 2, again("routed")).outcome == "different"
    RowKeys(bytes(32)).save(run / "private/rows.keys")
    with pytest.raises(LedgerError, match="of the tree that entry 0 commits to"):
        replayed(run, 0, 2, again("routed"))


def test_other_surroundings_are_named_before_anything_runs(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(device: torch.device) -> dict[str, str]:
        return describe_environment(device) | {"cpu_capability": "NO SUCH"}

    monkeypatch.setattr(replay_span, "describe_environment", elsewhere)
    with pytest.raises(LedgerError, match=r"aren't comparable here: cpu_capability is NO SUCH, and was .*--anyway"):
        replayed(run, 0, 2, again("routed"))
    found = replayed(run, 0, 2, again("routed"), anyway=True)
    assert (found.outcome, len(found.doubts)) == ("equal", 1)
    sign_again(run, changed(entries(run), 1, {"loss": 0.5}))
    assert replayed(run, 0, 2, again("routed"), anyway=True).outcome == "not comparable"


def test_a_run_that_is_not_promised_to_be_replayable_is_refused_by_name(tmp_path: Path) -> None:
    build("dense", tmp_path / "run", deterministic=False).fit()
    with pytest.raises(LedgerError, match="isn't promised to be replayable: "):
        replayed(tmp_path / "run", 0, 2, again("dense", deterministic=False))
    assert replayed(tmp_path / "run", 0, 2, again("dense", deterministic=False), anyway=True).num_steps == 2


def test_steps_that_are_not_there_are_refused(run: Path) -> None:
    for first, end in ((3, 3), (-1, 2), (0, 13)):
        with pytest.raises(LedgerError):
            opened(run).segment(first, end)
    with pytest.raises(LedgerError, match="holds the state after 8 steps"):
        nearest_checkpoint(opened(run), 5, run / "checkpoints/step-00000008")


@pytest.mark.parametrize(
    ("told", "value"),
    [
        ("policy_changes", [1]),
        ("policy_changes", {"step": 1}),
        ("recipe", {"cadence.details_every": "often"}),
        ("recipe", {"budget.span": "1e400ba"}),
        ("recipe", []),
        ("environment", 3),
        ("num_microbatches", 0),
    ],
)
def test_a_ledger_that_says_nonsense_is_no_answer_or_differs(run: Path, told: str, value: Any) -> None:
    (entry, details), *rest = entries(run)
    details = dict(details or {})
    details[told] = {**details[told], **value} if told == "recipe" and value else value  # type: ignore[dict-item]
    sign_again(run, [(replace(entry, details_digest=details_digest(details)), details), *rest])  # type: ignore[call-arg]
    try:
        found = replayed(run, 0, 2, again("routed"), with_checkpoints=False)
    except CosmatiError:
        return
    assert found.outcome == "different" or told == "num_microbatches"


LEARNING: dict[str, Any] = {
    "direction_every": 2,
    "update_direction_every": 3,
    "digests_every": 3,
    "entropy_every": 2,
    "details_every": 2,
}
OTHER = "ADwAPAA8ADwAPAA8ADwAPAA8ADwAPAA8ADwAPAA8ADw="  # sixteen ones


@pytest.fixture(scope="module")
def measured_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured") / "run"
    build("routed", folder, **LEARNING).fit()
    return folder


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("direction", "1", 1), OTHER, "direction of region head, microbatch 1: "),
        (("direction", "2", 0), None, "direction of region body, microbatch 2: "),
        (("entropy", "3", 0), 0.5, "entropy of region body, microbatch 3: "),
        (("update_norm", 1), 2.0, "update norm of region head: "),
        (("update_direction", 0), OTHER, "update direction of region body: "),
        (("region_digests", "before", 1), "ab" * 32, "digest of region head before the step: "),
        (("region_digests", "after", 0), "cd" * 32, "digest of region body after the step: "),
    ],
)
def test_what_is_said_of_learning_and_signed_otherwise_is_found_and_named(
    measured_once: Path, tmp_path: Path, path: tuple[str | int, ...], value: object, named: str
) -> None:
    run = Path(shutil.copytree(measured_once, tmp_path / "run"))
    items = entries(run)
    told = next(t for e, t in items if isinstance(e, StepEntry) and e.step == 6)
    details = json.loads(json.dumps(told))
    place = details
    for key in path[:-1]:
        place = place[key]
    assert place[path[-1]] != value
    place[path[-1]] = value
    sign_again(run, changed(items, 6, details))
    assert verify_ledger(run / "ledger").num_steps == 12  # it's consistent in itself
    found = replayed(run, 5, 8, again("routed"))
    assert found.outcome == "different"
    assert [str(one).startswith(f"step 6, {named}") for one in found.differences] == [True]


@pytest.mark.parametrize("name", ["direction", "entropy", "update_direction", "region_digests"])
def test_what_was_left_out_of_a_step_or_put_in_is_found(measured_once: Path, tmp_path: Path, name: str) -> None:
    run = Path(shutil.copytree(measured_once, tmp_path / "run"))
    items = entries(run)
    kept = {step: dict(t or {}) for e, t in items if isinstance(e, StepEntry) for step in [e.step]}
    there = name in kept[6]
    assert there
    without = {key: value for key, value in kept[6].items() if key != name}
    index = next(i for i, (e, _) in enumerate(items) if isinstance(e, StepEntry) and e.step == 6)
    entry = items[index][0]
    assert isinstance(entry, StepEntry)
    items[index] = replace(entry, details_digest=details_digest(without)), without
    sign_again(run, items)
    assert {one.step for one in replayed(run, 5, 8, again("routed")).differences} == {6}
    put_in = changed(entries(measured_once), 7, {name: kept[6][name]})
    sign_again(run, put_in)
    assert {one.step for one in replayed(run, 7, 8, again("routed")).differences} == {7}


@pytest.mark.parametrize("with_checkpoints", [True, False])
def test_an_earlier_releases_run_is_replayed_without_what_it_did_not_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_checkpoints: bool
) -> None:
    """Its ledger and its checkpoints name no such cadence: today's defaults would measure what no entry has."""
    with monkeypatch.context() as before:
        before.setattr(settings, "CADENCES", tuple(name for name in CADENCES if name not in LEARNING_CADENCES))
        before.setattr(settings, "_NEUTRAL", (*settings._NEUTRAL, *LEARNING_CADENCES))
        build("routed", tmp_path / "run", **dict.fromkeys(LEARNING_CADENCES, 0)).fit()
    found = replayed(tmp_path / "run", 5, 9, again("routed", **LEARNING), with_checkpoints=with_checkpoints)
    assert [str(one) for one in found.differences] == []
    assert (found.outcome, found.skipped, found.num_roots) == ("equal", (), 1 if with_checkpoints else 3)
