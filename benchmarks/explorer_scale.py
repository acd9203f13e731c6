"""A store of 100,000 runs: how long indexing, a refresh, the first page and a filtered one take.

    python -m benchmarks.explorer_scale [--runs N] [--folders N] [--store FOLDER]

The pages are asked of the real server over its socket. A store that is there already is taken as it is.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import platform
import random
import shutil
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

import uvicorn

from cosmati.explorer.server.app import make_app
from cosmati.store.filters import RunFilter
from cosmati.store.index import RunIndex
from cosmati.store.tradeoffs import tradeoff_points

RUNS_A_STUDY, ARMS, BUDGETS, SEEDS = 490, 14, (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0), 5
METHODS = ("LabelSmoothing", "MixUp", "EMA", "Muon", "ProgressiveResizing", "LayerFreezing", "SAM", "BlurPool")
ROUNDS = 7


def make_store(root: Path, num_runs: int, num_folders: int) -> None:
    """Write studies and run folders, by plain JSON: the library's own writer would take an hour."""
    draw = random.Random(7)
    for number in range(max(1, (num_runs - num_folders) // RUNS_A_STUDY)):
        folder = root / f"group-{number % 10}" / f"study-{number:04}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "study.json").write_text(json.dumps(_study(number, draw)))
    for number in range(num_folders):
        folder = root / "single" / f"run-{number:05}"
        folder.mkdir(parents=True, exist_ok=True)
        steps = "".join(json.dumps({"step": 10 * n, "rows": 320 * n, "loss": 3 / (n + 1)}) + "\n" for n in range(100))
        (folder / "steps.jsonl").write_text(steps)
        (folder / "run.json").write_text(json.dumps(_run(number, draw)))


def _study(number: int, draw: random.Random) -> dict[str, object]:
    names = ["baseline", *(f"arm-{number % 20}-{n}" for n in range(1, ARMS))]
    pace, gain = ([math.exp(draw.gauss(0, 0.3)) for _ in names] for _ in range(2))
    runs = []
    for place, name in enumerate(names):
        for budget in BUDGETS:
            for seed in range(SEEDS):
                seconds = 1000 * budget * pace[place] * (1 + number % 7)
                quality = 0.9 + 0.03 * math.log(budget) + 0.01 * gain[place] + draw.gauss(0, 0.002)
                final = {"step": int(5000 * budget), "seconds": seconds, "quality": quality}
                final |= {"rows": int(160_000 * budget), "tokens": 0, "flops": 1e15 * budget}
                points = [
                    {**final, "step": int(final["step"] * s), "quality": quality * s} for s in (0.25, 0.5, 0.75, 1)
                ]
                keys = {"arm": name, "budget": budget, "seed": seed, "run_id": f"{name}-{budget:g}-{seed}"}
                runs.append({**keys, "points": points, "final": final, "seconds_by_part": {"forward": seconds}})
    arms = [
        {
            "name": name,
            "description": "",
            "recipe_text": json.dumps(
                {"name": name, "optimizer": {"lr": draw.random(), "decay": 0.1}, "study": number}
            ),
            "methods": [] if name == "baseline" else draw.sample(METHODS, 2),
            "opponent": None,
            "source": "",
            "search": None,
        }
        for name in names
    ]
    return {
        "version": 2,
        "name": f"Study {number}",
        "task": f"Task {number % 12}",
        "quality_name": "accuracy",
        "higher_is_better": True,
        "unit": "",
        "baseline_arm": "baseline",
        "arms": arms,
        "runs": runs,
        "checklist": [],
        "hardware": f"Machine {number % 5}",
        "price_per_hour": 1.0 + number % 5,
        "command": "",
        "notes": "",
        "costs": [],
        "registration": None,
    }


def _run(number: int, draw: random.Random) -> dict[str, object]:
    return {
        "version": 1,
        "run_id": f"run-{number:05}",
        "recipe_name": f"recipe {number % 30}",
        "recipe_text": json.dumps({"optimizer": {"lr": draw.random()}, "config": {"seed": number}}),
        "digests": {"plan": "00"},
        "environment": {"python": "3.11"},
        "plan": [{"stage": "label", "method": draw.choice(METHODS), "does": ""}],
        "guarantees": [],
        "seed": number,
        "num_microbatches": 1,
        "num_steps": 1000,
        "hardware": f"Machine {number % 5}",
        "cost": None,
        "seconds_by_part": {"forward": 100 * math.exp(draw.gauss(0, 1)), "evaluation": 1.0},
        "outcome": "completed",
        "started": f"2026-{1 + number % 12:02}-01T00:00:00+00:00",
        "ended": f"2026-{1 + number % 12:02}-01T01:00:00+00:00",
        "metrics": {"accuracy": 0.8 + 0.1 * draw.random(), "loss": draw.random()},
    }


def timed(act: Callable[[int], object], rounds: int = ROUNDS) -> str:
    """Run something several times, and say how long it took."""
    seconds, cpu = [], time.process_time()
    for number in range(rounds):
        began = time.perf_counter()
        act(number)
        seconds.append(time.perf_counter() - began)
    low, high = min(seconds), max(seconds)
    busy = (time.process_time() - cpu) / rounds
    spread = f"{low * 1e3:.0f} to {high * 1e3:.0f}, n = {rounds}"
    return f"{statistics.median(seconds) * 1e3:8.0f} ms  ({spread}; {busy * 1e3:.0f} ms of a core)"


def pages(index: RunIndex) -> Mapping[str, Callable[[int], str]]:
    """Return the addresses that are asked for, another one each round where it's said."""
    arms = [str(value) for value, _ in index.choices("arm")]
    return {
        "tradeoffs, first": lambda _: "/",
        "tradeoffs, a study": lambda n: f"/?study=Study+{n}",
        "that study's section": lambda n: f"/chosen-study?path=group-{n % 10}/study-{n:04}",
        "tradeoffs, an arm": lambda n: f"/?arm={arms[5 * n % len(arms)]}",
        "tradeoffs, a method": lambda n: f"/?method={METHODS[n % len(METHODS)]}&seed={n % SEEDS}",
        "tradeoffs, a machine": lambda n: f"/?hardware=Machine+{n % 5}&budget={BUDGETS[n % 7]}",
        "tradeoffs, words": lambda n: f"/?text=arm-{n}",
        "tradeoffs, 3 of 5 seeds": lambda n: f"/?seed={n % 5}&seed={(n + 1) % 5}&seed={(n + 2) % 5}",
        "tradeoffs, line moved": lambda n: f"/reached?at={0.8 + n / 100}",
        "tradeoffs, as CSV": lambda _: "/tradeoffs.csv",
        "runs, first": lambda _: "/runs",
        "runs, filtered": lambda n: f"/runs?arm={arms[5 * n % len(arms)]}&sort=-quality",
        "runs, by a fact": lambda n: f"/runs?sort=fact:optimizer.lr&column=fact:optimizer.lr&seed={n % 5}",
    }


def measure(root: Path) -> None:
    """Index a store, serve it, and print what takes how long."""
    shutil.rmtree(root / ".cosmati", ignore_errors=True)
    with RunIndex(root) as index:
        print(f"index anew             {timed(lambda _: index.refresh(), 1)}, {index.count():,} runs")
        index.refresh()
        print("refresh, nothing new   ", timed(lambda _: index.refresh()))
        some = next(iter(sorted(root.rglob("study.json"))), None)
        if some is not None:
            print("refresh, one study     ", timed(lambda _: (os.utime(some), index.refresh())))
        fresh = lambda n: tradeoff_points(index, RunFilter(most={"seconds": 1e9 + n}), "seconds")  # noqa: E731
        print("all points, in SQL     ", timed(fresh))
        app = make_app(index)
        config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        base = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        size = packed = 0

        def ask(address: str) -> None:
            nonlocal size, packed
            # As the page's script asks; a reader without one waits for the study's section, too.
            headers = {"Accept-Encoding": "gzip", "HX-Request": "true"}
            request = urllib.request.Request(base + address, headers=headers)
            with urllib.request.urlopen(request) as answer:
                data = answer.read()
                packed = len(data)
                size = len(gzip.decompress(data) if answer.headers["Content-Encoding"] == "gzip" else data)

        warm = app.state.site.warm  # the server's own thread does it after each change of the store
        print("what can be chosen     ", timed(lambda _: (index.forget_answers(), warm())))
        for name, address in pages(index).items():
            index.forget_answers()
            warm()
            print(f"{name:23}", timed(lambda n, address=address: ask(address(n))), end=f", {size:,} B, ")  # type: ignore[misc]
            print(f"{packed:,} B packed")
        index.forget_answers()
        anew = timed(lambda _: (index.forget_answers(), ask("/")))
        print(f"{'tradeoffs, nothing kept':23}", anew)
        server.should_exit = True
        thread.join()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--folders", type=int, default=2000)
    parser.add_argument("--store", type=Path, help="where the store is made, and kept; a temporary folder if left out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.store or Path(folder)
        if not any(root.glob("single/*")):
            make_store(root, arguments.runs, arguments.folders)
        print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        measure(root)


if __name__ == "__main__":
    main()
