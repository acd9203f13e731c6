"""Of a folder of cosigned checkpoints those files are read that are named by a size; what else lies there isn't."""

from __future__ import annotations

from pathlib import Path

from cosmati.ledger.cosigned import FOLDER, _files


def test_files_are_read_by_size_and_others_left_alone(tmp_path: Path) -> None:
    assert _files(tmp_path) == []
    (tmp_path / FOLDER).mkdir()
    for name in ("10", "9", "100", "notes.txt", "9.part", "٣", "²", ".hidden"):
        (tmp_path / FOLDER / name).touch()
    assert [path.name for path in _files(tmp_path)] == ["9", "10", "100"]
    (tmp_path / "file").touch()
    assert _files(tmp_path / "file") == []
