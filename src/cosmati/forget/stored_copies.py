"""The end of copies of a run's checkpoints in other places (`checkpoint_to`), as far as they can be reached."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace

from cosmati.errors import CosmatiError
from cosmati.export.publishing import Say
from cosmati.forget.derived import COPY, DELETED, NOT_COVERED, TAKEN, UNSEEN, Derived, copies_of
from cosmati.forget.past_run import PastRun
from cosmati.train.run.copy_place import CopyPlace


def erase_copies(run: PastRun, contact: int, listed: Iterable[Derived], say: Say) -> tuple[Derived, ...]:
    """Remove the copies that have learnt the content; return what a certificate lists then.

    Args:
        run: of which, and of those that it succeeds.
        contact: the first step that had the content.
        listed: what the last certificate has, of all kinds.
        say: told of what's done.
    """
    found = {one.path: one for one in copies_of(run, contact)}
    unseen = [path for path, one in found.items() if one.kind != COPY]
    for path, one in found.items():
        if one.kind == COPY and one.status == NOT_COVERED:
            say(f"Deleting {path}")
            found[path] = _erased(one)
    listed_now = [found.pop(one.path, None) or _unfound(one, unseen) for one in listed]
    return (*filter(None, listed_now), *found.values())


def _unfound(one: Derived, unseen: Collection[str]) -> Derived | None:
    """Return what to say of what was listed and isn't among the copies now."""
    if one.kind in (UNSEEN, TAKEN):
        return None  # What is there is found now.
    # A call that was killed may have removed it; what can't be looked at is as it was.
    is_gone = one.kind == COPY and one.status == NOT_COVERED and one.path.rpartition("/")[0] not in unseen
    return replace(one, status=DELETED) if is_gone else one


def _erased(one: Derived) -> Derived:
    url, _, name = one.path.rpartition("/")
    place = CopyPlace(url)
    with suppress(CosmatiError, OSError):
        place.remove(place.files().get(name, ()))
        if name not in place.files():
            return replace(one, status=DELETED)
    return one
