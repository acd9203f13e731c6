"""The page on planning a run: it's walked through on gloo, and its tables are those that the functions give.

`python -m tests.docs.test_scaling_plan_page` prints the tables anew.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cosmati.planning.failures import FailureModel, simulate
from cosmati.planning.scaling import ScaleRow, entry_bytes, scale_table
from tests.docs.walked_page import walk

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "scaling-plan.md"
SIZES = ((1, 8), (8, 8), (8, 32), (64, 256), (256, 1024), (1024, 1024), (1024, 4096), (4096, 4096))
NODES, SPARES = (16, 64, 128, 512), (0, 1, 4)
PARAMETERS, SECONDS = 7_000_000_000, 5.0


def scale_lines() -> list[str]:
    """The table toward thousands of ranks."""

    def line(row: ScaleRow) -> str:
        ledger = "too long for an entry"
        if row.entry is not None and row.ledger_bytes_a_day is not None:
            ledger = f"{row.entry:,} B | {row.ledger_bytes_a_day / 1e6:,.0f} MB"
        else:
            ledger += " | none"
        depth = row.levels_within + row.levels_across
        tree = f"{depth}: {row.levels_within} + {row.levels_across}"
        sent = f"{row.sent / 1e9:.1f} GB | {row.sent_strided / 1e9:.1f} GB"
        return f"| {row.ranks:,} | {row.num_microbatches:,} | {tree} | {sent} | {ledger} |"

    return [line(row) for row in scale_table(SIZES, PARAMETERS, SECONDS)]


def failure_lines() -> list[str]:
    """The table of what failures leave."""
    lines = []
    for nodes in NODES:
        found = [
            simulate(dataclasses.replace(FailureModel(), spares=spares), 8 * nodes, 8, 8 * nodes) for spares in SPARES
        ]
        cells = [f"{one.mean:.1%} ({one.low:.1%} to {one.high:.1%})" for one in found]
        every = found[0].checkpoint_every_seconds / 60
        lines.append(f"| {nodes} | {' | '.join(cells)} | {found[0].closed_form:.1%} | {every:.0f} min |")
    return lines


@pytest.mark.parametrize("line", [*scale_lines(), *failure_lines()])
def test_a_line_of_the_tables_is_what_the_functions_give(line: str) -> None:
    assert line in PAGE.read_text().splitlines()


def test_the_largest_step_that_a_ledger_takes_is_named() -> None:
    most = max(v for v in range(1, 3000) if entry_bytes(v) is not None)
    assert f"{most:,} microbatches" in PAGE.read_text()


@pytest.mark.slow
@pytest.mark.timeout(1200)  # against hanging, as the tutorials
def test_one_process_two_and_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    walk(PAGE, tmp_path)


if __name__ == "__main__":
    print("\n".join([*scale_lines(), "", *failure_lines()]))  # noqa: T201
