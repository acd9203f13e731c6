"""Reads a whole data set through a cache, and prints its rows' numbers: `python reader.py URL CACHE [MAX_BYTES]`.

With `wait` as a fourth word it waits at the end to be killed.
"""

import sys
import time
from pathlib import Path

from cosmati.data.opened import CacheOptions
from cosmati.data.streaming import StreamingDataset

if __name__ == "__main__":
    url, cache = sys.argv[1], Path(sys.argv[2])
    options = CacheOptions(cache, max_bytes=int(sys.argv[3]) if len(sys.argv) > 3 else None, deadline_seconds=60)
    data = StreamingDataset(url, cache=options, window_rows=8)
    sys.stdout.write("open\n")
    sys.stdout.flush()
    numbers = []
    for start in range(0, len(data), 4):
        batch = data.__getitems__(range(start, min(start + 4, len(data))))
        numbers += [row["number"] for row in batch]
    if sys.argv[4:]:
        time.sleep(600)
    sys.stdout.write(" ".join(map(str, numbers)) + "\n")
