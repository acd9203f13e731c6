"""A job in containers: the one description from which every manifest is made."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cosmati.errors import RunError
from cosmati.launch.agents import agent_command, check_settings, node_counts
from cosmati.launch.engine import AttemptRequest, RankProgram
from cosmati.launch.manifests.checks import check_given, mount_of, one_number, whole

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
_LONGEST_NAME = 40  # with what schedulers add, a host's name has 63 characters at most; dstack takes 2 to 41


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
        cpus: of each node, 0 for the scheduler's own choice.
        memory: of each node, in GiB; 0 for the scheduler's own choice.
        gpus: of each node.
        accelerator: which, by the scheduler's name; empty where it has one kind only.
        own: settings of one scheduler alone.
        priority: higher ones start first; 0 where nothing is said.
    """

    name: str
    program: RankProgram
    folder: str
    num_nodes: int
    per_node: int
    restarts: int
    max_seconds: int | None
    image: str
    volume: str
    mount: str
    cpus: int
    memory: int
    gpus: int
    accelerator: str
    own: Mapping[str, str]
    priority: int = 0

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


def container_job(engine: str, request: AttemptRequest, own: tuple[str, ...], priority: int = 0) -> ContainerJob:
    """Return the description of what is asked for.

    Args:
        engine: the scheduler's name.
        request: an attempt; its settings are those of `SETTINGS`, and the scheduler's own.
        own: names of the scheduler's own settings.
        priority: higher ones start first.

    Raises:
        RunError: a setting is unknown, lacks or has no sense.
    """
    given = check_settings(engine, request.settings, (*SETTINGS, *own))
    check_given(engine, given)
    counts, per_node = node_counts(request.ranks, given.get("nodes", "1"))
    one_number(given.get("nodes", "1"))
    mount = mount_of(given)
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
    return ContainerJob(
        name=_name_of(request.job),
        program=program,
        folder=f"{mount}/.launch/{request.job}-{request.number}",
        num_nodes=counts[0],
        per_node=per_node,
        restarts=whole(given, "restarts", 10, fewest=0),
        # Upwards: 0 s would end it before it begins.
        max_seconds=None if request.max_seconds is None else math.ceil(request.max_seconds),
        image=given["image"],
        volume=given["volume"],
        mount=mount,
        cpus=whole(given, "cpus-per-node", 0, fewest=1),
        memory=whole(given, "memory", 0, fewest=1),
        gpus=whole(given, "gpus-per-node", 0, fewest=0),
        accelerator=given.get("accelerator", ""),
        own={name: given[name] for name in own if name in given},
        priority=priority,
    )


def _name_of(job: str) -> str:
    """Return a name that every scheduler takes: it begins with a letter, and has two characters at least."""
    words = re.sub("[^a-z0-9]+", "-", job.lower()).strip("-")
    name = words if words[:1].isalpha() and len(words) > 1 else f"run-{words}"
    return name[:_LONGEST_NAME].rstrip("-")


def _run_folder(command: tuple[str, ...]) -> str:
    words = list(command)
    return words[words.index("--run-folder") + 1] if "--run-folder" in words[:-1] else ""
