"""torchft's lighthouse says which processes train. Needs the extra `torchft`.

Of torchft nothing else is used: its managers leave a lost replica's rows out of the step's mean, which are other bits.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from torch._C._distributed_c10d import TCPStore

from cosmati.errors import MissingExtraError, RunError
from cosmati.launch.membership import RankGroup, check_begin, train_among
from cosmati.train.run.result import RunResult

_BEAT_SECONDS = 1.0
_WAIT = timedelta(days=30)


def train_with_torchft(
    train: Callable[[], RunResult],
    *,
    lighthouse: str,
    run_folder: Path,
    num_ranks: int,
    look_seconds: float = 300.0,
    max_failures: int = 10,
    wait_seconds: float = 1800.0,
) -> None:
    """Train among all processes that call this with one lighthouse, and return when the run has ended.

    Begin a lighthouse for each run: `torchft_lighthouse --min_replicas 1`. Where a process is lost, the others agree
    anew within its heartbeat's time and go on from the last checkpoint, in the processes that they are; one that comes
    joins at the next look. One that's frozen, and not dead, keeps the others waiting for `wait_seconds`; while they
    meet, for a minute.

    Args:
        train: builds a `Trainer`, calls `fit()` and returns what that returns. The process group, over gloo, is there.
        lighthouse: its address, `http://HOST:PORT`; the same words for all, for it's the job's name.
        run_folder: of the run, absolute, on a disk that all share; the one that `train` gives its `RunConfig`.
        num_ranks: at most, a power of two that divides V.
        look_seconds: between two looks for processes that have come. Each is a stop with a checkpoint.
        max_failures: how often others may be lost to this process.
        wait_seconds: that a rank may wait for another one, as one that is frozen and not dead: more than its slowest
            step, checkpoint or evaluation takes.

    Raises:
        MissingExtraError: torchft isn't installed.
        RunError: the lighthouse doesn't answer, or has no such address; and as `train_among`.
    """
    check_begin(run_folder, num_ranks, max_failures, look_seconds=look_seconds, wait_seconds=wait_seconds)
    with Lighthouse(lighthouse) as members:
        train_among(
            members,
            train,
            run_folder=run_folder,
            num_ranks=num_ranks,
            look_seconds=look_seconds,
            max_failures=max_failures,
            wait_seconds=wait_seconds,
        )


class Lighthouse:
    """Membership by torchft's lighthouse; a context, in which this process counts as there.

    Args:
        address: the lighthouse's, `http://HOST:PORT`.
        answer_seconds: that it may take to answer at first.

    Raises:
        MissingExtraError: torchft isn't installed.
        RunError: the lighthouse doesn't answer, or has no such address.
    """

    def __init__(self, address: str, answer_seconds: float = 20.0) -> None:
        try:
            from torchft.coordination import LighthouseClient
        except ImportError as error:
            raise MissingExtraError("A lighthouse is torchft's. Install it: pip install 'cosmati[torchft]'") from error
        place = _place_of(address)
        self.name = address.rstrip("/")
        self._id = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        try:
            self._client = LighthouseClient(self.name, timedelta(seconds=answer_seconds))
            self._client.heartbeat(self._id)
        except (OSError, RuntimeError, ValueError) as error:
            raise _dark(self.name, error) from error
        self._host = _own_address(*place)
        self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        self._is_over = threading.Event()

    def agree(self) -> RankGroup:
        """Wait for a quorum that this process is in.

        Raises:
            RunError: the lighthouse has gone.
        """
        try:
            quorum = self._client.quorum(
                self._id, _WAIT, store_address=f"{self._host}:{self._store.port}", world_size=1, step=0
            )
        except (OSError, RuntimeError) as error:
            raise _dark(self.name, error) from error
        ranked = sorted(quorum.participants, key=lambda one: one.replica_id)
        host, _, port = ranked[0].store_address.rpartition(":")
        return RankGroup(
            # A quorum's id stays as it is while the same processes agree; its time doesn't.
            number=quorum.created.seconds * 1_000_000_000 + quorum.created.nanos,
            rank=[one.replica_id for one in ranked].index(self._id),
            size=len(ranked),
            host=host,
            port=int(port),
        )

    def __enter__(self) -> Self:
        """Say from now on that this process is there."""
        threading.Thread(target=self._beat, daemon=True, name="cosmati-heartbeat").start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Say so no longer."""
        self._is_over.set()

    def _beat(self) -> None:
        while not self._is_over.wait(_BEAT_SECONDS):
            try:
                self._client.heartbeat(self._id)
            except (OSError, RuntimeError):
                continue  # the next quorum says that it's gone


def _place_of(address: str) -> tuple[str, int]:
    """Return an address's host and port.

    Raises:
        RunError: it has none.
    """
    with suppress(ValueError, AttributeError):
        parts = urlsplit(address)
        is_whole = parts.scheme in ("http", "https") and parts.path in ("", "/") and not parts.query + parts.fragment
        if is_whole and parts.hostname and parts.port:
            return parts.hostname, parts.port
    raise RunError(f"{address!r} is no lighthouse's address. Give http://HOST:PORT, as http://10.0.0.1:29510.")


def _own_address(host: str, port: int) -> str:
    """Return this machine's address, as the lighthouse's machine reaches it."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # nothing is sent
        return str(probe.getsockname()[0])


def _dark(address: str, error: Exception) -> RunError:
    return RunError(f"No lighthouse answers at {address}: {error}. Begin one: torchft_lighthouse --min_replicas 1")
