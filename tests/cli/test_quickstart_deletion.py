"""The quickstart's deletion, small: what leaves, that it's gone to the bit, a kill too, and what the page says."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from cosmati.cli.deletion_shown import read_deletion
from cosmati.cli.quickstart_deletion import NUM_CANDIDATES, WITHOUT, _package_ids, forget_a_package, leaving_package
from cosmati.cli.quickstart_governed import trained
from cosmati.data.tombstoned import Tombstoned
from cosmati.errors import RunError
from cosmati.explorer.report import render_report
from cosmati.explorer.run_view import read_run
from cosmati.forget.planning import EXACT
from cosmati.recipes.quickstart import Trial, governed_recipe, quickstart_policy
from cosmati.records.deleted import DELETED_FILE, DeletedRecord
from tests.cli.test_quickstart import SIZE
from tests.forget.samples import differing, tensors

pytestmark = pytest.mark.long

TASK = SIZE.language
RECIPE = governed_recipe(SIZE, [Trial("composition", 0.03, 1.0)], quickstart_policy(), seed=0)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forgets")
    trained(RECIPE, folder / "governed-run")
    shutil.copytree(folder / "governed-run", folder / "as-it-was")
    forget_a_package(TASK, RECIPE, folder / "governed-run", folder / WITHOUT, lambda _: None)
    return folder


def told(output: Path) -> DeletedRecord:
    return DeletedRecord.from_json((output / WITHOUT / DELETED_FILE).read_text())


def test_the_package_is_one_of_the_largest_and_the_last_to_come(output: Path) -> None:
    """Counted anew from the rows of each step, by where they stand in the corpus."""
    run, library = output / "governed-run", TASK.library()
    of_bytes, of_row = dict[bytes, set[int]](), _package_ids(TASK, library)
    for row, one in zip(library.train.tokens.numpy(), library.train.package_ids, strict=True):
        of_bytes.setdefault(bytes(row), set()).add(int(one))
    read: dict[int, list[int]] = {}
    feed = RECIPE.trainer(run_folder=run).feed
    assert feed is not None
    for step in range(8):
        for batch in feed.again(step):
            for row, place in zip(batch.data.numpy(), batch.lineage.row_ids.tolist(), strict=True):
                own = int(of_row[place])
                assert own in of_bytes[bytes(row)]  # several packages may have a row
                read.setdefault(own, []).append(step)
    assert sum(len(found) > 1 for found in of_bytes.values()) < len(of_bytes) // 10
    distributions = [one for one in read if not library.packages[one].name.startswith("python/")]
    largest = sorted(distributions, key=lambda one: (-len(read[one]), one))[:NUM_CANDIDATES]
    chosen = max(largest, key=lambda one: min(read[one]))
    leaving = leaving_package(TASK, RECIPE, run)
    assert leaving.package == library.packages[chosen]
    assert leaving.steps == tuple(sorted({*read[chosen]}))
    assert len(leaving.given) == len(read[chosen])
    assert len(leaving.row_ids) == leaving.package.num_rows


def test_the_weights_are_those_of_the_run_that_never_had_it(output: Path, tmp_path: Path) -> None:
    rows = leaving_package(TASK, RECIPE, output / "governed-run").row_ids.tolist()
    never = dataclasses.replace(RECIPE, data=lambda: Tombstoned(TASK.data(), rows=rows))
    trained(never, tmp_path / "never")
    assert not differing(tensors(output / WITHOUT), tensors(tmp_path / "never"))
    assert differing(tensors(output / "governed-run"), tensors(tmp_path / "never"))


def test_what_is_told_is_what_the_ledger_says(output: Path) -> None:
    found, leaving = told(output), leaving_package(TASK, RECIPE, output / "governed-run")
    plan = json.loads((output / WITHOUT / "forget.json").read_text())["plan"]
    assert (plan["first_contact"], plan["num_rows"]) == (found.steps[0], len(leaving.given))
    assert plan["classes"] == [found.class_name]
    assert {(one.num_rows, one.num_steps) for one in found.taught} <= {(len(leaving.given), len(found.steps))}
    by_name = {one.name: one for one in found.measures}
    runs = [json.loads((output / name / "run.json").read_text())["metrics"] for name in ("governed-run", WITHOUT)]
    quality = by_name["bits per byte, held out"]
    assert [quality.before, quality.after] == [one["bits_per_byte"] for one in runs]
    assert DeletedRecord.from_json(found.to_json()) == found


def test_rows_that_taught_are_told_from_what_never_did(output: Path) -> None:
    """A model foretells what it was trained on better than the model that never had it does: the membership attack."""
    (given,) = (one for one in told(output).measures if one.name.endswith("rows that were given"))
    assert given.is_attack
    assert given.after > given.before


def test_killed_in_between_it_goes_on_to_the_same(output: Path, tmp_path: Path) -> None:
    run, out = tmp_path / "governed-run", tmp_path / WITHOUT
    shutil.copytree(output / "as-it-was", run)

    def die(line: str) -> None:
        if line == "Certifying":
            os.kill(os.getpid(), signal.SIGKILL)

    if (child := os.fork()) == 0:
        forget_a_package(TASK, RECIPE, run, out, die)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert not (out / DELETED_FILE).exists()
    forget_a_package(TASK, RECIPE, run, out, lambda _: None)
    assert told(tmp_path).measures == told(output).measures
    assert told(tmp_path).taught == told(output).taught


def test_what_is_done_is_not_done_again(output: Path) -> None:
    forget_a_package(TASK, RECIPE, output / "governed-run", output / WITHOUT, pytest.fail)


def test_what_another_run_left_is_told_with_its_mend(output: Path, tmp_path: Path) -> None:
    shutil.copytree(output / WITHOUT, tmp_path / WITHOUT)
    (tmp_path / WITHOUT / DELETED_FILE).unlink()
    asked = json.loads((tmp_path / WITHOUT / "forget.json").read_text())
    asked["plan"]["digest"] = asked["told"]["asked"] = "0" * 64
    (tmp_path / WITHOUT / "forget.json").write_text(json.dumps(asked))
    with pytest.raises(RunError, match=r"was left of another run .* Remove it, and run the quickstart again"):
        forget_a_package(TASK, RECIPE, output / "governed-run", tmp_path / WITHOUT, lambda _: None)


def test_the_page_has_plan_certificate_before_and_after(output: Path) -> None:
    run, deletion = read_run(output / "governed-run"), read_deletion(output / WITHOUT)
    assert deletion is not None
    page = render_report(title="Page", run=run, deletion=deletion)
    section = page.partition('aria-labelledby="deletion"')[2].partition("</section>")[0]
    found = told(output)
    for words in (
        found.what,
        f"{found.num_rows:,} rows, in {len(found.steps)} of 8 steps",
        EXACT,
        "rows are asked for, and what can be dropped is a class&#39;s own as a whole",
        "nothing was rewritten",
        "Evidence: L0: consistent in itself, operator-asserted.",
        "the data themselves: delete the rows where they&#39;re kept, too",
        f"cosmati forget verify {output / WITHOUT / 'certificates' / '0001.json'}",
    ):
        assert words in section, words
    words = deletion.certificate
    assert words is not None
    # The run that goes on has checkpoints of the same names: whose they are is said, and each is named once.
    (mine,) = (line for line in words.not_covered if line.startswith("checkpoint"))
    left, _, listed = mine.partition(": ")
    learnt = [one.path for one in deletion.checkpoints if not one.is_clean]
    assert (left, listed.split(", ")) == ("checkpoint, of the run that had it", learnt)
    assert mine in section
    assert '<span class="whole">(' in section, "the name of a class isn't parted from its bracket"
    assert words.weights_before != words.weights_after
    assert words.weights_before[:16] in section
    assert words.weights_after[:16] in section
    assert section.count('class="had"') == 2 * len(found.steps), "once for a wide screen, and once for a narrow one"
    assert section.count('class="tombstone"') == 2 * len(found.steps)
    assert 'href="#deletion"' in page


def test_a_certificate_that_was_changed_leaves_nothing_but_an_alarm(output: Path, tmp_path: Path) -> None:
    shutil.copytree(output / WITHOUT, tmp_path / WITHOUT)
    (path,) = (tmp_path / WITHOUT / "certificates").glob("*.json")
    path.write_text(path.read_text().replace('"method":"replay"', '"method":"drop"'))
    deletion = read_deletion(tmp_path / WITHOUT)
    assert deletion is not None
    page = render_report(title="Page", run=read_run(output / "governed-run"), deletion=deletion)
    section = page.partition('aria-labelledby="deletion"')[2].partition("</section>")[0]
    assert "doesn't bear the certificate out" in section
    assert EXACT not in section
    assert read_deletion(output / "governed-run") is None, "nothing was forgotten on the way to it"


def test_the_exclusion_statement_says_what_it_rests_on(output: Path) -> None:
    run = read_run(output / "governed-run")
    assert run.governance is not None
    (text,) = (one for one in run.governance.exclusions if "tagged open/psf" in one)
    digest = run.record.digests["policy"]
    assert digest is not None
    assert "No logged step gave rows tagged open/psf any weight in embedding or near_input: 8 steps with " in text
    assert text.endswith(
        f"by the tables of policy {digest[:16]}…. Evidence: L0: consistent in itself, operator-asserted."
    )
    assert f"all of the {run.ledger.size:,} entries under root {run.ledger.root[:16]}…" in text if run.ledger else False
