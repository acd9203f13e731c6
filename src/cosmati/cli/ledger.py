"""`cosmati ledger`. Each command exits with 0 for yes, 1 for no, and 2 where nothing could be read to answer from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cosmati.cli.errors import Answering
from cosmati.cli.ledger_folder import Folder, Key, Quorum, ReplayFile, Witnesses, ledger_of, opened
from cosmati.cli.ledger_policy_effect import policy_effect
from cosmati.cli.ledger_queries import answered, derive, query, sql
from cosmati.cli.ledger_release import release_keys
from cosmati.cli.ledger_witness import app as witness_app
from cosmati.cli.ledger_words import say_artifacts, say_evidence, say_policies, say_provenance, say_withdrawn
from cosmati.cli.replay import replay_steps, spot_check
from cosmati.cli.row_blinds import blinds_for
from cosmati.errors import LedgerError, RefutedError, TamperError
from cosmati.ledger.evidence import TrustedEvidence
from cosmati.ledger.key_change import rotate_key
from cosmati.ledger.proof import check_inclusion, prove_inclusion
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.verify import verify_ledger
from cosmati.provenance.rehearsal import SAYS, rehearsed
from cosmati.provenance.voucher import FOLDER
from cosmati.records.artifacts import words_of
from cosmati.records.ledger import StepEntry

app = typer.Typer(
    cls=Answering,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Verify a run's ledger, and ask it what it knows. 0 means yes, 1 no, 2 that there is no answer.",
)
app.add_typer(witness_app, name="witness")
app.command()(query)
app.command()(derive)
app.command()(sql)
app.command("policy-effect")(policy_effect)


@app.command()
def verify(
    folder: Folder,
    vkey: Key = None,
    witnesses: Witnesses = None,
    quorum: Quorum = 0,
    replayed: ReplayFile = None,
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
    directory = ledger_of(folder)
    note = None if pinned is None else pinned.read_text("utf-8", "replace")
    trusted = TrustedEvidence.parse(witnesses or (), quorum, replayed)
    try:
        report = verify_ledger(directory, vkey=vkey, pinned=note, witnesses=trusted)
    except TamperError as error:
        msg = f"{directory} doesn't verify: {error}"
        raise RefutedError(msg) from error
    typer.echo(f"Verified: {report.size} entries, {report.num_steps} steps, {report.num_attempts} attempt(s)")
    typer.echo(f"  origin    {report.origin}")
    typer.echo(f"  key       {report.key_id}" + ("" if vkey else "  (the ledger's own: pass --vkey to pin it)"))
    typer.echo(f"  root      {report.root}")
    if report.pinned_size is not None:
        typer.echo(f"  pinned    its first {report.pinned_size} entries are those of {pinned}")
    say_evidence(report)
    typer.echo(f"  the run {'has ended' if report.has_ended else 'has not ended'}")
    for amendment in report.amendments:
        for name, was, now in amendment.changes:
            typer.echo(f"  from step {amendment.step} on, {name}: {now}, was {was}")
    for say in (say_provenance, say_withdrawn, say_policies, say_artifacts):
        say(directory, report)
    for root in rehearsed(directory / FOLDER, report.vouched_facts):
        typer.echo(f"  rehearsal the authority {root[:12]} is {SAYS}")
    if report.num_unsigned:
        typer.echo(f"  {report.num_unsigned} further entries aren't signed yet, and weren't checked")
    if report.diverged_steps:
        typer.echo(f"  steps that came out differently when run again: {list(report.diverged_steps)}")


@app.command()
def decisions(
    folder: Folder,
    class_name: Annotated[str, typer.Option("--class", help="Of one class; of all if left out.")] = "",
    vkey: Key = None,
    witnesses: Witnesses = None,
    quorum: Quorum = 0,
    replayed: ReplayFile = None,
) -> None:
    """Say what became of each class's rows, and why: admitted, gated, deferred or rejected, from which step to which.

    Bands and grades that no microbatch had share a line where the decision is the same; --class tells them apart.

    \b
    Examples:
      cosmati ledger decisions cosmati-quickstart/governed-run
      cosmati ledger decisions RUN --class customer/tickets
    """  # noqa: D301
    from cosmati.routing.proposals import Proposal, proposals  # needs PyTorch, as `check-weights` does

    ledger, unsigned = opened(folder, vkey, TrustedEvidence.parse(witnesses or (), quorum, replayed))
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
    typer.echo(ledger.evidence_level)
    if unsigned:
        typer.echo(unsigned)


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
    witnesses: Witnesses = None,
    quorum: Quorum = 0,
    replayed: ReplayFile = None,
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
        found = check_inclusion(
            check.read_text("utf-8", "replace"), vkey, TrustedEvidence.parse(witnesses or (), quorum, replayed)
        )
        what = type(found.entry).__name__.removesuffix("Entry").lower()
        number = f" {found.entry.step}" if isinstance(found.entry, StepEntry) else ""
        typer.echo(f"Yes. Entry {found.index} of the log {found.origin} is {what}{number}, with the details given.")
        typer.echo(f"  signed    {found.head.size} entries, root {found.head.root.hex()}")
        typer.echo(f"  evidence  {found.evidence_level}")
        typer.echo(
            "It doesn't show what else is in the log: which policy is in force, or whether a resume superseded it."
        )
        return
    if folder is None:
        msg = "Nothing to prove or to check. Give a run folder with --step or --entry, or --check FILE."
        raise LedgerError(msg)
    proof = prove_inclusion(ledger_of(folder), step=step, entry=entry, vkey=vkey)
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
    witnesses: Witnesses = None,
    quorum: Quorum = 0,
    replayed: ReplayFile = None,
) -> None:
    """Compare weights with the roots that the ledger signs: are they what the run came to?

    It is about parameters and buffers. What optimizers keep isn't compared.

    \b
    Examples:
      cosmati ledger check-weights RUN
      cosmati ledger check-weights RUN --weights delivered/model.safetensors
    """  # noqa: D301
    directory = ledger_of(folder)
    from cosmati.audit.weights import check_weights, named_weights  # needs PyTorch, and nothing else here does

    path = weights or named_weights(folder, directory)
    ledger = VerifiedLedger(directory, vkey, TrustedEvidence.parse(witnesses or (), quorum, replayed))
    found = check_weights(ledger, path)
    typer.echo(f"Yes. {path} holds the weights after {found.step} steps.")
    typer.echo(f"  root      {found.root.hex()}, signed by entry {found.index}")
    typer.echo(f"  evidence  {ledger.evidence_level}")


@app.command()
def show(
    folder: Folder, vkey: Key = None, witnesses: Witnesses = None, quorum: Quorum = 0, replayed: ReplayFile = None
) -> None:
    """Show how many rows of each class reached each region.

    \b
    Example:
      cosmati ledger show cosmati-quickstart/governed-run
    """  # noqa: D301
    answer = answered(ledger_of(folder), vkey, TrustedEvidence.parse(witnesses or (), quorum, replayed))
    cells = [one.contribution for one in answer.taught]
    classes, regions = (tuple(dict.fromkeys(getattr(c, name) for c in cells)) for name in ("class_name", "region"))
    width = max(len(name) for name in classes)
    typer.echo(" " * width + "".join(f"{region:>14}" for region in regions))
    rows = {(c.class_name, c.region): c.num_rows for c in cells}
    for name in classes:
        counts = "".join(f"{rows[name, region] or '·':>14}" for region in regions)
        typer.echo(f"{name:<{width}}{counts}")
    typer.echo(f"Rows over {answer.num_steps} steps. {answer.level}.")
    for label, one in answer.tables[-1].artifacts.items():
        typer.echo(f"{label}: {words_of(one)}")
    if answer.unsigned:
        typer.echo(answer.unsigned)


@app.command("rotate-key")
def rotate(folder: Folder) -> None:
    """Sign with a new key from here on, with an entry that both keys sign. Nothing may be writing to the ledger.

    Who trusts the old key goes on to: the entry leads to the new one. A change that was broken off is finished.

    \b
    Example:
      cosmati ledger rotate-key RUN
    """  # noqa: D301
    from cosmati.train.run.folder import SUCCEEDED

    directory = ledger_of(folder)
    if (directory.parent / SUCCEEDED).exists():
        by = json.loads((directory.parent / SUCCEEDED).read_text())["by"]
        msg = f"{directory.parent} was succeeded by {by}, which goes on with its ledger: an entry here would be a fork."
        raise LedgerError(f"{msg} Change the key there.")
    old, new = rotate_key(directory, directory.parent / "private" / "operator.key")
    typer.echo(f"{new.text}")
    typer.echo(f"From here on this key signs, in place of {old.text}. Give it to those who witness the log.")


app.command("replay")(replay_steps)
app.command("blinds")(blinds_for)
app.command("release")(release_keys)
app.command("spot-check")(spot_check)
