"""Colours of the figures: the stones of a Cosmatesque floor, in a light and a dark setting.

The six series colours and the ink stay apart for protanopia, deuteranopia and tritanopia (Machado, Oliveira
and Fernandes 2009, doi:10.1109/TVCG.2009.113) and have a contrast of at least 3 to the paper; text colours
have at least 4.5. A test checks both. Marker shapes repeat what the colours say.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

MARKERS = ("circle", "diamond", "triangle-up", "cross", "star", "triangle-down")


@dataclass(frozen=True)
class Palette:
    """Colours of one theme. `series` are porphyry, serpentine, giallo, lapis, pavonazzetto and terracotta.

    `ink` reads well on `denied`, on `full` and on what lies between them.
    """

    paper: str
    surface: str
    ink: str
    muted: str
    rule: str
    accent: str
    good: str
    bad: str
    denied: str
    full: str
    series: tuple[str, ...]


LIGHT = Palette(
    paper="#fbfaf7",
    surface="#ffffff",
    ink="#22201d",
    muted="#666057",
    rule="#e2ddd3",
    accent="#7d2248",
    good="#1c6b4e",
    bad="#a3261d",
    denied="#f1ede5",
    full="#c98aa6",
    series=("#6e1650", "#139a7c", "#bb8300", "#26379f", "#9a7dc8", "#9c3018"),
)
DARK = Palette(
    paper="#171513",
    surface="#1f1d1a",
    ink="#ece7de",
    muted="#a79f93",
    rule="#37332e",
    accent="#e395b1",
    good="#6fd0a4",
    bad="#f08a76",
    denied="#2a2723",
    full="#8a3a5e",
    series=("#bf5f7c", "#74e3a0", "#f2bd36", "#4f7df0", "#a184cc", "#ea5a3c"),
)


def css_variables(palette: Palette) -> dict[str, str]:
    """Return the palette's colours by the name of their CSS custom property."""
    colours = {f"--{name}": value for name, value in asdict(palette).items() if name != "series"}
    return colours | {f"--series-{index}": value for index, value in enumerate(palette.series)}


PAGE = Palette(
    **{name: f"var(--{name})" for name in asdict(LIGHT) if name != "series"},
    series=tuple(f"var(--series-{index})" for index in range(len(LIGHT.series))),
)
"""Names of CSS custom properties in place of colours. The page puts the theme's colours in when it draws."""
