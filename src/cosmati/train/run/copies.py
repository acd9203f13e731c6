"""Copies of a run's checkpoints in another place: behind any URL that fsspec knows, or in another folder.

A published checkpoint is copied by a thread of the first rank's, `digests.json` last: what has none is no checkpoint.
"""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path
from threading import Thread

from cosmati.data.shards.remote import local_path
from cosmati.data.shards.upload import Target
from cosmati.errors import CheckpointError, CosmatiError
from cosmati.train.run.checkpoints import draft_folder, list_checkpoints, publish_checkpoint, read_checkpoint

_LAST = "digests.json"
_STEP = re.compile(r"step-\d{8,}")


class Copies:
    """Copies of the checkpoints of one run.

    Args:
        url: their place, which is this run's alone.
        keep: how many to keep there.
    """

    def __init__(self, url: str, keep: int) -> None:
        if (here := local_path(url)) is not None:
            here.mkdir(parents=True, exist_ok=True)
        self._target, self._keep = Target(url), keep
        self._thread: Thread | None = None
        self._error: CheckpointError | None = None

    def begin(self, checkpoint: Path) -> None:
        """Copy a published checkpoint, once the one before is copied; warn where that one couldn't be."""
        self.wait()
        if self._error is not None:
            warnings.warn(f"{self._error} The run goes on.", stacklevel=2)
        self._thread = Thread(target=self._copy, args=(checkpoint,), name="copy", daemon=True)
        self._thread.start()

    def catch_up(self, folder: Path) -> None:
        """Copy the newest of the run's checkpoints where it isn't there: a process may have been killed before."""
        for newest in list_checkpoints(folder)[:1]:
            if newest.name not in self._steps():
                self.begin(newest)

    def wait(self) -> None:
        """Wait for what is being copied."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def settle(self) -> None:
        """Wait for what is being copied.

        Raises:
            CheckpointError: the last one couldn't be.
        """
        self.wait()
        if self._error is not None:
            raise self._error

    def _copy(self, checkpoint: Path) -> None:
        self._error = None
        try:
            files = sorted(
                (path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.name == _LAST
            )
            for path in files:
                self._target.put_file(f"{checkpoint.name}/{path.relative_to(checkpoint).as_posix()}", path)
            self._remove_old()
        except (CosmatiError, OSError) as error:
            self._error = CheckpointError(
                f"The checkpoint {checkpoint.name} couldn't be copied to {self._target.url}: {error} It's whole in "
                f"{checkpoint.parent}, and starting the run again copies it."
            )

    def _remove_old(self) -> None:
        """Remove all but the newest, and what is no checkpoint: their marks first."""
        kept = self._steps()[: self._keep]
        others = [name for name in self._target.names("step-*/**") if name.partition("/")[0] not in kept]
        self._target.remove(sorted(others, key=lambda name: not name.endswith(f"/{_LAST}")))

    def _steps(self) -> list[str]:
        """Return the names of the checkpoints that are there, newest first."""
        found = (name.partition("/")[0] for name in self._target.names(f"step-*/{_LAST}"))
        return sorted(filter(_STEP.fullmatch, found), reverse=True)

    def fetch(self, folder: Path, *, has_ledger: bool) -> None:
        """Bring the newest copy into the run's `checkpoints/`, where the run hasn't one as new.

        Args:
            folder: the run's `checkpoints/`.
            has_ledger: the run's folder holds the ledger that goes on.

        Raises:
            CheckpointError: it can't be fetched, or is damaged, or is of a run whose ledger isn't here.
        """
        here = [path.name for path in list_checkpoints(folder)[:1]]
        try:
            newest = self._steps()[:1]
            if not newest or newest <= here:
                return
            name = newest[0]
            draft = draft_folder(folder, int(name.removeprefix("step-")), None)
            shutil.rmtree(draft, ignore_errors=True)
            for path in self._target.names(f"{name}/**"):
                place = draft / path.partition("/")[2]
                if ".." in place.parts:  # An object may be called anything.
                    raise ValueError(f"{path} leads out of it.")
                place.parent.mkdir(parents=True, exist_ok=True)
                with place.open("wb") as file:
                    self._target.fetch(path, file)
        except (CosmatiError, OSError, ValueError) as error:
            raise CheckpointError(
                f"The newest copy of the run's checkpoints in {self._target.url} can't be had: {error} Mend that, or "
                "leave checkpoint_to out to go on from what is here."
            ) from error
        if read_checkpoint(draft).facts.get("identity", {}).get("settings.ledger") and not has_ledger:
            shutil.rmtree(draft)
            raise CheckpointError(
                f"{self._target.url} has the checkpoint {name} of a run that keeps a ledger, and the ledger isn't in "
                f"{folder.parent}: copies hold checkpoints alone, since its key stays with you. Put the run's own "
                "`ledger` and `private` folders there."
            )
        publish_checkpoint(draft, keep=len(list_checkpoints(folder)) + 1)
