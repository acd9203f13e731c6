"""Witnesses: what they cosign, what they refuse, and what a ledger that was rewritten since can't hide."""

from __future__ import annotations

import base64
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.cosignature import WitnessKey, cosignatures
from cosmati.ledger.cosigned import (
    FOLDER,
    ForkError,
    WitnessRefusedError,
    ask_witness,
    cosigned_heads,
    keep_cosigned,
    refuse_contradictions,
)
from cosmati.ledger.evidence import TrustedEvidence
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import VerifierKey
from cosmati.ledger.proof import check_inclusion, prove_inclusion
from cosmati.ledger.query import VerifiedLedger, contributions, direct_write_exclusion
from cosmati.ledger.verify import verify_ledger
from cosmati.ledger.witness import Witness, create_witness
from cosmati.ledger.witness_http import WitnessServer, over_http, witness_and_url
from cosmati.ledger.writer import LedgerWriter

from .ledgers import ORIGIN, append_steps, run_entry, write_run
from .outside_witness import cosigned_at

KEY = SigningKey.generate(ORIGIN)


class Clock:
    """A clock that stands where it's put."""

    def __init__(self, seconds: float = 1_700_000_000) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds


def witness_at(folder: Path, name: str = "witness.example/w1", now: Callable[[], float] | None = None) -> Witness:
    create_witness(folder, name)
    found = Witness(folder, now=now or Clock())
    found.trust(KEY.verifier)
    return found


@pytest.fixture
def witness(tmp_path: Path) -> Witness:
    return witness_at(tmp_path / "witness")


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    write_run(tmp_path / "l", KEY, 5).close()
    return tmp_path / "l"


def go_on(ledger: Path, steps: range, salt: str = "") -> None:
    with LedgerWriter.open(ledger, key=KEY) as writer:
        append_steps(writer, steps, salt=salt)


def trusted(*witnesses: Witness, quorum: int = 0) -> TrustedEvidence:
    return TrustedEvidence(tuple(one.key for one in witnesses), quorum)


def request_of(ledger: Path, old: int = 0) -> bytes:
    return f"old {old}\n\n".encode() + (ledger / "checkpoint").read_bytes()


# ------------------------------------------------------------------------------------------------------- cosigning


def test_a_cosignature_is_what_the_specification_says(ledger: Path, witness: Witness) -> None:
    cosigned = ask_witness(ledger, witness.key, witness.send)
    note = (ledger / FOLDER / str(cosigned.head.size)).read_bytes()
    assert cosigned_at(note, witness.key.text) == 1_700_000_000
    assert note.startswith((ledger / "checkpoint").read_bytes())
    assert verify_ledger(ledger).evidence_level.startswith("L0")
    report = verify_ledger(ledger, witnesses=trusted(witness))
    assert report.evidence_level == "L1: witnessed at 2023-11-14T22:13:20Z by 1 of 1"


def test_a_log_that_goes_on_is_cosigned_again(ledger: Path, tmp_path: Path) -> None:
    clock = Clock()
    witness = witness_at(tmp_path / "witness", now=clock)
    ask_witness(ledger, witness.key, witness.send)
    for steps in (range(5, 6), range(6, 10), range(10, 300)):  # the last ones over the border of a tile
        go_on(ledger, steps)
        clock.seconds += 60
        ask_witness(ledger, witness.key, witness.send)
    sizes = [one.head.size for one in cosigned_heads(ledger, [witness.key])]
    assert len(sizes) == 4
    assert verify_ledger(ledger, witnesses=trusted(witness)).evidence_level.startswith("L1: ")


def test_a_tail_is_not_witnessed(ledger: Path, witness: Witness) -> None:
    size = ask_witness(ledger, witness.key, witness.send).head.size
    go_on(ledger, range(5, 8))
    report = verify_ledger(ledger, witnesses=trusted(witness))
    assert report.witnessed is not None
    assert (report.witnessed.size, report.size) == (size, size + 4)
    told = f"L0: consistent in itself, operator-asserted; the first {size} of its {size + 4} entries were witnessed"
    assert report.evidence_level.startswith(told)
    asked = VerifiedLedger(ledger, None, trusted(witness))
    assert contributions(asked).evidence_level == report.evidence_level
    assert direct_write_exclusion(asked, "private", "near_input").evidence_level == report.evidence_level


def test_a_proof_of_what_was_witnessed_carries_its_cosignature(ledger: Path, witness: Witness) -> None:
    ask_witness(ledger, witness.key, witness.send)
    go_on(ledger, range(5, 8))
    for step, level in ((1, "L1: "), (6, "L0: ")):
        found = check_inclusion(prove_inclusion(ledger, step=step), KEY.verifier.text, trusted(witness))
        assert found.evidence_level.startswith(level)
    assert check_inclusion(prove_inclusion(ledger, step=1), KEY.verifier.text).evidence_level.startswith("L0")


def test_several_witnesses_share_a_note_and_a_quorum_counts(ledger: Path, tmp_path: Path) -> None:
    clocks = [Clock(1000), Clock(2000), Clock(3000)]
    three = [witness_at(tmp_path / f"w{i}", f"w{i}.example", clocks[i]) for i in range(3)]
    for one in three[:2]:
        ask_witness(ledger, one.key, one.send)
    levels = {k: verify_ledger(ledger, witnesses=trusted(*three, quorum=k)).evidence_level for k in (0, 1, 2, 3)}
    assert levels[1] == "L1: witnessed at 1970-01-01T00:16:40Z by 2 of 3"
    assert levels[2] == "L1: witnessed at 1970-01-01T00:33:20Z by 2 of 3"
    assert levels[0] == levels[3]
    assert levels[3].endswith("; 2 of 3 witnesses have cosigned, which is too few")
    go_on(ledger, range(5, 7))
    ask_witness(ledger, three[2].key, three[2].send)
    # Who has seen the larger tree has seen the smaller one in it.
    report = verify_ledger(ledger, witnesses=trusted(*three))
    assert report.witnessed is not None
    assert (report.witnessed.num_seen, report.witnessed.time) == (3, 3000)
    assert report.witnessed.size < report.size


def test_one_key_counts_once() -> None:
    key = SigningKey.generate("w.example").witness
    with pytest.raises(LedgerError, match="twice"):
        TrustedEvidence((key, WitnessKey("other.example", key.public)))
    with pytest.raises(LedgerError, match="can't be met"):
        TrustedEvidence((key,), 2)


def test_an_operators_key_is_no_witness() -> None:
    with pytest.raises(LedgerError, match="kind 04"):
        WitnessKey.parse(KEY.verifier.text)
    with pytest.raises(LedgerError, match="kind 01"):
        VerifierKey.parse(KEY.witness.text)


# ------------------------------------------------------------------------------------------------------------ deeds


def forked(ledger: Path, num_steps: int, name: str = "fork") -> Path:
    """Write another log of the same operator under the same name."""
    other = ledger.parent / name
    with LedgerWriter.create(other, origin=ORIGIN, key=KEY) as writer:
        writer.append(*run_entry())
        append_steps(writer, range(num_steps), salt="other")
    return other


@pytest.mark.parametrize("num_steps", [5, 9])
def test_a_fork_is_refused_and_found(ledger: Path, witness: Witness, num_steps: int) -> None:
    ask_witness(ledger, witness.key, witness.send)
    other = forked(ledger, num_steps)
    with pytest.raises(ForkError, match="Forked"):
        ask_witness(other, witness.key, witness.send)
    assert verify_ledger(other).num_steps == num_steps
    # Whoever has the cosigned checkpoint finds it, asked for that witness or not.
    shutil.copytree(ledger / FOLDER, other / FOLDER)
    for asked in ((), (witness,)):
        with pytest.raises(TamperError, match="rewritten"):
            verify_ledger(other, witnesses=trusted(*asked))
        with pytest.raises(TamperError, match="rewritten"):
            VerifiedLedger(other, None, trusted(*asked))


def test_a_rollback_is_refused_and_found(ledger: Path, witness: Witness, tmp_path: Path) -> None:
    shutil.copytree(ledger, tmp_path / "backup")
    go_on(ledger, range(5, 8))
    ask_witness(ledger, witness.key, witness.send)
    with pytest.raises(ForkError, match="Rolled back"):
        ask_witness(tmp_path / "backup", witness.key, witness.send)
    shutil.copytree(ledger / FOLDER, tmp_path / "backup" / FOLDER)
    with pytest.raises(TamperError, match="cut back"):
        verify_ledger(tmp_path / "backup", witnesses=trusted(witness))
    # It may go on to the very state that the witness knows.
    assert ask_witness(ledger, witness.key, witness.send).head.size == verify_ledger(ledger).size


def test_two_witnesses_who_saw_different_logs_disagree(ledger: Path, tmp_path: Path) -> None:
    one, other = witness_at(tmp_path / "w1", "w1.example"), witness_at(tmp_path / "w2", "w2.example")
    ask_witness(ledger, one.key, one.send)
    fork = forked(ledger, 5)
    ask_witness(fork, other.key, other.send)
    size = verify_ledger(ledger).size
    (line,) = [text for text in (fork / FOLDER / str(size)).read_text().splitlines(True) if "w2.example" in text]
    with pytest.raises(TamperError, match="doesn't match"):
        keep_and_read(ledger, line, other)
    (fork / FOLDER / str(size)).rename(ledger / FOLDER / str(size))
    with pytest.raises(TamperError, match="rewritten"):
        verify_ledger(ledger, witnesses=trusted(one, other, quorum=1))


def keep_and_read(ledger: Path, line: str, witness: Witness) -> None:
    before = (ledger / "checkpoint").read_text()
    path = ledger / FOLDER / str(verify_ledger(ledger).size)
    kept = path.read_bytes()
    try:
        keep_cosigned(ledger, before, line, witness.key)
        verify_ledger(ledger, witnesses=trusted(witness))
    finally:
        path.write_bytes(kept)


def test_a_witness_whose_clock_went_back_says_nothing(ledger: Path, tmp_path: Path) -> None:
    clock = Clock(5000)
    witness = witness_at(tmp_path / "w", now=clock)
    ask_witness(ledger, witness.key, witness.send)
    go_on(ledger, range(5, 6))
    clock.seconds = 4999
    with pytest.raises(WitnessRefusedError, match="The clock here says 4999"):
        ask_witness(ledger, witness.key, witness.send)
    clock.seconds = 5000
    assert ask_witness(ledger, witness.key, witness.send).cosignatures[0].time == 5000


def test_a_witness_that_contradicts_itself_is_found(ledger: Path, tmp_path: Path) -> None:
    """Its folder is put back, and its clock too: it says of an earlier time that the larger tree was there."""
    clock = Clock(5000)
    witness = witness_at(tmp_path / "w", now=clock)
    shutil.copytree(tmp_path / "w", tmp_path / "before")
    ask_witness(ledger, witness.key, witness.send)
    go_on(ledger, range(5, 6))
    again = Witness(tmp_path / "before", now=Clock(4000))
    ask_witness(ledger, again.key, again.send)
    with pytest.raises(TamperError, match="contradicts itself"):
        verify_ledger(ledger, witnesses=trusted(witness))
    refuse_contradictions([])


def test_a_witness_that_somebody_else_asks_meanwhile_is_no_fork(ledger: Path, witness: Witness) -> None:
    """Between our two requests it cosigns a longer tree of the same log: it's busy, and nobody has lied."""
    size = verify_ledger(ledger).size
    answers = iter([(409, b"%d\n" % size), (409, b"%d\n" % (size + 64))])
    with pytest.raises(WitnessRefusedError, match=r"doesn't cosign \(409\)") as caught:
        ask_witness(ledger, witness.key, lambda _: next(answers))
    assert not isinstance(caught.value, ForkError)


def test_an_unknown_log_or_key_is_refused(ledger: Path, tmp_path: Path) -> None:
    create_witness(tmp_path / "w", "w.example")
    witness = Witness(tmp_path / "w", now=Clock())
    with pytest.raises(WitnessRefusedError, match=r"\(404\).*doesn't know the log"):
        ask_witness(ledger, witness.key, witness.send)
    witness.trust(SigningKey.generate(ORIGIN).verifier)
    with pytest.raises(WitnessRefusedError, match=r"\(403\).*isn't signed by a key"):
        ask_witness(ledger, witness.key, witness.send)
    witness.trust(KEY.verifier)  # a second key of the log, as after a change
    witness.trust(KEY.verifier)
    assert len(witness.knows(ORIGIN)) == 2
    ask_witness(ledger, witness.key, witness.send)
    assert not (ledger / FOLDER / "0").exists()


def test_an_answer_of_somebody_else_is_no_cosignature(ledger: Path, witness: Witness, tmp_path: Path) -> None:
    other = witness_at(tmp_path / "other", witness.key.name)
    with pytest.raises(WitnessRefusedError, match="no cosignature of its own"):
        ask_witness(ledger, witness.key, other.send)
    for answer in (b"", b"hello\n", b"\xff", "\u2014 witness.example/w1 AAAA\n".encode()):
        with pytest.raises(WitnessRefusedError, match="no cosignature of its own"):
            ask_witness(ledger, witness.key, lambda _, answer=answer: (200, answer))
    assert not (ledger / FOLDER).exists()


def test_a_witness_that_is_down_or_talks_nonsense_is_told(ledger: Path, witness: Witness) -> None:
    def down(_: bytes) -> tuple[int, bytes]:
        raise TimeoutError("timed out")

    with pytest.raises(WitnessRefusedError, match="doesn't answer: timed out"):
        ask_witness(ledger, witness.key, down)
    with pytest.raises(WitnessRefusedError, match="where it should give a size"):
        ask_witness(ledger, witness.key, lambda _: (409, b"many\n"))
    with pytest.raises(WitnessRefusedError, match=r"doesn't cosign \(503\): later"):
        ask_witness(ledger, witness.key, lambda _: (503, b"later"))
    with pytest.raises(ForkError, match="Rolled back"):
        ask_witness(ledger, witness.key, lambda _: (409, b"99999999999999999999\n"))


# ---------------------------------------------------------------------------------------------------- what it is sent


def test_each_refusal_has_the_status_that_the_protocol_gives_it(ledger: Path, witness: Witness) -> None:
    good = request_of(ledger)
    size = verify_ledger(ledger).size
    for wrong in (
        b"",
        b"old 1",
        b"old x\n\n",
        b"old 01\n\n",
        b"old -1\n\n",
        b"new 0\n\n",
        b"old 0\n*\n\n",
        b"old 0\n\n",
    ):
        assert witness.answer(wrong + b"rest").status == 400, wrong
    assert witness.answer(good.replace(b"old 0", b"old %d" % (size + 1))).status == 400
    assert witness.answer(good.replace(b"old 0\n", b"old 0\n" + base64.b64encode(b"x" * 32) + b"\n")).status == 422
    assert witness.answer(good.replace(b"old 0\n", b"old 0\n" + base64.b64encode(b"x" * 31) + b"\n")).status == 400
    many = b"".join(base64.b64encode(b"x" * 32) + b"\n" for _ in range(64))
    assert witness.answer(good.replace(b"old 0\n", b"old 0\n" + many)).status == 400
    assert witness.answer(good + b"\n" * (1 << 17)).status == 400
    other = witness.answer(good.replace(b"old 0", b"old 1"))
    assert (other.status, other.text, other.content_type) == (409, "0\n", "text/x.tlog.size")
    assert witness.answer(good).status == 200
    assert witness.answer(good).text == f"{size}\n"
    assert witness.answer(good.replace(b"old 0", b"old %d" % size)).status == 200
    assert witness.answer(request_of(forked(ledger, 5), size)).status == 409


def test_a_damaged_memory_says_nothing(ledger: Path, tmp_path: Path) -> None:
    witness = witness_at(tmp_path / "w")
    ask_witness(ledger, witness.key, witness.send)
    (memory,) = (tmp_path / "w" / "logs").glob("*/checkpoint")
    memory.write_text("x" + memory.read_text())
    with pytest.raises(TamperError):
        witness.answer(request_of(ledger))


def test_a_witness_is_made_once_and_keeps_its_key_to_itself(tmp_path: Path) -> None:
    key = create_witness(tmp_path / "w", "w.example")
    assert (tmp_path / "w" / "witness.key").stat().st_mode & 0o777 == 0o600
    assert Witness(tmp_path / "w").key == key
    with pytest.raises(LedgerError, match="isn't empty"):
        create_witness(tmp_path / "w", "w.example")
    (tmp_path / "w" / "witness.key").chmod(0o644)
    with pytest.raises(LedgerError, match=r"witness key .* has mode 0644"):
        Witness(tmp_path / "w")
    (tmp_path / "w" / "witness.key").chmod(0o600)
    (tmp_path / "w" / "witness.vkey").write_text(SigningKey.generate("w.example").witness.text)
    with pytest.raises(LedgerError, match="isn't the key of"):
        Witness(tmp_path / "w")
    with pytest.raises(LedgerError, match="holds no witness"):
        Witness(tmp_path)


# ------------------------------------------------------------------------------------------------------------- HTTP


@pytest.fixture
def url(witness: Witness) -> Iterator[str]:
    with WitnessServer(witness) as server:
        thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


def test_a_witness_over_http(ledger: Path, witness: Witness, url: str, tmp_path: Path) -> None:
    send = over_http(url + "/")
    ask_witness(ledger, witness.key, send)
    assert verify_ledger(ledger, witnesses=trusted(witness)).evidence_level.startswith("L1")
    assert send(b"nonsense")[0] == 400
    assert send(b"x" * ((1 << 17) + 1))[0] == 400
    assert over_http(url + "/elsewhere")(b"")[0] == 404
    with pytest.raises(ForkError):
        ask_witness(forked(ledger, 9), witness.key, send)
    (memory,) = (tmp_path / "witness" / "logs").glob("*/checkpoint")
    memory.write_text("nothing")
    assert send(request_of(ledger))[0] == 500


def test_addresses_of_witnesses(witness: Witness) -> None:
    assert witness_and_url(f" {witness.key.text}  http://localhost:1 ") == (witness.key, "http://localhost:1")
    for wrong in (
        witness.key.text,
        f"{witness.key.text} file:///etc/passwd",
        f"{witness.key.text} localhost:80",
        "x http://y",
    ):
        with pytest.raises(LedgerError):
            witness_and_url(wrong)
    with pytest.raises(OSError, match="refused"):
        over_http("http://127.0.0.1:1")(b"")


# --------------------------------------------------------------------------------------------------------- tampering


@pytest.mark.long
def test_random_tamperings_of_a_cosigned_note(ledger: Path, witness: Witness, tmp_path: Path) -> None:
    """2,000 of them: ours refuses or counts nobody exactly where the outside reader does."""
    draw = random.Random(16)
    ask_witness(ledger, witness.key, witness.send)
    second = witness_at(tmp_path / "second", "second.example")
    ask_witness(ledger, second.key, second.send)
    path = ledger / FOLDER / str(verify_ledger(ledger).size)
    note = path.read_bytes()
    num_found = 0
    for _ in range(2000):
        changed = bytearray(note)
        deed = draw.randrange(4)
        place = draw.randrange(len(changed))
        if deed == 0:
            changed[place] ^= 1 << draw.randrange(8)
        elif deed == 1:
            del changed[place : place + draw.randrange(1, 40)]
        elif deed == 2:
            changed[place:place] = changed[: draw.randrange(1, 60)]
        else:
            lines = bytes(changed).splitlines(keepends=True)
            draw.shuffle(lines)
            changed = bytearray(b"".join(lines))
        if bytes(changed) == note:
            continue
        try:
            counted = len(cosignatures(bytes(changed), [witness.key, second.key]))
        except TamperError:
            counted = 0
        num_found += counted < 2
        expected = sum(_outside(bytes(changed), one) for one in (witness, second))
        assert counted <= expected
        if counted == 2:
            # What it says is unchanged: lines in another order, or one more of somebody else's.
            assert bytes(changed).partition(b"\n\n")[0] == note.partition(b"\n\n")[0]
    assert num_found > 1500


def _outside(note: bytes, witness: Witness) -> bool:
    try:
        return cosigned_at(note, witness.key.text) is not None
    except (ValueError, IndexError):
        return False


def test_a_note_in_the_wrong_place_or_of_somebody_else_is_found(ledger: Path, witness: Witness) -> None:
    ask_witness(ledger, witness.key, witness.send)
    (path,) = (ledger / FOLDER).iterdir()
    path.rename(path.with_name("3"))
    with pytest.raises(TamperError, match="name of another size"):
        verify_ledger(ledger)
    (ledger / FOLDER / "3").rename(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], *lines[5:]]))  # without the operator's signature
    with pytest.raises(TamperError, match="isn't signed by the operator"):
        verify_ledger(ledger, witnesses=trusted(witness))


# ----------------------------------------------------------------------------------------------------------- crashes


@pytest.mark.parametrize("before", ["answer", "keep"])
def test_killed_between_checkpoint_and_cosignature(ledger: Path, tmp_path: Path, before: str) -> None:
    """The witness remembers or the ledger keeps, and the other doesn't know yet: asking again mends it."""
    create_witness(tmp_path / "w", "w.example")
    code = f"""
import os, signal
from pathlib import Path
from cosmati.ledger import cosigned
from cosmati.ledger.reader import read_verifier_key
from cosmati.ledger.witness import Witness
ledger, witness = Path({str(ledger)!r}), Witness(Path({str(tmp_path / "w")!r}))
witness.trust(read_verifier_key(ledger))
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if {before!r} == "keep":
    cosigned.keep_cosigned = die
cosigned.ask_witness(ledger, witness.key, witness.send if {before!r} == "keep" else die)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert result.returncode == -signal.SIGKILL
    assert not (ledger / FOLDER).exists()
    witness = Witness(tmp_path / "w")
    go_on(ledger, range(5, 7))
    ask_witness(ledger, witness.key, witness.send)
    assert verify_ledger(ledger, witnesses=trusted(witness)).evidence_level.startswith("L1")


def test_of_many_cosignatures_of_one_witness_the_first_and_the_last_stay(ledger: Path, tmp_path: Path) -> None:
    clock = Clock(1000)
    witness = witness_at(tmp_path / "w", now=clock)
    for _ in range(5):
        ask_witness(ledger, witness.key, witness.send)
        clock.seconds += 1000
    (path,) = (ledger / FOLDER).iterdir()
    assert path.read_text().count(witness.key.name) == 2
    assert cosignatures(path.read_bytes(), [witness.key])[0].time == 1000


def test_a_connection_stays_open_but_after_what_is_not_read(url: str) -> None:
    connection = HTTPConnection(url.removeprefix("http://"), timeout=10)
    asked = ("/add-checkpoint", 400, True), ("/add-checkpoint", 400, True), ("/elsewhere", 404, False)
    for path, status, stays in asked:
        connection.request("POST", path, b"no request")
        answer = connection.getresponse()
        answer.read()
        assert (answer.status, answer.getheader("Connection") != "close") == (status, stays)
        assert (connection.sock is not None) == stays
    connection.close()
