"""The place of a run's copies: a folder, or behind any URL that fsspec knows; one run's alone, which says so there."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from cosmati.data.shards.remote import RemoteMissingError, local_path
from cosmati.data.shards.upload import Target
from cosmati.errors import CheckpointError, CosmatiError
from cosmati.records.attempts import append_lines
from cosmati.records.copies import COPIES_FILE, CopiedTo, read_copied_to, told_url
from cosmati.storage.atomic import sync
from cosmati.train.run.checkpoints import is_step_name, step_of

LAST = "digests.json"
"""The file that is written last and removed first: what has none is no checkpoint."""
_WRITER = "writer.json"
_MOST_BYTES = 1 << 24


def url_of_copies(checkpoint_to: str, run: Path) -> str:
    """Return where a run's checkpoints are copied to: a recipe has several runs."""
    return f"{str(checkpoint_to).rstrip('/')}/{run.name}"


class CopyPlace:
    """Where copies of one run's checkpoints are.

    Args:
        url: of the place.
        deadline_seconds: for one small file, all attempts together.

    Attributes:
        url: a folder's whole path, or a URL without name and password.
    """

    def __init__(self, url: str, *, deadline_seconds: float = 60.0) -> None:
        here = local_path(url)
        self.url = told_url(url.rstrip("/")) if here is None else str(here.absolute())
        self._target = Target(url, deadline_seconds=deadline_seconds)

    def steps(self) -> list[str]:
        """Return the names of the checkpoints that are there, newest first."""
        found = (name.partition("/")[0] for name in self._target.names(f"step-*/{LAST}"))
        return sorted(filter(is_step_name, found), key=lambda name: step_of(Path(name)), reverse=True)

    def files(self) -> dict[str, list[str]]:
        """Return all files of all checkpoints, also of those that aren't whole, by the checkpoint's name."""
        found = dict[str, list[str]]()
        for name in self._target.names("step-*/**"):
            found.setdefault(name.partition("/")[0], []).append(name)
        return found

    def digests(self, name: str) -> bytes:
        """Return the list of a checkpoint's digests; nothing where it has none."""
        try:
            return self._target.read(f"{name}/{LAST}", max_bytes=_MOST_BYTES)
        except RemoteMissingError:
            return b""

    def put(self, checkpoint: Path) -> None:
        """Copy a checkpoint, its list of digests last; another one of that step is none from the first moment on."""
        self._target.remove([f"{checkpoint.name}/{LAST}"])
        files = sorted((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.name == LAST)
        for path in files:
            self._target.put_file(f"{checkpoint.name}/{path.relative_to(checkpoint).as_posix()}", path)

    def fetch(self, name: str, draft: Path) -> None:
        """Copy a checkpoint into an empty folder here, and sync it.

        Raises:
            ValueError: an object's name leads elsewhere.
        """
        names = self._target.names(f"{name}/**")
        lengths = self._target.sizes(names, sure=("", 0)) or {}
        for path in names:
            place = draft / path.partition("/")[2]
            if ".." in place.parts:  # An object may be called anything.
                raise ValueError(f"{path} leads out of it.")
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("wb") as file:
                self._target.fetch(path, file, num_bytes=lengths.get(path))
        for made in draft.rglob("*"):
            sync(made)

    def remove(self, files: Iterable[str]) -> None:
        """Remove files, the lists of digests first: nobody then takes what is left for a checkpoint."""
        self._target.remove(sorted(files, key=lambda name: not name.endswith(f"/{LAST}")))
        if self._target.local is not None:
            folders = [path for path in self._target.local.glob("step-*/**") if path.is_dir()]
            for folder in sorted(folders, key=lambda one: len(one.parts), reverse=True):
                with suppress(OSError):  # Not empty; those that a kill has left are.
                    folder.rmdir()

    def token(self) -> str:
        """Return the token of the run that copies to here; empty where none says that it does."""
        try:
            told = self._target.read(_WRITER, max_bytes=_MOST_BYTES)
        except RemoteMissingError:
            return ""
        try:
            return str(json.loads(told)["token"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.url}/{_WRITER} can't be read: {error}. Remove it, or take another place."
            ) from error

    def tokens_of(self, run: Path) -> list[str]:
        """Return the tokens under which a run has copied to here, the last one last."""
        return [one.token for one in read_copied_to(run) if one.url == self.url]

    def claim(self, run: Path) -> str:
        """Make it this run's: noted in its folder before anything is written here. Return the token.

        Raises:
            CheckpointError: the folder or the place can't be written.
        """
        try:
            there, own = self.token(), self.tokens_of(run)
            if there and own[-1:] == [there]:
                return there
            place = CopiedTo(self.url, secrets.token_hex(16))
            # With the one before: killed here, it goes on as the one that has taken that one's place.
            noted = [CopiedTo(self.url, there)] if there and there not in own else []
            append_lines(run / COPIES_FILE, *map(asdict, [*noted, place]))
            for path in (run / COPIES_FILE, run):
                sync(path)
            self.say(run, place.token)
        except (CosmatiError, OSError) as error:
            raise CheckpointError(
                f"{self.url} can't be made the place of this run's copies: {error} Mend that, or leave checkpoint_to "
                "out."
            ) from error
        return place.token

    def say(self, run: Path, token: str) -> None:
        """Say in the place whose it is."""
        self._target.put(_WRITER, json.dumps({"run": str(run.absolute()), "token": token}).encode())
