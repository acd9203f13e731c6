"""A deletion as a page shows it: plan, what was done, certificate, before and after; read from the successor's folder.

The certificate is checked against the folder's own ledger first, and where that doesn't bear it out nothing else stands.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmati.errors import CosmatiError, RefutedError, RunError
from cosmati.explorer.wording import number
from cosmati.forget.certificate import VerifiedCertificate, read_certificate, verify_certificate
from cosmati.forget.deletion import Begun, begun_in, last_certificate
from cosmati.forget.past_run import PastRun
from cosmati.forget.planning import Option
from cosmati.forget.succession import CERTIFICATES, REQUEST
from cosmati.ledger.evidence import NOBODY, TrustedEvidence
from cosmati.records.deleted import DELETED_FILE, DeletedRecord
from cosmati.records.ledger import CheckpointEntry

_SHORT = 16


@dataclass(frozen=True, kw_only=True)
class DeletionView:
    """What a page shows of a deletion.

    Attributes:
        begun: the plan, and by which method it was done.
        num_steps: of the run, to its end.
        problem: why nothing else is shown; empty where the ledger bears the certificate out.
        certificate: that was checked; None with a problem.
        digest: of the certificate's file, in hex.
        weights_before: Merkle root of the weights of the run that had the content, in hex; empty where it isn't known.
        about: what the program that did it tells besides, unsigned; None where it told nothing.
        commands: with which a reader checks it.
    """

    begun: Begun
    num_steps: int = 0
    problem: str = ""
    certificate: VerifiedCertificate | None = None
    digest: str = ""
    weights_before: str = ""
    about: DeletedRecord | None = None
    commands: tuple[str, ...] = ()

    @property
    def told(self) -> Mapping[str, Any]:
        """What the certificate says."""
        return self.certificate.told if self.certificate else {}

    @property
    def asked(self) -> str:
        """What was asked for, in words."""
        return self.about.what if self.about else self.begun.plan.asked

    @property
    def options(self) -> tuple[tuple[str, str, str], ...]:
        """Name of each method, what it takes, and how strong it is, or why it isn't possible."""
        return tuple((one.method, *_words(one)) for one in self.begun.plan.options)

    @property
    def changed(self) -> tuple[tuple[str, str, str], ...]:
        """Rows of the table of the models: a figure, before, after."""
        rows = [("weights, Merkle root", self.weights_before[:_SHORT], str(self.told["to"]["parameters"])[:_SHORT])]
        if self.about is None:
            return tuple(rows) if self.weights_before else ()
        taught = ", ".join(f"{one.region} {one.num_rows:,}" for one in self.about.taught)
        return (*rows, ("its rows that taught, by region", taught or "none", "none"), *self._measured(is_attack=False))

    @property
    def attacked(self) -> tuple[tuple[str, str, str], ...]:
        """Rows of the table of what is found of the content: a figure, before, after."""
        return self._measured(is_attack=True)

    def _measured(self, *, is_attack: bool) -> tuple[tuple[str, str, str], ...]:
        found = self.about.measures if self.about else ()
        return tuple((m.name, _figure(m.before), _figure(m.after)) for m in found if m.is_attack == is_attack)

    @property
    def grounds(self) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
        """What the certificate rests on, and what it leaves: style, heading, lines."""
        assert self.certificate is not None, "asked where there is no problem"
        return (
            ("met", "Checked against the ledger", self.certificate.checked),
            ("open", "On the operator's word", self.certificate.not_checked),
            ("unmet", "Not covered", self.not_covered),
        )

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What the certificate says that it doesn't cover: the run's own files first."""
        derived = [one for one in self.told["derived"] if one["status"] == "not covered"]
        return (*(f"{one['kind']} {one['path']}" for one in derived), *self.told["not_covered"])


def read_deletion(folder: Path, *, witnesses: TrustedEvidence = NOBODY) -> DeletionView | None:
    """Read the last deletion of a successor's folder; None where it's no successor, or has no certificate yet.

    Args:
        folder: of the run that goes on without the content.
        witnesses: whom the reader trusts to have seen the ledger.

    Raises:
        ForgetError: what was asked can't be read. What doesn't verify is no error, but the view's problem.
    """
    begun = begun_in(folder) if (folder / REQUEST).is_file() else None
    if begun is None or not any((folder / CERTIFICATES).glob("*.json")):
        return None
    try:
        return _checked(folder, begun, witnesses)
    except CosmatiError as error:
        return DeletionView(begun=begun, problem=str(error))


def _checked(folder: Path, begun: Begun, witnesses: TrustedEvidence) -> DeletionView:
    found = last_certificate(folder, begun.plan.digest)
    if found is None:
        raise RefutedError(f"No certificate in {folder / CERTIFICATES} is one that the ledger has signed for it.")
    path, told = found
    certificate, digest = verify_certificate(path, folder / "ledger", witnesses=witnesses), read_certificate(path)[1]
    return DeletionView(
        begun=begun,
        num_steps=int(told["to"]["step"]),
        certificate=certificate,
        digest=digest,
        weights_before=_weights_before(folder, told),
        about=_about(folder, digest),
        commands=(f"cosmati forget verify {shlex.quote(str(path))}",),
    )


def _figure(value: float) -> str:
    """Return a count as one, and other figures with four digits."""
    return f"{value:,.0f}" if value.is_integer() else number(value, 4)


def _words(option: Option) -> tuple[str, str]:
    if not option.is_possible:
        return "–", f"not possible: {'; '.join(option.why_not)}"
    minutes = "" if option.minutes is None else f", about {number(option.minutes * 60, 2)}\u00a0s"
    cost = f"{option.num_steps:,} steps{minutes}" if option.num_steps else "no training"
    return cost, option.strength


def _weights_before(folder: Path, told: Mapping[str, Any]) -> str:
    """Return the root of the last weights that the ledger signed before it went on without the content."""
    size = told.get("from", {}).get("tree_size", 0)
    entries = (one for one in PastRun(folder).ledger.entries() if one.index < size)
    found = [one.entry.parameter_root.hex() for one in entries if isinstance(one.entry, CheckpointEntry)]
    return found[-1] if found else ""


def _about(folder: Path, digest: str) -> DeletedRecord | None:
    """Return what was told of this certificate; of an earlier one, or damaged, it's nothing."""
    try:
        found = DeletedRecord.from_json((folder / DELETED_FILE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RunError):
        return None
    return found if found.certificate == digest else None
