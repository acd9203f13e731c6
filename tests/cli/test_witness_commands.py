"""`cosmati ledger witness`, `--witness`, `rotate-key`: what they print, and with what they exit."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from cosmati.ledger.keys import create_key, load_key
from cosmati.ledger.writer import LedgerWriter
from tests.ledger.ledgers import ORIGIN, append_steps, write_run
from tests.processes import PythonProcess

from .test_ledger_commands import no, unanswered, yes

pytestmark = pytest.mark.long


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "private").mkdir(parents=True)
    write_run(tmp_path / "run" / "ledger", create_key(tmp_path / "run/private/operator.key", name=ORIGIN), 5).close()
    return tmp_path / "run"


@pytest.fixture
def witness(tmp_path: Path) -> Path:
    assert yes("witness", "init", tmp_path / "w", "--name", "w.example").startswith("w.example+")
    return tmp_path / "w"


def vkey(folder: Path) -> str:
    return (folder / "witness.vkey").read_text().strip()


def go_on(run: Path, steps: range) -> None:
    with LedgerWriter.open(run / "ledger", key=load_key(run / "private/operator.key", name=ORIGIN)) as writer:
        append_steps(writer, steps)


def test_signed_once_every_answer_is_witnessed(run: Path, witness: Path, tmp_path: Path) -> None:
    told = yes("witness", "sign", run, "--key", witness)
    assert "First seen: example.com/run-1+" in told
    assert "Cosigned by w.example at 20" in told
    assert "First seen" not in yes("witness", "sign", run / "ledger" / "checkpoint", "--key", witness)
    trust = ("--witness", vkey(witness))
    verified = yes("verify", run, *trust)
    assert "by 1 of 1; nothing unwitnessed" in verified
    assert "  evidence  L1: witnessed at 20" in verified
    yes("prove", run, "--step", 2, "--out", tmp_path / "proof")
    operator = (run / "ledger" / "operator.vkey").read_text().strip()
    for question in (
        ("show", run),
        ("query", run),
        ("query", run, "--class", "news"),
        ("query", run, "--class", "private", "--region", "near_input"),
        ("prove", "--check", tmp_path / "proof", "--vkey", operator),
    ):
        assert "L1: witnessed at 20" in yes(*question, *trust), question
        assert "L0: consistent in itself, operator-asserted" in yes(*question), question


def test_a_tail_and_too_few_are_told(run: Path, witness: Path, tmp_path: Path) -> None:
    yes("witness", "sign", run, "--key", witness)
    go_on(run, range(5, 7))
    trust = ("--witness", vkey(witness))
    assert "by 1 of 1; tail of 2 entries unwitnessed" in yes("verify", run, *trust)
    yes("witness", "init", tmp_path / "other", "--name", "other.example")
    both = (*trust, "--witness", vkey(tmp_path / "other"))
    assert "too few: 1 of 2 have cosigned" in yes("verify", run, *both)
    assert "witnessed at 20" in yes("verify", run, *both, "--quorum", 1)
    assert "can't be met" in unanswered("verify", run, *trust, "--quorum", 2)
    assert "is no verifier key" in unanswered("show", run, "--witness", "nobody")


def test_a_fork_and_a_rollback_are_a_no(run: Path, witness: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "old")
    go_on(run, range(5, 7))
    yes("witness", "sign", run, "--key", witness)
    assert no("witness", "sign", tmp_path / "old", "--key", witness).startswith(
        "No. Rolled back: w.example has cosigned"
    )
    shutil.copytree(run / "ledger" / "cosigned", tmp_path / "old" / "ledger" / "cosigned")
    assert "was cut back" in no("verify", tmp_path / "old")
    assert "no witness" in unanswered("witness", "sign", run, "--key", run)
    assert "no ledger" in unanswered("witness", "sign", witness, "--key", witness)
    assert "isn't empty" in unanswered("witness", "init", witness, "--name", "w.example")


def test_a_key_is_changed_and_the_old_one_still_trusted(run: Path) -> None:
    operator = (run / "ledger" / "operator.vkey").read_text().strip()
    told = yes("rotate-key", run)
    now = (run / "ledger" / "operator.vkey").read_text().strip()
    assert told.splitlines()[0] == now != operator
    go_on(run, range(5, 6))
    assert "which handed over" in yes("verify", run, "--vkey", operator)
    assert "rows in" in yes("query", run, "--vkey", operator)


def test_a_witness_that_serves_is_asked_and_ends_with_ctrl_c(run: Path, witness: Path) -> None:
    operator = (run / "ledger" / "operator.vkey").read_text().strip()
    serve = ["-m", "cosmati", "ledger", "witness", "serve", str(witness), "--log", operator, "--port", "0"]
    # Where a shell has begun these tests behind it, what they begin doesn't hear Ctrl-C, unless it's told to.
    hears = "import signal, sys, runpy; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{hears}; sys.argv = {serve[1:]!r}; runpy.run_module('cosmati', run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "PYTHONUNBUFFERED": "1"}
    with PythonProcess(["-c", program], env=environment) as server:
        address = server.stdout.readline().strip()
        assert address.startswith(vkey(witness) + " http://127.0.0.1:")
        assert "Cosigned by w.example" in yes("witness", "ask", run, "--witness", address)
        server.send_signal(signal.SIGINT)
        said, errors = server.communicate(timeout=60)
        assert said == "Ended.\n", errors
    assert server.returncode == 0
    assert "doesn't answer" in unanswered("witness", "ask", run, "--witness", address)
    assert "names no witness" in unanswered("witness", "ask", run, "--witness", "nobody")
