"""A number may be the id of a pack and of a document in another one: which is meant is said, or told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.data.in_memory import InMemory
from cosmati.data.streaming import StreamingDataset
from cosmati.data.tombstoned import Tombstoned
from cosmati.errors import ForgetError
from cosmati.forget.packs import asked_of, kind_read, mistakable
from tests.forget import streamed
from tests.forget.samples import differing, tensors
from tests.train.packs import samples

pytestmark = pytest.mark.long


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module", params=["packs", "pure packs", "rows"])
def given(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the run reads, and a folder with its data, its recipe and itself."""
    folder = tmp_path_factory.mktemp("given")
    data, maker = streamed.write(folder / "posts", request.param), streamed.RECIPES[request.param]
    (folder / "own.py").write_text(
        f"from tests.forget.streamed import {maker.__name__} as made\n\ndef recipe():\n    return made({str(data)!r})\n"
    )
    maker(str(data)).trainer(run_folder=folder / "run").fit()
    return request.param, folder


def documents_of(folder: Path) -> dict[int, set[int]]:
    """Return the documents of each pack, by reading all."""
    rows = StreamingDataset(folder / "posts" / "data")
    return {row["row_id"]: set(np.asarray(row["spans"])[:, 0].tolist()) for row in rows}


def written(folder: Path, content: str) -> Path:
    (folder / "ids").write_text(content)
    return folder / "ids"


def meant(folder: Path, *arguments: object) -> set[int]:
    """Return what is held, in the run's own ids."""
    held = call("forget", "hold", folder / "run", *arguments, "--recipe", folder / "own.py", "--because", "a test")
    assert held.exit_code == 0, held.output
    last = (folder / "run" / "private" / "holds.jsonl").read_text().splitlines()[-1]
    (folder / "run" / "private" / "holds.jsonl").unlink()
    return set(json.loads(last)["rows"])


def test_each_option_means_what_it_says(given: tuple[str, Path]) -> None:
    kind, folder = given
    plan = ("forget", folder / "run", "--recipe", folder / "own.py")
    if kind == "rows":
        assert meant(folder, "--rows", written(folder, "3\n7\n")) == {3, 7}
        for option in ("--packs", "--documents"):
            assert "the run's rows are no packs" in call(*plan, option, written(folder, "3\n")).output
        assert "as well" not in call(*plan, "--rows", written(folder, "3\n")).output
        return
    held = documents_of(folder)
    pack = max(held, key=lambda one: len(held[one] - {one}))
    document = min(held[pack])
    holding = {one for one, own in held.items() if document in own}
    of_pack, of_document = ({pack}, holding) if kind == "pure packs" else (held[pack], {document})
    assert meant(folder, "--packs", written(folder, f"{pack}\n")) == of_pack
    assert meant(folder, "--rows", written(folder, f'{{"pack": {pack}}}\n')) == of_pack, "the file says it"
    assert meant(folder, "--documents", written(folder, f"{document}\n")) == of_document
    assert meant(folder, "--rows", written(folder, f'{{"document": {document}}}\n')) == of_document
    assert meant(folder, "--rows", written(folder, f"{pack}\n{document}\n")) == {pack, document}, "the run's own"
    said = call(*plan, "--documents", written(folder, f'{{"pack": {pack}}}'))
    assert "says that its ids are of packs, and it's given as --documents" in said.output
    said = call(*plan, "--documents", written(folder, "1000000"))
    unknown = "no documents 1000000" if kind == "pure packs" else "1 of the 1 ids are of nothing that the run was given"
    assert unknown in said.output
    blind = call("forget", folder / "run", "--packs", written(folder, f"{pack}\n"))
    assert "how it reads its packs. Give its --recipe" in blind.output


def test_the_plan_says_what_kind_it_took(given: tuple[str, Path]) -> None:
    """And which numbers are of both, on the terminal alone."""
    kind, folder = given
    if kind == "rows":
        pytest.skip("its rows are no packs")
    held = documents_of(folder)
    own, other = (set(held), set[int]().union(*held.values()))[:: 1 if kind == "pure packs" else -1]
    both, alone = sorted(own & other)[:2], sorted(own - other)[:1]
    plan = ("forget", folder / "run", "--recipe", folder / "own.py", "--rows")
    said = call(*plan, written(folder, "".join(f"{one}\n" for one in [*both, *alone, 10**6]))).output
    names = ("packs", "documents")[:: 1 if kind == "pure packs" else -1]
    assert f"the ids are of {len(both) + len(alone) + 1} {names[0]}" in said
    assert f"{len(both)} of them are ids of {names[1]} as well" in said
    assert ", ".join(map(str, both)) in said
    assert "ids are of nothing that the run was given" in said
    told = json.loads(call(*plan, written(folder, f"{both[0]}\n"), "--json").output)
    assert [f"the ids are of 1 {names[0]}"] == told["notes"][:1]
    quiet = call("forget", folder / "run", "--recipe", folder / "own.py", f"--{names[0]}", folder / "ids").output
    assert "as well" not in quiet, "it's said"


def test_a_pack_is_forgotten_whole(tmp_path: Path) -> None:
    """From the command to the bits of the run that never had its documents; what finds them writes what they are."""
    data = streamed.write(tmp_path / "posts", "packs")
    own, key = streamed.of_packs(str(data)), tmp_path / "key"
    (tmp_path / "own.py").write_text(
        f"from tests.forget.streamed import of_packs\n\ndef recipe():\n    return of_packs({str(data)!r})\n"
    )
    own.trainer(run_folder=tmp_path / "run").fit()
    documents = documents_of(tmp_path)[2]
    asked = ("--packs", written(tmp_path, "2\n"), "--recipe", tmp_path / "own.py")
    done = call("forget", tmp_path / "run", *asked, "--method", "replay", "--yes", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert f"the ids are of the {len(documents)} documents of 1 packs" in done.output
    certificate = tmp_path / "out" / "certificates" / "0001.json"
    assert json.loads(certificate.read_text())["asked"]["what"] == f"{len(documents)} rows"
    assert call("forget", "verify", certificate).exit_code == 0
    truth = streamed.of_packs(str(data))
    without = Tombstoned(truth.data(), rows=documents)
    replace(truth, data=lambda: without).trainer(run_folder=tmp_path / "truth").fit()
    assert not differing(tensors(tmp_path / "out"), tensors(tmp_path / "truth"))
    assert call("data", "index-subjects", data, "--field", "annotator", "--key", key).exit_code == 0
    call("data", "find", data, "--subject", streamed.SUBJECT, "--key", key, "--rows-to", tmp_path / "ids")
    lines = (tmp_path / "ids").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"document": n} for n in range(4, 40, 9)]


def test_packs_in_memory_are_looked_up_too() -> None:
    packs = samples.documents()
    source = samples.source(packs)
    held: Mapping[int, set[int]] = {n: set(pack.spans[:, 0].tolist()) for n, pack in enumerate(packs)}
    assert kind_read(Tombstoned(source, rows={1})) == "documents"
    assert asked_of(source, "packs", frozenset({0, 3})).rows == held[0] | held[3]
    assert mistakable(source, {1, 23, 99}) == tuple(one for one in (1, 23, 99) if one in held)
    spread = [one for one in held if one != 3 and held[one] & held[3]]
    words = asked_of(source, "packs", frozenset({3})).meant
    assert ("other packs, too" in words) == bool(spread)
    with pytest.raises(ForgetError, match="no packs 99"):
        asked_of(source, "packs", frozenset({0, 99}))
    rows = InMemory(torch.zeros(4, 2), 2, tail="pad")
    assert (kind_read(rows), mistakable(rows, {1})) == ("rows", ())
    with pytest.raises(ForgetError, match="are no packs"):
        asked_of(rows, "documents", frozenset({1}))
