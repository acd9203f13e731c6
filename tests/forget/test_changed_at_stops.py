"""Deletions from runs that were stopped, changed and resumed: the replay makes the same changes at the same steps."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cosmati.cli.forget import maker
from cosmati.core.clock import Budget
from cosmati.errors import ForgetError
from cosmati.forget.ablation import Wrap
from cosmati.forget.asked import ToForget
from cosmati.forget.certificate import verify_certificate
from cosmati.forget.making import RecipeThen, schedule_of
from cosmati.forget.past_run import Gone, PastRun
from cosmati.forget.planning import Option, plan_deletion
from cosmati.forget.request import Request
from cosmati.ledger.verify import verify_ledger
from cosmati.optim import Constant, Cosine
from cosmati.recipes.recipe import Recipe
from cosmati.recipes.replaying import trainers_of
from cosmati.routing.policy_file import load_policy
from cosmati.train.trainer import Trainer
from tests.forget import stopped
from tests.forget.recipe import data
from tests.forget.samples import differing, forgotten, rows_of_step, tensors, without
from tests.forget.stopped import HALF, REJECTED, RUNS, THREE, StopAt, Stops, recipe_of, trained
from tests.processes import launch_ranks, run_python
from tests.train.replay_world import replayed

pytestmark = pytest.mark.long


def planned(run: Path, asked: ToForget, recipe: Recipe) -> Option:
    option = plan_deletion(Request.open(PastRun(run), asked, maker(recipe))).option("replay")
    assert option is not None
    return option


QUICK = [("policy", 3), ("policy, and another order", 1), ("longer budget", 5), ("schedule", 1)]
"""Before the stop, and from its very checkpoint; the deletions below are from a run of three legs."""


@pytest.mark.parametrize(
    ("name", "step"),
    [
        pytest.param(name, step, marks=() if (name, step) in QUICK else pytest.mark.slow)
        for name in RUNS
        for step in (1, 3, 5)
    ],
)
def test_the_bits_are_those_of_the_run_without_the_rows(name: str, step: int, tmp_path: Path) -> None:
    (*_, (recipe, end)) = RUNS[name]
    rows, run = rows_of_step(data(), step), trained(RUNS[name], tmp_path / "run")
    option = planned(run, ToForget(rows=rows), recipe)
    assert option.num_steps == end - option.from_step
    done = forgotten(run, ToForget(rows=rows), maker(recipe), tmp_path / "out")
    truth = trained(RUNS[name], tmp_path / "truth", without(rows=rows))
    assert not differing(tensors(done.out), tensors(truth))
    assert differing(tensors(run), tensors(truth)), "the control: the rows had taught"
    assert done.certificate is not None
    assert verify_certificate(done.certificate, done.out / "ledger").entry
    report = verify_ledger(done.out / "ledger", pinned=(run / "ledger" / "checkpoint").read_text())
    assert (report.num_steps, report.has_ended) == (end, True)


def test_the_plan_says_what_changes_again_and_of_which_recipe(tmp_path: Path) -> None:
    """That the run ended with: of an earlier form nobody knows what came after it."""
    run, early, late = trained(THREE, tmp_path / "run"), rows_of_step(data(), 1), rows_of_step(data(), 5)
    option = planned(run, ToForget(rows=early), stopped.recipe())
    assert (option.from_step, option.num_steps) == (0, 8)
    assert "the budget and the policy of the run changed at a stop, and changes again at step 2" in option.notes
    assert "the budget and the schedule of the run changed at a stop, and changes again at step 5" in option.notes
    assert not [note for note in planned(run, ToForget(rows=late), stopped.recipe()).notes if "at step 2" in note]
    (why,) = planned(run, ToForget(rows=early), THREE[1][0]).why_not
    assert "budget: span 5ba, was 8ba" in why


def test_steps_before_and_after_the_stops_are_replayed(tmp_path: Path) -> None:
    """Of the run and of what a deletion made of it, with the recipe that they ended with."""
    run = trained(THREE, tmp_path / "run")
    done = forgotten(run, ToForget(rows=rows_of_step(data(), 5)), maker(stopped.recipe()), tmp_path / "out")
    found = replayed(run, 0, 8, trainers_of(stopped.recipe()))
    assert (found.outcome, found.differences, found.num_steps) == ("equal", (), 8)
    salt = (done.out / "private" / "rows.salt").read_bytes()
    own = trainers_of(stopped.recipe(), lambda digest, source: Gone.after(done.out, digest).of(source, salt))
    found = replayed(done.out, 0, 8, own)
    assert (found.differences, found.num_steps) == ((), 8)


def contact_of(stops: Stops, row: int) -> int:
    """Return the first step that ran a row, by each leg's own order."""
    done = 0
    for recipe, end in stops:
        feed = recipe.trainer().feed
        assert feed is not None
        for step in range(done, end):
            if any(row in batch.lineage.row_ids.tolist() for batch in feed.again(step)):
                return step
        done = end
    raise AssertionError(row)


def test_contact_is_found_in_the_order_that_each_leg_had(tmp_path: Path) -> None:
    """While a class was rejected, the others' rows came in its place: earlier than the recipe of now has them."""
    stops = ((recipe_of(REJECTED), 3), (recipe_of(), 6))
    run = PastRun(trained(stops, tmp_path / "run"))
    found, now = set[int](), set[int]()
    for row in range(0, 96, 9):
        request = Request.open(run, ToForget(rows=frozenset({row})), maker(recipe_of()))
        assert request.contact.first_step == contact_of(stops, row)
        found |= {row} if request.contact.first_step != contact_of(((recipe_of(), 6),), row) else now
    assert found, "the control: by the recipe of now some would be elsewhere"


def test_another_deletion_goes_through_the_legs_of_the_first_ones_result(tmp_path: Path) -> None:
    run, make = trained(THREE, tmp_path / "run"), maker(stopped.recipe())
    late, early = rows_of_step(data(), 4), rows_of_step(data(), 1)
    first = forgotten(run, ToForget(rows=late), make, tmp_path / "one")
    second = forgotten(first.out, ToForget(rows=early), make, tmp_path / "two", delete=True)
    truth = trained(THREE, tmp_path / "truth", without(rows=late | early))
    assert not differing(tensors(second.out), tensors(truth))
    assert second.told is not None
    assert second.told["row_keys"] == "shredded"


RECIPE = str(Path(stopped.__file__))


@pytest.mark.parametrize(
    "at", ["between", pytest.param("3", marks=pytest.mark.slow), pytest.param("0", marks=pytest.mark.slow)]
)
def test_killed_in_any_leg_it_goes_on(at: str, tmp_path: Path) -> None:
    """In the second of three, and where the second has ended and the third isn't begun: no certificate comes early."""
    rows, path = rows_of_step(data(), 1), tmp_path / "ids"
    path.write_text("\n".join(map(str, rows)))
    run, out = trained(THREE, tmp_path / "run"), tmp_path / "out"
    command: list[str | Path] = ["-m", "cosmati", "forget", run, "--rows", path, "--yes", "--out", out]
    done = run_python([*command, "--recipe", f"{RECIPE}:killed"], env={**os.environ, "KILLED_AT": at})
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert out.exists()
    done = run_python([*command, "--recipe", RECIPE])
    assert done.returncode == 0, done.stderr
    assert not differing(tensors(out), tensors(trained(THREE, tmp_path / "truth", without(rows=rows))))


@pytest.mark.slow
def test_two_ranks_give_the_same(tmp_path: Path) -> None:
    rows, path = rows_of_step(data(), 1), tmp_path / "ids"
    path.write_text("\n".join(map(str, rows)))
    run, out = trained(THREE, tmp_path / "run"), tmp_path / "out"
    command: list[str | Path] = ["-m", "cosmati", "forget", run, "--rows", path, "--yes", "--out", out]
    launch_ranks([*command, "--recipe", RECIPE], 2)
    assert not differing(tensors(out), tensors(trained(THREE, tmp_path / "truth", without(rows=rows))))
    assert verify_certificate(out / "certificates" / "0001.json", out / "ledger").entry


def test_a_recipe_that_was_edited_since_the_replay_was_killed_is_refused(tmp_path: Path) -> None:
    """A leg may change what a resume may not, so the ledger is asked."""
    run, asked = trained(THREE, tmp_path / "run"), ToForget(rows=rows_of_step(data(), 1))
    begun, make = tmp_path / "out", maker(stopped.recipe())

    def stopping(wrap: Wrap, folder: Path | None, /, **config: Any) -> Trainer:
        made = make(wrap, folder, **config)
        made.observers.append(StopAt(3))
        return made

    assert forgotten(run, asked, stopping, begun).outcome == "stopped"
    other = recipe_of(HALF, "8ba", Cosine(final=0.3))
    with pytest.raises(ForgetError, match=r"Steps 5 to the end had another schedule than the recipe"):
        forgotten(run, asked, maker(other), begun)
    assert not (begun / "certificates").exists()


@dataclass(frozen=True, kw_only=True)
class Halved(Constant):
    """A schedule of the user's own."""

    def multiplier(self, fraction_elapsed: float, budget: Budget) -> float:
        return 0.5


def test_a_schedule_of_the_users_own_from_before_a_stop_is_refused_by_name(tmp_path: Path) -> None:
    stops = ((recipe_of(schedule=Halved()), 3), (recipe_of(), 6))
    run = trained(stops, tmp_path / "run")
    why = planned(run, ToForget(rows=rows_of_step(data(), 1)), recipe_of()).why_not
    assert len(why) == 1
    assert "Steps 0 to 2 had another schedule than can be made again" in why[0]
    assert planned(run, ToForget(rows=rows_of_step(data(), 4)), recipe_of()).is_possible


def test_a_schedule_is_made_again_only_where_its_text_tells_all_of_it() -> None:
    """`Constant()` is no text of this library's: it'd leave to the class what isn't told."""
    for one in (Constant(), Constant(warmup="2ba"), Cosine(final=0.1)):
        assert schedule_of(repr(one)) == one
    for text in ("Constant()", "Cosine(final=0.1)", "Constant", "AdamW(lr=0.1)", "Constant(warmup=1)", "print()"):
        assert schedule_of(text) is None, text


def test_the_recipes_own_policy_is_taken_where_it_is_the_same_one() -> None:
    """It knows whom to ask about it, now; the ledger's knows who had signed it then."""
    same = load_policy(HALF.canonical.decode())
    assert same is not HALF
    assert RecipeThen(same, {}).policy_for(HALF) is HALF
    assert RecipeThen(same, {}).policy_for(REJECTED) is same
    assert RecipeThen(same, {}).policy_for(None) is same
