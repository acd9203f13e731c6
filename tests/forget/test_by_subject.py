"""A person asks: from an index of the data to the run without their rows, and a certificate that doesn't name them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from cosmati.cli.main import app
from cosmati.data.streaming import StreamingDataset
from cosmati.data.tombstoned import Tombstoned
from cosmati.forget.past_run import PastRun
from tests.forget import streamed
from tests.forget.samples import differing, tensors
from tests.forget.streamed import SUBJECT


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def theirs(data: Path, *, is_packed: bool) -> set[int]:
    """Return the ids of the subject's rows by reading all: of packs, of the documents whose number in the file it is."""
    if is_packed:
        spans = np.concatenate([np.asarray(row["spans"]) for row in StreamingDataset(data)])
        return {document for document in spans[:, 0].tolist() if document % 9 == 4}
    return {row["row_id"] for row in StreamingDataset(data) if row["annotator"] == SUBJECT}


def prepared(folder: Path, *, is_packed: bool) -> tuple[Path, Path, tuple[object, ...]]:
    """Write data, their index and a recipe; return the data, the recipe's file, and what asks for the subject."""
    data = streamed.write(folder / "posts", is_packed=is_packed)
    kind = "of_packs" if is_packed else "of_rows"
    recipe, key = folder / "own.py", folder / "keys" / "posts.key"
    recipe.write_text(f"from tests.forget.streamed import {kind}\n\ndef recipe():\n    return {kind}({str(data)!r})\n")
    key.parent.mkdir()
    made = call("data", "index-subjects", data, "--field", "annotator", "--key", key)
    assert made.exit_code == 0, made.output
    return data, recipe, ("--subject", SUBJECT, "--subjects", f"{key}.subjects", key, "--recipe", recipe)


@pytest.mark.parametrize("is_packed", [False, True], ids=["rows", "packs"])
def test_from_index_to_certificate(*, is_packed: bool, tmp_path: Path) -> None:
    data, _, asked = prepared(tmp_path, is_packed=is_packed)
    own = (streamed.of_packs if is_packed else streamed.of_rows)(str(data))
    own.trainer(run_folder=tmp_path / "run").fit()
    out, rows = tmp_path / "out", theirs(data, is_packed=is_packed)
    assert len(rows) == 4
    said = call("forget", tmp_path / "run", *asked, "--method", "replay", "--yes", "--out", out)
    assert said.exit_code == 0, said.output
    assert PastRun(out).gone.rows == rows
    replace(own, data=lambda: Tombstoned(own.data(), rows=rows)).trainer(run_folder=tmp_path / "truth").fit()
    assert not differing(tensors(out), tensors(tmp_path / "truth"))
    assert differing(tensors(out), tensors(tmp_path / "run")), "the control: they had taught"
    told = json.loads((out / "certificates" / "0001.json").read_text())
    assert told["asked"]["what"] == f"{len(rows)} rows of a subject"
    files = [path for path in out.rglob("*") if path.is_file() and "private" not in path.parts]
    assert not [path for path in files if SUBJECT.encode() in path.read_bytes()]
    assert SUBJECT not in said.output
    checked = call("forget", "verify", out / "certificates" / "0001.json")
    assert checked.exit_code == 0, checked.output
    assert SUBJECT not in checked.output


def test_an_index_of_other_data_is_refused(tmp_path: Path) -> None:
    """It would name other rows; the recipe's data tell, of a run that is asked and of a hold."""
    data, _, asked = prepared(tmp_path, is_packed=False)
    streamed.of_rows(str(data)).trainer(run_folder=tmp_path / "run").fit()
    assert "forget 4 rows of a subject" in call("forget", tmp_path / "run", *asked).output
    nobody = call("forget", tmp_path / "run", "--subject", "nobody", *asked[2:])
    assert "The subject has no rows in the index" in nobody.output
    held = call("forget", "hold", tmp_path / "run", *asked, "--because", "case 12")
    assert held.output.startswith("Hold 1 is on 4 rows of a subject of")
    (tmp_path / "other").mkdir()
    _, _, others = prepared(tmp_path / "other", is_packed=True)
    wrong = (*asked[:2], *others[2:5], *asked[5:])
    for command in (("forget", tmp_path / "run"), ("forget", "hold", tmp_path / "run", "--because", "case 13")):
        refused = call(*command, *wrong)
        assert refused.exit_code == 1
        assert "is the index of other data, or of what these were before" in refused.output
    assert not (tmp_path / "run-without").exists()
