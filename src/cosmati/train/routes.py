"""Which regions a microbatch may teach: its class, looked up in the policy at the step's phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from cosmati.core.batch import TOMBSTONE, Batch
from cosmati.core.isolated import Isolated, running
from cosmati.errors import PlanError, RunError
from cosmati.routing.policy import CompiledPolicy
from cosmati.routing.regions import Regions
from cosmati.train.followed import check_rows, classes_in
from cosmati.train.token_routes import TokenRoute, count_tokens, token_classes


class Route(NamedTuple):
    """What one microbatch may teach.

    Attributes:
        id: index into the policy's routes; 0 without a policy.
        phase: index of the policy's phase.
        weights: one for each region.
        offered: False where the decision is to reject or defer, or all rows are tombstones: no forward pass.
        tokens: what the tokens may teach where rows are packs; None otherwise. Of packs, `id` and `class_id` are -1,
            and a region's weight is 1 where its tokens' differ.
        num_rows: of the microbatch, as the data give it.
        num_tokens: likewise.
        kind: the policy's kind of the rows; where it tells none apart, their band.
    """

    id: int
    phase: int
    class_id: int
    weights: tuple[float, ...]
    offered: bool
    tokens: TokenRoute | None = None
    num_rows: int = 0
    num_tokens: int = 0
    kind: int = 0


class Router:
    """Looks routes up; without a policy every region learns from every microbatch.

    Args:
        policy: compiled, or None.
        regions: of the model.
        class_map: policy's class of each of the source's classes.
        kind_of: policy's kind of rows of what a batch calls its band.
        isolated: what classes have of their own in the model.
        token_kinds: policy's kind of the tokens of each of the source's classes; empty where packs say none.
        class_names: of the source's classes.
    """

    def __init__(
        self,
        policy: CompiledPolicy | None,
        regions: Regions,
        class_map: Sequence[int],
        kind_of: Callable[[int], int] = int,
        isolated: Mapping[str, Isolated] | None = None,
        token_kinds: Sequence[int] = (),
        class_names: Sequence[str] = (),
    ) -> None:
        self._policy, self._kind_of, self._token_kinds = policy, kind_of, token_kinds
        self.class_names = tuple(class_names)
        self._regions = regions
        self._class_map = class_map
        self._isolated = list((isolated or {}).values())

    def tighten(self, policy: CompiledPolicy) -> None:
        """Go by a policy that takes more away than the one before, over the same classes and regions."""
        self._policy = policy

    def go_by(self, policy: CompiledPolicy, kind_of: Callable[[int], int], token_kinds: Sequence[int] = ()) -> None:
        """Go by another policy over the same classes and regions."""
        self._policy, self._kind_of, self._token_kinds = policy, kind_of, token_kinds

    @property
    def num_classes(self) -> int:
        """Classes of the source; 0 without a policy."""
        return len(self._class_map)

    def _kind_of_tokens(self, class_id: int, band: int) -> int:
        """Return the kind of a source's class of tokens; where the policy tells none apart, the band of their rows."""
        if self._policy is None or len(self._policy.kinds) == 1:
            return band
        return self._token_kinds[class_id] if self._token_kinds else 0

    def found(
        self, mine: Sequence[Batch], class_ids: Sequence[int | None], step: int, device: torch.device
    ) -> torch.Tensor:
        """Return what routes depend on beside classes: if a microbatch is empty, its band, its size, tokens by class.

        Args:
            mine: this rank's microbatches.
            class_ids: of all V microbatches.
            step: at which this rank stands.
            device: of the result.

        Returns:
            float64 [V / W, 5], or [V / W, 5 + classes] where a policy meets packs.
        """
        flags = empty_flags(mine, step, device)
        if self._policy is None or None not in class_ids:
            return flags
        return torch.cat([flags, count_tokens(mine, self.num_classes, device)], dim=1)

    def routes(self, class_ids: Sequence[int | None], step: int, found: torch.Tensor) -> list[Route]:
        """Look up what each of a step's V microbatches may teach; `found` of all ranks' together.

        Raises:
            RunError: a rank stands at another step.
        """
        rows = found.tolist()
        if len(steps := {int(row[0]) for row in rows}) > 1:
            msg = (
                f"Ranks are at steps {' and '.join(map(str, sorted(steps)))}: one has failed at what others have "
                "committed, and has gone on. End all of them, and go on from the last checkpoint."
            )
            raise RunError(msg)
        return [
            self.route_of(class_id, step, int(band), is_empty=bool(flag), tokens=tokens)._replace(
                num_rows=int(num_rows), num_tokens=int(num_tokens)
            )
            for class_id, (_, flag, band, num_rows, num_tokens, *tokens) in zip(class_ids, rows, strict=True)
        ]

    def route_of(
        self, class_id: int | None, step: int, band: int = 0, *, is_empty: bool = False, tokens: Sequence[float] = ()
    ) -> Route:
        """Look up what a microbatch may teach at a step.

        Args:
            class_id: of its rows; None where they're packs.
            step: of the run.
            band: of its rows.
            is_empty: it holds nothing but tombstones.
            tokens: of packs, how many there are of each class.
        """
        policy = self._policy
        if policy is None:
            return Route(0, 0, 0, (1.0,) * len(self._regions.names), not is_empty, kind=band)
        if class_id is None:
            return self._route_of_packs(policy, step, tokens, band)
        own = self._class_map[class_id]
        phase, kind = policy.phase_at(step), self._kind_of(band) if len(policy.kinds) > 1 else band
        offered = policy.decision[policy.row(own, kind)][phase] in ("admit", "gate") and not is_empty
        route_id, weights = policy.route_id(own, phase, kind), policy.route(own, step, kind)
        return Route(route_id, phase, own, weights, offered, kind=kind)

    def _route_of_packs(self, policy: CompiledPolicy, step: int, tokens: Sequence[float], band: int) -> Route:
        """Combine the routes of the classes and kinds that a microbatch has tokens of."""
        phase, none = policy.phase_at(step), (0.0,) * len(self._regions.names)
        present = [c for c, num in enumerate(tokens) if num]
        of_class = [(own, self._kind_of_tokens(c, band)) for c, own in enumerate(self._class_map)]
        rows = [policy.row(*one) for one in of_class]
        offered = [c for c in present if policy.decision[rows[c]][phase] in ("admit", "gate")]
        table = torch.tensor([*(policy.weight[row][phase] for row in rows), none], dtype=torch.float64)
        chosen = table[present or [-1]]
        differ = (chosen != chosen[:1]).any(0)
        mixed = frozenset(differ.nonzero().flatten().tolist())
        withheld = tuple(c for c in present if c not in offered)
        cells = tuple((own, kind, policy.route_id(own, phase, kind)) for own, kind in of_class)
        alike = tuple(torch.where(differ, 1.0, chosen[0]).tolist())
        return Route(-1, phase, -1, alike, bool(offered), TokenRoute(table, mixed, withheld, cells))

    def decision(self, class_id: int, step: int, band: int = 0, *, in_packs: bool = False) -> str:
        """Return what is decided on rows of a class at a step; `admit` where there's no policy.

        Args:
            class_id: as the source numbers it.
            step: of the run.
            band: of the rows.
            in_packs: they're packed with others.
        """
        policy = self._policy
        if policy is None:
            return "admit"
        kind = self._kind_of(band) if len(policy.kinds) > 1 else band
        row = policy.row(self._class_map[class_id], self._kind_of_tokens(class_id, band) if in_packs else kind)
        return policy.decision[row][policy.phase_at(step)]

    def class_of(self, batch: Batch) -> int | None:
        """Return the class of a microbatch that the user has made; rows without lineage are of class `unknown`.

        Of packs it's None: their tokens have classes of their own.

        Raises:
            PlanError: a governed run, and rows of several classes, of none that exists, or of another than
                `Batch.class_id` says.
        """
        if self._policy is None:
            return batch.class_id
        if batch.lineage.token_class_ids is not None and batch.class_id is None:
            refuse_measured(self._policy)
            return None
        found = classes_in(batch) if batch.lineage.is_known else []
        if batch.class_id is not None:
            found = sorted({*found, batch.class_id})
        if not found:
            return self._unknown()
        if len(found) > 1:
            says = f" (class_id = {batch.class_id} is one of them)" if batch.class_id is not None else ""
            msg = (
                f"A microbatch holds rows of classes {found}{says}, and a governed microbatch holds rows of one. Order "
                "the rows by class so that each of the V microbatches is pure, or use a Source."
            )
            raise PlanError(msg)
        if not 0 <= found[0] < len(self._class_map):
            msg = (
                f"Class id {found[0]} names no class: ids go from 0 to {len(self._class_map) - 1}, and -1 doesn't wrap "
                "(packs have it, whose lineage tells the class of each token). Mend the lineage."
            )
            raise PlanError(msg)
        return found[0]

    def check(self, batch: Batch, class_id: int | None) -> None:
        """Compare a microbatch's lineage with the class under which a source has announced it.

        Raises:
            PlanError: they contradict each other, or a microbatch of several classes doesn't tell them by token.
            BatchError: the microbatch has other rows than its lineage speaks of.
        """
        if self._policy is None:
            return
        check_rows(batch)
        bands = batch.lineage.bands
        if bands is not None and bool((bands != batch.band).any()):
            msg = (
                f"A microbatch of band {batch.band} holds rows of bands {bands.unique().tolist()}, and a governed "
                "microbatch holds rows of one. Give them to step(), which regroups them, or mend the source."
            )
            raise PlanError(msg)
        if class_id is not None and not batch.lineage.is_known:
            return
        if class_id is None and batch.lineage.token_class_ids is None:
            msg = (
                "The source announces a microbatch of several classes, and its lineage doesn't tell the class of each "
                "token: what may it teach? Use a PackedSource, whose lineage does, or a source that is route-pure."
            )
            raise PlanError(msg)
        found = classes_in(batch)
        if class_id is None:
            if found and not 0 <= found[0] <= found[-1] < self.num_classes:
                msg = f"Tokens have class ids {found}, and ids go from 0 to {self.num_classes - 1}: mend the source."
                raise PlanError(msg)
        elif found and found != [class_id]:
            msg = (
                f"The source announces a microbatch of class {class_id}, and its rows' lineage says {found}. One of "
                "them is wrong, and rows would teach what they may not: mend the source."
            )
            raise PlanError(msg)

    def _unknown(self) -> int:
        assert self._policy is not None, "a governed run"
        own = self._policy.classes.index("unknown") if "unknown" in self._policy.classes else -1
        if own not in self._class_map:
            msg = (
                "The rows of a governed run have no lineage, so that their class isn't known, and the taxonomy has no "
                "class 'unknown' for such rows. Give step() a Batch with a Lineage, or a class_id."
            )
            raise PlanError(msg)
        return self._class_map.index(own)

    def running(self, route: Route, batch: Batch, device: torch.device) -> AbstractContextManager[None]:
        """Let what a microbatch's class has of its own run, and nothing of others; of packs, at each class's tokens.

        Without a policy rows have no class, and what is enabled stays so.
        """
        policy = self._policy
        if policy is None or not self._isolated:
            return nullcontext()
        if route.tokens is None:
            return running(self._isolated, {policy.classes[route.class_id]: True})
        ids = token_classes(batch)
        present = [c for c in ids.unique().tolist() if c != TOMBSTONE and c not in route.tokens.withheld]
        classes = {policy.classes[own]: [c for c in present if self._class_map[c] == own] for own in self._class_map}
        masks = {name: torch.isin(ids, torch.tensor(own)).to(device) for name, own in classes.items() if own}
        return running(self._isolated, masks)

    def teaches(self, route: Route, layer: str) -> bool:
        """Say whether a microbatch may move the statistics of a BatchNorm layer."""
        region = self._regions.region_of_buffer(f"{layer}.running_mean")
        return route.offered and (region is None or route.weights[region] != 0)


def refuse_measured(policy: CompiledPolicy) -> None:
    """Refuse a policy that has bands or grades where tokens of several classes are packed together.

    Raises:
        PlanError: it has.
    """
    if len(policy.kinds) > 1:
        msg = (
            f"The policy has bands or grades ({', '.join(policy.bands[:5])}), and packs don't say those of their "
            "tokens. Leave bands, floors and measures out, or pack each class, band and grade by itself."
        )
        raise PlanError(msg)


def empty_flags(mine: Sequence[Batch], step: int, device: torch.device) -> torch.Tensor:
    """Return the step, flag microbatches of nothing but tombstones, say bands, rows and tokens: float64 [V / W, 5]."""
    told = [(step, bool((b.lineage.row_ids < 0).all()), b.band, b.num_rows, b.num_tokens) for b in mine]
    return torch.tensor(told, dtype=torch.float64, device=device)
