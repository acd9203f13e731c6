"""Writes an open run's checkpoints: whole from the first rank, in parts from all; while the loop waits, or beside it.

Beside the loop a thread writes a copy of the state. It calls no collective, since the loop's own are under way; ranks
that write parts see from the files themselves when all are there. Observers are told of the checkpoint, and it gets its
name, in the loop's own thread, after the step in which the first rank finds it finished.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol

import torch
from torch import Tensor

from cosmati.core.clock import Clock
from cosmati.errors import CheckpointError
from cosmati.train.layout.shares import SharePlan, Shares
from cosmati.train.ranks import Ranks
from cosmati.train.run.checkpoints import (
    Checkpoint,
    Roots,
    draft_folder,
    finish_checkpoint,
    not_written,
    publish_checkpoint,
    unsavable,
    write_checkpoint,
)
from cosmati.train.run.copies import Copies
from cosmati.train.run.parts import HeldState, Share, write_part

PATIENCE_SECONDS = 600.0
"""That the first rank waits for the others' parts: as long as ranks wait for each other in a collective."""
_MOMENT_SECONDS = 10.0


class Draft(Protocol):
    """A checkpoint to be written, from a state that doesn't change meanwhile."""

    path: Path
    abandoned: Event

    def write(self) -> None:
        """Write this rank's files; no other rank is asked."""
        ...

    def finish(self) -> Roots:
        """Write what is over all ranks' files, once they're there; return the digests. Only the first rank does."""
        ...


class WholeDraft:
    """A checkpoint that one rank writes."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, epoch: int | None) -> None:
        self.path, self.abandoned = draft_folder(folder, checkpoint.step, epoch), Event()
        self._given = folder, checkpoint, epoch

    def write(self) -> None:
        """Write all files."""
        write_checkpoint(*self._given)

    def finish(self) -> Roots:
        """Hash all tensors."""
        return self._given[1].roots


class PartDraft:
    """A checkpoint of which each rank writes a part (see parts.py)."""

    def __init__(
        self, path: Path, ranks: Ranks, plan: SharePlan, share: Share, step: int, facts: Mapping[str, Any]
    ) -> None:
        self.path, self.abandoned = path, Event()
        self._rank, self._world, self._plan, self._share = ranks.rank, ranks.world, plan, share
        self._step, self._facts = step, facts

    def write(self) -> None:
        """Write this rank's part."""
        try:
            write_part(self.path, self._rank, self._world, self._plan, self._share)
        except OSError as error:
            raise not_written(self._step, self.path.parent, error) from error

    def finish(self) -> Roots:
        """Wait for all parts, and write the index."""
        given = self.path, self._step, self._facts, self._plan, self._world
        return finish_checkpoint(*given, PATIENCE_SECONDS, self.abandoned)


class Flight(Thread):
    """A draft that is written beside the loop."""

    def __init__(self, clock: Clock, draft: Draft, *, is_first: bool) -> None:
        super().__init__(name="checkpoint", daemon=True)  # a process that dies doesn't wait for it
        self.clock, self.draft, self.written = clock, draft, Event()
        self.roots: Roots | None = None
        self.error: BaseException | None = None
        self._is_first = is_first
        self.start()

    def run(self) -> None:
        """Write it."""
        try:
            self.draft.write()
            self.written.set()
            if self._is_first:
                self.roots = self.draft.finish()
        except BaseException as error:  # noqa: BLE001  (the loop's thread raises it)
            self.error = error
        finally:
            self.written.set()


class Saver:
    """Writes the checkpoints of an open run, one at a time.

    Args:
        folder: the run's `checkpoints/`.
        ranks: the data-parallel ranks.
        keep: how many checkpoints to keep.
        epoch: of the writer, on the first rank.
        check: refuses to write for a process whose place another one has taken.
        tell: tells observers of a checkpoint before it's published.
        is_async: write beside the loop, which waits for no more than a copy of the state.
        copies: of published ones elsewhere; None where nobody asked, and on other ranks than the first.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        *,
        keep: int,
        epoch: int | None,
        check: Callable[[], None],
        tell: Callable[[Clock, Roots], None],
        is_async: bool,
        copies: Copies | None,
    ) -> None:
        self._folder, self._ranks, self._keep, self._epoch = folder, ranks, keep, epoch
        self._check, self._tell, self._is_async, self._copies = check, tell, is_async, copies
        self._shares, self._share = Shares(ranks), Share()
        self._kept: dict[str, Tensor] = {}
        self._flight: Flight | None = None

    def save(self, clock: Clock, taken: Checkpoint | HeldState) -> None:
        """Write a checkpoint; of one beside the loop, return once its state is copied. Every rank has to call.

        The one before is to be settled.

        Raises:
            CheckpointError: it can't be written.
        """
        assert self._flight is None, "settled before"
        draft = self._drafted(taken)
        if self._is_async:
            if draft is not None:
                self._flight = Flight(clock, draft, is_first=self._ranks.rank == 0)
            return
        self._together(lambda: None if draft is None else draft.write())
        self._await_copy()
        is_first = self._ranks.rank == 0
        self._together(lambda: self._publish(clock, draft, draft.finish()) if draft is not None and is_first else None)
        self._share = Share()  # Its memory is needed elsewhere.

    def settle(self, *, copied: bool = False) -> None:
        """Wait for the checkpoint that is being written, and publish it. Every rank has to call.

        Args:
            copied: wait for its copy elsewhere, too.

        Raises:
            CheckpointError: it couldn't be written, or copied.
        """
        if not (self._is_async or copied):
            return
        if self._flight is not None:
            self._flight.written.wait()
        # A rank that has died is found here, by all, and not by the first one that waits for its part.
        self._ranks.barrier()
        self._await_copy()
        self._together(lambda: self.land(wait=True))
        if copied:
            self._await_copy()
            self._together(lambda: None if self._copies is None else self._copies.settle())

    def land(self, *, wait: bool) -> None:
        """Publish what was written beside the loop, if it's finished. No other rank is asked.

        Args:
            wait: until it's finished.

        Raises:
            CheckpointError: it couldn't be written.
        """
        flight = self._flight
        if flight is None or (flight.is_alive() and not wait):
            return
        # Other ranks would wait for this one in the next step.
        if not wait and self._ranks.is_parallel and self._copies is not None and not self._copies.wait(0.0):
            return
        flight.join()
        self._flight = None
        if flight.error is not None:
            raise flight.error
        if flight.roots is not None:
            self._publish(flight.clock, flight.draft, flight.roots)

    def abandon(self) -> None:
        """Publish what is being written, unless it fails or waits for other ranks: the run fails by itself."""
        if self._flight is not None:
            self._flight.draft.abandoned.set()
            self._flight.join()
            if self._flight.error is None:
                self.land(wait=True)
        if self._copies is not None:
            self._copies.wait()
            self._copies.warn("")

    def _await_copy(self) -> None:
        """Wait for the copy that is under way; ranks ask each other anew, so that none waits too long for an answer."""
        while self._ranks.agree(self._copies is not None and not self._copies.wait(_MOMENT_SECONDS)):
            pass

    def _together(self, work: Callable[[], object]) -> None:
        """Do this rank's share; where that fails on one rank, all refuse."""
        error: CheckpointError | None = None
        try:
            work()
        except CheckpointError as raised:
            error = raised
        if self._ranks.agree(error is not None):
            raise error or CheckpointError(
                "Another rank couldn't write its part of the checkpoint, and says why. Earlier checkpoints are whole."
            )

    def _publish(self, clock: Clock, draft: Draft, roots: Roots) -> None:
        self._check()
        self._tell(clock, roots)
        self._check()
        if self._copies is not None:
            self._copies.wait()  # Its files may be the ones that go now.
        try:
            published = publish_checkpoint(draft.path, keep=self._keep)
        except OSError as error:
            raise not_written(clock.step, self._folder, error) from error
        if self._copies is not None:
            self._copies.begin(published)

    def _drafted(self, taken: Checkpoint | HeldState) -> Draft | None:
        if self._ranks.rank == 0:
            self._check()
        # What the loop goes on to change is read now.
        facts = json.loads(json.dumps(taken.facts)) if self._is_async else taken.facts
        if isinstance(taken, HeldState):
            return self._drafted_parts(taken, facts)
        if self._ranks.rank:
            return None
        if self._is_async:
            model, state = self._copied("model", taken.model), self._copied("state", taken.state)
            taken = Checkpoint(taken.step, model, state, facts)
        return WholeDraft(self._folder, taken, self._epoch)

    def _copied(self, kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors, into the memory of the last copy where they fit."""
        found: dict[str, Tensor] = {}
        for name, value in tensors.items():
            if value.layout is not torch.strided:
                found[name] = value  # refused as it's written
                continue
            own = self._kept.get(f"{kind}/{name}")
            if own is None or (own.shape, own.dtype) != (value.shape, value.dtype):
                own = self._kept[f"{kind}/{name}"] = torch.empty(value.shape, dtype=value.dtype)
            found[name] = own.copy_(value.detach())
        return found

    def _drafted_parts(self, taken: HeldState, facts: Mapping[str, Any]) -> Draft:
        spans = taken.spans
        wrong = unsavable(taken.tensors)
        text = f"The checkpoint of step {taken.step} can't be written. {wrong or 'Another rank says why.'}"
        if self._ranks.agree(bool(wrong)):
            raise CheckpointError(text)
        path = draft_folder(self._folder, taken.step, None)
        if self._ranks.rank == 0:
            path = draft_folder(self._folder, taken.step, self._epoch)
            shutil.rmtree(path, ignore_errors=True)  # of an attempt that was killed
        path = path.with_name(self._ranks.told(path.name.encode()).decode())
        plan = self._shares.plan(spans)
        self._share.fill(plan, self._ranks.rank, self._shares.parts(plan, spans))
        return PartDraft(path, self._ranks, plan, self._share, taken.step, facts)
