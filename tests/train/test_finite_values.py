"""What isn't finite is found in losses, gradients, statistics and state, wherever it stands, and told by its name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmati.core.pieces import Pieces
from cosmati.errors import DivergenceError
from cosmati.train import finite
from cosmati.train.config import RunConfig
from cosmati.train.finite import FiniteCheck, not_a_number, not_finite

CPU, META = torch.device("cpu"), torch.device("meta")
LOSS, BAD = torch.tensor(1.0), [math.nan, math.inf, -math.inf]
MEND = "Lower the learning rate, clip gradients"


def bad_at(index: int, value: float = math.nan, dtype: torch.dtype = torch.float32) -> Tensor:
    tensor = torch.ones(5, dtype=dtype)
    tensor[index] = value
    return tensor


def sparse(value: float, at: Sequence[int] = (1,)) -> Tensor:
    values = torch.full((len(at),), value)
    return torch.sparse_coo_tensor(torch.tensor([at]), values, (4,), check_invariants=True)


class Cuts:
    """Pieces of two ranks: this one's, and what the other one says."""

    def __init__(self, *, other: bool = False) -> None:
        self.other, self.asked = other, list[bool]()

    def norms(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        return [tensor.norm() * 2 for tensor in tensors.values()]

    def anywhere(self, flag: bool) -> bool:
        self.asked.append(flag)
        return flag or self.other

    def whole(self, name: str, piece: Tensor) -> Tensor:
        return piece

    def piece(self, name: str, whole: Tensor) -> Tensor:
        return whole


@pytest.mark.parametrize("device", [CPU, META])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("value", BAD)
def test_loss_gradients_and_statistics_are_told_apart(device: torch.device, keeps: bool, value: float) -> None:
    good, bad = torch.ones(5), bad_at(3, value)

    def said(loss: Tensor, gradients: Any, statistics: Sequence[Tensor] = (), **known: bool) -> str:
        check = FiniteCheck(RunConfig(), device)
        check.keeps_norms = keeps
        try:
            check.check(loss, 4, gradients, statistics, **known)
        except DivergenceError as error:
            first, *_, last = str(error).split(". ")
            return (
                first if last == "RunConfig(on_divergence='skip') leaves such steps out instead of stopping." else last
            )
        return ""

    of_gradient = "A gradient isn't finite at step 4, and none is committed"
    of_statistic = "A BatchNorm statistic isn't finite at step 4, and nothing of the step is committed"
    of_loss = f"The loss is {value} at step 4 and isn't committed"
    assert said(LOSS, None) == said(LOSS, []) == said(LOSS, [good, good], [good]) == ""
    assert said(torch.tensor(value), [bad], [bad]) == of_loss, "that is said first"
    assert said(LOSS, [good, bad], [bad]) == said(LOSS, [bad, good]) == of_gradient
    assert said(LOSS, Pieces({"a": good, "b": bad})) == of_gradient
    assert said(LOSS, [good], [good, bad]) == said(LOSS, None, [bad]) == of_statistic
    assert said(LOSS, [bad], is_known=True) == ""
    assert said(LOSS, [bad], [bad], is_known=True) == of_statistic
    assert said(torch.tensor(value), [], is_known=True) == of_loss


@pytest.mark.parametrize("device", [CPU, META])
def test_finite_gradients_whose_norm_is_beyond_their_type_are_finite(device: torch.device) -> None:
    check = FiniteCheck(RunConfig(), device)
    check.check(LOSS, 0, [torch.full((4,), 3e38)])
    assert check.gradient_norm == math.inf


def test_a_check_that_has_refused_goes_on_with_what_comes() -> None:
    check = FiniteCheck(RunConfig(), CPU)
    check.keeps_norms = False
    bads: tuple[tuple[list[Tensor], list[Tensor]], ...] = (([bad_at(0)], []), ([], [bad_at(0)]))
    for bad in bads:
        with pytest.raises(DivergenceError):
            check.check(LOSS, 0, *bad)
        check.check(LOSS, 1, [torch.ones(2)], [torch.ones(2)])
    assert check._found == 0


@pytest.mark.parametrize("device", [CPU, META])
@pytest.mark.parametrize("keeps", [True, False])
def test_of_pieces_every_rank_is_asked_and_any_tells(device: torch.device, keeps: bool) -> None:
    config = RunConfig(check_every=5)

    def asked(cut: Cuts, piece: Tensor, *, is_known: bool = False) -> list[bool]:
        check = FiniteCheck(config, device)
        check.keeps_norms = keeps
        check.check(LOSS, 3, Pieces({"a": piece, "b": torch.ones(3)}, cut=cut), is_known=is_known)
        assert not keeps or check.gradient_norm == pytest.approx(2 * math.sqrt(float(piece.norm()) ** 2 + 3))
        return cut.asked

    looks = device == META or not keeps
    assert asked(Cuts(), torch.ones(2)) == ([False] if looks else [])
    assert asked(Cuts(other=True), torch.ones(2), is_known=True) == []
    for cut, piece in ((Cuts(other=True), torch.full((2,), math.nan if not looks else 1.0)), (Cuts(), bad_at(0))):
        with pytest.raises(DivergenceError, match="A gradient isn't finite at step 3"):
            asked(cut, piece)
        assert len(cut.asked) == 1
    with pytest.raises(DivergenceError, match="A BatchNorm statistic"):
        FiniteCheck(config, device).check(LOSS, 3, Pieces({}, cut=Cuts()), [bad_at(1)])


@pytest.mark.parametrize("what", [(bad_at(0), None, ()), (LOSS, [bad_at(4)], ()), (LOSS, None, [bad_at(1)])])
def test_an_accelerator_keeps_what_it_found_until_the_next_look(what: Any) -> None:
    check = FiniteCheck(RunConfig(check_every=3), META)
    loss, gradients, statistics = what
    check.check(LOSS, 0, [torch.ones(2)])
    check.check(loss.sum(), 1, gradients, statistics)
    with pytest.raises(DivergenceError, match=r"A loss or a gradient in the 3 steps up to 2 isn't finite\. No run_f"):
        check.check(LOSS, 2)
    check = FiniteCheck(RunConfig(check_every=3), META)
    check.check(LOSS, 0, [bad_at(0)], is_known=True)
    check.look(1)
    loss = torch.tensor(2.0)
    check.check(loss, 2, [torch.ones(2)], [torch.ones(2)])
    assert loss == 2


def test_the_norm_is_of_what_was_looked_at_last_and_may_be_asked_for_later() -> None:
    check = FiniteCheck(RunConfig(), CPU)
    assert check.keeps_norms
    assert math.isnan(check.gradient_norm)
    check.check(LOSS, 0, [torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])])
    assert check.gradient_norm == 5
    later = check.norm_later()
    check.check(LOSS, 1, [torch.tensor([2.0]), sparse(4.0, [1, 1])])
    assert later() == 5
    assert check.gradient_norm == pytest.approx(math.sqrt(4 + 64))
    check.check(LOSS, 2, [])
    assert math.isnan(check.gradient_norm)
    check.keeps_norms = False
    check.check(LOSS, 3, [torch.ones(2)])
    assert math.isnan(check.gradient_norm)
    assert finite._numbers([torch.tensor(2.0), torch.tensor(0.5, dtype=torch.float64)]) == [2.0, 0.5]
    assert finite._numbers([torch.tensor(1 / 3, dtype=torch.float64)]) == [1 / 3]
    assert finite._numbers([]) == []


@pytest.mark.parametrize("value", [*BAD, 1.0])
@pytest.mark.parametrize(
    "kind",
    [
        lambda value: [bad_at(2, value)],
        lambda value: [torch.ones(2), bad_at(2, value, torch.bfloat16), torch.ones(1)],
        lambda value: [bad_at(2, value, torch.float64), torch.ones(2)],
        lambda value: [torch.ones(2), bad_at(1, value).to(torch.complex64) * 1j],
        lambda value: [sparse(value)],
        lambda value: [torch.tensor(value).expand(3, 3)],
        lambda value: [bad_at(0, value).requires_grad_()],
        lambda value: [torch.ones(2, dtype=torch.long), torch.ones(0), torch.tensor(value)],
    ],
)
def test_a_flag_is_raised_for_any_kind_of_tensor(kind: Callable[[float], list[Tensor]], value: float) -> None:
    tensors = kind(value)
    before = [tensor.detach().clone() for tensor in tensors]
    assert bool(finite._flag(tensors, torch.zeros(()))) == (value != 1)
    assert all(str(a) == str(b.detach()) for a, b in zip(before, (t.detach() for t in tensors), strict=True))
    assert finite._flag([], found := torch.zeros(())) is found


def test_state_with_elements_of_8_bits_or_none_or_whole_numbers_is_looked_at() -> None:
    narrow = torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn)
    tensors = {
        "narrow": narrow,
        "good": torch.ones(2).to(torch.float8_e5m2),
        "empty": torch.empty(0),
        "whole": torch.ones(2, dtype=torch.int32),
        "flags": torch.ones(2, dtype=torch.bool),
        "conjugate": torch.tensor([1 + 1j, complex(1, math.inf)]).conj(),
        "twice": sparse(3e38, [1, 1]),
        "scalar": torch.tensor(math.inf),
        "follows": bad_at(0).requires_grad_(),
        "least": bad_at(1, -math.inf),
    }
    assert not_finite(tensors) == {"narrow", "conjugate", "twice", "scalar", "follows", "least"}
    assert not_finite({}) == set()


def test_places_of_plain_values_that_are_no_number() -> None:
    facts = {"groups": [{"lr": math.nan, "betas": (0.9, math.nan)}, {"lr": math.inf, "name": "nan"}], "n": 3, "x": None}
    assert not_a_number(facts, "optimizer") == ["optimizer groups 0 lr", "optimizer groups 0 betas 1"]
    assert not_a_number(facts) == ["groups 0 lr", "groups 0 betas 1"]
    assert not_a_number(math.nan, "here") == ["here"]
    assert not_a_number(math.inf, "here") == not_a_number({math.nan}, "here") == not_a_number("nan") == []


def test_what_a_checkpoint_is_about_to_hold_is_refused_by_the_first_names() -> None:
    check = FiniteCheck(RunConfig(run_folder=Path("somewhere")), CPU)
    asked: list[bool] = []

    def said(tensors: Any, free: Any = (), facts: Any = (), anywhere: Callable[[bool], bool] = bool) -> str:
        with pytest.raises(DivergenceError) as error:
            check.publish(tensors, free, facts, anywhere)
        found = re.fullmatch(rf"(.*): not saved\. Checkpoints before it are whole\. {MEND}.*", str(error.value))
        assert found is not None
        return found[1]

    def elsewhere(flag: bool) -> bool:
        asked.append(flag)
        return True

    bad = bad_at(0)
    assert said({"b": bad, "a": bad, "good": torch.ones(2)}) == "a, b are not finite"
    assert said({"b": bad, "a": bad}, ["a", "c"]) == "b is not finite"
    assert said(dict.fromkeys("gfedcba", bad), (), math.nan) == "a, b, c, d, e are not finite"
    assert said({"b": bad}, (), {"lr": math.nan}) == "b, optimizer lr are not finite"
    assert said({"good": torch.ones(2)}, (), {"lr": math.nan}) == "optimizer lr is not finite"
    assert said({"good": torch.ones(2)}, anywhere=elsewhere) == "a value on another rank is not finite"
    assert said({"a": bad}, anywhere=elsewhere) == "a is not finite"
    assert asked == [False, True]
    check.publish({"a": bad, "good": torch.ones(2)}, ["a"], {"lr": math.inf})
    check.publish({})
    with pytest.raises(DivergenceError, match="No run_folder is set, so there's no checkpoint"):
        FiniteCheck(RunConfig(), CPU).publish({"a": bad})


@pytest.mark.parametrize("form", ["to_sparse_csr", "to_sparse_csc", "to_sparse"])
@pytest.mark.parametrize("value", [1.0, math.nan, math.inf])
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support:UserWarning")
def test_sparse_tensors_are_looked_at_in_what_they_hold(form: str, value: float) -> None:
    held = getattr(torch.diag(torch.tensor([1.0, value])), form)()
    assert not_finite({"held": held}) == (set() if value == 1.0 else {"held"})
