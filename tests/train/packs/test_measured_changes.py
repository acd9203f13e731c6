"""Policies that change in mid-run over packs whose documents are of several bands and grades."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmati.core.labels import IGNORED
from cosmati.data.graded import SourceKind
from cosmati.data.packed import PackedSource
from cosmati.data.people import ChosenRows
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.verify import verify_ledger
from cosmati.routing.policy_file import PolicyFile
from cosmati.train.observers.pack_cells import documents_in
from cosmati.train.policy_watch import REFUSED_FILE
from cosmati.train.rows_taught import regions_taught_by
from tests.train.packs.samples import model, trainer
from tests.train.packs.test_measured import KINDS, NAMES, POLICY, graded, source
from tests.train.policy_world import Happening, leave

pytestmark = pytest.mark.long


def changed(folder: Path, begun: PolicyFile, left: PolicyFile, data: PackedSource | None = None) -> Any:
    seen = Happening({4: leave(left)})
    made = trainer(model(), data or source(), begun, budget="8ba", config={"run_folder": folder}, observers=seen)
    seen.trainer = made
    return made


def test_a_policy_that_tells_more_kinds_apart_is_taken_in_mid_run(tmp_path: Path) -> None:
    """The numbers of all kinds are others with it, and tokens go by those from its step on."""
    more = POLICY.to_mapping()
    more["measures"]["rank"] = {"grades": ["a", "x"]}
    more["attenuate"].append({"class": ["personal"], "measure": "rank", "grade": ["x"], "factor": 0.125})
    made = changed(tmp_path / "run", POLICY, PolicyFile.model_validate(more))
    made.fit()
    assert not (tmp_path / "run" / REFUSED_FILE).exists()
    assert verify_ledger(tmp_path / "run" / "ledger").num_steps == 8
    tables = made.assembly.router.route_of(None, 6, tokens=[1.0] * 5).tokens.weights
    upper = list(made.assembly.policy.regions).index("upper")
    # Of `rank` only the fourth was measured; the least factor of it counts for the fifth, which is personal, too.
    assert tables[:, upper].tolist() == [1.0, 0.5, 0.25, 0.125, 0.125, 0.0]
    found = Counter[Any]()
    for item, entry, told in VerifiedLedger(tmp_path / "run" / "ledger").steps():
        for cell in entry.microbatches:
            found[entry.step >= 5, told.classes[cell.class_id], told.route(cell, item)[upper]] += 1
    assert {key[1:] for key in found if key[0]} == {
        ("open", 1.0), ("open", 0.5), ("doubtful", 0.25), ("personal", 0.125), ("open&personal", 0.125)
    }  # fmt: skip
    assert {key[1:] for key in found if not key[0]} == {
        ("open", 1.0), ("open", 0.5), ("doubtful", 0.25), ("personal", 1.0), ("open&personal", 1.0)
    }  # fmt: skip


RANKED = POLICY.to_mapping()
RANKED["measures"] = {**RANKED["measures"], "rank": {"grades": ["a", "x"]}}
RANKED["attenuate"] = [
    *RANKED["attenuate"],
    {"class": ["personal"], "measure": "rank", "grade": ["x"], "factor": 0.125},
]
OF_BANDS = {name: value for name, value in POLICY.to_mapping().items() if name not in ("measures", "attenuate")}
OF_GRADES = {name: value for name, value in POLICY.to_mapping().items() if name != "bands"} | {
    "rules": [{"class": ["**"], "weight": 1}]
}
TWO_BANDS = (KINDS[0], KINDS[1]._replace(band=0), *KINDS[2:])


@pytest.mark.parametrize(
    ("begun", "left", "kinds"),
    [
        (POLICY.to_mapping(), RANKED, KINDS),
        (OF_BANDS, OF_BANDS, TWO_BANDS),
        (POLICY.to_mapping(), POLICY.to_mapping(), (KINDS[1]._replace(band=0), *KINDS[1:])),
        (OF_GRADES, OF_GRADES, TWO_BANDS),
    ],
)
def test_rows_are_found_in_cells_by_the_tables_in_force(
    tmp_path: Path, begun: dict[str, Any], left: dict[str, Any], kinds: tuple[SourceKind, ...]
) -> None:
    """What numbers of kinds mean, these say, and not the policy that the run began with."""
    data = PackedSource(source().source, NAMES, kinds)
    first, later = map(PolicyFile.model_validate, (begun, left))
    made = changed(tmp_path / "run", first, later, data)
    made.fit()
    order, pairs = data.order(seed=0, num_microbatches=2, route_pure=True), set[tuple[int, int]]()
    wanted = Counter[str]()
    tables: Any = made.assembly.router.route_of(None, 7, tokens=[1.0] * 5).tokens.weights
    for step in range(8):
        for batch in (order.microbatch(step, index) for index in range(2)):
            ids, own = documents_in(batch)
            labelled: Any = batch.lineage.token_class_ids
            learnt = {*labelled[batch.target != IGNORED].tolist()}
            for region, rates in zip(made.assembly.regions.names, tables.T.tolist(), strict=True):
                wanted[region] += sum(kind in learnt and rates[kind] > 0 for kind in own.tolist())
            pairs |= {(pack, row) for pack, row in ids.tolist()}
    chosen = ChosenRows(np.zeros(0, np.int64), np.array(sorted(pairs)))
    again = trainer(model(), data, first, budget="8ba", config={"run_folder": tmp_path / "run"})
    found = {one.region: (one.num_rows, one.num_unopened) for one in regions_taught_by(again, chosen)}
    assert found == {region: (number, 0) for region, number in wanted.items()}


def test_kinds_are_told_apart_elsewhere_at_a_resume_only(tmp_path: Path) -> None:
    alike = graded().to_mapping() | {"attenuate": []}
    head = graded().to_mapping()
    head["attenuate"] = [{"class": ["**"], "measure": "trust", "grade": ["low"], "factor": 0.5, "region": ["head"]}]
    made = changed(tmp_path / "run", *map(PolicyFile.model_validate, (alike, head)))
    with pytest.warns(UserWarning, match="In packs, the policy tells classes apart in head, and none did so before"):
        assert made.fit().clock.step == 8
