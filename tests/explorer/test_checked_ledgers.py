"""Ledgers that change after a look at them: nothing stands as verified that isn't any more."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from cosmati.errors import LedgerError
from cosmati.explorer.server.app import make_app
from cosmati.explorer.server.checks import LedgerChecks
from cosmati.ledger.query import contributions
from cosmati.ledger.verify import verify_ledger
from cosmati.store.index import RunIndex
from tests.explorer.test_run_view import trainer_in

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "governed"
    trainer_in(folder).fit()
    return folder


@pytest.fixture
def store(trained: Path, tmp_path: Path) -> Iterator[tuple[Path, TestClient, str]]:
    shutil.copytree(trained, tmp_path / "governed")
    with RunIndex(tmp_path) as index:
        index.refresh()
        client = TestClient(make_app(index), base_url="http://localhost", follow_redirects=False)
        yield tmp_path / "governed" / "ledger", client, index.runs()[0].key


def settled(client: TestClient, address: str) -> str:
    for _ in range(30):
        page = client.get(address).text
        if "is being verified" not in page:
            return unescape(page)
    raise AssertionError("the check has no end")


def sources(ledger: Path) -> list[str]:
    """Return files of a ledger that its verification needs, by changing each and asking the verifier itself."""
    found = []
    for path in sorted(one for one in ledger.rglob("*") if one.is_file() and one.stat().st_size):
        whole = path.read_bytes()
        path.write_bytes(changed(whole))
        try:
            verify_ledger(ledger)
        except LedgerError:
            found.append(str(path.relative_to(ledger)))
        path.write_bytes(whole)
    return found


def changed(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def test_a_file_of_a_ledger_that_is_changed_after_a_look_is_found(
    store: tuple[Path, TestClient, str], tmp_path: Path
) -> None:
    ledger, client, key = store
    names = sources(ledger)
    assert any(name.startswith("tile/entries/") for name in names)
    assert any(name.startswith("tile/0/") for name in names)
    for name in names:
        path, page = ledger / name, settled(client, f"/governance/{key}")
        assert "The ledger does not verify" not in page, name
        assert 'href="/governance/' in client.get("/governance").text
        assert "verified at L0" in client.get("/governance").text
        state, whole = path.stat(), path.read_bytes()
        path.write_bytes(changed(whole))
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))  # as one who hides it would
        assert "has changed since it was checked" in client.get("/governance").text, name
        page = settled(client, f"/governance/{key}")
        assert "The ledger does not verify" in page or "can't be read" in page, name
        assert "verified at L0" not in client.get("/governance").text, name
        path.write_bytes(whole)


def test_what_is_known_is_dropped_when_the_folder_changes(store: tuple[Path, TestClient, str]) -> None:
    asked, folder = LedgerChecks(), store[0].parent
    first, _ = asked.ask(folder, wait=60)
    assert first is not None
    assert asked.ask(folder, wait=60)[0] is first
    with (folder / "ledger" / "details.jsonl").open("a") as file:
        file.write(" \n")
    second, _ = asked.ask(folder, wait=60)
    assert second is not None
    assert second.ended > first.ended
    assert asked.ask(folder, if_new=False)[0] is second


def test_each_region_has_weights_of_its_own_and_steps_before_rows(store: tuple[Path, TestClient, str]) -> None:
    ledger, client, key = store
    cells = {(one.class_name, one.region): one for one in contributions(ledger).cells if one.num_rows}
    weights, regions = {}, ("low", "high")
    for region in regions:
        page = settled(client, f"/governance/{key}?region={region}")
        (table,) = re.findall(r'aria-label="Classes in the region [^"]*">(.*?)</table>', page, re.DOTALL)
        head = re.findall(r'<th scope="col">(.*?)</th>', table)
        assert head[-4:-2] == ["steps", "rows"]
        for row in re.findall(r'<tr><th scope="row">.*?</tr>', table, re.DOTALL):
            (name,) = re.findall(r'<th scope="row">(.*?)</th>', row)
            values = re.findall(r"<td[^>]*>(.*?)</td>", row)
            num_phases = len(head) - 5
            weights[name, region] = values[:num_phases]
            if cell := cells.get((name, region)):
                shown = [value.replace(",", "") for value in values[num_phases : num_phases + 2]]
                assert shown == [str(cell.num_steps), str(cell.num_rows)]
                assert cell.num_steps != cell.num_rows
    assert len(cells) > 2
    # By the policy that the run was given: see trainer_in.
    assert weights["shut/b", "low"] != weights["shut/b", "high"]


@pytest.mark.parametrize(
    ("site", "status"), [("same-origin", 303), ("none", 303), ("same-site", 404), ("cross-site", 404)]
)
def test_only_this_very_origin_may_press_the_button(
    store: tuple[Path, TestClient, str], site: str, status: int
) -> None:
    _, client, key = store
    assert client.post(f"/governance/{key}/check", headers={"Sec-Fetch-Site": site}).status_code == status
