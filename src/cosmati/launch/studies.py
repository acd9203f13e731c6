"""What carries a study's runs out, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from cosmati.errors import RunError
from cosmati.launch.agents import check_settings
from cosmati.launch.study_array import SlurmStudy
from cosmati.study.cluster import Cluster
from cosmati.study.definition import Study

N = TypeVar("N", int, float)
_CLUSTERS = ("local", "slurm", "ray")
DEFAULT_JOBS = 8
"""Runs at a time on a cluster, where nothing is said."""


def cluster_of(on: str, file: str, folder: Path, num_jobs: int | None, settings: Mapping[str, str]) -> Cluster | None:
    """Return what carries out a study's runs, None for this machine.

    Args:
        on: `local`, `slurm` or `ray`.
        file: the study's, `FILE[:FUNCTION]`.
        folder: of the study.
        num_jobs: runs at a time; None where nothing is said.
        settings: of what carries them out.

    Raises:
        RunError: there's nothing of this name, or it has no such settings; or a cluster is to do one run at a time.
    """
    if on not in _CLUSTERS:
        raise RunError(f"Nothing called {on!r} carries a study out. There are {', '.join(_CLUSTERS)}: --on NAME.")
    if on == "local":
        check_settings(on, settings, ())
        return None
    jobs = DEFAULT_JOBS if num_jobs is None else num_jobs
    if jobs < 2:  # a line of one run at a time is one of a process with all threads
        msg = f"--on {on} is for several runs at a time, each with one thread: --jobs 2 or more, or leave --on out."
        raise RunError(msg)
    if on == "slurm":
        return SlurmStudy(file, folder, jobs, settings)
    return _ray(folder, jobs, check_settings(on, settings, ("address", "num-cpus", "num-gpus", "retries")))


def dry_run(cluster: Cluster | None, study: Study) -> str:
    """Return the batch script for all runs of a study. Nothing is submitted or written.

    Raises:
        RunError: it isn't for Slurm.
    """
    if not isinstance(cluster, SlurmStudy):
        msg = "Only for Slurm something is written that could be shown. Leave out --dry-run, or say --on slurm."
        raise RunError(msg)
    return cluster.script(cluster.first_array, len(list(study.cells())))


def _ray(folder: Path, jobs: int, settings: Mapping[str, str]) -> Cluster:
    from cosmati.launch.study_ray import RayStudy, join_cluster

    options = {
        "num_cpus": _number(settings, "num-cpus", 1.0),
        "num_gpus": _number(settings, "num-gpus", 0.0),
        "retries": _number(settings, "retries", 3),
    }
    join_cluster(settings.get("address", "auto"))
    return RayStudy(folder, jobs, **options)


def _number(settings: Mapping[str, str], name: str, otherwise: N) -> N:
    try:
        number = type(otherwise)(settings.get(name, otherwise))
        if 0 <= number < math.inf:
            return number
    except ValueError:
        pass
    msg = (
        f"--with {name}={settings[name]} is no number that Ray could take. Say 0 or more: --with {name}={otherwise:g}."
    )
    raise RunError(msg)
