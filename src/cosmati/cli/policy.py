"""`cosmati policy`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from cosmati.cli.errors import Question
from cosmati.cli.files import load_recipe
from cosmati.cli.taxonomy_file import read_taxonomy
from cosmati.core.method import operated
from cosmati.errors import PolicyError
from cosmati.provenance.taxonomy import Taxonomy, software_licences
from cosmati.recipes.language import LanguageTask, python_gpt_composed
from cosmati.recipes.policy_templates import MODELS, TEMPLATES, WRITTEN_FOR, policy_template, template_classes
from cosmati.recipes.quickstart import quickstart_policy_text
from cosmati.routing.grace import Finish
from cosmati.routing.policy import CompiledPolicy, check_rules, compile_policy, partition_by
from cosmati.routing.policy_analysis import explain as explain_cell
from cosmati.routing.policy_analysis import heat_map_text
from cosmati.routing.policy_diff import PolicyDiff, other_changes
from cosmati.routing.policy_file import PolicyFile, load_policy

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Begin, check, show, explain, compare and sign policies."
)
PolicyArgument = Annotated[Path | None, typer.Argument(help="A policy file; the quickstart's if left out.")]
RecipeFile = Annotated[
    str | None, typer.Option("--recipe", metavar="FILE[:FUNCTION]", help="The model; the quickstart's GPT if left out.")
]
TaxonomyFile = Annotated[
    Path | None,
    typer.Option("--taxonomy", metavar="FILE", help="The classes; the recipe's, or software licences, if left out."),
]
Steps = Annotated[int, typer.Option(min=1, help="Length of the run.")]


def _load(file: Path | None) -> PolicyFile:
    return load_policy(quickstart_policy_text() if file is None else file)


def _compile(policy: PolicyFile, recipe: str | None, steps: int, taxonomy: Path | None = None) -> CompiledPolicy:
    made = load_recipe(recipe, []) if recipe else python_gpt_composed(LanguageTask())
    classes = _classes(policy, taxonomy, made.taxonomy)
    regions = partition_by(policy, operated(made.build_model(), made.methods))
    return compile_policy(policy, taxonomy=classes, regions=regions, num_steps=steps)


def _classes(policy: PolicyFile, file: Path | None, own: Taxonomy | None) -> Taxonomy:
    """Return the taxonomy of a file, else the recipe's own, else that of software licences; it's the policy's."""
    classes = read_taxonomy(file) if file else own or software_licences()
    if policy.taxonomy != classes.name:
        raise PolicyError(
            f"The policy's classes are those of the taxonomy {policy.taxonomy!r}, and these are {classes.name!r}. "
            "Give its file, --taxonomy FILE, or the recipe that has it, --recipe FILE[:FUNCTION]."
        )
    return classes


@app.command()
def check(
    file: PolicyArgument = None, recipe: RecipeFile = None, taxonomy: TaxonomyFile = None, steps: Steps = 1000
) -> None:
    """Check that a policy parses, that its regions divide the model, and that it decides every cell.

    \b
    Examples:
      cosmati policy check
      cosmati policy check policy.yaml --recipe my_model.py
    """  # noqa: D301
    compiled = _compile(_load(file), recipe, steps, taxonomy)
    cells = len(compiled.weight) * len(compiled.regions) * len(compiled.phases)
    bands = f"{len(compiled.kinds)} kinds of rows in each, " if len(compiled.kinds) > 1 else ""
    typer.echo(
        f"Sound: {cells} cells are decided ({len(compiled.classes)} classes, {bands}{len(compiled.regions)} regions, "
        f"{len(compiled.phases)} phases)."
    )
    typer.echo(f"Digest {compiled.policy_digest.hex()}")


@app.command()
def show(
    file: PolicyArgument = None, recipe: RecipeFile = None, taxonomy: TaxonomyFile = None, steps: Steps = 1000
) -> None:
    """Draw a policy: classes down, regions across, the weight in each cell, one table a phase.

    \b
    Example:
      cosmati policy show policy.yaml --steps 5000
    """  # noqa: D301
    policy = _load(file)
    compiled = _compile(policy, recipe, steps, taxonomy)
    typer.echo("\n\n".join(heat_map_text(compiled, phase.name) for phase in compiled.phases))
    answers = {reason: f"finish {one.finish}" if isinstance(one, Finish) else one for reason, one in policy.graces}
    typer.echo("\nWhere nobody vouches for a class any more: " + "; ".join(f"{r}: {a}" for r, a in answers.items()))


@app.command()
def template(
    name: Annotated[str | None, typer.Argument(help=f"One of {', '.join(TEMPLATES)}; a list if left out.")] = None,
    model: Annotated[
        str, typer.Option(metavar="KIND", help=f"Whose regions it has: {', '.join(MODELS)}.")
    ] = WRITTEN_FOR,
    classes: Annotated[bool, typer.Option("--classes", help="The classes that it speaks of, in its place.")] = False,
) -> None:
    """Print a policy to begin with, commented for lawyers and engineers, or the classes that it speaks of.

    \b
    Examples:
      cosmati policy template
      cosmati policy template medical > policy.yaml
      cosmati policy template medical --classes > classes.yaml
      cosmati policy show policy.yaml --taxonomy classes.yaml
    """  # noqa: D301
    if name is None:
        typer.echo("\n".join(f"{one:<18}{about}" for one, about in TEMPLATES.items()))
    else:
        typer.echo(template_classes(name) if classes else policy_template(name, model), nl=False)


@app.command(cls=Question)
def diff(
    old: Annotated[Path, typer.Argument(help="The policy before.")],
    new: Annotated[Path, typer.Argument(help="The policy after.")],
    recipe: RecipeFile = None,
    taxonomy: TaxonomyFile = None,
    steps: Steps = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Say what changes between two versions of a policy: which classes gain and lose, and each cell.

    A cell is a class, a region and a span of steps; each line says whether it tightens or loosens. Names of regions and
    phases may differ: parameters and steps are compared. Exits with 0 where nothing changes, 1 where something does,
    and 2 where a policy is refused.

    \b
    Examples:
      cosmati policy diff policy.yaml wider.yaml
      cosmati policy diff policy.yaml wider.yaml --recipe my_model.py --steps 5000 --json
    """  # noqa: D301
    before, after = load_policy(old), load_policy(new)
    others = other_changes(before, after)
    old_table, new_table = (_compile(policy, recipe, steps, taxonomy) for policy in (before, after))
    found = PolicyDiff(old_table, new_table, others)
    typer.echo(json.dumps(found.to_mapping(), indent=2) if as_json else str(found))
    if found:
        raise typer.Exit(1)


@app.command()
def sign(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A policy file.")],
    authority: Annotated[Path, typer.Option(help="The folder of the repository of the authority for policies.")],
    keys: Annotated[
        list[Path] | None, typer.Option("--keys", help="A folder of private keys; again for more. AUTHORITY-keys.")
    ] = None,
    name: Annotated[str, typer.Option(help="Of the policy.")] = "main",
    number: Annotated[int | None, typer.Option(help="Of the version; the next one if left out.")] = None,
    run: Annotated[
        str, typer.Option(help="Of a change in mid-run: the run's folder, or the text of its operator.vkey.")
    ] = "",
    from_step: Annotated[int | None, typer.Option(help="Of a change: the step from which on it may act.")] = None,
    previous: Annotated[str, typer.Option(help="Of a change: the digest of the policy before it.")] = "",
) -> None:
    """Sign a policy: its canonical form becomes `policy/NAME/NUMBER` of an authority for policies.

    Where more people must sign than have keys here, what there is waits in AUTHORITY/pending, and the next one runs the
    same command. A change in mid-run names the run, the policy before it and the step from which on it may act.

    \b
    Examples:
      cosmati policy sign policy.yaml --authority policies --keys ~/keys --keys policies-keys
      cosmati policy sign wider.yaml --authority policies --keys ~/keys --run runs/one --from-step 4000
    """  # noqa: D301
    from cosmati.cli.keys import need_packages, ring_of

    need_packages()
    from cosmati.provenance.authority.policies import sign_policy
    from cosmati.provenance.authority.repository import AuthorityRepository

    policy, repository = load_policy(file), AuthorityRepository(authority)
    statement = _statement(run, from_step, previous)
    signed, state = sign_policy(
        repository, ring_of(authority, keys), name, policy.canonical, number=number, custom=statement
    )
    typer.echo(f"{signed.target}  {policy.digest.hex()}: {state}")


@app.command()
def change(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that is going on.")],
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="A policy file; none with --authority.")] = None,
    authority: Annotated[str, typer.Option(help="Where a signed one is: a folder, or a URL.")] = "",
    root: Annotated[str, typer.Option("--policy-root", help="SHA-256 of the authority's first root.")] = "",
    name: Annotated[str, typer.Option(help="Of the signed policy.")] = "main",
    number: Annotated[int | None, typer.Option(help="Of its version; the newest if left out.")] = None,
) -> None:
    """Leave another policy for a run that is going on: it takes it up without a stop, from a step on that it says.

    The run asks what a resume asks: whoever runs it may tighten, and what loosens was signed for it. What may not be
    made is left in RUN/policy-change-refused.json with the reason, and the run goes on as it was.

    \b
    Examples:
      cosmati policy change runs/one stricter.yaml
      cosmati policy change runs/one --authority policies --policy-root ROOT
    """  # noqa: D301
    from cosmati.storage.atomic import replace_file
    from cosmati.train.authority_watch import LOOK_EVERY
    from cosmati.train.policy_watch import FILE, LATE

    if (file is None) == (not authority) or bool(authority) != bool(root):
        raise PolicyError("Give a policy file, or --authority with --policy-root.")
    if not (run / "ledger").is_dir():
        raise PolicyError(
            f"{run} has no ledger, and a policy changes on record alone. Give the folder of a governed run."
        )
    if _is_completed(run):
        raise PolicyError(f"{run} was completed, and nothing looks for a policy there. {LATE}")
    if (run / FILE).exists():
        raise PolicyError(f"{run / FILE} waits to be taken up. Wait until the run has done so, or delete it.")
    signed = {"url": _anchored(authority), "root": root, "name": name, "number": number}
    told = signed if file is None else {"policy": load_policy(file).to_mapping()}
    replace_file(run / FILE, json.dumps(told).encode())
    typer.echo(f"{run / FILE}: the run looks every {LOOK_EVERY} steps, and its ledger says from which step on it acts.")


def _is_completed(run: Path) -> bool:
    try:
        return bool(json.loads((run / "run.json").read_text())["outcome"] == "completed")
    except (OSError, ValueError, KeyError, TypeError):
        return False  # The run's own looks decide.


def _anchored(url: str) -> str:
    return url if "://" in url else str(Path(url).absolute())


def _statement(run: str, from_step: int | None, previous: str) -> dict[str, str | int] | None:
    """Return what is said of a change in mid-run, None where it's none."""
    if not run and from_step is None and not previous:
        return None
    if not run or from_step is None:
        raise PolicyError("A change in mid-run names the run and the step: give --run and --from-step.")
    from cosmati.ledger.note import VerifierKey
    from cosmati.ledger.reader import read_verifier_key
    from cosmati.ledger.verify import verify_ledger

    if Path(run).is_dir():
        ledger = Path(run) / "ledger" if (Path(run) / "ledger").is_dir() else Path(run)
        key, report = read_verifier_key(ledger), verify_ledger(ledger)
        previous = previous or (report.policies[-1].digest.hex() if report.policies else "")
        if from_step < report.num_steps:
            msg = f"The run has taken {report.num_steps} steps, and a change is for what is to come: --from-step."
            raise PolicyError(msg)
    else:
        key = VerifierKey.parse(run)
    if not re.fullmatch(r"[0-9a-f]{64}", previous):
        raise PolicyError("A change names the policy before it: give its digest in hex with --previous.")
    return {"run": key.text, "previous": previous, "from_step": from_step}


@app.command(cls=Question)
def explain(
    class_name: Annotated[str, typer.Argument(metavar="CLASS", help="Such as open/psf.")],
    region: Annotated[str, typer.Argument(help="Such as embedding.")],
    phase: Annotated[str, typer.Option(help="Phase of the run; the last one if left out.")] = "",
    band: Annotated[str, typer.Option(help="Band of the class, where the policy has bands.")] = "",
    grade: Annotated[
        list[str] | None,
        typer.Option(metavar="MEASURE=GRADE", help="Of the rows; again for more. Not measured if left out."),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="A policy file; the quickstart's if left out.")] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="FILE[:FUNCTION]", help="Its taxonomy has the classes; software licences if left out."),
    ] = None,
    taxonomy: TaxonomyFile = None,
) -> None:
    """Say which rule decides what a class may teach a region, and against which others.

    A policy that would be refused before a run isn't explained: exit status 2, and what is wrong with it.

    \b
    Examples:
      cosmati policy explain open/psf embedding
      cosmati policy explain open/copyleft head --phase start --file policy.yaml
      cosmati policy explain customer/tickets embedding --file policy.yaml --recipe my_model.py
    """  # noqa: D301
    policy = _load(file)
    own = load_recipe(recipe, []).taxonomy if recipe and not taxonomy else None
    classes = _classes(policy, taxonomy, own)
    grades = dict(_measured(word) for word in grade or ())
    where = (class_name, region, phase or policy.phase_names[-1], band)
    found = explain_cell(policy, *where, taxonomy=classes, grades=grades)
    check_rules(policy, taxonomy=classes)
    result = f"weight {found.weight:g}" if found.result == "weight" else found.result
    rows = ", ".join(filter(None, (found.class_path, band, *(grade or ()))))
    typer.echo(f"{rows} in {found.region}, phase {found.phase}: {result}")
    typer.echo(f"  because {found.why}")
    typer.echo(f"  decided by: {found.winner or 'the default'}")
    for rule in found.considered:
        typer.echo(f"  considered: {rule}")
    for one in found.lowered:
        typer.echo(f"  lowered by: {one}")


def _measured(word: str) -> tuple[str, str]:
    measure, is_there, grade = word.partition("=")
    if not is_there:
        raise PolicyError(f"--grade {word}: say of what, such as --grade evidence=trial.")
    return measure, grade
