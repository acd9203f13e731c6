"""A witness cosigns what goes on from the largest tree that it remembers, and remembers it before it says so."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.cosignature import cosignatures
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import TreeHead, VerifierKey, checkpoint_text, unsigned_checkpoint
from cosmati.ledger.witness import Answer, Witness, create_witness
from tests.storage.rfc6962 import mth

from .outside_witness import consistency_proof

ORIGIN = "log.example"
KEY, OTHER, STRANGER = (SigningKey.generate(name) for name in (ORIGIN, "other.example", ORIGIN))
DATA = [b"entry %d" % number for number in range(9)]
PLAIN = "text/plain; charset=utf-8"


class Clock:
    """A clock that stands where it's put."""

    seconds = 1000.9

    def __call__(self) -> float:
        return self.seconds


def head_of(size: int, data: list[bytes] = DATA) -> TreeHead:
    return TreeHead(size, mth(data[:size]))


def note_of(size: int, key: SigningKey = KEY, data: list[bytes] = DATA) -> str:
    return key.sign_note(checkpoint_text(key.name, head_of(size, data)))


def request(old: int, size: int, key: SigningKey = KEY, data: list[bytes] = DATA) -> bytes:
    proof = consistency_proof(old, data[:size]) if 0 < old < size else []
    lines = [f"old {old}", *(base64.b64encode(one).decode() for one in proof), "", note_of(size, key, data)]
    return "\n".join(lines).encode()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def witness(tmp_path: Path, clock: Clock) -> Witness:
    create_witness(tmp_path / "w", "w.example")
    found = Witness(tmp_path / "w", now=clock)
    found.trust(KEY.verifier)
    return found


def memory(place: Path) -> tuple[int, int]:
    """Size and time of what lies on the disk."""
    [path] = (place / "w" / "logs").rglob("checkpoint")
    note = path.read_bytes()
    [given] = cosignatures(note, [Witness(place / "w").key])
    return unsigned_checkpoint(note)[2].size, given.time


def test_a_new_witness_has_a_folder_of_its_own(tmp_path: Path) -> None:
    key = create_witness(tmp_path / "deep" / "w", "w.example")
    folder = tmp_path / "deep" / "w"
    assert (folder / "witness.vkey").read_text() == key.text + "\n"
    assert (key.name, Witness(folder).key) == ("w.example", key)
    assert (folder / "witness.key").stat().st_mode & 0o077 == 0
    (tmp_path / "empty").mkdir()
    create_witness(tmp_path / "empty", "w.example")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for place in (folder, tmp_path / "full"):
        with pytest.raises(LedgerError, match=r"isn't empty\. Name a new folder"):
            create_witness(place, "w.example")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["x"]
    with pytest.raises(LedgerError, match="can't name"):
        create_witness(tmp_path / "new", "no name")


def test_a_folder_without_a_witness_or_with_another_key_is_told(tmp_path: Path) -> None:
    for data in (None, b"\xff"):
        if data is not None:
            (tmp_path / "witness.vkey").write_bytes(data)
        with pytest.raises(LedgerError, match=r"holds no witness: .*cosmati ledger witness init"):
            Witness(tmp_path)
    key, other = create_witness(tmp_path / "w", "w.example"), create_witness(tmp_path / "v", "w.example")
    (tmp_path / "w" / "witness.vkey").write_text(other.text)
    with pytest.raises(LedgerError, match=r"isn't the key of .*Restore the folder") as caught:
        Witness(tmp_path / "w")
    assert other.text in str(caught.value)
    (tmp_path / "w" / "witness.vkey").write_text(key.text)
    (tmp_path / "w" / "witness.key").chmod(0o644)
    with pytest.raises(LedgerError, match=r"The witness key .* has mode 0644"):
        Witness(tmp_path / "w")


def test_it_knows_the_keys_that_it_was_given_each_once(witness: Witness, tmp_path: Path) -> None:
    assert witness.knows("unknown") == ()
    for key in (KEY, STRANGER, KEY, OTHER):
        witness.trust(key.verifier)
    assert witness.knows(ORIGIN) == (KEY.verifier, STRANGER.verifier)
    assert Witness(tmp_path / "w").knows(OTHER.name) == (OTHER.verifier,)
    files = sorted((tmp_path / "w" / "logs").rglob("keys"))
    assert len(files) == 2
    assert {path.read_text() for path in files} == {
        f"{KEY.verifier.text}\n{STRANGER.verifier.text}\n",
        f"{OTHER.verifier.text}\n",
    }


def test_each_tree_that_goes_on_is_cosigned_at_its_time_and_remembered(
    witness: Witness, tmp_path: Path, clock: Clock
) -> None:
    sizes = [1, 1, 3, 4, 4, 8, 9]
    for old, size in zip([0, *sizes], sizes, strict=False):
        clock.seconds += 1
        answer = witness.answer(request(old, size))
        assert (answer.status, answer.content_type) == (200, PLAIN)
        [given] = cosignatures((note_of(size) + answer.text).encode(), [witness.key])
        assert given.time == int(clock.seconds)
        assert memory(tmp_path) == (size, int(clock.seconds))
    status, data = witness.send(request(9, 9))
    [given] = cosignatures(note_of(9).encode() + data, [witness.key])
    assert (status, given.time) == (200, 1007)


def test_an_empty_log_is_a_beginning_too(witness: Witness, tmp_path: Path) -> None:
    assert witness.answer(request(0, 0)).status == 200
    assert witness.answer(request(0, 0)).status == 200
    assert witness.answer(request(0, 2)).status == 200
    assert memory(tmp_path)[0] == 2


def test_what_does_not_go_on_is_refused_and_changes_no_memory(witness: Witness, tmp_path: Path) -> None:
    witness.answer(request(0, 4))
    forked = [b"another", *DATA[1:]]
    unknown = request(4, 4).replace(note_of(4).encode(), note_of(4, OTHER).encode())
    no_proof = request(4, 8).partition(b"\n")[0] + b"\n\n" + note_of(8).encode()
    for given, status, said in (
        (request(5, 4), 400, "The old size 5 is larger than that of the checkpoint, 4."),
        (b"old 4\n\nno note\n", 400, "no signed note"),
        (unknown, 404, f"doesn't know the log {OTHER.name}"),
        (request(4, 5, STRANGER), 403, f"isn't signed by a key that this witness knows for {ORIGIN}"),
        (request(3, 5), 409, "4"),
        (request(0, 5), 409, "4"),
        (request(4, 4, KEY, forked), 409, "4"),
        (request(4, 8, KEY, forked), 422, "doesn't lead from the 4 entries known here"),
        (no_proof, 422, "doesn't lead from"),
    ):
        answer = witness.answer(given)
        assert answer.status == status
        assert said in answer.text
        assert answer.text.endswith("\n")
        assert answer.content_type == ("text/x.tlog.size" if status == 409 else PLAIN)
        assert witness.send(given) == (status, answer.text.encode())
    assert witness.answer(request(3, 5)) == Answer(409, "4\n", "text/x.tlog.size")
    assert memory(tmp_path) == (4, 1000)
    witness.trust(STRANGER.verifier)
    assert witness.answer(request(4, 5, STRANGER)).status == 200, "the log has changed its key"


def test_a_clock_that_went_back_says_nothing(witness: Witness, tmp_path: Path, clock: Clock) -> None:
    witness.answer(request(0, 2))
    clock.seconds = 999.9
    answer = witness.answer(request(2, 3))
    assert answer.status == 500
    assert "says 999, and said 1000 before" in answer.text
    assert memory(tmp_path) == (2, 1000)
    clock.seconds = 1000.0
    assert witness.answer(request(2, 3)).status == 200


def test_a_memory_that_it_has_not_signed_is_damaged(witness: Witness, tmp_path: Path) -> None:
    witness.answer(request(0, 2))
    [path] = (tmp_path / "w" / "logs").rglob("checkpoint")
    good = path.read_bytes()
    for data in (note_of(2).encode(), good.replace(b"\n2\n", b"\n1\n"), b""):
        path.write_bytes(data)
        with pytest.raises(TamperError):
            witness.answer(request(2, 3))
    path.write_bytes(note_of(2).encode())
    with pytest.raises(TamperError, match=r"isn't cosigned by this witness\. Restore its folder") as caught:
        witness.answer(request(2, 3))
    assert str(path) in str(caught.value)
    path.write_bytes(good)
    assert witness.answer(request(2, 3)).status == 200


def test_it_remembers_before_it_says_so(witness: Witness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("cosmati.ledger.witness.replace_file", fails)
        with pytest.raises(OSError, match="No space left"):
            witness.answer(request(0, 2))
    assert not list((tmp_path / "w" / "logs").rglob("checkpoint"))
    assert isinstance(witness.knows(ORIGIN)[0], VerifierKey)
    assert witness.answer(request(0, 2)).status == 200
