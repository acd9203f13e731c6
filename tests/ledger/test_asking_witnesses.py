"""What a witness is sent and what each answer means, and what is kept of its cosignatures: by scripted answers."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cosmati.errors import LedgerError, RefutedError, TamperError
from cosmati.ledger.consistency import is_consistent
from cosmati.ledger.cosignature import Cosignature, WitnessKey
from cosmati.ledger.cosigned import (
    FOLDER,
    CosignedHead,
    ForkError,
    WitnessRefusedError,
    _size_of,
    ask_witness,
    cosigned_heads,
    keep_cosigned,
    refuse_contradictions,
    signed_by_one_of,
)
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import TreeHead, checkpoint_text, parse_checkpoint

from .ledgers import ORIGIN
from .test_verify import KEY, items, write_signed

ONE, TWO = SigningKey.generate("one.example"), SigningKey.generate("two.example")
Answer = tuple[int, bytes]


class Script:
    """A witness that gives answers in turn, and keeps what it was asked."""

    def __init__(self, *answers: Answer | Callable[[bytes], Answer]) -> None:
        self.answers, self.asked = list(answers), list[bytes]()

    def __call__(self, request: bytes) -> Answer:
        self.asked.append(request)
        answer = self.answers.pop(0)
        return answer(request) if callable(answer) else answer

    @property
    def old(self) -> list[int]:
        """The sizes from which it was shown the way."""
        return [int(one.partition(b"\n")[0].removeprefix(b"old ")) for one in self.asked]


def cosigns(request: bytes, key: SigningKey = ONE, time: int = 100) -> Answer:
    text = request.partition(b"\n\n")[2].decode().partition("\n\n")[0] + "\n"
    return 200, key.cosign(text, time).encode()


def said(size: int) -> Answer:
    return 409, f"{size}\n".encode()


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    write_signed(tmp_path / "l", items(6))
    return tmp_path / "l"


def head_of(ledger: Path) -> TreeHead:
    return parse_checkpoint((ledger / "checkpoint").read_bytes(), KEY.verifier)


def note_of(size: int, root: bytes = bytes(32), *lines: str) -> bytes:
    return (KEY.sign_note(checkpoint_text(ORIGIN, TreeHead(size, root))) + "".join(lines)).encode()


def keep(ledger: Path, size: int, key: SigningKey, root: bytes = bytes(32), time: int = 50) -> None:
    text = checkpoint_text(ORIGIN, TreeHead(size, root))
    keep_cosigned(ledger, note_of(size, root).decode(), key.cosign(text, time), key.witness)


# ----------------------------------------------------------------------------------------------------------- asking


def test_a_witness_is_sent_what_it_knows_the_way_from_there_and_the_checkpoint(tmp_path: Path, ledger: Path) -> None:
    head, note = head_of(ledger), (ledger / "checkpoint").read_bytes()
    script = Script(cosigns)
    found = ask_witness(ledger, ONE.witness, script)
    assert script.asked == [b"old 0\n\n" + note]
    assert found == CosignedHead(head, (Cosignature(ONE.witness, 100),), note)
    write_signed(tmp_path / "short", items(2))
    short = head_of(tmp_path / "short")
    script = Script(said(short.size), cosigns)
    ask_witness(ledger, ONE.witness, script)
    assert script.old == [head.size, short.size]  # it was kept that it knows all of it
    first, *proof = script.asked[1].partition(b"\n\n")[0].split(b"\n")
    assert first == b"old 3"
    assert script.asked[1].endswith(b"\n\n" + note)
    assert is_consistent(short, head, [base64.b64decode(one, validate=True) for one in proof])


@pytest.mark.parametrize(
    ("kept", "old"), [([], 0), ([2], 2), ([4, 2], 4), ([2, 7], 7), ([2, 8], 2), ([8], 0), ([10, 9, 5], 5)]
)
def test_it_begins_with_the_largest_that_this_witness_cosigned_and_the_checkpoint_covers(
    ledger: Path, kept: list[int], old: int
) -> None:
    for size in kept:
        keep(ledger, size, ONE, root=head_of(ledger).root if size == 7 else bytes(32))
    for size in (3, 6):
        keep(ledger, size, TWO)
    script = Script(cosigns)
    assert ask_witness(ledger, ONE.witness, script).head.size == 7
    assert script.old == [old]


@pytest.mark.parametrize("size", [0, 1, 6, 7])
def test_a_witness_that_knows_another_size_is_shown_the_way_from_that(ledger: Path, size: int) -> None:
    script = Script(said(size), cosigns)
    assert ask_witness(ledger, ONE.witness, script).head == head_of(ledger)
    assert script.old == [0, size]
    assert cosigned_heads(ledger, [ONE.witness])[0].cosignatures == (Cosignature(ONE.witness, 100),)


def test_a_witness_that_knows_more_than_the_checkpoint_covers_was_shown_a_later_one_or_the_log_went_back(
    ledger: Path,
) -> None:
    with pytest.raises(ForkError) as caught:
        ask_witness(ledger, ONE.witness, Script(said(8)))
    assert str(caught.value).startswith("Rolled back: one.example has cosigned 8 entries of this log, and this ")
    assert "checkpoint covers 7." in str(caught.value)

    def goes_on(steps: int) -> Callable[[bytes], Answer]:
        def answer(_: bytes) -> Answer:
            write_signed(ledger, items(steps))
            return said(8)

        return answer

    script = Script(goes_on(7), cosigns)
    assert ask_witness(ledger, ONE.witness, script).head.size == 8
    assert script.old == [0, 8]
    assert script.asked[1].endswith((ledger / "checkpoint").read_bytes())


def test_no_proof_and_another_tree_of_the_same_size_are_forks(ledger: Path) -> None:
    keep(ledger, 4, ONE)
    scripts = {4: [(422, b"")], 5: [said(5), (422, b"")], 7: [said(7), said(7)]}
    for size, answers in scripts.items():
        with pytest.raises(ForkError) as caught:
            ask_witness(ledger, ONE.witness, Script(*answers))
        assert str(caught.value).startswith(
            f"Forked: the {size} entries of this log that one.example has cosigned aren'"
        )
        assert isinstance(caught.value, RefutedError)
        assert isinstance(caught.value, WitnessRefusedError)


@pytest.mark.parametrize("answers", [(7, 6), (6, 6), (6, 7), (5, 9)])
def test_who_is_asked_by_somebody_else_meanwhile_is_busy(ledger: Path, answers: tuple[int, int]) -> None:
    with pytest.raises(WitnessRefusedError, match=r"one\.example doesn't cosign \(409\): ") as caught:
        ask_witness(ledger, ONE.witness, Script(*map(said, answers)))
    assert not isinstance(caught.value, RefutedError)


@pytest.mark.parametrize("status", [201, 404, 410, 421, 423, 500])
def test_any_other_status_is_told_with_the_beginning_of_its_answer(ledger: Path, status: int) -> None:
    with pytest.raises(WitnessRefusedError) as caught:
        ask_witness(ledger, ONE.witness, Script((status, b"  \xff" + b"x" * 400 + b"\n")))
    assert str(caught.value) == f"The witness one.example doesn't cosign ({status}): \ufffd{'x' * 299}"
    assert not (ledger / FOLDER).exists()


def test_who_answers_nothing_is_told_both_times(ledger: Path) -> None:
    def silent(_: bytes) -> Answer:
        raise ConnectionError("nobody")

    for script in (Script(silent), Script(said(3), silent)):
        with pytest.raises(WitnessRefusedError, match=r"one\.example doesn't answer: nobody\. Ask it again") as caught:
            ask_witness(ledger, ONE.witness, script)
        assert isinstance(caught.value.__cause__, ConnectionError)
        assert not isinstance(caught.value, RefutedError)


@pytest.mark.parametrize(("answer", "size"), [(b"0", 0), (b"12\n", 12), (b"9" * 20 + b"\n", 10**20 - 1)])
def test_a_size_is_a_line_of_digits(answer: bytes, size: int) -> None:
    assert _size_of(answer, ONE.witness) == size


@pytest.mark.parametrize("answer", [b"", b"\n", b"1\n\n", b"-1", b" 1", b"1.0", "٣".encode(), b"1\xff", b"1" * 21])
def test_what_is_no_size_is_told(ledger: Path, answer: bytes) -> None:
    text = repr(answer.decode("ascii", "replace").removesuffix("\n"))[:40]
    for script in (Script((409, answer)), Script(said(7), (409, answer))):
        with pytest.raises(WitnessRefusedError) as caught:
            ask_witness(ledger, ONE.witness, script)
        assert str(caught.value) == f"The witness one.example answers with {text} where it should give a size."


def test_of_an_answer_the_first_line_of_the_witness_itself_counts(ledger: Path) -> None:
    def several(request: bytes) -> Answer:
        lines = [cosigns(request, TWO)[1], cosigns(request, ONE, 200)[1], cosigns(request, ONE, 150)[1]]
        return 200, b"".join(lines)

    found = ask_witness(ledger, ONE.witness, Script(several))
    assert found.cosignatures == (Cosignature(ONE.witness, 200),)
    (kept,) = cosigned_heads(ledger, [ONE.witness, TWO.witness])
    assert kept.cosignatures == found.cosignatures
    assert kept.note.startswith((ledger / "checkpoint").read_bytes())
    assert kept.note.count(b"\n\xe2\x80\x94 ") == 2


def test_an_answer_without_a_cosignature_of_its_own_is_told_as_it_came(ledger: Path) -> None:
    def elsewhere(_: bytes) -> Answer:
        return 200, ONE.cosign(checkpoint_text(ORIGIN, TreeHead(7, bytes(32))), 5).encode()

    for one in (lambda request: cosigns(request, TWO), (200, b"ok" * 200), (200, b""), elsewhere):
        with pytest.raises(WitnessRefusedError, match="answers with no cosignature of its own: b'") as caught:
            ask_witness(ledger, ONE.witness, Script(one))
        assert len(str(caught.value)) < 300
        assert str(caught.value).endswith(". Check its key.")
        assert not (ledger / FOLDER).exists()


# ---------------------------------------------------------------------------------------------------------- keeping


def test_the_first_and_the_latest_of_each_witness_stay_after_those_of_others(tmp_path: Path) -> None:
    text = checkpoint_text(ORIGIN, TreeHead(5, bytes(32)))
    note = note_of(5).decode()
    signed = note.removeprefix(text + "\n")

    def lines() -> str:
        return (tmp_path / FOLDER / "5").read_text().removeprefix(text + "\n")

    one, two = ([key.cosign(text, time) for time in (10, 20, 30)] for key in (ONE, TWO))
    told = []
    for key, line in ((ONE, one[0]), (ONE, one[1]), (TWO, two[0]), (ONE, one[2]), (TWO, two[1]), (TWO, two[2])):
        keep_cosigned(tmp_path, note, line, key.witness)
        told.append(lines())
    assert told == [
        signed + one[0],
        signed + one[0] + one[1],
        signed + one[0] + one[1] + two[0],
        signed + two[0] + one[0] + one[2],
        signed + one[0] + one[2] + two[0] + two[1],
        signed + one[0] + one[2] + two[0] + two[2],
    ]


def test_another_checkpoint_of_the_same_size_is_not_put_in_its_place(tmp_path: Path) -> None:
    keep(tmp_path, 5, ONE)
    before = (tmp_path / FOLDER / "5").read_bytes()
    with pytest.raises(TamperError, match="another checkpoint of the same size: the log was rewritten"):
        keep(tmp_path, 5, ONE, root=b"1" * 32)
    assert (tmp_path / FOLDER / "5").read_bytes() == before
    keep(tmp_path, 6, ONE)
    keep(tmp_path, 5, TWO)  # the lock is free again
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["5", "6"]


def test_heads_are_read_by_size_with_the_cosignatures_of_those_who_are_asked_for(tmp_path: Path) -> None:
    assert cosigned_heads(tmp_path, [ONE.witness]) == []
    for size in (10, 9, 100):
        keep(tmp_path, size, ONE, time=size)
    keep(tmp_path, 9, TWO, time=7)
    both = cosigned_heads(tmp_path, [ONE.witness, TWO.witness])
    assert [one.head for one in both] == [TreeHead(size, bytes(32)) for size in (9, 10, 100)]
    first = (Cosignature(ONE.witness, 9), Cosignature(TWO.witness, 7))
    assert [one.cosignatures for one in both] == [
        first,
        (Cosignature(ONE.witness, 10),),
        (Cosignature(ONE.witness, 100),),
    ]
    assert [one.cosignatures for one in cosigned_heads(tmp_path, [TWO.witness])] == [first[1:], (), ()]
    assert [one.note for one in both] == [(tmp_path / FOLDER / str(one.head.size)).read_bytes() for one in both]


def test_a_file_that_does_not_hold_is_named(tmp_path: Path) -> None:
    keep(tmp_path, 5, ONE)
    good = tmp_path / FOLDER / "5"
    for name, data, why in (
        ("05", good.read_bytes(), "it has the name of another size than its own, 5"),
        ("6", good.read_bytes(), "it has the name of another size than its own, 5"),
        ("7", b"nothing", "This is no signed note"),
        ("8", note_of(8, bytes(32), ONE.cosign("another text\n", 3)), "The signature of one.example doesn't match"),
    ):
        bad = good.with_name(name)
        bad.write_bytes(data)
        with pytest.raises(TamperError) as caught:
            cosigned_heads(tmp_path, [ONE.witness])
        assert str(caught.value).startswith(f"{bad}: {why}")
        bad.unlink()
    assert len(cosigned_heads(tmp_path, [])) == 1


# ------------------------------------------------------------------------------------------------------- comparing


def seen(*by_size: tuple[int, Sequence[tuple[WitnessKey, int]]]) -> list[CosignedHead]:
    return [
        CosignedHead(TreeHead(size, b""), tuple(Cosignature(*one) for one in given), b"") for size, given in by_size
    ]


def test_a_witness_contradicts_itself_where_more_was_there_at_an_earlier_time() -> None:
    one, two = ONE.witness, TWO.witness
    refuse_contradictions(seen((3, [(one, 5), (two, 9)]), (4, [(one, 5), (two, 9)]), (6, []), (7, [(one, 6)])))
    refuse_contradictions(seen((3, [(one, 0)])))
    with pytest.raises(TamperError) as caught:
        refuse_contradictions(seen((3, [(two, 1), (one, 5)]), (4, [(two, 1)]), (6, [(two, 2), (one, 4)])))
    assert "one.example contradicts itself: 3 entries at 5, and 6 at the earlier 4." in str(caught.value)
    # It's the latest of those before that counts.
    with pytest.raises(TamperError, match="4 entries at 8, and 6 at the earlier 7"):
        refuse_contradictions(seen((3, [(one, 5)]), (4, [(one, 8)]), (6, [(one, 7)])))


def test_a_note_is_the_operators_where_any_of_the_keys_signed_it() -> None:
    note, keys = note_of(3), [SigningKey.generate(ORIGIN).verifier for _ in range(2)]
    assert signed_by_one_of(note, [*keys, KEY.verifier])
    assert signed_by_one_of(note, [KEY.verifier, *keys])
    assert signed_by_one_of(note, keys) is signed_by_one_of(note, []) is False
    assert not signed_by_one_of(b"", [KEY.verifier])


def test_who_does_not_cosign_is_no_matter_of_the_log() -> None:
    assert issubclass(WitnessRefusedError, LedgerError)
    assert not issubclass(WitnessRefusedError, RefutedError)
