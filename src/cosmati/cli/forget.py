"""`cosmati forget`: a plan first, then drop, replay or ablation, a certificate, what verifies it; legal holds."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cosmati.cli.errors import STOPPED, Question
from cosmati.cli.files import load_recipe
from cosmati.cli.ledger_folder import Quorum, ReplayFile, Witnesses
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import ForgetError, RunError
from cosmati.forget import holds
from cosmati.forget.ablation import Wrap
from cosmati.forget.asked import IdKind, ToForget, read_ids
from cosmati.forget.certificate import verify_certificate
from cosmati.forget.deletion import Deletion, begin, begun_in, carry_out, default_out
from cosmati.forget.making import Make, RecipeThen
from cosmati.forget.packs import asked_of, kind_read
from cosmati.forget.past_run import PastRun
from cosmati.forget.planning import DeletionPlan, Option, plan_deletion
from cosmati.forget.request import Request
from cosmati.forget.subjects import SubjectIndex, read_key
from cosmati.ledger.evidence import TrustedEvidence
from cosmati.recipes.recipe import Recipe
from cosmati.storage.lock import FileLock
from cosmati.train.trainer import Trainer


class _OfRuns(TyperGroup):
    """The group of these commands: what isn't one of them is a run, to plan for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  (a class that typer keeps private)
        """Take `cosmati forget RUN ...` for `cosmati forget run RUN ...`."""
        is_named = bool(args) and (args[0] in self.commands or args[0] in ("--help", "-h"))
        return super().parse_args(ctx, args if is_named or not args else ["run", *args])


app = typer.Typer(
    cls=_OfRuns,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Plan a deletion from a run, do it, certify it; keep what is on legal hold.",
)
RunFolderArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder that keeps a ledger.")]
Classes = Annotated[list[str] | None, typer.Option("--class", help="All rows of a class, and of those below it.")]
RowsFile = Annotated[
    Path | None,
    typer.Option(
        "--rows", help="Rows as the run calls them, of packs by token the documents: a file with an id a line."
    ),
]
DocumentsFile = Annotated[
    Path | None,
    typer.Option("--documents", help="Documents of packs: a file likewise. Of packs read as rows, whole ones."),
]
PacksFile = Annotated[
    Path | None, typer.Option("--packs", help="Whole packs: a file likewise. Of packs read by token, their documents.")
]
Subject = Annotated[str | None, typer.Option("--subject", metavar="ID", help="All rows of a person; needs --subjects.")]
SubjectsFile = Annotated[
    tuple[Path, Path] | None,
    typer.Option("--subjects", metavar="INDEX KEY", help="The index of subjects, and the file of its key."),
]
Files = dict[IdKind, Path | None]
"""Those that name rows, by what the option that gives one says their ids are of."""
RunRecipe = Annotated[
    str | None, typer.Option("--recipe", metavar="FILE[:FUNCTION]", help="The run's recipe; it is run.")
]
RunSettings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="As the run had it: config.seed=3.")
]
Because = Annotated[str, typer.Option("--because", help="Why, for the record.")]


@app.command()
def run(  # noqa: PLR0913, PLR0917  (a command's options)
    run: RunFolderArgument,
    classes: Classes = None,
    rows: RowsFile = None,
    documents: DocumentsFile = None,
    packs: PacksFile = None,
    subject: Subject = None,
    subjects: SubjectsFile = None,
    recipe: RunRecipe = None,
    settings: RunSettings = None,
    method: Annotated[str | None, typer.Option(help="drop, replay or ablate; the cheapest exact one.")] = None,
    repair_steps: Annotated[
        int, typer.Option(min=0, help="Steps of repair after an ablation; 0 is a tenth of the run's.")
    ] = 0,
    out: Annotated[Path | None, typer.Option(help="The new run's folder; beside RUN.")] = None,
    delete_superseded: Annotated[
        bool,
        typer.Option(
            "--delete-superseded", help="Then delete RUN's checkpoints that learnt it, and shred its rows' keys."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without this, the plan is printed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as JSON.")] = False,
) -> None:
    """Plan what it takes to forget classes or rows, and with --yes do it.

    `cosmati forget RUN` is short for `cosmati forget run RUN`. RUN stays as it is: the result is a new run folder,
    which goes on with RUN's ledger, and a certificate in it. Killed, the same command goes on.

    \b
    drop     leaves out what is the class's own, where the run promises isolated(class, region): exact, at once
    replay   trains again from before first contact, with tombstones in place of the content: exact, and takes steps
    ablate   sets what only or mostly the class taught to zero, and trains the rest on: approximate, and measured

    A number may be the id of a pack and of a document. A line of a file says which by JSON, {"document": 17} or
    {"pack": 17}, and so do --documents and --packs. --rows is what the run itself calls its rows: the plan says what
    that is, and which of the numbers are of both.

    \b
    Examples:
      cosmati forget runs/one --class licensed/news
      cosmati forget runs/one --rows ids.txt --recipe one.py --method replay --yes
      cosmati forget runs/one --subject 4711 --subjects people.index people.key --recipe one.py
      cosmati forget verify runs/one-without-3f9c21aa/certificates/0001.json
    """  # noqa: D301  (\b is click's mark for lines to leave as they are)
    own = None if recipe is None else load_recipe(recipe, settings or [])
    files: Files = {"rows": rows, "documents": documents, "packs": packs}
    asked, make = _asked(classes, files, subject, subjects, own), None if own is None else maker(own)
    if repair_steps and yes and method != "ablate":
        raise ForgetError("Only an ablation is repaired: --repair-steps goes with --method ablate.")
    with held(run):
        past = PastRun(run.resolve())
        out = out or default_out(past, asked, method)
        # One that was begun isn't planned again: what it began from may be deleted by now.
        begun = begun_in(out) if yes else None
        if begun is None or not begun.is_of(asked.digest(past.salt), method, repair_steps):
            past.refuse_succeeded()
            request = Request.open(past, asked, make, repair_steps=repair_steps)
            plan = plan_deletion(request)
            if not yes:
                _show(plan, asked.doubtful, as_json=as_json)
                return
            _say_notes(plan, asked.doubtful)
            begun = begin(request, method or _cheapest(plan), out)
            del request
        done = carry_out(past, asked, begun, make, out, delete_superseded=delete_superseded, say=_say)
    _tell(done)


@app.command(cls=Question)
def verify(
    certificate: Annotated[Path, typer.Argument(help="A certificate, of RUN/certificates.")],
    ledger: Annotated[
        Path | None, typer.Option(help="A copy of the ledger; the one of the certificate's own run.")
    ] = None,
    vkey: Annotated[
        str | None, typer.Option("--vkey", help="The operator's verifier key, from a source you trust.")
    ] = None,
    witnesses: Witnesses = None,
    quorum: Quorum = 0,
    replayed: ReplayFile = None,
) -> None:
    """Check a certificate against a copy of the ledger; nothing else of the operator's is needed.

    0 means that the ledger bears it out, 1 that it doesn't, 2 that there is no answer.
    """
    trusted = TrustedEvidence.parse(witnesses or (), quorum, replayed)
    directory = ledger or certificate.resolve().parent.parent / "ledger"
    found = verify_certificate(certificate, directory, vkey=vkey, witnesses=trusted)
    told = found.told
    typer.echo(f"Yes: {told['run']} was asked to forget {told['asked']['what']}, {told['at']}.")
    typer.echo(f"  {told['method']}: {told['strength']}")
    for line in _measured(told):
        typer.echo(f"  measured     {line}")
    for line in found.checked:
        typer.echo(f"  checked      {line}")
    for line in found.not_checked:
        typer.echo(f"  not checked  {line}")
    for line in _uncovered(told):
        typer.echo(f"  not covered  {line}")
    for line in told["notes"]:
        typer.echo(f"  note         {line}")
    believed = "" if vkey else " The ledger's own key is believed: give --vkey."
    typer.echo(f"Evidence: {found.evidence}.{believed}")


@app.command()
def hold(
    run: RunFolderArgument,
    because: Because,
    classes: Classes = None,
    rows: RowsFile = None,
    documents: DocumentsFile = None,
    packs: PacksFile = None,
    subject: Subject = None,
    subjects: SubjectsFile = None,
    recipe: RunRecipe = None,
    settings: RunSettings = None,
) -> None:
    """Put a legal hold on classes or rows: nothing of them is forgotten before it's released.

    With the run's recipe an index of subjects is compared with its data: one of other data would name other rows.
    """
    own = None if recipe is None else load_recipe(recipe, settings or [])
    files: Files = {"rows": rows, "documents": documents, "packs": packs}
    asked = _asked(classes, files, subject, subjects, own)
    with held(run):
        past = PastRun(run)
        past.refuse_succeeded()
        if asked.classes and past.is_governed:
            asked.names_in(past.ledger.classes)
        made = holds.hold(run, asked, because)
    typer.echo(f"Hold {made.number} is on {asked.words} of {run}.")


@app.command()
def release(
    run: RunFolderArgument, number: Annotated[int, typer.Argument(help="Of the hold.")], because: Because
) -> None:
    """Release a legal hold."""
    with held(run):
        holds.release(run, number, because)
    typer.echo(f"Hold {number} of {run} is released.")


def _asked(
    classes: Sequence[str] | None,
    files: Files,
    subject: str | None,
    subjects: tuple[Path, Path] | None,
    recipe: Recipe | None,
) -> ToForget:
    options = [("class", classes), *files.items(), ("subject", subject)]
    given = [f"--{name}" for name, one in options if one]
    if len(given) != 1:
        known = ", ".join(f"--{name}" for name, _ in options)
        raise ForgetError(f"Say what is meant by one of {known}; given: {', '.join(given) or 'none'}.")
    if classes:
        return ToForget(classes=tuple(classes))
    for kind, path in files.items():
        if path is not None:
            return _asked_by_ids(kind, path, recipe)
    if subjects is None:
        msg = "A subject's rows are found by an index that was made of the data. Give it: --subjects INDEX KEY."
        raise ForgetError(msg)
    index, key = subjects
    source = None if recipe is None else recipe.data()
    # An index of other data would name other rows.
    dataset = getattr(source, "dataset", None)
    found = SubjectIndex.open(index, read_key(key), dataset if isinstance(dataset, StreamingDataset) else None)
    if recipe is None and len(found.find(subject or "").documents):
        raise ForgetError(
            "They're in packs, and whether their ids are of packs or of documents is up to the run. Give its --recipe."
        )
    ids = found.rows_of(subject or "", whole_packs=source is not None and kind_read(source) != "documents")
    return ToForget(rows=frozenset(ids), subject=subject or "")


def _asked_by_ids(option: IdKind, path: Path, recipe: Recipe | None) -> ToForget:
    kind, ids = read_ids(path)
    if kind != "rows" and option not in ("rows", kind):
        raise ForgetError(f"{path} says that its ids are of {kind}, and it's given as --{option}. Give it as --{kind}.")
    kind = option if kind == "rows" else kind
    if recipe is not None:
        return asked_of(recipe.data(), kind, ids)
    if kind == "rows":
        return ToForget(rows=ids)
    raise ForgetError(f"What ids of {kind} are to the run is up to how it reads its packs. Give its --recipe.")


def maker(recipe: Recipe) -> Make:
    """Return what makes a recipe's trainer over other data, in another folder, also as it was before a stop."""

    def make(
        wrap: Wrap,
        folder: Path | None,
        /,
        then: RecipeThen | None = None,
        **config: Any,  # noqa: ANN401  (settings of `RunConfig`)
    ) -> Trainer:
        own = recipe
        if then is not None:
            policy, optimizers = then.policy_for(recipe.policy), then.optimizers_for(recipe.optimizers)
            own = dataclasses.replace(recipe, policy=policy, optimizers=optimizers)
        settings = dataclasses.replace(recipe.config, run_folder=folder, **config)
        return dataclasses.replace(own, data=lambda: wrap(recipe.data()), config=settings).trainer()

    return make


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep others from training in the folder, or forgetting; under torchrun the first rank does."""
    if not (folder / "run.json").is_file():
        raise RunError(f"{folder} is no run folder: it has no run.json. Give what --run-folder or RunConfig named.")
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    try:
        lock = FileLock(folder / "lock")
    except BlockingIOError as error:
        msg = f"{folder} is in use: a process trains in it, or forgets. Wait for its end, or stop it with Ctrl-C."
        raise RunError(msg) from error
    with lock:
        yield


def _cheapest(plan: DeletionPlan) -> str:
    exact = [one for one in plan.options if not one.is_approximate]
    found = next((one for one in exact if one.is_possible), None)
    if found is None:
        why = "; ".join(f"{one.method}: {', '.join(one.why_not)}" for one in exact)
        rest = [one.method for one in plan.options if one.is_approximate and one.is_possible]
        mend = "".join(f" What is approximate has to be asked for by name: --method {one}." for one in rest)
        raise ForgetError(f"Nothing {'exact ' if rest else ''}is possible. {why}.{mend}")
    return found.method


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        typer.echo(line)


def _show(plan: DeletionPlan, doubtful: Sequence[int], *, as_json: bool) -> None:
    if as_json:
        _say(json.dumps(plan.to_mapping(), indent=1))
        return
    _say(f"{plan.run}: forget {plan.asked}")
    _say_notes(plan, doubtful)
    if plan.first_contact is None:
        _say("No step had any of it: there is nothing to forget.")
        for line in plan.not_covered:
            _say(f"  not covered  {line}")
        return
    given = f"{plan.num_rows} rows were given to it, of" if plan.num_rows else "of"
    _say(f"  first contact at step {plan.first_contact}; {given} class {', '.join(plan.classes)}")
    for one in plan.options:
        _say(_line(one))
        for note in one.why_not or one.notes:
            _say(f"             {note}")
    for derived in plan.derived:
        _say(f"  {derived.status:<12} {derived.kind} {derived.path}, step {derived.step}")
    for line in plan.not_covered:
        _say(f"  not covered  {line}")
    _say("Nothing was done. To do it: the same command with --method NAME --yes.")


def _say_notes(plan: DeletionPlan, doubtful: Sequence[int]) -> None:
    """Say what is to be said of the ids; these themselves stand here alone, and in no record."""
    for note in plan.notes:
        _say(f"  note         {note}")
    if doubtful:
        _say(f"               {', '.join(map(str, doubtful[:10]))}{' ...' if doubtful[10:] else ''}")


def _line(one: Option) -> str:
    if not one.is_possible:
        return f"  {one.method:<10} not possible"
    minutes = "" if one.minutes is None else f", about {one.minutes:.1f} minutes"
    cost = f"{one.num_steps} steps{minutes}" if one.num_steps else "no training"
    return f"  {one.method:<10} {one.strength} ({cost})"


def _measured(told: Any) -> Iterator[str]:  # noqa: ANN401  (JSON)
    for name, values in told["ablation"]["measured"].items() if "ablation" in told else ():
        yield f"{name}: {' -> '.join(f'{one:.4f}' for one in values)} (before, ablated, repaired)"


def _uncovered(told: Any) -> Iterator[str]:  # noqa: ANN401  (JSON)
    for one in told["derived"]:
        if one["status"] == "not covered":
            yield f"{one['kind']} {one['path']}, step {one['step']}"
    yield from told["not_covered"]


def _tell(done: Deletion) -> None:
    if done.certificate is None or done.told is None:
        if done.outcome == "stopped":
            _say("Stopped. The same command goes on from what is on disk.")
            raise typer.Exit(STOPPED)
        return
    _say(f"{done.told['method']}: {done.told['strength']}")
    for line in _measured(done.told):
        _say(f"  measured     {line}")
    _say(f"The {'repaired run' if 'ablation' in done.told else 'run without it'}: {done.out}")
    for line in _uncovered(done.told):
        _say(f"  not covered  {line}")
    _say(f"Certificate: {done.certificate}. Check it: cosmati forget verify {done.certificate}")
