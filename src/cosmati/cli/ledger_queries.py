"""`cosmati ledger query`, `derive` and `sql`: what a ledger says of who taught what, and when.

A ledger of some thousand entries is read whole for each answer. A longer one is answered for from tables that were
derived from it, unless its entries are asked for (`--prove`); exclusion statements always read the entries.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cosmati.cli.column_keys import (
    NO_RIGHTS,
    AuthorityPlace,
    AuthorityRoot,
    CredentialFile,
    HolderKey,
    ReadingRights,
    ReleasedKeys,
    opened_ledger,
)
from cosmati.cli.ledger_folder import Folder, Key, Quorum, ReplayFile, Waiting, Witnesses, ledger_of
from cosmati.cli.ledger_taught import records_of, say_learning, say_rows, say_sources, say_taught
from cosmati.cli.subject_options import IndexFile, IndexKey
from cosmati.errors import LedgerError
from cosmati.ledger.derived.answers import ClassTaught, num_standing, steps_taught, taught
from cosmati.ledger.derived.folder import place_of
from cosmati.ledger.derived.learning import ClassLearning, region_moves
from cosmati.ledger.derived.learning import learning as learning_of
from cosmati.ledger.derived.opened import DerivedLedger, Milestone, open_derived, open_proven
from cosmati.ledger.derived.views import MAX_SECONDS, RowForm, run_sql
from cosmati.ledger.evidence import LEVEL_0, TrustedEvidence
from cosmati.ledger.query import ContributionTable, VerifiedLedger, contributions, direct_write_exclusion, require
from cosmati.ledger.reader import read_head, read_verifier_key
from cosmati.ledger.sealing import SEALED
from cosmati.ledger.tables import Tables
from cosmati.records.joint_classes import members_of
from cosmati.storage.duck import has_duckdb

READ_WHOLE = 10_000
"""Entries up to which a ledger is read whole for each answer: about a second."""
_STEP_FOLDER = re.compile(r"step-(\d+)")

AskedLearning = Annotated[
    bool,
    typer.Option("--learning", help="What was measured beside norms: directions, entropies, updates, digests."),
]
OfClass = Annotated[str | None, typer.Option("--class", help="Which regions did this class reach?")]
OfRegion = Annotated[str | None, typer.Option("--region", help="Which classes reached this region?")]
AskedBy = Annotated[
    str | None,
    typer.Option(
        metavar="FIELD=ID",
        help="What did some rows teach, and when? Those of annotator=, label_function= or rater=, of subject=, of "
        "row=ID, of rows=FILE with an id a line, or of any column of the data, such as path=NAME.",
    ),
]
AskedRecipe = Annotated[
    str | None, typer.Option(metavar="FILE[:FUNCTION]", help="With --by: what the run was made from.")
]
AskedCheckpoint = Annotated[
    str, typer.Option(metavar="STEP|FOLDER", help="What had this checkpoint learnt? Its steps, or its folder.")
]
AskedEach = Annotated[
    Literal["", "phase", "policy"], typer.Option(help="Tell it by phase, or by policy as it changed in mid-run.")
]
ProveOption = Annotated[
    bool, typer.Option("--prove", help="Read all signed entries for the answer, and compare derived tables with them.")
]
FormatOption = Annotated[
    RowForm, typer.Option("--format", help="A table for people, CSV, or JSON with an object a line.")
]


@dataclass(frozen=True)
class LedgerAnswer:
    """What was taught, and what that was read from."""

    taught: Sequence[ClassTaught]
    num_steps: int
    tables: Sequence[Tables]
    level: str
    said: str
    unsigned: str


def answered(
    directory: Path,
    vkey: str | None,
    trusted: TrustedEvidence,
    *,
    prove: bool = False,
    checkpoint: str = "",
    each: Literal["", "phase", "policy"] = "",
    rights: ReadingRights = NO_RIGHTS,
) -> LedgerAnswer:
    """Return what each class gave each region: from the entries of a short ledger, from the tables of a long one."""
    waiting = Waiting(directory)
    size = read_head(directory, read_verifier_key(directory, vkey)).size
    is_plain = not checkpoint and not each
    if is_plain and (rights.credential or size <= READ_WHOLE or not has_duckdb()):
        ledger = opened_ledger(VerifiedLedger(directory, vkey, trusted), rights)
        return _read_whole(ledger, contributions(ledger), waiting.beyond(size))
    with derived_tables(directory, vkey, trusted, prove=prove, rights=rights) as (derived, said):
        at = _milestone(derived, checkpoint) if checkpoint else None
        found, num_steps = taught(derived, at=at, each=each), num_standing(derived, at)
        of = "" if at is None else f"As of the checkpoint after {at.step} steps (entry {at.entry}). "
        unsigned = waiting.beyond(derived.index.tree_size)
        return LedgerAnswer(found, num_steps, derived.tables, derived.evidence_level, of + said, unsigned)


def _read_whole(ledger: VerifiedLedger, table: ContributionTable, unsigned: str) -> LedgerAnswer:
    said = f"Read from all {table.tree_size} signed entries, root {table.root}; level {table.evidence_level}"
    found = [ClassTaught("", one) for one in table.cells]
    return LedgerAnswer(found, table.num_steps, ledger.tables, table.evidence_level, said, unsigned)


@contextmanager
def derived_tables(
    directory: Path, vkey: str | None, trusted: TrustedEvidence, *, prove: bool, rights: ReadingRights = NO_RIGHTS
) -> Iterator[tuple[DerivedLedger, str]]:
    """Open a ledger's derived tables, with what may be read of it, and say what they are worth."""
    if not prove:
        with open_derived(directory, vkey=vkey, witnesses=trusted) as derived:
            rights.open_tables(derived)
            # Who has seen or replayed the tree hasn't seen what was derived from it.
            own = "" if derived.evidence_level == LEVEL_0 else ". That is the tree's level: --prove reads its entries"
            yield derived, derived.origin_line + own
        return
    with open_proven(directory, vkey=vkey, witnesses=trusted) as (derived, was_other):
        rights.open_tables(derived)
        said = f"Read from all {derived.index.tree_size} signed entries again. {derived.origin_line}"
        if was_other:
            said += f". The tables in {derived.folder} said something else than the entries, and were replaced"
        yield derived, said


def _milestone(derived: DerivedLedger, checkpoint: str) -> Milestone:
    """Return the checkpoint that a number of steps, a checkpoint's folder or a file in it names."""
    if checkpoint.isascii() and checkpoint.isdigit():
        return derived.milestone(step=int(checkpoint))
    places = Path(checkpoint).resolve()
    named = next((m for one in (places, places.parent) if (m := _STEP_FOLDER.fullmatch(one.name))), None)
    if named is None:
        msg = f"{checkpoint} names no checkpoint. Give a number of steps, or a folder: RUN/checkpoints/step-00000004."
        raise LedgerError(msg)
    return derived.milestone(step=int(named[1]))


def query(  # noqa: PLR0913, PLR0917  (a command's options)
    folder: Folder,
    class_name: OfClass = None,
    region: OfRegion = None,
    by: AskedBy = None,
    recipe: AskedRecipe = None,
    key: IndexKey = None,
    index: IndexFile = None,
    checkpoint: AskedCheckpoint = "",
    each: AskedEach = "",
    steps: Annotated[bool, typer.Option("--steps", help="Say at which steps, as spans.")] = False,
    learning: AskedLearning = False,
    prove: ProveOption = False,
    form: FormatOption = "table",
    vkey: Key = None,
    witnesses: Witnesses = None,
    quorum: Quorum = 0,
    replayed: ReplayFile = None,
    credential: CredentialFile = None,
    released: ReleasedKeys = None,
    holder_key: HolderKey = None,
    authority: AuthorityPlace = "",
    root: AuthorityRoot = "",
) -> None:
    """Ask which class taught which region. With both, state that the class wrote nothing there, or that it did.

    With --by, ask at which steps some rows reached which regions. The ledger holds no rows: the recipe says which they
    were, and the run's folder has the keys to compare them with what the ledger commits to.

    What is measured of sensitive classes is sealed, and says so. --credential, --keys and --holder-key open what they
    cover.

    Short ledgers are read whole. Of long ones the answer comes from tables that were derived from them (`ledger
    derive`), and says of which tree; --prove reads the signed entries, and a statement with both names always does.

    \b
    Examples:
      cosmati ledger query RUN --class open/psf
      cosmati ledger query RUN --region embedding --steps
      cosmati ledger query RUN --class open/psf --region embedding
      cosmati ledger query RUN --checkpoint RUN/checkpoints/step-00000400 --each phase
      cosmati ledger query RUN --class open/psf --learning
      cosmati ledger query RUN --by annotator=ada --recipe recipe.py
      cosmati ledger query RUN --by subject=4711 --key ~/keys/posts.key --recipe recipe.py
    """  # noqa: D301
    trusted = TrustedEvidence.parse(witnesses or (), quorum, replayed)
    if by is not None:
        if class_name or region or not recipe:
            raise LedgerError("--by asks of all classes and regions, and needs the run's --recipe FILE. Give these.")
        from cosmati.cli.rows_taught import say_rows_taught  # needs PyTorch

        say_rows_taught(ledger_of(folder).parent, by, recipe, vkey, trusted, key=key, index=index)
        return
    if recipe or key or index:
        raise LedgerError("--recipe, --key and --index are for --by. Leave them out, or ask for somebody's rows.")
    rights = ReadingRights(credential, released, holder_key, authority, root)
    of_all_steps = not (checkpoint or each or steps)
    if learning:
        if not of_all_steps:
            raise LedgerError("--learning takes all steps that stand. Leave out --checkpoint, --each and --steps.")
        _say_learning(ledger_of(folder), class_name, region, form, vkey, trusted, prove=prove, rights=rights)
        return
    if class_name and region and of_all_steps:
        _say_exclusion(ledger_of(folder), class_name, region, form, vkey, trusted)
        return
    answer = answered(ledger_of(folder), vkey, trusted, prove=prove, checkpoint=checkpoint, each=each, rights=rights)
    chosen = _chosen(answer, class_name, region)
    spans = _spans(ledger_of(folder), vkey, chosen, checkpoint) if steps else {}
    _say_answer(ledger_of(folder), answer, chosen, spans, each, form)


def _say_answer(
    directory: Path,
    answer: LedgerAnswer,
    chosen: Sequence[ClassTaught],
    spans: dict[tuple[str, str], Any],
    each: str,
    form: RowForm,
) -> None:
    if form != "table":
        say_rows(records_of(chosen, spans, answer.said), form)
        return
    say_taught(chosen, spans, each)
    say_sources(directory, answer.tables, chosen)
    typer.echo("\n".join(filter(None, (answer.said + ".", answer.unsigned))))


def _say_learning(
    directory: Path,
    class_name: str | None,
    region: str | None,
    form: RowForm,
    vkey: str | None,
    trusted: TrustedEvidence,
    *,
    prove: bool,
    rights: ReadingRights,
) -> None:
    with derived_tables(directory, vkey, trusted, prove=prove, rights=rights) as (derived, said):
        require(derived.classes, class_name, "class")
        require(derived.regions, region, "region")
        of_classes = [
            o for o in learning_of(derived) if class_name in (None, o.class_name) and region in (None, o.region)
        ]
        moves = [one for one in region_moves(derived) if region in (None, one.region)]
        sealed = sorted({name for one in derived.tables for name in one.details.get(SEALED, {}).get("classes", ())})
    if form != "table":
        names = [field.name for field in fields(ClassLearning)]
        say_rows((names, map(astuple, of_classes)), form)
        return
    say_learning(of_classes, () if class_name else moves)
    if sealed:
        but = " but for what your credential opens" if rights.credential else ""
        typer.echo(f"What was measured of {', '.join(sealed)} is sealed, and isn't in this{but}.")
    typer.echo(f"{said}.")


def _say_exclusion(
    directory: Path, class_name: str, region: str, form: RowForm, vkey: str | None, trusted: TrustedEvidence
) -> None:
    """State that a class wrote nothing in a region; it raises where that's false."""
    waiting = Waiting(directory)
    s = direct_write_exclusion(directory, class_name, region, vkey=vkey, witnesses=trusted)
    if form != "table":
        say_rows(([*asdict(s)], [tuple(asdict(s).values())]), form)
        return
    unsigned = waiting.beyond(s.tree_size)
    typer.echo(f"No logged step gave rows tagged {s.class_name} any weight in {s.region}.")
    typer.echo(
        f"  scanned   {s.num_steps_scanned} steps, {s.num_class_microbatches} microbatches of the class, in all "
        f"{s.tree_size} signed entries"
    )
    if s.num_steps_without_region:
        typer.echo(
            f"  but       {s.num_steps_without_region} of these steps went by a policy without a region of that "
            "name: what it called these parameters isn't in this statement"
        )
    if unsigned:
        typer.echo(f"  but       {unsigned}")
    for policy in s.policy_digests:
        typer.echo(f"  policy    {policy}")
    typer.echo(f"  root      {s.root}")
    typer.echo(f"  evidence  {s.evidence_level}")
    typer.echo("This is about direct writes. It doesn't say that the class had no influence on the region.")


def _chosen(answer: LedgerAnswer, class_name: str | None, region: str | None) -> list[ClassTaught]:
    """Return what reached something, of a class (and the joint ones that have it as a member) and a region."""
    for asked, kind, name in ((class_name, "class", "class_name"), (region, "region", "region")):
        names = tuple(dict.fromkeys(getattr(one.contribution, name) for one in answer.taught))
        if asked is not None and asked not in names:
            raise LedgerError(f"The ledger has no {kind} {asked!r}. It has {', '.join(names)}.")
    return [
        one
        for one in answer.taught
        if one.contribution.num_microbatches
        and (class_name in (None, one.contribution.class_name) or class_name in members_of(one.contribution.class_name))
        and region in (None, one.contribution.region)
    ]


def _spans(
    directory: Path, vkey: str | None, chosen: Iterable[ClassTaught], checkpoint: str
) -> dict[tuple[str, str], Any]:
    with open_derived(directory, vkey=vkey) as derived:
        at = _milestone(derived, checkpoint) if checkpoint else None
        pairs = dict.fromkeys((one.contribution.class_name, one.contribution.region) for one in chosen)
        return {pair: steps_taught(derived, *pair, at=at, joint=False) for pair in pairs}


def derive(
    folder: Folder,
    anew: Annotated[bool, typer.Option("--anew", help="From all signed entries, whatever tables there are.")] = False,
    vkey: Key = None,
    witnesses: Witnesses = None,
    quorum: Quorum = 0,
    replayed: ReplayFile = None,
) -> None:
    """Make the tables from which long ledgers are queried, or bring them up to the signed head; queries do it, too.

    They lie beside the ledger, in `derived`, as Parquet files, and can be removed at any time.

    \b
    Example:
      cosmati ledger derive RUN
    """  # noqa: D301
    directory = ledger_of(folder)
    trusted = TrustedEvidence.parse(witnesses or (), quorum, replayed)
    with open_derived(directory, vkey=vkey, witnesses=trusted, anew=anew) as derived:
        parts = derived.index.parts
        steps, cells = (sum(part.files.get(table, ("", 0))[1] for part in parts) for table in ("steps", "cells"))
        size = sum(path.stat().st_size for paths in derived.files.values() for path in paths)
        typer.echo(f"{place_of(directory)}: {size / 1e6:.1f} MB, {steps} steps, {cells} cells")
        typer.echo(f"{derived.origin_line}.")


def sql(  # noqa: PLR0913, PLR0917  (a command's options)
    folder: Folder,
    statement: Annotated[str, typer.Argument(metavar="SELECT", help="One SELECT over the views.")],
    seconds: Annotated[float, typer.Option(min=0.1, help="How long it may take.")] = MAX_SECONDS,
    prove: ProveOption = False,
    form: FormatOption = "table",
    vkey: Key = None,
    witnesses: Witnesses = None,
    quorum: Quorum = 0,
    replayed: ReplayFile = None,
    credential: CredentialFile = None,
    released: ReleasedKeys = None,
    holder_key: HolderKey = None,
    authority: AuthorityPlace = "",
    root: AuthorityRoot = "",
) -> None:
    """Ask in SQL: one SELECT over steps, cells, taught, norms, policy, checkpoints, sources and more (docs/queries.md).

    It reads the tables derived from the ledger and nothing else: no file, no network, no extension, and it changes
    nothing. What the answer came from is said on standard error.

    \b
    Examples:
      cosmati ledger sql RUN "SELECT class, region, sum(rows) FROM taught WHERE stands GROUP BY ALL"
      cosmati ledger sql RUN "SELECT * FROM policies" --format json
    """  # noqa: D301
    directory = ledger_of(folder)
    trusted = TrustedEvidence.parse(witnesses or (), quorum, replayed)
    rights = ReadingRights(credential, released, holder_key, authority, root)
    with derived_tables(directory, vkey, trusted, prove=prove, rights=rights) as (derived, said):
        num_sealed = derived.rows("SELECT count(*) FROM sealed_file")[0][0]
        say_rows(run_sql(derived, statement, seconds=seconds), form)
        typer.echo(f"{said}.", err=True)
        if num_sealed:
            typer.echo(f"{num_sealed} gradient norms are sealed, and null: the view `sealed` says which.", err=True)
