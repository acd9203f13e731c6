"""Live pages over a socket: what they say of a job that runs, is killed under their eyes, goes on, or is gone."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from cosmati.explorer.server.live import duration
from cosmati.storage.lock import FileLock
from cosmati.store.summary import key_of
from tests.explorer.test_server import EVIL, Served
from tests.processes import PythonProcess
from tests.store.samples import begin_study, run_record, small_study, write_run

pytestmark = pytest.mark.long


class LivePage:
    """What the page's script does, in Python: it asks with what the last answer gave, and holds points by the rule."""

    def __init__(self, served: Served, key: str) -> None:
        self.served, self.address = served, f"/runs/{key}/lines"
        self.after = ""
        self.held: dict[int, float] = {}

    def ask(self) -> dict[str, Any]:
        status, text, headers = self.served.get(f"{self.address}?after={self.after}")
        assert status == 200
        assert headers["content-type"] == "application/json"
        assert headers["cache-control"] == "no-store"
        told: dict[str, Any] = json.loads(text)
        if "gone" not in told:
            steps = told["steps"]
            since = 0 if steps["anew"] else steps["since"]
            if since is not None:
                self.held = {step: value for step, value in self.held.items() if step < since}
            self.held |= dict(zip(*steps["measures"].get("loss", ([], [])), strict=True))
            self.after = told["after"]
        return told


def logged(folder: Path) -> dict[int, float]:
    whole = (folder / "steps.jsonl").read_text().rpartition("\n")[0]
    return {line["step"]: line["loss"] for line in map(json.loads, whole.splitlines())}


JOB = """
import sys
from pathlib import Path
from tests.explorer.test_run_view import trainer_in
trainer_in(Path(sys.argv[1]), budget="1000000ba", checkpoint_every="40ba").fit()
"""


def start(folder: Path, lines: int) -> PythonProcess:
    """Start a job and wait until it has written so many more lines."""
    wanted = (len(logged(folder)) if (folder / "steps.jsonl").exists() else 0) + lines
    process = PythonProcess(["-c", JOB, folder], cwd=Path(__file__).parents[2])
    until = time.monotonic() + 120
    while not (folder / "steps.jsonl").exists() or len(logged(folder)) < wanted:
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    return process


def is_followed_until(page: LivePage, step: int) -> None:
    until = time.monotonic() + 120
    while page.ask()["status"] != "running" or max(page.held, default=0) < step:
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_job_is_killed_under_the_eyes_of_the_page_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    process = start(folder, 10)
    served = Served(tmp_path)
    try:
        page = LivePage(served, key_of("job"))
        told = page.ask()
        assert (told["status"], told["going"], told["title"]) == ("running", True, "Running")
        assert re.fullmatch(r"[\d,]+ of 1,000,000 steps, \d+\.\d %", told["progress"])
        assert re.match(r"about \d", told["left"])
        until, again = time.monotonic() + 120, page.ask()
        while again["step"] <= told["step"]:
            assert time.monotonic() < until
            time.sleep(0.1)
            again = page.ask()
        assert again["steps"]["since"] > max(told["steps"]["measures"]["loss"][0]), "only what is new travels"
        assert "running" in served.get("/runs?status=running")[1]
        listed = served.get("/live")[1]
        assert f"/runs/{key_of('job')}/live" in listed
        assert '<strong class="met">Running</strong>' in listed

        process.send_signal(signal.SIGKILL)
        process.communicate()
        with (folder / "steps.jsonl").open("a") as file:
            file.write('{"step": 99999999, "loss": 0.')  # as a crash can leave it
        told = page.ask()
        assert (told["status"], told["going"], told["tone"]) == ("broken off", False, "unmet")
        assert "its lock is free and it wrote no end: it was killed" in told["sentence"]
        checkpoint = max(int(one.name[5:]) for one in (folder / "checkpoints").glob("step-*"))
        assert f"goes on from step {checkpoint:,}, its newest checkpoint" in told["sentence"]
        assert page.held == logged(folder)
        assert "Broken off" in served.get(f"/runs/{key_of('job')}/live")[1]

        process = start(folder, 0)
        is_followed_until(page, max(page.held) + 1)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        page.ask()
        assert page.held == logged(folder)

        shutil.rmtree(folder)
        assert page.ask() == {"status": "removed", "gone": page.ask()["gone"]}
        served.index.refresh()
        assert page.ask()["gone"].startswith("Its folder isn't in the store any more")
        assert served.get(f"/runs/{key_of('job')}/live")[0] == 404
    finally:
        process.kill()
        process.communicate()
        served.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tuple[Path, Served]]:
    record = run_record(EVIL, outcome="running", recipe_name=EVIL, recipe_text='{"num_steps": 400}', metrics={})
    write_run(tmp_path / "evil", record, [{"step": step, "loss": 1.0, EVIL: 2.0} for step in (100, 200)])
    write_run(tmp_path / "ended", run_record("ended"), [{"step": 100, "loss": 0.5}])
    begin_study(tmp_path / "going", small_study("going <b>"), num_done=3)
    with FileLock(tmp_path / "evil" / "lock"), FileLock(tmp_path / "going" / "lock"):
        served = Served(tmp_path)
        yield tmp_path, served
        served.close()


def test_names_of_users_are_text_on_live_pages_and_in_answers(store: tuple[Path, Served]) -> None:
    _, served = store
    for path in ("/live", f"/runs/{key_of('evil')}/live", f"/runs/{key_of('evil')}"):
        status, page, _ = served.get(path)
        assert status == 200
        assert "<script>alert" not in page, path
        assert "<b>" not in page, path
    told = json.loads(served.get(f"/runs/{key_of('evil')}/lines")[1])
    assert told["steps"]["measures"][EVIL] == [[100, 200], [2.0, 2.0]]
    assert told["progress"] == "200 of 400 steps, 50.0 %"


def test_the_list_names_runs_and_studies_with_how_far_they_are(store: tuple[Path, Served]) -> None:
    _, served = store
    page = unescape(served.get("/live")[1])
    assert "200 of 400 steps, 50.0 %" in page
    assert re.search(r"3 of \d+ runs done", page)
    assert "Running</strong>" in page
    assert "/runs/" + key_of("ended") not in page


def test_only_live_pages_load_the_library_for_live_curves(store: tuple[Path, Served]) -> None:
    _, served = store
    for path, is_loaded in (
        (f"/runs/{key_of('evil')}/live", True),
        (f"/runs/{key_of('evil')}", True),
        (f"/runs/{key_of('ended')}", False),
        ("/live", False),
        ("/runs", False),
        ("/", False),
    ):
        assert ("uPlot.iife.min.js" in served.get(path)[1]) == is_loaded, path


def test_a_run_that_has_ended_says_so_and_a_silent_one_too(store: tuple[Path, Served]) -> None:
    folder, served = store
    told = json.loads(served.get(f"/runs/{key_of('ended')}/lines")[1])
    assert (told["status"], told["going"], told["title"], told["left"]) == ("completed", False, "Completed", "–")
    old = time.time() - 200
    for name in ("steps.jsonl",):
        os.utime(folder / "evil" / name, (old, old))
    told = json.loads(served.get(f"/runs/{key_of('evil')}/lines")[1])
    assert told["title"] == "Running, but silent"
    assert told["sentence"].startswith("No line for 3 min, and its process still holds the folder's lock.")


def test_a_clock_that_was_set_back_is_told(store: tuple[Path, Served]) -> None:
    folder, served = store
    ahead = time.time() + 7205
    os.utime(folder / "evil" / "steps.jsonl", (ahead, ahead))
    told = json.loads(served.get(f"/runs/{key_of('evil')}/lines")[1])
    assert told["age"].startswith("its time lies 2 h ahead of this machine's clock")
    assert (told["seconds_old"], told["title"]) == (None, "Running")
    page = unescape(served.get(f"/runs/{key_of('evil')}/live")[1])
    assert "its time lies 2 h ahead" in page
    assert " ago</dd>" not in page


ARABIC = "\u0661-\u0661_\u0661-\u0661"


@pytest.mark.parametrize("after", ["x", "1-2", "1-2_3-", "1-2_3-4_5-6", "-1--2_3-4", "9" * 30 + "-1_1-1", ARABIC])
def test_an_address_that_names_no_place_is_told(store: tuple[Path, Served], after: str) -> None:
    status, page, _ = store[1].get(f"/runs/{key_of('evil')}/lines?after={quote(after)}")
    assert status == 404
    assert "no place in a run" in page


def test_a_place_of_another_file_gives_everything_anew(store: tuple[Path, Served]) -> None:
    told = json.loads(store[1].get(f"/runs/{key_of('evil')}/lines?after=7-9_0-0")[1])
    assert told["steps"]["anew"]
    assert told["steps"]["measures"]["loss"] == [[100, 200], [1.0, 1.0]]


def test_a_run_of_a_study_has_no_live_view_and_says_where_to_look(store: tuple[Path, Served]) -> None:
    _, served = store
    (run, *_) = [one for one in served.index.runs(limit=50) if one.kind == "study"]
    status, page, _ = served.get(f"/runs/{run.key}/live")
    assert (status, "has no live view" in page) == (404, True)
    assert served.get(f"/runs/{run.key}/lines")[0] == 404


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (4.4, "4 s"),
        (99, "99 s"),
        (100, "2 min"),
        (185, "3 min"),
        (7800, "2 h 10 min"),
        (400_000, "4.63 days"),
    ],
)
def test_durations_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_an_imported_run_is_shown_by_what_was_kept_and_claims_no_more(tmp_path: Path) -> None:
    about: dict[str, Any] = {
        "environment": {"imported from": "csv", "source": "log.csv"},
        "plan": (),
        "recipe_text": "{}",
    }
    nothing: dict[str, Any] = {"hardware": "", "started": "", "ended": None, "digests": {}, "seconds_by_part": {}}
    evaluations = [{"step": step, "val acc": 1 - 1 / step} for step in range(1, 9)]
    write_run(tmp_path / "one", run_record("one", **about, **nothing), evaluations=evaluations)
    served = Served(tmp_path)
    try:
        status, page, _ = served.get(f"/runs/{key_of('one')}")
        assert status == 200
        assert "Another tool kept this run" in page
        (address,) = {unescape(one) for one in re.findall(r'href="(/runs/\w+/curve\.csv[^"]*)"', page)}
        assert served.get(address)[1].splitlines()[:3] == ["step,val acc", "1,0.0", "2,0.5"]
        for claim in (
            "on .",
            "started .",
            "every row could teach",
            "Plan and guarantees",
            "RunConfig(ledger",
            "steps.jsonl",
        ):
            assert claim not in page, claim
        assert "None was recorded." in page
    finally:
        served.close()


def test_a_run_has_the_one_before_and_the_one_after_and_its_pace(tmp_path: Path) -> None:
    for seed in range(3):
        steps = [{"step": s, "rows": 8 * s, "seconds": s / 4, "loss": 1 / s, "learning_rate": 0.1} for s in (1, 2, 4)]
        write_run(tmp_path / f"run-{seed}", run_record(f"run-{seed}", seed=seed), steps)
    write_run(tmp_path / "other", run_record("other", seed=1, recipe_name="another"))
    served = Served(tmp_path)
    try:
        page = served.get(f"/runs/{key_of('run-1')}")[1]
        near = re.findall(r'href="/runs/(\w+)" rel="(prev|next)"', page)
        assert near == [(key_of("run-0"), "prev"), (key_of("run-2"), "next")]
        addresses = [unescape(one) for one in re.findall(r'href="(/runs/\w+/curve\.csv[^"]*)"', page)]
        tables = [served.get(one)[1] for one in addresses]
        assert "step,learning rate\r\n1,0.1\r\n2,0.1\r\n4,0.1\r\n" in tables
        assert "step,rows a second\r\n2,32.0\r\n4,32.0\r\n" in tables
    finally:
        served.close()
