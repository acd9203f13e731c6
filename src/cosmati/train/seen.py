"""Batches that were given, by their content, and where a loader stands that restores its own state."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from cosmati.core.batch import Data
from cosmati.errors import DataError
from cosmati.train.content import content_digest
from cosmati.train.marks import Mark
from cosmati.train.written import WRITTEN, WrittenHere

_EVERY = 8
"""Batches between the states that are kept of a loader; so many at most are read again when a run resumes."""

CHANGED_IN_PLACE = (
    "was changed in place since a step was given it, by the loss or by the model's first layers: each pass would train "
    "on other rows, and a run that resumes has the data as they were. Let the loss change a copy (x = x.clone(); ReLU "
    "without inplace=True), or give a Source, which gives copies: InMemory(...)"
)


class LastGiven:
    """The batch that was given last: its digest is for checkpoints, and hashing each would cost more than some steps.

    Args:
        digest: of one that a checkpoint tells of.
    """

    def __init__(self, digest: str | None = None) -> None:
        self._digest = digest
        self._batch: tuple[Data, Mark] | None = None
        self._is_hashed = True
        self._has_looked = True
        self._written = WrittenHere()

    def look(self) -> None:
        """See what the step has made of its batch, before another one is read, or anybody else reads the data."""
        if self._batch is not None and not self._has_looked:
            data, mark = self._batch
            self._written.add(mark.changed_in(data))
        self._has_looked = True

    def note(self, data: Data, mark: Mark | None = None, name: str = "A batch comes again, and") -> None:
        """Take note of a batch, before anybody changes it.

        Args:
            data: the batch.
            mark: what it was when it was first given, where that's known.
            name: what to call it.

        Raises:
            DataError: it was given before, here or to another trainer, and has been changed in place since.
        """
        if WRITTEN.has_part_of(data):
            raise DataError(f"{name} {CHANGED_IN_PLACE}.")
        self._batch, self._is_hashed = (data, mark or Mark(data)), False
        self._has_looked = False

    def forget(self) -> None:
        """Begin a pass anew: no batch of it was given yet."""
        self._digest, self._batch = None, None

    def digest(self) -> str | None:
        """Return its digest; None where it isn't known, or somebody has changed it."""
        if self._batch is not None and not self._is_hashed:
            data, mark = self._batch
            self._digest, self._is_hashed = content_digest(data).hex() if mark.is_same(data) else None, True
        return self._digest

    def refuse_changed(self, step: int) -> None:
        """Refuse to give the last batch once more, for a step that has failed, where that step has changed it.

        Raises:
            DataError: it has.
        """
        if self._batch is not None and self._batch[1].has_changed(self._batch[0]):
            msg = (
                f"Step {step} has failed, and can't be taken anew: the loss or the model's first layers have changed "
                "its batch in place, and it would train on other rows. Nothing of the step is committed. Make the "
                "trainer and the data anew to go on from the last checkpoint, and let the loss change a copy "
                "(x = x.clone(); ReLU without inplace=True)."
            )
            raise DataError(msg)


class Kept:
    """A loader's own state, from some batches ago: what was given since is read again, and compared.

    A state as it is now would restore a loader that can't say whether it gives what it would have given.

    Args:
        loader: with `state_dict` and `load_state_dict`.

    Attributes:
        doubt: why the loader can't be restored to its place, in words; empty as far as is known.
    """

    def __init__(self, loader: Any) -> None:  # noqa: ANN401  (whatever has a state)
        self._loader = loader
        self._index, self._state = 0, None
        self.doubt = ""

    def begin_pass(self) -> None:
        """Forget the state of an earlier pass."""
        self._index, self._state = 0, None

    def before(self, seen: int) -> None:
        """Keep the state before the next batch, where it's due: from the first batch on, when any loader has begun."""
        if seen % _EVERY == 1 and seen != self._index:
            # A copy: some give the mapping in which they go on counting.
            self._index, self._state = seen, copy.deepcopy(self._loader.state_dict())
        elif seen == 2 and self._index == 1 and not (self.doubt or self._moves()):
            name = type(self._loader).__name__
            self.doubt = f"the state_dict() of {name} is the same after 2 batches as after 1: it doesn't say the place"

    def _moves(self) -> bool:
        return content_digest(self._state) != content_digest(self._loader.state_dict())

    def state(self, seen: int) -> dict[str, Any]:
        """Return what a checkpoint keeps after so many batches of the pass."""
        if seen <= self._index or not self._index:
            return {"loader": self._loader.state_dict(), "from": seen}
        return {"loader": self._state, "from": self._index}

    def restore(self, state: Mapping[str, Any], seen: int) -> int:
        """Hand the loader a checkpoint's state; return how many batches of the pass it says were given."""
        if "loader" not in state:
            return seen
        self._index, self._state = state["from"], copy.deepcopy(state["loader"])
        self._loader.load_state_dict(state["loader"])
        return self._index
