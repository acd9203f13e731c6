"""Running jobs: the list of them, the live view of one, and the points that its page asks for as they come."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from cosmati.errors import RunError
from cosmati.explorer.server.site import Site
from cosmati.explorer.wording import number, time_unit
from cosmati.store.filters import RunFilter
from cosmati.store.jobs import LINE_DUE, JobState, job_state
from cosmati.store.live import FilePlace
from cosmati.store.series import new_points
from cosmati.store.summary import RunSummary, finite

FILES = ("steps.jsonl", "evaluations.jsonl")
MAX_JOBS = 100
_NO_CACHE = {"Cache-Control": "no-store"}


@dataclass(frozen=True)
class ShownJob:
    """A job as pages tell of it.

    Attributes:
        state: As its folder has it.
        title: Its status in two or three words.
        sentence: What a reader makes of it.
        tone: `met` where all is well, `unmet` where it isn't.
    """

    state: JobState
    title: str
    sentence: str
    tone: str

    @property
    def progress(self) -> str:
        """How far it is, in words."""
        state = self.state
        steps = f"{state.step:,}" + (f" of {state.num_steps:,} steps" if state.num_steps else " steps")
        return steps if state.share is None else f"{steps}, {100 * state.share:.1f} %"

    @property
    def left(self) -> str:
        """Time left in words; a dash where it can't be told."""
        left = self.state.seconds_left
        return "–" if left is None else f"about {duration(left)}"

    @property
    def age(self) -> str:
        """How old the newest figure is, in words."""
        age = self.state.age
        if age is None:
            return "nothing is written yet"
        if age < 0:
            return f"its time lies {duration(-age)} ahead of this machine's clock: nobody can tell how old it is"
        return f"written {duration(age)} ago"


def live_router(site: Site) -> APIRouter:
    """Return the pages of running jobs."""
    router = APIRouter()

    @router.get("/live", response_class=HTMLResponse)
    def live(request: Request) -> HTMLResponse:
        return site.page(request, "jobs.html", title="Running now", jobs=jobs(site), studies=site.index.going())

    @router.get("/runs/{key}/live", response_class=HTMLResponse)
    def run_live(request: Request, key: str) -> HTMLResponse:
        found = own_run(site.index.run(key), key)
        job = shown_job(site.folder(found.path))
        return site.page(request, "live.html", title=found.name, found=found, **panel(site, job))

    @router.get("/runs/{key}/lines")
    def lines(key: str, after: str = "") -> Response:
        found = site.index.run(key)
        told = {"status": "removed", "gone": GONE}
        if found is not None:
            told = answer(site.folder(own_run(found, key).path), after)
        return JSONResponse(told, headers=_NO_CACHE)

    return router


GONE = "Its folder isn't in the store any more: it was moved or removed."


def found_run(site: Site, key: str) -> RunSummary:
    """Return the run with a key.

    Raises:
        RunError: there's none.
    """
    return _known(site.index.run(key), key)


def own_run(found: RunSummary | None, key: str) -> RunSummary:
    """Return a run that has a folder of its own.

    Raises:
        RunError: there's none, or it's a study's.
    """
    if found is not None and found.kind == "study":
        raise RunError(
            "A run of a study stands in the store once it has ended, so it has no live view, and no files of its own. "
            "See /live."
        )
    return _known(found, key)


def _known(found: RunSummary | None, key: str) -> RunSummary:
    if found is None:
        raise RunError(f"This store has no run {key}. It was moved or removed: choose one from the list.")
    return found


def jobs(site: Site) -> list[tuple[RunSummary, ShownJob]]:
    """Return the runs that the index knows to be running, newest first, each as its folder has it now."""
    running = site.index.runs(RunFilter(exact={"status": ("running",)}), limit=MAX_JOBS)
    return [(run, shown_job(site.folder(run.path))) for run in running]


def answer(folder: Path, after: str) -> dict[str, Any]:
    """Return what a live page is told: the state of the job, and the points since the place that `after` names."""
    job = shown_job(folder)
    if job.state.status == "removed":
        return {"status": "removed", "gone": GONE}
    places = _places(after)
    told: dict[str, Any] = {}
    for name, place in zip(FILES, places, strict=True):
        points = new_points(folder / name, place, has_pace=name == FILES[0])
        told[name.partition(".")[0]] = {
            "measures": points.measures,
            "since": points.since,
            "anew": points.is_anew,
            "place": f"{points.place.file}-{points.place.offset}",
        }
    last = job.state.last
    return {
        "after": "_".join(part.pop("place") for part in told.values()),
        "status": job.state.status,
        "going": job.state.is_going,
        "title": job.title,
        "sentence": job.sentence,
        "tone": job.tone,
        "step": job.state.step,
        "share": job.state.share,
        "progress": job.progress,
        "left": job.left,
        "age": job.age,
        "seconds_old": None if job.state.age is None or job.state.age < 0 else job.state.age,
        "loss": value_text(last.get("loss")),
        "rate": value_text(last.get("learning_rate")),
        **told,
    }


def _places(after: str) -> list[FilePlace]:
    found = re.fullmatch(r"(\d{1,20})-(\d{1,16})_(\d{1,20})-(\d{1,16})", after, re.ASCII)
    if found is None:
        if after:
            raise RunError(
                f"after is {after[:80]!r} in this address, which is no place in a run. Leave it out, for all."
            )
        return [FilePlace(), FilePlace()]
    numbers = [int(text) for text in found.groups()]
    return [FilePlace(*numbers[:2]), FilePlace(*numbers[2:])]


def value_text(value: object) -> str:
    """Return a logged value in words; a dash where there's none."""
    known = finite(value)
    return "–" if known is None else number(known, 4)


def duration(seconds: float) -> str:
    """Return a time as people say it: `4 s`, `3 min`, `2 h 10 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    unit, length = time_unit(seconds) if seconds < 48 * 3600 else ("days", 86400.0)
    if unit == "h":
        hours, rest = divmod(minutes, 60)
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    return f"{number(seconds / length, 3)} {unit}"


def panel(site: Site, job: ShownJob) -> dict[str, Any]:
    """Return what the template of the live panel is given."""
    last = job.state.last
    return {
        "job": job,
        "interval": site.interval,
        "loss": value_text(last.get("loss")),
        "rate": value_text(last.get("learning_rate")),
    }


def shown_job(folder: Path) -> ShownJob:
    """Read a job's folder, and say what it means."""
    state = job_state(folder)
    title, sentence, tone = _meaning(state)
    return ShownJob(state, title, sentence, tone)


def _meaning(state: JobState) -> tuple[str, str, str]:
    """Return a job's status in words, what a reader makes of it, and whether all is well."""
    if state.is_going:
        return _going(state)
    goes_on = (
        "The same recipe in the same folder starts anew: it has no checkpoint yet."
        if state.checkpoint is None
        else f"The same recipe in the same folder goes on from step {state.checkpoint:,}, its newest checkpoint."
    )
    quiet = "Its" if state.age is None or state.age < 0 else f"No line for {duration(state.age)}; its"
    killed = f"{quiet} lock is free and it wrote no end: it was killed, it crashed, or the power went."
    words = {
        "broken off": f"{killed} {goes_on}",
        "removed": GONE,
        "unreadable": "Its run.json can't be read. Restore it from a copy.",
        "completed": "It came to its end.",
        "exhausted": "Its data ended before its budget.",
        "stopped": f"It was asked to stop. {goes_on}",
    }
    tone = "met" if state.status in ("completed", "exhausted", "stopped") else "unmet"
    title = "Gone" if state.status == "removed" else state.status.capitalize()
    return title, words.get(state.status, f"It ended {state.status}. {goes_on}"), tone


def _going(state: JobState) -> tuple[str, str, str]:
    if state.age is None:
        return "Starting", "Its process holds the folder's lock, and has written no line yet.", "met"
    if not state.is_silent:
        return "Running", "Its process holds the folder's lock.", "met"
    words = (
        f"No line for {duration(state.age)}, and its process still holds the folder's lock. A line is due "
        f"{LINE_DUE:.0f} s and one step after the last: a very slow step, a long evaluation, or a process that hangs."
    )
    return "Running, but silent", words, "unmet"
