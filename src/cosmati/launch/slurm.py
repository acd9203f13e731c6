"""Slurm: an attempt is one batch job, which begins agents on its nodes and requeues itself below a cap.

The job is whole without its supervisor: lost nodes and a time limit take it back to Slurm's queue, and it goes on from
its last checkpoint on the nodes that there are then. All of its files lie in the attempt's folder, on a shared disk:

    job.sbatch   what was submitted      job.log      what Slurm, srun and agents say      status   how it ended, last
    stop         it's to end             rank-R.*     what ranks leave: see `notes.py`
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cosmati.errors import RunError
from cosmati.launch.agents import agent_command, check_settings, count_of, node_counts
from cosmati.launch.engine import AttemptPhase, AttemptRequest, AttemptStanding
from cosmati.launch.notes import PLACE_VARIABLE, ends_in, log_of, processes_in

_SCRIPT, _LOG, _STATUS, _STOP = "job.sbatch", "job.log", "status", "stop"
OPTIONS = ("account", "constraint", "cpus-per-task", "gpus-per-node", "mem", "partition", "qos", "reservation", "time")
"""Settings that sbatch is given as they are."""
_OWN = ("nodes", "requeues", "restarts")
_REQUEUES, _RESTARTS = 10, 3
_WARNING_SECONDS = 60
"""Before its time limit, a job is told, and goes back to the queue with a checkpoint."""
_WAITING = ("CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
_RUNNING = ("COMPLETING", "RESIZING", "RUNNING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED")
_SECONDS = 60.0


def render(request: AttemptRequest) -> str:
    """Return the batch script of an attempt.

    Raises:
        RunError: a setting that Slurm isn't given, or ranks that don't fill their nodes.
    """
    settings = check_settings("slurm", request.settings, (*OPTIONS, *_OWN))
    counts, per_node = node_counts(request.ranks, settings.get("nodes", "1"), request.tensor_parallel)
    bad = sorted({place.partition("/")[0] for place in request.bad})
    directives = {
        "job-name": name_of(request),
        "comment": str(request.folder),
        "nodes": f"{counts[-1]}-{counts[0]}",
        "output": f"{as_name(request.folder)}/{_LOG}",
        "open-mode": "append",
        "signal": f"B:USR1@{_WARNING_SECONDS}",
        **({"time": str(math.ceil(request.max_seconds / 60) + 1)} if request.max_seconds else {}),
        **({"exclude": ",".join(bad)} if bad else {}),
        "cpus-per-task": str(per_node),
        **{name: settings[name] for name in OPTIONS if name in settings},
    }
    agent = agent_command(
        request.program,
        folder=str(request.folder),
        per_node=per_node,
        restarts=count_of(settings, "restarts", _RESTARTS),
        nodes="$nodes",
        run_id="$SLURM_JOB_ID-$restarts",
        endpoint="$address:$port",
        is_host='$([ "$SLURM_PROCID" = 0 ] && echo true || echo false)',
    )
    values = {
        "directives": "\n".join(f"#SBATCH --{name}={one_line(value)}" for name, value in directives.items()),
        "folder": shlex.quote(str(request.folder)),
        "directory": shlex.quote(str(request.program.folder)),
        "exports": "\n".join(
            f"export {name}={shlex.quote(value)}" for name, value in sorted(request.program.environment.items())
        ),
        "requeues": count_of(settings, "requeues", _REQUEUES),
        "counts": shlex.quote(" ".join(map(str, counts))),
        "shared": shlex.join([str(request.ranks), settings.get("nodes", "1")]),
        "python": shlex.quote(str(request.program.python)),
        "agent": shlex.quote(f'{PLACE_VARIABLE}="$SLURMD_NODENAME" exec {agent}'),
    }
    return _TEMPLATE.format(**values)


_TEMPLATE = """\
#!/bin/bash
{directives}
#SBATCH --requeue
set -u
folder={folder}
cd {directory}
{exports}
export restarts=${{SLURM_RESTART_COUNT:-0}}
if [ "$restarts" -gt {requeues} ]; then
  echo "Begun $restarts times again, and {requeues} are allowed: given up."
  echo 1 > "$folder/status"; exit 1
fi
again() {{
  if [ -e "$folder/stop" ] || [ "$restarts" -ge {requeues} ]; then return; fi
  if grep -qs '"lost_others": false' "$folder"/rank-*.end; then return; fi  # the program's own error comes again
  echo "Back to the queue, for time $((restarts + 1)) of {requeues}: $1."
  scontrol requeue "$SLURM_JOB_ID" && exit 0
}}
counts={counts}
# Nodes that nobody reaches may train on: from now on they can commit nothing. And the run has told its T by now.
[ "$restarts" -gt 0 ] && told=$({python} -m cosmati.launch.agents "$folder" {shared})
counts=${{told:-$counts}}
rm -f "$folder"/rank-*.end "$folder"/rank-*.process
# As many nodes as share the microbatches; the others idle.
for nodes in $counts; do [ "$SLURM_JOB_NUM_NODES" -ge "$nodes" ] && break; done
[ "$SLURM_JOB_NUM_NODES" -gt "$nodes" ] && echo "$((SLURM_JOB_NUM_NODES - nodes)) of $SLURM_JOB_NUM_NODES nodes idle."
if [ "$SLURM_JOB_NUM_NODES" -lt "$nodes" ]; then
  echo "Too few nodes for whole replicas: there are $SLURM_JOB_NUM_NODES, and $nodes are the fewest."
  echo 1 > "$folder/status"; exit 1
fi
# A node's address is known to Slurm even where its name isn't to others.
address=$(scontrol show node "$SLURMD_NODENAME" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
port=$({python} -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
export nodes address port
trap 'again "its time is nearly up"' USR1
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c {agent} &
step=$!
wait "$step"
status=$?
# A signal ends the wait, and not the step.
while kill -0 "$step" 2> /dev/null; do wait "$step"; status=$?; done
[ "$status" -ne 0 ] && again "it ended with status $status"
echo "$status" > "$folder/status"
exit "$status"
"""


def name_of(request: AttemptRequest) -> str:
    """Return an attempt's name in Slurm."""
    return f"cosmati-{request.job}-{request.number}"


class SlurmEngine:
    """Carries attempts out as batch jobs of Slurm."""

    name = "slurm"
    poll_seconds = 5.0

    def submit(self, request: AttemptRequest) -> str:
        """Submit a job, or find the one that a supervisor has submitted which was killed before it could note it.

        Raises:
            RunError: Slurm isn't there, or refuses the job.
        """
        request.folder.mkdir(parents=True, exist_ok=True)
        script = request.folder / _SCRIPT
        if script.exists() and (known := self._find(request)):
            return f"{known} {request.folder}"
        script.write_text(render(request))
        job = ask_slurm("sbatch", "--parsable", str(script)).strip().partition(";")[0]
        return f"{job} {request.folder}"

    def _find(self, request: AttemptRequest) -> str:
        listed = ask_slurm("squeue", "--noheader", "--me", f"--name={name_of(request)}", "--format=%i %k")
        found = (line.strip().partition(" ") for line in listed.splitlines())
        return next((job for job, _, folder in found if folder == str(request.folder)), "")

    def poll(self, handle: str) -> AttemptStanding:
        """Return how a job stands, by Slurm's controller, and by the job's own note once Slurm has forgotten it."""
        job, folder = _parts(handle)
        try:
            said = ask_slurm("scontrol", "show", "job", job, "--oneliner")
        except RunError as error:
            if "Invalid job id" in str(error):
                return _ended_before(folder)
            # A controller that doesn't answer says nothing of the job.
            return AttemptStanding(phase=AttemptPhase.RUNNING, reason=f"Slurm doesn't answer: {error}")
        standing = standing_of(said)
        return _with_ends(standing, folder) if standing.phase is AttemptPhase.ENDED else standing

    def ask_to_stop(self, handle: str) -> None:
        """Let the first rank stop after its step; a job that waits ends."""
        job, folder = _parts(handle)
        (folder / _STOP).touch()
        if self.poll(handle).phase is AttemptPhase.WAITING:
            self.cancel(handle)
        else:
            _signal(job, "TERM", list(processes_in(folder, "rank"))[:1])

    def dump_stacks(self, handle: str) -> None:
        """Let every rank write its stacks."""
        job, folder = _parts(handle)
        _signal(job, "USR1", list(processes_in(folder, "rank")))

    def cancel(self, handle: str) -> None:
        """End a job now; it isn't requeued."""
        job, folder = _parts(handle)
        (folder / _STOP).touch()
        try:
            ask_slurm("scancel", job)
        except RunError as error:
            if "Invalid job id" not in str(error):
                raise

    def logs(self, handle: str) -> Sequence[Path]:
        """Return the job's own log, then those of its ranks."""
        _, folder = _parts(handle)
        count = len(list(folder.glob("rank-*.log")))
        return [folder / _LOG, *(log_of(folder, rank) for rank in range(count))]


def standing_of(said: str) -> AttemptStanding:
    """Read what `scontrol show job --oneliner` says of a job.

    Raises:
        RunError: it says no state.
    """
    facts = _facts(said)
    state, restarts = facts.get("JobState", ""), facts.get("Restarts", "0")
    if state in _WAITING:
        again = f", requeued {restarts} times" if restarts != "0" else ""
        return AttemptStanding(phase=AttemptPhase.WAITING, reason=f"{facts.get('Reason', state)}{again}")
    if state in _RUNNING:
        return AttemptStanding(phase=AttemptPhase.RUNNING, reason=f"on {facts.get('NodeList', '')}")
    if not state:
        msg = f"Slurm says no state of a job: {said[:200]!r}. Look at `scontrol show job` yourself."
        raise RunError(msg)
    code, _, number = facts.get("ExitCode", "0:0").partition(":")
    status = 0 if state == "COMPLETED" else -int(number or 0) or int(code) or 1
    reason = "" if status == 0 else f"Slurm says {state}, with status {code} and signal {number}"
    return AttemptStanding(phase=AttemptPhase.ENDED, status=status, reason=reason, place=facts.get("FailedNode", ""))


def _facts(said: str) -> Mapping[str, str]:
    return dict(re.findall(r"(\S+?)=(\S*)", said))


def _with_ends(standing: AttemptStanding, folder: Path) -> AttemptStanding:
    """Add what ranks have noted of a bad end: the first error of a rank's own, if there's one."""
    told = (end for end in ends_in(folder).values() if not end.lost_others)
    own = min(told, key=lambda end: not end.is_final, default=None)
    if standing.status == 0 or own is None:
        return standing
    return replace(
        standing, status=own.status, reason=own.error, place=own.place, own_fault=True, is_final=own.is_final
    )


def _ended_before(folder: Path) -> AttemptStanding:
    """Return how a job ended that Slurm has forgotten, as it does after minutes; a cancelled one noted nothing."""
    try:
        status = int((folder / _STATUS).read_text())
    except (OSError, ValueError):
        return AttemptStanding(
            phase=AttemptPhase.ENDED, reason="Slurm doesn't know the job any more, and it has noted no end"
        )
    reason = "" if status == 0 else f"it ended with status {status}"
    return _with_ends(AttemptStanding(phase=AttemptPhase.ENDED, status=status, reason=reason), folder)


def _signal(job: str, name: str, marks: Sequence[str]) -> None:
    """Send a signal to processes of ranks, by a step of the job's own on all of its nodes."""
    # A mark is a process's number and when it began, which no two nodes have alike: see `guard.mark_of`.
    send = """
for mark in "$@"; do
  began=$(sed 's/.*) //' "/proc/${mark%%:*}/stat" 2>/dev/null | cut -d ' ' -f 20)
  [ "$began" = "${mark##*:}" ] && kill "-$name" "${mark%%:*}"
done
true
"""
    if marks:
        where = ["--overlap", "--ntasks-per-node=1", "--cpus-per-task=1", f"--jobid={job}", "--quiet"]
        ask_slurm("srun", *where, "env", f"name={name}", "sh", "-c", send, "signal", *marks)


def _parts(handle: str) -> tuple[str, Path]:
    job, _, folder = handle.partition(" ")
    return job, Path(folder)


def as_name(path: Path) -> str:
    """Return a path as Slurm has the name of a file: a percent sign begins what it puts in there itself."""
    return str(path).replace("%", "%%")


def one_line(value: str) -> str:
    """Return a value as a line of a batch script has it.

    Raises:
        RunError: it can't stand there.
    """
    if "\n" in value or '"' in value:
        msg = f"{value!r} can't stand in a batch script: it has a line break or a quotation mark. Leave that out."
        raise RunError(msg)
    return f'"{value}"' if re.search(r"[\s#']", value) else value


def ask_slurm(program: str, *arguments: str, max_seconds: float | None = _SECONDS) -> str:
    """Return what one of Slurm's programs says.

    Args:
        program: its name.
        arguments: for it.
        max_seconds: that it may take; None where it waits in the queue.

    Raises:
        RunError: it isn't there, doesn't answer or says no.
    """
    path = shutil.which(program)
    if path is None:
        msg = (
            f"{program} can't be found, so nothing can be submitted. Go to a login node of Slurm's, or load its module."
        )
        raise RunError(msg)
    try:
        done = subprocess.run(  # noqa: S603  (Slurm's own, with arguments in a list)
            [path, *arguments], capture_output=True, text=True, check=False, timeout=max_seconds
        )
    except subprocess.TimeoutExpired as error:
        msg = (
            f"{program} didn't answer within {max_seconds:g} s. See whether Slurm's controller is up: `scontrol ping`."
        )
        raise RunError(msg) from error
    if done.returncode:
        msg = f"{program} said no: {done.stderr.strip() or done.stdout.strip()}. Mend what it names, and try again."
        raise RunError(msg)
    return done.stdout
