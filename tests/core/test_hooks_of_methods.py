"""A method's hooks are asked where it has them, take what the loop gives, and are told where in the run they stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch, Lineage
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Classification, huggingface_loss
from cosmati.core.method import HOOKS, Method, Position, Stage, check_hooks, operated, overrides
from cosmati.core.pieces import Pieces
from cosmati.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Plain(Method):
    stage: ClassVar[Stage] = Stage.GRADIENT


@dataclass(frozen=True, kw_only=True)
class Steady(Plain):
    def dilation(self) -> float:
        return 2.0


@dataclass(frozen=True, kw_only=True)
class Fading(Steady):
    def gradients(self, gradients: Pieces, weights: Pieces, at: Position) -> Pieces:
        return gradients.scaled(1 - at.elapsed)


@dataclass(frozen=True, kw_only=True)
class FadingWithin(Steady):
    def gradients(self, gradients: Pieces, weights: Pieces, at: Position) -> Pieces:
        return gradients.map(lambda gradient: gradient * (1 - at.elapsed))


@dataclass(frozen=True, kw_only=True)
class FadingToo(Fading):
    def shapes(self, budget: Budget) -> int:
        return 3


class Named(nn.Module):
    def __init__(self, names: str) -> None:
        super().__init__()
        self.names = names


@dataclass(frozen=True, kw_only=True)
class Wraps(Method):
    stage: ClassVar[Stage] = Stage.REPLACE
    letter: str

    def apply(self, model: nn.Module, optimizers: Any = ()) -> nn.Module:
        assert isinstance(model, Named)
        return Named(f"{model.names}{self.letter}{len(optimizers)}")


@dataclass(frozen=True, kw_only=True)
class Casts(Wraps):
    stage: ClassVar[Stage] = Stage.CAST


@dataclass(frozen=True, kw_only=True)
class Elsewhere(Wraps):
    stage: ClassVar[Stage] = Stage.AVERAGE


def position(budget: str = "100ba", loss: Any = None, model: nn.Module | None = None, **more: Any) -> Position:
    clock = Clock(step=25, epoch=3)
    return Position(clock, Budget(Time.parse(budget)), 11, 2, model or nn.Identity(), loss, **more)


def test_a_position_keeps_each_thing_under_its_name() -> None:
    model, loss = nn.Linear(1, 1), Classification(3)
    at = position(loss=loss, model=model, image_size=(32, 48))
    assert (at.clock, at.seed, at.microbatch) == (Clock(step=25, epoch=3), 11, 2)
    assert (at.model is model, at.loss is loss, at.image_size) == (True, True, (32, 48))
    assert position().image_size is None


def test_who_reads_the_length_of_the_run_is_noted_and_whether_it_says_what_it_takes() -> None:
    told: list[bool] = []
    at = position(on_budget=lambda *, is_told: told.append(is_told))
    assert (at.clock.step, told) == (25, [])
    assert str(at.budget.span) == "100ba"
    assert told == [False]
    assert at.budget_told is at.budget
    assert told == [False, True, False]
    assert (at.elapsed, told[3:]) == (0.25, [False])
    quiet = position()
    assert quiet.budget is quiet.budget_told


def test_how_far_a_run_of_epochs_of_unknown_length_is_nobody_says() -> None:
    told: list[bool] = []
    at = position("4ep", on_budget=lambda *, is_told: told.append(is_told))
    with pytest.raises(PlanError, match=r"how far a run of '4ep' is.*Give the budget in steps, RunConfig\(budget='1"):
        _ = at.elapsed
    assert told == [], "who was refused hasn't read it"


def test_draws_of_the_same_position_are_the_same_and_of_another_stream_or_row_others() -> None:
    at = position()
    batch = Batch(torch.ones(3), Lineage.of_rows(7, 3))
    one = at.row_uniform("crop", batch)
    assert one.shape == (3, 1)
    assert torch.equal(one, position().row_uniform("crop", batch))
    assert not torch.equal(one, at.row_uniform("flip", batch))
    assert torch.equal(one[[2]], at.row_uniform("crop", batch.select(slice(2, 3))))
    drawn = [torch.rand(2, generator=at.generator(stream)).tolist() for stream in ("crop", "crop", "flip")]
    assert drawn[0] == drawn[1] != drawn[2]


class Config:
    problem_type: str | None = None
    num_labels = 6


class TinyForSequenceClassification(nn.Module):
    """As transformers' models are made: a configuration, and labels that `forward` takes."""

    __module__ = "transformers.models.tiny"

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return x


def test_a_model_with_a_loss_of_its_own_says_how_many_classes_it_has() -> None:
    own, target = TinyForSequenceClassification(), torch.tensor([0, 1])
    assert position(loss=huggingface_loss, model=own).num_classes(target, "MixUp") == 6
    assert position(loss=Classification(4), model=own).num_classes(target, "MixUp") == 4, "another loss, another word"
    with pytest.raises(PlanError, match=r"MixUp needs the number of classes of targets \(2,\) torch.int64, and.*Class"):
        position(loss=huggingface_loss).num_classes(target, "MixUp")
    with pytest.raises(PlanError, match="doesn't declare `num_classes`"):
        position(loss=lambda model, data: data).num_classes(target, "MixUp")


def test_the_number_of_classes_is_an_integer_whatever_declares_it() -> None:
    class Told:
        num_classes = torch.tensor(5)

    found = position(loss=Told()).num_classes(torch.tensor([0]), "MixUp")
    assert (found, type(found)) == (5, int)


def test_what_follows_the_run_is_read_off_the_code_of_its_class_and_of_those_it_comes_from() -> None:
    kinds = (Plain, Steady, Fading, FadingToo, FadingWithin)
    assert [kind().follows_elapsed for kind in kinds] == [False, False, True, True, True]


def test_a_hook_of_ones_own_is_one_that_any_class_above_has() -> None:
    found = [[hook for hook in HOOKS if overrides(method, hook)] for method in (Plain(), Steady(), Fading())]
    assert found == [[], ["dilation"], ["dilation", "gradients"]]
    assert [hook for hook in HOOKS if overrides(FadingToo(), hook)] == ["dilation", "shapes", "gradients"]


def test_hooks_of_all_that_the_loop_calls_are_hooks_and_do_nothing_by_themselves() -> None:
    assert set(HOOKS) <= vars(Method).keys()
    assert len(set(HOOKS)) == len(HOOKS) == 14
    assert Plain().taken_from(Budget(Time.parse("1ba"))) is None


def test_a_method_is_frozen_and_takes_its_settings_by_name() -> None:
    method = Wraps(letter="a")
    with pytest.raises(AttributeError):
        method.letter = "b"  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"Wraps\(letter='a'\)"):
        Wraps("a")  # type: ignore[misc]
    assert Wraps(letter="a") == method != Wraps(letter="b")
    assert (Method.owns, Method.reads) == (frozenset(), frozenset())


def hooked(**hooks: Any) -> Method:
    return type("Own", (Plain,), hooks)()


def test_hooks_that_take_what_the_loop_gives_are_left_alone() -> None:
    check_hooks(Plain())
    check_hooks(FadingToo())
    check_hooks(hooked(gradients=lambda self, g, w, where: g))
    check_hooks(hooked(gradients=lambda self, *given: given[0]))
    check_hooks(hooked(frozen=lambda self, parameters, at: frozenset()))
    check_hooks(hooked(loss=staticmethod(lambda loss, state, at: loss)))
    check_hooks(hooked(helper=lambda self: 1))


@pytest.mark.parametrize(
    ("hook", "own", "said"),
    [
        ("gradients", lambda self, gradients, at: gradients, r"Own.gradients\(gradients, at\) can't be called: the"),
        ("gradients", lambda self, g, w, at, more: g, r"the loop gives gradients\(gradients, weights, at\). Weights"),
        ("gradients", lambda self, g, parameters, at: g, r"Own.gradients\(g, parameters, at\) can't be called"),
        ("gradients", lambda self, parameters, *more: None, r"Own.gradients\(parameters, more\) can't be called"),
        ("perturbation", lambda self, parameters, gradients, at: None, "of which a rank may hold a part"),
        ("init", lambda self, model: {}, r"the loop gives init\(weights\)"),
        ("after", lambda self, state, model, at, learnt: state, "see 'Weights and gradients' in docs/writing-a-meth"),
        ("evaluation_weights", lambda self, state: None, r"gives evaluation_weights\(state, at\)"),
        ("dilation", lambda self, factor: factor, r"the loop gives dilation\(\)"),
    ],
)
def test_hooks_that_take_something_else_are_refused_by_what_they_take(hook: str, own: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        check_hooks(hooked(**{hook: own}))


def test_a_hook_is_checked_after_others_that_are_right_or_absent() -> None:
    with pytest.raises(PlanError, match=r"Own.evaluation_weights\(\)"):
        check_hooks(hooked(batch=lambda self, batch, at: batch, evaluation_weights=lambda self: None))


def test_surgery_follows_the_stages_and_leaves_out_what_is_no_surgery() -> None:
    methods = [Casts(letter="c"), Elsewhere(letter="x"), Wraps(letter="a"), Plain(), Wraps(letter="b")]
    found = operated(Named(""), methods, cast("Any", [None]))
    assert isinstance(found, Named)
    assert found.names == "a1b1c1"
    alone = operated(Named(""), [Casts(letter="c")])
    assert isinstance(alone, Named)
    assert alone.names == "c0"
    model = Named("m")
    assert operated(model, [Elsewhere(letter="x"), Plain()]) is model


def test_an_absent_apply_of_a_surgeon_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Announced(Method):
        stage: ClassVar[Stage] = Stage.REPLACE

    def refuse(self: Method, model: nn.Module, optimizers: Any = ()) -> nn.Module:
        raise AssertionError(self, model, optimizers)

    monkeypatch.setattr(Method, "apply", refuse)
    model = Named("m")
    assert operated(model, [Announced()]) is model
