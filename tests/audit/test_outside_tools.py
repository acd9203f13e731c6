"""What leaves is accepted by other people's tools. From here on, nothing of ours is imported but to make a bundle."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")
pytest.importorskip("model_signing", reason="the extra `audit` isn't installed")

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of a bundle that a process of its own has made, taken out by `zipfile`."""
    folder = tmp_path_factory.mktemp("outside")
    program = (
        "import sys; from pathlib import Path; from tests.audit.signed_runs import make_run; "
        "folder = Path(sys.argv[1]);"
        "from cosmati.cli.main import app; run = make_run(folder);"
        "app(['audit', 'export', str(run), '--out', str(folder / 'b.zip')])"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True, capture_output=True, timeout=200)
    with zipfile.ZipFile(folder / "b.zip") as archive:
        archive.extractall(folder / "in")
    return folder / "in"


def test_model_signing_verifies_the_weights(unpacked: Path) -> None:
    from model_signing import verifying

    def verify() -> None:
        config = verifying.Config().use_elliptic_key_verifier(public_key=unpacked / "weights.pub.pem")
        config.verify(unpacked / "weights", unpacked / "weights.sig.json")

    verify()
    path = unpacked / "weights" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    try:
        with pytest.raises(ValueError, match="mismatch"):
            verify()
    finally:
        path.write_bytes(data)


@pytest.mark.parametrize("kind", ["bundle", "training", "exclusions"])
def test_statements_are_in_toto_in_dsse(unpacked: Path, kind: str) -> None:
    attestation = pytest.importorskip("in_toto_attestation.v1.statement", reason="in-toto-attestation isn't installed")
    from google.protobuf import json_format

    envelope = json.loads((unpacked / "statements" / f"{kind}.dsse.json").read_text())
    payload, form = base64.b64decode(envelope["payload"]), envelope["payloadType"].encode()
    # DSSE's pre-authentication encoding, and the key as the note's vkey has it.
    signed = b"DSSEv1 %d %b %d %b" % (len(form), form, len(payload), payload)
    vkey = (unpacked / "ledger" / "operator.vkey").read_text().strip().split("+", 2)[2]
    public = Ed25519PublicKey.from_public_bytes(base64.b64decode(vkey)[1:])
    (signature,) = envelope["signatures"]
    public.verify(base64.b64decode(signature["sig"]), signed)
    with pytest.raises(InvalidSignature):
        public.verify(base64.b64decode(signature["sig"]), signed + b" ")
    statement = attestation.Statement([], "", {})
    json_format.Parse(payload, statement.pb)
    statement.validate()
    for subject in json.loads(payload)["subject"]:
        assert hashlib.sha256((unpacked / subject["name"]).read_bytes()).hexdigest() == subject["digest"]["sha256"]


def test_the_bill_of_materials_is_cyclonedx(unpacked: Path) -> None:
    validation = pytest.importorskip("cyclonedx.validation.json", reason="cyclonedx-python-lib isn't installed")
    from cyclonedx.schema import SchemaVersion

    text = (unpacked / "documents" / "model.cdx.json").read_text()
    validator = validation.JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(text) is None
    assert validator.validate_str(text.replace('"machine-learning-model"', '"model"')) is not None
    found = json.loads(text)
    names = {one["bom-ref"] for one in found["components"]}
    assert {one["ref"] for one in found["metadata"]["component"]["modelCard"]["modelParameters"]["datasets"]} <= names


@pytest.mark.filterwarnings("ignore")  # of packages that it loads
def test_croissant_is_loaded(unpacked: Path) -> None:
    croissant = pytest.importorskip("mlcroissant", reason="mlcroissant isn't installed")
    files = sorted((unpacked / "documents" / "croissant").iterdir())
    assert len(files) == 3
    for path in files:
        metadata = croissant.Dataset(jsonld=path).metadata
        told = json.loads(path.read_text())
        assert metadata.name == told["name"]
        assert [one.sha256 for one in metadata.distribution] == [one["sha256"] for one in told["distribution"]]
        assert not metadata.ctx.issues.errors
