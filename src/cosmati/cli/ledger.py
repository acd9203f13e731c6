"""`cosmati ledger`. Each command exits with 0 for yes, 1 for no, and 2 where nothing could be read to answer from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cosmati.cli.errors import Answering
from cosmati.cli.ledger_folders import Folder, Key
from cosmati.cli.ledger_folders import ledger_in as _ledger
from cosmati.cli.ledger_folders import opened as _opened
from cosmati.cli.ledger_queries import answered, derive, policy_effect, query, sql
from cosmati.errors import LedgerError, RefutedError, TamperError
from cosmati.ledger.policy_changes import PolicyInForce
from cosmati.ledger.proof import check_inclusion, prove_inclusion
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.reader import read_verifier_key
from cosmati.ledger.verify import LEVEL_0, LedgerReport, verify_ledger
from cosmati.provenance.voucher import FOLDER
from cosmati.records.artifacts import words_of
from cosmati.records.ledger import StepEntry

app = typer.Typer(
    cls=Answering,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Verify a run's ledger, and ask it what it knows. 0 means yes, 1 no, 2 that there is no answer.",
)
app.command()(query)
app.command()(derive)
app.command()(sql)
app.command("policy-effect")(policy_effect)


@app.command()
def verify(
    folder: Folder,
    vkey: Key = None,
    pinned: Annotated[
        Path | None,
        typer.Option(help="A copy of an earlier `checkpoint` file of this ledger, which the ledger must go on from."),
    ] = None,
) -> None:
    """Check everything: signature, hashes, details, which entry may follow which, and each step against its policy.

    Exits with 1 and says what is wrong if anything doesn't verify, or isn't a continuation of the pinned checkpoint.

    \b
    Examples:
      cosmati ledger verify cosmati-quickstart/governed-run
      cosmati ledger verify RUN --vkey "$(cat operator.vkey)" --pinned checkpoint-of-last-week
    """  # noqa: D301
    directory = _ledger(folder)
    note = None if pinned is None else pinned.read_text("utf-8", "replace")
    try:
        report = verify_ledger(directory, vkey=vkey, pinned=note)
    except TamperError as error:
        msg = f"{directory} doesn't verify: {error}"
        raise RefutedError(msg) from error
    typer.echo(f"Verified: {report.size} entries, {report.num_steps} steps, {report.num_attempts} attempt(s)")
    typer.echo(f"  origin    {report.origin}")
    typer.echo(f"  key       {report.key_id}" + ("" if vkey else "  (the ledger's own: pass --vkey to pin it)"))
    typer.echo(f"  root      {report.root}")
    if report.pinned_size is not None:
        typer.echo(f"  pinned    its first {report.pinned_size} entries are those of {pinned}")
    typer.echo(f"  evidence  {report.evidence_level}")
    typer.echo(f"  the run {'has ended' if report.has_ended else 'has not ended'}")
    for amendment in report.amendments:
        for name, was, now in amendment.changes:
            typer.echo(f"  from step {amendment.step} on, {name}: {now}, was {was}")
    _say_provenance(directory, report)
    _say_withdrawn(directory, report)
    _say_policies(directory, report.policies)
    _say_artifacts(directory, report)
    if report.num_unsigned:
        typer.echo(f"  {report.num_unsigned} further entries aren't signed yet, and weren't checked")
    if report.diverged_steps:
        typer.echo(f"  steps that came out differently when run again: {list(report.diverged_steps)}")


def _say_provenance(directory: Path, report: LedgerReport) -> None:
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
            keys = ", ".join(keyid[:12] for keyid in source["keyids"])
            typer.echo(f"{since}{source['target']}, signed by {keys} of {source['root'][:12]}, {facts['opened']}")


def _say_withdrawn(directory: Path, report: LedgerReport) -> None:
    """Say what was withdrawn since, and look whether the archive bears it out: each against that of its own time."""
    sources = [source for facts in report.provenance for source in facts["sources"]]
    manifests = {source["target"]: source["manifest_sha256"] for source in sources}
    known = list[Mapping[str, Any]]()
    for facts in report.withdrawn:
        try:
            from cosmati.provenance.authority.audit import audit_withdrawn
        except ImportError:
            return  # said above
        new = [one for one in facts["in_force"] if one not in known]
        known = facts["in_force"]
        for words, is_refuted in audit_withdrawn(directory / FOLDER, {**facts, "in_force": new}, manifests):
            if is_refuted:
                raise RefutedError(f"What was withdrawn from the run in {directory} doesn't hold: {words}.")
            typer.echo(f"  withdrawn {words}")


def _say_policies(directory: Path, policies: Sequence[PolicyInForce]) -> None:
    """Say who vouched for each policy that steps went by, and look whether the archive bears it out."""
    for number, policy in enumerate(policies):
        since = f"  policy    {f'from step {policy.step} on, ' if number else ''}"
        audited, problems = _audited(directory, policy)
        # What a ledger says of signatures that don't hold isn't looked at further.
        if problems := problems or policy.problems(read_verifier_key(directory).text):
            raise RefutedError(f"Who signed the policy of {directory} doesn't hold: " + "; ".join(problems))
        typer.echo(f"{since}{audited}")


def _say_artifacts(directory: Path, report: LedgerReport) -> None:
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
    keys = ", ".join(keyid[:12] for keyid in source["keyids"])
    return f"{source['target']}, signed by {keys} of {source['root'][:12]}, {policy.facts['opened']}", []


@app.command()
def decisions(
    folder: Folder,
    class_name: Annotated[str, typer.Option("--class", help="Of one class; of all if left out.")] = "",
    vkey: Key = None,
) -> None:
    """Say what became of each class's rows, and why: admitted, gated, deferred or rejected, from which step to which.

    Bands and grades that no microbatch had share a line where the decision is the same; --class tells them apart.

    \b
    Examples:
      cosmati ledger decisions cosmati-quickstart/governed-run
      cosmati ledger decisions RUN --class customer/tickets
    """  # noqa: D301
    from cosmati.routing.proposals import Proposal, proposals  # needs PyTorch, as `check-weights` does

    ledger, unsigned = _opened(folder, vkey)
    shared = dict[tuple[object, ...], list[Proposal]]()
    for number, one in enumerate(proposals(ledger, class_name)):
        own = number if class_name or one.num_microbatches else None
        shared.setdefault((one.class_name, one.start_step, one.end_step, one.decision, own), []).append(one)
    for group in shared.values():
        one, is_alike = group[0], all(other.because == group[0].because for other in group)
        rows = f"{one.num_rows} rows in {one.num_microbatches} microbatches"
        kinds = one.kind if len(group) == 1 else f"{len(group)} kinds of rows"
        name = ", ".join(filter(None, (one.class_name, kinds)))
        typer.echo(f"{one.decision:<6} {name}, steps {one.start_step} to {one.end_step}: {rows}")
        for line in one.because if is_alike else (f"each for its own reason: --class '{one.class_name}' tells them",):
            typer.echo(f"       {line}")
    typer.echo(unsigned or LEVEL_0)


@app.command()
def prove(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run folder, or its ledger folder; none with --check.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Number of the step to prove, from 0.")] = None,
    entry: Annotated[int | None, typer.Option(help="Index of the entry to prove, from 0.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the proof; printed if left out.")] = None,
    check: Annotated[Path | None, typer.Option(metavar="FILE", help="A proof to check, made by this command.")] = None,
    vkey: Key = None,
) -> None:
    """Prove that the signed log holds a step or an entry, to somebody who has the operator's key alone; or check that.

    \b
    Examples:
      cosmati ledger prove RUN --step 40 --out step-40.json
      cosmati ledger prove --check step-40.json --vkey "$(cat operator.vkey)"
    """  # noqa: D301
    if check is not None:
        if vkey is None or folder is not None:
            msg = "A proof is checked with the operator's key alone: cosmati ledger prove --check FILE --vkey KEY."
            raise LedgerError(msg)
        found = check_inclusion(check.read_text("utf-8", "replace"), vkey)
        what = type(found.entry).__name__.removesuffix("Entry").lower()
        number = f" {found.entry.step}" if isinstance(found.entry, StepEntry) else ""
        typer.echo(f"Yes. Entry {found.index} of the log {found.origin} is {what}{number}, with the details given.")
        typer.echo(f"  signed    {found.head.size} entries, root {found.head.root.hex()}")
        typer.echo(
            "It doesn't show what else is in the log: which policy is in force, or whether a resume superseded it."
        )
        return
    if folder is None:
        msg = "Nothing to prove or to check. Give a run folder with --step or --entry, or --check FILE."
        raise LedgerError(msg)
    proof = prove_inclusion(_ledger(folder), step=step, entry=entry, vkey=vkey)
    if out is None:
        typer.echo(proof, nl=False)
    else:
        out.write_text(proof, "utf-8")
        typer.echo(str(out))


@app.command("check-weights")
def check_weights_of(
    folder: Folder,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A safetensors file; those of the newest checkpoint if left out."),
    ] = None,
    vkey: Key = None,
) -> None:
    """Compare weights with the roots that the ledger signs: are they what the run came to?

    It is about parameters and buffers. What optimizers keep isn't compared.

    \b
    Examples:
      cosmati ledger check-weights RUN
      cosmati ledger check-weights RUN --weights delivered/model.safetensors
    """  # noqa: D301
    directory = _ledger(folder)
    from cosmati.cli.weights import check_weights, named_weights  # needs PyTorch, and nothing else here does

    path = weights or named_weights(folder, directory)
    found = check_weights(VerifiedLedger(directory, vkey), path)
    typer.echo(f"Yes. {path} holds the weights after {found.step} steps.")
    typer.echo(f"  root      {found.root.hex()}, signed by entry {found.index}")


@app.command()
def show(folder: Folder, vkey: Key = None) -> None:
    """Show how many rows of each class reached each region.

    \b
    Example:
      cosmati ledger show cosmati-quickstart/governed-run
    """  # noqa: D301
    answer = answered(_ledger(folder), vkey)
    cells = [one.contribution for one in answer.taught]
    classes, regions = (tuple(dict.fromkeys(getattr(c, name) for c in cells)) for name in ("class_name", "region"))
    width = max(len(name) for name in classes)
    typer.echo(" " * width + "".join(f"{region:>14}" for region in regions))
    rows = {(c.class_name, c.region): c.num_rows for c in cells}
    for name in classes:
        counts = "".join(f"{rows[name, region] or '·':>14}" for region in regions)
        typer.echo(f"{name:<{width}}{counts}")
    typer.echo(f"Rows over {answer.num_steps} steps. {LEVEL_0}.")
    for label, one in answer.tables[-1].artifacts.items():
        typer.echo(f"{label}: {words_of(one)}")
    if answer.unsigned:
        typer.echo(answer.unsigned)
