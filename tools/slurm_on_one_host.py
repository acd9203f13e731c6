"""Runs a small Slurm cluster on this machine: a controller and some nodes, in one folder, no service of the system.

For tests of `cosmati launch --on slurm`, and for trying it out. It needs Debian's slurmctld, slurmd, slurm-client and
munge. Ports, keys and files are its own, and everything ends with it.

    python tools/slurm_on_one_host.py FOLDER     # runs until Ctrl-C; then, in another shell:
    export SLURM_CONF=FOLDER/slurm.conf && sinfo
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "munged")
# Failures are declared in seconds, and a requeued job waits for no more than that: Slurm's own are minutes.
_CONFIGURATION = """\
ClusterName=one-host
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=defer_batch,sched_interval=1,bf_interval=1
MpiDefault=none
ReturnToService=2
SlurmdTimeout=5
KillWait=3
BatchStartTimeout=10
MessageTimeout=5
NodeName=n[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=n[0-{last}] Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """Return which of the programs that it runs this machine hasn't."""
    return [name for name in PROGRAMS if not _where(name)]


class SlurmOnOneHost:
    """A controller and nodes `n0`, `n1`, ... of two processors each; a context that ends them.

    Args:
        folder: for keys, configuration, state and logs; made where it isn't there.
        num_nodes: nodes.
    """

    def __init__(self, folder: Path, num_nodes: int = 2) -> None:
        self.folder = folder.resolve()
        self.num_nodes = num_nodes
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which Slurm's commands speak to this cluster."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> Self:
        """Begin it, and wait until its nodes are idle.

        Raises:
            RuntimeError: they don't come within half a minute.
        """
        if missing := missing_programs():
            msg = f"{', '.join(missing)} can't be found: apt-get install slurmctld slurmd slurm-client munge."
            raise RuntimeError(msg)
        try:
            self._configure()
            self._begin_munge()
            self._begin("slurmctld", ["slurmctld", "-D", "-c"])
            for number in range(self.num_nodes):
                self.begin_node(f"n{number}")
            self.wait_until_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        """End it, and whatever its jobs have left."""
        for name in sorted(self._daemons, reverse=True):  # nodes, then the controller, then munge
            if name.startswith("n"):
                self.kill_node(name)
        for name in ("slurmctld", "munged"):
            if daemon := self._daemons.pop(name, None):
                daemon.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(5)
                daemon.kill()
                daemon.wait()

    def begin_node(self, name: str) -> None:
        """Begin a node, or begin it again after it was killed."""
        (self.folder / f"spool-{name}").mkdir(exist_ok=True)
        self._begin(name, ["slurmd", "-D", "-N", name])

    def kill_node(self, name: str) -> None:
        """Kill a node with SIGKILL, as a loss of power does: its daemon, its steps and all that they had begun."""
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()
        for process in _processes_of(name, self.environment["SLURM_CONF"]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _configure(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        (self.folder / "state").mkdir(exist_ok=True)
        port, first = _free_ports(1), _free_ports(self.num_nodes)
        last = self.num_nodes - 1
        text = _CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            folder=self.folder,
            user=getpass.getuser(),
            port=port,
            last=last,
            first_port=first,
            last_port=first + last,
        )
        (self.folder / "slurm.conf").write_text(text)

    def _begin_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {"key-file": key, "socket": self.folder / "munge.socket"}
        files |= {f"{kind}-file": self.folder / f"munge.{kind}" for kind in ("log", "pid", "seed")}
        self._begin("munged", ["munged", "-F", "--force", *(f"--{name}={path}" for name, path in files.items())])
        _wait((self.folder / "munge.socket").exists, 10.0, "munged")

    def _begin(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(  # noqa: S603  (found on the path)
                [_where(command[0]), *command[1:]], env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait_until_idle(self, seconds: float = 30.0) -> None:
        """Wait until every node is idle.

        Raises:
            RuntimeError: that takes longer.
        """
        command = [_where("sinfo"), "-h", "-N", "-o", "%T"]

        def is_idle() -> bool:
            done = subprocess.run(  # noqa: S603
                command, env=self.environment, capture_output=True, text=True, check=False
            )
            return done.stdout.split() == ["idle"] * self.num_nodes

        _wait(is_idle, seconds, f"Slurm, whose logs are in {self.folder}")


def _processes_of(node: str, configuration: str) -> list[int]:
    """Return the processes of a node's steps: those that were told its name, and the daemons above them."""
    told, mine = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={configuration}".encode()}, []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            if told <= {*(path / "environ").read_bytes().split(b"\0")}:
                mine.append(int(path.name))
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if "slurmstepd" in Path(f"/proc/{parent}/comm").read_text():
                    mine.append(parent)
    return sorted({*mine})


def _free_ports(count: int) -> int:
    """Return the first of so many ports in a row that nobody listens on."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            probes = [stack.enter_context(socket.socket()) for _ in range(count)]
            probes[0].bind(("127.0.0.1", 0))
            first = int(probes[0].getsockname()[1])
            for offset, probe in enumerate(probes[1:], 1):
                probe.bind(("127.0.0.1", first + offset))
            return first


def _where(program: str) -> str:
    """Return a program's path, also of those that only an administrator has in theirs; empty where there's none."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""


def _wait(is_so: Callable[[], bool], seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > until:
            msg = f"{what} hasn't come up within {seconds:g} s."
            raise RuntimeError(msg)
        time.sleep(0.1)


def main(arguments: list[str]) -> int:
    """Run a cluster until Ctrl-C or SIGTERM."""
    if len(arguments) != 1:
        print(__doc__)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job ignores the first
        signal.signal(number, signal.default_int_handler)
    with SlurmOnOneHost(Path(arguments[0])) as cluster:
        print(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
