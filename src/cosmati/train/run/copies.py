"""Copies of a run's checkpoints in another place: behind any URL that fsspec knows, or in another folder.

A published checkpoint is copied by a thread of the first rank's, `digests.json` last: what has none is no checkpoint.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from threading import Thread
from typing import Literal

from cosmati.data.shards.remote import local_path
from cosmati.errors import CheckpointError, CosmatiError
from cosmati.train.run.checkpoints import (
    Checkpoint,
    draft_folder,
    list_checkpoints,
    publish_checkpoint,
    read_checkpoint,
    step_of,
)
from cosmati.train.run.copy_place import CopyPlace


class Copies:
    """Copies of the checkpoints of one run.

    Args:
        url: their place, which is this run's alone.
        keep: how many to keep there.
        run: the run's folder.

    Raises:
        CheckpointError: it's a folder, and can't be made.
    """

    def __init__(self, url: str, keep: int, run: Path) -> None:
        self._place, self._keep, self._run = CopyPlace(url), keep, run
        try:
            if (here := local_path(url)) is not None:
                here.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"checkpoint_to can't be a folder in {url}: {error}. Give another one.") from error
        self._token = self._newest = ""
        self._fetched: Path | None = None
        self._thread: Thread | None = None
        self._error: CheckpointError | None = None

    def claim(self) -> None:
        """Make the place this run's, and note it in the run's folder; nothing is copied before.

        Raises:
            CheckpointError: the folder or the place can't be written.
        """
        self._token = self._place.claim(self._run)

    def begin(self, checkpoint: Path) -> None:
        """Copy a published checkpoint, once the one before is copied; warn where that one couldn't be."""
        self.wait()
        self.warn("The run goes on.")
        self._start(checkpoint, has_it=False)

    def _start(self, checkpoint: Path, *, has_it: bool) -> None:
        self._thread = Thread(target=self._copy, args=(checkpoint, has_it), name="copy", daemon=True)
        self._thread.start()

    def warn(self, besides: str) -> None:
        """Warn where the last one couldn't be copied, and nobody has been told."""
        error, self._error = self._error, None
        if error is not None:
            warnings.warn(f"{error} {besides}".rstrip(), stacklevel=3)

    def catch_up(self, checkpoint: Path) -> None:
        """Copy the checkpoint that the run goes on from, unless it's there, and tidy up: one may have been killed.

        Raises:
            CheckpointError: the place can't be listed.
        """
        try:
            has_it = checkpoint.name in self._place.steps()
        except (CosmatiError, OSError) as error:
            raise CheckpointError(
                f"{self._place.url} can't be listed: {error} Mend that, or leave checkpoint_to out."
            ) from error
        self._start(checkpoint, has_it=has_it)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for what is being copied, no longer than so many seconds; say whether nothing is any more."""
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def settle(self) -> None:
        """Wait for what is being copied.

        Raises:
            CheckpointError: the last one couldn't be.
        """
        self.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _copy(self, checkpoint: Path, has_it: bool) -> None:
        try:
            self._refuse_taken()
            if not has_it:
                self._place.put(checkpoint)
            self._remove_old(checkpoint.name)
        except Exception as error:  # noqa: BLE001  (a client's own, whatever it is)
            self._error = CheckpointError(
                f"The checkpoint {checkpoint.name} couldn't be copied to {self._place.url}: {error} It's whole in "
                f"{checkpoint.parent}, and starting the run again copies it."
            )

    def _refuse_taken(self) -> None:
        there = self._place.token()
        if there and there != self._token:
            raise CheckpointError("Another process goes on with this run from there, or another run copies to there.")
        if not there:  # Somebody has emptied the place.
            self._place.say(self._run, self._token)

    def _remove_old(self, newest: str) -> None:
        """Remove all but the newest, what is no checkpoint, and what the run had before it went back."""
        newest_step = step_of(Path(newest))
        kept = [name for name in self._place.steps() if step_of(Path(name)) <= newest_step][: self._keep]
        self._place.remove(file for name, files in self._place.files().items() if name not in kept for file in files)

    def fetch(self, folder: Path, which: Literal["newest", "whole"], *, has_ledger: bool) -> None:
        """Bring the newest copy into the run's `checkpoints/`, where the run hasn't one as new.

        Args:
            folder: the run's `checkpoints/`.
            which: the newest one, or the newest whole one.
            has_ledger: the run's folder holds the ledger that goes on.

        Raises:
            CheckpointError: it can't be fetched, or is damaged, or is of another run, or its ledger isn't here.
        """
        here = list_checkpoints(folder)
        try:
            self._refuse_another_s(has_checkpoints=bool(here))
            there = self._place.steps()
            self._newest = there[0] if there else ""
            found = [name for name in there if not here or step_of(Path(name)) > step_of(here[0])]
            for name in found:
                try:
                    draft, checkpoint = self._fetched_draft(folder, name)
                    break
                except CheckpointError:
                    # Without any here, the run would begin anew.
                    if which == "newest" or (name == found[-1] and not here):
                        raise
            else:
                return
        except (CosmatiError, OSError, ValueError) as error:
            raise CheckpointError(
                f"The newest copy of the run's checkpoints in {self._place.url} can't be had: {error} Mend that, or "
                "leave checkpoint_to out to go on from what is here; RunConfig(resume_from='whole') passes over "
                "what is damaged."
            ) from error
        if checkpoint.facts.get("identity", {}).get("settings.ledger") and not has_ledger:
            shutil.rmtree(draft)
            raise CheckpointError(
                f"{self._place.url} has the checkpoint {name} of a run that keeps a ledger, and the ledger isn't in "
                f"{folder.parent}: copies hold checkpoints alone, since its key stays with you. Put the run's own "
                "`ledger` and `private` folders there."
            )
        self._fetched = publish_checkpoint(draft, keep=len(here) + 1)

    def _refuse_another_s(self, *, has_checkpoints: bool) -> None:
        """Refuse a place to which another run copies: a folder without checkpoints goes on with that run."""
        there = self._place.token()
        if there and has_checkpoints and there not in self._place.tokens_of(self._run):
            raise CheckpointError(
                "They're of another run, or another process has gone on with this one from there; writer.json names "
                f"its folder. Give this run another checkpoint_to, or {self._run} another name."
            )

    def _fetched_draft(self, folder: Path, name: str) -> tuple[Path, Checkpoint]:
        draft = draft_folder(folder, step_of(Path(name)), None)
        shutil.rmtree(draft, ignore_errors=True)
        self._place.fetch(name, draft)
        try:
            return draft, read_checkpoint(draft)
        except CheckpointError:
            shutil.rmtree(draft)
            raise

    def give_back(self) -> str:
        """Remove what was fetched for a run that can't go on from it; return what to say of that, if anything was."""
        if self._fetched is None:
            return ""
        shutil.rmtree(self._fetched, ignore_errors=True)
        return (
            f" It was brought from {self._place.url}. If the copies there are another run's, give this one another "
            "checkpoint_to, or its folder another name."
        )

    def told_of_newest(self) -> str:
        """Return what to say where the run's own checkpoints are damaged; nothing where there is no copy either."""
        if not self._newest:
            return ""
        return (
            f" {self._place.url} has a copy of {self._newest}: move {self._run / 'checkpoints'} away, and it's fetched."
        )
