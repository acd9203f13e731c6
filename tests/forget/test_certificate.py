"""Certificates: borne out by a copy of the ledger alone, and refuted where they say anything else."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rfc8785

from cosmati.errors import CosmatiError, ForgetError, RefutedError, TamperError
from cosmati.forget.asked import ToForget
from cosmati.forget.certificate import verify_certificate
from cosmati.forget.past_run import CERTIFICATE, PastRun
from cosmati.forget.planning import EXACT
from cosmati.forget.succession import append_certified
from cosmati.ledger.keys import SigningKey
from cosmati.records.ledger import CheckpointEntry
from tests.forget.samples import bare, forgotten, maker, rows_of_step, trained
from tests.train.isolated.samples import source

pytestmark = pytest.mark.long

PERSONAL = ToForget(classes=("personal",))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the successor of a run that forgot a class."""
    folder = tmp_path_factory.mktemp("certified")
    case = bare("MLP, low rank")
    make = maker(case, source(case))
    return forgotten(trained(make, folder / "run"), PERSONAL, make, folder / "out").out


def bundle(done: Path, folder: Path) -> tuple[Path, Path]:
    """Return a copy of the certificate and of the ledger, and of nothing else."""
    shutil.copytree(done / "ledger", folder / "copy")
    return Path(shutil.copy2(done / "certificates" / "0001.json", folder)), folder / "copy"


def test_it_is_checked_from_copies_alone(done: Path, tmp_path: Path) -> None:
    certificate, ledger = bundle(done, tmp_path)
    vkey = (ledger / "operator.vkey").read_text().strip()
    found = verify_certificate(certificate, ledger, vkey=vkey)
    assert found.told["strength"] == EXACT == "exact with respect to content; that rows were there, and where, remains"
    assert found.checked[-1] == "no step that stands ran rows of personal"
    assert "nothing was rewritten" in found.checked[1]
    assert found.told["evidence"].startswith("L0")
    with pytest.raises(TamperError, match="you trust"):
        verify_certificate(certificate, ledger, vkey=SigningKey.generate("cosmati/run").verifier.text)


def test_it_names_no_row_and_no_subject(tmp_path: Path) -> None:
    case = bare("MLP, low rank")
    make = maker(case, data := source(case))
    rows = rows_of_step(data, 0, num=1) | {10**12 + 7}
    out = forgotten(
        trained(make, tmp_path / "run"), ToForget(rows=rows, subject="Lovelace"), make, tmp_path / "out"
    ).out
    text = "".join(p.read_text(errors="replace") for p in out.rglob("*") if p.is_file() and "private" not in p.parts)
    assert "Lovelace" not in text
    assert str(10**12 + 7) not in text
    told = json.loads((out / "certificates" / "0001.json").read_text())
    assert told["asked"]["num_rows"] == 1, "the other was never there"
    guessed = ToForget(rows=rows, subject="Lovelace")
    assert told["asked"]["digest"] == guessed.digest(PastRun(out).salt) != guessed.digest(bytes(32))


def test_any_byte_that_is_changed_is_found(done: Path, tmp_path: Path) -> None:
    certificate, ledger = bundle(done, tmp_path)
    data, draw = certificate.read_bytes(), random.Random(0)
    for _ in range(60):
        place = draw.randrange(len(data))
        certificate.write_bytes(data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :])
        with pytest.raises(CosmatiError):
            verify_certificate(certificate, ledger)
    certificate.write_text(json.dumps(json.loads(data)))
    with pytest.raises(TamperError, match="canonical JSON"):
        verify_certificate(certificate, ledger)


def test_another_run_s_ledger_does_not_bear_it_out(done: Path, tmp_path: Path) -> None:
    certificate, _ = bundle(done, tmp_path)
    with pytest.raises(RefutedError, match="has signed no certificate"):
        verify_certificate(certificate, done.with_name("run") / "ledger")
    with pytest.raises(ForgetError, match="is no certificate"):
        verify_certificate(tmp_path / "none.json", done / "ledger")
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ForgetError, match="no deletion certificate of version 1"):
        verify_certificate(tmp_path / "other.json", done / "ledger")


def _root(told: dict[str, Any], name: str) -> None:
    told[name]["root"] = "00" * 32


LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "what it came from": (lambda told: _root(told, "from"), "aren't those of the earlier checkpoint"),
    "where it led": (lambda told: _root(told, "to"), "aren't those of the earlier checkpoint"),
    "other weights": (lambda told: told["to"].update(parameters="00" * 32), "signed no checkpoint with the weights"),
    "a later beginning": (lambda told: told["replayed_from"].update(step=2), "say otherwise of where"),
    "another class": (lambda told: told["asked"].update(classes=["open"]), "to which classes"),
    "another method": (lambda told: told.update(method="drop"), "say otherwise"),
    "other words": (lambda told: told["asked"].update(what="class open"), "other rows were meant"),
    "rows in place of a class": (lambda told: told["asked"].update(num_rows=3), "other rows were meant"),
    "more than it is": (lambda told: told.update(strength="erased everywhere"), "calls what|No certificate shows"),
    "more evidence": (
        lambda told: told.update(evidence="L3: the whole run was replayed"),
        "calls what|No certificate shows",
    ),
    "keys that are more than gone": (lambda told: told.update(row_keys="burnt"), "says of row keys 'burnt'"),
    "another request": (lambda told: told["asked"].update(digest="00" * 32), "knows of no deletion"),
    "trees in another order": (lambda told: told["from"].update(tree_size=10**6), "trees have"),
    "a missing field": (lambda told: told.pop("to"), "can't be read as one"),
}


@pytest.mark.parametrize("name", LIES)
def test_the_operator_s_own_key_makes_no_lie_true(name: str, done: Path, tmp_path: Path) -> None:
    """What the ledger shows is compared; the operator has signed each of these."""
    out = tmp_path / "out"
    shutil.copytree(done, out)
    told = json.loads((out / "certificates" / "0001.json").read_text())
    LIES[name][0](told)
    data = rfc8785.dumps(told)
    (out / "certificates" / "0002.json").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    append_certified(out, {"digest": digest}, [[CERTIFICATE, "", digest]])
    with pytest.raises((RefutedError, TamperError), match=LIES[name][1]):
        verify_certificate(out / "certificates" / "0002.json", out / "ledger")
    assert verify_certificate(out / "certificates" / "0001.json", out / "ledger"), "the first still stands"


def test_a_class_that_went_on_to_teach_is_found(tmp_path: Path) -> None:
    """Rows were forgotten, and the operator signs that it was their class."""
    case = bare("MLP, low rank")
    make = maker(case, source(case))
    out = forgotten(trained(make, tmp_path / "run"), ToForget(rows=frozenset({0})), make, tmp_path / "out").out
    told = json.loads((out / "certificates" / "0001.json").read_text())
    told["asked"]["num_rows"] = 0
    data = rfc8785.dumps(told)
    (out / "certificates" / "0002.json").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    append_certified(out, {"digest": digest}, [[CERTIFICATE, "", digest]])
    with pytest.raises(RefutedError, match=r"Step \d, which stands, ran rows of open"):
        verify_certificate(out / "certificates" / "0002.json", out / "ledger")


def test_the_weights_that_had_the_content_are_not_certified(done: Path, tmp_path: Path) -> None:
    """The ledger has signed them too, before the deletion began."""
    out = tmp_path / "out"
    shutil.copytree(done, out)
    entries = [item.entry for item in PastRun(out).ledger.entries()]
    before = next(one for one in entries if isinstance(one, CheckpointEntry) and one.step == 6)
    told = json.loads((out / "certificates" / "0001.json").read_text())
    told["to"].update(state=before.state_digest.hex(), parameters=before.parameter_root.hex())
    data = rfc8785.dumps(told)
    (out / "certificates" / "0002.json").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    append_certified(out, {"digest": digest}, [[CERTIFICATE, "", digest]])
    with pytest.raises(RefutedError, match="signed no checkpoint with the weights"):
        verify_certificate(out / "certificates" / "0002.json", out / "ledger")
