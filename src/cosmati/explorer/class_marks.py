"""One mark for each class of a run, the same in every figure, table and list of its page."""

from __future__ import annotations

from typing import Any, NamedTuple

from cosmati.explorer.palette import Palette
from cosmati.explorer.run_view import RunView
from cosmati.records.about import RunAbout

DASHES = ("solid", "dash", "dot")
PATTERNS = ("", "/", ".")
ALL_ROWS = "all"


class ClassMark(NamedTuple):
    """A class's place among the page's classes: of the colours, and how many times these were gone through before."""

    place: int
    around: int

    def line(self, palette: Palette, width: float) -> dict[str, Any]:
        """Return the class's line in a figure."""
        return {
            "color": palette.series[self.place % len(palette.series)],
            "width": width,
            "dash": DASHES[self.around % len(DASHES)],
        }

    def label(self, text: str, palette: Palette) -> str:
        """Return escaped text of a figure with the class's mark before it; text in brackets without a colour."""
        sign = ("■", "▧", "□")[self.around % 3]
        return f'<span style="color:{palette.series[self.place % len(palette.series)]}">{sign}</span> {text}'


def class_marks(run: RunView | None) -> dict[str, ClassMark]:
    """Return the marks by class: those that microbatches were of first, those with data next, then the policy's others.

    So the classes of which there are rows have a colour each, as long as there are colours.
    """
    if run is None or run.governance is None:
        return {}
    order = dict.fromkeys((*run.classes_seen, *classes_with_data(run), *run.governance.classes))
    return marks_of(tuple(order))


def classes_with_data(run: RunView) -> tuple[str, ...]:
    """Return the classes that rows are known of: microbatches came of them, or the run's program told of rows."""
    about = run.about or RunAbout()
    told = {one.class_name for one in about.sources} | {one.class_name for one in about.packages}
    classes = run.governance.classes if run.governance else ()
    return tuple(name for name in classes if name in told or name in run.classes_seen)


def marks_of(names: tuple[str, ...], num_colours: int = 6) -> dict[str, ClassMark]:
    """Return the marks of classes in an order."""
    return {name: ClassMark(index % num_colours, index // num_colours) for index, name in enumerate(names)}


def class_of_metric(run: RunView, name: str) -> str | None:
    """Return whose rows a metric is of: `loss/open/psf` is of the class `open/psf`; None where it's of no class."""
    rest = name.partition("/")[2]
    return rest if run.governance is not None and rest in run.governance.classes else None
