"""Runs beside a run: other seeds of the same recipe on the same data, and nothing that is only called alike."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from cosmati.explorer.server.app import make_app
from cosmati.store.index import RunIndex
from cosmati.store.summary import key_of
from tests.store.samples import run_record, write_run

Near = Callable[[str], dict[str, str]]


def put(store: Path, name: str, seed: int, data: str = "cats", **recipe: Any) -> None:
    text = json.dumps({"budget": "9ba", "seed": seed, "lr": 0.1} | recipe)
    record = run_record(name, seed=seed, recipe_name="run", recipe_text=text, digests={"plan": name, "data": data})
    write_run(store / name, record)


@pytest.fixture
def near(tmp_path: Path) -> Near:
    def found(name: str) -> dict[str, str]:
        with RunIndex(tmp_path) as index:
            index.refresh()
            client = TestClient(make_app(index), base_url="http://localhost")
            page = client.get(f"/runs/{key_of(name)}").text
        return {kind: key for key, kind in re.findall(r'href="/runs/(\w+)" rel="(prev|next)"', page)}

    return found


def test_runs_that_only_share_a_name_are_no_neighbours(tmp_path: Path, near: Near) -> None:
    put(tmp_path, "a", 3)
    put(tmp_path, "same seed", 3)
    put(tmp_path, "other recipe", 2, lr=0.2)
    put(tmp_path, "other data", 4, data="dogs")
    assert near("a") == {}


def test_the_nearest_other_seeds_of_a_recipe_are(tmp_path: Path, near: Near) -> None:
    for seed in (1, 2, 5, 9):
        put(tmp_path, f"s{seed}", seed)
    put(tmp_path, "other data", 4, data="dogs")
    put(tmp_path, "again", 2)
    assert near("s1") in ({"next": key_of("s2")}, {"next": key_of("again")})
    assert near("s5") in ({"prev": key_of(name), "next": key_of("s9")} for name in ("s2", "again"))
    assert near("s9") == {"prev": key_of("s5")}


def test_what_names_a_run_of_a_recipe_is_no_difference(tmp_path: Path, near: Near) -> None:
    for seed in (1, 2):
        config = {"seed": seed, "name": f"run {seed}", "run_folder": f"/x/{seed}", "budget": "9ba"}
        record = run_record(f"s{seed}", seed=seed, recipe_text=json.dumps({"config": config, "optimizers": []}))
        write_run(tmp_path / f"s{seed}", record)
    assert near("s1") == {"next": key_of("s2")}
