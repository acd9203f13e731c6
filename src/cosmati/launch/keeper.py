"""Keeps a job's supervisor: begins it anew where it was killed. `python -m cosmati.launch.keeper QUEUE JOB`.

It has the environment that the launcher was called in, loads next to nothing, and ends with the job. Where it's killed
itself the supervisor goes on; where both are, `cosmati resume` begins them again.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time

from cosmati.launch.guard import signal_name

_PAUSE_SECONDS = 1.0
_MAX_PAUSE_SECONDS = 60.0
_LASTED_SECONDS = 600.0
_MOST_REFUSED = 35
"""Begun anew so often where it can't go on, as on a full disk or a lost one: half an hour."""
NOT_OURS = 3
"""Exit status of a supervisor whose job is another one's, or isn't there."""


def keep(home: str, job_id: str) -> int:
    """Run a job's supervisor until the job has ended, or isn't its own, and return its exit status."""
    for name in (signal.SIGINT, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    pause, num_refused = _PAUSE_SECONDS, 0
    while True:
        began = time.monotonic()
        command = [sys.executable, "-P", "-m", "cosmati.launch.serve", home, job_id]
        status = subprocess.call(command)  # noqa: S603  (our own module)
        if time.monotonic() - began > _LASTED_SECONDS:
            pause, num_refused = _PAUSE_SECONDS, 0
        num_refused += status > 0
        if status in (0, NOT_OURS) or num_refused == _MOST_REFUSED:
            return status
        how = f"was ended by {signal_name(-status)}" if status < 0 else "couldn't go on"
        with contextlib.suppress(OSError):  # its log may lie on the disk that is full
            print(f"The supervisor {how}; it's begun anew.", flush=True)  # noqa: T201
        pause = min(2 * pause, _MAX_PAUSE_SECONDS)
        time.sleep(pause)


if __name__ == "__main__":
    sys.exit(keep(*sys.argv[1:3]))
