"""What `cosmati ledger verify` says of a ledger that has verified; it looks whether the archive bears that out."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from cosmati.errors import RefutedError
from cosmati.ledger.kept import kept_lines
from cosmati.ledger.policy_changes import PolicyInForce
from cosmati.ledger.verify import LedgerReport
from cosmati.provenance.voucher import FOLDER
from cosmati.records.artifacts import signed_by, words_of


def say_evidence(report: LedgerReport) -> None:
    """Say who has seen the ledger and when, under which profile it's kept, and who has signed it."""
    if report.witnessed is not None:
        seen = report.witnessed
        tail = report.size - seen.size
        words = str(seen) if seen.size else f"too few: {seen.num_seen} of {seen.num_asked} have cosigned"
        typer.echo(
            f"  seen      {words}; " + (f"tail of {tail} entries unwitnessed" if tail else "nothing unwitnessed")
        )
    typer.echo(f"  evidence  {report.evidence_level}")
    for what, words in kept_lines(report):
        typer.echo(f"  {what:<9} {words}")


def say_provenance(directory: Path, report: LedgerReport) -> None:
    """Say who vouched for the data, from which step on, and look whether the archive bears it out."""
    for number, (step, facts) in enumerate(report.provenance_from):
        since = f"  data      {f'from step {step} on, ' if number else ''}"
        if facts is None:
            typer.echo(f"{since}declared: nobody vouches for their classes")
            continue
        try:
            from cosmati.provenance.authority.audit import audit
        except ImportError as error:
            typer.echo(f"{since}vouched for; not checked without {error.name}: pip install 'cosmati[authority]'")
            continue
        if problems := audit(directory / FOLDER, facts):
            msg = f"Who vouched for the data of {directory} doesn't hold: " + "; ".join(problems)
            raise RefutedError(msg)
        for source in facts["sources"]:
            licence = _licence_of(directory / FOLDER, source["manifest_sha256"])
            typer.echo(f"{since}{signed_by(source)}, {facts['opened']}; {licence}")


def _licence_of(archive: Path, manifest_sha256: str) -> str:
    """Return under which licence a source was signed, as its manifest says; the audit has compared its digest."""
    facts = json.loads((archive / manifest_sha256).read_bytes())["facts"]
    until = f" until {facts['licence_valid_until']}" if facts.get("licence_valid_until") else ""
    return f"licence {facts['licence']}{until}" if facts.get("licence") else "no licence named"


def say_withdrawn(directory: Path, report: LedgerReport) -> None:
    """Say what was withdrawn since, and look whether the archive bears it out: each against that of its own time."""
    if not report.withdrawn:
        return
    try:
        from cosmati.provenance.authority.audit import audit_all_withdrawn
    except ImportError:
        return  # said above
    for words, is_refuted in audit_all_withdrawn(directory / FOLDER, report.withdrawn, report.manifests):
        if is_refuted:
            raise RefutedError(f"What was withdrawn from the run in {directory} doesn't hold: {words}.")
        typer.echo(f"  withdrawn {words}")


def say_policies(directory: Path, report: LedgerReport) -> None:
    """Say who vouched for each policy that steps went by, and look whether the archive bears it out."""
    for number, policy in enumerate(report.policies):
        since = f"  policy    {f'from step {policy.step} on, ' if number else ''}"
        audited, problems = _audited(directory, policy)
        # What a ledger says of signatures that don't hold isn't looked at further.
        # Whoever signed a change meant the key that signed the ledger then.
        if problems := problems or min((policy.problems(key.text) for key in report.keys), key=len):
            raise RefutedError(f"Who signed the policy of {directory} doesn't hold: " + "; ".join(problems))
        typer.echo(f"{since}{audited}")


def say_artifacts(directory: Path, report: LedgerReport) -> None:
    """Say what was prepared before the run, and look whether the archive bears out what is signed of it."""
    for number, (step, facts) in enumerate(report.artifacts_from):
        since = f"from step {step} on, " if number else ""
        if facts is None and number:
            typer.echo(f"  prepared  {since}nothing is named")
        for label, one in (facts or {}).items():
            unchecked = ""
            if "provenance" in one:
                try:
                    from cosmati.provenance.authority.audit import audit
                except ImportError as error:
                    unchecked = f"; not checked without {error.name}: pip install 'cosmati[authority]'"
                else:
                    if problems := audit(directory / FOLDER, one["provenance"]):
                        msg = f"Who signed the {label} of {directory} doesn't hold: " + "; ".join(problems)
                        raise RefutedError(msg)
            typer.echo(f"  prepared  {since}{label}: {words_of(one)}{unchecked}")


def _audited(directory: Path, policy: PolicyInForce) -> tuple[str, list[str]]:
    """Return who signed a policy, in words, and what doesn't hold of that."""
    if policy.facts is None:
        return f"{policy.digest.hex()[:16]}, declared: nobody has signed it", []
    try:
        from cosmati.provenance.authority.audit import audit_policy
    except ImportError as error:
        return f"signed; not checked without {error.name}: pip install 'cosmati[authority]'", []
    if problems := audit_policy(directory / FOLDER, policy.facts, policy.digest):
        return "", problems
    (source,) = policy.facts["sources"]
    return f"{signed_by(source)}, {policy.facts['opened']}", []
