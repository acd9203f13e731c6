"""Writes a source row by row: `python killed_writer.py OUT NUM_ROWS [LAST]`. It waits at row LAST to be killed."""

import sys
import time
from pathlib import Path

from cosmati.data.shards.writer import ShardWriter


def row(number: int) -> dict[str, object]:
    return {"id": number, "text": f"row {number} " + "x" * (number * 37 % 200)}


if __name__ == "__main__":
    out, num_rows, last = Path(sys.argv[1]), int(sys.argv[2]), int([*sys.argv, "-1"][3])
    with ShardWriter(
        out,
        {"id": "int", "text": "str"},
        class_path="open/permissive",
        source="killed",
        size_limit=8192,
        compression="gz",
        salt=bytes(32),
        append=True,  # where it was done before the kill came, there is nothing to add
    ) as writer:
        sys.stdout.write(f"{writer.num_written}\n")
        sys.stdout.flush()
        for number in range(writer.num_written, num_rows):
            if number == last:
                time.sleep(600)
            writer.write(row(number))
