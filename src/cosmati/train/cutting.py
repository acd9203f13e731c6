"""Where memory is short, each microbatch is cut into pieces: the same rows in the step, in more microbatches.

Piece k of microbatch m is microbatch k * V + m, so each rank keeps the rows that it has. From which step on there are
how many pieces is kept in the run folder before that step is taken anew: who resumes from before it cuts there too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from cosmati.core.batch import Batch, count_rows
from cosmati.errors import BatchError, OutOfMemoryError, words_of
from cosmati.storage.atomic import replace_file

_FILE = "cuts.json"


class Cuts:
    """In how many pieces each microbatch is cut, from which steps on.

    Args:
        made: step and number of pieces, of each cut so far.
        coming: likewise, of those that an earlier attempt at later steps needed.
    """

    def __init__(self, made: Sequence[Sequence[int]] = (), coming: Sequence[Sequence[int]] = ()) -> None:
        self.made = [(step, pieces) for step, pieces in made]
        self._coming = {cut[0]: cut[1] for cut in coming}

    @classmethod
    def found(cls, folder: Path | None, made: Sequence[Sequence[int]], step: int) -> Cuts:
        """Return the cuts of a checkpoint, and those that the folder has kept of later steps."""
        path = None if folder is None else folder / _FILE
        kept = json.loads(path.read_text()) if path is not None and path.exists() else []
        return cls(made, [cut for cut in kept if cut[0] >= step])

    @property
    def pieces(self) -> int:
        """Number of pieces of each microbatch at present."""
        return self.made[-1][1] if self.made else 1

    def is_due(self, step: int) -> bool:
        """Say whether an earlier attempt at this step needed more pieces."""
        return step in self._coming and self._coming[step] > self.pieces

    def halve(self, step: int) -> None:
        """Cut each piece in two from a step on, or as an earlier attempt at it needed."""
        self.made.append((step, max(2 * self.pieces, self._coming.get(step, 1))))

    def keep(self, folder: Path) -> None:
        """Write them, atomically."""
        coming = [(step, pieces) for step, pieces in self._coming.items() if step > self.made[-1][0]]
        replace_file(folder / _FILE, json.dumps([*self.made, *coming]).encode())

    def cut(self, microbatches: Sequence[Batch]) -> list[Batch]:
        """Return the pieces: the first of each microbatch, then the second of each, and so on.

        Raises:
            BatchError: their rows can't be told apart.
        """
        if self.pieces == 1:
            return list(microbatches)
        return [piece_of(batch, k, self.pieces) for k in range(self.pieces) for batch in microbatches]


def piece_of(batch: Batch, k: int, pieces: int) -> Batch:
    """Return piece k of a microbatch."""
    rows = batch.num_rows // pieces
    return batch.select(slice(k * rows, (k + 1) * rows))


def refuse_uncut(
    microbatches: Sequence[Batch], pieces: int, step: int, why: str, *, have_changed: bool = False
) -> None:
    """Refuse to go on where another cut is of no help.

    Args:
        microbatches: this rank's.
        pieces: into how many each is cut so far.
        step: of the run.
        why: what was short.
        have_changed: the attempt that failed has changed a rank's rows in place.

    Raises:
        OutOfMemoryError: a microbatch's rows can't be halved once more, or aren't those any more that were given.
    """
    if have_changed:
        msg = (
            f"Memory is too short for step {step}: {why} It can't be taken anew with smaller microbatches: the loss or "
            "the model's first layers have changed its rows in place. Nothing of the step is committed. Let the loss "
            "change a copy (x = x.clone(); ReLU without inplace=True), or begin with more microbatches "
            "(num_microbatches)."
        )
        raise OutOfMemoryError(msg)
    rows = min(batch.num_rows for batch in microbatches)
    try:
        if all(batch.num_rows % (2 * pieces) == 0 for batch in microbatches):
            for batch in microbatches:
                if not batch.lineage.is_known:  # With V = 1, nobody has asked yet whether lists are of rows.
                    count_rows(batch.data, 2 * pieces)
                piece_of(batch, 0, 2 * pieces)
            return
        reason = f"{rows // pieces} rows can't be cut in two"
    except BatchError as error:
        reason = str(error)
    msg = (
        f"Memory is too short for step {step}, also with microbatches of {rows // pieces} rows: {why} They aren't cut "
        f"further: {reason}. Nothing of the step is committed. Take fewer or shorter rows a step, a smaller model, or "
        "bfloat16."
    )
    raise OutOfMemoryError(msg)


def shortage(error: BaseException) -> str:
    """Return what an error says of memory that is too short, empty where it's about something else."""
    text = words_of(error).partition("\n")[0] or type(error).__name__
    is_short = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text
    return text if is_short else ""
