"""The picture of the schedules shows what they give, and the one in the docs is up to date."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Literal

import pytest

from cosmati.core.clock import Budget, Time
from cosmati.explorer.schedule_shapes import schedules_svg
from cosmati.optim import (
    WSD,
    Constant,
    Cosine,
    CosineWarmRestarts,
    Exponential,
    Linear,
    LinearToZero,
    MultiStep,
    Polynomial,
    Schedule,
    Step,
)

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SHOWN: dict[str, Schedule] = {
    "Constant": Constant(warmup="0.1dur"),
    "Linear, final=0.2": Linear(warmup="0.1dur", final=0.2),
    "LinearToZero": LinearToZero(warmup="0.1dur"),
    "Cosine": Cosine(warmup="0.1dur"),
    "WSD": WSD(warmup="0.1dur", decay="0.3dur"),
    "WSD, shape='sqrt'": WSD(warmup="0.1dur", decay="0.5dur", shape="sqrt"),
    "Polynomial": Polynomial(warmup="0.1dur"),
    "Exponential": Exponential(warmup="0.1dur", every="0.1dur", factor=0.7),
    "Step": Step(warmup="0.1dur", every="0.3dur", factor=0.4),
    "MultiStep": MultiStep(warmup="0.1dur", milestones=("0.5dur", "0.75dur"), factor=0.3),
    "CosineWarmRestarts": CosineWarmRestarts(warmup="0.1dur", cycle="0.3dur"),
    "…, growth=2": CosineWarmRestarts(warmup="0.1dur", cycle="0.13dur", growth=2.0),
}


def multipliers(schedules: dict[str, Schedule], num_steps: int) -> dict[str, list[float]]:
    budget = Budget(Time.parse(f"{num_steps}ba"))
    return {n: [s.multiplier(step / num_steps, budget) for step in range(num_steps)] for n, s in schedules.items()}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_docs_show_these_schedules(theme: Literal["light", "dark"]) -> None:
    assert (IMAGES / f"schedules-{theme}.svg").read_text() == schedules_svg(multipliers(SHOWN, 100), theme)


def test_each_step_has_the_height_of_its_multiplier() -> None:
    root = ET.fromstring(schedules_svg(multipliers({"Step": Step(every="0.5dur", factor=0.25)}, 4)))
    points = [e.attrib["points"] for e in root.iter() if e.tag.endswith("polyline")]
    heights = [float(y) for y in re.findall(r",([\d.]+)", points[0])]
    top, bottom = min(heights), max(heights)
    assert heights == [top] * 4 + [bottom] * 4
    assert bottom - top == pytest.approx(0.75 * 66, abs=0.2)


if __name__ == "__main__":
    for name in ("light", "dark"):
        (IMAGES / f"schedules-{name}.svg").write_text(schedules_svg(multipliers(SHOWN, 100), name))  # type: ignore[arg-type]
