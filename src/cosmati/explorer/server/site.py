"""What all pages share: the store's index, the templates, and the state of the index."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from starlette.convertors import Convertor, register_url_convertor

from cosmati.errors import RunError
from cosmati.explorer.figures import Figure
from cosmati.explorer.rendering import embedded_json, safe_markup
from cosmati.explorer.views import StudyView, study_figures, study_view, with_axis
from cosmati.ledger.sealing import ColumnKeys
from cosmati.records.study import StudyRecord
from cosmati.store.index import Refreshed, RunIndex
from cosmati.store.reading import study_record
from cosmati.store.scan import LINES_FILE, PLANNED_FILE, STARTED_FILE, STUDY_FILE
from cosmati.study.curves import Axis

if TYPE_CHECKING:
    import jinja2

NAVIGATION = (
    ("/", "Tradeoffs"),
    ("/runs", "Runs"),
    ("/live", "Live"),
    ("/compare", "Compare"),
    ("/composition", "Composition"),
    ("/methods", "Methods"),
    ("/governance", "Governance"),
)
STUDY_FILES = (STUDY_FILE, STARTED_FILE, PLANNED_FILE, LINES_FILE)
KeysOf = Callable[[Path], ColumnKeys | None]
"""Gives the keys of a run's sealed columns that are shown, by the run's folder."""
FolderState = tuple[tuple[str, int, int], ...]
_SLOWEST_SHARE = 0.05
"""Of the time, at most, that goes into looking for changes."""
_SOONEST = 2.0
"""Seconds between looks for changes, at least."""
_LOOKED_AT = 60.0
"""Seconds after the last page in which somebody may still ask for the next one."""


def no_keys(_folder: Path) -> None:
    """Return no keys, whichever run it is: pages are for everybody."""


class AnyTextConvertor(Convertor[str]):
    """The rest of an address as `any`: a `path` of Starlette's has no line break, and a folder's name may."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        """Return it as it is."""
        return value

    def to_string(self, value: str) -> str:
        """Return it as it is."""
        return value


register_url_convertor("any", AnyTextConvertor())


@dataclass
class Site:
    """One store's pages.

    Args:
        index: of the store.
        templates: of all pages.
        keys_of: gives the keys of sealed columns that pages of a run's folder show.
        warm: works out what pages ask for anew after each change of the index, so that nobody waits for it.
    """

    index: RunIndex
    templates: jinja2.Environment
    last: Refreshed | None = None
    keys_of: KeysOf = no_keys
    warm: Callable[[], object] = lambda: None
    _looked: float | None = None
    _failed: str = ""
    _stop: threading.Event = field(default_factory=threading.Event)
    _asked: float = field(default_factory=time.monotonic)

    def page(
        self,
        request: Request,
        template: str,
        *,
        title: str,
        figures: Mapping[str, Figure] | None = None,
        status: int = 200,
        data: Mapping[str, Any] | None = None,
        **context: Any,  # noqa: ANN401  (whatever the template names)
    ) -> HTMLResponse:
        """Render a page; its figures come as data beside it.

        Args:
            request: what was asked.
            template: below `templates/site/`.
            title: of the page.
            figures: that the template draws, by name.
            status: of the answer.
            data: more for the page's script, such as `studies`.
            context: what else the template is given.
        """
        self._asked = time.monotonic()
        shown = shown_figures(figures or {})
        text = self.templates.get_template(f"site/{template}").render(
            title=title,
            store=self.index.root,
            path=request.url.path,
            query=request.url.query,
            navigation=NAVIGATION,
            num_problems=self._num_problems(),
            lateness=self.lateness,
            silence=self.silence,
            failed=self._failed,
            figures=figures or {},
            data=safe_markup(embedded_json({"figures": shown, "studies": {}, **(data or {})})),
            **context,
        )
        return HTMLResponse(text, status_code=status)

    @property
    def interval(self) -> float:
        """Seconds between looks for changes: two, and more where a look takes long."""
        return max(_SOONEST, (self.last.seconds if self.last else 0.0) / _SLOWEST_SHARE)

    @property
    def lateness(self) -> float:
        """Seconds after which a line that a run wrote stands on a page, at most."""
        return self.interval + (self.last.seconds if self.last else 0.0)

    @property
    def silence(self) -> float | None:
        """Seconds since the last good look at the store's files, None while looks come as they should."""
        if self._looked is None:
            return None
        seconds = time.monotonic() - self._looked
        return seconds if self._failed or seconds > 2 * self.lateness + 1 else None

    def _num_problems(self) -> int:
        """Return how many sources can't be read; 0 where the index can't say it, whose page says that."""
        try:
            return len(self.index.problems())
        except (RunError, OSError, sqlite3.Error):
            return 0

    def watch(self) -> None:
        """Bring the index up to date now and then, until `stop`.

        A store that can't be read now, on a disk that went away say, may be there again; pages say since when it can't.
        """
        warmed, self._looked = None, time.monotonic()
        while True:
            with contextlib.suppress(RunError, OSError, sqlite3.Error):  # pages that ask for the same say it
                if time.monotonic() - self._asked < _LOOKED_AT and warmed != self.index.mark:
                    warmed = self.index.mark
                    self.warm()
            if self._stop.wait(self.interval):
                break
            try:
                self.last = self.index.refresh()
                self._looked, self._failed = time.monotonic(), ""
            except Exception as error:  # noqa: BLE001  (a thread has nobody to raise to, and pages must say it)
                self._failed = str(error)
        self.index.close()

    def stop(self) -> None:
        """Let `watch` end."""
        self._stop.set()

    def study(self, path: str, axis: Axis | None = None) -> StudyView:
        """Return the view of a study in a folder of the store, worked out once for each of its states.

        The study may be unfinished.

        Args:
            path: of the folder.
            axis: that the view opens with; levels are of that one alone. None takes the study's first.

        Raises:
            RunError: it can't be read, there's none, or it has no such axis.
        """
        return _study_view(*self._state_of(path), axis)

    def study_figures(self, path: str, axis: Axis | None = None) -> dict[str, Figure]:
        """Return the figures of the view that `study` returns, drawn once for each of its states."""
        return _study_figures(*self._state_of(path), axis)

    def _state_of(self, path: str) -> tuple[Path, FolderState]:
        folder = self.study_folder(path)
        return folder, state_of(folder, STUDY_FILES)

    def study_names(self) -> dict[str, str]:
        """Return what each study is called whose name another one has too: with its folder. By folder."""
        studies = self.index.kept(("studies",), self.index.studies)
        times = Counter(name for name, _ in studies)
        return {path: f"{name} ({path})" for name, path in studies if times[name] > 1}

    def record(self, path: str) -> StudyRecord:
        """Return the record of a study in a folder of the store, finished or not, read once for each of its states.

        Raises:
            RunError: it can't be read, or there's none.
        """
        return record_of(*self._state_of(path))

    def study_folder(self, path: str) -> Path:
        """Return the folder of a study of the store. What isn't listed isn't shown: a link's file can lie anywhere.

        Raises:
            RunError: there's none.
        """
        found = self.folder(path)
        name = found.relative_to(self.index.root.resolve()).as_posix()
        if not self.index.query("SELECT 1 FROM sources WHERE path = ? AND kind = 'study'", (name,)):
            raise RunError(f"{name[:200]} holds no study. It was moved or removed: choose one from the list.")
        return found

    def folder(self, path: str) -> Path:
        """Return a folder of the store.

        Raises:
            RunError: the path leads out of it.
        """
        try:
            found = (self.index.root / path).resolve()
        except (OSError, ValueError):  # a loop of links, or a name that no folder can have
            found = None
        if found is None or not found.is_relative_to(self.index.root.resolve()):
            raise RunError("That isn't in this store.")
        return found


def shown_figures(figures: Mapping[str, Figure]) -> dict[str, Any]:
    """Return the figures that come with a page: those with an address of their own come later."""
    return {
        name: {"plot": one.plot} | ({} if one.csv_address else {"csv": one.csv})
        for name, one in figures.items()
        if not one.address
    }


def state_of(folder: Path, names: Sequence[str]) -> FolderState:
    """Return name, time and size of each of these files in a folder: what was read is good until they change."""
    states = []
    for name in names:
        with contextlib.suppress(OSError):
            state = (folder / name).stat()
            states.append((name, state.st_mtime_ns, state.st_size))
    return tuple(states)


@lru_cache(maxsize=32)
def _study_view(folder: Path, states: FolderState, axis: Axis | None) -> StudyView:
    if axis is not None:
        return with_axis(_study_view(folder, states, None), axis)
    return study_view(record_of(folder, states), "study-1", is_first_alone=True)


@lru_cache(maxsize=32)
def _study_figures(folder: Path, states: FolderState, axis: Axis | None) -> dict[str, Figure]:
    return study_figures(_study_view(folder, states, axis))


@lru_cache(maxsize=64)
def record_of(folder: Path, states: FolderState) -> StudyRecord:
    """Return the record of a study whose files have these states; see `Site.record`."""
    if not states:
        raise RunError(f"{folder.name} holds no study. It was moved or removed: choose one from the list.")
    return study_record(folder)
