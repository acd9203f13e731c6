"""Reads a data set under a limit, in every way asked for: `python limited_reader.py URL LIMIT BYTES [CACHE]`.

Prints a line for each way: what `on_bad_row` was, workers, rows read, distinct rows, rows left out.
"""

import os
import resource
import signal
import sys
import warnings
from pathlib import Path

from cosmati.data.loader import StreamingLoader
from cosmati.data.opened import CacheOptions
from cosmati.data.streaming import StreamingDataset


def limit(kind: str, amount: int) -> None:
    if kind == "handles":
        resource.setrlimit(resource.RLIMIT_NOFILE, (amount, amount))
    elif kind == "disk":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (amount, amount))
    elif kind == "memory":
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (in_use + amount, in_use + amount))


if __name__ == "__main__":
    url, kind, amount = sys.argv[1], sys.argv[2], int(sys.argv[3])
    cache = CacheOptions(sys.argv[4]) if len(sys.argv) > 4 else None
    warnings.simplefilter("ignore")
    limit(kind, amount)
    for policy in ("skip", "raise"):
        for workers in (0, 2) if kind == "handles" else (0,):
            rows = StreamingDataset(url, columns=("number",), on_bad_row=policy, cache=cache, seed=3)  # type: ignore[arg-type]
            loader = StreamingLoader(rows, 500, num_workers=workers)
            try:
                ids = [one for batch in loader for one in batch.lineage.row_ids.tolist()]
            except Exception as error:  # noqa: BLE001  (its name is printed)
                sys.stdout.write(f"{policy} {workers} {type(error).__name__}: {error}\n")
                continue
            kept = {one for one in ids if one >= 0}
            sys.stdout.write(f"{policy} {workers} {len(ids)} {len(kept)} {len(rows.skipped)}\n")
