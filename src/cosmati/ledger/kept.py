"""How a ledger was kept, in words: under which profile, when, and by whose keys."""

from __future__ import annotations

from collections.abc import Iterator

from cosmati.ledger.evidence import utc
from cosmati.ledger.verify import LedgerReport


def kept_lines(report: LedgerReport) -> Iterator[tuple[str, str]]:
    """Yield what a verified ledger says of its keeping, each as what it's about and the words."""
    yield "profile", str(report.profile)
    for lapse in report.lapses:
        yield "but", lapse
    if report.clock is not None:
        first, last = map(utc, report.clock)
        back = ", and it went back in between" if report.clock_went_back else ""
        yield "when", f"{first} to {last} by the operator's clock{back}"
    for key in report.keys[:-1]:
        yield "before", f"signed by {key.key_id.hex()}, which handed over to its successor"
