"""What a search for near-duplicates misses, against comparing all rows: `python -m benchmarks.near_duplicates`.

Rows are 1 kB of this machine's Python sources. Asked are rows that were edited: a share of the words is drawn anew, or
a part is cut off. For each threshold all rows are compared one by one as well.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import RESULTS, surroundings
from cosmati.corpora.python_library import load_python_library
from cosmati.forget.near_duplicates import Hashes, bands_for, jaccard, normalised, shingles, sketch

NUM_ROWS, NUM_ASKED, LENGTH = 2000, 400, 1024
THRESHOLDS = (0.3, 0.5, 0.7, 0.8, 0.9)


def edited(text: str, draw: random.Random, words: list[str]) -> str:
    """Return a text of which some words are others, or a part is gone."""
    rate = draw.choice([0.002, 0.01, 0.03, 0.06, 0.1])
    kept = [draw.choice(words) if draw.random() < rate else word for word in text.split(" ")]
    return " ".join(kept[int(draw.choice([0.0, 0.0, 0.1, 0.3]) * len(kept)) :])


def interval(hits: int, number: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share."""
    z, share = 1.959964, hits / number
    middle, width = share + z * z / (2 * number), z * math.sqrt(share * (1 - share) / number + (z / number / 2) ** 2)
    return (middle - width) / (1 + z * z / number), min(1.0, (middle + width) / (1 + z * z / number))


def compared(threshold: float, exact: NDArray[np.float64], own: Hashes, asked: Hashes) -> dict[str, float]:
    """Return how much of what is as like was found by bands, and how much of what bands found is as like.

    Args:
        threshold: of likeness.
        exact: likeness of each asked text and row, [asked, rows].
        own: sketches, [rows, bins].
        asked: likewise.
    """
    bands = bands_for(threshold)
    candidates = np.stack([(own == one).reshape(len(own), bands, -1).all(2).any(1) for one in asked])
    is_like = exact >= threshold
    hits, truly, chosen = (int(one.sum()) for one in (candidates & is_like, is_like, candidates))
    low, high = interval(hits, truly)
    return {
        "threshold": threshold,
        "bands": bands,
        "pairs as like": truly,
        "found": hits,
        "recall": hits / truly,
        "recall low": low,
        "recall high": high,
        "candidates": chosen,
        "precision of candidates": hits / chosen,
    }


def main(folder: Path = RESULTS) -> None:
    """Compare, write `near_duplicates.json` and `.md`, and print the table."""
    draw = random.Random(0)
    library = load_python_library(sequence_length=LENGTH, max_bytes=6_000_000)
    chosen = draw.sample(range(len(library.train.tokens)), NUM_ROWS)
    rows = [normalised(bytes(library.train.tokens[i].tolist()).decode("utf-8", "replace")) for i in chosen]
    words = sorted({word for row in rows for word in row.split(" ")})
    asked = [edited(rows[number], draw, words) for number in draw.sample(range(NUM_ROWS), NUM_ASKED)]
    row_sets, asked_sets = ([shingles(text) for text in texts] for texts in (rows, asked))
    exact = np.asarray([[jaccard(one, other) for other in row_sets] for one in asked_sets])
    begin = time.process_time()
    own = np.stack([sketch(text) for text in rows])
    microseconds = (time.process_time() - begin) / NUM_ROWS * 1e6
    found = [compared(threshold, exact, own, np.stack([sketch(text) for text in asked])) for threshold in THRESHOLDS]
    lines = ["| threshold | bands | pairs as like | recall (95 %) | candidates | of them as like |", "|---" * 6 + "|"]
    lines += [
        f"| {one['threshold']} | {one['bands']} | {one['pairs as like']:,} | {one['recall']:.4f} "
        f"({one['recall low']:.4f} to {one['recall high']:.4f}) | {one['candidates']:,} "
        f"| {one['precision of candidates']:.3f} |"
        for one in found
    ]
    facts = {
        **surroundings(),
        "command": "python -m benchmarks.near_duplicates",
        "rows": f"{NUM_ROWS:,} of about {LENGTH} letters, {NUM_ASKED} edited ones asked",
        "microseconds a sketch": round(microseconds, 1),
    }
    table = "\n".join(lines) + "\n"
    sys.stdout.write(table)
    told = "".join(f"- {key}: {value}\n" for key, value in facts.items())
    (folder / "near_duplicates.md").write_text(f"# near_duplicates\n\n{told}\n{table}")
    (folder / "near_duplicates.json").write_text(json.dumps({**facts, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
