"""The fixed microbatch: what is drawn for which batches, what a loss may return, and when there's none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.loss import Loss
from cosmati.core.rng import DefaultGenerators
from cosmati.train.probe import Probe

CPU = torch.device("cpu")
Draw = Callable[[Any], Any]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Result:
    """What a model of somebody else's library returns."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


def losses(probe: Probe, *taken: Callable[[nn.Module, Any], Any], model: nn.Module | None = None) -> Any:
    return probe.losses(model or nn.Identity(), list(taken), DefaultGenerators(CPU), CPU)


@pytest.fixture
def drawn(tmp_path: Path) -> Draw:
    """What a loss is given in the place of a batch; by a file, since the loss runs on copies of all that it holds."""

    def draw(data: Any) -> Any:
        def loss(_: nn.Module, given: Any) -> Tensor:
            torch.save(given, tmp_path / "given")
            return torch.zeros(())

        probe = Probe()
        probe.see(data)
        assert losses(probe, loss) is not None
        return torch.load(tmp_path / "given", weights_only=True)

    return draw


def test_a_loss_may_be_a_number_in_many_forms() -> None:
    probe = Probe()
    probe.see(torch.zeros(4))
    found = losses(
        probe,
        lambda _, data: data.sum(),
        lambda _, data: {"loss": data.sum(), "logits": data},
        lambda _, data: Result(data.sum()),
        lambda _, data: Loss(data.sum(), 4),
        lambda _, data: Loss(data.sum(), 4, aux={"z": torch.tensor(1.0)}),
    )
    total = float.fromhex(found[0])
    assert 0 < total < 4
    assert found[:3] == [total.hex()] * 3
    assert found[3] == (total / 4).hex()
    assert found[4] == float(torch.tensor(total / 4) + 1).hex()


def test_a_loss_that_is_no_number_or_makes_no_sense() -> None:
    probe = Probe()
    probe.see(torch.zeros(4))
    found = losses(
        probe,
        lambda _, data: data.sum() * torch.nan,
        lambda _, data: data.sum() * torch.inf,
        lambda _, data: data["tokens"],
        lambda _, data: data,
    )
    assert found == ["nan", "inf", None, None]


def test_losses_see_the_same_numbers_each_time_whatever_they_do_with_them() -> None:
    probe = Probe()
    probe.see(torch.zeros(4))

    def spoils(_: nn.Module, data: Tensor) -> Tensor:
        return data.mul_(2).sum()

    def draws(_: nn.Module, data: Tensor) -> Tensor:
        return (data * torch.rand(4)).sum()

    before = torch.get_rng_state()
    first = losses(probe, spoils, spoils, draws, draws)
    assert first[0] == first[1]
    assert first[2] == first[3] != first[0]
    assert losses(probe, spoils, spoils, draws, draws) == first
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_numbers_with_a_fraction_are_drawn_evenly(drawn: Draw, dtype: torch.dtype) -> None:
    found = drawn(torch.full((500,), 7, dtype=dtype))
    assert (found.shape, found.dtype) == ((500,), dtype)
    real = found.real if dtype.is_complex else found
    assert 0 <= float(real.min()) < 0.1
    assert 0.9 < float(real.max()) <= 1
    assert not dtype.is_complex or bool((found.imag == 0).all())


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
@pytest.mark.parametrize("largest", [0, 1, 5])
def test_integers_are_drawn_up_to_the_largest_that_was_seen(drawn: Draw, dtype: torch.dtype, largest: int) -> None:
    data = torch.zeros(500, dtype=dtype)
    data[3] = largest
    found = drawn(data)
    assert (found.shape, found.dtype) == (data.shape, dtype)
    assert found.unique().tolist() == list(range(largest + 1))


def test_negative_integers_are_drawn_as_zeros(drawn: Draw) -> None:
    assert drawn(torch.full((50,), -3)).unique().tolist() == [0]


def test_truths_are_drawn_half_and_half(drawn: Draw) -> None:
    found = drawn(torch.zeros(500, dtype=torch.bool))
    assert found.dtype == torch.bool
    assert 200 < int(found.sum()) < 300


def test_an_empty_tensor_is_drawn(drawn: Draw) -> None:
    assert drawn({"a": torch.zeros(0, dtype=torch.long), "b": torch.zeros(0, 3)})["b"].shape == (0, 3)


def test_a_mapping_is_drawn_in_the_order_of_its_names(drawn: Draw) -> None:
    one, other = drawn({"a": torch.zeros(3), "b": torch.zeros(3)}), drawn({"b": torch.zeros(3), "a": torch.zeros(3)})
    assert list(one) == ["a", "b"]
    assert list(other) == ["b", "a"]
    assert torch.equal(one["a"], other["a"])
    assert torch.equal(one["b"], other["b"])
    assert not torch.equal(one["a"], one["b"])


def test_batches_of_batches_are_drawn_each_tensor_in_its_turn(drawn: Draw) -> None:
    found = drawn([torch.zeros(2), (torch.zeros(2), {"c": torch.zeros(2)})])
    flat = torch.stack([found[0], found[1][0], found[1][1]["c"]])
    assert torch.equal(flat, drawn(torch.zeros(6)).view(3, 2))


@pytest.mark.parametrize(
    "data",
    [
        [torch.zeros(2), "text"],
        {"x": torch.zeros(2), "more": [torch.zeros(2), 3]},
        torch.zeros(2, 2).to_sparse(),
        {"x": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)},
        [torch.zeros(2), torch.zeros(3).to_sparse()],
        None,
        7,
    ],
    ids=["text", "number", "sparse", "nested", "sparse in a list", "none", "integer"],
)
def test_there_is_none_of_what_is_not_all_tensors(data: Any) -> None:
    probe = Probe()
    probe.see(data)
    assert probe.specs is None
    assert losses(probe, lambda _, __: torch.zeros(())) is None


def test_the_first_microbatch_is_kept() -> None:
    probe = Probe()
    probe.see([torch.zeros(2), "text"])
    probe.see(torch.zeros(3, dtype=torch.long))
    probe.see(torch.zeros(5))
    assert probe.specs == [([3], "int64", 1)]
    assert losses(probe, lambda _, data: torch.tensor(float(len(data)))) == [(3.0).hex()]


def test_a_resumed_run_takes_the_numbers_of_before() -> None:
    probe, later = Probe(), Probe([([2, 3], "float32", 1), ([4], "int64", 9)])
    probe.see([torch.ones(2, 3), torch.full((4,), 8)])
    assert probe.specs == later.specs == [([2, 3], "float32", 1), ([4], "int64", 9)]
    later.see([torch.zeros(7, 7), torch.zeros(7)])

    def loss(_: nn.Module, data: Any) -> Tensor:
        return data[0].sum() + data[1].sum()

    assert losses(probe, loss) == losses(later, loss)


@pytest.mark.parametrize(
    "specs",
    [[], [([2], "float32", 1)], [([2], "no_dtype", 1)] * 2, [([-1], "float32", 1)] * 2, [([2], "int8", 1 << 80)] * 2],
    ids=["none", "one of two", "a dtype of a later PyTorch", "a shape below zero", "beyond 64 bits"],
)
def test_there_is_none_where_what_was_kept_does_not_fit(specs: list[Any]) -> None:
    probe = Probe(specs)
    probe.see([torch.zeros(2), torch.zeros(2)])
    assert losses(probe, lambda _, __: torch.zeros(())) is None


def test_there_is_none_before_a_microbatch_was_seen() -> None:
    assert losses(Probe([([2], "float32", 1)]), lambda _, __: torch.zeros(())) is None


def test_there_is_none_of_a_compiled_model() -> None:
    probe, model = Probe(), nn.Linear(1, 1)
    probe.see(torch.zeros(2))
    model._orig_mod = model.weight  # as torch.compile names what it holds
    assert losses(probe, lambda _, __: torch.zeros(()), model=model) is None
    assert losses(probe, lambda _, __: torch.zeros(())) == [(0.0).hex()]


def test_a_loss_that_is_not_the_same_twice_is_asked_no_more(tmp_path: Path) -> None:
    probe, calls = Probe(), tmp_path / "calls"
    probe.see(torch.zeros(2))

    def loss(_: nn.Module, __: Tensor) -> Tensor:
        with calls.open("a") as file:
            file.write(".")
        return torch.tensor(float(calls.stat().st_size))

    assert losses(probe, loss) is None
    assert calls.read_text() == ".."
    assert losses(probe, loss) is None
    assert calls.read_text() == ".."


def test_what_cannot_be_copied_is_asked_no_more(tmp_path: Path) -> None:
    asked = tmp_path / "asked"

    class Alone(nn.Module):
        def __deepcopy__(self, memo: object) -> Alone:
            with asked.open("a") as file:
                file.write(".")
            msg = "there is one"
            raise TypeError(msg)

    probe = Probe()
    probe.see(torch.zeros(2))
    assert losses(probe, lambda _, __: torch.zeros(()), model=Alone()) is None
    size = asked.stat().st_size
    assert size > 0
    assert losses(probe, lambda _, __: torch.zeros(()), model=Alone()) is None
    assert asked.stat().st_size == size


def test_the_model_is_in_eval_mode_and_stays_in_its_own() -> None:
    probe, model = Probe(), nn.Dropout(0.5)
    probe.see(torch.ones(64))
    dropped, plain = (
        losses(probe, one, model=model) for one in (lambda m, data: m(data).sum(), lambda _, data: data.sum())
    )
    assert dropped == plain
    assert model.training
