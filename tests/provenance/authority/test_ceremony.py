"""The ceremony as people do it: five commands, thresholds, rotation; and a crash in the middle of it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati.cli.main import app
from cosmati.errors import ProvenanceError
from cosmati.provenance.authority.trusted import Authority
from tests.provenance.authority.people import NEWS, People, name_of

pytestmark = pytest.mark.long

TAXONOMY = """
name: firm
version: "1"
classes:
  licensed: {news: Bought., maps: Bought too.}
  no: Rows of Norway.
"""


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.output


def test_five_commands_and_a_source_is_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("classes.yaml").write_text(TAXONOMY)
    Path("a.txt").write_text("some words\n")
    said = run("keys", "init", "authority", "--taxonomy", "classes.yaml")
    (pin,) = re.findall(r"^  ([0-9a-f]{64})$", said, re.MULTILINE)
    run("keys", "new", "ada", "--keys", "ada")
    said = run("keys", "delegate", "authority", "licensed", "--to", "ada/ada.pub.pem")
    assert re.findall(r"^licensed/\w+", said, re.MULTILINE) == ["licensed/maps", "licensed/news"]
    run("data", "write", "corpus", "a.txt", "--class", "licensed/news")
    ring = ("--authority", "authority", "--keys", "ada", "--keys", "authority-keys")
    assert re.search(r"licensed/news +corpus 1: signed\n", run("data", "sign", "corpus", *ring))
    assert "was signed already" in run("data", "sign", "corpus", *ring)
    assert "licensed/news" in run("keys", "status", "authority")
    told = json.loads(run("keys", "status", "authority", "--json"))
    assert told["root"] == pin
    assert {one["role"]: one["num_targets"] for one in told["roles"]}["licensed/news"] == 1
    assert told["roles"][0]["role"] == "timestamp", "what expires first is ahead"
    authority = Authority("authority", pin, state="seen")
    assert "no" in authority.taxonomy.classes, "YAML's words stay words"


def test_what_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "cosmati keys init authority" in run("keys", "status", "authority", code=1)
    run("keys", "init", "authority")
    assert "already" in run("keys", "init", "authority", "--keys", "others", code=1)
    assert "no folder nowhere of keys" in run("keys", "renew", "authority", "--keys", "nowhere", code=1)
    assert "No key here begins with 'ff0'" in run("keys", "revoke", "authority", "ff0", code=1)
    run("keys", "new", "ada")
    assert "did you mean public-domain" in run(
        "keys", "delegate", "authority", "public-domian", "--to", "keys/ada.pub.pem", code=1
    )
    many = ("keys", "delegate", "authority", "unknown", "--to", "keys/ada.pub.pem", "--threshold", "2")
    assert "2 of 1 keys can't be asked to sign" in run(*many, code=1)
    last = run("keys", "revoke", "authority", "authority-keys/timestamp.pub.pem", code=1)
    assert "Rotate it" in last
    run("keys", "rotate", "authority", "authority-keys/timestamp.pub.pem", "--to", "keys/ada.pub.pem", code=1)
    run(
        "keys", "rotate", "authority", "authority-keys/timestamp.pub.pem", "--to", "keys/ada.pub.pem",
        "--keys", "keys", "--keys", "authority-keys",
    )  # fmt: skip


def test_only_what_is_delegated_can_be_revoked(tmp_path: Path) -> None:
    people = People(tmp_path).begin()
    people.delegate(NEWS, "ada", "bob", threshold=2)
    people.sign(NEWS, "ada", "bob")
    output = run("keys", "revoke", people.folder, people.root / "ada/ada.pub.pem", "--keys", people.root / "own")
    assert f"signs no more: {NEWS}" in output
    with pytest.raises(ProvenanceError, match="lets nobody sign"):
        people.repository.chain().source(name_of(NEWS))


SIGNER = """
import sys
from pathlib import Path
from cosmati.provenance.authority import ceremony, signing
from cosmati.provenance.authority.keys import KeyRing
from cosmati.provenance.authority.names import SourceName
from cosmati.provenance.authority.repository import AuthorityRepository

folder, *keys = map(Path, sys.argv[1:])
ring = KeyRing(keys)
print("ready", flush=True)
for number in range(10_000):
    name = SourceName("firm", "licensed/news", "s", f"{number}.{id(ring)}")
    signing.sign_source(AuthorityRepository(folder), ring, name, b"manifest")
    print(name.version, flush=True)
"""


def test_a_signer_that_is_killed_leaves_a_repository_that_holds(tmp_path: Path) -> None:
    people = People(tmp_path).begin()
    people.delegate(NEWS, "ada")
    command = [sys.executable, "-c", SIGNER, str(people.folder), str(tmp_path / "own"), str(tmp_path / "ada")]
    versions: list[str] = []
    for kill in range(4):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as signer:
            assert signer.stdout is not None
            assert signer.stdout.readline() == "ready\n"
            versions += [signer.stdout.readline().strip() for _ in range(2)]
            time.sleep(0.003 * kill)
            signer.send_signal(signal.SIGKILL)
            versions += [line.strip() for line in signer.stdout if line.endswith("\n")]
        chain = Authority(people.folder, people.pin, state=tmp_path / "seen").refresh()
        assert not chain.problems
        signed = chain.targets["class.licensed.news"].signed.targets
        assert {name_of(NEWS, version=one).target for one in versions if one} <= signed.keys()
    assert people.sign(NEWS, "ada", version="last") == "signed"


def test_each_signs_what_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"text": "a", "class": "public-domain"}\n{"text": "b", "class": "proprietary"}\n')
    run("keys", "init", "authority")
    for name, path in (("ada", "public-domain"), ("bob", "proprietary")):
        run("keys", "new", name, "--keys", name)
        run("keys", "delegate", "authority", path, "--to", f"{name}/{name}.pub.pem")
    run("data", "write", "corpus", "rows.jsonl", "--class-field", "class")
    ring = ("--authority", "authority", "--keys", "authority-keys", "--keys")
    said = run("data", "sign", "corpus", *ring, "bob")
    assert re.search(r"proprietary +corpus 1: signed\n", said)
    assert re.search(r"public-domain +corpus 1: not signed: None of the keys here may sign", said)
    said = run("data", "sign", "corpus", *ring, "ada")
    assert re.search(r"public-domain +corpus 1: signed\n", said)
    run("keys", "new", "eve", "--keys", "eve")
    assert "None of the keys here may sign" in run("data", "sign", "corpus", *ring, "eve", code=1)
