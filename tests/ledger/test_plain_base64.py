"""Base64 with other signs among it is none: a text has one spelling, and what isn't that is refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from cosmati.errors import LedgerError
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.learning import decode_direction
from cosmati.ledger.proof import check_inclusion, prove_inclusion
from cosmati.ledger.released_keys import FORMAT, check_released

from .ledgers import ORIGIN, write_run

OTHERS = ["*", " ", "\n", "-"]
KEY = SigningKey.generate(ORIGIN)


@pytest.mark.parametrize("other", OTHERS)
def test_a_direction_with_other_signs_is_none(other: str) -> None:
    text = base64.b64encode(np.arange(16, dtype="<f2").tobytes()).decode()
    assert decode_direction(text).tolist() == list(range(16))
    with pytest.raises(ValueError, match=r"base64|padding"):
        decode_direction(text[:4] + other + text[4:])


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("field", ["entry", "path"])
def test_a_proof_with_other_signs_is_none(field: str, other: str, tmp_path: Path) -> None:
    write_run(tmp_path / "l", KEY, 5).close()
    text = prove_inclusion(tmp_path / "l", entry=2)
    assert check_inclusion(text, KEY.verifier.text).index == 2
    proof: dict[str, Any] = json.loads(text)
    if field == "entry":
        proof["entry"] = proof["entry"][:4] + other + proof["entry"][4:]
    else:
        proof["path"][1] = other + proof["path"][1]
    with pytest.raises(LedgerError, match="no proof that can be read"):
        check_inclusion(json.dumps(proof), KEY.verifier.text)


@pytest.mark.parametrize("other", OTHERS)
def test_released_keys_with_other_signs_are_none(other: str) -> None:
    sender = X25519PrivateKey.generate().public_key().public_bytes_raw().hex()
    head = {"format": FORMAT, "run": "r", "credential": "c", "holder": "h", "sender": sender}
    box = base64.b64encode(b"some keys").decode()

    def read(box: str) -> tuple[dict[str, str], bytes]:
        return check_released(json.dumps({**head, "box": box}).encode(), run="r", credential="c", holder="h")

    assert read(box) == (head, b"some keys")
    with pytest.raises(LedgerError, match="no file of released keys"):
        read(box[:4] + other + box[4:])
