"""Each fact of a run breaks the promises that it has to break, in words, and no others."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from cosmati.core.batch import InputKind
from cosmati.core.clock import Budget
from cosmati.core.method import Coupling, Method, Stage
from cosmati.core.plan import (
    Facts,
    Guarantee,
    Plan,
    Promise,
    check_methods,
    describe,
    make_plan,
    row_couplings,
)
from cosmati.errors import PlanError

FACTS = Facts(num_microbatches=4, rows_per_microbatch=8, positional_data=True, has_ledger=True)


@dataclass(frozen=True, kw_only=True)
class Quiet(Method):
    stage: ClassVar[Stage] = Stage.GRADIENT
    number: int = 0
    names: frozenset[str] = frozenset()
    fresh: Any = None
    hidden: int = field(default=1, init=False)


@dataclass(frozen=True, kw_only=True)
class Rows(Method):
    stage: ClassVar[Stage] = Stage.MIX
    owns: ClassVar[frozenset[str]] = frozenset({"labels", "inputs"})

    @property
    def couples(self) -> frozenset[Coupling]:
        return frozenset({"rows"})

    @property
    def contract(self) -> str:
        return "regions learn from mixed rows"


@dataclass(frozen=True, kw_only=True)
class Regions(Method):
    stage: ClassVar[Stage] = Stage.AVERAGE

    @property
    def couples(self) -> frozenset[Coupling]:
        return frozenset({"regions"})


@dataclass(frozen=True, kw_only=True)
class Both(Method):
    stage: ClassVar[Stage] = Stage.PERTURB
    reads: ClassVar[frozenset[InputKind]] = frozenset({"tokens", "images"})

    def shapes(self, budget: Budget) -> int:
        return 2


@dataclass(frozen=True, kw_only=True)
class Splits(Method):
    stage: ClassVar[Stage] = Stage.MIX
    is_on: bool = True

    @property
    def claims(self) -> frozenset[str]:
        return frozenset({"loss interpolation"}) if self.is_on else frozenset()


def facts(**changes: Any) -> Facts:
    return dataclasses.replace(FACTS, **changes)


def why(plan: Plan, name: str) -> str:
    [found] = [g for g in plan.guarantees if g.name == name]
    return found.because


DATA = "the data's order isn't a function of the position, nor restored"
CLOCK = "the host's clock decides its length"
KERNELS = "deterministic kernels are off"


@pytest.mark.parametrize("broken", list(itertools.product([False, True], repeat=5)))
def test_every_combination_of_what_breaks_a_promise_is_said_in_order(broken: tuple[bool, ...]) -> None:
    random, host, loose, single, regroups = broken
    plan = make_plan(
        [],
        facts(
            positional_data=not random,
            host_clock=host,
            deterministic=not loose,
            num_microbatches=1 if single else 2,
            regroups=regroups,
        ),
    )
    base = [DATA] * random + [CLOCK] * host + [KERNELS] * loose
    more = ["V = 1 runs on one rank"] * single
    more += ["a step's rows are regrouped by class, into microbatches of unlike sizes"] * regroups
    v = 1 if single else 2
    assert [(g.promise, g.holds, g.because, g.pair) for g in plan.guarantees] == [
        (Promise.PARITY, True, "no methods", None),
        (
            Promise.RESUME,
            not base,
            "; ".join(base) or "model, optimizer, method states and the clock are all the state",
            None,
        ),
        (
            Promise.ELASTIC,
            not base + more,
            "; ".join(base + more) or f"any number of ranks that divides V = {v}",
            None,
        ),
        (
            Promise.REPLAYABLE,
            not base,
            "; ".join(base) or "data, draws and order follow from the position",
            None,
        ),
    ]


def test_a_loop_of_ones_own_has_to_go_on_with_the_rows_of_its_step() -> None:
    loop = make_plan([], facts(own_loop=True))
    assert loop.holds(Promise.RESUME)
    assert why(loop, "resume").endswith(
        "all the state, if your loop goes on with the rows of step `trainer.clock.step`"
    )


def test_without_a_ledger_nothing_is_replayed() -> None:
    assert why(make_plan([], facts(has_ledger=False)), "replayable") == "no ledger is kept"
    both = make_plan([], facts(has_ledger=False, host_clock=True))
    assert why(both, "replayable") == f"{CLOCK}; no ledger is kept"


def test_parity_is_broken_by_methods_and_by_folded_statistics_and_by_rounded_weights() -> None:
    folded = "the statistics of a, b are folded, and aren't float32 of PyTorch's kernels"
    rounded = "passes read weights rounded to bfloat16 (gather_precision)"
    told = facts(rounded_statistics=("a", "b"), settings={"gather_precision": "bfloat16"})
    assert why(make_plan([], told), "parity") == f"{folded}; {rounded}"
    plan = make_plan([Quiet(number=1), Rows()], told)
    assert why(plan, "parity") == f"methods change the step: Rows(), Quiet(number=1); {folded}; {rounded}"
    assert [g.holds for g in plan.guarantees] == [False, True, True, True]
    assert make_plan([], facts(settings={"gather_precision": None})).holds(Promise.PARITY)


PAIR = ("copyleft", "trunk")
ISOLATED = "no other class reads it or teaches it, and the class teaches nothing else"
SUB_STEPS = "alternating sub-steps let one commit change what the next one reads"


def test_a_denied_class_writes_nothing_unless_something_couples_regions() -> None:
    promise = "no_direct_write(copyleft, trunk)"
    rows_only = make_plan([Rows()], facts(denied=(PAIR,), row_coupled_layers=("norm",), loss_couples="Contrast()"))
    assert why(rows_only, promise) == "its leaf is absent, and its denominator separate"
    assert rows_only.holds(Promise.NO_DIRECT_WRITE, PAIR)
    many = make_plan([Rows(), Regions()], facts(denied=(PAIR,), couplings=("Muon couples regions",), num_sub_steps=2))
    assert why(many, promise) == f"Regions() couples regions; Muon couples regions; {SUB_STEPS}"
    assert make_plan([], facts(denied=(PAIR,), num_sub_steps=1)).holds(Promise.NO_DIRECT_WRITE)


def test_rows_of_packs_are_coupled_by_methods_and_the_loss_and_layers() -> None:
    told = facts(denied=(PAIR,), packed=True, row_coupled_layers=("n1", "n2"), loss_couples="Contrast()")
    expected = ("Rows() couples rows", "the loss couples rows", "n1 couples rows", "n2 couples rows")
    assert row_couplings([Regions(), Rows()], told) == expected
    assert row_couplings([Regions()], FACTS) == ()
    plan = make_plan([Rows()], told)
    assert why(plan, "no_direct_write(copyleft, trunk)") == "; ".join(expected)
    free = make_plan([], facts(denied=(PAIR,), packed=True))
    assert why(free, "no_direct_write(copyleft, trunk)") == (
        "its tokens' part of each gradient is left out, and its denominator separate"
    )


def test_a_class_is_isolated_unless_something_speaks_against_it() -> None:
    own = ("copyleft", "adapter")
    free = make_plan([], facts(isolated={own: ()}))
    assert free.guarantees[-1] == Guarantee(Promise.ISOLATED, holds=True, because=ISOLATED, pair=own)
    told = make_plan([Regions()], facts(isolated={own: ("it's tied",)}, denied=(PAIR,)))
    assert [g.name for g in told.guarantees[4:]] == ["no_direct_write(copyleft, trunk)", "isolated(copyleft, adapter)"]
    assert why(told, "isolated(copyleft, adapter)") == "it's tied; Regions() couples regions"
    assert not told.holds(Promise.ISOLATED, own)


def test_a_class_that_writes_elsewhere_is_isolated_no_more_and_others_are() -> None:
    own, other = ("a", "a's"), ("b", "b's")
    plan = make_plan([], facts(isolated={own: (), other: ()}, denied=(("a", "trunk"), ("a", "head"), ("b", "trunk"))))
    written = plan.withdraw(Promise.NO_DIRECT_WRITE, "somebody wrote", ("a", "head"))
    assert [g.holds for g in written.guarantees[4:]] == [True, False, True, False, True]
    assert why(written, "isolated(a, a's)") == "somebody wrote"
    assert why(written, "isolated(b, b's)") == ISOLATED
    first = plan.withdraw(Promise.ISOLATED, "read by others", own)
    again = first.withdraw(Promise.NO_DIRECT_WRITE, "somebody wrote", ("a", "head"))
    assert why(again, "isolated(a, a's)") == "read by others", "what was withdrawn keeps its reason"
    assert [g.holds for g in plan.withdraw(Promise.RESUME, "x").guarantees] == [
        *(g.promise is not Promise.RESUME for g in plan.guarantees)
    ]
    recalled = plan.recalled([("no_direct_write(a, head)", "said so"), ("parity", "and this"), ("unknown", "x")])
    assert [g.name for g in recalled.guarantees if not g.holds] == [
        "parity",
        "no_direct_write(a, head)",
        "isolated(a, a's)",
    ]
    assert (why(recalled, "parity"), why(recalled, "isolated(a, a's)")) == ("and this", "said so")
    assert plan.recalled([]) == plan
    assert (written.methods, written.facts) == (plan.methods, plan.facts)


def test_a_promise_about_all_holds_where_each_of_its_pairs_does() -> None:
    plan = make_plan([], facts(denied=(("a", "x"), ("b", "x"))))
    promise = Promise.NO_DIRECT_WRITE
    assert plan.holds(promise)
    assert plan.holds(promise, ("a", "x"))
    assert not plan.holds(promise, ("c", "x"))
    assert not plan.holds(Promise.RESUME, ("a", "x"))
    assert not plan.withdraw(promise, "one of them", ("a", "x")).holds(promise)
    withdrawn = plan.withdraw(promise, "all of them")
    assert [g.because for g in withdrawn.guarantees if g.promise is promise] == ["all of them"] * 2
    assert not make_plan([], FACTS).holds(promise), "nobody promised it"


def test_a_guarantee_in_words() -> None:
    whole, paired = Guarantee(Promise.PARITY, holds=True, because="x"), Guarantee(Promise.ISOLATED, False, "y", PAIR)
    assert (whole.name, str(whole)) == ("parity", "holds   parity: x")
    assert (paired.name, str(paired)) == ("isolated(copyleft, trunk)", "broken  isolated(copyleft, trunk): y")


def test_a_plan_in_words_has_what_is_never_offered_and_who_signed() -> None:
    told = facts(
        rows_per_microbatch=None,
        never_offered=("3 of a", "1 of b"),
        provenance={"data": "signed", "policy": "declared"},
        row_coupled_layers=("norm",),
    )
    lines = make_plan([Regions(), Rows()], told).lines
    assert lines[:6] == (
        "V = 4 microbatches a step, as the batch gives rows each; rows are coupled by: Rows, norm",
        "     mix  Rows(): regions learn from mixed rows",
        " average  Regions()",
        "never offered, being deferred: 3 of a; 1 of b",
        "data: signed",
        "policy: declared",
    )
    assert lines[6].startswith("broken  parity")
    assert len(lines) == 10
    assert str(make_plan([Regions(), Rows()], told)) == "\n".join(lines)


def test_methods_are_found_by_their_stages_and_hooks() -> None:
    plan = make_plan([Regions(), Quiet(), Both(), Rows()], FACTS)
    assert plan.at(Stage.MIX, Stage.AVERAGE) == (Rows(), Regions())
    assert plan.at() == plan.at(Stage.LOSS) == ()
    assert (plan.with_hook("shapes"), plan.with_hook("batch")) == ((Both(),), ())


def test_a_plan_is_a_value_and_a_run_of_which_nothing_else_is_said_is_an_ordinary_one() -> None:
    for value in (Guarantee(Promise.PARITY, holds=True, because="x"), FACTS, make_plan([], FACTS)):
        field = dataclasses.fields(value)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field, None)
    with pytest.raises(TypeError):
        Facts(1, 2, True)  # type: ignore[misc]
    plain = Facts(num_microbatches=4, rows_per_microbatch=8, positional_data=True)
    assert [f.name for f in dataclasses.fields(plain) if getattr(plain, f.name)] == [
        "num_microbatches",
        "rows_per_microbatch",
        "positional_data",
        "deterministic",
        "num_sub_steps",
    ]
    assert (plain.deterministic, plain.num_sub_steps, plain.input_kind) == (True, 1, None)
    assert not any(value is True for value in (plain.own_loop, plain.regroups, plain.host_clock, plain.packed))


def test_the_digest_is_of_methods_in_their_order_and_of_settings() -> None:
    plan = make_plan([Quiet(number=2), Rows()], facts(settings={"seed": 3, "budget": ("1ba",), "odd": {3}}))
    content = {"methods": ["Rows()", "Quiet(number=2)"], "settings": {"budget": ["1ba"], "odd": "{3}", "seed": 3}}
    assert plan.digest == hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Ambiguous:
    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __eq__(self, other: object) -> bool:
        raise self.error

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "Ambiguous"


def test_a_method_is_described_by_what_isnt_its_default() -> None:
    assert describe(Quiet()) == "Quiet()"
    assert describe(Quiet(number=1, names=frozenset({"b", "c", "a"}), fresh=[1])) == (
        "Quiet(number=1, names={'a', 'b', 'c'}, fresh=[1])"
    )
    assert describe(Quiet(number=Any)) == f"Quiet(number={Any!r})"  # type: ignore[arg-type]
    for error in (RuntimeError, ValueError):
        told = Quiet(number=Ambiguous(error))  # type: ignore[arg-type]
        assert describe(told) == "Quiet(number=Ambiguous)"
    with pytest.raises(KeyError):
        describe(Quiet(number=Ambiguous(KeyError)))  # type: ignore[arg-type]
    assert describe(Quiet(fresh={"z", "y"})) == "Quiet(fresh={'y', 'z'})"


def test_an_option_that_is_the_very_default_isnt_compared() -> None:
    one = Ambiguous(RuntimeError)

    @dataclass(frozen=True, kw_only=True)
    class Held(Quiet):
        thing: Any = one

    assert describe(Held()) == "Held()"
    assert describe(Held(thing=Ambiguous(RuntimeError))) == "Held(thing=Ambiguous)"


def test_what_is_no_whole_method_is_refused_with_the_mend() -> None:
    check_methods([Quiet(), Rows()])
    with pytest.raises(PlanError, match=r"^3 is not a method. Give instances"):
        check_methods([Quiet(), 3])

    @dataclass(frozen=True, kw_only=True)
    class Homeless(Method):
        pass

    @dataclass(frozen=True, kw_only=True)
    class Numbered(Method):
        stage: ClassVar[Any] = 100

    with pytest.raises(PlanError, match=r"Homeless has no stage, and methods act.*= Stage.GRADIENT"):
        check_methods([Homeless()])
    with pytest.raises(PlanError, match="Numbered has the stage 100, and"):
        check_methods([Numbered()])

    @dataclass(frozen=True, kw_only=True)
    class Former(Quiet):
        def init(self, model: Any) -> Any:
            return {}

    with pytest.raises(PlanError, match=r"Former.init\(model\) can't be called"):
        make_plan([Quiet(), Former()], FACTS)


def test_a_method_of_two_kinds_of_input_takes_either_and_no_third() -> None:
    for kind in ("tokens", "images", None):
        assert make_plan([Both()], facts(input_kind=kind)).methods == (Both(),)
    with pytest.raises(PlanError, match=r"Both\(\) changes images or tokens, and the model's input here is features"):
        make_plan([Both()], facts(input_kind="features"))
    assert make_plan([Quiet()], facts(input_kind="features")).methods == (Quiet(),), "who reads no input takes any"


def test_owners_are_named_in_the_order_in_which_they_were_given() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Other(Rows):
        stage: ClassVar[Stage] = Stage.SHAPE

    with pytest.raises(PlanError, match=r"^Rows\(\) and Other\(\) both own the inputs, and a run has one. Remove one"):
        make_plan([Rows(), Other()], FACTS)
    with pytest.raises(PlanError, match=r"^Soft\(\) and Rows\(\) both own the labels.*to its off-value"):
        make_plan([Rows()], facts(owned={"labels": "Soft()", "weights": "W()"}))
    owned = {"weights": "W()"}
    assert make_plan([Rows()], facts(owned=owned)).methods == (Rows(),)
    assert owned == {"weights": "W()"}, "the run's own list stays as it is"


def test_who_splits_the_loss_mixes_last() -> None:
    for before in ([Rows()], [Rows(), Splits(is_on=False)]):
        assert make_plan([*before, Splits()], FACTS).methods == (*before, Splits())
    with pytest.raises(PlanError, match=r"Splits\(\) leaves two targets.*Rows\(\) can't mix again. Give Rows before"):
        make_plan([Splits(is_on=False), Splits(), Rows()], FACTS)
    later = make_plan([Quiet(), Splits()], FACTS)
    assert later.methods == (Splits(), Quiet())
