"""The picture of each method's effect. A method that has none isn't in the list: NoOpModel shows nothing."""

from __future__ import annotations

from collections.abc import Callable

from cards import pictures_of_data, pictures_of_layers, pictures_of_runs
from cards.drawing import Canvas

PICTURES: dict[str, Callable[[], tuple[Canvas, str]]] = {
    **pictures_of_data.PICTURES,
    **pictures_of_layers.PICTURES,
    **pictures_of_runs.PICTURES,
}
