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

pytestmark = pytest.mark.long


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def theirs(data: Path, kind: str) -> set[int]:
    """Return the ids of the subject's rows by reading all; of packs, of their documents, or of all packs with any."""
    rows = list(StreamingDataset(data))
    if kind == "rows":
        return {row["row_id"] for row in rows if row["annotator"] == SUBJECT}
    found = [(row["row_id"], doc) for row in rows for doc in np.asarray(row["spans"])[:, 0].tolist() if doc % 9 == 4]
    return {document if kind == "packs" else pack for pack, document in found}


def prepared(folder: Path, kind: str) -> tuple[Path, tuple[object, ...]]:
    """Write data, their index and a recipe; return the data, and what asks for the subject."""
    data, maker = streamed.write(folder / "posts", kind), streamed.RECIPES[kind].__name__
    recipe, key = folder / "own.py", folder / "keys" / "posts.key"
    recipe.write_text(
        f"from tests.forget.streamed import {maker}\n\ndef recipe():\n    return {maker}({str(data)!r})\n"
    )
    key.parent.mkdir()
    made = call("data", "index-subjects", data, "--field", "annotator", "--key", key)
    assert made.exit_code == 0, made.output
    return data, ("--subject", SUBJECT, "--subjects", f"{key}.subjects", key, "--recipe", recipe)


@pytest.mark.parametrize("kind", streamed.RECIPES)
def test_from_index_to_certificate(kind: str, tmp_path: Path) -> None:
    data, asked = prepared(tmp_path, kind)
    own = streamed.RECIPES[kind](str(data))
    own.trainer(run_folder=tmp_path / "run").fit()
    out, rows = tmp_path / "out", theirs(data, kind)
    assert len(rows) >= 4
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
    data, asked = prepared(tmp_path, "rows")
    streamed.of_rows(str(data)).trainer(run_folder=tmp_path / "run").fit()
    assert "forget 4 rows of a subject" in call("forget", tmp_path / "run", *asked).output
    nobody = call("forget", tmp_path / "run", "--subject", "nobody", *asked[2:])
    assert "The subject has no rows in the index" in nobody.output
    held = call("forget", "hold", tmp_path / "run", *asked, "--because", "case 12")
    assert held.output.startswith("Hold 1 is on 4 rows of a subject of")
    (tmp_path / "other").mkdir()
    _, others = prepared(tmp_path / "other", "packs")
    wrong = (*asked[:2], *others[2:5], *asked[5:])
    for command in (("forget", tmp_path / "run"), ("forget", "hold", tmp_path / "run", "--because", "case 13")):
        refused = call(*command, *wrong)
        assert refused.exit_code == 1
        assert "is the index of other data, or of what these were before" in refused.output
    blind = call("forget", "hold", tmp_path / "run", *others[:5], "--because", "case 14")
    assert "whether their ids are of packs or of documents" in blind.output
    assert len((tmp_path / "run" / "private" / "holds.jsonl").read_text().splitlines()) == 1
