"""dstack: a task of several nodes, which is begun again where a node is lost or taken away.

Fields: dstack's YAML of tasks, 0.22.
"""

from __future__ import annotations

import re
from typing import Any

from cosmati.errors import RunError
from cosmati.launch.manifests.checks import check_accelerator, check_priority, truth
from cosmati.launch.manifests.container import PORT, ContainerJob

OWN = ("spot",)


def documents(job: ContainerJob) -> list[dict[str, Any]]:
    """Return the task, as a plain mapping. `dstack apply -f FILE` runs it.

    Raises:
        RunError: it can't be asked for so.
    """
    check_accelerator(job.accelerator, job.gpus)
    check_priority("dstack", job.priority, 0, 100)
    if not re.fullmatch("[a-z][a-z0-9-]{1,40}|/[^:]+", job.volume):
        msg = (
            f"volume={job.volume!r} is no volume of dstack: its name has lower-case letters, digits and hyphens, "
            "two to 41 of them. Give it, or a folder that all instances have: --with volume=runs"
        )
        raise RunError(msg)
    script = job.script(
        index="$DSTACK_NODE_RANK",
        endpoint=f"$DSTACK_MASTER_NODE_IP:{PORT}",
        run_id="$DSTACK_RUN_NAME",
        place="$HOSTNAME",
    )
    resources: dict[str, Any] = {}
    if job.cpus:
        resources["cpu"] = f"{job.cpus}.."
    if job.memory:
        resources["memory"] = f"{job.memory}GB.."
    if job.gpus:
        resources["gpu"] = f"{job.accelerator}:{job.gpus}" if job.accelerator else job.gpus
    task: dict[str, Any] = {
        "type": "task",
        "name": job.name,
        "image": job.image,
        "nodes": job.num_nodes,
        # In a variable dstack fills in `${{ ... }}` and makes `$$` one `$`.
        "env": {name: value.replace("$", "$$") for name, value in sorted(job.environment.items())},
        # In a command it fills in `${{ ... }}` alone, and has no other word for it: here it stands in single quotes,
        # which end and begin again within it.
        "commands": [script.replace("${{", "$''{{")],
        "volumes": [f"{job.volume}:{job.mount}"],
        # dstack counts no retries, and takes the time that they may last.
        "retry": {"on_events": ["no-capacity", "interruption", "error"], "duration": "1d"},
        "max_duration": "off" if job.max_seconds is None else f"{job.max_seconds}s",
    }
    if "spot" in job.own:
        task["spot_policy"] = "spot" if truth("spot", job.own["spot"]) else "on-demand"
    if job.priority:
        task["priority"] = job.priority
    return [{**task, **({"resources": resources} if resources else {})}]
