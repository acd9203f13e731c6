"""The plan's order, refusals and promises; digests of parameters."""

import dataclasses
import json
import struct
from dataclasses import dataclass
from typing import ClassVar

import blake3
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from cosmati.core.batch import Batch, InputKind
from cosmati.core.method import Coupling, Method, Position, Stage
from cosmati.core.plan import Facts, Promise, describe, make_plan
from cosmati.core.state import (
    CHUNK_BYTES,
    merkle_root,
    model_tensors,
    optimizer_tensors,
    parameter_root,
    restore_optimizer,
    tensor_root,
)
from cosmati.errors import CheckpointError, PlanError


@dataclass(frozen=True, kw_only=True)
class Early(Method):
    stage: ClassVar[Stage] = Stage.SHAPE
    number: int = 0


@dataclass(frozen=True, kw_only=True)
class Late(Method):
    stage: ClassVar[Stage] = Stage.LABEL
    owns: ClassVar[frozenset[str]] = frozenset({"labels"})


@dataclass(frozen=True, kw_only=True)
class Flip(Method):
    stage: ClassVar[Stage] = Stage.PERTURB
    reads: ClassVar[frozenset[InputKind]] = frozenset({"images"})


FACTS = Facts(num_microbatches=4, rows_per_microbatch=8, positional_data=True)


def test_stages_order_and_ties_keep_the_users_order() -> None:
    plan = make_plan([Late(), Early(number=1), Early(number=2)], FACTS)
    assert plan.methods == (Early(number=1), Early(number=2), Late())
    assert "Early(number=1)" in str(plan)


def test_two_owners_are_refused_by_name_with_the_mend() -> None:
    with pytest.raises(PlanError, match=r"Late\(\) and Late\(\) both own the labels.*Remove one"):
        make_plan([Late(), Late()], FACTS)


def test_a_method_of_images_refuses_text() -> None:
    facts = dataclasses.replace(FACTS, input_kind="tokens")
    with pytest.raises(PlanError, match=r"Flip\(\) changes images, and the model's input here is tokens. Remove it"):
        make_plan([Flip()], facts)
    assert make_plan([Flip()], dataclasses.replace(FACTS, input_kind="images")).methods == (Flip(),)
    assert make_plan([Flip()], FACTS).methods == (Flip(),)
    with pytest.raises(PlanError, match="is not a method"):
        make_plan([Flip], FACTS)  # type: ignore[list-item]


def test_promises_say_what_broke_them() -> None:
    facts = Facts(num_microbatches=1, rows_per_microbatch=None, positional_data=False, host_clock=True)
    promises = {g.name: g for g in make_plan([Early()], facts).guarantees}
    assert not any(g.holds for g in promises.values())
    assert "Early()" in promises["parity"].because
    assert "host's clock" in promises["resume"].because
    assert "V = 1" in promises["elastic"].because
    plan = make_plan([], FACTS)
    assert [plan.holds(name) for name in ("parity", "resume", "elastic", "replayable")] == [True, True, True, False]
    assert not plan.withdraw("elastic", "x").holds("elastic")


def test_digest_follows_methods_and_settings_alone() -> None:
    assert make_plan([Early(number=1)], FACTS).digest == make_plan([Early(number=1)], FACTS).digest
    assert make_plan([Early(number=1)], FACTS).digest != make_plan([Early(number=2)], FACTS).digest
    other = Facts(num_microbatches=4, rows_per_microbatch=8, positional_data=True, settings={"seed": 1})
    assert make_plan([], FACTS).digest != make_plan([], other).digest


def naive_root(hashes: list[bytes]) -> bytes:
    """Pair level by level, an odd one out moving up, which gives RFC 6962's tree."""
    while len(hashes) > 1:
        pairs = [hashes[i : i + 2] for i in range(0, len(hashes), 2)]
        hashes = [blake3.blake3(b"\x01" + pair[0] + pair[1]).digest() if len(pair) == 2 else pair[0] for pair in pairs]
    return hashes[0]


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=40))
def test_merkle_root_equals_pairing_level_by_level(hashes: list[bytes]) -> None:
    assert merkle_root(hashes) == naive_root(hashes)


def test_roots_of_parameters_stay_as_they_were_first_published() -> None:
    w, b = torch.arange(600_000, dtype=torch.float32).view(600, 1000), torch.arange(7)
    roots = [parameter_root(tensors).hex() for tensors in ({}, {"b": b}, {"w": w, "b": b})]
    assert roots == [
        "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
        "a384f374db7b3e880047bd3e49cd6789eb3ad85a6168aebb2a6d708ed304c4c3",
        "106a1664c77c8d3ddc44d0d956fb24a9c838859119d094f43e5aec3c56007922",
    ]


def test_parameter_root_ignores_layout_and_sees_every_change() -> None:
    x = torch.randn(4, 3, 5, 5)
    assert tensor_root("w", x) == tensor_root("w", x.to(memory_format=torch.channels_last))
    changed = x.clone()
    changed.view(-1)[-1] = torch.nextafter(changed.view(-1)[-1], torch.tensor(9e9))
    roots = {parameter_root({"w": x}), parameter_root({"w": changed}), parameter_root({"v": x})}
    roots |= {parameter_root({"w": x.view(12, 25)}), parameter_root({"w": x.double()})}
    assert len(roots) == 5
    big = torch.zeros(CHUNK_BYTES // 4 + 1)
    assert tensor_root("b", big) != tensor_root("b", big[:-1])


@dataclass(frozen=True, kw_only=True)
class Coupled(Method):
    stage: ClassVar[Stage] = Stage.MIX
    rows: bool = True
    hidden: int = dataclasses.field(default=3, init=False)

    @property
    def couples(self) -> frozenset[Coupling]:
        return frozenset({"rows"}) if self.rows else frozenset({"regions"})

    def batch(self, batch: Batch, at: Position) -> Batch:
        return batch


def test_the_plan_in_words() -> None:
    facts = dataclasses.replace(FACTS, row_coupled_layers=("norm1",), denied=(("copyleft", "trunk"),))
    assert str(make_plan([Late(), Coupled()], facts)).splitlines() == [
        "V = 4 microbatches a step, 8 rows each; rows are coupled by: Coupled, norm1",
        "     mix  Coupled()",
        "   label  Late()",
        "broken  parity: methods change the step: Coupled(), Late()",
        "holds   resume: model, optimizer, method states and the clock are all the state",
        "holds   elastic: any number of ranks that divides V = 4",
        "broken  replayable: no ledger is kept",
        "holds   no_direct_write(copyleft, trunk): its leaf is absent, and its denominator separate",
    ]
    by_hand = make_plan([], Facts(num_microbatches=1, rows_per_microbatch=None, positional_data=True))
    assert by_hand.lines[0] == "V = 1 microbatches a step, as the batch gives rows each; rows are coupled by: nothing"
    assert describe(Coupled(rows=False)) == "Coupled(rows=False)"
    # Tensors and arrays are compared item by item.
    for rows in (torch.zeros(2), torch.zeros(2).numpy()):
        assert describe(Coupled(rows=rows)) == f"Coupled(rows={rows!r})"


def test_methods_by_stage_and_by_hook() -> None:
    early, late, coupled = Early(), Late(), Coupled()
    plan = make_plan([late, coupled, early], FACTS)
    assert plan.methods == (early, coupled, late)
    assert plan.at(Stage.SHAPE, Stage.LABEL) == (early, late)
    assert plan.with_hook("batch") == (coupled,)
    assert plan.with_hook("after") == ()


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({}, set()),
        ({"host_clock": True}, {"resume", "elastic", "replayable"}),
        ({"positional_data": False}, {"resume", "elastic", "replayable"}),
        ({"deterministic": False}, {"resume", "elastic", "replayable"}),
        ({"num_microbatches": 1}, {"elastic"}),
        ({"num_microbatches": 2}, set()),
        ({"has_ledger": False}, {"replayable"}),
    ],
)
def test_each_fact_breaks_its_promises_and_no_others(change: dict[str, object], broken: set[str]) -> None:
    facts = dataclasses.replace(FACTS, **{"has_ledger": True, **change})  # type: ignore[arg-type]
    plan = make_plan([], facts)
    assert {guarantee.name for guarantee in plan.guarantees if not guarantee.holds} == broken
    assert make_plan([Early()], facts).holds("parity") is False
    assert {name for name in ("parity", "resume", "elastic", "replayable") if not plan.holds(name)} == broken


def test_coupled_regions_write_where_coupled_rows_do_not() -> None:
    facts = dataclasses.replace(FACTS, denied=(("a", "trunk"), ("b", "head")))
    pairs, promise = (("a", "trunk"), ("b", "head")), Promise.NO_DIRECT_WRITE
    assert [make_plan([Coupled()], facts).holds(promise, pair) for pair in pairs] == [True, True]
    assert not make_plan([Coupled()], facts).holds(promise, ("b", "trunk"))
    one = make_plan([Coupled()], facts).withdraw(promise, "the moon", pairs[0])
    assert [one.holds(promise, pair) for pair in (*pairs, None)] == [False, True, False]
    assert make_plan([], facts).recalled([("no_direct_write(a, trunk)", "the moon")]).guarantees == (
        make_plan([], facts).withdraw(promise, "the moon", pairs[0]).guarantees
    )
    plan = make_plan([Coupled(rows=False)], facts)
    assert [plan.holds(promise, pair) for pair in pairs] == [False, False]
    assert plan.guarantees[-1].because == "Coupled(rows=False) couples regions"
    with pytest.raises(ValueError, match="no such promise"):
        plan.holds("no such promise")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="elastik"):
        plan.withdraw("elastik", "a slip of the pen")  # type: ignore[arg-type]
    assert not plan.holds(Promise.ISOLATED)


def test_a_promise_that_is_withdrawn_leaves_the_others() -> None:
    plan = make_plan([], FACTS)
    withdrawn = plan.withdraw("resume", "the moon")
    assert [g.holds for g in withdrawn.guarantees] == [True, False, True, False]
    assert [g.because for g in withdrawn.guarantees if g.name == "resume"] == ["the moon"]
    assert (withdrawn.methods, withdrawn.facts) == (plan.methods, plan.facts)


def test_what_an_optimizer_owns_no_method_may_own() -> None:
    facts = dataclasses.replace(FACTS, owned={"labels": "Teacher()"})
    with pytest.raises(PlanError, match=r"Teacher\(\) and Late\(\) both own the labels"):
        make_plan([Late()], facts)
    assert make_plan([Late()], dataclasses.replace(FACTS, owned={"weights": "Teacher()"})).methods == (Late(),)


@dataclass(frozen=True, kw_only=True)
class Interpolating(Coupled):
    owns: ClassVar[frozenset[str]] = frozenset({"loss interpolation"})


def test_two_targets_are_not_mixed_again() -> None:
    with pytest.raises(PlanError, match=r"Interpolating\(\) leaves two targets .* Coupled\(\) can't mix again"):
        make_plan([Interpolating(), Coupled()], FACTS)
    assert len(make_plan([Coupled(), Interpolating()], FACTS).methods) == 2
    assert len(make_plan([Late(), Interpolating()], FACTS).methods) == 2, "only those that mix are asked"


def test_a_tensors_root_is_the_tree_over_its_head_and_its_chunks() -> None:
    x = torch.arange(CHUNK_BYTES // 2, dtype=torch.float32)
    content = struct.pack(f"<{x.numel()}f", *x.tolist())
    assert len(content) == 2 * (1 << 20)
    head = f"w\0torch.float32\0({x.numel()},)".encode()
    leaves = [head, content[: 1 << 20], content[1 << 20 :]]
    hashes = [blake3.blake3(b"\x00" + leaf).digest() for leaf in leaves]
    assert tensor_root("w", x) == naive_root(hashes)
    one = x[: CHUNK_BYTES // 4]
    assert tensor_root("w", one) == naive_root(
        [
            blake3.blake3(b"\x00" + f"w\0torch.float32\0({one.numel()},)".encode()).digest(),
            blake3.blake3(b"\x00" + content[: 1 << 20]).digest(),
        ]
    )
    assert parameter_root({"b": one, "a": x}) == naive_root([tensor_root("a", x), tensor_root("b", one)])
    assert merkle_root([]) == blake3.blake3(b"").digest()


def drive(parameter: Parameter, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        parameter.grad = torch.full_like(parameter, 1.0 + step)
        optimizer.step()


def test_an_optimizers_state_comes_apart_and_goes_back() -> None:
    first, second = Parameter(torch.ones(2, 3)), Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.2}], betas=(0.8, 0.9))
    drive(first, optimizer, 3)
    optimizer.state[first]["note"] = "a fact"
    names = {id(first): "layer/weight", id(second): "bias"}
    tensors, facts = optimizer_tensors(optimizer, names)
    assert set(tensors) == {f"layer/weight/{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    assert tensors["layer/weight/exp_avg"] is optimizer.state[first]["exp_avg"]
    assert facts["state"] == {"layer/weight": {"note": "a fact"}}
    assert [group["lr"] for group in facts["groups"]] == [0.1, 0.2]
    assert all("params" not in group for group in facts["groups"])
    stored = json.loads(json.dumps(facts))

    other = torch.optim.AdamW([{"params": [first], "lr": 9.0}, {"params": [second], "lr": 9.0}])
    drive(second, other, 1)
    restore_optimizer(other, names, tensors, stored)
    assert [(group["lr"], group["betas"]) for group in other.param_groups] == [(0.1, (0.8, 0.9)), (0.2, (0.8, 0.9))]
    assert set(other.state) == {first}, "what had no state has none again"
    assert other.state[first]["note"] == "a fact"
    for key in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(other.state[first][key], optimizer.state[first][key])
    assert other.state[first]["step"] is not optimizer.state[first]["step"], "two optimizers don't share a counter"
    with pytest.raises(CheckpointError, match="has 2 parameter groups, and this one 1"):
        restore_optimizer(torch.optim.AdamW([first]), names, tensors, stored)


def test_a_state_of_any_plain_kind_comes_back() -> None:
    """Lists and dictionaries of tensors (preconditioners), a tensor as a rate, a counter of the whole optimizer."""
    parameter = Parameter(torch.ones(2, 3))
    optimizer = torch.optim.SGD([parameter], lr=torch.tensor(0.1))
    optimizer.param_groups[0] |= {"list": [1, [2.0, None]], "nest": [torch.ones(1)], "code": abs}
    optimizer.state[parameter] = {
        "step": torch.tensor(3.0),
        "factors": [torch.eye(2), {"a": torch.ones(3)}],
        "k": (1, b"x"),
    }
    optimizer.state["whole"] = {"norm": torch.tensor(2.0), "steps": 7}
    tensors, facts = optimizer_tensors(optimizer, {id(parameter): "w"})
    assert all(isinstance(value, torch.Tensor) for value in tensors.values())
    other = torch.optim.SGD([parameter], lr=torch.tensor(9.0))
    restore_optimizer(other, {id(parameter): "w"}, tensors, json.loads(json.dumps(facts)))
    group, state = other.param_groups[0], other.state[parameter]
    assert torch.equal(group["lr"], torch.tensor(0.1))
    assert (group["list"], "code" in group) == ([1, [2.0, None]], False)
    assert torch.equal(group["nest"][0], torch.ones(1))
    assert torch.equal(state["factors"][0], torch.eye(2))
    assert torch.equal(state["factors"][1]["a"], torch.ones(3))
    assert state["k"] == (1, b"x")
    assert other.state["whole"]["steps"] == 7
    assert torch.equal(other.state["whole"]["norm"], torch.tensor(2.0))


def test_a_state_that_is_not_plain_is_refused_by_name() -> None:
    parameter = Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"history": object()}
    with pytest.raises(CheckpointError, match=r"history.*object"):
        optimizer_tensors(optimizer, {id(parameter): "w"})


def test_a_compiled_models_tensors_have_the_models_names() -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    outer = torch.nn.Module()
    outer.add_module("_orig_mod", inner)
    assert set(model_tensors(outer)) == set(inner.state_dict())
    assert model_tensors(outer)["1.running_mean"].data_ptr() == inner.state_dict()["1.running_mean"].data_ptr()


def test_state_is_laid_out_as_its_parameter_again() -> None:
    """A fused optimizer goes through the memory of weights and state as if both had one order."""

    def weights(*, resumes: bool) -> torch.Tensor:
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last))
        optimizer, names = torch.optim.AdamW([parameter], lr=0.1, fused=True), {id(parameter): "p"}
        for step in range(4):
            if resumes and step == 2:
                saved, facts = optimizer_tensors(optimizer, names)
                saved = {name: value.clone(memory_format=torch.contiguous_format) for name, value in saved.items()}
                optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
                restore_optimizer(optimizer, names, saved, facts)
            drawn = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(step))
            parameter.grad = drawn.contiguous(memory_format=torch.channels_last)
            optimizer.step()
        return parameter.detach()

    assert torch.equal(weights(resumes=True), weights(resumes=False))
