"""Why a policy that a run was given holds no longer: it was taken back, or nobody has answered who could say so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.errors import ProvenanceError
from cosmati.routing import signed_policy as signed
from cosmati.routing.signed_policy import signed_policy

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")


@dataclass(frozen=True)
class Kept:
    """What a run has kept of its policy."""

    voucher: Any
    archive: Any
    number: int = 3
    lost: Any = ()
    place: Any = None

    def is_of(self, _place: object) -> bool:
        return True


@pytest.mark.parametrize("is_there", [True, False])
def test_only_an_authority_that_has_answered_takes_a_policy_back(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cosmati.provenance.authority import errors, policies

    revoked = errors._REVOKED[0]
    kept = Kept(SimpleNamespace(target="policy/main/3", manifest_sha256="ab"), {"manifests/ab.json": b"text"})

    def refresh() -> None:
        if not is_there:
            raise revoked("nobody there")

    def read(_authority: object, _name: str, number: int) -> Any:
        assert (is_there, number) == (True, 3)
        raise revoked("taken back")

    monkeypatch.setattr(signed, "authority_at", lambda _place: SimpleNamespace(refresh=refresh))
    monkeypatch.setattr(signed, "kept_given_policy", lambda _folder: kept)
    monkeypatch.setattr(policies, "read_policy", read)
    found: list[Any] = []
    text = SimpleNamespace(with_voucher=found.append)
    monkeypatch.setattr(signed, "policy_of_canonical", lambda data, where: text if data == b"text" else None)
    signed_policy("file:///nowhere", "main", root="00" * 32, run=tmp_path)
    (lost,) = found[0].lost
    assert (lost.target, lost.reason) == ("policy/main/3", "revocation" if is_there else "expiry")
    assert lost.because == ("taken back" if is_there else "nobody there")
    assert issubclass(revoked, ProvenanceError)
