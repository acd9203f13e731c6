"""Policies that change in mid-run over packs whose documents are of several bands and grades."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmati.core.labels import IGNORED
from cosmati.data.people import ChosenRows
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.verify import verify_ledger
from cosmati.routing.policy_file import PolicyFile
from cosmati.train.observers.pack_cells import documents_in
from cosmati.train.policy_watch import REFUSED_FILE
from cosmati.train.rows_taught import regions_taught_by
from tests.train.packs.samples import model, region_of, trainer
from tests.train.packs.test_measured import POLICY, graded, rho, source
from tests.train.policy_world import Happening, leave


def changed(folder: Path, begun: PolicyFile, left: PolicyFile) -> Any:
    seen = Happening({4: leave(left)})
    made = trainer(model(), source(), begun, budget="8ba", config={"run_folder": folder}, observers=seen)
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


def test_rows_are_found_in_cells_of_both_policies(tmp_path: Path) -> None:
    """What numbers of kinds mean, the tables in force at each step say, and not the policy that the run began with."""
    data, more = source(), POLICY.to_mapping()
    more["measures"]["rank"] = {"grades": ["a", "x"]}
    more["attenuate"].append({"class": ["personal"], "measure": "rank", "grade": ["x"], "factor": 0.125})
    changed(tmp_path / "run", POLICY, PolicyFile.model_validate(more)).fit()
    order, pairs = data.order(seed=0, num_microbatches=2, route_pure=True), set[tuple[int, int]]()
    visits = Counter[int]()
    for step in range(8):
        for batch in (order.microbatch(step, index) for index in range(2)):
            ids, kinds = documents_in(batch)
            labelled: Any = batch.lineage.token_class_ids
            learnt = {*labelled[batch.target != IGNORED].tolist()}
            visits.update(kind for kind in kinds.tolist() if kind in learnt)
            pairs |= {(pack, row) for pack, row in ids.tolist()}
    chosen = ChosenRows(np.zeros(0, np.int64), np.array(sorted(pairs)))
    made = trainer(model(), source(), POLICY, budget="8ba", config={"run_folder": tmp_path / "run"})
    found = {one.region: (one.num_rows, one.num_unopened) for one in regions_taught_by(made, chosen)}
    wanted = {
        region_of(name): sum(num for kind, num in visits.items() if rho(kind, name))
        for name, _ in model().named_parameters()
    }
    assert found == {region: (number, 0) for region, number in wanted.items()}


def test_kinds_are_told_apart_elsewhere_at_a_resume_only(tmp_path: Path) -> None:
    alike = graded().to_mapping() | {"attenuate": []}
    head = graded().to_mapping()
    head["attenuate"] = [{"class": ["**"], "measure": "trust", "grade": ["low"], "factor": 0.5, "region": ["head"]}]
    made = changed(tmp_path / "run", *map(PolicyFile.model_validate, (alike, head)))
    with pytest.warns(UserWarning, match="In packs, the policy tells classes apart in head, and none did so before"):
        assert made.fit().clock.step == 8
