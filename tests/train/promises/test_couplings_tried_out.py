"""What couples regions is said of what couples them, by a trial on copies that sees each way an optimizer has."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from cosmati.core.clock import Budget, Time
from cosmati.core.method import Coupling, Method, Position, Stage
from cosmati.core.pieces import Pieces
from cosmati.methods import GradientClipping
from cosmati.optim import SGD
from cosmati.routing.policy_file import PolicyFile
from cosmati.train import couplings
from cosmati.train.assembly import ScheduledOptimizer, SubStep
from cosmati.train.config import RunConfig
from cosmati.train.couplings import counts_together, find_couplings, hooked, method_coupling, optimizer_coupling
from cosmati.train.ingredients import Ingredients

SHAPES = ((4, 2), (2,), (), (5,))
REGIONS = (0, 1, 1, 2)
STEPS = 6
NO_GRADIENT, ACROSS = "moves what has no gradient", "lets one region's gradients act on another's parameters"
UNDECLARED = "doesn't say what it couples (`couples = frozenset()`, if it leaves regions apart)"
COUNTS = "counts the steps in which another region alone has learnt"
Rule = Callable[[Any, list[nn.Parameter]], None]


class Own(torch.optim.Optimizer):
    """Plain descent after a rule of the user's."""

    couples: ClassVar[frozenset[Coupling]] = frozenset()
    rule: ClassVar[Any] = staticmethod(lambda own, parameters: None)

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.125})
        self.count = 0
        self.kept: list[Any] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.rule(self, parameters)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.125)


def with_rule(rule: Rule) -> type[Own]:
    return type("Own", (Own,), {"rule": staticmethod(rule)})


def parameters_and_regions(regions: Sequence[int] = REGIONS) -> tuple[list[nn.Parameter], dict[int, int]]:
    found = [nn.Parameter(torch.zeros(shape)) for shape, _ in zip(SHAPES, regions, strict=False)]
    return found, {id(p): region for p, region in zip(found, regions, strict=True)}


def said_of(kind: type[Own], regions: Sequence[int] = REGIONS) -> str:
    parameters, owners = parameters_and_regions(regions)
    groups: Any = [{"params": parameters[:1]}, {"params": parameters[1:]}] if parameters[1:] else parameters
    return optimizer_coupling(kind(groups), owners)


def scheduled(*optimizers: torch.optim.Optimizer) -> list[ScheduledOptimizer]:
    return [ScheduledOptimizer(one, None, (), frozenset()) for one in optimizers]


def moves_one(index: int, *, only_after: bool) -> Rule:
    """Move a parameter without a gradient: always before it ever had one, or only after."""

    def rule(own: Own, parameters: list[nn.Parameter]) -> None:
        has_had = index in own.kept
        if parameters[index].grad is not None:
            own.kept.append(index)
        elif has_had == only_after:
            parameters[index].add_(1.0)

    return rule


@pytest.mark.parametrize("only_after", [True, False])
@pytest.mark.parametrize("index", range(4))
def test_what_moves_without_a_gradient_is_found_in_each_region(index: int, only_after: bool) -> None:
    assert said_of(with_rule(moves_one(index, only_after=only_after))) == f"Own {NO_GRADIENT}"


@pytest.mark.parametrize("period", range(1, 10))
def test_what_acts_now_and_then_is_found_if_six_steps_after_the_first_see_it(period: int) -> None:
    def rule(own: Own, parameters: list[nn.Parameter]) -> None:
        if own.count % period == 0:
            parameters[0].add_(1.0)

    assert said_of(with_rule(rule)) == (f"Own {NO_GRADIENT}" if period <= STEPS + 1 else "")


@pytest.mark.parametrize("period", range(1, 9))
@pytest.mark.parametrize(("source", "other"), [(0, 3), (3, 0), (2, 0), (0, 1)])
def test_a_gradient_that_acts_in_another_region_is_found(source: int, other: int, period: int) -> None:
    def rule(own: Own, parameters: list[nn.Parameter]) -> None:
        given, taken = parameters[source].grad, parameters[other].grad
        if given is not None and taken is not None and own.count % period == 0:
            taken.add_(given.norm())

    assert said_of(with_rule(rule)) == (f"Own {ACROSS}" if period <= STEPS else "")


def test_a_direction_alone_that_acts_is_found() -> None:
    def rule(own: Own, parameters: list[nn.Parameter]) -> None:
        given, taken = parameters[0].grad, parameters[3].grad
        if given is not None and taken is not None:
            taken.add_((given / given.norm()).sum())

    assert said_of(with_rule(rule)) == f"Own {ACROSS}"


def test_what_acts_within_a_region_is_left_alone() -> None:
    def rule(own: Own, parameters: list[nn.Parameter]) -> None:
        if parameters[1].grad is not None and parameters[2].grad is not None:
            parameters[1].grad.mul_(parameters[2].grad.norm())

    assert said_of(with_rule(rule)) == ""
    assert said_of(with_rule(moves_one(0, only_after=True)), (0,)) == f"Own {NO_GRADIENT}"
    assert said_of(Own, (4,)) == ""


def test_who_declares_that_it_couples_is_believed_before_anything_else() -> None:
    parameters, owners = parameters_and_regions()
    config = SGD(lr=0.1)
    object.__setattr__(config, "couples", frozenset({"regions"}))
    torchs = torch.optim.SGD(parameters)
    assert optimizer_coupling(torchs, owners, config) == "SGD couples regions"
    torchs.register_step_pre_hook(lambda *_: None)
    assert optimizer_coupling(torchs, owners, config) == "SGD couples regions"
    couples = type("Couples", (torch.optim.SGD,), {"couples": ("regions",)})(parameters)
    assert optimizer_coupling(couples, owners) == "Couples couples regions"
    assert optimizer_coupling(couples, owners, SGD(lr=0.1)) == "SGD couples regions", "by the name that the user wrote"
    assert optimizer_coupling(torch.optim.LBFGS(parameters), owners) == "LBFGS couples regions"


def test_whose_class_isnt_known_has_to_declare_something_itself_or_in_its_configuration() -> None:
    parameters, owners = parameters_and_regions()
    subclass = type("Mine", (torch.optim.SGD,), {})(parameters, lr=0.1)
    own_config = type("Config", (), {"couples": frozenset()})()
    assert optimizer_coupling(subclass, owners) == f"Mine {UNDECLARED}"
    assert optimizer_coupling(subclass, owners, SGD(lr=0.1)) == f"SGD {UNDECLARED}", "which declares for its own"
    assert optimizer_coupling(subclass, owners, own_config) == ""
    assert optimizer_coupling(torch.optim.SGD(parameters, lr=0.1), owners) == ""
    bad = with_rule(moves_one(0, only_after=True))(parameters)
    assert optimizer_coupling(bad, owners, own_config) == f"Config {NO_GRADIENT}"
    bad.__class__.__module__ = "cosmati.optim.own"
    assert optimizer_coupling(bad, owners) == "", "this library's own have tests"


def test_a_declaration_of_this_library_or_pytorch_is_nobodys_own() -> None:
    kinds = {
        module: type("Kind", (), {"couples": frozenset(), "__module__": module})
        for module in ("cosmati.x", "torch.x", "mine", "torchish")
    }
    assert [couplings._declares(kind()) for kind in kinds.values()] == [False, False, True, True]
    assert couplings._declares(type("Sub", (kinds["mine"],), {})())
    assert not couplings._declares(type("Sub", (kinds["torch.x"],), {})())
    assert not couplings._declares(None)


def test_an_error_of_the_users_code_is_told() -> None:
    def rule(own: Own, parameters: list[nn.Parameter]) -> None:
        msg = "no luck"
        raise KeyError(msg)

    assert said_of(with_rule(rule)) == "Own can't be tried out (KeyError: 'no luck')"
    parameters, owners = parameters_and_regions()
    told = counts_together(scheduled(with_rule(rule)(parameters)), pieces(parameters, owners))
    assert told == ("Own can't be tried out (KeyError: 'no luck')",)


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def test_hooks_of_an_optimizer_and_of_all_act(register: Callable[[Any], Any]) -> None:
    has_hooks = "has step hooks, which aren't looked into"
    parameters, owners = parameters_and_regions()
    pre, post = torch.optim.SGD(parameters), torch.optim.SGD(parameters)
    handles = [pre.register_step_pre_hook(lambda *_: None), post.register_step_post_hook(lambda *_: None)]
    assert [hooked(pre), hooked(post)] == [has_hooks] * 2
    assert optimizer_coupling(pre, owners) == f"SGD {has_hooks}"
    for handle in handles:
        handle.remove()
    assert [hooked(pre), hooked(post)] == [""] * 2
    handle = register(lambda *_: None)
    try:
        assert hooked(pre) == has_hooks
    finally:
        handle.remove()
    assert hooked(pre) == ""


def test_a_patched_step_acts_unless_a_scheduler_counts_with_it() -> None:
    parameters, owners = parameters_and_regions()
    counted, patched = torch.optim.SGD(parameters, lr=0.1), torch.optim.SGD(parameters, lr=0.1)
    torch.optim.lr_scheduler.StepLR(counted, 3)
    assert "step" in vars(counted)
    assert hooked(counted) == ""
    patched.step = types.MethodType(lambda self: None, patched)  # type: ignore[method-assign]
    assert hooked(patched) == "has another `step` than its class"
    assert optimizer_coupling(patched, owners) == "SGD has another `step` than its class"


def recorder(log: list[list[Tensor | None]]) -> type[Own]:
    def rule(own: Own, parameters: list[nn.Parameter]) -> None:
        log.append([None if p.grad is None else p.grad.clone() for p in parameters])

    return with_rule(rule)


def present_in(log: Sequence[Sequence[Tensor | None]]) -> list[str]:
    return ["".join(".x"[one is not None] for one in line) for line in log]


def test_a_trial_steps_a_small_copy_and_nothing_else() -> None:
    log: list[list[Tensor | None]] = []
    parameters, owners = parameters_and_regions()
    parameters[3] = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
    owners[id(parameters[3])] = 2
    real = recorder(log)(parameters)
    real.kept.append(real)
    real.state[parameters[0]]["momentum"] = torch.ones(4, 2)
    real.step = lambda closure=None: pytest.fail("the wrapper's")  # type: ignore[method-assign]
    trial, again = couplings._Trial(real, owners), couplings._Trial(real, owners)
    small = [(tuple(p.shape), region, p.dtype) for p, region in trial._parameters]
    kinds = [torch.float32] * 3 + [torch.bfloat16]
    assert small == list(zip([(3, 2), (2,), (), (3,)], REGIONS, kinds, strict=True))
    assert all(bool(p.detach().ne(0).all()) for p, _ in trial._parameters)
    assert all(torch.equal(p, q) for (p, _), (q, _) in zip(trial._parameters, again._parameters, strict=True))
    copied = trial._optimizer
    assert isinstance(copied, Own)
    assert (type(copied), copied.kept[0], dict(copied.state), copied.count) == (type(real), copied, {}, 0)
    assert [id(p) for p in copied.param_groups[0]["params"]] == [id(p) for p, _ in trial._parameters]
    trial.moves(absent=1, num_present=2)
    assert present_in(log) == ["xxxx"] * 2 + ["x..x"] * STEPS
    assert (real.count, len(real.state), real.kept) == (0, 1, [real])
    assert all(p.grad is None and not p.any() for p in parameters)


def test_where_others_end_follows_from_their_gradients_alone() -> None:
    log: list[list[Tensor | None]] = []
    parameters, owners = parameters_and_regions()
    ends = {}
    for scale in (1.0, 1024.0):
        trial = couplings._Trial(recorder(log)(parameters), owners)
        start = torch.cat([p.detach().flatten() for p, region in trial._parameters if region != 0])
        ends[scale] = trial.ends(0, scale)
        others = torch.stack([torch.cat([one.flatten() for one in line[1:] if one is not None]) for line in log])
        torch.testing.assert_close(ends[scale], start - 0.125 * others[-STEPS:].sum(0))
    assert torch.equal(ends[1.0], ends[1024.0])
    assert present_in(log) == ["xxxx"] * 2 * STEPS
    for one, other in zip(log[:STEPS], log[STEPS:], strict=True):
        assert one[0] is not None
        assert other[0] is not None
        torch.testing.assert_close(other[0], one[0] * 1024 + 1023)
        assert abs(float(nn.functional.cosine_similarity(one[0].flatten(), other[0].flatten(), dim=0))) < 0.999
    alone = couplings._Trial(Own(parameters), dict.fromkeys(owners, 5))
    assert alone.ends(5, 1.0).shape == alone.ends_beside(5, 1).shape == (0,)


@pytest.mark.parametrize("num_own", [0, 1, 2])
def test_others_have_the_same_gradients_whatever_a_region_learns_beside_them(num_own: int) -> None:
    log: list[list[Tensor | None]] = []
    parameters, owners = parameters_and_regions()
    plain, beside = (couplings._Trial(recorder(log)(parameters), owners) for _ in range(2))
    usual = plain.ends_beside(1, 0)
    assert usual.shape == (6 + 3,)
    assert present_in(log) == ["x..x"] * STEPS
    ends = beside.ends_beside(1, num_own)
    assert torch.equal(ends, usual)
    assert present_in(log[STEPS:]) == (["x..x"] + [".xx."] * num_own) * STEPS
    for one, other in zip(log[:STEPS], log[STEPS :: 1 + num_own], strict=True):
        assert all(torch.equal(one[i], other[i]) for i in (0, 3))  # type: ignore[arg-type]
    assert not torch.equal(log[0][0], log[1][0])  # type: ignore[arg-type]


def pieces(parameters: Sequence[Tensor], owners: Mapping[int, int]) -> Pieces:
    named = {f"p{i}": p for i, p in enumerate(parameters)}
    return Pieces(named, {name: owners[id(p)] for name, p in named.items()})


def test_one_counter_for_all_is_told_and_one_for_each_isnt() -> None:
    def all_alike(own: Own, parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            if p.grad is not None:
                p.grad.div_(own.count)

    def last_alone(own: Own, parameters: list[nn.Parameter]) -> None:
        if parameters[-1].grad is not None:
            parameters[-1].grad.div_(own.count)

    parameters, owners = parameters_and_regions()
    weights, kinds = pieces(parameters, owners), [with_rule(all_alike), with_rule(last_alone), Own]
    assert counts_together(scheduled(*(kind(parameters) for kind in kinds)), weights) == (f"Own {COUNTS}",) * 2
    assert counts_together(scheduled(with_rule(all_alike)(parameters[1:3])), weights) == (), "it is of one region"
    ours = type("Ours", (kinds[0],), {"__module__": "cosmati.optim.x"})(parameters)
    believed = torch.optim.Adam(parameters)
    mine = type("Mine", (torch.optim.Adam,), {})(parameters)
    assert counts_together(scheduled(ours, believed, mine), weights) == ()
    assert counts_together(scheduled(ours, believed, kinds[0](parameters)), weights) == (f"Own {COUNTS}",)


@pytest.mark.parametrize("period", [3, 4, 5, 6])
def test_a_counter_that_acts_every_few_steps_is_told(period: int) -> None:
    def rule(own: Own, parameters: list[nn.Parameter]) -> None:
        for p in parameters if own.count % period == 0 else ():
            if p.grad is not None:
                p.grad.mul_(2)

    parameters, owners = parameters_and_regions()
    assert counts_together(scheduled(with_rule(rule)(parameters)), pieces(parameters, owners)) == (f"Own {COUNTS}",)


class Scales(Method):
    """Scales gradients by where it is called, and keeps what it was told."""

    stage: ClassVar[Stage] = Stage.GRADIENT
    seen: ClassVar[list[Position]] = []

    def gradients(self, gradients: Pieces, weights: Pieces, at: Position) -> Pieces:
        self.seen.append(at)
        return gradients


def test_a_run_with_a_policy_tells_of_methods_and_then_of_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scales, "seen", [])
    parameters, owners = parameters_and_regions()
    model, budget, loss = nn.Identity(), Budget(Time.parse("7ba")), lambda model, batch: model(batch)
    optimizers = [
        torch.optim.SGD(parameters[:1], lr=0.1),
        with_rule(moves_one(0, only_after=True))(parameters[1:]),
    ]

    def found(losses: Any, policy: object) -> tuple[str, ...]:
        methods = [GradientClipping(clipping_type="norm", clipping_threshold=1.0), Scales()]
        config = RunConfig(budget="7ba", seed=11)
        declared: list[Any] = [SGD(lr=0.1), optimizers[1]]
        given = Ingredients(model, losses, None, declared, methods, cast("PolicyFile | None", policy), None, config)
        return find_couplings(given, scheduled(*optimizers), pieces(parameters, owners), model, budget)

    assert found(loss, None) == ()
    assert not Scales.seen
    for losses in (loss, [SubStep("a", loss), SubStep("b", lambda model, batch: model(batch))]):
        Scales.seen.clear()
        assert found(losses, object()) == (f"Scales() {UNDECLARED}", f"Own {NO_GRADIENT}")
        at = Scales.seen[0]
        assert (at.clock.step, at.seed, at.microbatch, at.budget) == (0, 11, 0, budget)
        assert at.model is model
        assert at.loss is loss
        assert {one.clock.step for one in Scales.seen} == {0, 1}


def test_gradients_of_a_trial_are_of_all_regions_or_of_one_alone() -> None:
    parameters, owners = parameters_and_regions()
    weights = pieces(parameters, owners)
    alone, alike, scaled = (couplings._drawn(weights, 1, scale) for scale in (None, 1.0, 4.0))
    assert alone.names == ("p1", "p2")
    assert alike.names == scaled.names == ("p0", "p1", "p2", "p3")
    assert alone.regions == weights.regions
    for name in alike.names:
        drawn = alike.tensors[name]
        assert drawn.shape == weights.tensors[name].shape
        expected = drawn * 4 + 3 if name in alone.names else drawn
        torch.testing.assert_close(scaled.tensors[name], expected)
        assert name not in alone or torch.equal(alone.tensors[name], drawn)
    assert len({float(one.flatten()[0]) for one in alike.tensors.values()}) == 4


def test_a_method_of_this_library_or_without_the_hooks_is_taken_at_its_word() -> None:
    parameters, owners = parameters_and_regions()
    weights = pieces(parameters, owners)

    def said(**members: object) -> str:
        kind: Any = type("Mine", (Method,), {"stage": Stage.GRADIENT, **members})
        return method_coupling(kind(), weights, lambda step: cast("Position", step))

    def perturbation(*_: object) -> None:
        return None

    assert said() == f"Mine() {UNDECLARED}"
    assert said(couples=frozenset()) == ""
    assert said(couples=frozenset({"regions"}), perturbation=perturbation) == ""
    assert said(__module__="cosmati.methods.x", perturbation=perturbation) == ""
    moved = "Mine() takes gradients where all regions' gradients have led to"
    assert said(perturbation=perturbation, couples=frozenset()) == moved

    def fails(*_: object) -> None:
        msg = "not here"
        raise ValueError(msg)

    assert said(gradients=fails, couples=frozenset()) == "Mine() can't be tried out (ValueError: not here)"
