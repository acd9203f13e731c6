"""`cosmati study`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cosmati.cli.runs import named_values
from cosmati.cli.store import form_of
from cosmati.errors import RunError
from cosmati.explorer.report import write_report
from cosmati.explorer.static_figures import write_figures
from cosmati.explorer.wording import claims_of, noise_sentences, prediction_rows
from cosmati.launch.studies import cluster_of, dry_run
from cosmati.records.study import ProfileRecord, StudyRecord
from cosmati.storage.atomic import replace_file
from cosmati.store.reading import study_record
from cosmati.store.tables import study_tables, write_tables
from cosmati.study.compose import PartPool, search_composition
from cosmati.study.costs import profile_costs
from cosmati.study.found_composition import found_lines, recipe_file
from cosmati.study.hardware import (
    check_same,
    extrapolated,
    price_of,
    priced,
    read_catalogue,
    recipe_digest,
    threads_of,
)
from cosmati.study.lines import writable
from cosmati.study.planning import plan_lines
from cosmati.study.python_file import call_of
from cosmati.study.registration import check_predictions
from cosmati.study.runner import (
    STARTED_FILE,
    STUDY_FILE,
    Study,
    finished_runs,
    hardware_of,
    run_study,
    unfinished_record,
)
from cosmati.study.search import no_search
from cosmati.study.statistics import mean_estimate

PROFILE_FILE = "profile.json"
CHOSEN_FILE = "chosen_recipe.py"

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Run and report studies: arms, budgets and seeds.")


@app.command()
def run(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE[:FUNCTION]", help="Python file with a function that returns a Study; it's run."),
    ],
    folder: Annotated[Path | None, typer.Option(help="Where the runs are kept; the study's name if left out.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs at a time, each in a process with one thread if 2 or more. 1, elsewhere 8."),
    ] = None,
    on: Annotated[str, typer.Option(help="What carries the runs out: local, slurm, ray.")] = "local",
    settings: Annotated[
        list[str] | None, typer.Option("--with", metavar="NAME=VALUE", help="A setting of what carries them out.")
    ] = None,
    is_dry: Annotated[
        bool, typer.Option("--dry-run", help="Show the batch script that Slurm would be given, and submit nothing.")
    ] = False,
) -> None:
    """Run all arms at all budgets and seeds. A study that was stopped goes on with the same command.

    FILE holds a function `study()`, or one named as FILE:name, that returns a cosmati.study.runner.Study. Finished
    runs are lines of runs.jsonl in the folder: a kill loses those that were going on, and a changed recipe runs again.

    Runs beside others are slower, so go on with the same number of jobs, or let the study profile its costs
    (cost_turns): that is done alone. What is predicted (registration) is written down before the first run, and
    can't be changed after it.

    On Slurm the runs are tasks of an array, on Ray tasks; the folder is on a disk that all nodes share. What a
    node's loss takes is run again. Searches of the study's own are done here.

    \b
    Examples:
      cosmati study run warmup_study.py --folder studies/warmup
      cosmati study run warmup_study.py --folder studies/warmup --jobs 2
      cosmati study run warmup_study.py --folder studies/warmup --jobs 16 --on slurm --with partition=gpu
    """  # noqa: D301
    study = _study_of(file)
    where = folder or Path(study.name)
    cluster = cluster_of(on, file, where, jobs, named_values("--with", settings))
    if is_dry:
        typer.echo(dry_run(cluster, study), nl=False)
        return
    said = [*(["--jobs", str(jobs)] if jobs and jobs > 1 else []), *(["--on", on] if cluster else [])]
    command = " ".join(["cosmati study run", file, *said, *(f"--with {one}" for one in settings or [])])
    record = run_study(study, where, command=command, jobs=jobs or 1, cluster=cluster)
    for line in summary(record):
        typer.echo(line)
    typer.echo(f"Write the report with: cosmati study report {where}")


@app.command()
def plan(
    file: Annotated[str, typer.Argument(metavar="FILE[:FUNCTION]", help="The study's Python file; it's run.")],
    folder: Annotated[Path | None, typer.Option(help="Where its runs are kept; the study's name if left out.")] = None,
    like: Annotated[
        Path | None, typer.Option(help="Record (study.json) of an earlier study of the kind: its spread and its times.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
) -> None:
    """Say what a study takes and what it can show, before its first run: runs, time, and seeds for gains of 1.1 to 1.5.

    No run of the study is made. What the function itself does, such as a search, is done, or is read where it's
    finished. How ratios vary comes from trials that were run on several seeds, or from an earlier study.

    \b
    Examples:
      cosmati study plan warmup_study.py --like studies/pilot/study.json --jobs 2
    """  # noqa: D301
    study = _study_of(file)
    check_predictions(study)
    finished = finished_runs(folder or Path(study.name))
    for line in plan_lines(study, finished=finished, like=_record_of(like) if like else None, jobs=jobs):
        typer.echo(line)


@app.command()
def profile(
    file: Annotated[str, typer.Argument(metavar="FILE[:FUNCTION]", help="The study's Python file; it's run.")],
    output: Annotated[Path, typer.Option("--output", "--out", help="The file to write.")] = Path(PROFILE_FILE),
    turns: Annotated[int, typer.Option(min=2, help="How many times each arm is profiled.")] = 5,
    like: Annotated[
        Path | None, typer.Option(help="The study's record (study.json): profile its recipes, with as many threads.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of a run whose recipe doesn't say; by default as here.")
    ] = None,
) -> None:
    """Profile what a step of each arm costs on this machine, without the study's runs.

    With the file, a study that ran elsewhere is reported as it would be here. Every arm does a short run with its
    schedule dilated, alone, in turns with the others. Nothing is searched: arms have the settings that the study's
    record (--like) says, or those of a search that was finished on this hardware. A study that ran with --jobs 2 has
    one thread a run: give its record (--like), or --threads 1. The report says where profiles and runs had other
    threads.

    \b
    Example, on another machine and then where the study is:
      cosmati study profile warmup_study.py --like study.json --output h200.json
      cosmati study report studies/warmup --profile h200.json
    """  # noqa: D301
    record = _record_of(like) if like else None
    with no_search(record):
        study = _study_of(file)
    recipes = {name: recipe_digest(arm.recipe_text) for name, arm in study.arms.items()}
    if record:
        check_same(record, study.name, recipes, what=f"{file}")
        threads = threads or threads_of(record)
    lines = output.with_name(f"{output.stem}-turns")
    hardware = hardware_of(study)
    costs = profile_costs(replace(study, cost_turns=turns), lines, hardware=hardware, num_threads=threads)
    made = ProfileRecord(study=study.name, hardware=hardware, recipes=recipes, costs=costs)
    with writable(output):
        replace_file(output, made.to_json().encode())
    had = " or ".join(str(n) for n in sorted({one.num_threads for one in costs}))
    typer.echo(f"On {hardware}, {had} thread{'' if had == '1' else 's'} a run:")
    for arm in study.arms:
        found = mean_estimate([one.seconds / one.steps * 1e3 for one in costs if one.arm == arm])
        typer.echo(f"  {arm}: {found.value:.3g} ms a step (95 % {found.low:.3g} to {found.high:.3g}, n = {found.n})")
    typer.echo(f"Report the study as on this machine: cosmati study report FOLDER --profile {output}")


@app.command()
def compose(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE[:FUNCTION]", help="Python file with a function that returns a PartPool; it's run."
        ),
    ],
    folder: Annotated[Path | None, typer.Option(help="Where the runs are kept; the pool's name if left out.")] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Runs at a time, each in a process with one thread if 2 or more.")
    ] = 1,
) -> None:
    """Search the best composition of a pool of parts at equal training time, and write it as a recipe's file.

    FILE holds a function `pool()`, or one named as FILE:name, that returns a cosmati.study.compose.PartPool. What a
    step of each composition costs is profiled first, and dearer ones get fewer steps. Every run is counted. A search
    that was stopped goes on with the same command.

    \b
    Examples:
      cosmati study compose parts.py --folder studies/parts
      cosmati train studies/parts/chosen_recipe.py
    """  # noqa: D301
    pool = call_of(file, PartPool, "pool")
    assert isinstance(pool, PartPool), "checked"
    where = folder or Path(pool.name)
    found = search_composition(pool, where, jobs=jobs)
    path, _, function = file.partition(":")
    chosen = where / CHOSEN_FILE
    with writable(chosen):
        replace_file(chosen, recipe_file(found, chosen, Path(path), function or "pool").encode())
    for line in found_lines(found):
        typer.echo(line)
    typer.echo(f"Train it with: cosmati train {chosen}")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a study.")],
    output: Annotated[
        Path | None, typer.Option("--output", "--out", help="The HTML file; report.html in the folder if left out.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Times by what `study profile` wrote on other hardware, marked as extrapolated.")
    ] = None,
    hardware: Annotated[str | None, typer.Option(help="Costs by the price of this entry of the catalogue.")] = None,
    catalogue: Annotated[Path | None, typer.Option(help="A catalogue of your own, in place of ours.")] = None,
    _html: Annotated[
        bool, typer.Option("--html", help="The HTML file; it's written in any case.", show_default=False)
    ] = True,
    png: Annotated[
        bool,
        typer.Option("--png", help="Its figures too, as PNG and SVG in `figures` beside it; takes Chromium."),
    ] = False,
) -> None:
    """Write a study as one HTML file that needs nothing from outside.

    A study that isn't finished is shown with the runs that are, and the page says so; what an earlier one left in the
    folder isn't shown then.

    \b
    Examples:
      cosmati study report studies/warmup
      cosmati study report studies/warmup --png
      cosmati study report studies/warmup --profile h200.json --hardware "NVIDIA H200 SXM5"
    """  # noqa: D301
    path = folder / STUDY_FILE
    is_open = (folder / STARTED_FILE).is_file()
    if not is_open and not path.is_file():
        msg = f"{folder} holds no {STUDY_FILE}. Run the study first: cosmati study run FILE --folder {folder}"
        raise RunError(msg)
    if catalogue and not hardware:
        raise RunError("A catalogue alone prices nothing. Name one of its entries: --hardware NAME.")
    record = unfinished_record(folder, study_record(folder)) if is_open else _record_of(path)
    if is_open:
        typer.echo(record.notes.partition("\n")[0], err=True)
    if profile:
        record = extrapolated(record, ProfileRecord.from_json(_text_of(profile)))
    if hardware:
        record = priced(record, price_of(hardware, read_catalogue(catalogue)))
    title = f"{record.name}{' (not finished)' * is_open}"
    page = write_report(output or folder / "report.html", title=title, studies=[record])
    typer.echo(str(page))
    for written in write_figures(record, page.parent / "figures") if png else ():
        typer.echo(str(written))


def _study_of(file: str) -> Study:
    study = call_of(file, Study, "study")
    assert isinstance(study, Study), "checked"
    return study


def _record_of(path: Path) -> StudyRecord:
    if path.name == STUDY_FILE and path.with_name(STARTED_FILE).exists():
        typer.echo(f"{path} is of before: its study was begun again since, and isn't finished.", err=True)
    try:
        return StudyRecord.from_json(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"The study's record can't be read: {error}. Name a {STUDY_FILE}.") from error


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a study, finished or not.")],
    to: Annotated[str, typer.Option("--to", help="parquet or csv.")] = "parquet",
    out: Annotated[Path | None, typer.Option(help="The folder to write into; `tables` in FOLDER if left out.")] = None,
) -> None:
    """Write a study as tables: runs, points, parts (seconds by part of the work), arms and costs.

    \b
    Example:
      cosmati study export studies/warmup --to csv --out tables
    """  # noqa: D301
    target, tables = out or folder / "tables", study_tables(study_record(folder))
    with writable(target):
        paths = list(write_tables(tables, target, form_of(to)))
    for path in paths:
        typer.echo(str(path))


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        msg = f"The profile can't be read: {error}. Write one with: cosmati study profile FILE --output {path}"
        raise RunError(msg) from error


def summary(record: StudyRecord) -> list[str]:
    """Return a line for each arm with its verdict and what it rests on, the noise floor, and the predictions."""
    lines = [f"  {claim.arm}: {claim.verdict}. {claim.sentence}" for claim in claims_of(record)]
    lines += [f"  {text}" for text in noise_sentences(record)]
    rows = prediction_rows(record)
    return lines + [f"  predicted {who}: {at_least}; came {came}: {verdict}" for who, at_least, came, verdict in rows]
