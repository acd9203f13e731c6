"""Toward thousands of ranks, on paper: the tree's depth, bytes of a step, and the rate of the ledger."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cosmati.ledger.entry import MAX_ENTRY_SIZE, encode_entry
from cosmati.planning.figures import refuse_beyond
from cosmati.planning.traffic import ring_share, strided_bytes, tree_levels
from cosmati.records.ledger import DIGEST_SIZE, MicrobatchCell, StepEntry

_NOTHING = bytes(DIGEST_SIZE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleRow:
    """What a step is at one size.

    Attributes:
        ranks: W.
        num_microbatches: V.
        levels_within: of the tree, in a rank.
        levels_across: of the tree, between ranks.
        sent: bytes that a rank sends, microbatches consecutive.
        sent_strided: bytes that a rank sends, each microbatch reduced at once.
        entry: bytes of a step's ledger entry; None where it's longer than a log may hold.
        ledger_bytes_a_day: of the steps' entries.
    """

    ranks: int
    num_microbatches: int
    levels_within: int
    levels_across: int
    sent: int
    sent_strided: int
    entry: int | None
    ledger_bytes_a_day: float | None


def scale_table(sizes: Iterable[tuple[int, int]], num_parameters: int, seconds_per_step: float) -> tuple[ScaleRow, ...]:
    """Return what a step is at several sizes.

    Args:
        sizes: W and V of each.
        num_parameters: of the model, whose gradients are summed in float32.
        seconds_per_step: of the run.

    Raises:
        PlanError: a W doesn't divide its V, or the seconds can't be.
    """
    refuse_beyond("seconds_per_step", seconds_per_step)
    return tuple(_row(ranks, v, 4 * num_parameters, seconds_per_step) for ranks, v in sizes)


def _row(ranks: int, num_microbatches: int, gradients: int, seconds: float) -> ScaleRow:
    within, across = tree_levels(num_microbatches, ranks)
    entry = entry_bytes(num_microbatches)
    return ScaleRow(
        ranks=ranks,
        num_microbatches=num_microbatches,
        levels_within=within,
        levels_across=across,
        sent=2 * ring_share(gradients, ranks),
        sent_strided=strided_bytes(gradients, num_microbatches, ranks),
        entry=entry,
        ledger_bytes_a_day=None if entry is None else entry * 86_400 / seconds,
    )


def entry_bytes(num_microbatches: int) -> int | None:
    """Return the bytes of a step's ledger entry, without a parameter root; None where none is that long.

    Args:
        num_microbatches: V, each with its class, route, rows, weight and commitment.
    """
    short, longer = _encoded(0), _encoded(1)
    size = short + num_microbatches * (longer - short)
    return size if size <= MAX_ENTRY_SIZE else None


def _encoded(num_microbatches: int) -> int:
    cell = MicrobatchCell(class_id=0, band=0, phase=0, route_id=0, num_rows=1, weight=1.0, row_commitment=_NOTHING)
    entry = StepEntry(
        step=0,
        attempt=0,
        policy_digest=_NOTHING,
        details_digest=_NOTHING,
        parameter_root=None,
        microbatches=(cell,) * num_microbatches,
    )
    return len(encode_entry(entry))
