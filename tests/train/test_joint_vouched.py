"""Rows of two classes, for each of which another authority answers: what one takes back, and what is gone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati import RunConfig, StreamingDataset, StreamingSource, Trainer, load_policy
from cosmati.core.loss import Loss
from cosmati.core.source import Source
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.upload import Destination
from cosmati.data.signing import sign_sources
from cosmati.data.tombstoned import Tombstoned
from cosmati.forget.asked import ToForget
from cosmati.ledger.query import VerifiedLedger
from cosmati.optim import AdamW
from cosmati.provenance.authority import ceremony
from cosmati.provenance.authority.trusted import Authority
from tests.forget.samples import differing, forgotten, tensors, trained, without
from tests.provenance.authority.people import NEWS, PII, TAXONOMY, People
from tests.train.test_authority_watch import in_force, verify
from tests.train.test_many_authorities import Happening
from tests.train.vouched_world import rows_by_step

pytestmark = pytest.mark.long

BOTH = f"{PII}&{NEWS}"
POLICY = """
version: 1
taxonomy: firm
measures: {trust: {grades: [low, high]}}
rules: [{class: "**", weight: 1}]
attenuate: [{class: "**", measure: trust, grade: low, factor: 0.5}]
grace: {revocation: reject}
"""


def loss(model: nn.Module, rows: Tensor) -> Loss:
    values = (model(rows.float()[:, None] / 24) - 1).square().mean(1)
    return Loss(values.sum(), torch.tensor(float(len(values))), per_row=values)


class Firms:
    """One firm has news, some of which are of customers too; the other has what is of customers alone."""

    def __init__(self, root: Path) -> None:
        self.people = {path: People(root / path.partition("/")[2]).begin() for path in (NEWS, PII)}
        for path, people in self.people.items():
            people.delegate(path, "ada")
            for name, grade, also in (("a", "low", ()), ("b", "high", (PII,) if path == NEWS else ())):
                rows = [{"number": number} for number in range(24)]
                place, own = Destination(str(people.root / "data" / name)), {"grades": {"trust": grade}, "also": also}
                write_dataset(rows, place, {"number": "int"}, class_of=path, source=name, **own)  # type: ignore[arg-type]
                list(sign_sources(str(people.root / "data" / name), people.folder, people.ring("ada")))

    def source(self, **more: Any) -> StreamingSource:
        whose = {
            people.root / "data" / name: authority
            for people in self.people.values()
            for authority in [Authority(people.folder, people.pin, state=people.root / "seen", **more)]
            for name in "ab"
        }
        return StreamingSource(StreamingDataset([*whose], columns=("number",), authority=whose), 8)

    def trainer(self, folder: Path, wrap: Callable[[Any], Source], events: Any = (), **more: Any) -> Trainer:
        torch.manual_seed(0)
        seen = Happening(dict(events))
        seen.trainer = Trainer(
            nn.Linear(1, 1),
            loss,
            wrap(self.source(**more)),
            optimizers=AdamW(lr=0.01),
            policy=load_policy(POLICY),
            taxonomy=TAXONOMY,
            observers=seen,
            config=RunConfig(
                budget="12ba", num_threads=1, num_microbatches=4, run_folder=folder, checkpoint_every="2ba",
                num_checkpoints=9,
            ),
        )  # fmt: skip
        return seen.trainer

    def revoke(self, path: str) -> None:
        people = self.people[path]
        (keyid,) = next(one.keyids for one in ceremony.status(people.repository) if one.role == path)
        with people.repository.change(people.ring()) as change:
            ceremony.replace_key(change, keyid, None)


@pytest.mark.parametrize("revoked", [NEWS, PII])
@pytest.mark.parametrize("gone", [(), (NEWS,), (PII,)])
def test_rows_of_two_classes_teach_while_both_are_vouched_for(
    tmp_path: Path, revoked: str, gone: Collection[str]
) -> None:
    """That all rows of the one class alone are tombstones says nothing of those that are of both."""
    firms, folder = Firms(tmp_path), tmp_path / "run"
    wrap = without(classes=gone) if gone else lambda source: source
    firms.trainer(folder, wrap, {5: lambda: firms.revoke(revoked)}.items()).fit()
    assert set(in_force(folder)) == {(revoked, "revocation", "reject", 9)}
    taught = {path: rows_by_step(folder, path) for path in (NEWS, PII, BOTH)}
    other = NEWS if revoked == PII else PII
    assert not any(taught[revoked][9:])
    assert not any(taught[BOTH][9:])
    assert any(taught[BOTH][:9])
    assert any(taught[other][9:]) == (other not in gone)
    verify(folder)


def test_of_rows_that_are_gone_one_set_after_the_other_nobody_is_asked(tmp_path: Path) -> None:
    firms, folder = Firms(tmp_path), tmp_path / "run"
    made = firms.trainer(
        folder,
        lambda source: Tombstoned(Tombstoned(source, [BOTH]), [PII]),
        {5: lambda: firms.revoke(PII)}.items(),
    )
    made.fit()
    assert made.prepared.vouched is not None
    assert VerifiedLedger(folder / "ledger").tables[-1].withdrawn == ()
    assert not any(rows_by_step(folder, PII))
    verify(folder)


def test_what_was_revoked_is_forgotten_with_what_belongs_to_it(tmp_path: Path) -> None:
    firms, folder = Firms(tmp_path), tmp_path / "run"

    def make(wrap: Any, out: Path) -> Trainer:
        return firms.trainer(out, wrap, run=folder)

    truth = trained(lambda wrap, out: firms.trainer(out, wrap), tmp_path / "truth", without(classes=[PII, BOTH]))
    firms.trainer(folder, lambda source: source, {5: lambda: firms.revoke(PII)}.items()).fit()
    done = forgotten(folder, ToForget(classes=("customer",)), make, tmp_path / "out")
    assert not differing(tensors(done.out), tensors(truth))
