"""`make bits`: a change of bits is named, unless a fragment of the changelog says it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tools.compare_bits import WORKER, differences, main

pytestmark = pytest.mark.long

# Prints what the sources hold: quicker than training, and what the tool does with it is the same.
FAKE_WORKER = """
import json, os, pathlib
package = pathlib.Path(os.environ["PYTHONPATH"]) / "cosmati"
runs = {name: {"parameters": bits} for name, bits in json.loads((package / "bits.json").read_text()).items()}
print(json.dumps({"cosmati": str(package), "runs": runs}))
"""
BITS = {"dense": "aa", "governed": "bb"}


def _git(root: Path, *arguments: str) -> None:
    identity = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    subprocess.run(["git", "-C", root, *arguments], env=os.environ | identity | settings, check=True)


def _write(root: Path, bits: dict[str, str]) -> None:
    (root / "src/cosmati").mkdir(parents=True, exist_ok=True)
    (root / "src/cosmati/bits.json").write_text(json.dumps(bits))


def _commit(root: Path) -> None:
    _git(root, "add", "--all")
    _git(root, "commit", "--quiet", "--message", "a change")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a repository whose first commit has no worker yet, and whose second has one."""
    root = tmp_path / "repository"
    (root / "changelog.d").mkdir(parents=True)
    (root / "changelog.d" / "005.bits.md").write_text("An old decision.")
    _git(tmp_path, "init", "--quiet", "repository")
    _write(root, BITS)
    _commit(root)
    (root / WORKER).parent.mkdir(parents=True)
    (root / WORKER).write_text(FAKE_WORKER)
    _commit(root)
    return root


def test_the_same_bits_as_those_of_a_parent_without_a_worker(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], root) == 0
    assert capsys.readouterr().out == "The same bits as HEAD~1.\n"


def test_runs_of_other_bits_are_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(root, BITS | {"governed": "cc"})
    assert main(["HEAD"], root) == 1
    assert capsys.readouterr().out.startswith("governed: other parameters\nOther bits than HEAD.")


def test_a_run_that_is_gone_is_named_and_a_new_one_is_not(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(root, {"dense": "aa", "new": "dd"})
    assert main(["HEAD"], root) == 1
    assert capsys.readouterr().out.startswith("governed: the run is gone\nOther bits")


@pytest.mark.parametrize(("fragment", "status"), [("021.bits.md", 0), ("021.fixed.md", 1), ("005.bits.md", 1)])
def test_only_a_new_fragment_of_kind_bits_lets_a_change_pass(root: Path, fragment: str, status: int) -> None:
    _write(root, BITS | {"governed": "cc"})
    (root / "changelog.d" / fragment).write_text("Said.")
    assert main(["HEAD"], root) == status
    _commit(root)
    assert main([], root) == status


def test_the_base_is_taken_away_again(root: Path) -> None:
    main([], root)
    listed = subprocess.run(["git", "-C", root, "worktree", "list"], check=True, capture_output=True, text=True).stdout
    assert len(listed.splitlines()) == 1


def test_without_history_there_is_nothing_to_compare_and_it_says_so(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _git(tmp_path, "clone", "--quiet", "--depth", "1", root.as_uri(), "shallow")
    (tmp_path / "none").mkdir()
    for folder in ("shallow", "none"):
        assert main([], tmp_path / folder) == 0
        assert (
            capsys.readouterr().out
            == "HEAD~1 isn't in this checkout's history, so there are no bits to compare with.\n"
        )


def test_a_base_that_does_not_exist_and_a_worker_that_fails_are_errors(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["nonesuch"], root) == 2
    assert "No commit is called 'nonesuch'" in capsys.readouterr().err
    (root / WORKER).write_text("raise SystemExit('out of order')")
    assert main([], root) == 2
    assert "out of order" in capsys.readouterr().err


def test_entries_of_the_ledger_are_named() -> None:
    before = {"run": {"parameters": "a", "ledger": {"0 run": "b", "1 step": "c"}}}
    after = {"run": {"parameters": "a", "ledger": {"0 run": "b", "1 step": "d", "2 end": "e"}}}
    assert differences(before, after) == ["run: other ledger entry 1 step, ledger entry 2 end"]
