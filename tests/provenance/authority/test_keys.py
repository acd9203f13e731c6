"""Keys in files: who may read them, what opens them, and what is told of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from cosmati.errors import ProvenanceError
from cosmati.provenance.authority.keys import KeyRing, create_key, read_public_key


def test_a_key_is_its_owners_alone(tmp_path: Path) -> None:
    key = create_key(tmp_path / "keys", "ada")
    assert (tmp_path / "keys/ada.key.pem").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    assert read_public_key(tmp_path / "keys/ada.pub.pem").keyid == key.keyid
    (signer,) = KeyRing([tmp_path / "keys"]).signers([key.keyid])
    key.verify_signature(signer.sign(b"text"), b"text")
    with pytest.raises(ProvenanceError, match=r"can't be created.*Name a new one"):
        create_key(tmp_path / "keys", "ada")


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    key = create_key(tmp_path, "ada")
    (tmp_path / "ada.key.pem").chmod(0o640)
    with pytest.raises(ProvenanceError, match=r"mode 0640.*chmod 600"):
        KeyRing([tmp_path]).signers([key.keyid])


def test_a_passphrase_opens_a_key(tmp_path: Path) -> None:
    key = create_key(tmp_path, "ada", passphrase="open sesame")
    assert b"ENCRYPTED" in (tmp_path / "ada.key.pem").read_bytes()
    for wrong in ("", "open barley"):
        with pytest.raises(ProvenanceError, match="COSMATI_PASSPHRASE"):
            KeyRing([tmp_path], passphrase=wrong).signers([key.keyid])
    (signer,) = KeyRing([tmp_path], passphrase="open sesame").signers([key.keyid])
    assert signer.public_key.keyid == key.keyid


def test_halves_of_two_keys_are_no_pair(tmp_path: Path) -> None:
    create_key(tmp_path, "ada")
    bob = create_key(tmp_path / "other", "ada")
    (tmp_path / "other/ada.pub.pem").replace(tmp_path / "ada.pub.pem")
    with pytest.raises(ProvenanceError, match="isn't the private half"):
        KeyRing([tmp_path]).signers([bob.keyid])


def test_another_kind_of_key_is_told(tmp_path: Path) -> None:
    public = Ed25519PrivateKey.generate().public_key()
    (tmp_path / "ada.pub.pem").write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    with pytest.raises(ProvenanceError, match="isn't EC P-256"):
        read_public_key(tmp_path / "ada.pub.pem")
    (tmp_path / "bob.pub.pem").write_text("-----BEGIN")
    with pytest.raises(ProvenanceError, match="holds no public key"):
        read_public_key(tmp_path / "bob.pub.pem")
    with pytest.raises(ProvenanceError, match="can't be read"):
        read_public_key(tmp_path / "eve.pub.pem")
