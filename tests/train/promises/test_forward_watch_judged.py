"""A look at one step finds exactly what moved in it, and takes back exactly the promises that this breaks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cosmati.core.plan import Facts, Guarantee, Pair, Plan, Promise
from cosmati.routing.regions import Regions
from cosmati.train import forward_watch, held
from cosmati.train.forward_watch import ForwardWatch, is_kept, loss_roots, numbers_among
from cosmati.train.held import Place
from cosmati.train.ranks import Ranks

FIRST, SECOND, OWN = ("a", "first"), ("a", "second"), ("b", "first")
"""Pairs of the plan: two that are denied, and one that is isolated."""
ALL = {"parity", "resume", "elastic", "replayable", f"w{FIRST}", f"w{SECOND}", f"i{OWN}"}
DENIED = {f"w{FIRST}", f"w{SECOND}"}
KEPT_NOWHERE = {"resume", "elastic", "replayable"}


class Options:
    """An object of the user's own, of which forward reads one attribute."""

    def __init__(self, **given: object) -> None:
        vars(self).update(given)


class Held(nn.Module):
    """Two layers, and a buffer, a buffer that no checkpoint has, numbers, and options."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.teacher = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("centre", torch.zeros(2))
        self.register_buffer("mask", torch.zeros(2), persistent=False)
        self.level = 1.0
        self.other = 1.0
        self.options = Options(scale=1.0, unread=1.0)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(rows)) * self.level + self.centre + self.mask + self.teacher
        return output * self.options.scale  # type: ignore[attr-defined, no-any-return]


class Others(Ranks):
    """A rank of a run on several, and what the other ones say: to the n-th question, and of names."""

    def __init__(self, says: Iterable[int] = (), unlike: Sequence[str] = (), *, is_equal: bool = True) -> None:
        super().__init__()
        self.is_parallel = True
        self.says, self.names, self.is_equal = set(says), list(unlike), is_equal
        self.asked: list[bool] = []
        self.digests: list[bytes] = []
        self.told: list[Mapping[str, bytes]] = []

    def agree(self, flag: bool) -> bool:
        self.asked.append(flag)
        return flag or len(self.asked) - 1 in self.says

    def all_equal(self, digest: bytes) -> bool:
        self.digests.append(digest)
        return self.is_equal

    def unlike_names(self, digests: Mapping[str, bytes]) -> list[str]:
        self.told.append(digests)
        return self.names


NEWS, LOST, CHANGED, UNSEEN, LEAKS, READS, REPEATED, MOVED = range(8)
"""What the ranks are asked in a look, in this order."""


def plan_of(num_microbatches: int = 4) -> Plan:
    promises: list[tuple[Promise, Pair | None]] = [
        *((one, None) for one in (Promise.PARITY, Promise.RESUME, Promise.ELASTIC, Promise.REPLAYABLE)),
        *((Promise.NO_DIRECT_WRITE, pair) for pair in (FIRST, SECOND)),
        (Promise.ISOLATED, OWN),
    ]
    facts = Facts(num_microbatches=num_microbatches, rows_per_microbatch=2, positional_data=True)
    return Plan((), tuple(Guarantee(promise, True, "at first", pair) for promise, pair in promises), facts)


def key(guarantee: Guarantee) -> str:
    letter = {Promise.NO_DIRECT_WRITE: "w", Promise.ISOLATED: "i"}.get(guarantee.promise)
    return f"{letter}{guarantee.pair}" if letter else str(guarantee.promise)


def broken(plan: Plan) -> set[str]:
    return {key(one) for one in plan.guarantees if not one.holds}


def reasons(plan: Plan) -> dict[str, str]:
    return {key(one): one.because for one in plan.guarantees if not one.holds}


def regions_of(model: nn.Module) -> Regions:
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    parts = tuple(tuple(name for name in names if name.startswith(region)) for region in ("first", "second"))
    return Regions(("first", "second"), parts, (("first",), ("second",)), (), ("first", "second"))


def watch_of(
    model: nn.Module,
    losses: Sequence[object] = (),
    ranks: Ranks | None = None,
    folded: Iterable[nn.Module] = (),
    repeated: Sequence[str] = (),
) -> ForwardWatch:
    return ForwardWatch(model, losses, folded, regions_of(model), ranks or Ranks.alone(), repeated)


def step(watch: ForwardWatch, number: int, act: Callable[[], object] = lambda: None, plan: Plan | None = None) -> Plan:
    watch.step_begins(number)
    with watch.around():
        act()
    return watch.judged(plan or plan_of())


def set_to(model: Held, name: str, value: float) -> Callable[[], object]:
    owner = model.options if name.startswith("options.") else model
    name = name.removeprefix("options.")
    there = getattr(owner, name)
    if isinstance(there, Tensor):
        return lambda: there.data.fill_(value)
    return lambda: setattr(owner, name, value)


def test_a_new_watch_has_found_nothing_and_looks_at_nothing() -> None:
    watch = watch_of(Held())
    assert (watch.is_on, watch.has_moved) == (False, False)


def test_each_power_of_two_is_looked_at_and_the_first_step_after_a_resume() -> None:
    watch = watch_of(Held())
    found = []
    for number in range(21, 140):
        watch.step_begins(number)
        found += [number] if watch.is_on else []
    assert found == [21, 32, 64, 128]


def test_the_first_step_with_packs_is_looked_at_and_no_later_one() -> None:
    watch = watch_of(Held())
    found = []
    for number in range(4, 8):
        watch.step_begins(number, has_packs=number >= 6)
        found += [number] if watch.is_on else []
    assert found == [4, 6]
    watch.step_begins(9)
    watch.step_begins(10, has_packs=True)
    assert not watch.is_on


def test_packs_in_a_step_that_is_looked_at_anyhow_are_seen() -> None:
    watch = watch_of(Held())
    watch.step_begins(4, has_packs=True)
    watch.step_begins(5, has_packs=True)
    assert not watch.is_on


def test_a_step_has_no_packs_unless_it_is_said() -> None:
    watch = watch_of(Held())
    watch.step_begins(4)
    watch.step_begins(5, has_packs=True)
    assert watch.is_on


def test_nothing_is_read_in_a_step_that_is_not_looked_at() -> None:
    model = Held()
    watch = watch_of(model)
    assert broken(step(watch, 4)) == set()
    plan = plan_of()
    assert step(watch, 5, set_to(model, "level", 3.0), plan) is plan
    # What was set in that step counts as changed between two looks.
    assert reasons(step(watch, 8))["resume"] == "level changes between steps, and no checkpoint holds it"


def test_a_step_that_moves_nothing_keeps_all_promises() -> None:
    model = Held()
    for ranks in (Ranks.alone(), Others()):
        watch = watch_of(model, ranks=ranks)
        assert broken(step(watch, 0, lambda: model(torch.ones(1, 2)).sum().backward())) == set()
        assert not watch.has_moved


@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize(
    ("name", "told", "is_lost"),
    [
        ("level", "forward changes the attributes level (in `forward_caches`, if nothing reads them back)", True),
        (
            "options.unread",
            "forward changes the attributes options.unread (in `forward_caches`, if nothing reads them back)",
            True,
        ),
        ("mask", "forward changes the buffers mask", True),
        ("centre", "forward changes the buffers centre", False),
        ("teacher", "forward changes the parameters teacher", False),
    ],
)
def test_what_moves_breaks_what_rests_on_it(name: str, told: str, is_lost: bool, is_parallel: bool) -> None:
    model = Held()
    watch = watch_of(model, ranks=Others() if is_parallel else Ranks.alone())
    after = step(watch, 0, set_to(model, name, 5.0))
    assert watch.has_moved
    # One rank alone takes the microbatches as the bare loop does.
    expected = DENIED | {"elastic"} | (KEPT_NOWHERE if is_lost else set()) | ({"parity"} if is_parallel else set())
    assert broken(after) == expected
    assert set(reasons(after).values()) == {told}


def test_what_has_moved_is_told_once() -> None:
    model = Held()
    watch = watch_of(model)
    step(watch, 0, set_to(model, "mask", 5.0))
    assert broken(step(watch, 1)) == set()


def test_what_moves_is_told_by_kind_and_in_the_order_of_names() -> None:
    model = Held()

    def act() -> None:
        model.teacher.data.fill_(1.0)
        model.other = model.level = 2.0
        model.mask.fill_(1.0)
        model.centre.fill_(1.0)

    because = reasons(step(watch_of(model), 0, act))
    kinds = "the buffers centre, mask and the attributes level, other"
    mend = " (in `forward_caches`, if nothing reads them back)"
    assert because["elastic"] == f"forward changes the parameters teacher and {kinds}{mend}"
    assert because["resume"] == "forward changes the buffers mask and the attributes level, other" + mend


def test_what_is_broken_already_keeps_its_reason() -> None:
    model, before = Held(), plan_of()
    for promise in (Promise.RESUME, Promise.ELASTIC, Promise.REPLAYABLE, Promise.PARITY):
        before = before.withdraw(promise, "long since")
    before = before.withdraw(Promise.NO_DIRECT_WRITE, "long since", FIRST)
    after = reasons(step(watch_of(model, ranks=Others()), 0, set_to(model, "level", 5.0), before))
    assert {name for name, because in after.items() if because == "long since"} == {
        *("resume", "elastic", "replayable", "parity", f"w{FIRST}")
    }
    assert after[f"w{SECOND}"].startswith("forward changes the attributes level")


@pytest.mark.parametrize("number", [0, 4])
def test_what_another_rank_has_seen_moving_breaks_all_here_without_a_name(number: int) -> None:
    watch = watch_of(Held(), ranks=Others({MOVED}))
    after = step(watch, number)
    assert watch.has_moved
    assert reasons(after) == dict.fromkeys(KEPT_NOWHERE | DENIED | {"parity"}, "forward changes state on another rank")


def test_all_ranks_are_asked_of_the_same_things_in_one_order() -> None:
    ranks = Others()
    watch = watch_of(Held(), ranks=ranks)
    step(watch, 0)
    assert ranks.asked == [False] * 8
    step(watch, 3)
    assert len(ranks.asked) == 8


def test_news_of_another_rank_has_this_one_look_again_once() -> None:
    ranks = Others({NEWS})
    watch = watch_of(Held(), ranks=ranks)
    step(watch, 4)
    watch.step_begins(5)
    assert watch.is_on
    with watch.around():
        pass
    watch.judged(plan_of())
    watch.step_begins(6)
    assert not watch.is_on


# What others change between steps.


@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize(
    ("name", "is_told", "is_lost"),
    [
        *[("level", True, True), ("mask", True, True), ("centre", True, False), ("teacher", True, False)],
        *[("options.scale", True, True), ("options.unread", False, False)],
    ],
)
def test_what_others_change_between_steps(name: str, is_told: bool, is_lost: bool, is_parallel: bool) -> None:
    model = Held()
    watch = watch_of(model, ranks=Others() if is_parallel else Ranks.alone())
    assert broken(step(watch, 0)) == set()
    set_to(model, name, 7.0)()
    after = step(watch, 1)
    assert broken(after) == (DENIED | {"parity"} if is_told else set()) | (KEPT_NOWHERE if is_lost else set())
    because = reasons(after)
    for promise in broken(after) - KEPT_NOWHERE:
        assert because[promise] == (
            f"{name} changes between steps, and what sets it may follow from any row (in `forward_caches`, if it "
            "follows from the position alone)"
        )
    for promise in broken(after) & KEPT_NOWHERE:
        assert because[promise] == f"{name} changes between steps, and no checkpoint holds it"
    assert broken(step(watch, 2)) == set()
    assert not watch.has_moved


def test_what_no_code_names_any_more_is_not_read() -> None:
    def hook(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        assert model.options.unread  # type: ignore[attr-defined]

    model = Held()
    handle = model.first.register_forward_pre_hook(hook)
    watch = watch_of(model)
    step(watch, 0)
    handle.remove()
    set_to(model, "options.unread", 7.0)()
    assert broken(step(watch, 1)) == set()


def test_parameters_that_train_and_places_that_go_change_nothing_between_steps() -> None:
    model = Held()
    watch = watch_of(model)
    step(watch, 0)
    model.first.weight.data.fill_(3.0)
    del model.level
    assert broken(step(watch, 1)) == set()


def test_what_moves_in_a_pass_is_not_told_again_as_changed_between() -> None:
    model = Held()
    watch = watch_of(model)
    step(watch, 0)
    model.level = 7.0
    after = step(watch, 1, set_to(model, "level", 8.0))
    assert {because.split(" (")[0] for because in reasons(after).values()} == {"forward changes the attributes level"}


def test_what_others_change_on_another_rank_is_told_without_a_name() -> None:
    model = Held()
    lost = step(watch_of(model, ranks=Others({LOST})), 0)
    assert reasons(lost) == dict.fromkeys(
        KEPT_NOWHERE, "state on another rank changes between steps, and no checkpoint holds it"
    )
    changed = step(watch_of(model, ranks=Others({CHANGED})), 0)
    assert broken(changed) == DENIED | {"parity"}
    assert all(because.startswith("state on another rank changes between") for because in reasons(changed).values())


def test_what_changes_between_steps_leaves_reasons_that_stand() -> None:
    model = Held()
    before = plan_of().withdraw(Promise.RESUME, "long since").withdraw(Promise.PARITY, "long since")
    before = before.withdraw(Promise.NO_DIRECT_WRITE, "long since", FIRST)
    watch = watch_of(model)
    step(watch, 0)
    model.level = 7.0
    after = reasons(step(watch, 1, plan=before))
    assert [after[name] for name in ("resume", "parity", f"w{FIRST}")] == ["long since"] * 3
    assert f"w{SECOND}" in after


# Leaks of packs, and reads.


def test_leaks_and_reads_break_what_is_promised_of_classes() -> None:
    watch = watch_of(Held())
    watch.note("")
    watch.note_read("")
    assert broken(step(watch, 0)) == set()
    watch.note("documents meet in attention")
    watch.note("and elsewhere")
    assert reasons(step(watch, 1)) == dict.fromkeys(DENIED, "documents meet in attention")
    assert broken(step(watch, 2)) == set()
    watch.note_read("rows of b read it")
    assert reasons(step(watch, 4)) == {f"i{OWN}": "rows of b read it"}
    assert broken(step(watch, 8)) == set()


def test_leaks_and_reads_of_another_rank_are_told_without_a_name() -> None:
    after = step(watch_of(Held(), ranks=Others({LEAKS})), 0)
    assert reasons(after) == dict.fromkeys(DENIED, "on another rank, documents of a pack reach one another")
    after = step(watch_of(Held(), ranks=Others({READS})), 0)
    assert reasons(after) == {f"i{OWN}": "on another rank, other rows read what is a class's own"}


def test_leaks_leave_reasons_that_stand() -> None:
    watch = watch_of(Held())
    watch.note("documents meet")
    before = plan_of().withdraw(Promise.NO_DIRECT_WRITE, "long since", FIRST)
    assert reasons(step(watch, 0, plan=before)) == {f"w{FIRST}": "long since", f"w{SECOND}": "documents meet"}


# Layers that ran several times.


def test_layers_that_ran_several_times_break_parity_alone() -> None:
    repeated: list[str] = []
    watch = watch_of(Held(), repeated=repeated)
    assert broken(step(watch, 0)) == set()
    repeated += ["second", "first"]
    because = "first, second ran several times in a microbatch, and statistics are folded once"
    assert reasons(step(watch, 1)) == {"parity": because}
    before = plan_of().withdraw(Promise.PARITY, "long since")
    assert reasons(step(watch, 2, plan=before)) == {"parity": "long since"}


def test_layers_of_another_rank_that_ran_several_times_have_no_name() -> None:
    because = "state on another rank ran several times in a microbatch, and statistics are folded once"
    assert reasons(step(watch_of(Held(), ranks=Others({REPEATED})), 0)) == {"parity": because}


def test_hooks_that_come_late_are_seen_in_a_look() -> None:
    model = Held()
    watch = watch_of(model)
    model.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert broken(step(watch, 4)) == {"parity", "elastic"}
    assert broken(step(watch, 4, plan=plan_of(num_microbatches=1))) == set()


# What is too large to be compared.


class Large(Held):
    """A list of which less is compared than it has."""

    def __init__(self) -> None:
        super().__init__()
        self.table: list[float] = [0.0] * 8

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) * self.table[0]


class Forgotten(Held):
    """A list as long that no code names."""

    def __init__(self) -> None:
        super().__init__()
        self.options = Options(scale=1.0, unread=[0.0] * 8)


@pytest.mark.parametrize("is_parallel", [True, False])
def test_what_is_too_large_to_compare_breaks_all_but_parity_of_one_rank(
    is_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmati.train.values.MAX_VALUES", 7)
    watch = watch_of(Large(), ranks=Others() if is_parallel else Ranks.alone())
    after = step(watch, 0)
    assert broken(after) == ALL - (set() if is_parallel else {"parity"})
    because = reasons(after)["resume"]
    assert because == (
        "of table more could change unseen than is compared: what can be read, up to 16,777,216 values, 1 GiB of "
        "arrays and 32 levels (in `forward_caches`, if it follows from the position alone)"
    )
    assert reasons(step(watch, 1, plan=plan_of().withdraw(Promise.RESUME, "long since")))["resume"] == "long since"
    # Once it's compared whole, nothing of it is left to tell.
    monkeypatch.undo()
    step(watch, 2)
    assert broken(step(watch, 4)) == set()


def test_what_no_code_names_may_be_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cosmati.train.values.MAX_VALUES", 7)
    assert broken(step(watch_of(Forgotten()), 0)) == set()


def test_a_container_of_which_not_all_is_followed_is_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Many(Held):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [[0.0], [1.0], [2.0]]

        def forward(self, rows: Tensor) -> Tensor:
            return super().forward(rows) * self.parts[0][0]

    assert broken(step(watch_of(Many()), 0)) == set()
    monkeypatch.setattr(held, "MAX_ITEMS", 2)
    monkeypatch.setattr(held, "leads_on", lambda item: isinstance(item, list))
    assert "of parts more could change" in reasons(step(watch_of(Many()), 0))["resume"]


def test_what_another_rank_cannot_compare_is_told_without_a_name() -> None:
    after = step(watch_of(Held(), ranks=Others({UNSEEN})), 0)
    assert broken(after) == ALL
    assert reasons(after)["resume"].startswith("of state on another rank more could change unseen")


# Which ranks began alike.


def test_ranks_that_begin_unlike_lose_the_promise_of_any_number_of_ranks() -> None:
    names = [f"n{index}" for index in range(6)]
    ranks = Others(unlike=names, is_equal=False)
    watch = watch_of(Held(), ranks=ranks)
    assert reasons(step(watch, 0)) == {"elastic": "ranks began with unlike values of n0, n1, n2, n3, n4"}
    assert set(ranks.told[0]) >= {"centre", "mask", "level", "other", "options.scale"}
    assert "teacher" not in ranks.told[0]
    assert broken(step(watch, 1)) == set()
    assert len(ranks.digests) == 1  # Only of the first look: later on their steps have made them so.


def test_all_ranks_are_asked_for_names_even_where_the_promise_is_gone() -> None:
    ranks = Others(unlike=["n"], is_equal=False)
    before = plan_of().withdraw(Promise.ELASTIC, "long since")
    assert reasons(step(watch_of(Held(), ranks=ranks), 0, plan=before)) == {"elastic": "long since"}
    assert len(ranks.told) == 1


def test_ranks_that_begin_alike_are_not_asked_for_names() -> None:
    ranks = Others(unlike=["n"])
    assert broken(step(watch_of(Held(), ranks=ranks), 0)) == set()
    assert (len(ranks.digests), ranks.told) == (1, [])


def test_the_digest_of_a_beginning_follows_from_names_and_values() -> None:
    def digest(change: Callable[[Held], object]) -> bytes:
        ranks, model = Others(), Held()
        change(model)
        step(watch_of(model, ranks=ranks), 0)
        return ranks.digests[0]

    def rename(model: Held) -> None:
        del model.other
        model.another = 1.0

    plain = digest(lambda model: None)
    assert digest(lambda model: None) == plain
    assert len({plain, digest(rename), digest(lambda model: model.mask.fill_(2.0))}) == 3
    # It's of the beginning: what the step itself moves isn't in it.
    ranks, model = Others(), Held()
    step(watch_of(model, ranks=ranks), 0, set_to(model, "mask", 2.0))
    assert ranks.digests == [plain]


# Roots, and names.


def test_losses_are_named_alone_or_by_number() -> None:
    one, other = nn.Identity(), nn.Identity()
    assert loss_roots([]) == {}
    assert loss_roots([one]) == {"loss": one}
    assert loss_roots([one, other]) == {"loss 0": one, "loss 1": other}


class Tempered(nn.Module):
    """A loss with a buffer, and with a parameter that no optimizer of the run holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(2))
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, model: nn.Module, rows: Tensor) -> Tensor:
        loss: Tensor = (model(rows) * self.scale + self.offset).sum()
        return loss


def test_a_loss_is_watched_under_its_name() -> None:
    model, loss = Held(), Tempered()
    loss.scale.requires_grad_(False)
    because = reasons(step(watch_of(model, [loss]), 0, lambda: loss.offset.fill_(1.0)))
    assert because["elastic"] == "forward changes the buffers loss.offset"


def test_two_places_of_one_name_are_told_apart() -> None:
    def kind() -> type[nn.Module]:
        class Counter(nn.Module):
            total = 0

            def forward(self, rows: Tensor) -> Tensor:
                return rows * type(self).total

        return Counter

    kinds = [kind(), kind(), kind()]

    class Three(Held):
        def __init__(self) -> None:
            super().__init__()
            self.counters = nn.ModuleList(one() for one in kinds)

        def forward(self, rows: Tensor) -> Tensor:
            for one in self.counters:
                rows = one(rows)
            return super().forward(rows)

    for one in kinds:
        model = Three()
        after = step(watch_of(model), 0, lambda one=one: setattr(one, "total", 3))  # type: ignore[misc]
        assert "Counter.total" in reasons(after)["resume"]


def test_statistics_of_folded_layers_are_left_to_the_commit_and_their_other_buffers_are_not() -> None:
    class Normed(Held):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))  # type: ignore[assignment]
            self.first[1].register_buffer("seen", torch.zeros(2))

    model = Normed()
    norm = model.first[1]
    assert isinstance(norm, nn.BatchNorm1d)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        moved = getattr(norm, name)
        assert broken(step(watch_of(model, folded=[norm]), 0, lambda moved=moved: moved.add_(1))) == set()  # type: ignore[misc]
        after = step(watch_of(model), 0, lambda moved=moved: moved.add_(1))  # type: ignore[misc]
        assert reasons(after)["elastic"] == f"forward changes the buffers first.1.{name}"
    after = step(watch_of(model, folded=[norm]), 0, lambda: norm.seen.add_(1))
    assert reasons(after)["elastic"] == "forward changes the buffers first.1.seen"


# What a first pass installs, and what a cached function holds.


def test_what_first_passes_install_is_looked_at_once_more() -> None:
    model = Held()
    watch = watch_of(model)
    is_asked = False

    def hook(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        assert not is_asked

    def install() -> None:
        model.is_hooked = True
        model.first.register_forward_pre_hook(hook)

    assert broken(step(watch, 4, install)) == set()
    assert not watch.has_moved
    watch.step_begins(5)
    assert watch.is_on
    with watch.around():
        is_asked = True
    assert "is_asked" in reasons(watch.judged(plan_of()))["resume"]
    watch.step_begins(6)
    assert not watch.is_on


def hooked(value: object) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def hook(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        assert value is not given

    return hook


@pytest.mark.parametrize("value", [True, 3, "name", None])
@pytest.mark.parametrize("flag", [True, False, 1, None])
def test_hooks_with_a_word_and_flags_that_are_set_are_installed(value: object, flag: object) -> None:
    model = Held()

    def install() -> None:
        model.is_hooked = flag
        model.first.register_forward_pre_hook(hooked(value))

    assert (broken(step(watch_of(model), 0, install)) == set()) == (flag is True)


@pytest.mark.parametrize("value", [0.5, [1], torch.ones(1)])
def test_a_hook_that_holds_more_counts_at_once(value: object) -> None:
    model = Held()
    after = step(watch_of(model), 0, lambda: model.first.register_forward_pre_hook(hooked(value)))
    assert "resume" in broken(after)


def test_a_flag_without_a_hook_counts_at_once() -> None:
    model = Held()
    assert "resume" in broken(step(watch_of(model), 0, lambda: setattr(model, "is_hooked", True)))


def test_what_changes_beside_a_hook_that_comes_counts_at_once() -> None:
    model = Held()
    model.is_hooked = False

    def install() -> None:
        model.is_hooked = True
        model.first.register_forward_pre_hook(hooked(3))

    assert "is_hooked" in reasons(step(watch_of(model), 0, install))["resume"]


def test_hooks_that_come_in_a_later_pass_count_at_once() -> None:
    model = Held()
    watch = watch_of(model)
    step(watch, 0)
    assert "resume" in broken(step(watch, 1, lambda: model.first.register_forward_pre_hook(hooked(3))))


def test_a_cached_function_may_come_to_hold_more_and_is_then_looked_at_once_more() -> None:
    @cache
    def table(size: int) -> Tensor:
        return torch.zeros(size)

    class Cached(Held):
        def forward(self, rows: Tensor) -> Tensor:
            return super().forward(rows) + table(2)

    model = Cached()
    watch = watch_of(model)
    assert broken(step(watch, 4, lambda: table(2))) == set()
    watch.step_begins(5)
    assert watch.is_on
    with watch.around():
        table(2).fill_(1.0)
    assert "table(...)" in reasons(watch.judged(plan_of()))["resume"]
    assert broken(step(watch, 8, lambda: table(3))) == set()
    watch.step_begins(9)
    assert not watch.is_on
    assert broken(step(watch, 16, table.cache_clear)) == set()


# Gradients that no optimizer takes up.


def trained(model: Held, loss: Tempered) -> Callable[[], object]:
    return lambda: loss(model, torch.ones(1, 2)).backward()


def test_parameters_outside_the_model_that_get_gradients_are_warned_of_once() -> None:
    model, loss = Held(), Tempered()
    watch = watch_of(model, [loss])
    with pytest.warns(UserWarning, match=r"Gradients reach loss\.scale, and no optimizer"):
        step(watch, 0, trained(model, loss))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(watch, 1, trained(model, loss))


def test_five_parameters_outside_are_named() -> None:
    class Six(Tempered):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.ParameterList(torch.ones(2) for _ in range(5))

    loss = Six()
    for parameter in loss.parameters():
        parameter.grad = torch.ones(2)
    with pytest.warns(UserWarning, match=r"reach (loss\.[a-z0-9.]+, ){4}loss\.[a-z0-9.]+, and no optimizer"):
        step(watch_of(Held(), [loss]), 0)


def test_no_warning_without_a_gradient_or_of_what_is_frozen_or_the_models_own() -> None:
    model, loss = Held(), Tempered()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(watch_of(model, [loss]), 0)
        loss.scale.requires_grad_(False)
        step(watch_of(model, [loss]), 0, trained(model, loss))
        loss.scale.grad = torch.ones(2)
        step(watch_of(model, [loss]), 0)
        loss.scale = model.first.bias
        step(watch_of(model, [loss]), 0, trained(model, loss))


# Where what moves may carry content.


class Norms(nn.Module):
    """InstanceNorm in a region, and one in none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        self.second = nn.Linear(2, 2)
        self.none = nn.InstanceNorm1d(2, track_running_stats=True)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.second(self.none(self.first(rows)))
        return output


def test_statistics_of_instance_norm_reach_their_own_region_alone() -> None:
    model = Norms()
    assert model.first.running_mean is not None
    assert model.none.running_mean is not None
    own, nobodys = model.first.running_mean, model.none.running_mean
    assert broken(step(watch_of(model), 0, lambda: own.add_(1))) == {"elastic", f"w{FIRST}"}
    assert broken(step(watch_of(model), 0, lambda: nobodys.add_(1))) == {"elastic"} | DENIED
    weight = model.first.weight
    weight_moved = step(watch_of(model), 0, lambda: weight.data.add_(1))
    assert broken(weight_moved) == {"elastic"} | DENIED


# What checkpoints hold, and what ranks compare.


def test_a_checkpoint_holds_persistent_buffers_and_the_models_parameters() -> None:
    value = nn.Parameter(torch.zeros(1))
    assert is_kept(Place("a", "buffer", torch.zeros(1), is_persistent=True), set())
    assert is_kept(Place("a", "parameter", value), {id(value)})
    assert not is_kept(Place("a", "parameter", value), set())


def test_numbers_among_what_is_kept_are_digested() -> None:
    values: dict[str, object] = {
        "tensor": torch.zeros(1),
        "array": np.zeros(1),
        "flag": True,
        "whole": 3,
        "real": 0.5,
        "seed_hash": 0.5,
        "is_hash": True,
    }
    out: dict[str, object] = {
        "text": "a",
        "list": [1],
        "none": None,
        "name_hash": 3,
        "model.device": 3,
        "f(...)(2,)": 3,
    }
    state = {name: (("content", repr(one)), Place(name, "attribute", one)) for name, one in (values | out).items()}
    state["weight"] = ("w", Place("weight", "parameter", torch.zeros(1)))
    state["mean"] = ("m", Place("mean", "buffer", torch.zeros(1)))
    found = numbers_among(state)
    assert set(found) == {*values, "mean"}
    assert {len(digest) for digest in found.values()} == {32}
    assert len(set(found.values())) == len({repr(one) for one in values.values()}) + 1


def test_a_digest_is_of_all_its_parts_in_their_order() -> None:
    assert forward_watch._digest(b"a", b"b") == forward_watch._digest(b"ab")
    assert forward_watch._digest(b"a", b"b") != forward_watch._digest(b"b", b"a")
