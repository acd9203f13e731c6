"""`cosmati ledger`: a yes is 0, a no is 1 and a sentence of its own, and 2 says that nothing could be read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.core.state import parameter_root
from cosmati.ledger.keys import SigningKey
from cosmati.records.ledger import CheckpointEntry, EndEntry, ResumeEntry
from tests.ledger.ledgers import ORIGIN, append_steps, digest, run_entry, step_entry, write_run
from tests.ledger.test_amend import amended
from tests.ledger.test_earlier_releases import V1, V1_KEY
from tests.ledger.test_verify import Item, write_signed

pytestmark = pytest.mark.long

KEY = SigningKey.generate(ORIGIN)


def ask(*arguments: object) -> tuple[int, str]:
    """Return the exit code and what was printed: an answer on standard output, an error on the other."""
    result = CliRunner().invoke(app, ["ledger", *map(str, arguments)])
    assert "Traceback" not in result.output
    assert bool(result.stderr) == (result.exit_code == 2), result.output
    assert result.exit_code != 1 or result.stdout.startswith("No. ")
    return result.exit_code, result.output


def yes(*arguments: object) -> str:
    code, text = ask(*arguments)
    assert code == 0, text
    return text


def no(*arguments: object) -> str:
    code, text = ask(*arguments)
    assert code == 1, text
    return text


def unanswered(*arguments: object) -> str:
    code, text = ask(*arguments)
    assert code == 2, text
    return text


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder that may be written to."""
    return Path(shutil.copytree(V1, tmp_path / "some run"))


# -------------------------------------------------------------------------------------------------------- where it is


@pytest.mark.parametrize("end", ["", "ledger", "ledger/", "./ledger/../ledger"])
@pytest.mark.parametrize("is_relative", [True, False])
def test_any_path_of_the_run_or_of_its_ledger_will_do(
    run: Path, monkeypatch: pytest.MonkeyPatch, end: str, is_relative: bool
) -> None:
    monkeypatch.chdir(run.parent)
    given = f"{run.name if is_relative else run}/{end}"
    assert "Verified: 13 entries" in yes("verify", given)
    assert "late" in yes("show", given)
    assert "near_output" in yes("query", given, "--class", "doubtful")
    assert "after 6 steps" in yes("check-weights", given)
    assert json.loads(yes("prove", given, "--step", 2))["index"] == 6


@pytest.mark.parametrize("below", ["", "ledger", "ledger/tile"])
def test_the_place_where_one_stands_will_do(run: Path, monkeypatch: pytest.MonkeyPatch, below: str) -> None:
    monkeypatch.chdir(run / below)
    given = {"": ".", "ledger": ".", "ledger/tile": ".."}[below]
    assert "Verified" in yes("verify", given)
    assert "after 6 steps" in yes("check-weights", given)


def test_a_run_that_was_renamed_and_moved_still_verifies(run: Path) -> None:
    moved = run.parent / "elsewhere" / "under another name"
    moved.parent.mkdir()
    run.rename(moved)
    assert "cosmati/v1-run" in yes("verify", moved, "--vkey", V1_KEY)
    assert "after 6 steps" in yes("check-weights", moved, "--vkey", V1_KEY)


@pytest.mark.parametrize("command", ["verify", "show", "query", "check-weights", "prove"])
def test_where_there_is_no_ledger_there_is_no_answer(tmp_path: Path, command: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").touch()
    for folder in ("absent", "other"):
        assert "There is no ledger" in unanswered(command, tmp_path / folder, *(["--step", 1] * (command == "prove")))


# ------------------------------------------------------------------------------------------------------------ verify


def test_a_ledger_that_does_not_verify_is_an_answer_and_leaves_other_questions_open(run: Path) -> None:
    path = run / "ledger" / "details.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"loss"', b'"lass"', 1))
    assert "doesn't verify" in no("verify", run)
    for question in (["show"], ["query", "--class", "late"], ["prove", "--step", "1"], ["check-weights"]):
        assert "details.jsonl" in unanswered(question[0], run, *question[1:])
    assert "no verifier key" in unanswered("verify", V1, "--vkey", "nonsense")
    assert "you trust" in no("verify", V1, "--vkey", KEY.verifier.text)


def test_a_ledger_is_compared_with_an_earlier_checkpoint(tmp_path: Path) -> None:
    items: list[Item] = [run_entry(), *(step_entry(step) for step in range(9))]
    for name, content in {
        "early": items[:5],
        "late": items,
        "rewritten": [*items[:4], step_entry(3, salt="other"), *items[5:]],
        "back": items[:3],
    }.items():
        write_signed(tmp_path / name, content, KEY)
    write_signed(tmp_path / "thief", items, SigningKey.generate(ORIGIN))
    pin = ["--pinned", tmp_path / "early" / "checkpoint"]
    assert "its first 5 entries are those of" in yes("verify", tmp_path / "late", *pin)
    assert "the log was rewritten" in no("verify", tmp_path / "rewritten", *pin)
    assert "the ledger was cut back" in no("verify", tmp_path / "back", *pin)
    assert "The pinned checkpoint: The note isn't signed by" in no("verify", tmp_path / "thief", *pin)
    for name in ("rewritten", "back", "thief"):
        yes("verify", tmp_path / name)
    for wrong in (tmp_path / "absent", tmp_path, tmp_path / "late" / "tile" / "0" / "000.p" / "10"):
        assert unanswered("verify", tmp_path / "late", "--pinned", wrong).startswith("Error: ")


def test_what_was_amended_and_what_is_not_signed_is_said(tmp_path: Path) -> None:
    write_signed(tmp_path / "amended", amended(), KEY)
    assert "from step 3 on, policy: second, was first" in yes("verify", tmp_path / "amended")
    assert "3 of these steps went by a policy without a region of that name" in yes(
        "query", tmp_path / "amended", "--class", "new", "--region", "high"
    )
    writer = write_run(tmp_path / "open", KEY, 2, every=1000)
    writer.checkpoint()
    append_steps(writer, range(2, 3))
    writer.flush()
    assert "1 further entries aren't signed yet" in yes("verify", tmp_path / "open")
    unread = "1 further entries aren't signed yet, and weren't read"
    for question in (["query"], ["query", "--class", "open"], ["query", "--region", "near_input"], ["show"]):
        assert unread in yes(question[0], tmp_path / "open", *question[1:])
    assert unread in yes("query", tmp_path / "open", "--class", "private", "--region", "near_input")
    assert "signed yet" not in yes("query", tmp_path / "amended") + yes("show", tmp_path / "amended")
    writer.append(writer.resume_entry(1))
    append_steps(writer, range(1, 3), attempt=1, salt="other")
    writer.close()
    assert "steps that came out differently when run again: [1, 2]" in yes("verify", tmp_path / "open")


def test_a_false_statement_is_an_answer(run: Path) -> None:
    assert "No logged step gave rows" in yes("query", run, "--class", "doubtful", "--region", "near_input")
    assert no("query", run, "--class", "late", "--region", "near_input").startswith(
        "No. The statement is false: entry 9 (step 4)"
    )
    assert "no class 'x'" in unanswered("query", run, "--class", "x", "--region", "near_input")


# ------------------------------------------------------------------------------------------------------------- prove


@pytest.mark.parametrize(
    ("asked", "index", "says"),
    [
        (["--step", "2"], 6, "Entry 6 of the log cosmati/v1-run is step 2"),
        (["--entry", "4"], 4, "Entry 4 of the log cosmati/v1-run is step 2"),
        (["--entry", "0"], 0, "is run,"),
        (["--entry", "5"], 5, "is resume,"),
        (["--entry", "12"], 12, "is end,"),
    ],
)
def test_a_proof_is_checked_by_a_stranger(run: Path, asked: list[str], index: int, says: str) -> None:
    path = run.parent / "proof.json"
    assert yes("prove", run, *asked, "--out", path).strip() == str(path)
    proof = json.loads(path.read_text())
    assert (proof["index"], len(proof["path"])) == (index, 4 if index < 12 else 2)
    assert yes("prove", run, *asked) == path.read_text()
    shutil.rmtree(run)
    assert says in yes("prove", "--check", path, "--vkey", V1_KEY)


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (lambda p: p | {"index": 5}, 1, "don't lead from entry 5"),
        (lambda p: p | {"index": 99}, 1, "don't lead from entry 99"),
        (lambda p: p | {"path": p["path"][:-1]}, 1, "don't lead"),
        (lambda p: p | {"path": [*p["path"], p["path"][0]]}, 1, "don't lead"),
        (lambda p: p | {"path": p["path"][::-1]}, 1, "don't lead"),
        (lambda p: p | {"entry": p["entry"][:-4] + "AAAA"}, 1, "don't lead"),
        (
            lambda p: p | {"details": p["details"].replace('"step":2', '"step":3')},
            1,
            "the details that the entry commits",
        ),
        (lambda p: p | {"details": None}, 1, "aren't in it"),
        (lambda p: p | {"checkpoint": p["checkpoint"].replace("\n13\n", "\n14\n")}, 1, "signature"),
        (lambda p: p | {"checkpoint": "nothing"}, 2, "no proof"),
        (lambda p: p | {"format": "cosmati-inclusion/9"}, 2, "this release reads"),
        (lambda p: p | {"entry": "?"}, 2, "no proof"),
        (lambda p: p | {"index": "6"}, 2, "no proof"),
        (lambda p: {"format": p["format"]}, 2, "no proof"),
        (lambda _: [], 2, "no proof"),
    ],
)
def test_a_proof_that_was_changed_does_not_hold(
    tmp_path: Path, change: Callable[[dict[str, object]], object], code: int, says: str
) -> None:
    (tmp_path / "proof.json").write_text(json.dumps(change(json.loads(yes("prove", V1, "--step", "2")))))
    found, text = ask("prove", "--check", tmp_path / "proof.json", "--vkey", V1_KEY)
    assert (found, says in text) == (code, True), text


def test_a_proof_is_of_the_log_whose_key_one_has(tmp_path: Path) -> None:
    write_signed(tmp_path / "l", amended(), KEY)
    yes("prove", tmp_path / "l", "--step", 3, "--out", tmp_path / "proof.json")
    assert "is step 3" in yes("prove", "--check", tmp_path / "proof.json", "--vkey", KEY.verifier.text)
    assert "This proof doesn't hold" in no("prove", "--check", tmp_path / "proof.json", "--vkey", V1_KEY)
    assert "key alone" in unanswered("prove", "--check", tmp_path / "proof.json")
    assert "no verifier key" in unanswered("prove", "--check", tmp_path / "proof.json", "--vkey", "x")


def test_there_is_no_proof_of_what_is_not_signed(run: Path) -> None:
    assert "6 steps" in unanswered("prove", run, "--step", 6)
    assert "13 entries" in unanswered("prove", run, "--entry", 13)
    assert "of one entry" in unanswered("prove", run)
    assert "of one entry" in unanswered("prove", run, "--step", 1, "--entry", 1)
    assert "Give a run folder" in unanswered("prove")


# ----------------------------------------------------------------------------------------------------- check-weights


def test_swapped_weights_are_found(run: Path) -> None:
    """Their digests.json would have been redone, and nothing else looks at the ledger."""
    path = run / "checkpoints" / "step-00000006" / "model.safetensors"
    weights = load_file(path)
    assert "entry 12" in yes("check-weights", run)
    weights["0.weight"][0, 0] += 1e-7
    save_file(weights, path)
    assert "No entry signs the weights" in no("check-weights", run)
    assert "after which a root is signed: 2, 4, 6, 6" in no("check-weights", run, "--weights", path)


def root_of(value: float) -> tuple[dict[str, torch.Tensor], bytes]:
    weights = {"w": torch.full((3,), value)}
    return weights, parameter_root(weights)


def test_a_checkpoints_folder_leads_to_its_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = next((run / "checkpoints").iterdir())
    for given in (run / "checkpoints", newest, newest / "model.safetensors"):
        assert "Verified: 13 entries" in yes("verify", given)
        assert f"{newest.name}/model.safetensors holds the weights after 6 steps" in yes("check-weights", given)
    monkeypatch.chdir(newest)
    assert "holds the weights after 6 steps" in yes("check-weights", ".")
    shutil.copytree(newest, run / "checkpoints" / "step-00000009")
    assert "its folder's name says another number" in no("check-weights", run / "checkpoints" / "step-00000009")
    yes("check-weights", newest)
    (run / "elsewhere").mkdir()
    assert "There is no ledger in" in unanswered("verify", run / "elsewhere")


@pytest.mark.parametrize("name", ["step-00000004", "step-00000006/details", "step-00000006/optimizer.safetensors", "x"])
def test_a_checkpoint_that_is_named_and_holds_no_weights_is_no_newest_one(run: Path, name: str) -> None:
    newest = next((run / "checkpoints").iterdir())
    named = run / "checkpoints" / name
    assert "no weights" in unanswered("check-weights", named)
    if not named.suffix:
        named.mkdir()
        text = unanswered("check-weights", named)
        assert f"There are no weights in {named}" in text
        assert newest.name in text
    assert "after 6 steps" in yes("check-weights", run / "checkpoints")


def test_other_weights_in_the_run_are_not_its_newest_checkpoint(run: Path) -> None:
    save_file({"w": torch.zeros(1)}, run / "model.safetensors")
    assert "after 6 steps" in yes("check-weights", run)
    assert "No entry signs" in no("check-weights", run, "--weights", run / "model.safetensors")


def test_weights_belong_to_one_step_that_stands(tmp_path: Path) -> None:
    steps = [step_entry(step)[0:2] for step in range(2)]
    entries: list[Item] = [
        run_entry(),
        steps[0],
        (CheckpointEntry(1, digest("s"), root_of(1.0)[1]), None),
        steps[1],
        (CheckpointEntry(2, digest("s"), root_of(2.0)[1]), None),
        (ResumeEntry(1, 3, 1), None),
        step_entry(1, attempt=1),
        (CheckpointEntry(2, digest("s"), root_of(3.0)[1]), None),
        (EndEntry(2, "completed", root_of(3.0)[1]), None),
        # What was superseded once doesn't stand again.
        (ResumeEntry(2, 9, 2), None),
    ]
    write_signed(tmp_path / "ledger", entries, KEY)
    assert "no checkpoint" in unanswered("check-weights", tmp_path)

    def held(name: str, value: float) -> Path:
        path = tmp_path / name / "model.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(root_of(value)[0], path)
        return path

    assert "after 1 steps" in yes("check-weights", tmp_path, "--weights", held("delivered", 1.0))
    assert "entry 8" in yes("check-weights", tmp_path, "--weights", held("delivered", 3.0))
    assert "superseded (entry 4)" in no("check-weights", tmp_path, "--weights", held("delivered", 2.0))
    assert "No entry signs" in no("check-weights", tmp_path, "--weights", held("delivered", 4.0))
    held("checkpoints/step-00000001", 1.0)
    newest = held("checkpoints/step-00000002", 3.0)
    assert "after 2 steps" in yes("check-weights", tmp_path)
    held("checkpoints/step-00000002", 1.0)
    assert "put into another's folder" in no("check-weights", tmp_path)
    newest.write_bytes(newest.read_bytes()[:-1])
    assert "can't be read" in unanswered("check-weights", tmp_path)
    newest.unlink()
    assert "can't be read" in unanswered("check-weights", tmp_path)
