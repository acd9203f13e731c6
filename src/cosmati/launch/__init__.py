"""Jobs that survive their machines: a queue, supervisors, and the engines that carry attempts out.

    from cosmati.launch import launch, show, wait

    job = launch("train.py", ranks=2)
    print(wait(job.id).state)

The same words as on the command line: `cosmati launch`, `runs`, `show`, `logs`, `stop`, `resume`, `clone`, `delete`.
"""

from __future__ import annotations

from cosmati.launch.asking import asked_for
from cosmati.launch.commands import (
    begin_asked,
    clone,
    delete,
    launch,
    logs,
    resume,
    resume_lost,
    runs,
    show,
    stop,
    wait,
)
from cosmati.launch.engines import dry_run
from cosmati.launch.job import JobAttempt, JobRequest, LaunchedJob
from cosmati.launch.states import LaunchState

__all__ = [
    "JobAttempt",
    "JobRequest",
    "LaunchState",
    "LaunchedJob",
    "asked_for",
    "begin_asked",
    "clone",
    "delete",
    "dry_run",
    "launch",
    "logs",
    "resume",
    "resume_lost",
    "runs",
    "show",
    "stop",
    "wait",
]
