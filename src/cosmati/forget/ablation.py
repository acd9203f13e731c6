"""Ablation with repair: the parameters that a class taught are set to zero, and the rest is trained on without it.

That is an approximation, and says so: what other parameters have learnt of the class through activations stays. What
it comes to is measured, on rows of the run's own plan, before, between and after. Whatever has to be exact is replayed,
or dropped where it's isolated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cosmati.core.batch import TOMBSTONE, Batch
from cosmati.core.loss import Loss, as_loss, without_tombstones
from cosmati.core.source import Source
from cosmati.core.state import load_model_tensors, model_tensors, parameter_root
from cosmati.data.tombstoned import Tombstoned
from cosmati.errors import CheckpointError, PlanError, TamperError
from cosmati.ledger.query import VerifiedLedger, contributions
from cosmati.ledger.roots import signed_roots
from cosmati.records.joint_classes import members_of
from cosmati.storage.atomic import draft_of, publish, replace_file
from cosmati.train.evaluation import kept_state
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.trainer import Trainer

Fill = Literal["zero", "initial"]
MeasureModel = Callable[[nn.Module], Mapping[str, float]]
STRENGTH = "approximate: measured, and no more is promised"
REPORT = "ablation.json"
"""In the folder of the repaired run."""
NOT_COVERED = (
    "what other regions learnt of the class through activations: only regions that it taught directly are ablated",
    "the run's own checkpoints and averages, exports, merges, adapters, caches, backups and deployed copies",
    "preparation artifacts that were made with the class's content",
)
"""What an ablation leaves, whatever was measured."""
MIN_SHARE = 0.9


Wrap = Callable[[object], Source]
"""Puts another source around a run's own."""


class MakeModel(Protocol):
    """Makes the run's trainer anew; of a recipe: replace `data` by `wrap(recipe.data())`, and settings of `config`."""

    def __call__(self, wrap: Wrap, **config: object) -> Trainer:
        """Return it.

        Args:
            wrap: puts another source around the run's own.
            config: settings of `RunConfig` that differ: `run_folder`, `budget`, `load_weights`, `evaluate_every`.
        """
        ...


@dataclass(frozen=True)
class RegionShare:
    """How much of what a region was taught came from the classes.

    Attributes:
        region: its name.
        share: of what its rows weighed, times their routes, in the steps that stand; 0 to 1.
        norm_share: of the logged gradient norms; None where none was logged. Neither is influence.
    """

    region: str
    share: float
    norm_share: float | None


@dataclass(frozen=True)
class AblationReport:
    """What was ablated, and what came of it.

    Attributes:
        classes: that were to go.
        ablated: the regions, and how much of each the classes taught.
        left: regions that the classes taught too, and that stay as they are.
        num_parameters: numbers in the ablated regions.
        fill: what was put in place: zeros, or what the run began with.
        repair_steps: steps of training on what is retained.
        before, between, after: measured of the run's weights, of the ablated ones, and of the repaired ones: `retain`
            and `forget` are mean losses on rows of the plan; others are the caller's.
        roots: Merkle roots of the three states of weights, in hex.
        strength: in words.
        not_covered: what still may hold the content.
    """

    classes: tuple[str, ...]
    ablated: tuple[RegionShare, ...]
    left: tuple[RegionShare, ...]
    num_parameters: int
    fill: Fill
    repair_steps: int
    before: Mapping[str, float]
    between: Mapping[str, float]
    after: Mapping[str, float]
    roots: tuple[str, str, str]
    strength: str = STRENGTH
    not_covered: tuple[str, ...] = NOT_COVERED

    def to_json(self) -> str:
        """Return it as JSON text."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        lines = [f"ablation of {', '.join(self.classes)}; {self.strength}"]
        for title, regions in (("ablated", self.ablated), ("left", self.left)):
            lines += [f"  {title:<9}{one.region}, of whose teaching {one.share:.1%} was theirs" for one in regions]
        lines.append(f"  repair   {self.repair_steps} steps; {self.num_parameters:,} numbers were set to {self.fill}")
        for name in self.before:
            values = " -> ".join(f"{found[name]:.4f}" for found in (self.before, self.between, self.after))
            lines.append(f"  {name:<9}{values}")
        return "\n".join([*lines, *(f"  not covered: {one}" for one in self.not_covered)])


def region_shares(ledger: VerifiedLedger, classes: Collection[str]) -> tuple[RegionShare, ...]:
    """Return how much of what each region was taught came from rows of the classes, and from those of several.

    Raises:
        PlanError: the ledger has no such class, or none of its rows taught anything; or a policy change in mid-run
            divided the parameters otherwise.
    """
    known = {member for name in ledger.classes for member in members_of(name)}
    if unknown := sorted(set(classes) - known):
        msg = f"The ledger has no class {', '.join(map(repr, unknown))}; it has {', '.join(sorted(known))}. Mend it."
        raise PlanError(msg)
    if len({tables.regions for tables in ledger.tables}) > 1:
        msg = "The run's policies divided its parameters in several ways, so no share of a region is told. Replay it."
        raise PlanError(msg)
    cells = contributions(ledger).cells
    found = []
    for region in ledger.regions:
        own = [c for c in cells if c.region == region]
        theirs = [c for c in own if set(members_of(c.class_name)) & set(classes)]
        total, norms = (sum(c.weight for c in own), sum(c.norm_sum for c in own))
        share = sum(c.weight for c in theirs) / total if total else 0.0
        norm_share = sum(c.norm_sum for c in theirs) / norms if norms > 0 else None
        found.append(RegionShare(region, share, norm_share))
    if not any(one.share for one in found):
        raise PlanError(f"No row of {', '.join(classes)} taught anything in this run: there is nothing to ablate.")
    return tuple(found)


def separated(
    shares: Sequence[RegionShare], classes: Collection[str], min_share: float = MIN_SHARE
) -> tuple[RegionShare, ...]:
    """Return the regions that only or mostly the classes taught.

    Raises:
        PlanError: `min_share` isn't above a half, or there's no such region; each is named with its share.
    """
    if not 0.5 < min_share <= 1:
        msg = f"min_share={min_share}: mostly is more than a half, and 1 at most. With less, others' work is ablated."
        raise PlanError(msg)
    if found := tuple(one for one in shares if one.share >= min_share):
        return found
    told = ", ".join(f"{one.region} {one.share:.1%}" for one in shares)
    msg = (
        f"No region separates {', '.join(classes)} from the rest: of what each was taught they gave {told}, and "
        f"{min_share:.0%} are needed. Replay the run without them; next time let a policy give them a region of their "
        "own (SelectiveGradientMasking), or IsolatedAdapters."
    )
    raise PlanError(msg)


def ablate(
    run: Path,
    make: MakeModel,
    classes: Sequence[str],
    out: Path,
    *,
    repair_steps: int,
    min_share: float = MIN_SHARE,
    fill: Fill = "zero",
    measured_steps: int = 4,
    measure: MeasureModel | None = None,
    vkey: str | None = None,
) -> AblationReport | None:
    """Ablate the regions that only or mostly some classes taught, and repair the rest by training without them.

    The repaired run is a run of its own in `out`, derived from the ablated weights: the same recipe, over the same data
    with tombstones, from its first step on. After a kill, call it again with the same.

    Args:
        run: folder of the run, with a ledger and a checkpoint.
        make: makes its trainer.
        classes: whose regions.
        out: folder of the repaired run.
        repair_steps: of training on what is retained, 1 at least.
        min_share: of what a region was taught that has to be the classes'.
        fill: zeros, or what the recipe begins with.
        measured_steps: of the plan, on whose rows losses are measured.
        measure: what else is measured of a model, by name.
        vkey: the operator's verifier key from a source that you trust.

    Returns:
        What came of it; None where somebody stopped the repair, which the same call goes on with.

    Raises:
        PlanError: no region separates the classes, or the losses can't be measured.
        CheckpointError: the run has no checkpoint, or it doesn't fit.
        TamperError: the ledger doesn't verify, or signs other weights.
    """
    if repair_steps < 1 or measured_steps < 1:
        msg = f"repair_steps={repair_steps}, measured_steps={measured_steps}: both are 1 at least."
        raise PlanError(msg)
    ledger = VerifiedLedger(run / "ledger", vkey)
    shares = region_shares(ledger, classes)
    chosen = separated(shares, classes, min_share)
    probe = _Probe(make, classes, measured_steps, measure)
    if probe.trainer.assembly.ranks.is_parallel:
        raise PlanError("An ablation is measured in one process. Run it without torchrun.")
    weights = _weights_of(run, ledger)
    ablated, num_parameters = _without(probe, weights, [one.region for one in chosen], fill)
    before, between = probe(weights), probe(ablated)
    _refuse_unmeasured(before, "Before the ablation", "no such row may be in the steps: give more measured_steps")
    _refuse_unmeasured(between, "With the region ablated", "something divides by it: use fill='initial'")
    file = _keep(ablated, out)
    repair = make(
        probe.without_classes, run_folder=out, budget=f"{repair_steps}ba", load_weights=file, evaluate_every=None
    )
    if repair.fit().outcome == "stopped":
        return None
    repaired = model_tensors(repair.model)
    after = probe(repaired)
    _refuse_unmeasured(after, "After the repair", "it diverged: repair in another folder, with fewer steps")
    report = AblationReport(
        classes=tuple(classes),
        ablated=chosen,
        left=tuple(one for one in shares if one.share and one not in chosen),
        num_parameters=num_parameters,
        fill=fill,
        repair_steps=repair_steps,
        before=before,
        between=between,
        after=after,
        roots=(parameter_root(weights).hex(), parameter_root(ablated).hex(), parameter_root(repaired).hex()),
    )
    replace_file(out / REPORT, report.to_json().encode())
    return report


def ablated_weights(out: Path) -> Path:
    """Return the file of the weights that a repaired run begins from: beside its folder."""
    return out.with_name(out.name + ".ablated.safetensors")


def _refuse_unmeasured(found: Mapping[str, float], when: str, mend: str) -> None:
    if bad := [name for name, value in found.items() if not math.isfinite(value)]:
        raise PlanError(f"{when}, {' and '.join(bad)} can't be measured: {found[bad[0]]}; {mend}.")


def _weights_of(run: Path, ledger: VerifiedLedger) -> Mapping[str, Tensor]:
    """Return the newest checkpoint's weights, which the ledger has to sign."""
    found = list_checkpoints(run / "checkpoints")
    if not found:
        raise CheckpointError(f"{run} has no checkpoint to ablate. Give the folder of a run that has trained.")
    weights = read_checkpoint(found[0]).model
    if parameter_root(weights) not in {one.root for one in signed_roots(ledger) if one.stands}:
        raise TamperError(f"{found[0]} holds weights that the run's ledger doesn't sign. Take the run's own.")
    return weights


def _keep(tensors: Mapping[str, Tensor], out: Path) -> Path:
    """Write the weights that the repair begins from; one that has begun goes on from those that it began from.

    Raises:
        PlanError: `out` has begun from others.
    """
    path = ablated_weights(out)
    if out.exists():
        if not path.exists() or parameter_root(load_file(path)) != parameter_root(tensors):
            msg = f"{out} is there already, and doesn't repair these weights. Name another folder, or remove it."
            raise PlanError(msg)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_of(path)
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, draft)
    publish(draft, path)
    return path


class _Probe:
    """Measures weights on the run's own rows: those of the classes, and the others."""

    def __init__(self, make: MakeModel, classes: Sequence[str], num_steps: int, measure: MeasureModel | None) -> None:
        self._classes, self._num_steps, self._measure = set(classes), num_steps, measure
        self.trainer = make(self.without_classes, run_folder=None, load_weights=None)
        self._other = make(self._only_classes, run_folder=None, load_weights=None)
        self.initial = {name: value.clone() for name, value in model_tensors(self.trainer.model).items()}

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, float]:
        """Return what is measured of weights."""
        for trainer in (self.trainer, self._other):
            load_model_tensors(trainer.model, weights)
            trainer.model.eval()
        found = {"retain": self._loss(self.trainer), "forget": self._loss(self._other)}
        return found | dict(self._measure(self.trainer.model) if self._measure is not None else {})

    def without_classes(self, source: object) -> Source:
        """Return a source with tombstones in place of the classes' rows."""
        return Tombstoned(*self._told_apart(source, is_theirs=True))

    def _only_classes(self, source: object) -> Source:
        return Tombstoned(*self._told_apart(source, is_theirs=False))

    def _told_apart(self, source: object, *, is_theirs: bool) -> tuple[Source, list[str]]:
        if not isinstance(source, Source):
            msg = (
                f"The recipe's data are a {type(source).__name__}, and only a Source's rows can have tombstones in "
                "their places. Train anew without them."
            )
            raise PlanError(msg)
        return source, [name for name in source.class_names if bool(self._classes & {*members_of(name)}) == is_theirs]

    def _loss(self, trainer: Trainer) -> float:
        """Return the mean loss over the rows that are there, in the first steps of the plan; NaN where none is."""
        a, total, weight = trainer.assembly, 0.0, 0.0
        assert trainer.feed is not None, "made over a source"
        with kept_state(a.model, [turn.loss for turn in a.turns]):
            for step in range(self._num_steps):
                for batch in filter(_has_content, trainer.feed.again(step)):
                    with a.config.autocast(a.device):
                        result = as_loss(a.turns[0].loss(a.model, batch.to(a.device).data))
                    found = without_tombstones(result, batch.present)
                    value, own = (found.sum, found.weight) if isinstance(found, Loss) else (found, 1.0)
                    total += float(value.detach())
                    weight += float(own)
        return total / weight if weight else math.nan


def _has_content(batch: Batch) -> bool:
    ids = batch.lineage.row_ids if batch.lineage.token_row_ids is None else batch.lineage.token_row_ids
    return bool((ids != TOMBSTONE).any())


def _without(
    probe: _Probe, weights: Mapping[str, Tensor], regions: Sequence[str], fill: Fill
) -> tuple[dict[str, Tensor], int]:
    """Return the weights with regions' parameters filled anew, and how many numbers these are.

    Raises:
        PlanError: the trainer's policy has no such region, so it isn't the run's.
    """
    own = probe.trainer.assembly.regions
    if missing := sorted(set(regions) - set(own.names)):
        msg = (
            f"The trainer's policy has no region {', '.join(missing)}, and the run's has. Make it as the run's own was."
        )
        raise PlanError(msg)
    names = {name for region in regions for name in own.parameters[own.names.index(region)]}
    filled = {name: value.clone() for name, value in weights.items()}
    for name in names:
        filled[name] = torch.zeros_like(weights[name]) if fill == "zero" else probe.initial[name]
    return filled, sum(weights[name].numel() for name in names)
