"""What a run will do, decided before it starts: order, checks, guarantees, digest. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from cosmati.core.batch import InputKind
from cosmati.core.method import Method, Stage, check_hooks, overrides
from cosmati.errors import PlanError


class Promise(StrEnum):
    """What a run may promise; `docs/guarantees.md` says what each one means, and names its test."""

    PARITY = "parity"
    RESUME = "resume"
    ELASTIC = "elastic"
    REPLAYABLE = "replayable"
    NO_DIRECT_WRITE = "no_direct_write"
    ISOLATED = "isolated"


Pair = tuple[str, str]
"""Names of a class and of a region."""


@dataclass(frozen=True)
class Guarantee:
    """A promise, whether it holds for this run, and what it rests on or what broke it.

    Attributes:
        promise: which one.
        holds: whether it does.
        because: what it rests on, or what broke it.
        pair: class and region that it's about; None where it's about the whole run.
    """

    promise: Promise
    holds: bool
    because: str
    pair: Pair | None = None

    @property
    def name(self) -> str:
        """The promise as it's printed and recorded."""
        return str(self.promise) if self.pair is None else f"{self.promise}({', '.join(self.pair)})"

    def __str__(self) -> str:
        return f"{'holds ' if self.holds else 'broken'}  {self.name}: {self.because}"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the plan needs to know of the rest of a run.

    Attributes:
        num_microbatches: V.
        rows_per_microbatch: None where the user feeds batches by hand.
        positional_data: batches are a pure function of the position, or their loader restores its own state.
        own_loop: a loop of the user's gives the batches; nothing is known of which come next.
        regroups: a step's rows come together, and are regrouped by class.
        input_kind: images or tokens; None where that isn't known before the first step.
        loss_couples: what the loss declares (`couples="rows"`), with its name; empty otherwise.
        row_coupled_layers: names of modules whose forward couples the rows of a microbatch (BatchNorm).
        rounded_statistics: those of them whose running statistics are folded, and aren't float32 of PyTorch's kernels.
        host_clock: the budget or a span is in seconds.
        deterministic: deterministic kernels were asked for.
        couplings: what else couples regions, in words: optimizers, statistics that lie in no region.
        packed: rows are packs, whose tokens have classes of their own.
        denied: (class, region) pairs that the policy denies in every phase in which the class is admitted.
        isolated: (class, region) pairs of what classes have of their own, with what speaks against their isolation.
        never_offered: deferred microbatches for which the run has no room later, by class, in words.
        has_ledger: the run keeps a ledger.
        num_sub_steps: alternating losses.
        provenance: whether data and policy are signed, or declared by whoever wrote them, in words.
        owned: what optimizers own that only one part of a run may hold, with the owner's name.
        settings: everything else that determines the run's bits, for the digest.
    """

    num_microbatches: int
    rows_per_microbatch: int | None
    positional_data: bool
    own_loop: bool = False
    regroups: bool = False
    input_kind: InputKind | None = None
    loss_couples: str = ""
    row_coupled_layers: tuple[str, ...] = ()
    rounded_statistics: tuple[str, ...] = ()
    host_clock: bool = False
    deterministic: bool = True
    couplings: tuple[str, ...] = ()
    packed: bool = False
    denied: tuple[Pair, ...] = ()
    isolated: Mapping[Pair, tuple[str, ...]] = field(default_factory=dict)
    never_offered: tuple[str, ...] = ()
    has_ledger: bool = False
    num_sub_steps: int = 1
    provenance: Mapping[str, str] = field(default_factory=dict)
    owned: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """The methods in their order, with what follows from composing them.

    `print(plan)` shows it; `digest` identifies it.
    """

    methods: tuple[Method, ...]
    guarantees: tuple[Guarantee, ...]
    facts: Facts

    def at(self, *stages: Stage) -> tuple[Method, ...]:
        """Return the methods of some stages, in order."""
        return tuple(method for method in self.methods if method.stage in stages)

    def with_hook(self, hook: str) -> tuple[Method, ...]:
        """Return the methods that override a hook, in order."""
        return tuple(method for method in self.methods if overrides(method, hook))

    @property
    def digest(self) -> str:
        """SHA-256 of methods and settings, in hex."""
        content = {
            "methods": [describe(method) for method in self.methods],
            "settings": dict(self.facts.settings),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def lines(self) -> tuple[str, ...]:
        """The plan in words, a line each."""
        facts = self.facts
        rows = "as the batch gives" if facts.rows_per_microbatch is None else str(facts.rows_per_microbatch)
        coupled = [type(m).__name__ for m in self.methods if "rows" in m.couples] + list(facts.row_coupled_layers)
        shape = f"V = {facts.num_microbatches} microbatches a step, {rows} rows each"
        head = [f"{shape}; rows are coupled by: {', '.join(coupled) or 'nothing'}"]
        methods = [
            f"{m.stage.name.lower():>8}  {': '.join(filter(None, (describe(m), m.contract)))}" for m in self.methods
        ]
        left = [f"never offered, being deferred: {'; '.join(facts.never_offered)}"] if facts.never_offered else []
        signed = [f"{name}: {state}" for name, state in facts.provenance.items()]
        return (*head, *methods, *left, *signed, *(str(guarantee) for guarantee in self.guarantees))

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def holds(self, promise: Promise, pair: Pair | None = None) -> bool:
        """Say whether the run makes a promise: about a class and a region, or about all that it's made of."""
        asked = [g.holds for g in self.guarantees if g.promise is Promise(promise) and pair in (None, g.pair)]
        return bool(asked) and all(asked)

    def withdraw(self, promise: Promise, because: str, pair: Pair | None = None) -> Plan:
        """Return the plan with a promise taken back, for a class and a region or for all."""
        return self._without(lambda g: because if g.promise is Promise(promise) and pair in (None, g.pair) else None)

    def recalled(self, withdrawn: Iterable[tuple[str, str]]) -> Plan:
        """Return the plan without what a record says was taken back: names as `Guarantee.name`, and reasons."""
        reasons = dict(withdrawn)
        return self._without(lambda g: reasons.get(g.name))

    def _without(self, reason: Callable[[Guarantee], str | None]) -> Plan:
        found = [(g, reason(g)) for g in self.guarantees]
        changed = tuple(g if why is None else dataclasses.replace(g, holds=False, because=why) for g, why in found)
        return dataclasses.replace(self, guarantees=_at_rest(changed))


def describe(method: Method) -> str:
    """Return a method as the call that makes it, with the options that aren't defaults."""
    options = [
        f"{f.name}={_repr(getattr(method, f.name))}"
        for f in dataclasses.fields(method)
        if f.init and not _is_same(getattr(method, f.name), f.default)
    ]
    return f"{type(method).__name__}({', '.join(options)})"


def _is_same(value: object, default: object) -> bool:
    """Say whether an option is its default; of arrays and tensors, whether it's that very one."""
    try:
        return value is default or bool(value == default)
    except (RuntimeError, ValueError):  # They're compared item by item.
        return False


def _repr(value: object) -> str:
    """Return what Python prints; of sets, in an order of their own, which doesn't change from process to process."""
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(repr, value)))}}}"
    return repr(value)


def check_methods(methods: Sequence[object]) -> None:
    """Check that methods are whole, each by itself, before anything is asked of them.

    Raises:
        PlanError: one isn't a method, has no stage, or a hook with other arguments than the loop gives.
    """
    for method in methods:
        if not isinstance(method, Method):
            msg = f"{method!r} is not a method. Give instances, such as LabelSmoothing(smoothing=0.1)."
            raise PlanError(msg)
        stage = getattr(method, "stage", None)
        if not isinstance(stage, Stage):
            msg = (
                f"{type(method).__name__} has {'no stage' if stage is None else f'the stage {stage!r}'}, and methods "
                "act in the order of theirs. Say in its class where it acts: stage: ClassVar[Stage] = Stage.GRADIENT."
            )
            raise PlanError(msg)
        check_hooks(method)


def make_plan(methods: Sequence[Method], facts: Facts) -> Plan:
    """Order and check methods, and work out what the run may promise.

    Raises:
        PlanError: two methods own one thing, or one can't work with this loss.
    """
    check_methods(methods)
    _check_owners(methods, facts.owned)
    for method in methods:
        if method.reads and facts.input_kind and facts.input_kind not in method.reads:
            msg = (
                f"{describe(method)} changes {' or '.join(sorted(method.reads))}, and the model's input here is "
                f"{facts.input_kind}. Remove it from the methods of this run."
            )
            raise PlanError(msg)
    # Python's sort is stable: ties keep the user's order.
    ordered = tuple(sorted(methods, key=lambda method: method.stage))
    _check_mixing([method for method in ordered if method.stage is Stage.MIX])
    return Plan(ordered, tuple(_guarantees(ordered, facts)), facts)


def _check_owners(methods: Sequence[Method], owned: Mapping[str, str]) -> None:
    owners = dict(owned)
    for method in methods:
        for thing in sorted(method.claims):
            if thing in owners:
                msg = (
                    f"{owners[thing]} and {describe(method)} both own the {thing}, and a run has one. "
                    "Remove one of them, or set the option that claims it to its off-value."
                )
                raise PlanError(msg)
            owners[thing] = describe(method)


def _check_mixing(methods: Sequence[Method]) -> None:
    for first, second in itertools.pairwise(methods):
        if "loss interpolation" in first.claims:
            msg = (
                f"{describe(first)} leaves two targets and a share, which {describe(second)} can't mix again. Give "
                f"{type(second).__name__} before it, or leave interpolate_loss off."
            )
            raise PlanError(msg)


def _guarantees(methods: Sequence[Method], facts: Facts) -> list[Guarantee]:
    clock = ["the host's clock decides its length"] if facts.host_clock else []
    data = [] if facts.positional_data else ["the data's order isn't a function of the position, nor restored"]
    kernels = [] if facts.deterministic else ["deterministic kernels are off"]
    base = data + clock + kernels
    single = ["V = 1 runs on one rank"] if facts.num_microbatches == 1 else []
    unlike = ["a step's rows are regrouped by class, into microbatches of unlike sizes"] if facts.regroups else []
    loop = ", if your loop goes on with the rows of step `trainer.clock.step`" if facts.own_loop else ""
    ledger = [] if facts.has_ledger else ["no ledger is kept"]
    changed = [f"methods change the step: {', '.join(map(describe, methods))}"] if methods else []
    if facts.rounded_statistics:
        names = ", ".join(facts.rounded_statistics)
        changed.append(f"the statistics of {names} are folded, and aren't float32 of PyTorch's kernels")
    if facts.settings.get("gather_precision"):
        changed.append(f"passes read weights rounded to {facts.settings['gather_precision']} (gather_precision)")
    promises = [
        _promise(Promise.PARITY, changed, "no methods"),
        _promise(Promise.RESUME, base, f"model, optimizer, method states and the clock are all the state{loop}"),
        _promise(
            Promise.ELASTIC,
            base + single + unlike,
            f"any number of ranks that divides V = {facts.num_microbatches}",
        ),
        _promise(Promise.REPLAYABLE, base + ledger, "data, draws and order follow from the position"),
    ]
    promises += [_direct_write(methods, facts, pair) for pair in facts.denied]
    return promises + [_isolated(methods, facts, pair) for pair in facts.isolated]


def _promise(promise: Promise, broken_by: Sequence[str], because: str, pair: Pair | None = None) -> Guarantee:
    return Guarantee(promise, not broken_by, "; ".join(broken_by) or because, pair)


def _at_rest(guarantees: tuple[Guarantee, ...]) -> tuple[Guarantee, ...]:
    """Withdraw that a class is isolated where it isn't promised any more that it writes nothing into some region."""
    written = {
        g.pair[0]: g for g in guarantees if g.promise is Promise.NO_DIRECT_WRITE and g.pair is not None and not g.holds
    }
    return tuple(
        dataclasses.replace(g, holds=False, because=written[g.pair[0]].because)
        if g.promise is Promise.ISOLATED and g.holds and g.pair is not None and g.pair[0] in written
        else g
        for g in guarantees
    )


def _direct_write(methods: Sequence[Method], facts: Facts, pair: Pair) -> Guarantee:
    leaf = "its tokens' part of each gradient is left out" if facts.packed else "its leaf is absent"
    because = f"{leaf}, and its denominator separate"
    return _promise(Promise.NO_DIRECT_WRITE, _leaks(methods, facts), because, pair)


def _isolated(methods: Sequence[Method], facts: Facts, pair: Pair) -> Guarantee:
    because = "no other class reads it or teaches it, and the class teaches nothing else"
    return _promise(Promise.ISOLATED, [*facts.isolated[pair], *_leaks(methods, facts)], because, pair)


def _leaks(methods: Sequence[Method], facts: Facts) -> list[str]:
    # Rows of one microbatch are of one class, so coupled rows don't leak, save in packs; coupled regions do.
    leaks = [f"{describe(method)} couples regions" for method in methods if "regions" in method.couples]
    leaks += facts.couplings + (row_couplings(methods, facts) if facts.packed else ())
    if facts.num_sub_steps > 1:
        leaks.append("alternating sub-steps let one commit change what the next one reads")
    return leaks


def row_couplings(methods: Sequence[Method], facts: Facts) -> tuple[str, ...]:
    """Say what couples the documents of a pack: methods, the loss and layers that couple rows."""
    found = [f"{describe(method)} couples rows" for method in methods if "rows" in method.couples]
    found += ["the loss couples rows"] if facts.loss_couples else []
    found += [f"{name} couples rows" for name in facts.row_coupled_layers]
    return tuple(found)
