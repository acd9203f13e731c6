"""A run folder, told to a tracker after the fact: what an attempt wrote, attempt by attempt."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from cosmati.errors import CosmatiError, RunError
from cosmati.integrations.told import Sent, config_of, note_sent, run_of, sent_to, try_to_note
from cosmati.integrations.tracker import TrackedRun, Tracker, finite
from cosmati.records.attempts import (
    SUPERSEDED_FILE,
    RunAttempt,
    attempt_of,
    read_attempts,
    read_lines,
    superseded_from,
)
from cosmati.records.run import CLOCK_FIELDS, RunRecord
from cosmati.storage.lock import is_locked

_PREFIXES = {"steps.jsonl": "", "monitors.jsonl": "", "evaluations.jsonl": "evaluation/"}


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What a replay sent of an attempt.

    Attributes:
        attempt: its number.
        num_lines: lines sent.
        note: why nothing was, how much of it was there already, or what couldn't be told; empty otherwise.
    """

    attempt: int
    num_lines: int
    note: str = ""


class _Line(tuple[int, float, dict[str, float]]):
    """Step, seconds of training, values."""

    __slots__ = ()


def track_run(folder: Path, tracker: Tracker) -> list[Replayed]:
    """Send a run folder to a tracker: each attempt as a run of a group. The same again sends only what is new.

    Args:
        folder: of a run that has ended, was killed or goes on.
        tracker: where to.

    Returns:
        What was sent, by attempt.

    Raises:
        RunError: the folder holds no run, an earlier replay to there was cut short, or the tracker fails.
    """
    goes_on = is_locked(folder / "lock")  # Looked at first: where the run has ended, all that's read is final.
    newest = max((line["step"] for line in read_lines(folder / "steps.jsonl") if _has_step(line)), default=0)
    record, run = run_of(folder)
    attempts = read_attempts(folder) or [_only_attempt(record)]
    lines = _lines_by_attempt(folder, attempts)
    running = attempts[-1].number if goes_on else None
    if running is not None:
        # Of the newest step more may be written, and what is sent up to a step isn't looked at again.
        lines[running] = [line for line in lines.get(running, []) if line[0] < newest]
    sent = sent_to(folder, tracker)
    for number, was in sent.items():
        if was.last_step is not None and not (was.is_whole or tracker.rewrites):
            msg = (
                f"An earlier replay of attempt {number} to {tracker.label} ({tracker.where}) was cut short, and what "
                "it sent isn't known: sent again, its values would stand there twice. Choose another project."
            )
            raise RunError(msg)
    replay = _Replay(folder, record, run, tracker, superseded_from(folder), attempts[-1].number, running)
    return [replay.told(one, lines.get(one.number, []), sent.get(one.number)) for one in attempts]


def _only_attempt(record: RunRecord) -> RunAttempt:
    """Return the one attempt of a folder that tells of none: an earlier release's, or brought from another tool."""
    try:
        started = datetime.fromisoformat(record.started).timestamp()
    except ValueError:
        started = 0.0
    outcome = "" if record.outcome == "running" else record.outcome
    return RunAttempt(number=0, first_step=0, started=started, outcome=outcome)


@dataclass(frozen=True)
class _Replay:
    folder: Path
    record: RunRecord
    run: TrackedRun
    tracker: Tracker
    superseded: Mapping[int, int]
    last_number: int
    running: int | None

    def told(self, attempt: RunAttempt, lines: list[_Line], sent: Sent | None) -> Replayed:
        """Send an attempt; whatever the tool raises is told as its own failure."""
        try:
            return self._send(attempt, lines, sent)
        except CosmatiError:
            raise
        except (Exception, SystemExit) as error:
            tracker, now = self.tracker, sent_to(self.folder, self.tracker).get(attempt.number)
            is_cut = now is not None and now.last_step is not None and not (now.is_whole or tracker.rewrites)
            mend = "send it to another project, as some of it may be here" if is_cut else "run the command again"
            msg = (
                f"{tracker.label} ({tracker.where}) failed at attempt {attempt.number}: {type(error).__name__}: "
                f"{error}. The run's folder has everything. Mend that, and {mend}."
            )
            raise RunError(msg) from error

    def _send(self, attempt: RunAttempt, lines: list[_Line], sent: Sent | None) -> Replayed:
        tracker, number = self.tracker, attempt.number
        goes_on = number == self.running
        outcome = "running" if goes_on else attempt.outcome or "killed"
        if sent is not None and sent.last_step is None:
            if goes_on and not sent.is_whole:
                return self._skip(number, sent, "it is being watched live there")
            if not tracker.rewrites:
                end = "" if sent.is_whole else ", and not to its end: another project can have all of it"
                return self._skip(number, sent, f"it was watched live there{end}")
        elif sent is not None and not tracker.rewrites:
            new = [line for line in lines if line[0] > (sent.last_step or 0)]
            if not new and sent.outcome in ("", outcome):
                return self._skip(number, sent, "all of it is there")
            lines = lines if getattr(tracker, "replaces", False) else new
        already = sent.last_step if sent is not None and sent.last_step is not None else attempt.first_step
        last = max((line[0] for line in lines), default=already)
        try_to_note(self.folder)
        # What can't be opened was sent nothing, and the same command may be tried again.
        tracker.open(self.run, number, attempt.first_step, config_of(self.record))
        note_sent(self.folder, tracker, number, Sent(last_step=last, is_whole=False))
        try:
            for step, seconds, values in lines:
                tracker.log(step, values, attempt.started + seconds)
            if number == self.last_number:
                tracker.summary(finite(self.record.metrics))
                for path, digest in _checkpoints(self.folder):
                    tracker.artifact(path, digest)
            told, note = self._supersede(number, None)
        except BaseException:
            with suppress(Exception):  # What failed first is told.
                tracker.close(outcome)
            raise
        tracker.close(outcome)
        told_of = Sent(last_step=last, is_whole=True, superseded=told, outcome=outcome)
        note_sent(self.folder, tracker, number, told_of)
        notes = [one for one in (_sent_again(lines, sent), note) if one]
        return Replayed(attempt=number, num_lines=len(lines), note="; ".join(notes))

    def _skip(self, number: int, sent: Sent, why: str) -> Replayed:
        """Send nothing of an attempt, but that it was superseded since."""
        told, note = self._supersede(number, sent.superseded)
        if told != sent.superseded:
            note_sent(self.folder, self.tracker, number, replace(sent, superseded=told))
        return Replayed(attempt=number, num_lines=0, note=f"{why}; {note}" if note else why)

    def _supersede(self, number: int, told: int | None) -> tuple[int | None, str]:
        """Tell from which step an attempt was superseded, unless that was told; return what is told, and a note."""
        step = self.superseded.get(number)
        if step is None or step == told:
            return told, ""
        if self.tracker.supersede(self.run, number, step):
            return step, ""
        return told, f"{self.tracker.label} can't be told that it was superseded from step {step}"


def _sent_again(lines: list[_Line], sent: Sent | None) -> str:
    """Return how much of what was sent was there before: a tool that stores it once is sent all of it each time."""
    if sent is None or not sent.is_whole:
        return ""
    if sent.last_step is None:
        return "it was watched live there, and is written anew"
    num = sum(line[0] <= sent.last_step for line in lines)
    if num == len(lines):
        return "all of it was there, and is written anew"
    return f"{num} of them were there, and are written anew" if num else ""


def _lines_by_attempt(folder: Path, attempts: list[RunAttempt]) -> dict[int, list[_Line]]:
    found: dict[int, dict[str, tuple[int, str, dict[str, Any]]]] = {}
    for number, name, line in _told(folder, attempts):
        # A crash while lines were set aside leaves one twice.
        found.setdefault(number, {})[json.dumps([name, line])] = (int(line["step"]), name, line)
    before = {one.number: one.first_seconds for one in attempts}
    order = list(_PREFIXES)
    return {
        number: [
            _Line((step, max(0.0, float(line.get("seconds") or 0.0) - before[number]), _values(name, line)))
            for step, name, line in sorted(lines.values(), key=lambda one: (one[0], order.index(one[1])))
        ]
        for number, lines in found.items()
    }


def _told(folder: Path, attempts: list[RunAttempt]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    known = {one.number for one in attempts}
    for line in read_lines(folder / SUPERSEDED_FILE):
        number, name, own = line.get("attempt"), line.get("file"), line.get("line")
        is_known = isinstance(number, int) and number in known and isinstance(name, str) and name in _PREFIXES
        if is_known and isinstance(own, dict) and _has_step(own):
            yield line["attempt"], line["file"], own
    for name in _PREFIXES:
        for line in read_lines(folder / name):
            if _has_step(line):
                yield attempt_of(line["step"], attempts), name, line


def _has_step(line: Mapping[str, object]) -> bool:
    seconds = line.get("seconds", 0.0)
    return isinstance(line.get("step"), int) and isinstance(seconds, int | float) and 0 <= seconds < math.inf


def _values(name: str, line: Mapping[str, object]) -> dict[str, float]:
    return {_PREFIXES[name] + key: value for key, value in finite(line).items() if key not in CLOCK_FIELDS}


def _checkpoints(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the checkpoints that are there, with the digest of the weights' file, or their root."""
    for path in sorted((folder / "checkpoints").glob("step-*")):
        try:
            if (path / "index.json").exists():  # in parts
                yield path, f"merkle:{json.loads((path / 'index.json').read_text(encoding='utf-8'))['parameter_root']}"
                continue
            digests = json.loads((path / "digests.json").read_text(encoding="utf-8"))
            yield path, f"sha256:{digests['model.safetensors']}"
        except (OSError, ValueError, KeyError):
            continue
