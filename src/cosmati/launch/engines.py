"""The engines by name, and what would be handed to one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cosmati.errors import RunError
from cosmati.launch.agents import check_settings
from cosmati.launch.engine import AttemptRequest, Engine
from cosmati.launch.job import JobRequest
from cosmati.launch.manifests import RENDERED, render
from cosmati.launch.program import of_job
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


def check_local(settings: Mapping[str, str]) -> None:
    """Refuse settings that this machine's engine doesn't have.

    Raises:
        RunError: it has none of that name, or it can't be.
    """
    agents = check_settings("local", settings, ("agents",)).get("agents", "1")
    if not (agents.isascii() and agents.isdigit() and int(agents)):
        raise RunError(f"--with agents={agents} can't be: it's a number of agents, 1 or more. Write --with agents=2.")


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


def dry_run(asked: JobRequest) -> str:
    """Return what an engine would be given for a job: Slurm's batch script, or a manifest. Nothing is begun or written.

    Args:
        asked: as `asked_for` makes it; the job's id is its name here.

    Raises:
        RunError: there's nothing to render, or it can't be as it was asked for.
    """
    if asked.engine == "local":
        msg = "On this machine processes are begun, and nothing is written that could be shown. Leave out --dry-run."
        raise RunError(msg)
    if asked.engine not in RENDERED:
        check_engine(asked.engine)
    request = AttemptRequest(
        job=asked.name,
        number=0,
        program=of_job(asked.program, asked.name),
        ranks=asked.ranks,
        folder=Path.cwd() / "launch" / asked.name,
        max_seconds=asked.max_seconds,
        settings=asked.settings,
    )
    if asked.engine == SlurmEngine.name:
        return render_batch(request)
    return render(asked.engine, request, priority=asked.priority, retries=asked.retries)
