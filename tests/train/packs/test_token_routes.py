"""What tokens of packs may teach: counts by class, what is withheld, masks, and modules that run apart, settled."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cosmati.core.batch import TOMBSTONE, Batch, Lineage
from cosmati.core.labels import IGNORED
from cosmati.errors import PlanError
from cosmati.routing.token_masks import UntappedError
from cosmati.train import token_routes
from cosmati.train.token_routes import (
    RunApart,
    TokenRoute,
    count_labels_by_class,
    count_tokens,
    masking,
    refuse_compiled,
    token_classes,
    without_withheld,
)

CPU = torch.device("cpu")
CLASSES = [[0, 0, 1, 2], [1, 1, TOMBSTONE, TOMBSTONE], [2, 0, 0, 0]]


def pack(data: Any = None, classes: Sequence[Sequence[int]] = CLASSES, row_ids: Sequence[int] = (7, 8, 9)) -> Batch:
    ids = torch.tensor(classes)
    given = (torch.arange(12).reshape(3, 4) + 1, torch.arange(12).reshape(3, 4) + 2) if data is None else data
    return Batch(given, Lineage(torch.tensor(row_ids), torch.ones(len(ids)), token_class_ids=ids), None)


def route(*weights: Sequence[float], mixed: Sequence[int] = (), withheld: Sequence[int] = ()) -> TokenRoute:
    table = torch.tensor([*weights, [0.0] * len(weights[0])], dtype=torch.float64)
    return TokenRoute(table, frozenset(mixed), tuple(withheld), tuple((0, 0, k) for k in range(len(weights))))


def plain_rows() -> Batch:
    return Batch((torch.zeros(3, 4), torch.zeros(3)), Lineage.of_rows(0, 3), 1)


def test_classes_of_one_cell_are_grouped_in_their_order() -> None:
    cells = ((0, 0, 1), (1, 0, 0), (0, 0, 1), (0, 1, 1), (1, 0, 0))
    one = TokenRoute(torch.zeros(6, 1), frozenset(), (), cells)
    assert list(one.groups.items()) == [((0, 0, 1), [0, 2]), ((1, 0, 0), [1, 4]), ((0, 1, 1), [3])]


def test_teachers_are_the_labels_of_classes_with_any_weight() -> None:
    one = route([1.0, 0.0, 0.5], [0.0, 0.0, 2.0], [0.25, 0.0, 0.0])
    labels = torch.tensor([3.0, 5.0, 11.0], dtype=torch.float64)
    found = one.teachers(labels)
    assert found.tolist() == [3 + 11, 0, 3 + 5]
    assert found.dtype == torch.float64


def test_tokens_of_rows_that_are_absent_have_no_class() -> None:
    assert token_classes(pack()).tolist() == CLASSES
    gone = pack(row_ids=(7, TOMBSTONE, 9))
    assert token_classes(gone).tolist() == [CLASSES[0], [TOMBSTONE] * 4, CLASSES[2]]
    assert gone.lineage.token_class_ids is not None
    assert gone.lineage.token_class_ids.tolist() == CLASSES, "of the batch nothing is changed"


def test_tokens_are_counted_by_class_and_those_of_other_rows_are_none() -> None:
    found = count_tokens([pack(), plain_rows(), pack(row_ids=(7, 8, TOMBSTONE))], 4, CPU)
    assert found.tolist() == [[5, 3, 2, 0], [0] * 4, [2, 3, 1, 0]]
    assert found.dtype == torch.float64
    assert count_tokens([], 2, CPU).shape == (0, 2)
    assert count_tokens([pack()], 3, torch.device("meta")).device.type == "meta"


def test_withheld_tokens_are_zero_and_nobody_predicts_them() -> None:
    batch = pack()
    given, target = batch.data
    for one in (None, route([1.0], [1.0], [1.0])):
        assert without_withheld(batch, one) is batch
    found = without_withheld(batch, route([1.0], [0.0], [0.0], withheld=(1, 2)))
    gone = np.isin(np.array(CLASSES), (1, 2))
    assert np.array_equal(found.data[0].numpy(), np.where(gone, 0, given.numpy()))
    assert np.array_equal(found.data[1].numpy(), np.where(gone, IGNORED, target.numpy()))
    assert batch.data[0] is given
    assert bool((given != 0).all())
    named = without_withheld(pack({"input": given, "target": target}), route([0.0], [1.0], [1.0], withheld=(0,)))
    assert (named.data["input"] == 0).tolist() == [[k == 0 for k in row] for row in CLASSES]


class Shifts(nn.Module):
    """A model that may have a loss of its own, whose labels it shifts."""


def counted(target: Tensor, given: Tensor | None = None, *, classes: int = 3, batch: Batch | None = None) -> Tensor:
    data = (torch.zeros(target.shape[0], target.shape[-1]) if given is None else given, target)
    return count_labels_by_class(nn.Identity(), batch or pack(data), classes)


def test_labels_are_counted_by_the_class_of_their_token() -> None:
    target = torch.arange(12).reshape(3, 4)
    target[0, 1] = target[2, 3] = target[1, 2] = IGNORED
    found = counted(target, classes=4)
    assert found.tolist() == [3, 3, 2, 0]
    assert found.dtype == torch.float64
    gone = pack((torch.zeros(3, 4), target), row_ids=(TOMBSTONE, 8, 9))
    assert counted(target, batch=gone).tolist() == [2, 2, 1]


def test_probabilities_are_a_label_where_any_is_not_zero() -> None:
    target = torch.zeros(3, 5, 4)
    target[0, 3, 0] = target[0, 4, 2] = target[1, 0, 1] = target[2, 2, 0] = 0.5
    target[2, :, 1] = -0.25
    assert counted(target).tolist() == [2, 2, 1]


@pytest.mark.parametrize("verdict", [True, False, None])
@pytest.mark.parametrize("name", ["labels", "target"])
def test_a_model_that_shifts_labels_itself_leaves_out_each_rows_first(
    monkeypatch: pytest.MonkeyPatch, verdict: bool | None, name: str
) -> None:
    asked: list[nn.Module] = []
    model = Shifts()

    def predicts(one: nn.Module) -> bool | None:
        asked.append(one)
        return verdict

    monkeypatch.setattr(token_routes, "predicts_next", predicts)
    data = {"input_ids" if name == "labels" else "input": torch.zeros(3, 4), name: torch.ones(3, 4, dtype=torch.long)}
    found = count_labels_by_class(model, pack(data), 3)
    shifts = name == "labels" and bool(verdict)
    assert found.tolist() == ([4, 2, 1] if shifts else [5, 3, 2])
    assert asked == ([model] if name == "labels" else [])


@pytest.mark.parametrize(
    ("given", "labels"), [((3, 4), (3, 5)), ((3, 5), (3, 4)), ((2, 4), (3, 4)), ((3, 4), (2, 4)), ((3, 4), (3, 7, 5))]
)
def test_packs_whose_length_a_method_has_changed_are_refused(given: tuple[int, ...], labels: tuple[int, ...]) -> None:
    target = torch.ones(labels) if len(labels) == 3 else torch.ones(labels, dtype=torch.long)
    shape = labels[0], labels[-1]
    with pytest.raises(PlanError, match=r"tokens \(3, 4\).*cuts their lineage too") as caught:
        counted(target, torch.zeros(given))
    assert f"input is {given} with labels {shape}" in str(caught.value)
    assert counted(torch.ones(3, 4, dtype=torch.long), torch.zeros(3, 4, 16)).sum() == 10, "of embeddings"


def test_packs_without_an_input_or_target_that_can_be_told_are_refused() -> None:
    with pytest.raises(PlanError, match=r"the target of packs is a tensor .*, not a list"):
        without_withheld(pack((torch.zeros(3, 4), [1, 2])), route([0.0], withheld=(0,)))
    with pytest.raises(PlanError, match=r"the input of packs is a tensor .*, not a ndarray"):
        without_withheld(pack((np.zeros((3, 4)), torch.zeros(3, 4))), route([0.0], withheld=(0,)))
    for which, data in (("input", {"target": torch.zeros(3, 4)}), ("target", {"input": torch.zeros(3, 4)})):
        with pytest.raises(PlanError, match=f"packs need an {which} that can be told"):
            without_withheld(pack(data), route([0.0], withheld=(0,)))


def test_compiled_blocks_are_refused() -> None:
    with pytest.raises(PlanError, match="Compiled blocks show no layer"):
        refuse_compiled()


def learners(*regions: int) -> list[Any]:
    return [SimpleNamespace(name=f"p{i}", region=r, tensor=nn.Parameter(torch.ones(2))) for i, r in enumerate(regions)]


def test_only_mixed_regions_are_masked_by_what_each_token_may_teach() -> None:
    parameters = learners(0, 1, 2, 1)
    weights = [1.0, 0.0, 0.5], [1.0, 1.0, 0.0], [1.0, 0.0, 2.0]
    assert masking(None, pack(), parameters) is None
    assert masking(route(*weights), pack(), parameters) is None
    masks = masking(route(*weights, mixed=(1, 2)), pack(), parameters)
    assert masks is not None
    assert list(masks._names.values()) == ["p1", "p2", "p3"]
    expected = {1: [0.0, 1.0, 0.0, 0.0], 2: [0.5, 0.0, 2.0, 0.0]}
    for one in parameters[1:]:
        mask = masks._masks[id(one.tensor)]
        wanted = torch.tensor([[expected[one.region][k] for k in row] for row in CLASSES], dtype=torch.float64)
        assert torch.equal(mask.admits, wanted != 0)
        assert mask.scale is None if one.region == 1 else torch.equal(mask.scale, wanted)  # type: ignore[arg-type]
    assert (masks._keep, masks._zeroed, masks._apart) == (False, frozenset(), {})


def test_masks_know_what_is_zeroed_and_kept_and_what_runs_apart() -> None:
    parameters, asked = learners(0, 1), list[object]()
    module = nn.Linear(1, 1)

    def around(names: Any, zeroed: Any) -> dict[str, nn.Module]:
        asked.append((list(names), zeroed))
        return {"m": module}

    apart: Any = SimpleNamespace(around=around)
    one = route([1.0, 0.0], [1.0, 1.0], [0.0, 1.0], mixed=(1,))
    masks = masking(one, pack(), parameters, apart, zeroed=("p1",), keep=True)
    assert masks is not None
    assert asked == [(["p1"], ("p1",))]
    assert masks._keep
    assert masks._zeroed == {id(parameters[1].tensor)}
    assert masks._apart == {"m": module}


class Blocks(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.BatchNorm1d(2))
        self.head = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))


def made() -> tuple[Blocks, RunApart]:
    model = Blocks()
    return model, RunApart(model, {"": model})


def test_larger_and_larger_modules_run_apart_until_an_attempt_succeeds() -> None:
    model, apart = made()
    weight, rounds = "body.0.1.weight", list[list[str]]()

    def attempt() -> str:
        rounds.append([*apart.around(["head.bias", weight])])
        model.count.add_(1)
        if len(rounds) < 4:
            raise UntappedError("read otherwise", [weight])
        return "done"

    with pytest.warns(UserWarning, match=r"as many times their time: body\. Packs of one class") as told:
        assert apart.settled(attempt, route([1.0, 0.0], [0.0, 1.0], mixed=(1,))) == "done"
    assert rounds == [[], ["body.0.1"], ["body.0"], ["body"]]
    assert apart.around([weight]) == {"body": model.body}
    assert len(told) == 1
    assert model.count == 1, "an attempt that failed leaves no trace"


def test_where_the_whole_model_cannot_run_apart_the_error_is_the_last_one() -> None:
    model, apart = made()
    rounds: list[list[nn.Module]] = []

    def attempt() -> None:
        rounds.append([*apart.around(["head.bias"]).values()])
        raise UntappedError("read otherwise", ["head.bias"])

    with pytest.raises(UntappedError, match="read otherwise"):
        apart.settled(attempt, route([1.0], mixed=(0,)))
    assert rounds == [[], [model.head], [model]]


def test_an_attempt_that_has_waited_for_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, apart = made()
    number = [3]
    monkeypatch.setattr(token_routes, "num_collectives", number.copy)

    def attempt() -> None:
        number[0] += 1
        raise UntappedError("read otherwise", ["head.bias"])

    with pytest.raises(PlanError, match="The model or its loss ") as caught:
        apart.settled(attempt, None)
    assert not isinstance(caught.value, UntappedError)


def test_state_is_remembered_where_regions_or_zeros_are_new_and_never_otherwise() -> None:
    _, apart = made()
    first, second = route([1.0, 0.0], mixed=(0,)), route([1.0, 0.0], mixed=(0, 1))
    remembers = []

    def attempt() -> str:
        remembers.append(apart._put_back is not None)
        apart.around([], ["head.bias"] if len(remembers) == 5 else [])
        remembers.append(apart._put_back is not None)
        return "x"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one in (first, first, None, second, first):
            assert apart.settled(attempt, one) == "x"
    assert remembers[0::2] == [True, False, False, True, False]
    assert remembers[1::2] == [True, False, True, True, False]
    assert apart._known == {0, 1}
    assert apart._zeroed == {"head.bias"}


def test_modules_within_others_that_run_apart_are_not_named() -> None:
    _, apart = made()
    apart._around = {"a": "body", "b": "body.0", "c": "bodyguard", "d": "head"}
    with pytest.warns(UserWarning, match=r"their time: body, bodyguard, head\. "):
        apart._tell()
    apart._around["e"] = ""
    with pytest.warns(UserWarning, match=r"their time: the whole model\. "):
        apart._tell()


def test_a_model_of_one_parameter_is_masked_too() -> None:
    masks = masking(route([1.0], [0.0], [0.0], mixed=(0,)), pack(), learners(0))
    assert masks is not None
    assert list(masks._names.values()) == ["p0"]
