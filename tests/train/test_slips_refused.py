"""A slip in what a trainer is given is refused with what it is and the mend, and what is right passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding

from cosmati import Classification, RunConfig
from cosmati.core.method import Method, Position, Stage
from cosmati.core.passing import Passing
from cosmati.errors import BatchError, PlanError
from cosmati.methods import LabelSmoothing
from cosmati.optim import SGD
from cosmati.provenance.authority.errors import DeclaredOnlyError
from cosmati.routing.measures import RowKind
from cosmati.routing.policy_file import PolicyFile
from cosmati.train.assembly import SubStep
from cosmati.train.ingredients import Ingredients
from cosmati.train.refusals import (
    explain,
    refuse_foreign,
    refuse_misgiven,
    refuse_packs,
    refuse_unsavable,
    refuse_waiting,
)
from tests.train.hand_made import POLICY

POLICY_FILE = PolicyFile(version=1, taxonomy="x", rules=())
HEAD = "torch.nn.functional.cross_entropy(model(data[0]), data[1])"


def loss(model: nn.Module, data: Any) -> Tensor:
    return cross_entropy(model(data[0]), data[1])


@dataclass(frozen=True)
class Passes(Method):
    """Goes by what a policy denies."""

    stage: ClassVar[Stage] = Stage.GRADIENT

    def passing(self, passing: Passing, at: Position) -> AbstractContextManager[None]:
        return nullcontext()


def given(**changed: Any) -> Ingredients:
    usual: dict[str, Any] = {
        "model": nn.Linear(2, 2),
        "loss": loss,
        "data": None,
        "optimizers": [SGD(lr=0.1)],
        "methods": [],
        "policy": None,
        "taxonomy": None,
        "config": RunConfig(budget="1ba"),
    }
    return Ingredients(**usual | changed)


def refusal(**changed: Any) -> str:
    with pytest.raises(PlanError) as caught:
        refuse_misgiven(given(**changed))
    return str(caught.value)


def passes(**changed: Any) -> bool:
    """Say that nothing is refused: what is refused raises."""
    refuse_misgiven(given(**changed))
    return True


# What is signed, methods


def test_an_ordinary_run_passes() -> None:
    assert passes()
    assert passes(methods=[LabelSmoothing(smoothing=0.1)], optimizers=(), policy=POLICY_FILE)


def test_what_is_only_declared_is_refused_where_it_has_to_be_signed() -> None:
    with pytest.raises(DeclaredOnlyError, match="require_signed"):
        refuse_misgiven(given(config=RunConfig(budget="1ba", require_signed=True)))


def test_what_is_no_method_is_refused() -> None:
    assert "is not a method" in refusal(methods=[3])


def test_a_method_that_goes_by_a_policy_needs_one() -> None:
    methods = [LabelSmoothing(smoothing=0.1), Passes()]
    told = refusal(methods=methods)
    assert told.startswith("Passes() goes by what a policy denies, and this run has no policy")
    assert "policy=load_policy(...)" in told
    assert passes(methods=methods, policy=POLICY_FILE)


# Models


class DataParallel(nn.Module):
    """Of the user's own, whatever its name."""


class OwnParallel(nn.DataParallel):  # type: ignore[type-arg]
    """Below PyTorch's."""


def test_a_wrapped_model_is_refused_by_the_wrappers_name() -> None:
    told = refusal(model=nn.DataParallel(nn.Linear(1, 1)))
    assert told.startswith("The model is wrapped in DataParallel, which shares out work")
    assert "wrapped.module" in told
    assert "wrapped in DataParallel," in refusal(model=OwnParallel(nn.Linear(1, 1)))


def test_a_wrapped_part_of_a_model_is_refused_by_its_place() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.DataParallel(nn.Linear(1, 1))))
    assert refusal(model=model).startswith("Its 1.0 is wrapped in DataParallel,")


def test_a_module_of_ones_own_may_have_a_wrappers_name() -> None:
    assert passes(model=DataParallel())


# Optimizers


def test_an_optimizer_that_is_no_list_is_refused_by_its_name() -> None:
    assert refusal(optimizers=SGD).startswith("optimizers=SGD isn't a list")
    told = refusal(optimizers=SGD(lr=0.1))
    assert "optimizers=[SGD(...)]" in told


@pytest.mark.parametrize("kind", [SGD, torch.optim.Adam])
def test_an_optimizers_class_is_refused(kind: type) -> None:
    assert refusal(optimizers=[SGD(lr=0.1), kind]).startswith(f"optimizers=[{kind.__name__}] names the class.")


def test_a_scheduler_is_refused_with_the_schedule_in_its_place() -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), 5)
    told = refusal(optimizers=[scheduler])
    assert told.startswith("optimizers holds no optimizer: a PyTorch StepLR sets an optimizer's rates itself.")
    assert "Step(every='5ba', factor=0.1)" in told


@pytest.mark.parametrize(("value", "name"), [(3, "int"), (nn.Linear, "type"), (None, "NoneType")])
def test_what_is_no_optimizer_is_refused_by_its_class(value: object, name: str) -> None:
    assert refusal(optimizers=[value]).startswith(f"optimizers holds a {name}, which is no optimizer.")


def test_built_optimizers_and_configurations_pass() -> None:
    assert passes(optimizers=[SGD(lr=0.1), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)])


# Losses


class Called:
    def __call__(self, model: nn.Module, data: Any) -> Tensor:
        return loss(model, data)


class Module(nn.Module):
    def forward(self, model: nn.Module, data: Any) -> Tensor:
        return loss(model, data)


class OwnCall(nn.Module):
    """Its own call takes one more than a module's."""

    def __call__(self, model: nn.Module) -> Tensor:  # type: ignore[override]
        return super().__call__(model, None)  # type: ignore[no-any-return]

    def forward(self, model: nn.Module, data: Any) -> Tensor:
        return loss(model, data)


class OwnCriterion(nn.modules.loss._Loss):
    """Below PyTorch's, with names of its own."""

    def forward(self, model: nn.Module, data: Any) -> Tensor:
        return loss(model, data)


def of_any(*given: Any) -> Tensor:
    return loss(*given)


def of_any_first(*output: Any, extra: int = 0) -> Tensor:
    return loss(*output)


def with_default(model: nn.Module, data: Any, gain: float = 1.0) -> Tensor:
    return loss(model, data) * gain


@pytest.mark.parametrize(
    "value",
    [loss, Called(), Module(), of_any, of_any_first, with_default, Classification(3), partial(with_default, gain=2.0)],
)
def test_a_loss_that_takes_model_and_data_passes_alone_and_in_a_sub_step(value: Any) -> None:
    assert passes(loss=value)
    assert passes(loss=[SubStep("one", value), SubStep("two", loss)])
    assert passes(loss=[value])


def test_what_is_no_loss_is_refused_by_its_class() -> None:
    assert refusal(loss=3).startswith("The loss is a int. Give a function loss(model, data)")
    assert refusal(loss=None).startswith("The loss is a NoneType.")


def test_a_loss_written_in_c_is_left_to_pytorch() -> None:
    assert passes(loss=torch._C._nn.mse_loss)
    assert passes(loss=max)


@pytest.mark.parametrize(
    ("value", "call"),
    [
        (nn.CrossEntropyLoss(), "CrossEntropyLoss(input, target)"),
        (cross_entropy, "cross_entropy(input, target,"),
        (OwnCriterion(), "OwnCriterion(model, data)"),
        (lambda y_hat, y: y_hat - y, "<lambda>(y_hat, y)"),
    ],
)
def test_a_criterion_is_refused_with_how_it_would_be_called(value: Any, call: str) -> None:
    for wrapped in (value, [SubStep("first", loss), SubStep("second", value)]):
        told = refusal(loss=wrapped)
        assert told.startswith(f"The loss {call}")
        assert "compares outputs with targets, and nothing would call the model" in told
        assert HEAD in told


def test_a_loss_that_takes_another_number_of_arguments_is_refused() -> None:
    told = refusal(loss=lambda model: model)
    assert told.startswith(
        "The loss <lambda>(model) can't be called with two arguments (too many positional arguments)"
    )
    assert HEAD in told
    assert "missing a required argument: 'more'" in refusal(loss=lambda model, data, more: more)
    assert "The loss <lambda>() can't be called" in refusal(loss=lambda: None)
    assert refusal(loss=OwnCall()).startswith("The loss OwnCall(model) can't be called")


def test_a_keyword_that_has_a_criterions_name_is_the_first_only_where_nothing_is_before_it() -> None:
    assert passes(loss=lambda model, output: output)
    assert "nothing would call the model" in refusal(loss=lambda *given, output: output)


# What can't be saved


class Holding(nn.Module):
    """Buffers by name, kept or not."""

    def __init__(self, *, persistent: bool = True, **buffers: Tensor) -> None:
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=persistent)

    def forward(self, model: nn.Module, data: Any) -> Tensor:
        return loss(model, data)


SPARSE, CONJUGATE = torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.complex64).conj()
NEGATIVE = torch.ones(2, dtype=torch.complex64).conj().imag


def unsavable(model: nn.Module, value: Any = loss) -> str:
    with pytest.raises(PlanError) as caught:
        refuse_unsavable(model, value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("value", "kind"), [(SPARSE, "torch.sparse_coo"), (CONJUGATE, "conjugate"), (NEGATIVE, "conjugate")]
)
def test_a_buffer_without_elements_of_its_own_is_refused_by_name_and_kind(value: Tensor, kind: str) -> None:
    assert unsavable(Holding(rows=torch.ones(1), odd=value)).startswith(f"odd ({kind}) has no elements of its own")
    refuse_unsavable(Holding(odd=value, persistent=False), loss)


def test_of_many_such_buffers_five_are_named() -> None:
    told = unsavable(Holding(**{f"b{i}": SPARSE for i in range(7)}))
    assert told.startswith(", ".join(f"b{i} (torch.sparse_coo)" for i in range(5)) + " has no elements")


def test_a_buffer_of_a_loss_is_refused_by_the_losss_number() -> None:
    odd = Holding(odd=SPARSE)
    assert unsavable(nn.Linear(1, 1), odd).startswith("loss 0 odd (torch.sparse_coo) has")
    turns = [SubStep("one", loss), SubStep("two", Holding(rows=torch.ones(1))), SubStep("three", partial(odd.forward))]
    assert unsavable(nn.Linear(1, 1), turns).startswith("loss 2 odd (torch.sparse_coo) has")


def test_dense_state_and_other_objects_in_it_pass() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"seen": 3}

        def set_extra_state(self, state: Any) -> None: ...

    refuse_unsavable(Extra(2, 2), [SubStep("one", Holding(rows=torch.ones(1))), SubStep("two", loss)])
    refused = [name for name, value in Extra(2, 2).state_dict().items() if not isinstance(value, Tensor)]
    assert refused == ["_extra_state"]


class Named(nn.Module):
    """The same parameter with and without the name that compilation adds."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._orig_mod = nn.ParameterDict({name: nn.Parameter(torch.ones(1)) for name in names})
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(1)))


def test_two_tensors_of_one_name_are_refused() -> None:
    told = unsavable(Named("a"))
    assert told.startswith("a stands for two tensors: names are kept without the '_orig_mod.'")
    assert unsavable(Named(*"abcdefg")).startswith("a, b, c, d, e stands for two tensors")
    refuse_unsavable(nn.ModuleDict({"_orig_mod": nn.Linear(1, 1)}), loss)


def test_two_tensors_of_one_name_in_a_loss_are_refused_by_its_number() -> None:
    held = Named("a")
    held.forward = loss  # type: ignore[method-assign, assignment]
    assert unsavable(nn.Linear(1, 1), held).startswith("loss 0 a stands for two tensors")


# Errors of a step


def raised(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return caught.value


def notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def test_labels_and_ids_out_of_range_are_told_in_words() -> None:
    error = raised(lambda: cross_entropy(torch.zeros(2, 3), torch.tensor([0, 5])))
    with pytest.raises(BatchError, match="Labels from 0 to 5"):
        explain(error, nn.Linear(2, 3))
    error = raised(lambda: embedding(torch.tensor([9]), torch.zeros(3, 2)))
    with pytest.raises(BatchError, match="Ids from 9 to 9"):
        explain(error, nn.Linear(2, 3))
    other = raised(lambda: [0].pop(1))
    explain(other, nn.Linear(2, 3))
    assert notes(other) == []


def test_a_single_row_under_batch_norm_is_explained() -> None:
    error = raised(lambda: nn.BatchNorm1d(2)(torch.ones(1, 2)))
    explain(error, nn.Linear(2, 3))
    (note,) = notes(error)
    assert note.startswith("A microbatch had one row, of which BatchNorm takes no statistics")
    for other in (ValueError("more"), TypeError("more than 1 value per channel")):
        explain(other, nn.Linear(2, 3))
        assert notes(other) == []


def test_a_model_that_was_taken_for_its_output_is_explained() -> None:
    model = nn.Linear(2, 3)
    for call in (lambda: model.argmax(1), lambda: model + 1):
        error = raised(call)  # type: ignore[arg-type]
        explain(error, model)
        (note,) = notes(error)
        assert note.startswith("A loss is given the Linear itself, and not what it returns.")
        assert HEAD in note
    for other in (TypeError("of Conv2d"), RuntimeError("of Linear"), ValueError("of Linear")):
        explain(other, model)
        assert notes(other) == []
    explain(None, model)


# Built optimizers


class Closing(torch.optim.SGD):
    """Asks for the loss."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


class Without(torch.optim.SGD):
    """Knows no closure."""

    def step(self) -> Any:  # type: ignore[override]
        return super().step()


def trainable(model: nn.Module) -> frozenset[int]:
    return frozenset(id(parameter) for parameter in model.parameters() if parameter.requires_grad)


def foreign(optimizer: torch.optim.Optimizer, model: nn.Module) -> str:
    with pytest.raises(PlanError) as caught:
        refuse_foreign(optimizer, model, trainable(model))
    return str(caught.value)


@pytest.mark.parametrize("kind", [torch.optim.SGD, Without])
def test_an_optimizer_over_the_models_parameters_passes_frozen_ones_too(kind: Any) -> None:
    model = nn.Linear(2, 2)
    refuse_foreign(kind(model.parameters(), lr=0.1), model, trainable(model))
    model.weight.requires_grad_(requires_grad=False)
    refuse_foreign(kind(model.parameters(), lr=0.1), model, trainable(model))
    refuse_foreign(kind([{"params": [model.bias]}, {"params": [model.weight]}], lr=0.1), model, trainable(model))
    assert trainable(model) == {id(model.bias)}


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    model = nn.Linear(2, 2)
    assert foreign(Closing(model.parameters(), lr=0.1), model).startswith("Closing asks for the loss several times")
    assert foreign(torch.optim.LBFGS(model.parameters()), model).startswith("LBFGS asks for the loss several times")


def test_an_optimizer_of_another_models_parameters_is_refused_by_their_shapes() -> None:
    model, others = nn.Linear(2, 2), [nn.Parameter(torch.zeros(i, 1)) for i in range(1, 8)]
    told = foreign(torch.optim.SGD([{"params": [model.bias]}, {"params": others}], lr=0.1), model)
    assert told.startswith(
        "SGD has 7 parameter(s) that the model lacks (shapes [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1)])"
    )


def test_an_optimizer_of_frozen_parameters_alone_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(requires_grad=False)
    told = foreign(torch.optim.SGD([model.weight], lr=0.1), model)
    assert told.startswith("None of the 1 parameters of SGD are trainable parameters of the model")


# Packs


def test_a_policy_that_defers_is_refused_where_rows_cannot_wait_with_the_classes_that_it_defers() -> None:
    later = replace(POLICY, decision=(("admit", "defer"), ("admit", "gate"), ("defer", "defer")))
    with pytest.raises(PlanError, match=r"^The policy defers free, late, and they're packs: they can't wait"):
        refuse_waiting(later, "they're packs")
    refuse_waiting(replace(POLICY, decision=(("admit", "gate"), ("reject", "gate"), ("admit", "reject"))), "x")


def test_a_class_of_several_kinds_is_deferred_where_one_kind_is() -> None:
    cells = (("admit", "admit"), ("admit", "admit"), ("admit", "admit"), ("defer", "admit"), *[("gate", "gate")] * 2)
    policy = replace(POLICY, kinds=(RowKind("low"), RowKind("high")), decision=cells)
    with pytest.raises(PlanError, match=r"^The policy defers bound, and"):
        refuse_waiting(policy, "x")


ADMITS = replace(POLICY, decision=(("admit", "admit"),) * 3)
BANDED = replace(
    POLICY, kinds=tuple(RowKind(name) for name in "abcdef"), decision=(("admit", "admit"),) * 18, weight=()
)


def test_packs_of_a_policy_with_bands_have_to_say_theirs() -> None:
    with pytest.raises(PlanError, match=r"^The policy has bands or grades \(a, b, c, d, e\), and these packs"):
        refuse_packs(BANDED, [None, None], has_kinds=False)
    refuse_packs(BANDED, [None, 1], has_kinds=True)
    refuse_packs(BANDED, [0, 1], has_kinds=False)
    refuse_packs(ADMITS, [None], has_kinds=False)
    assert len(ADMITS.kinds) == 1


def test_packs_cannot_wait_and_microbatches_of_one_class_can() -> None:
    with pytest.raises(
        PlanError, match=r"^The policy defers late, and packs hold tokens of several classes: they can't"
    ):
        refuse_packs(POLICY, [0, None], has_kinds=False)
    refuse_packs(POLICY, [0, 1, 2], has_kinds=False)
    assert POLICY.decision[2][0] == "defer"
