from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.keys import SigningKey, create_key, load_key, load_or_create_key
from cosmati.ledger.note import TreeHead, VerifierKey, checkpoint_text, parse_checkpoint, sign_note, verify_note

NAME = "example.com/log"
HEAD = TreeHead(12, hashlib.sha256(b"root").digest())

# Vectors of Go's golang.org/x/mod/sumdb/note, which signed-note describes.
PETER = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
PETER_NOTE = (
    "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n\n"
    "\u2014 PeterNeumann "
    "x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
)


def test_a_note_of_the_go_implementation_verifies() -> None:
    key = VerifierKey.parse(PETER)
    assert key.text == PETER
    assert verify_note(PETER_NOTE.encode(), key).startswith("If you think")
    with pytest.raises(TamperError, match="doesn't match"):
        verify_note(PETER_NOTE.replace("answer", "question").encode(), key)


def test_a_checkpoint_is_origin_size_root_and_a_signature() -> None:
    key = SigningKey.generate(NAME)
    note = key.sign_note(checkpoint_text(NAME, HEAD))
    lines = note.split("\n")
    assert lines[:4] == [NAME, "12", base64.b64encode(HEAD.root).decode(), ""]
    dash, name, signature = lines[4].split(" ")
    public = key.private.public_key()
    key_id = hashlib.sha256(NAME.encode() + b"\n\x01" + public.public_bytes_raw()).digest()[:4]
    assert (dash, name, lines[5:]) == ("\u2014", NAME, [""])
    assert base64.b64decode(signature)[:4] == key_id
    public.verify(base64.b64decode(signature)[4:], "\n".join([*lines[:3], ""]).encode())
    assert parse_checkpoint(note.encode(), key.verifier) == HEAD


def test_every_changed_byte_of_a_checkpoint_is_found() -> None:
    key = SigningKey.generate(NAME)
    note = key.sign_note(checkpoint_text(NAME, HEAD)).encode()
    for position in range(len(note)):
        for mask in (1, 0x20, 0x80):
            damaged = bytearray(note)
            damaged[position] ^= mask
            with pytest.raises(TamperError):
                parse_checkpoint(bytes(damaged), key.verifier)
    for cut in range(len(note)):
        with pytest.raises(TamperError):
            parse_checkpoint(note[:cut], key.verifier)


def test_unused_bits_of_base64_are_not_ignored() -> None:
    key = SigningKey.generate(NAME)
    note = key.sign_note(checkpoint_text(NAME, HEAD))
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    last = note[-3]  # before "=" and the newline: four bits of the signature, two unused
    changed = note[:-3] + alphabet[alphabet.index(last) + 1] + note[-2:]
    assert base64.b64decode(changed.split(" ")[-1]) == base64.b64decode(note.split(" ")[-1])
    with pytest.raises(TamperError, match="malformed"):
        parse_checkpoint(changed.encode(), key.verifier)


def test_other_signatures_and_extension_lines_are_let_be() -> None:
    key, witness = SigningKey.generate(NAME), SigningKey.generate("witness.example")
    text = checkpoint_text(NAME, HEAD) + "extension\n"
    cosigned = key.sign_note(text) + witness.sign_note(text).rpartition("\n\n")[2]
    assert parse_checkpoint(cosigned.encode(), key.verifier) == HEAD
    same_name = SigningKey.generate(NAME)
    with pytest.raises(TamperError, match="isn't signed by"):
        parse_checkpoint(cosigned.encode(), same_name.verifier)


@pytest.mark.parametrize(
    "text",
    [
        f"{NAME}\n12\n",
        f"{NAME}\n012\n{base64.b64encode(HEAD.root).decode()}\n",
        f"{NAME}\n-1\n{base64.b64encode(HEAD.root).decode()}\n",
        f"{NAME}\n1_2\n{base64.b64encode(HEAD.root).decode()}\n",
        f"{NAME}\n12\n{base64.b64encode(HEAD.root[:31]).decode()}\n",
        f"{NAME}\n12\n{base64.b64encode(HEAD.root).decode()}\n\nmore\n",
        f"other\n12\n{base64.b64encode(HEAD.root).decode()}\n",
    ],
)
def test_signed_texts_that_are_no_checkpoint_are_refused(text: str) -> None:
    key = SigningKey.generate(NAME)
    with pytest.raises(TamperError):
        parse_checkpoint(key.sign_note(text).encode(), key.verifier)


@pytest.mark.parametrize("name", ["", "a b", "a+b", "a\nb", "a\u2003b", "\ud800"])
def test_names_that_a_note_cannot_hold_are_refused(name: str) -> None:
    with pytest.raises(LedgerError, match="can't name"):
        SigningKey.generate(name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a+b",
        PETER[:-1],
        PETER.replace("c74f20a3", "c74f20a4"),
        PETER.replace("c74f", "C74F"),
        PETER + "+x",
    ],
)
def test_broken_verifier_keys_are_refused(text: str) -> None:
    with pytest.raises(LedgerError, match="no verifier key"):
        VerifierKey.parse(text)


def test_a_key_file_is_private_pem_and_loads_again(tmp_path: Path) -> None:
    path = tmp_path / "operator.key"
    made = load_or_create_key(path, name=NAME)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----")
    assert load_or_create_key(path, name=NAME).verifier == made.verifier
    assert "private" not in repr(made)
    with pytest.raises(LedgerError, match="can't be created"):
        create_key(path, name=NAME)
    with pytest.raises(LedgerError, match="can't be read"):
        load_key(tmp_path / "absent", name=NAME)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_key_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "operator.key"
    create_key(path, name=NAME)
    path.chmod(mode)
    with pytest.raises(LedgerError, match="chmod 600"):
        load_key(path, name=NAME)


def test_files_without_an_ed25519_key_are_refused(tmp_path: Path) -> None:
    other = X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for content, reason in ((b"nothing", "no PEM"), (other, "isn't Ed25519")):
        path = tmp_path / reason
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(LedgerError, match=reason):
            load_key(path, name=NAME)


def test_sign_note_uses_the_given_function() -> None:
    private = Ed25519PrivateKey.from_private_bytes(os.urandom(32))
    key = VerifierKey(NAME, private.public_key().public_bytes_raw())
    assert verify_note(sign_note("text\n", key, private.sign).encode(), key) == "text\n"


@pytest.mark.parametrize("control", ["\x00", "\x07", "\t", "\r", "\x1f"])
def test_a_note_with_a_control_character_is_refused_for_it(control: str) -> None:
    """Before anything is made of it: what a terminal hides may stand in a signed text as in any other."""
    key = SigningKey.generate(NAME)
    text = checkpoint_text(NAME, HEAD) + f"more{control}\n"
    note = f"{text}\n" + key.sign_note(checkpoint_text(NAME, HEAD)).rpartition("\n\n")[2]
    with pytest.raises(TamperError, match="control character"):
        parse_checkpoint(note.encode(), key.verifier)
    with pytest.raises(TamperError, match="signature"):
        parse_checkpoint(note.replace(control, "").encode(), key.verifier)
