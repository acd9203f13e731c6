"""(e) An epoch from a remote that is far away: seconds to the first batch and to the last, beside the peer's.

199 shards of 1 MB (512 int64 tokens and a label a row) behind `slow_server`, on loopback: 20 and 100 ms a round trip,
and a bandwidth that all requests share. Both read over S3, with two workers and an empty cache, in turns, each pass
in a process of its own, which has imported its client. The floor is what the bandwidth alone takes. mosaicml-streaming,
at its defaults, runs where it's installed, or in the Python that COSMATI_PEER_PYTHON names.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter, sleep

import numpy as np
import torch

from benchmarks.measure import RESULTS, surroundings
from cosmati.data.loader import StreamingLoader
from cosmati.data.opened import CacheOptions
from cosmati.data.shards.writer import ShardWriter
from cosmati.data.streaming import StreamingDataset

MEGABYTES = 20.0
WORKERS = 2
KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}


def write_rows(folder: Path, num_shards: int) -> int:
    """Write the shards; return their bytes."""
    tokens = np.random.default_rng(0).integers(0, 50_000, (num_shards * 243, 512))
    columns = {"tokens": "ndarray:int64:512", "label": "int"}
    with ShardWriter(folder, columns, class_path="unknown", source="bench", size_limit=1_004_000) as writer:
        for number, row in enumerate(tokens):
            writer.write({"tokens": row, "label": number})
    return sum(path.stat().st_size for path in folder.glob("*.mds"))


@contextmanager
def served(folder: Path, delay: float, megabytes: float) -> Iterator[tuple[str, Path]]:
    """Serve a folder; yield the endpoint, and the file with a line a request."""
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "requests"
        options = ["--delay", str(delay), "--megabytes", str(megabytes)]
        with log.open("w") as out:
            command = [sys.executable, "-m", "benchmarks.slow_server", str(folder), *options]
            with subprocess.Popen(command, stdout=out) as process:
                try:
                    while not (port := log.read_text().partition("\n")[0]):
                        sleep(0.05)
                    yield f"http://127.0.0.1:{port}", log
                finally:
                    process.kill()


def ours(endpoint: str, cache: str) -> None:
    """Read an epoch, and print what it took."""
    import s3fs  # noqa: F401  (what a client's import takes depends on no distance; the peer's is imported, too)

    torch.set_num_threads(1)
    options = {"endpoint_url": endpoint, "key": "a", "secret": "b"}
    start = perf_counter()
    data = StreamingDataset(
        "s3://bucket/text", columns=("tokens", "label"), cache=CacheOptions(cache, storage_options=options)
    )
    rows, first = 0, 0.0
    for batch in StreamingLoader(data, 256, num_workers=WORKERS):
        first = first or perf_counter() - start
        rows += len(batch.lineage.row_ids)
    print(json.dumps({"first": first, "epoch": perf_counter() - start, "rows": rows}))


def measured(arm: str, endpoint: str) -> dict[str, float] | str:
    """Run one pass of an arm in a process of its own; return what it took, or what the peer failed with."""
    with tempfile.TemporaryDirectory() as cache:
        python = sys.executable if find_spec("streaming") else os.environ.get("COSMATI_PEER_PYTHON", "")
        command = {
            "cosmati": [sys.executable, "-c", f"from benchmarks.remote import ours; ours({endpoint!r}, {cache!r})"],
            "mosaicml-streaming": [python, "-P", "benchmarks/remote_peer.py", "s3://bucket/text", cache, str(WORKERS)],
        }[arm.removesuffix(" again (A/A)")]
        env = {**os.environ, **KEYS, "S3_ENDPOINT_URL": endpoint}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode and arm.startswith("cosmati"):
        raise RuntimeError(f"{arm} failed:\n{done.stderr}")
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(*, quick: bool) -> str:
    """Run the benchmark, write its results and return the table."""
    num_shards, rounds = (20, 1) if quick else (199, 3)
    arms = ["cosmati", "cosmati again (A/A)"]
    if find_spec("streaming") or os.environ.get("COSMATI_PEER_PYTHON"):
        arms.append("mosaicml-streaming")
    lines = [
        "| round trip | arm | first batch, s, median (range) | epoch, s, median (range) | of the floor | requests |",
        "|---|---|---|---|---|---|",
    ]
    results = []
    with tempfile.TemporaryDirectory() as name:
        floor = write_rows(Path(name) / "bucket" / "text", num_shards) / (MEGABYTES * 1e6)
        for delay in (0.02, 0.1):
            passes: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
            asked: dict[str, int] = {}
            failed: dict[str, list[str]] = {}
            for _ in range(rounds):
                for arm in arms:
                    with served(Path(name), delay, MEGABYTES) as (endpoint, log):
                        took = measured(arm, endpoint)
                        if isinstance(took, str):
                            failed.setdefault(arm, []).append(took)
                        else:
                            passes[arm].append(took)
                        asked[arm] = len(log.read_text().splitlines()) - 1
            for arm, reasons in failed.items():
                lines.append(
                    f"| {1000 * delay:.0f} ms | {arm} | {len(reasons)} of {rounds} passes failed: {reasons[0]} | | | |"
                )
            for arm, found in passes.items():
                if not found:
                    continue
                first, epoch = (sorted(one[key] for one in found) for key in ("first", "epoch"))
                results.append({"delay": delay, "arm": arm, "floor": floor, "passes": found, "requests": asked[arm]})
                lines.append(
                    f"| {1000 * delay:.0f} ms | {arm} | {statistics.median(first):.2f} ({first[0]:.2f} to "
                    f"{first[-1]:.2f}) | {statistics.median(epoch):.2f} ({epoch[0]:.2f} to {epoch[-1]:.2f}) | "
                    f"{statistics.median(epoch) / floor:.2f} | {asked[arm]} |"
                )
    stem = "remote_quick" if quick else "remote"
    (RESULTS / f"{stem}.json").write_text(json.dumps(results, indent=1) + "\n")
    notes = {
        **surroundings(),
        "what": f"{num_shards} shards of 1 MB, {MEGABYTES:g} MB/s, {WORKERS} workers, {rounds} rounds in turns",
        "floor": f"{floor:.2f} s",
    }
    text = f"# {stem}\n\n" + "".join(f"- {key}: {value}\n" for key, value in notes.items())
    text += "\n" + "\n".join(lines) + "\n"
    (RESULTS / f"{stem}.md").write_text(text)
    return text
