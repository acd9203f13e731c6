"""Two runs beside one another: the first fact in which they differ is the one that was changed."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cosmati import Classification, Evaluation, InMemory, RunConfig, Trainer, accuracy
from cosmati.explorer.compare_view import CompareView
from cosmati.explorer.compared_run import DATA, ENVIRONMENT, SEED, of_folder, of_study
from cosmati.explorer.differences import agreement, bits_sentence, diff_lines, first_difference, groups_of, parted
from cosmati.methods import LabelSmoothing
from cosmati.models.mlp import MLP
from cosmati.optim import SGD
from cosmati.records.ledger import CheckpointEntry, ResumeEntry
from cosmati.store.importing import import_runs
from cosmati.store.importing.imported import ImportedRun, write_imported
from cosmati.store.index import RunIndex
from cosmati.store.summary import RunSummary, key_of
from tests.explorer.samples import demo_study
from tests.explorer.test_server import Served, data_of
from tests.ledger.test_amend import FIRST, KEY
from tests.ledger.test_verify import Item, write_signed
from tests.store.samples import HOSTILE, run_record, write_run

ROWS = torch.arange(96.0).reshape(32, 3).sin()


def train(folder: Path, *, shift: int = 0, model: Any = (3, 8, 2), rate: float = 0.1, **config: Any) -> None:
    torch.manual_seed(1)
    data = InMemory((ROWS, (torch.arange(32) + shift) % 2), 8)
    settings: dict[str, Any] = {
        "budget": "24ba",
        "seed": 1,
        "num_microbatches": 2,
        "ledger": True,
        "checkpoint_every": "8ba",
    }
    Trainer(
        MLP(model),
        Classification(2),
        data,
        optimizers=[SGD(lr=rate)],
        methods=[LabelSmoothing(smoothing=0.1)],
        evaluation=Evaluation([(ROWS, torch.arange(32) % 2)], {"accuracy": accuracy}),
        config=RunConfig(run_folder=folder, num_threads=1, num_checkpoints=9, **(settings | config)),
    ).fit()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store = tmp_path_factory.mktemp("store")
    train(store / "first")
    train(store / "again")
    train(store / "rate", rate=0.2)
    train(store / "seed", seed=2)
    train(store / "data", shift=1)
    train(store / "wider", model=(3, 9, 2))
    (store / "study").mkdir()
    (store / "study" / "study.json").write_text(demo_study(num_seeds=3).to_json())
    write_run(store / "evil", run_record("evil", recipe_text=json.dumps(dict.fromkeys(HOSTILE, HOSTILE[4]))))
    found = Served(store)
    yield found
    found.close()


def view_of(index: RunIndex, a: str, b: str) -> CompareView:
    runs = [index.run(key_of(name)) for name in (a, b)]
    return CompareView(*(of_folder(index.root / run.path, run) for run in runs if run is not None))


@pytest.mark.parametrize(
    ("other", "where"),
    [
        ("rate", "They differ first in recipe, optimizers.0: "),
        ("seed", "They differ first in seed and budget, seed: 1 in A, 2 in B."),
        ("data", "They differ first in data, digest: "),
        ("wider", "They differ first in code and model, "),
    ],
)
def test_the_first_difference_is_what_was_changed(served: Served, other: str, where: str) -> None:
    view = view_of(served.index, "first", other)
    assert view.sentence.startswith(where)
    assert any(text.startswith("Not the same bits") for text in view.bits)


def test_two_runs_of_one_recipe_have_the_same_bits_and_say_so(served: Served) -> None:
    view = view_of(served.index, "first", "again")
    assert view.sentence.startswith("No recorded fact differs: recipe, code and model, data, policy, seed and budget")
    weights = [text for text in view.bits if text.startswith("Same bits")]
    assert weights == [
        "Same bits: checkpoints' weights agree at all 4 steps that both have, the last one 24.",
        "Same bits: signed digests of the parameters agree at all 4 steps that both have, the last one 24.",
    ]
    assert not view.diff
    assert {row[3] for row in view.outcome_rows if row[0] in ("accuracy", "steps")} == {"equal"}


def test_a_resumed_run_has_the_same_bits_and_a_loss_that_was_changed_is_found(tmp_path: Path) -> None:
    train(tmp_path / "a")
    train(tmp_path / "b", budget="8ba")
    train(tmp_path / "b", budget="24ba", change="budget")
    with RunIndex(tmp_path) as index:
        index.refresh()
        same = view_of(index, "a", "b")
    assert [text for text in same.bits if text.startswith("Same bits: signed")]
    assert not [text for text in same.bits if "differ" in text]
    lines = (tmp_path / "b" / "steps.jsonl").read_text().splitlines()
    changed = [
        {**line, "loss": line["loss"] + 1e-12} if line["step"] >= 20 else line for line in map(json.loads, lines)
    ]
    (tmp_path / "b" / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    with RunIndex(tmp_path) as index:
        index.refresh()
        assert (
            "Their logged losses are equal up to step 10, and first differ at step 20." in view_of(index, "a", "b").bits
        )


def test_a_ledger_that_was_changed_says_nothing(served: Served, tmp_path: Path) -> None:
    train(tmp_path / "a")
    tile = next(path for path in sorted((tmp_path / "a" / "ledger" / "tile").rglob("*")) if path.is_file())
    tile.write_bytes(tile.read_bytes()[::-1])
    (run,) = [served.index.run(key_of("first"))]
    assert run is not None
    found = of_folder(tmp_path / "a", run)
    assert "signed digests of the parameters" not in found.weights
    assert len(found.notes) == 1


def test_what_was_signed_and_superseded_is_no_weight_of_the_run(tmp_path: Path) -> None:
    """A checkpoint at step 3, then back to step 2: what was at step 3 before isn't the run's any more."""

    def root(name: str) -> bytes:
        return hashlib.sha256(name.encode()).digest()

    def step(number: int, attempt: int, name: str) -> Item:
        entry, details = FIRST.step(number, attempt)
        return replace(entry, parameter_root=root(name)), details

    first = [step(0, 0, "one"), step(1, 0, "two"), step(2, 0, "old three")]
    checkpoint = CheckpointEntry(3, root("state"), root("old three"))
    resume = (ResumeEntry(2, 3, 1), None)
    for again, expected in (([], {1: "one", 2: "two"}), ([step(2, 1, "three")], {1: "one", 2: "two", 3: "three"})):
        folder = tmp_path / str(len(again))
        write_signed(folder / "ledger", [FIRST.run(), *first, (checkpoint, None), resume, *again], KEY)
        write_run(folder, run_record())
        found = of_folder(folder, RunSummary(key="k", path="p", kind="run", name="n"))
        signed = found.weights["signed digests of the parameters"]
        assert signed == {number: root(name).hex() for number, name in expected.items()}


def page_of(served: Served, a: str, b: str) -> str:
    status, page, _ = served.get(f"/compare?a={a}&b={b}")
    assert status == 200
    return page


def test_the_page_has_sentence_figures_diff_and_a_way_back(served: Served) -> None:
    a, b = key_of("first"), key_of("rate")
    page = page_of(served, a, b)
    assert "They differ first in recipe, optimizers.0" in page
    figures = data_of(page)["figures"]
    assert {"both-0", "both-1", "both-1-time"} <= set(figures)
    steps = [line.split(",") for line in str(figures["both-0"]["csv"]).splitlines()[1:]]
    for name, folder in (("A", "first"), ("B", "rate")):
        logged = [json.loads(line) for line in (served.index.root / folder / "steps.jsonl").read_text().splitlines()]
        assert [(int(s), float(v)) for n, s, v in steps if n == name] == [(x["step"], x["loss"]) for x in logged]
    assert 'class="removed"' in page
    assert 'class="added"' in page
    assert f'href="/compare?a={b}&amp;b={a}"' in page
    assert "They differ first in recipe, optimizers.0" in page_of(served, b, a)


def test_runs_of_studies_and_folders_and_hostile_ones_compare(served: Served) -> None:
    own = key_of("first")
    arm, baseline = key_of("study", "composed", 1.0, 1), key_of("study", "baseline", 1.0, 1)
    page = page_of(served, baseline, arm)
    assert "compares baseline and composed over its seeds" in unescape(page)
    assert "isn&#39;t evidence" in page
    for pair in ((own, arm), (arm, own), (own, key_of("evil")), (key_of("evil"), key_of("evil")), (own, own)):
        assert "<script>alert" not in page_of(served, *pair)
    assert "A and B are the same run." in page_of(served, own, own)
    mixed = page_of(served, own, arm)
    assert "not recorded for B" in mixed


def test_one_chosen_run_is_offered_others_and_each_offer_leads_to_a_comparison(served: Served) -> None:
    chosen = key_of("study", "composed", 1.0, 1)
    page = served.get(f"/compare?a={chosen}")[1]
    offers = [unescape(one) for one in re.findall(r'href="(/compare\?a=[^"]*b=[^"]+)"', page)]
    assert offers[0] == f"/compare?a={chosen}&b={key_of('study', 'baseline', 1.0, 1)}", "its twin of the baseline first"
    assert served.get(offers[0])[0] == 200
    searched = served.get(f"/compare?b={chosen}&text=first")[1]
    assert "No run fits" in served.get("/compare?text=nothing-like-it")[1]
    assert "/compare?b=" in searched or "No run fits" in searched
    first = unescape(served.get("/compare")[1])
    assert re.findall(r'href="/compare\?a=[0-9a-f]{16}"', first)


@pytest.mark.parametrize("query", ["a=0000", "a=0000&b=1111", "b=%3Cscript%3E"])
def test_a_run_that_is_not_there_is_named(served: Served, query: str) -> None:
    status, page, _ = served.get(f"/compare?{query}")
    assert status == 404
    assert "has no run" in page
    assert "<script>" not in page


def test_a_folder_that_is_removed_meanwhile_is_said(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, run_record(name))
    found = Served(tmp_path)
    try:
        (tmp_path / "b" / "run.json").unlink()
        status, page, _ = found.get(f"/compare?a={key_of('a')}&b={key_of('b')}")
        assert (status, "moved or removed" in page) == (404, True)
    finally:
        found.close()


FACTS = st.dictionaries(st.sampled_from("abcde"), st.sampled_from(("1", "2")), max_size=5)


@given(
    st.dictionaries(st.sampled_from(("Recipe", "Data")), FACTS),
    st.dictionaries(st.sampled_from(("Recipe", "Data")), FACTS),
)
def test_each_fact_stands_once_and_differs_if_it_does(a: dict[str, Any], b: dict[str, Any]) -> None:
    for group in groups_of(a, b):
        ours, theirs = a.get(group.name, {}), b.get(group.name, {})
        assert {row.name for row in group.rows} == ours.keys() | theirs.keys()
        unequal = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
        assert {row.name for row in group.different} == (unequal if ours and theirs else set())
        parts = [*group.different, *group.equal, *group.alone]
        assert sorted(row.name for row in parts) == sorted(row.name for row in group.rows)
    lenient = groups_of(a, b, is_strict=False)
    assert all(row.a is not None and row.b is not None for group in lenient for row in group.different)
    assert ("differ first" in first_difference(lenient)) == any(group.different for group in lenient)


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 1)), st.dictionaries(st.integers(0, 9), st.integers(0, 1)))
def test_agreement_ends_at_the_first_step_that_differs(a: dict[int, int], b: dict[int, int]) -> None:
    found = agreement(a, b)
    shared = [step for step in range(10) if step in a and step in b]
    wrong = [step for step in shared if a[step] != b[step]]
    right = [step for step in shared if not wrong or step < wrong[0]]
    assert found.num_shared == len(shared)
    assert found.first_different == (wrong[0] if wrong else None)
    assert found.last_equal == (right[-1] if right else None)
    assert bool(bits_sentence("they", found)) == bool(shared)


def test_long_values_are_cut_where_they_part() -> None:
    left, right = parted("x" * 500 + "lr=1" + "y" * 500, "x" * 500 + "lr=2" + "y" * 500)
    assert "lr=1" in left
    assert "lr=2" in right
    assert max(len(left), len(right)) < 80
    assert parted(None, "") == ("absent", "empty")
    assert math.isclose(len(parted("a" * 10_000, "a" * 9_999)[0]), 74, abs_tol=3)


def test_a_diff_is_unified_and_each_line_has_its_kind() -> None:
    found = diff_lines("a\nb\nc", "a\nB\nc")
    assert found == [("place", "@@ -1,3 +1,3 @@"), ("same", " a"), ("removed", "-b"), ("added", "+B"), ("same", " c")]
    assert diff_lines("same", "same") == []


@pytest.mark.parametrize("seed", ["", "7", "8"])
def test_of_an_imported_run_only_what_the_other_tool_had_is_compared(tmp_path: Path, seed: str) -> None:
    source = tmp_path / "log"
    (source / "params").mkdir(parents=True)
    (source / "metrics").mkdir()
    (source / "meta.yaml").write_text("run_id: theirs\nrun_name: theirs\nstatus: 3\n")
    (source / "metrics" / "loss").write_text("1700000001000 2.0 1\n1700000002000 1.0 2\n")
    if seed:
        (source / "params" / "seed").write_text(seed)
    import_runs(source, tmp_path / "store")
    record = run_record("own", digests={"data": "cd" * 32}, metrics={"loss": 0.5})
    write_run(tmp_path / "store" / "own", replace(record, seed=7))
    with RunIndex(tmp_path / "store") as index:
        index.refresh()
        runs = {run.name: run for run in index.runs()}
        ours, theirs = (of_folder(index.root / runs[name].path, runs[name]) for name in ("own", "theirs"))
        view = CompareView(theirs, ours)
        missing = {group.name: group.missing for group in view.groups}
        assert missing[DATA] == "a"
        assert "hardware" not in theirs.facts[ENVIRONMENT]
        (seeds,) = (group for group in view.groups if group.name == SEED)
        found = {one.name: (one.a, one.b) for one in seeds.rows}
        assert found["seed"] == (seed or None, "7")
        assert missing[SEED] == ("" if seed else "a")
        assert "data" not in first_difference(view.groups)
        assert "It isn't recorded what both ran on" in view.caution
        assert "Their hardware differs" not in view.caution


@pytest.mark.parametrize(
    ("ours", "theirs", "sentence"),
    [
        ({"policy": "MlpPolicy"}, {"policy": "CnnPolicy"}, "recipe, policy: MlpPolicy in A, CnnPolicy in B."),
        ({"name": "ppo"}, {"name": "sac"}, "recipe, name: ppo in A, sac in B."),
        ({"config": {"name": "ppo"}}, {"config": {"name": "sac"}}, "recipe, config.name: ppo in A, sac in B."),
        ({"config": {"seed": 3}}, {"config": {"seed": 4}}, "recipe, config.seed: 3 in A, 4 in B."),
        ({"seed": "abc"}, {"seed": "xyz"}, "recipe, seed: abc in A, xyz in B."),
        ({"seed": 3}, {"seed": 4}, "seed and budget, seed: 3 in A, 4 in B."),
        ({"random_seed": 3}, {"random_seed": 4}, "seed and budget, seed: 3 in A, 4 in B."),
    ],
)
def test_no_setting_of_another_tools_run_is_lost(
    tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any], sentence: str
) -> None:
    records = {}
    for name, params in (("a", ours), ("b", theirs)):
        run = ImportedRun(name=name, recipe_name="project", params={"lr": 0.1, **params}, metrics={"reward": 1.0})
        write_imported(run, "wandb", tmp_path / name, tmp_path / "store")
    with RunIndex(tmp_path / "store") as index:
        index.refresh()
        records = {run.name: of_folder(index.root / run.path, run) for run in index.runs()}
    view = CompareView(records["a"], records["b"])
    assert sentence in view.sentence
    assert view.sentence.startswith("They differ first in")


def test_arms_of_a_study_differ_in_what_they_add_whatever_their_recipes_say() -> None:
    record = demo_study(num_seeds=2)
    same = RunSummary(key="k", path="p", kind="study", name="n", study=record.name, seed=0, budget=1.0)
    facts = {"name": "recipe", "policy": "strict"}
    one, other = (replace(same, key=arm, arm=arm, facts=facts) for arm in ("freezing", "composed"))
    view = CompareView(of_study(record, one), of_study(record, other))
    assert view.sentence == (
        "They differ first in plan, arm: freezing in A, composed in B. 1 further fact differs, in plan."
    )
    kept = view.a.facts["Recipe"]
    assert kept == facts, "no other group has them"
