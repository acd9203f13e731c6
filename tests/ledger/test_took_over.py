"""Whether a key signed a ledger before the one that signs it now; of a damaged ledger nobody can say so."""

from __future__ import annotations

from pathlib import Path

from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import VerifierKey
from cosmati.ledger.reader import _took_over

from .ledgers import ORIGIN, write_run

KEY, OTHER = SigningKey.generate(ORIGIN), SigningKey.generate(ORIGIN)


def test_a_key_that_signed_it_did(tmp_path: Path) -> None:
    write_run(tmp_path, KEY, 5).close()
    assert _took_over(tmp_path, KEY.verifier, KEY.verifier)
    assert not _took_over(tmp_path, OTHER.verifier, KEY.verifier)
    assert not _took_over(tmp_path, VerifierKey("another", KEY.verifier.public), KEY.verifier)
    (bundle,) = (path for path in (tmp_path / "tile" / "entries").rglob("*") if path.is_file())
    bundle.write_bytes(bundle.read_bytes()[:-1] + b"\xff")
    assert not _took_over(tmp_path, KEY.verifier, KEY.verifier)
