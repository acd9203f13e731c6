"""Print what a study's parts gain alone, and what they do together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cosmati.explorer.composition_view import difference_text
from cosmati.explorer.wording import estimate_text, p_text, ratio_interval_text, ratio_text
from cosmati.records.study import StudyRecord
from cosmati.study.comparison import NotReached
from cosmati.study.composition import joint_effects, single_parts
from cosmati.study.curves import Axis


def interaction_lines(record: StudyRecord, *, axis: Axis) -> Iterator[str]:
    """Give each part's gain alone, and what several give over the product of these, with 95 % intervals."""
    yield f"by {axis}, alone: times as fast to the baseline's best {record.quality_name}"
    for part in single_parts(record, axis=axis).values():
        gain = part.gain
        figures = gain.reason if isinstance(gain, NotReached) else f"{ratio_text(gain)} ({ratio_interval_text(gain)})"
        yield f"  {part.arm}: {figures}"
    yield f"by {axis}, together: over the product of what each gives alone"
    sums = {one.arm: one for one in joint_effects(record, axis="rows", measure="difference")}
    for one in joint_effects(record, axis=axis):
        adjusted = "" if one.p_value is None else f", {p_text(one.p_value, one.num_tests)}"
        yield f"  {one.arm}: {estimate_text(one.ratio)}{adjusted}"
        yield f"    in quality at the full budget's rows, beyond their sum: {difference_text(sums[one.arm])}"


def say_interactions(record: StudyRecord, *, axes: Sequence[Axis]) -> None:
    """Print the lines along some axes."""
    for axis in axes:
        print(*interaction_lines(record, axis=axis), sep="\n")
