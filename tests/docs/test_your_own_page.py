"""The page on what people bring: its code runs, and its tables say what happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cosmati.train.evaluation import evaluate
from cosmati.train.feed import IterableFeed
from cosmati.train.ranks import Ranks

PAGE = (Path(__file__).parents[2] / "docs" / "your-own.md").read_text()


def test_the_page_runs() -> None:
    scope: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "your-own.md", "exec"), scope)
    plain = torch.autocast("cpu", torch.bfloat16, enabled=False)
    found = evaluate(nn.Identity(), scope["evaluation"], Ranks(), torch.device("cpu"), plain)
    # Of two rows of class 0 and two of class 2, one each is told from the others; and the one row of class 1.
    assert found == {"accuracy": pytest.approx(4 / 5), "recall": pytest.approx((1 + 1 + 1 / 2) / 3)}


def test_the_table_of_loaders_says_what_a_feed_says() -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| ")]
    promised = {cells[0].strip(): cells[-1].strip() for cells in rows if len(cells) == 4 and "resume" not in cells[3]}
    table = TensorDataset(torch.zeros(8, 1))
    kinds: dict[str, Any] = {
        "a list": [torch.zeros(4, 1)],
        "a `DataLoader` with": DataLoader(table, 4, shuffle=True),
        "a `DataLoader` over": DataLoader(table, 4, num_workers=1, persistent_workers=True),
        "a generator": iter([torch.zeros(4, 1)]),
    }
    for name, data in kinds.items():
        told = next(value for kind, value in promised.items() if kind.startswith(name))
        assert (told == "holds") == IterableFeed(data, 1).is_positional, name
