"""`cosmati quickstart`: train, compare, govern and report, in minutes, offline."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from cosmati.cli.study import summary
from cosmati.errors import RunError
from cosmati.explorer.drawing import Theme, heat_map_svg, tradeoff_svg
from cosmati.explorer.report import write_report
from cosmati.ledger.verify import verify_ledger
from cosmati.recipes.governed import governance_facts
from cosmati.recipes.quickstart import (
    QuickstartSize,
    digits_study,
    governed_recipe,
    language_study,
    quickstart_policy_text,
    run_governed,
    search_rates,
)
from cosmati.records.governance import GovernanceFacts
from cosmati.records.run import RunRecord
from cosmati.records.study import StudyRecord
from cosmati.routing.policy_file import load_policy
from cosmati.study.runner import run_study
from cosmati.train.facts import describe_hardware

MINUTES = 4.5
"""What the full size takes on two cores, nearly."""
_THEMES: tuple[Theme, ...] = ("light", "dark")


def quickstart(
    output: Annotated[Path, typer.Option(help="Folder for everything that is written.")] = Path("cosmati-quickstart"),
    minutes: Annotated[
        float | None, typer.Option(min=0.2, help="Aim at so many minutes on two cores, with shorter runs.")
    ] = None,
) -> None:
    """Train, compare, govern and report in minutes, offline, on data that this machine has.

    A small language model learns from the Python source on this machine: a tuned baseline against a composition of
    methods, at several budgets and seeds. One more run is governed by a policy and keeps a ledger. A second study tries
    methods on handwritten digits. What was stopped goes on with the same command.

    \b
    Examples:
      cosmati quickstart
      cosmati quickstart --output /tmp/try --minutes 1
    """  # noqa: D301
    run_quickstart(output, minutes=minutes)


def run_quickstart(
    output: Path, *, minutes: float | None = None, size: QuickstartSize | None = None, console: Console | None = None
) -> Path:
    """Do all of the quickstart and return the path of its report.

    Args:
        output: folder for everything that is written.
        minutes: aim at so many minutes on two cores; None takes the full size.
        size: how much to do before `minutes` scales it.
        console: where progress goes; None means standard error.

    Raises:
        CosmatiError: an extra isn't installed, or the ledger doesn't verify.
    """
    began = time.perf_counter()
    console = console or Console(stderr=True)
    size = size or QuickstartSize()
    size = size if minutes is None else size.scaled(minutes / MINUTES)
    output.mkdir(parents=True, exist_ok=True)
    studies, facts, runs = _work(output, size, console)
    _draw(output, studies[0], facts)
    report = write_report(
        output, title="Cosmati quickstart", studies=studies, runs=runs, governance=facts, output=Path("report.html")
    )
    _say_what_next(output, report, studies, time.perf_counter() - began)
    return report


def _work(
    output: Path, size: QuickstartSize, console: Console
) -> tuple[list[StudyRecord], GovernanceFacts, list[RunRecord]]:
    hardware = describe_hardware(torch.device("cpu"))
    policy = output / "policy.yaml"
    if not policy.exists():
        policy.write_text(quickstart_policy_text())
    console.print("1/4  Read the Python source of this machine", highlight=False)
    library = size.language.library()
    console.print("     and search the learning rates of the language models", highlight=False)
    trials = search_rates(size)
    console.print("2/4  Train one language model under policy.yaml, with a ledger", highlight=False)
    folder = output / "governed-run"
    trainer = run_governed(governed_recipe(size, trials, load_policy(policy)), folder)
    facts = governance_facts(trainer, library, folder)
    console.print("3/4  Compare language models: baseline and composition", highlight=False)
    compare = partial(run_study, hardware=hardware, command=f"cosmati quickstart --output {output}", console=console)
    language = compare(language_study(size, trials), output / "language-study")
    console.print("4/4  Compare training methods on handwritten digits", highlight=False)
    digits = compare(digits_study(size), output / "digits-study")
    return [language, digits], facts, [RunRecord.from_json((folder / "run.json").read_text())]


def _draw(output: Path, study: StudyRecord, facts: GovernanceFacts) -> None:
    for theme in _THEMES:
        (output / f"tradeoff-{theme}.svg").write_text(tradeoff_svg(study, theme))
        (output / f"policy-{theme}.svg").write_text(heat_map_svg(facts, theme))
    (output / "governance.json").write_text(facts.to_json())


def _say_what_next(output: Path, report: Path, studies: list[StudyRecord], seconds: float) -> None:
    for study in studies:
        typer.echo(f"\n{study.name}, {study.quality_name} against training time:")
        for line in summary(study):
            typer.echo(line)
    run = output / "governed-run"
    found = verify_ledger(run / "ledger")
    if not found.has_ended:
        msg = f"The governed run in {run} hasn't ended. Run the quickstart again: it goes on from the last checkpoint."
        raise RunError(msg)
    typer.echo(f"\nLedger: {found.size} entries verify.  Done in {seconds:.0f} s.\n")
    typer.echo(f"Open the report:              {report}")
    typer.echo(f"Verify the ledger yourself:   cosmati ledger verify {run}")
    typer.echo(f"Ask it who taught what:       cosmati ledger query {run} --class open/psf --region embedding")
    typer.echo(
        f"Why is a cell as it is:       cosmati policy explain open/psf embedding --file {output / 'policy.yaml'}"
    )
    typer.echo(f"Change the policy:            edit {output / 'policy.yaml'}, remove {run}, run the quickstart again")
