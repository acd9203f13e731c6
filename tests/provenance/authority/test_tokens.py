"""Keys on tokens, against SoftHSM: a token in software, behind the same library as one in hardware."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")
pytest.importorskip("pkcs11", reason="python-pkcs11 isn't installed")

import pkcs11

from cosmati.cli.main import app
from cosmati.errors import ProvenanceError
from cosmati.provenance.authority.keys import KeyRing, create_token_key, read_public_key
from cosmati.provenance.authority.tokens import TokenKey, generate_key
from cosmati.provenance.authority.trusted import Authority

PLACES = ("/usr/lib/softhsm", "/usr/lib64", "/usr/lib64/pkcs11", "/usr/local/lib/softhsm", "/opt/homebrew/lib/softhsm")
MODULE = next((path for folder in PLACES if (path := Path(folder, "libsofthsm2.so")).exists()), None)
TOOL = shutil.which("softhsm2-util")
pytestmark = pytest.mark.skipif(MODULE is None or TOOL is None, reason="softhsm2 isn't installed")
PIN = "4711"


@pytest.fixture(scope="session", autouse=True)
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two tokens; the library looks for them once a process."""
    folder = tmp_path_factory.mktemp("softhsm")
    (folder / "tokens").mkdir()
    (folder / "softhsm2.conf").write_text(f"directories.tokendir = {folder / 'tokens'}\nlog.level = ERROR\n")
    before = os.environ.get("SOFTHSM2_CONF")
    os.environ["SOFTHSM2_CONF"] = str(folder / "softhsm2.conf")
    assert TOOL is not None
    for label in ("bank", "Ada's; own"):
        command = [TOOL, "--init-token", "--free", "--label", label, "--pin", PIN, "--so-pin", "00000000"]
        subprocess.run(command, check=True, capture_output=True)
    yield
    os.environ.pop("SOFTHSM2_CONF")
    if before is not None:
        os.environ["SOFTHSM2_CONF"] = before


@pytest.fixture(autouse=True)
def pin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSMATI_PIN", PIN)


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.output


def new(name: str, *rest: object, token: str = "bank", code: int = 0) -> str:
    return run("keys", "new", name, "--keys", name, "--pkcs11", MODULE, "--token", token, *rest, code=code)


def test_a_token_signs_what_a_file_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ceremony with every person's key on a token, and the root's: what is signed verifies as any other does."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some words\n")
    said = run("keys", "init", "authority")
    (root,) = re.findall(r"^  ([0-9a-f]{64})$", said, re.MULTILINE)
    for name in ("ada", "bob", "root"):
        assert f"{name}/{name}.pub.pem" in new(name)
    run("keys", "delegate", "authority", "unknown", "--to", "ada/ada.pub.pem")
    run("data", "write", "corpus", "a.txt", "--class", "unknown")
    ring = ("--keys", "authority-keys", "--keys")
    assert ": signed" in run("data", "sign", "corpus", "--authority", "authority", *ring, "ada")
    signers = Authority("authority", root, state="seen").refresh().signers("class.unknown")
    assert signers == (read_public_key(Path("ada/ada.pub.pem")).keyid,)
    run("keys", "rotate", "authority", "authority-keys/root-1.pub.pem", "--to", "root/root.pub.pem", *ring, "root")
    for name in ("root-1", "root-3"):  # the root is signed on the token from now on
        Path(f"authority-keys/{name}.key.pem").unlink()
    rotated = run("keys", "rotate", "authority", "ada/ada.pub.pem", "--to", "bob/bob.pub.pem", *ring, "bob")
    assert "signs no more: unknown" in rotated
    run("keys", "renew", "authority", "root", *ring, "root")
    chain = Authority("authority", root, state="seen").refresh()
    assert read_public_key(Path("root/root.pub.pem")).keyid in chain.roots[-1].signatures
    assert chain.signers("class.unknown") == (read_public_key(Path("bob/bob.pub.pem")).keyid,)


def test_the_secret_stays_on_the_token(tmp_path: Path) -> None:
    assert MODULE is not None
    key = create_token_key(tmp_path, "ada", TokenKey(str(MODULE), "Ada's; own"), lambda _: PIN)
    file = tmp_path / "ada.key.uri"
    assert file.read_text() == f"pkcs11:token=Ada%27s%3B%20own;id=%01?module-path={MODULE}\n"
    assert file.stat().st_mode & 0o777 == 0o600
    with pkcs11.lib(str(MODULE)).get_token(token_label="Ada's; own").open(user_pin=PIN) as session:
        (private,) = session.get_objects({pkcs11.Attribute.CLASS: pkcs11.ObjectClass.PRIVATE_KEY})
        assert private[pkcs11.Attribute.SENSITIVE]
        assert not private[pkcs11.Attribute.EXTRACTABLE]
        assert private[pkcs11.Attribute.LABEL] == "ada"
    asked: list[str] = []
    (signer,) = KeyRing([tmp_path], ask_pin=lambda token: asked.append(token) or PIN).signers([key.keyid])
    for text in (b"one", b"two"):
        key.verify_signature(signer.sign(text), text)
    assert asked == ["Ada's; own"], "once for each token"
    assert "PYKCS11LIB" not in os.environ


def test_a_key_that_is_there_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place, key = generate_key(TokenKey(str(MODULE), "bank"), "made elsewhere", lambda _: PIN)
    again, other = generate_key(TokenKey(str(MODULE), "bank"), "another", lambda _: PIN)
    assert again.number == place.number + 1
    assert other.keyid != key.keyid
    new("ada", "--id", place.number)
    assert read_public_key(Path("ada/ada.pub.pem")).keyid == key.keyid
    assert "can't be created" in new("ada", "--id", place.number, code=1)
    assert "could not find" in new("bob", "--id", "4000", code=1)
    assert not Path("bob").exists()


def test_another_curve_is_told(tmp_path: Path) -> None:
    with pkcs11.lib(str(MODULE)).get_token(token_label="bank").open(rw=True, user_pin=PIN) as session:
        for number, curve in ((b"\x7e", "secp384r1"), (b"\x7f", "secp521r1")):
            domain = {pkcs11.Attribute.EC_PARAMS: pkcs11.util.ec.encode_named_curve_parameters(curve)}
            made = session.create_domain_parameters(pkcs11.KeyType.EC, domain, local=True)
            made.generate_keypair(id=number, label=curve, store=True)
    for number, why in ((0x7E, "nistp384. Make one that's EC P-256"), (0x7F, "not a supported EC curve")):
        with pytest.raises(ProvenanceError, match=why):
            create_token_key(tmp_path, "ada", TokenKey(str(MODULE), "bank", number), lambda _: PIN)
    assert not list(tmp_path.iterdir())


def test_what_a_token_refuses_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "Multiple PKCS#11 tokens" in new("ada", token="", code=1)
    assert "No PKCS#11 token found" in new("ada", token="lost", code=1)
    assert "its library" in run("keys", "new", "ada", "--pkcs11", "/usr/lib/none.so", code=1)
    assert "Name its library" in run("keys", "new", "ada", "--id", "2", code=1)
    new("ada")
    key = read_public_key(Path("ada/ada.pub.pem"))
    for wrong in ("0815", "x" * 300):
        with pytest.raises(ProvenanceError, match="isn't the PIN of the token 'bank'"):
            KeyRing([Path("ada")], ask_pin=lambda _, pin=wrong: pin).signers([key.keyid])[0].sign(b"text")
    monkeypatch.delenv("COSMATI_PIN")
    run("keys", "init", "authority")
    run("keys", "delegate", "authority", "unknown", "--to", "ada/ada.pub.pem")
    Path("a.txt").write_text("some words\n")
    run("data", "write", "corpus", "a.txt", "--class", "unknown")
    sign = ("data", "sign", "corpus", "--authority", "authority", "--keys", "authority-keys", "--keys", "ada")
    assert "Give it in COSMATI_PIN" in run(*sign, code=1)
    monkeypatch.setenv("COSMATI_PIN", "0815")
    said = run(*sign, code=1)
    assert "isn't the PIN" in said
    assert "0815" not in said
    assert json.loads(run("keys", "status", "authority", "--json"))["roles"][-1]["version"] is None, "nothing signed"


def test_a_key_file_names_a_token_and_nothing_else(tmp_path: Path) -> None:
    key = create_token_key(tmp_path, "ada", TokenKey(str(MODULE), "bank"), lambda _: PIN)
    file = tmp_path / "ada.key.uri"
    whole = file.read_text()
    ring = KeyRing([tmp_path], ask_pin=lambda _: PIN)
    for text, why in {
        "": "has the form",
        whole.replace("pkcs11:", "hsm:"): "has the form",
        re.sub("id=[^?]*", "id=%00", whole): "has the form",
        re.sub(r"\?.*", "", whole): "has the form",
        whole.strip() + "&pin-value=4711": "holds a PIN",
        re.sub("id=[^?]*", "id=%20", whole): "could not find",
    }.items():
        file.write_text(text)
        with pytest.raises(ProvenanceError, match=why):
            ring.signers([key.keyid])
    create_token_key(tmp_path / "bob", "bob", TokenKey(str(MODULE), "bank"), lambda _: PIN)
    file.write_text((tmp_path / "bob/bob.key.uri").read_text())
    with pytest.raises(ProvenanceError, match="isn't the private half"):
        ring.signers([key.keyid])
    file.chmod(0o620)  # who writes it names the library that is loaded
    with pytest.raises(ProvenanceError, match="mode 0620"):
        ring.signers([key.keyid])
