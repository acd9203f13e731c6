"""Reads a data set with two worker processes, slowly, and prints their pids: `python slow_reader.py URL`."""

import multiprocessing
import sys
import time

import torch

from cosmati.data.loader import StreamingLoader
from cosmati.data.rows import RowBatch
from cosmati.data.streaming import StreamingDataset


def slowly(batch: RowBatch) -> torch.Tensor:
    time.sleep(0.02)
    return batch.tensor("number")


if __name__ == "__main__":
    loader = StreamingLoader(StreamingDataset(sys.argv[1], transform=slowly), 4, num_workers=2)
    batches = iter(loader)
    read = next(batches).data.tolist()
    sys.stdout.write(" ".join(str(child.pid) for child in multiprocessing.active_children()) + "\n")
    sys.stdout.flush()
    for batch in batches:
        read += batch.data.tolist()
    sys.stdout.write(" ".join(map(str, read)) + "\n")
