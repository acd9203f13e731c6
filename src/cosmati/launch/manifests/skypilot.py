"""SkyPilot: a task of several nodes, as a managed job that is begun again where it can be.

Fields: SkyPilot's YAML of tasks, 0.14.
"""

from __future__ import annotations

from typing import Any

from cosmati.launch.manifests.container import PORT, ContainerJob

OWN = ("infra", "spot")


def documents(job: ContainerJob) -> list[dict[str, Any]]:
    """Return the task, as a plain mapping. `sky jobs launch FILE` runs it."""
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
    if job.own.get("spot", "false") == "true":
        resources["use_spot"] = True
    task: dict[str, Any] = {"name": job.name, "num_nodes": job.num_nodes, "resources": resources}
    return [{**task, "volumes": {job.mount: job.volume}, "envs": dict(sorted(job.environment.items())), "run": script}]
