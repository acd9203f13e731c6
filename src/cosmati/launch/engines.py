"""The engines by name, and what would be handed to one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cosmati.errors import RunError
from cosmati.launch.engine import AttemptRequest, Engine
from cosmati.launch.manifests import RENDERED, render
from cosmati.launch.program import of_job, program_of
from cosmati.launch.slurm import SlurmEngine
from cosmati.launch.slurm import render as render_batch

ENGINES = ("local", SlurmEngine.name)


def check_engine(name: str) -> None:
    """Refuse an engine that carries nothing out.

    Raises:
        RunError: it's only rendered for, or there's none of this name.
    """
    if name in RENDERED:
        msg = f"For {name} a manifest is rendered, and you hand it over yourself: --on {name} --dry-run > job.yaml"
        raise RunError(msg)
    if name not in ENGINES:
        raise RunError(f"No engine is called {name!r}. There are {', '.join((*ENGINES, *RENDERED))}: --on NAME.")


def engine_of(name: str) -> Engine:
    """Return an engine by its name.

    Raises:
        RunError: there's none of it that carries anything out.
    """
    check_engine(name)
    if name == SlurmEngine.name:
        return SlurmEngine()
    from cosmati.launch.local import LocalEngine  # it loads PyTorch

    return LocalEngine()


def dry_run(
    file: str,
    *arguments: str,
    engine: str,
    ranks: int = 1,
    max_seconds: float | None = None,
    settings: Sequence[str] = (),
    run_folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    name: str = "",
    engine_settings: Mapping[str, str] | None = None,
) -> str:
    """Return what an engine would be given for a job: Slurm's batch script, or a manifest. Nothing is begun or written.

    Args:
        file: a script, or `FILE[:FUNCTION]` that returns a Recipe.
        arguments: a script's.
        engine: `slurm`, `kubernetes`, `skypilot` or `dstack`.
        ranks: processes that train it.
        max_seconds: that it may run.
        settings: a recipe's, `NAME=VALUE`.
        run_folder: a recipe's; None is `runs/NAME`.
        environment: variables of every rank.
        name: of the job; empty for the file's.
        engine_settings: the engine's own.

    Raises:
        RunError: there's nothing to render, or it can't be as it was asked for.
    """
    if engine == "local":
        msg = "On this machine processes are begun, and nothing is written that could be shown. Leave out --dry-run."
        raise RunError(msg)
    if engine not in RENDERED:
        check_engine(engine)
    job = name or Path(file.partition(":")[0]).stem
    program = program_of(file, arguments, settings=settings, run_folder=run_folder, environment=environment)
    request = AttemptRequest(
        job=job,
        number=0,
        program=of_job(program, job),
        ranks=ranks,
        folder=Path.cwd() / "launch" / job,
        max_seconds=max_seconds,
        settings=dict(engine_settings or {}),
    )
    return render_batch(request) if engine == SlurmEngine.name else render(engine, request)
