"""The benchmarks run, and write what they saw."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.measure import in_turns, write


def test_arms_are_compared_round_by_round(tmp_path: Path) -> None:
    times = {"base": iter([9.0, 1.0, 2.0, 4.0]), "double": iter([9.0, 2.0, 4.0, 8.0])}
    rows = in_turns({name: lambda values=values: next(values) for name, values in times.items()}, 3)
    assert [row.ratio for row in rows] == [1.0, 2.0]
    assert rows[1].over_baseline_us == pytest.approx(2e6)
    table = write("demo", rows, {"note": "n"}, tmp_path)
    assert "| double |" in table
    facts = json.loads((tmp_path / "demo.json").read_text())
    assert facts["rows"][1]["num_rounds"] == 3
    assert facts["torch"] == torch.__version__


def test_a_round_of_several_turns_is_their_mean_and_no_arm_is_always_first() -> None:
    order: list[str] = []

    def arm(name: str, *seconds: float) -> Callable[[], float]:
        left = iter([9.0, 9.0, *seconds])
        return lambda: order.append(name) or next(left)  # type: ignore[func-returns-value]

    rows = in_turns({"base": arm("base", 1.0, 3.0, 2.0, 2.0), "other": arm("other", 2.0, 4.0, 1.0, 1.0)}, 2, turns=2)
    assert [row.median_us for row in rows] == [2e6, 2e6]
    assert (rows[1].ratio_lower_quartile, rows[1].ratio_upper_quartile) == (0.25, 1.75)
    assert order == ["base", "other", "other", "base"] * 3


@pytest.mark.slow
def test_what_is_measured_on_a_gpu_runs_on_a_cpu_too(tmp_path: Path) -> None:
    gpu.run(["scaling"], tmp_path, is_dry=True)
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert sorted(found) == ["hashing_dry", "scaling_dry"]
    arms = [row["arm"] for row in found["scaling_dry"]["rows"]]
    assert {"DDP, one rank", "FSDP2, one rank", "replicated", "optimizer", "ledger"} <= {*arms}
    # All arms do the same multiplications.
    assert {*found["scaling_dry"]["operations, by plain's"].values()} == {1.0}
    assert found["hashing_dry"]["bytes"] == 4 * found["scaling_dry"]["parameters"]
    assert not torch.distributed.is_initialized()
