"""A bundle shows no policy that was signed where the operator alone allowed more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")
pytest.importorskip("model_signing", reason="the extra `audit` isn't installed")

from cosmati.audit.verify import _check_policies
from cosmati.errors import RefutedError
from tests.ledger.test_rare_lies import loosened


def test_a_bundle_whose_signed_policy_was_loosened_by_nobody_known_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = loosened(tmp_path / "ledger", 1, monkeypatch)
    said: list[tuple[str, ...]] = []
    found: Any = SimpleNamespace(trust=None, say=lambda *words: said.append(words))
    with pytest.raises(RefutedError, match="from step 1 on more is allowed than was signed"):
        _check_policies(found, tmp_path / "ledger", replace(report, policies=report.policies[1:]))
    assert not said
