"""Kubernetes: a Job with its Service, a JobSet, or Kubeflow's TrainJob; Kueue's label where a queue is named.

Fields: Kubernetes' API of batch/v1 and core/v1, JobSet v1alpha2, Kubeflow Trainer v1alpha1.
"""

from __future__ import annotations

import re
from typing import Any

from cosmati.errors import RunError
from cosmati.launch.manifests.checks import check_name, label_of
from cosmati.launch.manifests.container import PORT, ContainerJob

OWN = ("kind", "namespace", "queue", "runtime")
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_STOP_SECONDS = 120
"""For the step in progress and a checkpoint, before a container is killed."""


def documents(job: ContainerJob) -> list[dict[str, Any]]:
    """Return the objects to apply, as plain mappings.

    Raises:
        RunError: the kind is none of them, or it can't be asked for so.
    """
    kinds = {"job": _job, "jobset": _jobset, "trainjob": _trainjob}
    kind = job.own.get("kind", "job")
    if kind not in kinds:
        msg = f"kind={kind!r} is none that can be rendered. There are {', '.join(kinds)}."
        raise RunError(msg)
    check_name("volume", job.volume)
    if "namespace" in job.own:
        check_name("namespace", job.own["namespace"], "label")
    if "queue" in job.own:
        check_name("queue", job.own["queue"], longest=63)  # it's a label's value too
    if "runtime" in job.own:
        check_name("runtime", job.own["runtime"])
        if kind != "trainjob":
            msg = f"A {kind} has no runtime: that's a TrainJob's. Leave it out, or give --with kind=trainjob"
            raise RunError(msg)
    if job.priority:
        msg = (
            f"Kubernetes has no number for a priority, and {job.priority} was given. Leave out --priority, and name a "
            "queue of Kueue's, --with queue=NAME, or write your cluster's priorityClassName into the manifest."
        )
        raise RunError(msg)
    return kinds[kind](job)


def _metadata(job: ContainerJob) -> dict[str, Any]:
    """Return a name, and labels: Kueue's takes a job when its queue has room."""
    queue = {_QUEUE_LABEL: job.own["queue"]} if "queue" in job.own else {}
    namespace = {"namespace": job.own["namespace"]} if "namespace" in job.own else {}
    return {"name": job.name, **namespace, "labels": {"app.kubernetes.io/managed-by": "cosmati", **queue}}


def _job(job: ContainerJob) -> list[dict[str, Any]]:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {key: value for key, value in _metadata(job).items() if key != "labels"},
        # Addresses of pods that aren't ready yet too: agents meet before anything is.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": job.name}},
    }
    pod = _pod(job, index="$JOB_COMPLETION_INDEX", host=f"{job.name}-0.{job.name}", run_id=job.name)
    pod["subdomain"] = job.name
    # Who loses the first node loses its store, and all agents end: that's a failure for each of them.
    again = {"backoffLimit": job.restarts * job.num_nodes}
    whole = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job),
        "spec": {**_batch(job), **again, "podFailurePolicy": _preemption_is_free(), "template": {"spec": pod}},
    }
    return [service, whole]


def _jobset(job: ContainerJob) -> list[dict[str, Any]]:
    host = f"{job.name}-node-0-0.{job.name}"
    restart = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
    pod = _pod(job, index="$JOB_COMPLETION_INDEX", host=host, run_id=f"{job.name}-$COSMATI_RESTART")
    pod["containers"][0]["env"].append({"name": "COSMATI_RESTART", "valueFrom": {"fieldRef": {"fieldPath": restart}}})
    template = {"spec": {**_batch(job), "backoffLimit": 0, "template": {"spec": pod}}}
    # One that fails takes all along, and all begin again: what ranks that wait for each other need.
    failures: dict[str, Any] = {"maxRestarts": job.restarts}
    if job.max_seconds is not None:
        # Else who has used up his time would be begun again, with all of it.
        over = {"name": "over", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]}
        failures["rules"] = [over]
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        "failurePolicy": failures,
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": template}],
    }
    return [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _metadata(job), "spec": spec}]


def _trainjob(job: ContainerJob) -> list[dict[str, Any]]:
    # Kubeflow's runtime for PyTorch says by PET_* where the first node is, and which number this one has.
    script = job.script(
        index="$PET_NODE_RANK", endpoint="$PET_MASTER_ADDR:$PET_MASTER_PORT", run_id=job.name, place="$HOSTNAME"
    )
    trainer: dict[str, Any] = {
        "image": job.image,
        "command": ["bash", "-c", _as_it_is(script)],
        "numNodes": job.num_nodes,
        "numProcPerNode": job.per_node,
        "env": _environment(job),
    }
    if resources := _resources(job):
        trainer["resourcesPerNode"] = resources
    mounted = {
        **_chosen(job),
        "volumes": [_volume(job)],
        "containers": [{"name": "node", "volumeMounts": [_volume_mount(job)]}],
    }
    patch = {
        "manager": "cosmati.invalid/launch",  # who patches, as a name below a domain: a domain that nobody has
        "trainingRuntimeSpec": {
            "template": {
                "spec": {
                    "replicatedJobs": [
                        {"name": "node", "template": {"spec": {"template": {"spec": mounted}}}},
                    ]
                }
            }
        },
    }
    spec: dict[str, Any] = {
        "runtimeRef": {"name": job.own.get("runtime", "torch-distributed")},
        "trainer": trainer,
        "runtimePatches": [patch],
    }
    if job.max_seconds is not None:
        spec["activeDeadlineSeconds"] = job.max_seconds
    return [
        {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": _metadata(job), "spec": spec}
    ]


def _batch(job: ContainerJob) -> dict[str, Any]:
    """Return what a Job says of its pods: so many, each with a number."""
    count = {"completions": job.num_nodes, "parallelism": job.num_nodes, "completionMode": "Indexed"}
    return count if job.max_seconds is None else {**count, "activeDeadlineSeconds": job.max_seconds}


def _preemption_is_free() -> dict[str, Any]:
    """Return the rule that a node which is drained or taken away costs no retry."""
    condition = {"type": "DisruptionTarget", "status": "True"}
    return {"rules": [{"action": "Ignore", "onPodConditions": [condition]}]}


def _pod(job: ContainerJob, *, index: str, host: str, run_id: str) -> dict[str, Any]:
    script = job.script(index=index, endpoint=f"{host}:{PORT}", run_id=run_id, place="$COSMATI_NODE")
    node = {"name": "COSMATI_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    shared = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    container: dict[str, Any] = {
        "name": "node",
        "image": job.image,
        "command": ["bash", "-c", _as_it_is(script)],
        "env": [*_environment(job), node],
        # Workers that read data, and ranks of one node, speak by shared memory: 64 MB is a container's own.
        "volumeMounts": [_volume_mount(job), {"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108
    }
    if resources := _resources(job):
        container["resources"] = resources
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _STOP_SECONDS,
        **_chosen(job),
        "containers": [container],
        "volumes": [_volume(job), shared],
    }


def _chosen(job: ContainerJob) -> dict[str, Any]:
    """Return which nodes may be taken."""
    return {"nodeSelector": label_of(job.accelerator)} if job.accelerator else {}


def _as_it_is(text: str) -> str:
    """Return a text that Kubernetes, which fills in `$(NAME)` and makes `$$` one `$`, gives on as it was."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _environment(job: ContainerJob) -> list[dict[str, Any]]:
    return [{"name": name, "value": _as_it_is(value)} for name, value in sorted(job.environment.items())]


def _volume(job: ContainerJob) -> dict[str, Any]:
    return {"name": "runs", "persistentVolumeClaim": {"claimName": job.volume}}


def _volume_mount(job: ContainerJob) -> dict[str, Any]:
    return {"name": "runs", "mountPath": job.mount}


def _resources(job: ContainerJob) -> dict[str, Any]:
    wanted = {
        **({"cpu": str(job.cpus)} if job.cpus else {}),
        **({"memory": f"{job.memory}Gi"} if job.memory else {}),
        **({"nvidia.com/gpu": str(job.gpus)} if job.gpus else {}),
    }
    return {"requests": wanted, "limits": wanted} if wanted else {}
