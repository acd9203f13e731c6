"""Which certificates excuse rows that a replay can't compare: those of drops, of the class or of one above it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.ledger.roots import CERTIFICATE, FORGOTTEN, certificates_of_drops, signed_certificates


def tables(digest: object, *, changes: tuple[str, ...] = (CERTIFICATE,), **forgotten: Any) -> Any:
    details = {CERTIFICATE: {"digest": digest} if isinstance(digest, str) else digest, FORGOTTEN: forgotten or None}
    return SimpleNamespace(details=details, changes=[(name, "", "") for name in changes])


LEDGER: Any = SimpleNamespace(
    tables=[
        SimpleNamespace(details={}, changes=[]),
        tables("d1", method="drop", classes=["a", "b/c"]),
        tables("d1", method="drop", classes=["a"], changes=("budget",)),  # what it still says
        tables("r1", method="replay", classes=["a"]),
        tables(None, method="drop", classes=["a"]),
        tables("d2", method="drop", classes=["a/x"], changes=("budget", CERTIFICATE)),
        tables("n1"),
        tables("d3", method="drop"),
    ]
)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a", ["d1"]),
        ("a/x", ["d1", "d2"]),
        ("b", []),
        ("b/c", ["d1"]),
        ("b/c/d", ["d1"]),
        ("c", []),
        ("ab", []),
        ("c&a/x", ["d1", "d2"]),
        ("a&b", ["d1"]),
    ],
)
def test_drops_of_a_class_or_of_one_above_it_are_found(name: str, found: list[str]) -> None:
    assert certificates_of_drops(LEDGER, name) == found


def test_all_that_were_signed_are_told_in_order() -> None:
    assert signed_certificates(LEDGER) == ["d1", "r1", "d2", "n1", "d3"]
