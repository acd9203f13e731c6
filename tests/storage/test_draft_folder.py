"""A draft's folder goes at its end, or with the next one after a kill; that of a living process stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cosmati.storage.draft_folder import draft_folder

CODE = """
import signal, sys
from pathlib import Path
from cosmati.storage.draft_folder import draft_folder
with draft_folder(Path(sys.argv[1])) as place:
    (place / "much").write_text("x")
    print(place, flush=True)
    signal.pause()
"""


def test_it_is_empty_and_goes_at_the_end(tmp_path: Path) -> None:
    for outcome in ("made", "failed"):
        try:
            with draft_folder(tmp_path / "b.zip") as place:
                assert not list(place.iterdir())
                (place / "a").mkdir()
                (place / "a" / "b").write_text("c")
                if outcome == "failed":
                    raise RuntimeError
        except RuntimeError:
            assert outcome == "failed"
        assert not list(tmp_path.iterdir())


def test_the_dead_go_and_the_living_stay(tmp_path: Path) -> None:
    path, notes = tmp_path / "b.zip", tmp_path / ".b.zip.notes.draft"
    notes.mkdir()  # somebody else's: there's no lock in it
    others = [subprocess.Popen([sys.executable, "-c", CODE, path], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        places = [Path(one.stdout.readline().strip()) for one in others if one.stdout is not None]
        assert len(set(places)) == 2
        others[0].kill()
        others[0].wait()
        assert places[0].exists()
        with draft_folder(path) as own:
            assert not places[0].parent.exists()
            assert (places[1] / "much").read_text() == "x"
            with draft_folder(path) as second:
                assert own.exists()
                assert second != own
    finally:
        for one in others:
            one.kill()
            one.wait()
            assert one.stdout is not None
            one.stdout.close()
    with draft_folder(tmp_path / "b"):  # of another name
        assert places[1].exists()
    with draft_folder(path):
        assert not places[1].parent.exists()
    assert list(tmp_path.iterdir()) == [notes]


def test_where_no_folder_is_none_is_made(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"), draft_folder(tmp_path / "nowhere" / "b.zip"):
        pass
