"""The chain of a real signed run, read from its folder alone."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati.cli.main import app
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.manifest import SourceManifest
from cosmati.explorer.report import render_report
from cosmati.explorer.run_view import read_run
from cosmati.explorer.trust import Trust
from cosmati.provenance.rehearsal import rehearsed
from cosmati.routing.policy_file import load_policy
from tests.audit.signed_runs import POLICY, make_run, trained

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("signed"))


def trust_of(run: Path) -> Trust:
    found = read_run(run).trust
    assert found is not None
    return found


def test_it_says_what_was_signed(run: Path) -> None:
    found = trust_of(run)
    assert not found.problems + found.history
    assert not found.missing
    manifests = [SourceManifest.from_bytes(path.read_bytes()) for path in run.parent.glob("data/**/manifest.json")]
    assert {one.class_name: one.num_rows for one in found.sources} == {m.class_path: m.num_rows for m in manifests}
    assert {one.target: one.class_name for one in found.sources} == {
        f"software-licences/{m.class_path}/rows/{m.source_version}": m.class_path for m in manifests
    }
    assert len({one.keyids for one in found.sources}) == 2
    assert found.policy is not None
    assert found.policy.target == "policy/main/1"
    assert found.policy_digest == load_policy(POLICY).digest.hex()
    page = render_report(title="t", run=read_run(run))
    assert "was followed through" in page
    assert "8 rows signed, none let through" in page
    assert "declared" not in page[page.index('id="chain"') : page.index('id="policy"')]


def test_each_file_of_the_archive_is_needed(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for path in sorted((copy / "ledger" / "provenance").iterdir()):
        content = path.read_bytes()
        path.write_bytes(content.replace(b"1", b"2", 1))
        view = read_run(copy)
        assert view.trust is not None
        assert view.trust.problems, path
        assert not view.trust.sources
        path.write_bytes(content)
    assert not trust_of(copy).problems


def test_the_command_warns_and_draws_nothing_of_signatures_that_do_not_hold(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    next((copy / "ledger" / "provenance").iterdir()).unlink()
    result = CliRunner().invoke(app, ["report", str(copy)])
    assert result.exit_code == 1
    assert "The signatures of data or policy don't hold" in result.output
    assert '<figure class="chain' not in (copy / "report.html").read_text()


def test_without_the_packages_it_says_that_nobody_looked(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cosmati.provenance.authority.audit", None)
    found = trust_of(run)
    assert found.missing
    assert {one.num_rows for one in found.sources} == {16, 8}
    assert "weren't followed here" in render_report(title="t", run=read_run(run))


def test_a_manifest_that_is_not_the_archived_one_is_not_read(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cosmati.provenance.authority.audit", None)
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for path in (copy / "ledger" / "provenance").iterdir():
        path.write_bytes(path.read_bytes().replace(b'"num_rows":16', b'"num_rows":99'))
    assert {one.num_rows for one in trust_of(copy).sources} == {None, 8}


def test_rows_of_several_classes_are_as_signed_as_others(tmp_path: Path) -> None:
    rows = [{"number": number} for number in range(16)]
    write_dataset(
        rows, tmp_path / "data", {"number": "int"}, class_of="open/psf", source="both", also=["open/permissive"]
    )
    run = trained(tmp_path, POLICY.rpartition("  -")[0], budget="2ba")
    assert [(one.class_name, one.num_rows) for one in trust_of(run).sources] == [("open/permissive&open/psf", 16)]
    assert "declared: nobody signed" not in render_report(title="both", run=read_run(tmp_path / "run"))


def test_a_rehearsal_says_so_wherever_its_run_is_copied(run: Path, tmp_path: Path) -> None:
    """Its first roots say it, which are pinned and archived; no folder's name and no about.json does."""
    copied = Path(shutil.copytree(run, tmp_path / "elsewhere"))
    (copied / "about.json").unlink(missing_ok=True)
    found = trust_of(copied)
    assert found.policy is not None
    assert set(found.rehearsed) == {found.policy.root, found.sources[0].root}
    said = CliRunner().invoke(app, ["ledger", "verify", str(copied)]).output
    page = render_report(title="Run", run=read_run(copied))
    for root in found.rehearsed:
        assert f"the authority {root[:12]} is a rehearsal's" in said
    assert page.count("is a rehearsal's") == 2
    # Whoever takes the word out has another root than the one that was pinned.
    (root,) = [path for path in (copied / "ledger" / "provenance").iterdir() if path.name == found.policy.root]
    root.write_bytes(root.read_bytes().replace(b"x-cosmati-rehearsal", b"x-cosmati-in-earnest"))
    refuted = CliRunner().invoke(app, ["ledger", "verify", str(copied)])
    assert refuted.exit_code == 1
    assert trust_of(copied).problems
    told = {"sources": [{"root": found.policy.root}, {"root": found.sources[0].root}, {"root": "../x"}]}
    forged = copied / "ledger" / "provenance" / found.sources[0].root
    assert rehearsed(forged.parent, [told, None]) == (found.sources[0].root,)
    forged.write_bytes(forged.read_bytes() + b" ")
    assert rehearsed(forged.parent, [told]) == (), "a root is what its digest names"
