"""`cosmati policy`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cosmati.cli.errors import Question
from cosmati.cli.files import load_recipe
from cosmati.errors import PolicyError
from cosmati.provenance.taxonomy import software_licences
from cosmati.recipes.language import LanguageTask, python_gpt_composed
from cosmati.recipes.quickstart import quickstart_policy_text
from cosmati.routing.policy import CompiledPolicy, check_rules, compile_policy
from cosmati.routing.policy_analysis import explain as explain_cell
from cosmati.routing.policy_analysis import heat_map_text
from cosmati.routing.policy_file import PolicyFile, load_policy
from cosmati.routing.regions import partition_parameters

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Check, show and explain policy files.")
PolicyArgument = Annotated[Path | None, typer.Argument(help="A policy file; the quickstart's if left out.")]
RecipeFile = Annotated[
    str | None, typer.Option("--recipe", metavar="FILE[:FUNCTION]", help="The model; the quickstart's GPT if left out.")
]
Steps = Annotated[int, typer.Option(min=1, help="Length of the run.")]


def _load(file: Path | None) -> PolicyFile:
    return load_policy(quickstart_policy_text() if file is None else file)


def _compile(policy: PolicyFile, recipe: str | None, steps: int) -> CompiledPolicy:
    made = load_recipe(recipe, []) if recipe else python_gpt_composed(LanguageTask())
    regions = partition_parameters(made.build_model(), policy.regions, allow_tied=policy.allow.tied)
    taxonomy = made.taxonomy or software_licences()
    return compile_policy(policy, taxonomy=taxonomy, regions=regions, num_steps=steps)


@app.command()
def check(file: PolicyArgument = None, recipe: RecipeFile = None, steps: Steps = 1000) -> None:
    """Check that a policy parses, that its regions divide the model, and that it decides every cell.

    \b
    Examples:
      cosmati policy check
      cosmati policy check policy.yaml --recipe my_model.py
    """  # noqa: D301
    compiled = _compile(_load(file), recipe, steps)
    cells = len(compiled.classes) * len(compiled.regions) * len(compiled.phases)
    typer.echo(
        f"Sound: {cells} cells are decided ({len(compiled.classes)} classes, {len(compiled.regions)} regions, "
        f"{len(compiled.phases)} phases)."
    )
    typer.echo(f"Digest {compiled.policy_digest.hex()}")


@app.command()
def show(file: PolicyArgument = None, recipe: RecipeFile = None, steps: Steps = 1000) -> None:
    """Draw a policy: classes down, regions across, the weight in each cell, one table a phase.

    \b
    Example:
      cosmati policy show policy.yaml --steps 5000
    """  # noqa: D301
    compiled = _compile(_load(file), recipe, steps)
    typer.echo("\n\n".join(heat_map_text(compiled, phase.name) for phase in compiled.phases))


@app.command(cls=Question)
def explain(
    class_name: Annotated[str, typer.Argument(metavar="CLASS", help="Such as open/psf.")],
    region: Annotated[str, typer.Argument(help="Such as embedding.")],
    phase: Annotated[str, typer.Option(help="Phase of the run; the last one if left out.")] = "",
    file: Annotated[Path | None, typer.Option(help="A policy file; the quickstart's if left out.")] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="FILE[:FUNCTION]", help="Its taxonomy has the classes; software licences if left out."),
    ] = None,
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
    taxonomy = (load_recipe(recipe, []).taxonomy if recipe else None) or software_licences()
    if policy.taxonomy != taxonomy.name:
        raise PolicyError(
            f"The policy's classes are those of the taxonomy {policy.taxonomy!r}, and these are {taxonomy.name!r}. "
            "Give the recipe that has it: --recipe FILE[:FUNCTION]."
        )
    found = explain_cell(policy, class_name, region, phase or policy.phase_names[-1], taxonomy=taxonomy)
    check_rules(policy, taxonomy=taxonomy)
    result = f"weight {found.weight:g}" if found.result == "weight" else found.result
    typer.echo(f"{found.class_path} in {found.region}, phase {found.phase}: {result}")
    typer.echo(f"  because {found.why}")
    typer.echo(f"  decided by: {found.winner or 'the default'}")
    for rule in found.considered:
        typer.echo(f"  considered: {rule}")
