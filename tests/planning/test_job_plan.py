"""A plan as a whole: time, cost, whether it fits, what to change; and the devices that it's for."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

import pytest
import torch

from cosmati.errors import PlanError
from cosmati.planning import devices
from cosmati.planning.devices import Device, device_named, device_names, own_memory, with_figures
from cosmati.planning.failures import FailureModel
from cosmati.planning.figures import LEAST, MOST
from cosmati.planning.job import RESERVE, JobPlan, plan_job
from cosmati.planning.memory import SHARDINGS
from cosmati.planning.step_time import EFFICIENCY, LAUNCH_SECONDS
from tests.planning.made import made

near = pytest.approx
DEVICE = Device(
    name="round",
    title="a device of round figures",
    memory_gb=1e-5,  # 10,000 bytes, of which 9,000 are for the run
    bf16_tflops=4e-9,
    fp32_tflops=1e-9,  # 1,000 a second
    memory_gb_per_second=1e-6,  # 1,000 bytes a second
    link_gb_per_second=1e-7,  # 100
    network_gb_per_second=1e-8,  # 10
    ranks_per_node=4,
)


def planned(ranks: int = 2, sharding: Any = "replicated", device: Device = DEVICE, **more: Any) -> JobPlan:
    figures = more.pop("parts", {})
    return plan_job(made(**figures), ranks, device, sharding, **{"efficiency": 0.5, **more})


def test_a_step_takes_what_its_figures_say() -> None:
    time = planned().time
    assert time.compute == near(4 * 1000 / (1000 * 0.5))
    assert time.optimizers == near((2 * (400 + 800) + 400) / 1000)
    assert time.sending == near(2 * 200 / 100)
    # Backward of the last microbatch: two thirds of two seconds.
    assert time.hidden == near(4 / 3)
    assert time.one_after_another == near(8 + 2.8 + 4)
    assert time.overlapped == near(8 + 2.8 + 4 - 4 / 3)


def test_other_shardings_take_their_own() -> None:
    optimizer, full = planned(sharding="optimizer").time, planned(sharding="full").time
    assert optimizer.optimizers == full.optimizers == near(1.4)
    assert full.sending == near((4 * 200 + 8 * 200) / 100)
    assert full.hidden == near(8), "every microbatch's sending may be hidden"
    alone = planned(ranks=1, sharding="full").time
    assert (alone.sending, alone.optimizers) == (0, near(2.8))


def test_copies_of_shards_take_their_own_and_say_where_fewer_would_fit() -> None:
    plan = planned(ranks=4, sharding="full", shards=2)
    assert plan.time.optimizers == near(1.4)
    assert plan.traffic.total == 2 * 3 * 200 + 2 * 100
    device = dataclasses.replace(DEVICE, memory_gb=(plan.memory.total - 1) / 0.9 / 1e9)
    tight = planned(ranks=4, sharding="full", shards=2, device=device)
    assert not tight.fits
    fewer = next(change for change in tight.changes if change.words == "fewer copies: --set config.shard_ranks=4")
    assert fewer.total == planned(ranks=4, sharding="full").memory.total < plan.memory.total


def test_bfloat16_has_its_own_peak_and_several_nodes_their_own_bandwidth() -> None:
    assert planned(parts={"precision": "bfloat16"}).time.compute == near(2)
    assert planned(ranks=4).time.sending == near(2 * 300 / 100)
    assert planned(ranks=8).time.sending == near(2 * 350 / 10)


def test_a_small_microbatch_takes_as_long_as_its_kernels_are_launched() -> None:
    fast = dataclasses.replace(DEVICE, fp32_tflops=1e9)
    assert planned(device=fast).time.compute == near(4 * 10 * LAUNCH_SECONDS)
    assert planned(device=fast).time.is_launch_bound
    assert not planned().time.is_launch_bound
    assert plan_job(made(), 2, DEVICE).time.efficiency == EFFICIENCY


def test_a_second_pass_computes_twice() -> None:
    assert planned(parts={"again": 800}).time.compute == near(16)
    full = planned(parts={"again": 800}, sharding="full").time
    assert full.sending == near(2 * (4 * 200 + 8 * 200) / 100)
    assert full.hidden == near(16), "both passes hide what is sent"


def test_on_this_machine_it_takes_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    here = dataclasses.replace(DEVICE, is_here=True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    time = plan_job(made(), 2, here).time
    assert time.compute == near(4 * 0.5), "a core for each thread"
    assert time.efficiency == near(1000 / 0.5 / 1000)
    crowded = plan_job(made(), 4, here)
    assert crowded.time.compute == near(2 * 0.5 * 2), "half a core for each thread"
    assert crowded.time.optimizers == near(4 * (2 * (400 + 800) + 400) / 1000), "a quarter of the memory's speed"
    assert crowded.capacity == int(10_000 * (1 - RESERVE) / 4)
    assert plan_job(made(), 4, here, efficiency=0.5).time.compute == near(2 * 1000 / 250)


def test_a_run_costs_its_hours() -> None:
    plan = planned(price_per_hour=3.0)
    assert plan.hours == near(14.8)
    assert plan.cost == near(14.8 * 2 * 3)
    spared = planned(price_per_hour=3.0, ranks=8, failures=FailureModel(spares=1, num_runs=5))
    assert spared.goodput is not None
    assert spared.goodput.nodes == 2
    assert spared.hours == near(spared.time.one_after_another / spared.goodput.mean)
    assert spared.cost == near(spared.hours * 12 * 3)
    few = planned(price_per_hour=3.0, failures=FailureModel(spares=1, num_runs=5))
    assert few.hours is not None
    assert few.cost == near(few.hours * 4 * 3), "a spare of as many ranks as the run has on a node"
    endless = planned(price_per_hour=3.0, parts={"num_steps": None})
    assert (endless.hours, endless.cost, planned().cost) == (None, None, None)


def test_whether_it_fits_is_by_what_is_left_after_the_reserve() -> None:
    assert planned().fits
    needed = planned().memory.total
    exact = dataclasses.replace(DEVICE, memory_gb=needed / (1 - RESERVE) / 1e9 + 1e-12)
    assert planned(device=exact).fits
    assert not planned(device=dataclasses.replace(exact, memory_gb=exact.memory_gb - 2e-9)).fits
    assert planned(device=exact).changes == ()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("capacity", [1000, 1500, 2000, 2500, 3000, 4200])
def test_what_is_said_to_fit_does(ranks: int, capacity: int) -> None:
    """Each change is planned anew by what it says."""
    device = dataclasses.replace(DEVICE, memory_gb=capacity / 0.9 / 1e9)
    plan = planned(ranks=ranks, device=device)
    assert bool(plan.fits) == (plan.memory.total <= capacity)
    for change in plan.changes:
        words = change.words.split()
        options = {name: words[words.index(name) + 1] for name in ("--ranks", "--sharding") if name in words}
        parts: dict[str, int] = {}
        if "--set" in words:
            v = int(words[-1].partition("=")[2])
            parts = {"num_microbatches": v, "rows": 16 * 8 // v, "num_rows": 32 // v}
            parts |= dict.fromkeys(("activations", "first_activations"), 1600 * 8 // v)
        if "torch.utils.checkpoint" in words:
            parts = {"activations": 0, "first_activations": 0}
        again = planned(
            int(options.get("--ranks", ranks)), options.get("--sharding", "replicated"), device, parts=parts
        )
        assert again.fits, change
        assert again.memory.total == change.total


def test_every_kind_of_change_is_found_where_it_helps() -> None:
    found = {
        change.words.partition(":")[0]
        for capacity in (1500, 2000, 2500, 3000, 4200)
        for change in planned(device=dataclasses.replace(DEVICE, memory_gb=capacity / 0.9 / 1e9)).changes
    }
    assert found == {"shard more", "smaller microbatches", "more ranks", "fewer activations"}
    assert planned(device=dataclasses.replace(DEVICE, memory_gb=1e-9)).changes == ()


def test_everything_is_told_to_programs() -> None:
    plan = planned(
        price_per_hour=1.0, failures=FailureModel(num_runs=2), device=with_figures(DEVICE, {"memory_gb": 1e-6})
    )
    told = json.loads(json.dumps(plan.as_mapping()))
    assert told["fits"] is False
    assert told["memory"]["total"] == plan.memory.total == sum(plan.memory.parts.values())
    assert told["traffic"]["total"] == 400
    assert told["time"]["overlapped"] == plan.time.overlapped
    assert told["goodput"]["num_runs"] == 2
    assert (told["hours"], told["cost"]) == (plan.hours, plan.cost)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sharding": "half"}, "no sharding 'half'. Take one of replicated, optimizer, full"),
        ({"efficiency": 1.5}, "efficiency=1.5 can't be"),
        ({"price_per_hour": 0.0}, "price_per_hour=0 can't be"),
        ({"price_per_hour": math.inf}, "price_per_hour=inf can't be: give a number from 1e-12"),
        ({"efficiency": 1e-320}, "efficiency=.* can't be: give a number from 1e-12 to 1"),
        ({"ranks": 3}, "3 ranks can't share V = 8"),
    ],
)
def test_what_can_t_be_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        planned(**options)


def test_devices_are_known_by_name() -> None:
    assert device_names() == ("h200", "h100", "a100-80gb", "l4", "cpu")
    for name in device_names()[:-1]:
        device = device_named(name)
        assert device.name == name
        assert device.bf16_tflops > device.fp32_tflops > 1
        assert device.link_gb_per_second > device.network_gb_per_second
        assert not device.is_here
    with pytest.raises(
        PlanError, match=r"'h20' is no device that is known. Did you mean h200\? There are h200, .*, cpu"
    ):
        device_named("h20")


def test_every_figure_of_a_device_stands_below_a_source() -> None:
    text = devices.files("cosmati.planning").joinpath(devices.DEVICES_FILE).read_text("utf-8")
    for table in text.split("\n[")[1:-1]:
        assert table.count("# https://") == 2, table
    assert "gloo, all-to-all" in text


def test_this_machine_is_measured() -> None:
    device = device_named("cpu")
    assert device.is_here
    assert 0 < device.fp32_tflops < 100
    assert device.memory_gb == own_memory() / 1e9


@pytest.mark.long
@pytest.mark.parametrize(("seconds", "side", "calls"), [(1e-3, 1024, 3), (0.5, 256, 1)])
def test_a_processor_that_is_slow_at_a_type_is_measured_by_small_products(
    monkeypatch: pytest.MonkeyPatch, seconds: float, side: int, calls: int
) -> None:
    """Without the instructions a product of bfloat16 takes 50 times as long, and the plan took 15 s."""
    asked = []

    def fastest(work: Any) -> float:
        asked.append(work())
        return seconds

    monkeypatch.setattr(devices, "_fastest", fastest)
    assert devices._tflops(torch.bfloat16) == 2 * side**3 / seconds / 1e12
    assert [one.dtype for one in asked] == [torch.bfloat16] * calls
    assert asked[-1].shape == (side, side)


def test_a_container_has_its_own_limit(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(devices, "_CGROUP_LIMIT", limit)
    whole = own_memory()
    limit.write_text("1000000\n")
    assert own_memory() == 1_000_000
    limit.write_text("max\n")
    assert own_memory() == whole


def test_figures_may_be_others() -> None:
    device = with_figures(DEVICE, {"memory_gb": 48.0, "ranks_per_node": 2.0})
    assert (device.memory_gb, device.ranks_per_node) == (48.0, 2)
    for name, value in (("memory_gb", 0.0), ("link_gb_per_second", math.inf), ("ranks_per_node", 0.5)):
        with pytest.raises(PlanError, match=f"{name}={value:g} can't be: give a "):
            with_figures(DEVICE, {name: value})


def test_what_is_planned_with_the_largest_and_smallest_figures_are_numbers() -> None:
    words = ("name", "title", "ranks_per_node", "is_here")
    figures = [field.name for field in dataclasses.fields(Device) if field.name not in words]
    for value, other in itertools.product((LEAST, MOST), repeat=2):
        device = with_figures(DEVICE, dict.fromkeys(figures, value))
        for ranks, sharding in itertools.product((1, 8), SHARDINGS):
            plan = planned(ranks, sharding, device, price_per_hour=other, efficiency=min(other, 1))
            json.dumps(plan.as_mapping(), allow_nan=False)


def test_a_run_that_failures_leave_nothing_of_has_no_end() -> None:
    plan = planned(price_per_hour=1.0, failures=FailureModel(node_mtbf_hours=1e-4, days=1e-3, num_runs=2))
    assert (plan.left, plan.hours, plan.cost) == (0, None, None)
    json.dumps(plan.as_mapping(), allow_nan=False)
