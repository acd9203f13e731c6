"""Row keys after a deletion: whose are gone and where, what a replay still compares, and what an auditor can."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.core.loss import Classification
from cosmati.data.in_memory import InMemory
from cosmati.errors import ForgetError
from cosmati.forget import holds
from cosmati.forget.ablation import Wrap
from cosmati.forget.asked import ToForget
from cosmati.forget.certificate import verify_certificate
from cosmati.forget.past_run import PastRun
from cosmati.ledger.keys import load_or_create_key
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.replay_result import NO_LEVEL, ReplayResult
from cosmati.ledger.row_blinds import secrets_of_run
from cosmati.ledger.row_keys import RowKeys
from cosmati.ledger.row_secrets import KeyedRows, RowSecrets, commit
from cosmati.ledger.standing import StandingSteps
from cosmati.ledger.writer import LedgerWriter
from cosmati.optim import SGD
from cosmati.recipes.replaying import trainers_of
from cosmati.train.config import RunConfig
from cosmati.train.observers.row_leaves import rows_in
from cosmati.train.replay import ReplayFound, replay
from cosmati.train.trainer import Trainer
from tests.forget import recipe as publisher
from tests.forget.samples import bare, forgotten, maker, rows_of_step, trained
from tests.train.isolated.samples import CLASSES, source

pytestmark = pytest.mark.long

RECIPE = str(Path(publisher.__file__))
CASE = bare("MLP, low rank")
DATA = source(CASE)
MAKE = maker(CASE, DATA)


def keys_of(run: Path) -> RowKeys:
    return RowKeys.load(run / "private" / "rows.keys")


def call(*told: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(map(str, told)))
    return result.exit_code, " ".join(result.output.split())


def forget(run: Path, step: int, out: Path, *more: str) -> tuple[Path, frozenset[int]]:
    """Have rows of a step forgotten, as a person does."""
    rows = rows_of_step(publisher.data(), step)
    (file := out.with_suffix(".txt")).write_text("\n".join(map(str, rows)))
    code, said = call(
        "forget", run, "--rows", file, "--recipe", RECIPE, "--method", "replay", "--yes", "--out", out, *more
    )
    assert code == 0, said
    return out, rows


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, frozenset[int]]]:
    """A run, one without rows of step 2, whose keys are kept, and one without rows of step 4, whose keys are not."""
    folder = tmp_path_factory.mktemp("shredded")
    publisher.recipe().trainer(run_folder=folder / "one").fit()
    shutil.copy(folder / "one/private/rows.keys", folder / "backup.keys")
    _, kept = forget(folder / "one", 2, folder / "two")
    _, gone = forget(folder / "two", 4, folder / "three", "--delete-superseded")
    return folder, {"kept": kept, "gone": gone}


def test_keys_are_gone_from_the_run_and_from_all_that_it_succeeds(runs: Any) -> None:
    folder, rows = runs
    whole = RowKeys.load(folder / "backup.keys")
    for name in ("one", "two", "three"):
        keys = keys_of(folder / name)
        assert [row for row in range(96) if not keys.has(row)] == sorted(rows["gone"])
        assert all(keys.of(row) == whole.of(row) for row in range(96) if row not in rows["gone"])
        assert set(keys.certificates.values()) == {2}
    told = [json.loads((folder / f"three/certificates/000{n}.json").read_text()) for n in (1, 2, 3)]
    assert [one["row_keys"] for one in told] == ["kept", "kept", "shredded"]
    assert [sum("private/rows.keys" in line for line in one["not_covered"]) for one in told] == [1, 1, 0]
    checked = verify_certificate(folder / "three/certificates/0003.json", folder / "three/ledger")
    assert "that the row keys were shredded, and that no copy of them is left" in checked.not_checked
    assert any("no commitment confirms a guess" in note for note in checked.told["notes"])


def test_a_guess_is_confirmed_before_and_by_nobody_after(runs: Any) -> None:
    """The attack on commitments: whoever knows id, place and content asks the ledger that learnt them."""
    folder, rows = runs
    run = StandingSteps(VerifiedLedger(folder / "one/ledger"))
    order = publisher.data().order(seed=0, num_microbatches=4, route_pure=True)
    batch = order.microbatch(4, 1)
    assert rows["gone"] <= set(batch.lineage.row_ids.tolist())

    def confirmed(secrets: RowSecrets) -> bool:
        for item, entry, tables in run.steps(4, 5):
            guess = rows_in(batch, 4, 1, tables.class_of(entry.microbatches[1], item))
            return commit(guess, secrets.blinds(guess) or []) == entry.microbatches[1].row_commitment
        raise AssertionError

    assert confirmed(KeyedRows(RowKeys.load(folder / "backup.keys"), run.ledger.key.name)), "an older copy of the keys"
    for name in ("one", "two", "three"):
        secrets = secrets_of_run(run, folder / name / "private")
        assert not confirmed(secrets)
        salted = [
            (folder / name / "private" / "rows.salt").read_bytes(),
            *[key for _, key in [*keys_of(folder / name).nodes()][::200]],
        ]
        assert not any(confirmed(KeyedRows(RowKeys(one), run.ledger.key.name)) for one in salted)


def test_the_superseded_run_is_replayed_but_for_the_rows_that_are_gone(runs: Any) -> None:
    folder, _ = runs
    asked = "ledger", "replay", folder / "one", "--recipe", RECIPE, "--steps", ":"
    code, said = call(*asked)
    assert (code, "row commitments weren't compared" in said) == (2, True), "its ledger has no certificate"
    code, said = call(*asked, "--without-rows")
    assert (code, "evidence none" in said) == (0, True)
    run = StandingSteps(VerifiedLedger(folder / "one/ledger"))
    assert ("Equal in every digest but those of rows" in said, run.num_steps) == (True, 6)
    code, said = call("ledger", "replay", folder / "three", "--recipe", RECIPE)
    assert (code, said.endswith("Yes. Equal in every digest.")) == (0, True), "it has no such row"


def test_an_auditor_replays_what_came_after_a_deletion_without_salt_and_keys(runs: Any, tmp_path: Path) -> None:
    folder, rows = runs
    file = tmp_path / "blinds.json"
    code, said = call("ledger", "blinds", folder / "three", "--steps", ":", "--recipe", RECIPE, "--out", file)
    assert code == 0, said
    text = file.read_text()
    assert (folder / "three/private/rows.salt").read_bytes().hex() not in text
    assert not any(key.hex() in text for _, key in keys_of(folder / "three").nodes())
    shutil.copytree(folder / "three/ledger", tmp_path / "copy")
    asked = "ledger", "replay", tmp_path / "copy", "--recipe", RECIPE, "--rows", file
    code, said = call(*asked)
    assert (code, said.endswith("Yes. Equal in every digest.")) == (0, True), said
    assert "evidence L3: the whole run was replayed" in said
    told = json.loads(text)
    assert {row for one in told["substituted"].values() for row in one["rows"]} == set(
        map(str, rows["kept"] | rows["gone"])
    )
    for change, exit_code, words in (
        (lambda one: one | {"rows": one["rows"][1:]}, 1, "No. The first that differs is"),
        (lambda one: one | {"data": "00" * 32}, 1, "data without what was forgotten: commitment"),
        (lambda one: None, 2, "doesn't say what the request"),
    ):
        changed = {asked: change(one) for asked, one in told["substituted"].items()}
        lie = told | {"substituted": {asked: one for asked, one in changed.items() if one}}
        if exit_code == 2:
            lie["substituted"] = {"00": next(iter(told["substituted"].values()))}
        file.write_text(json.dumps(lie, separators=(",", ":")))
        code, said = call(*asked, "--steps", "4:")
        assert (code, words in said) == (exit_code, True), said


def test_a_restored_copy_of_the_keys_is_shredded_by_the_same_command(runs: Any, tmp_path: Path) -> None:
    folder, rows = runs
    path = folder / "three/private/rows.keys"
    shutil.copy(path, tmp_path / "before")
    shutil.copy(folder / "backup.keys", path)
    forget(folder / "two", 4, folder / "three", "--delete-superseded")
    assert [row for row in range(96) if not keys_of(folder / "three").has(row)] == sorted(rows["gone"])
    assert len(list((folder / "three/certificates").glob("*.json"))) == 3, "it was certified before"
    shutil.copy(tmp_path / "before", path)  # for others


# ---------------------------------------------------------------------------------------------- crashes, holds, kinds


@pytest.mark.parametrize("place", ["first", "second", "certificate"])
def test_killed_between_two_parts_the_same_call_ends_it(place: str, tmp_path: Path) -> None:
    """By SIGKILL: after the successor's keys, after the superseded run's, and before the second certificate."""
    run, out = trained(MAKE, tmp_path / "run"), tmp_path / "out"
    asked = ToForget(rows=rows_of_step(DATA, 4))
    forgotten(run, asked, MAKE, out)
    if (child := os.fork()) == 0:
        _die_at(place)
        forgotten(run, asked, MAKE, out, delete=True)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    states = [all(keys_of(one).has(row) for row in asked.rows) for one in (out, run)]
    assert states == {"first": [False, True], "second": [False, False], "certificate": [False, False]}[place]
    assert len(list((out / "certificates").glob("*.json"))) == 1
    for _ in range(2):
        forgotten(run, asked, MAKE, out, delete=True)
        assert not any(keys_of(one).has(row) for one in (out, run) for row in asked.rows)
        certificates = sorted((out / "certificates").glob("*.json"))
        assert [json.loads(one.read_text())["row_keys"] for one in certificates] == ["kept", "shredded"]
    assert verify_certificate(certificates[-1], out / "ledger")


def _die_at(place: str) -> None:
    """Have this process killed after so many stores, or where the certificate would be written."""
    from cosmati.forget import deletion

    saves, save = [], RowKeys.save

    def kills(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(keys: RowKeys, path: Path) -> None:
        save(keys, path)
        saves.append(path)
        if len(saves) == {"first": 1, "second": 2}.get(place):
            kills()

    RowKeys.save = counted  # type: ignore[method-assign]
    if place == "certificate":
        deletion.certify = kills  # type: ignore[assignment]


def test_a_hold_keeps_the_keys(tmp_path: Path) -> None:
    run, out = trained(MAKE, tmp_path / "run"), tmp_path / "out"
    asked = ToForget(rows=rows_of_step(DATA, 4))
    forgotten(run, asked, MAKE, out)
    holds.hold(out, asked, "case 13")
    with pytest.raises(ForgetError, match="Legal hold 1"):
        forgotten(run, asked, MAKE, out, delete=True)
    assert all(keys_of(one).has(row) for one in (out, run) for row in asked.rows)
    holds.release(out, 1, "settled")
    forgotten(run, asked, MAKE, out, delete=True)
    assert not any(keys_of(one).has(row) for one in (out, run) for row in asked.rows)


def replayed(run: Path, blinds: RowSecrets) -> ReplayFound:
    steps, make = StandingSteps(VerifiedLedger(run / "ledger")), trainers_of(publisher.isolated())
    return replay(steps, range(steps.num_steps), make, ledger=run / "ledger", blinds=blinds)


@pytest.fixture(scope="module")
def dropped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from which a class was dropped, its keys shredded."""
    folder = tmp_path_factory.mktemp("dropped")
    publisher.isolated().trainer(run_folder=folder / "run").fit()
    # No recipe is needed to shred it: a class has a key, and its rows' blinds follow from that, too.
    return forgotten(folder / "run", ToForget(classes=("personal",)), None, folder / "out", "drop", delete=True).out


def test_of_a_class_that_was_dropped_all_but_its_commitments_is_compared(dropped: Path) -> None:
    assert [keys_of(one).of_class("personal") for one in (dropped.with_name("run"), dropped)] == [None, None]
    assert keys_of(dropped).of_class("open") is not None
    assert keys_of(dropped).has(1)
    secrets = secrets_of_run(StandingSteps(VerifiedLedger(dropped / "ledger")), dropped / "private")
    found = replayed(dropped, secrets)
    assert (found.outcome, found.forgotten_by) == ("equal, forgotten rows not compared", (1,))
    assert not found.without_rows
    with_class = {
        entry.step
        for item, entry, tables in VerifiedLedger(dropped / "ledger").steps()
        if any(tables.class_of(cell, item) == "personal" and cell.num_rows for cell in entry.microbatches)
    }
    assert set(found.forgotten) == with_class != set()
    # What others taught is compared as before: with wrong keys for them it isn't equal.
    wrong = RowKeys(bytes(32))
    wrong.forget_classes(["personal"])
    wrong.certificates = keys_of(dropped).certificates
    assert replayed(dropped, KeyedRows(wrong, "cosmati/run")).outcome == "different"
    # And who says of rows that they were forgotten needs a certificate for it in the ledger.
    lying = RowKeys.from_bytes(keys_of(dropped).to_bytes())
    lying.certificates = {"00" * 32: 1}
    assert replayed(dropped, KeyedRows(lying, "cosmati/run")).outcome == "equal, rows not compared"


def test_commands_name_the_certificate_to_the_operator_and_to_an_auditor(dropped: Path, tmp_path: Path) -> None:
    own, file, result = ("--recipe", f"{RECIPE}:isolated"), tmp_path / "blinds.json", tmp_path / "found.json"
    assert call("ledger", "blinds", dropped, "--steps", "1:5", *own, "--out", file)[0] == 0
    told = json.loads(file.read_text())
    assert {place.split("/")[0] for place in told["blinds"]} == {"1", "2", "3", "4"}
    for place, slots in told["closed"].items():
        assert told["blinds"][place] == "00" * 32 * len(slots), "all rows of a microbatch are of one class"
    shutil.copytree(dropped / "ledger", tmp_path / "copy")
    asked = "--steps", "1:5", *own, "--out", result
    for place in (
        (dropped,),
        (tmp_path / "copy", "--rows", file, "--checkpoint", dropped.with_name("run") / "checkpoints"),
    ):
        code, said = call("ledger", "replay", *place, *asked)
        assert code == 0, said
        assert "have rows forgotten by certificate 1:" in said
        assert "Equal in every digest but those of forgotten rows." in said
        found = ReplayResult.from_bytes(result.read_bytes())
        assert (found.compares_rows, found.level) == (False, NO_LEVEL)
    told["certificates"] = {}
    file.write_text(json.dumps(told, separators=(",", ":")))
    assert call("ledger", "replay", tmp_path / "copy", "--rows", file, *asked)[0] == 2
    code, said = call("ledger", "spot-check", dropped, *own, "--auditor-seed", "x", "--segments", 2, "--length", 2)
    assert (code, "have rows forgotten by certificate 1:" in said) == (0, True), said


def test_without_a_policy_a_class_is_shredded_row_by_row(tmp_path: Path) -> None:
    """Its ledger calls all rows one class, so the data say which are meant."""
    rows = torch.randn(48, 4, generator=torch.Generator().manual_seed(0)), torch.arange(48) % 3
    data = InMemory(rows, 16, torch.arange(48) % 3, CLASSES)

    def make(wrap: Wrap, folder: Path | None, /, **config: object) -> Trainer:
        torch.manual_seed(1)
        told = RunConfig(
            budget="6ba", num_microbatches=4, num_threads=1, run_folder=folder, ledger=True, checkpoint_every="2ba"
        )
        return Trainer(torch.nn.Linear(4, 3), Classification(3), wrap(data), optimizers=[SGD(lr=0.1)], config=told)

    run = trained(make, tmp_path / "run")
    assert not PastRun(run).is_governed
    done = forgotten(run, ToForget(classes=("personal",)), make, tmp_path / "out", delete=True)
    gone = [row for row in range(48) if row % 3 == CLASSES.index("personal")]
    for one in (run, done.out):
        assert [row for row in range(48) if not keys_of(one).has(row)] == gone
        assert keys_of(one).of_class("all") is not None
    assert done.told is not None
    assert done.told["row_keys"] == "shredded"


def test_a_run_whose_rows_are_salted_is_replayed_and_forgotten_from_as_before(tmp_path: Path) -> None:
    """As a release before rows had keys began it: nothing can be shredded, which is said."""
    run, out, file = tmp_path / "run", tmp_path / "out", tmp_path / "blinds.json"
    (run / "private").mkdir(parents=True)
    (run / "private/rows.salt").write_bytes(bytes(range(32)))
    key = load_or_create_key(run / "private/operator.key", name="cosmati/run")
    LedgerWriter.create(run / "ledger", origin=key.name, key=key).close()
    publisher.recipe().trainer(run_folder=run).fit()
    assert not (run / "private/rows.keys").exists()
    steps = "--steps", "1:3", "--out", file
    assert call("ledger", "blinds", run, *steps)[0] == 0, "which rows they are nobody has to know"
    shutil.copytree(run / "ledger", tmp_path / "copy")
    asked = "ledger", "replay", tmp_path / "copy", "--recipe", RECIPE, "--rows"
    assert call(*asked, file, "--steps", "1:3")[0] == 0
    assert call(*asked, run / "private/rows.salt")[0] == 0
    forget(run, 4, out, "--delete-superseded")
    told = json.loads((out / "certificates/0002.json").read_text())
    assert told["row_keys"] == "salted"
    assert any("private/rows.salt, which can't forget some" in line for line in told["not_covered"])
    code, said = call("ledger", "blinds", out, *steps[2:], "--steps", "3:")
    assert (code, "what tombstones stand for" in said) == (2, True)
    assert call("ledger", "blinds", out, *steps[2:], "--steps", "3:", "--recipe", RECIPE)[0] == 0
    shutil.copytree(out / "ledger", tmp_path / "again")
    code, said = call(*asked[:2], tmp_path / "again", *asked[3:], file, "--steps", "3:")
    assert (code, said.endswith("Yes. Equal in every digest.")) == (0, True), said


@pytest.mark.parametrize("kind", ["the successor was moved", "one of them is gone", "another run is in its place"])
def test_keys_are_gone_from_all_that_it_succeeds_wherever_its_folder_is(kind: str, tmp_path: Path) -> None:
    one, two, asked = trained(MAKE, tmp_path / "one"), tmp_path / "two", ToForget(rows=rows_of_step(DATA, 4))
    forgotten(one, ToForget(rows=rows_of_step(DATA, 2)), MAKE, two)
    missing = []
    if kind.startswith("the successor"):
        two = two.rename(tmp_path / "moved")
    elif kind.startswith("one of them"):
        forgotten(two, ToForget(rows=rows_of_step(DATA, 3)), MAKE, tmp_path / "three")
        shutil.rmtree(two)
        missing, two = [two], tmp_path / "three"
    else:
        shutil.rmtree(one)
        trained(MAKE, one)
        missing = [one]
    told = forgotten(two, asked, MAKE, tmp_path / "out", delete=True).told
    assert told is not None
    has = {folder: any(map(keys_of(folder).has, asked.rows)) for folder in (one, two, tmp_path / "out")}
    assert has == {folder: folder in missing for folder in has}
    assert [one for one in told["not_covered"] if "row keys" in one] == [
        f"the row keys of {one}, which isn't where it was: delete them there" for one in missing
    ]


def test_a_certificate_excuses_no_other_rows(runs: Any, dropped: Path, tmp_path: Path) -> None:
    """The operator destroys keys of other rows, and has a certificate for his own."""
    run = shutil.copytree(runs[0] / "three", tmp_path / "three")
    keys = keys_of(run)
    keys.forget(range(96))
    keys.save(run / "private/rows.keys")
    code, said = call("ledger", "replay", run, "--recipe", RECIPE)
    assert (code, "row commitments weren't compared" in said, "forgotten by certificate" in said) == (2, True, False)
    run = shutil.copytree(dropped, tmp_path / "dropped")
    keys = keys_of(run)
    keys.forget_classes(["open"])
    keys.save(run / "private/rows.keys")
    steps = StandingSteps(VerifiedLedger(run / "ledger"))
    assert replayed(run, secrets_of_run(steps, run / "private")).outcome == "equal, rows not compared"
