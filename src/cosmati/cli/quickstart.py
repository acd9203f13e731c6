"""`cosmati quickstart`: train, compare, govern and report, in minutes, offline."""

from __future__ import annotations

import importlib.util
import math
import shlex
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from cosmati.cli.deletion_shown import read_deletion
from cosmati.cli.quickstart_deletion import WITHOUT
from cosmati.cli.quickstart_governed import GOVERNED, PRICE, REHEARSAL, Signed, governed_and_priced, signed_or_declared
from cosmati.cli.study import summary
from cosmati.errors import DivergenceError, MissingExtraError, RunError
from cosmati.explorer.class_marks import class_marks
from cosmati.explorer.drawing import Theme, chain_svg, heat_map_svg, tradeoff_svg
from cosmati.explorer.evidence import committed_evidence
from cosmati.explorer.price import Price
from cosmati.explorer.report import write_report
from cosmati.explorer.run_view import RunView
from cosmati.explorer.trust_drawing import trust_drawing
from cosmati.forget.succession import CERTIFICATES
from cosmati.ledger.verify import verify_ledger
from cosmati.progress import ProgressDisplay
from cosmati.recipes.quickstart import (
    QuickstartSize,
    Trial,
    digits_study,
    language_study,
    quickstart_policy_text,
    rate_search,
)
from cosmati.recipes.recipe import Recipe
from cosmati.records.governance import GovernanceFacts
from cosmati.records.study import StudyRecord
from cosmati.routing.policy_file import load_policy
from cosmati.study.runner import run_study
from cosmati.train.facts import describe_hardware

MINUTES = 5.5
"""What the full size takes on two cores, nearly."""
NEEDED = {"sklearn": "scikit-learn", "jinja2": "Jinja2", "plotly": "Plotly"}
"""Modules of extras, and what people call them."""
_THEMES: tuple[Theme, ...] = ("light", "dark")


def quickstart(
    output: Annotated[Path, typer.Option(help="Folder for everything that is written.")] = Path("cosmati-quickstart"),
    minutes: Annotated[
        float | None, typer.Option(min=0.2, help="Aim at so many minutes on two cores, with shorter runs.")
    ] = None,
) -> None:
    """Train, compare, govern and report in minutes, offline, on data that this machine has.

    A small language model learns from the Python source on this machine: a tuned baseline against a composition of
    methods, at several budgets and seeds. One more run is governed by a policy and keeps a ledger; runs without the
    policy show what it costs, and one package of its data leaves it again. A second study tries methods on
    handwritten digits. What was stopped goes on with the same command.

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
        CosmatiError: an extra isn't installed, which is told before anything runs, or the ledger doesn't verify.
    """
    if missing := [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]:
        msg = f"The quickstart needs {', '.join(missing)}. Run: pip install 'cosmati[vision,explorer]'"
        raise MissingExtraError(msg)
    began = time.perf_counter()
    console = console or Console(stderr=True)
    size = size or QuickstartSize()
    size = size if minutes is None else size.scaled(minutes / MINUTES)
    output.mkdir(parents=True, exist_ok=True)
    commands = _commands(output, minutes)
    studies, run, price = _work(output, size, console, commands)
    assert run.governance is not None, "its ledger verified"
    _draw(output, studies[0], run, run.governance)
    report = write_report(
        output / "report.html",
        title="Cosmati quickstart",
        studies=studies,
        run=run,
        price=price,
        evidence=committed_evidence(),
        deletion=read_deletion(output / WITHOUT),
    )
    _say_what_next(output, report, studies, time.perf_counter() - began)
    return report


def _commands(output: Path, minutes: float | None) -> tuple[str, ...]:
    """Return what makes all of it again, checks the ledger, and writes the run's own page."""
    where = shlex.quote(str(output))
    run, price = (shlex.quote(str(output / name)) for name in (GOVERNED, PRICE))
    length = "" if minutes is None else f" --minutes {minutes:g}"
    return (
        f"cosmati quickstart --output {where}{length}",
        f"cosmati ledger verify {run}",
        f"cosmati report {run} --against {price}",
    )


def _work(
    output: Path, size: QuickstartSize, console: Console, commands: Sequence[str]
) -> tuple[list[StudyRecord], RunView, Price]:
    hardware = describe_hardware(torch.device("cpu"))
    policy = output / "policy.yaml"
    if not policy.exists():
        policy.write_text(quickstart_policy_text())
    console.print("1/4  Read the Python source of this machine", highlight=False)
    size.language.library()
    console.print("     and search the learning rates of the language models", highlight=False)
    trials = search_rates(size, console)
    console.print("2/4  Train one language model under policy.yaml, with a ledger", highlight=False)
    signed = signed_or_declared(size, load_policy(policy), output / REHEARSAL)
    for line in _who_signs(signed, output / REHEARSAL):
        console.print(f"     {line}", highlight=False, soft_wrap=True)
    console.print(f"     and what the policy costs: with and without it, {len(size.seeds)} seeds", highlight=False)
    console.print("     and what it takes to forget one package of its data", highlight=False)
    say = partial(console.print, "    ", highlight=False, soft_wrap=True)
    run, price = governed_and_priced(size, trials, signed, output, commands, say)
    console.print("3/4  Compare language models: baseline and composition", highlight=False)
    compare = partial(run_study, hardware=hardware, command=commands[0], console=console)
    language = compare(language_study(size, trials), output / "language-study")
    console.print("4/4  Compare training methods on handwritten digits", highlight=False)
    digits = compare(digits_study(size), output / "digits-study")
    return [language, digits], run, price


def _who_signs(signed: Signed, folder: Path) -> tuple[str, ...]:
    if signed.authority is None:
        return ("Nobody signs data and policy: they are declared. For signatures: pip install 'cosmati[authority]'",)
    return (
        f"Data and policy are signed: a rehearsal, all of whose keys lie in {folder}.",
        "In earnest data owners, model risk and whoever trains each hold their own.",
    )


def search_rates(size: QuickstartSize, console: Console) -> tuple[Trial, ...]:
    """Train each trial of the learning-rate search."""
    trials, asked = list[Trial](), rate_search(size)
    with ProgressDisplay("     trials", console=console) as progress:
        for arm, lr, recipe in asked:
            progress.update(len(trials) / len(asked), f"{arm}, learning rate {lr:g}")
            trials.append(_tried(arm, lr, recipe))
    return tuple(trials)


def _tried(arm: str, lr: float, recipe: Recipe) -> Trial:
    trainer = recipe.trainer()
    try:
        result = trainer.fit()
    except DivergenceError:
        clock = trainer.clock
        return Trial(arm, lr, math.inf, clock.step, clock.rows, clock.seconds)
    if result.outcome == "stopped":
        raise KeyboardInterrupt
    quality = result.metrics["bits_per_byte"]
    return Trial(arm, lr, quality, result.clock.step, result.clock.rows, result.seconds)


def _draw(output: Path, study: StudyRecord, run: RunView, facts: GovernanceFacts) -> None:
    marks = class_marks(run)
    for theme in _THEMES:
        if run.trust is not None and not run.trust.problems:
            chain = trust_drawing(run.trust, facts, marks)
            (output / f"chain-{theme}.svg").write_text(chain_svg(chain, marks, theme))
        (output / f"tradeoff-{theme}.svg").write_text(tradeoff_svg(study, theme))
        (output / f"policy-{theme}.svg").write_text(heat_map_svg(facts, theme))
    (output / "governance.json").write_text(facts.to_json())


def _say_what_next(output: Path, report: Path, studies: list[StudyRecord], seconds: float) -> None:
    for study in studies:
        typer.echo(f"\n{study.name}, {study.quality_name} against training time:")
        for line in summary(study):
            typer.echo(line)
    run, price, without = output / GOVERNED, output / PRICE, output / WITHOUT
    found = verify_ledger(run / "ledger")
    if not found.has_ended:
        msg = f"The governed run in {run} hasn't ended. Run the quickstart again: it goes on from the last checkpoint."
        raise RunError(msg)
    typer.echo(f"\nLedger: {found.size} entries verify.  Done in {seconds:.0f} s.\n")
    typer.echo(f"Open the report:              {report}")
    shown, policy = shlex.quote(str(run)), shlex.quote(str(output / "policy.yaml"))
    certificate = shlex.quote(str(without / CERTIFICATES / "0001.json"))
    typer.echo("A page of any other run:      cosmati report RUN")
    typer.echo(f"Verify the ledger yourself:   cosmati ledger verify {shown}")
    typer.echo(f"Ask it who taught what:       cosmati ledger query {shown} --class open/psf --region embedding")
    typer.echo(f"Check the deletion:           cosmati forget verify {certificate}")
    typer.echo(f"Why is a cell as it is:       cosmati policy explain open/psf embedding --file {policy}")
    typer.echo(f"Change the policy:            edit {policy}, remove {run}, {without} and {price}, run it again")
