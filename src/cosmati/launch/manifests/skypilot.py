"""SkyPilot: a task of several nodes, as a managed job that is begun again where it can be.

Fields: SkyPilot's YAML of tasks, 0.14.
"""

from __future__ import annotations

from typing import Any

from cosmati.errors import RunError
from cosmati.launch.manifests.checks import check_accelerator, check_priority, truth
from cosmati.launch.manifests.container import PORT, ContainerJob

OWN = ("infra", "spot")


def documents(job: ContainerJob) -> list[dict[str, Any]]:
    """Return the task, as a plain mapping. `sky jobs launch FILE` runs it.

    Raises:
        RunError: it can't be asked for so.
    """
    check_accelerator(job.accelerator, job.gpus)
    check_priority("SkyPilot", job.priority, -1000, 1000)
    if job.max_seconds is not None:
        msg = (
            f"SkyPilot ends no job after {job.max_seconds} s: it has no setting for that. Leave out --max-duration, "
            f"and end it yourself: sky jobs cancel -n {job.name}"
        )
        raise RunError(msg)
    script = job.script(
        index="$SKYPILOT_NODE_RANK",
        endpoint=f'$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{PORT}',
        run_id="$SKYPILOT_TASK_ID",
        place="$HOSTNAME",
    )
    resources: dict[str, Any] = {
        "image_id": f"docker:{job.image}",
        "job_recovery": {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": job.restarts},
    }
    if job.gpus:
        resources["accelerators"] = f"{job.accelerator or 'H100'}:{job.gpus}"
    if job.cpus:
        resources["cpus"] = f"{job.cpus}+"
    if job.memory:
        resources["memory"] = f"{job.memory}+"
    if "infra" in job.own:
        resources["infra"] = job.own["infra"]
    if "spot" in job.own:
        resources["use_spot"] = truth("spot", job.own["spot"])
    if job.priority:
        resources["priority"] = job.priority
    task: dict[str, Any] = {"name": job.name, "num_nodes": job.num_nodes, "resources": resources}
    return [{**task, "volumes": {job.mount: job.volume}, "envs": dict(sorted(job.environment.items())), "run": script}]
