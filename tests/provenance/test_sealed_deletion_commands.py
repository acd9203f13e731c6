"""A deletion from a run with a sensitive class, by commands alone; then whoever asks about the successor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")
pytest.importorskip("model_signing", reason="the extra `audit` isn't installed")

from starlette.testclient import TestClient

from cosmati.cli.column_keys import ReadingRights
from cosmati.explorer.server.app import make_app
from cosmati.ledger.verify import verify_ledger
from cosmati.recipes.recipe import Recipe
from cosmati.store.index import RunIndex
from tests.explorer.test_checked_ledgers import settled
from tests.forget.samples import rows_of_step
from tests.provenance import vouched_recipe
from tests.provenance.authority import people
from tests.provenance.authority.people import PII
from tests.provenance.test_sealed_commands import Asked, Values
from tests.train.test_sealed_run import leaks
from tests.train.vouched_world import loss_by_row

pytestmark = pytest.mark.long

RECIPE = str(Path(__file__))


def recipe() -> Recipe:
    """Return the operator's, over what WORLD names."""
    return replace(vouched_recipe.recipe(), loss=loss_by_row)


class Deleted(Asked):
    """A run of which rows were deleted twice, by replay; some are of the sensitive class."""

    def train(self) -> None:
        """Train, and delete."""
        recipe().trainer(run_folder=self.run).fit()
        self.pinned = (self.run / "ledger/checkpoint").read_text()
        self.before = self.values()
        self.successors = [self.root / "first", self.root / "second"]
        self.said = [self.forget(self.run, self.successors[0], 1), self.forget(*self.successors, 2)]

    def forget(self, run: Path, out: Path, step: int) -> str:
        """Delete rows of a step, as the operator does."""
        rows = sorted(rows_of_step(vouched_recipe.data(), step))
        (asked := self.root / f"{out.name}.txt").write_text("\n".join(map(str, rows)))
        given = ["--rows", str(asked), "--recipe", RECIPE, "--method", "replay", "--yes", "--delete-superseded"]
        return self.cli("forget", str(run), *given, "--out", str(out)).stdout

    def values_of(self, run: Path) -> Values:
        """Return what is sealed of a run, in whatever attempt."""
        own, self.run = self.run, run
        try:
            return self.values()
        finally:
            self.run = own

    @property
    def origin(self) -> str:
        """The log's name, which successors keep."""
        return "cosmati/run"


@pytest.fixture(scope="module")
def deleted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deleted]:
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("deleted")
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.setenv("WORLD", str(root / "firm"))
        patch.setattr(people, "TAXONOMY", replace(people.TAXONOMY, sensitive=("customer",)))
        yield Deleted(root)


def test_successors_keep_what_is_sealed_from_everybody_but_its_holder(deleted: Deleted) -> None:
    first, second = deleted.successors
    secret = deleted.values_of(second)
    assert secret > deleted.values_of(first) > deleted.before, "earlier attempts stay in the ledger"
    for run in deleted.successors:
        verify_ledger(run / "ledger")
        query = ["ledger", "query", str(run), "--format", "json"]
        for rights in ([], deleted.rights):
            told = [json.loads(line) for line in deleted.cli(*query, *rights).stdout.splitlines()]
            norm = next(one["norm_sum"] for one in told if one["class_name"] == PII)
            assert (norm == "sealed") == (not rights)
        for path in run.rglob("*"):
            assert not path.is_file() or not leaks(path.read_bytes(), secret), path
    asked = ["ledger", "replay", str(second), "--recipe", RECIPE]
    assert "Yes. Equal in every digest.\n" in deleted.cli(*asked, *deleted.rights).stdout
    said = deleted.cli("ledger", "replay", str(first), "--recipe", RECIPE, code=2).output
    assert "says isn't shown. Give --rows FILE" in said, "the second deletion has shredded the first successor's keys"


def test_pages_of_a_store_of_successors_show_a_holder_theirs(deleted: Deleted) -> None:
    secret = deleted.values_of(deleted.successors[1])
    rights = ReadingRights(deleted.root / "credential", deleted.root / "keys", deleted.root / "eve/eve.holder.key")
    (place := deleted.root / "store").mkdir()
    for run in (deleted.run, *deleted.successors):
        shutil.copytree(run, place / run.name)
    with RunIndex(place) as index:
        index.refresh()
        for keys_of in (None, rights.open_run):
            client = TestClient(make_app(index, keys_of), base_url="http://localhost")
            for run in index.runs():
                page = settled(client, f"/governance/{run.key}")
                assert ("for its holder alone" in page) == (keys_of is not None), run.path
                assert keys_of is not None or not leaks(page.encode(), secret)
    for path in place.rglob("*"):
        assert not path.is_file() or not leaks(path.read_bytes(), secret), path


def test_an_auditor_reads_both_deletions_and_every_file_of_the_bundle(deleted: Deleted, tmp_path: Path) -> None:
    bundle, kept = tmp_path / "b.zip", tmp_path / "kept"
    deleted.cli("audit", "export", str(deleted.successors[1]), "--out", str(bundle), *deleted.rights[:4])
    told = deleted.cli("audit", "verify", str(bundle), "--out", str(kept), *deleted.rights[4:], code=3).output
    assert told.count("  deleted    2 rows: replay, exact with respect to content") == 4, (
        "certified, and again when shredded"
    )
    assert "no check reads" not in told
    assert "0 steps; 18 opened with your key, each as it was written" in told
    assert "that the row keys were shredded" in told
    secret = deleted.values_of(deleted.successors[1])
    assert not leaks(told.encode(), secret)
    for path in kept.rglob("*"):
        assert not path.is_file() or not leaks(path.read_bytes(), secret), path
    # The keys of another credential aren't enclosed with this one.
    deleted.grant(tmp_path / "other", "--columns", "loss")
    mixed = ["--credential", str(tmp_path / "other"), *deleted.rights[2:4]]
    said = deleted.cli("audit", "export", str(deleted.successors[1]), "--out", str(tmp_path / "c.zip"), *mixed, code=2)
    assert "released for the credential" in " ".join(said.output.split())
    assert not (tmp_path / "c.zip").exists()
