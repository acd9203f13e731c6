"""A note is a text, an empty line and signatures as the specification has them, and nothing else is taken for one."""

from __future__ import annotations

import base64
import hashlib

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import (
    SignatureLine,
    TreeHead,
    VerifierKey,
    check_key_name,
    check_note,
    check_signature,
    checkpoint_text,
    decode_base64,
    parse_checkpoint,
    read_checkpoint_text,
    sign_note,
    signature_line,
    signature_lines,
    unsigned_checkpoint,
    verify_note,
)

NAME, DASH = "example.com/log", "\u2014"
KEY, OTHER = SigningKey.generate(NAME), SigningKey.generate("other.example")
HEAD = TreeHead(12, hashlib.sha256(b"root").digest())
ROOT = base64.b64encode(HEAD.root).decode()
TEXT = checkpoint_text(NAME, HEAD)
NOTE = KEY.sign_note(TEXT)


def line_of(name: str, data: bytes) -> str:
    return f"{DASH} {name} {base64.b64encode(data).decode()}\n"


# --------------------------------------------------------------------------------------------------------------- names


def test_a_name_has_a_character_and_none_that_would_end_it() -> None:
    for point in range(0x180):
        name = f"a{chr(point)}b"
        if point < 0x20 or chr(point).isspace() or chr(point) == "+":
            with pytest.raises(LedgerError, match="can't name a log or a key"):
                check_key_name(name)
            with pytest.raises(LedgerError, match="can't name"):
                VerifierKey(name, bytes(32))
        else:
            check_key_name(name)
    for name in ("", "\u2028", "x\u3000", "\ud800"):
        with pytest.raises(LedgerError, match="no space, plus or control"):
            check_key_name(name)
    check_key_name("é/\u4e16")


def test_a_key_is_its_name_its_id_and_its_bytes() -> None:
    public = KEY.verifier.public
    own = hashlib.sha256(NAME.encode() + b"\n\x01" + public).digest()[:4]
    assert KEY.verifier.key_id == own
    assert KEY.verifier.text == f"{NAME}+{own.hex()}+{base64.b64encode(bytes([1]) + public).decode()}"
    assert VerifierKey.parse(f" \n{KEY.verifier.text}\t\n") == KEY.verifier
    assert VerifierKey.parse(KEY.verifier.text).kind == b"\x01"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x01" + bytes(31), "isn't an Ed25519 key of the kind 01"),
        (b"\x01" + bytes(33), "isn't an Ed25519 key of the kind 01"),
        (b"\x04" + bytes(32), "isn't an Ed25519 key of the kind 01"),
        (b"", "isn't an Ed25519 key of the kind 01"),
    ],
)
def test_a_key_of_another_kind_or_length_is_refused(data: bytes, said: str) -> None:
    own = hashlib.sha256(NAME.encode() + b"\n" + data).digest()[:4]
    with pytest.raises(LedgerError, match=said) as caught:
        VerifierKey.parse(f"{NAME}+{own.hex()}+{base64.b64encode(data).decode()}")
    assert "name+id+base64" in str(caught.value)


def test_a_key_whose_parts_do_not_go_together_is_refused() -> None:
    name, own, data = KEY.verifier.text.split("+", 2)
    for text, said in (
        (f"{name}+{own[::-1] if own[::-1] != own else '00000000'}+{data}", "its id doesn't belong to its name and key"),
        (f"other+{own}+{data}", "its id doesn't belong"),
        (f"{name}+{own.upper() if own.upper() != own else own + '0'}+{data}", "its id doesn't belong"),
        (f"a b+{own}+{data}", "can't name"),
        (f"+{own}+{data}", "can't name"),
        (f"{name}+{own}", "not enough values"),
        (f"{name}+{own}+{data}+", "base64"),
        (f"{name}+{own}+{data[:-1]}", "base64"),
    ):
        with pytest.raises(LedgerError, match="is no verifier key: ") as caught:
            VerifierKey.parse(f" {text}\n")
        assert said in str(caught.value)
    with pytest.raises(LedgerError) as caught:
        VerifierKey.parse("x" * 500)
    assert len(str(caught.value)) < 400, "what somebody else wrote isn't told at any length"


# ---------------------------------------------------------------------------------------------------------- signatures


def test_a_note_is_what_was_signed_an_empty_line_and_a_signature() -> None:
    signed = list[bytes]()

    def sign(data: bytes) -> bytes:
        signed.append(data)
        return b"s" * 64

    note = sign_note("text\n", KEY.verifier, sign)
    assert signed == [b"text\n"]
    assert note == "text\n\n" + line_of(NAME, KEY.verifier.key_id + b"s" * 64)
    assert signature_line(KEY.verifier, b"abc") == line_of(NAME, KEY.verifier.key_id + b"abc")


def test_each_signature_says_whose_it_is() -> None:
    note = NOTE + line_of("w", b"\0\1\2\3x") + OTHER.sign_note(TEXT).rpartition("\n\n")[2]
    first, second, third = signature_lines(note.encode())
    assert second == SignatureLine(line_of("w", b"\0\1\2\3x"), "w", b"\0\1\2\3", b"x")
    assert [one.text for one in (first, second, third)] == note.rpartition("\n\n")[2].splitlines(keepends=True)
    assert [one.is_of(KEY.verifier) for one in (first, second, third)] == [True, False, False]
    assert [one.is_of(OTHER.verifier) for one in (first, second, third)] == [False, False, True]
    assert not first._replace(name="other").is_of(KEY.verifier)
    assert not first._replace(key_id=bytes(4)).is_of(KEY.verifier)
    assert verify_note(note.encode(), KEY.verifier) == verify_note(note.encode(), OTHER.verifier) == TEXT


@pytest.mark.parametrize(
    "line",
    [
        f"- {NAME} AAAAAAA=",
        f"{DASH}{NAME} AAAAAAA=",
        f"{DASH}  AAAAAAA=",
        f"{DASH} {NAME}",
        f"{DASH} {NAME} ",
        f"{DASH} {NAME} AAAAAA==",
        f"{DASH} {NAME} AAAAAAA= ",
        f"{DASH} {NAME} AAAAAAAé",
        "",
    ],
)
def test_a_line_that_is_no_signature_is_malformed(line: str) -> None:
    note = f"{NOTE}{line}\n".encode()
    if line:
        with pytest.raises(TamperError, match="malformed signature line"):
            signature_lines(note)
        with pytest.raises(TamperError, match="malformed signature line"):
            verify_note(note, KEY.verifier)
    else:
        with pytest.raises(TamperError):
            verify_note(note, KEY.verifier)


def test_a_signature_of_one_byte_after_its_id_is_one() -> None:
    assert signature_lines(f"t\n\n{DASH} {NAME} AAAAAAE=\n".encode())[0][2:] == (bytes(4), b"\1")


def test_every_signature_of_the_key_has_to_be_right_and_there_has_to_be_one() -> None:
    wrong = signature_line(KEY.verifier, KEY.private.sign(b"another text"))
    right = NOTE.rpartition("\n\n")[2]
    for lines in (wrong, wrong + right, right + wrong):
        with pytest.raises(TamperError, match=f"signature of {NAME} doesn't match"):
            verify_note(f"{TEXT}\n{lines}".encode(), KEY.verifier)
    assert verify_note(f"{TEXT}\n{right}{right}".encode(), KEY.verifier) == TEXT
    with pytest.raises(TamperError, match=f"isn't signed by {OTHER.name}") as caught:
        verify_note(NOTE.encode(), OTHER.verifier)
    assert OTHER.verifier.key_id.hex() in str(caught.value)
    check_signature(KEY.private.sign(b"m"), b"m", KEY.verifier)
    for signature, message in ((KEY.private.sign(b"m"), b"n"), (KEY.private.sign(b"m")[:-1], b"m"), (b"", b"m")):
        with pytest.raises(TamperError, match="doesn't match"):
            check_signature(signature, message, KEY.verifier)


def test_what_is_no_note_is_refused_by_what_is_wrong() -> None:
    for note, said in (
        (b"\xff" + NOTE.encode(), "isn't UTF-8"),
        (TEXT.encode(), "no signed note"),
        (NOTE[:-1].encode(), "no signed note"),
        (b"", "no signed note"),
        (NOTE.replace("12", "1\x1f2").encode(), "control character"),
        (NOTE.replace("12", "1\r2").encode(), "control character"),
        (NOTE.encode() + b"\0\n", "control character"),
    ):
        with pytest.raises(TamperError, match=said):
            verify_note(note, KEY.verifier)
        with pytest.raises(LedgerError, match=r"^The file can't be read: .*A `checkpoint` file") as caught:
            check_note(note, "The file")
        assert said in str(caught.value)
        assert not isinstance(caught.value, TamperError), "a file that was given by mistake is nobody's tampering"
    check_note(NOTE.encode(), "The file")
    assert verify_note(KEY.sign_note("a \x7f\n").encode(), KEY.verifier) == "a \x7f\n"
    assert verify_note(KEY.sign_note("a\n\nb\n").encode(), KEY.verifier) == "a\n\nb\n"


def test_a_note_has_a_mebibyte_at_most() -> None:
    rest = len(KEY.sign_note("\n")) + NOTE.count(DASH) * 2
    text = "x" * ((1 << 20) - rest) + "\n"
    note = KEY.sign_note(text).encode()
    assert len(note) == 1 << 20
    assert verify_note(note, KEY.verifier) == text
    with pytest.raises(TamperError, match="no signed note"):
        verify_note(KEY.sign_note("x" + text).encode(), KEY.verifier)


def test_base64_is_only_what_an_encoder_writes() -> None:
    for size in range(9):
        data = bytes(range(250, 250 + size)) if size < 6 else bytes(size)
        assert decode_base64(base64.b64encode(data).decode()) == data
    for text in ("AA==\n", "A A==", "AB==", "AA=", "AA", "A", "AA-_", "=", "AAAA="):
        with pytest.raises(ValueError, match="base64"):
            decode_base64(text)
    with pytest.raises(ValueError, match="it isn't base64"):
        decode_base64("é")
    with pytest.raises(ValueError, match="its base64 isn't canonical"):
        decode_base64("AB==")


# --------------------------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_has_a_name_a_size_and_a_root_of_32_bytes() -> None:
    assert checkpoint_text(NAME, HEAD) == f"{NAME}\n12\n{ROOT}\n"
    assert read_checkpoint_text(TEXT) == (NAME, HEAD)
    assert read_checkpoint_text(TEXT + "more\nand more\n") == (NAME, HEAD)
    assert read_checkpoint_text(f"{NAME}\n0\n{ROOT}\n")[1].size == 0
    for text, said in (
        (f"{NAME}\n12\n", "not enough values"),
        (f"{NAME}\n12\n{ROOT}", "not enough values"),
        (f"{NAME}\nx\n{ROOT}\n", "invalid literal"),
        (f"{NAME}\n12\n{ROOT[:-1]}\n", "base64"),
        (f"{NAME}\n012\n{ROOT}\n", "not as specified"),
        (f"{NAME}\n +12\n{ROOT}\n", "not as specified"),
        (f"{NAME}\n-1\n{ROOT}\n", "not as specified"),
        (f"\n12\n{ROOT}\n", "not as specified"),
        (f"{TEXT}\nmore\n", "not as specified"),
        (f"{NAME}\n12\n{base64.b64encode(bytes(31)).decode()}\n", "not as specified"),
        (f"{NAME}\n12\n{base64.b64encode(bytes(33)).decode()}\n", "not as specified"),
    ):
        with pytest.raises(TamperError, match="The note is no checkpoint: ") as caught:
            read_checkpoint_text(text)
        assert said in str(caught.value)


def test_a_checkpoint_is_of_the_log_that_its_key_names() -> None:
    assert parse_checkpoint(NOTE.encode(), KEY.verifier) == HEAD
    other = KEY.sign_note(checkpoint_text("other", HEAD))
    with pytest.raises(TamperError, match=f"is of the log 'other', not of '{NAME}'"):
        parse_checkpoint(other.encode(), KEY.verifier)
    stranger = SigningKey(NAME, Ed25519PrivateKey.generate())
    with pytest.raises(TamperError, match="isn't signed by"):
        parse_checkpoint(NOTE.encode(), stranger.verifier)


def test_a_checkpoint_may_be_read_before_anybodys_signature_is_checked() -> None:
    unchecked = NOTE.rpartition("\n\n")[0] + "\n\n" + line_of("nobody", bytes(70))
    assert unsigned_checkpoint(unchecked.encode()) == (TEXT, NAME, HEAD)
    for text in ("no checkpoint\n", TEXT + "\n"):
        with pytest.raises(TamperError):
            unsigned_checkpoint(KEY.sign_note(text).encode())
    with pytest.raises(TamperError, match="no signed note"):
        unsigned_checkpoint(TEXT.encode())
