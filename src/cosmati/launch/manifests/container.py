"""A job in containers: the one description from which every manifest is made."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cosmati.errors import RunError
from cosmati.launch.agents import agent_command, check_settings, node_counts
from cosmati.launch.engine import AttemptRequest, RankProgram

PORT = 29400
"""Where the first node's agent meets the others."""
SETTINGS = (
    "accelerator",
    "cpus-per-node",
    "gpus-per-node",
    "image",
    "memory",
    "mount",
    "nodes",
    "python",
    "restarts",
    "volume",
)
_LONGEST_NAME = 40  # with what schedulers add, a host's name has 63 characters at most


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerJob:
    """A job on nodes that each begin the same image.

    Attributes:
        name: of letters, digits and hyphens.
        program: what every rank runs, in the container.
        folder: of the attempt, on the volume.
        num_nodes: containers.
        per_node: ranks of each.
        restarts: how often it's begun again.
        max_seconds: that it may run; None without an end.
        image: of the container, with its tag or digest.
        volume: that all nodes share, by its scheduler's name for it.
        mount: where it's mounted: the run folder lies below.
        cpus: of each node, empty for the scheduler's own choice.
        memory: of each node, in GiB; empty for the scheduler's own choice.
        gpus: of each node.
        accelerator: which, by the scheduler's name; empty where it has one kind only.
        own: settings of one scheduler alone.
    """

    name: str
    program: RankProgram
    folder: str
    num_nodes: int
    per_node: int
    restarts: int
    max_seconds: float | None
    image: str
    volume: str
    mount: str
    cpus: str
    memory: str
    gpus: int
    accelerator: str
    own: Mapping[str, str]

    @property
    def environment(self) -> dict[str, str]:
        """The variables of every rank."""
        wanted = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if self.gpus else {}
        return {"OMP_NUM_THREADS": "1", **wanted, **self.program.environment}

    def script(self, *, index: str, endpoint: str, run_id: str, place: str) -> str:
        """Return what bash runs in each container.

        Args:
            index: this node's number, as the shell has it.
            endpoint: `HOST:PORT` of the first node, as the shell has it.
            run_id: of the rendezvous, as the shell has it.
            place: this node's name, as the shell has it.
        """
        agent = agent_command(
            self.program,
            folder=self.folder,
            per_node=self.per_node,
            restarts=self.restarts,
            nodes=str(self.num_nodes),
            run_id=run_id,
            endpoint=endpoint,
            is_host=f'$([ "{index}" = 0 ] && echo true || echo false)',
        )
        folder, python = shlex.quote(self.folder), shlex.quote(str(self.program.python))
        return (
            f"set -eu\n"
            f"mkdir -p {folder}\n"
            f"# Nodes that nobody reaches may train on: from now on they can commit nothing.\n"
            f'if [ "{index}" = 0 ]; then {python} -m cosmati.launch.agents {folder}; fi\n'
            f"cd {shlex.quote(str(self.program.folder))}\n"
            f'export COSMATI_PLACE="{place}"\n'
            f"exec {agent}\n"
        )


def container_job(engine: str, request: AttemptRequest, own: tuple[str, ...]) -> ContainerJob:
    """Return the description of what is asked for.

    Args:
        engine: the scheduler's name.
        request: an attempt; its settings are those of `SETTINGS`, and the scheduler's own.
        own: names of the scheduler's own settings.

    Raises:
        RunError: a setting is unknown, lacks or has no sense.
    """
    given = check_settings(engine, request.settings, (*SETTINGS, *own))
    for name, example in (("image", "ghcr.io/me/training:1"), ("volume", "runs")):
        if name not in given:
            msg = f"--on {engine} needs {'an' if name[0] in 'aeiou' else 'a'} {name}. Give it: --with {name}={example}"
            raise RunError(msg)
    counts, per_node = node_counts(request.ranks, given.get("nodes", "1"))
    mount = given.get("mount", "/mnt/runs")
    run_folder = _run_folder(request.program.command)
    if run_folder and not Path(run_folder).is_relative_to(mount):
        msg = (
            f"The run folder {run_folder} doesn't lie on the shared volume, which is mounted at {mount}: a container "
            f"that is begun again wouldn't find it. Give --run-folder {mount}/NAME, or --with mount=FOLDER."
        )
        raise RunError(msg)
    program = RankProgram(
        command=request.program.command,
        folder=request.program.folder,
        python=Path(given.get("python", "python")),
        environment=request.program.environment,
    )
    name = f"{re.sub('[^a-z0-9]+', '-', request.job.lower()).strip('-')[:_LONGEST_NAME].rstrip('-')}"
    return ContainerJob(
        name=name if name[:1].isalpha() else f"run-{name}".rstrip("-"),
        program=program,
        folder=f"{mount}/.launch/{request.job}-{request.number}",
        num_nodes=counts[0],
        per_node=per_node,
        restarts=_whole("restarts", given.get("restarts", "10")),
        max_seconds=request.max_seconds,
        image=given["image"],
        volume=given["volume"],
        mount=mount,
        cpus=given.get("cpus-per-node", ""),
        memory=str(_whole("memory", given["memory"])) if "memory" in given else "",
        gpus=_whole("gpus-per-node", given.get("gpus-per-node", "0")),
        accelerator=given.get("accelerator", ""),
        own={name: given[name] for name in own if name in given},
    )


def _run_folder(command: tuple[str, ...]) -> str:
    words = list(command)
    return words[words.index("--run-folder") + 1] if "--run-folder" in words[:-1] else ""


def _whole(name: str, text: str) -> int:
    if not text.isdecimal():
        msg = f"{name}={text!r} is no whole number{' of GiB' if name == 'memory' else ''}. Give one: --with {name}=8"
        raise RunError(msg)
    return int(text)
