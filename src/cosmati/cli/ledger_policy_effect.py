"""`cosmati ledger policy-effect`: which policy was in force when, and what each change did."""

from __future__ import annotations

from dataclasses import asdict

import typer

from cosmati.cli.ledger_folder import Folder, Key, Quorum, ReplayFile, Waiting, Witnesses, ledger_of
from cosmati.cli.ledger_queries import FormatOption, ProveOption, derived_tables
from cosmati.cli.ledger_taught import say_rows
from cosmati.ledger.derived.answers import policy_effects, taught
from cosmati.ledger.evidence import TrustedEvidence


def policy_effect(
    folder: Folder,
    prove: ProveOption = False,
    form: FormatOption = "table",
    vkey: Key = None,
    witnesses: Witnesses = None,
    quorum: Quorum = 0,
    replayed: ReplayFile = None,
) -> None:
    """Say which policy was in force when, what each change did to the weights, and what was taught under each.

    \b
    Example:
      cosmati ledger policy-effect RUN
    """  # noqa: D301
    directory = ledger_of(folder)
    waiting = Waiting(directory)
    trusted = TrustedEvidence.parse(witnesses or (), quorum, replayed)
    with derived_tables(directory, vkey, trusted, prove=prove) as (derived, said):
        effects = policy_effects(derived)
        under = {
            (one.group, one.contribution.class_name, one.contribution.region): one.contribution
            for one in taught(derived, each="policy")
        }
        if form != "table":
            names = list(asdict(effects[0])) if effects else ["policy_epoch"]
            say_rows((names, [tuple(asdict(one).values()) for one in effects]), form)
            return
        for epoch, tables in enumerate(derived.tables):
            policy = dict(tables.entry.commitments).get("policy", b"").hex()
            begin = getattr(tables.entry, "step", 0)
            typer.echo(f"policy epoch {epoch}, from step {begin} on (entry {tables.index}): {policy}")
            absent = ["not there" if derived.tables[n].policy else "no policy: allowed" for n in (epoch - 1, epoch)]
            for one in (e for e in effects if e.policy_epoch == epoch):
                counts = [under.get((str(n), one.class_name, one.region)) for n in (epoch - 1, epoch)]
                rows, steps = ([getattr(c, name) if c else 0 for c in counts] for name in ("num_rows", "num_steps"))
                kind = ", ".join(filter(None, (one.class_name, one.band)))
                typer.echo(
                    f"  {kind} in {one.region}, {one.phase}: "
                    f"{_weight(one.before, one.decision_before, absent[0])} -> "
                    f"{_weight(one.after, one.decision_after, absent[1])}; "
                    f"{rows[0]} rows in {steps[0]} steps before, {rows[1]} in {steps[1]} after"
                )
        for line in filter(None, (said + ".", waiting.beyond(derived.index.tree_size))):
            typer.echo(line)


def _weight(weight: float | None, decision: str, absent: str) -> str:
    return absent if weight is None else f"{weight:g} ({decision})"
