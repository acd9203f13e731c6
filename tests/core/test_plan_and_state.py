"""The plan's order, refusals and promises; digests of parameters."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import blake3
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cosmati.core.batch import InputKind
from cosmati.core.method import Method, Stage
from cosmati.core.plan import Facts, make_plan
from cosmati.core.state import CHUNK_BYTES, merkle_root, parameter_root, tensor_root
from cosmati.errors import PlanError


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
