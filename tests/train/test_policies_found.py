"""A policy that lies in a run's folder is read, held against the one in force, put on record, and acts at its step."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmati import PolicyFile
from cosmati.errors import CheckpointError, CosmatiError, PolicyError
from cosmati.train import policy_watch
from cosmati.train.facts import PolicyChanges
from cosmati.train.identity import Change
from cosmati.train.policy_watch import FILE, MOST_BYTES, REFUSED_FILE, policy_watch_of
from tests.train.policy_world import BEFORE
from tests.train.watched_policy import HALF, MEASURED, Source, World, policy, signed

OPERATOR = "the operator, of a policy that nobody had signed"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_only_a_governed_run_with_a_ledger_is_watched(world: World) -> None:
    a = world.a
    none = replace(world.prepared, assembly=replace(a, policy=None))
    assert policy_watch_of(none) is None
    plan = replace(a.plan, facts=replace(a.plan.facts, has_ledger=False))
    assert policy_watch_of(replace(world.prepared, assembly=replace(a, plan=plan))) is None


def test_what_is_found_is_on_record_before_its_file_goes_and_acts_at_the_next_step(world: World) -> None:
    plan, before = world.a.plan, world.weights_at(5)
    world.leave(policy())
    assert world.before_step(4) is plan
    change = world.change(5, by=OPERATOR)
    told = [Change("policy.to_come", None, f"from step 5 on, by {OPERATOR}")]
    assert world.told == [("amend", 4, told, {"policy_changes": PolicyChanges((change,), {})})]
    assert world.file_stood == [True]
    assert not (world.folder / FILE).exists()
    assert not (world.folder / REFUSED_FILE).exists()
    assert world.weights_at(5) == before
    world.told.clear()
    world.before_step(5)
    (_, step, told_plan), (_, now, compiled, anchor), (_, at, changes, facts) = world.told
    assert (step, told_plan, anchor, at) == (5, plan, None, 5)
    assert now == policy()
    assert changes == [
        Change("policy", "0102", compiled.policy_digest.hex()),
        Change("policy.changed_by", None, OPERATOR),
    ]
    assert facts == {"policy": compiled, "policy_text": policy().to_mapping(), "vouched_policy": None}
    assert compiled.policy_digest.hex() == policy().digest.hex()
    assert world.weights_at(5) == [compiled.route(c, 5) for c in (0, 1, 2)] != before
    world.told.clear()
    world.before_step(5)
    world.before_step(6)
    assert world.told == []


def test_a_plan_loses_what_the_policy_does_not_keep(world: World) -> None:
    world.leave(policy(HALF))
    plan = world.before_step(4)
    assert [g.holds for g in world.before_step(5).guarantees] != [g.holds for g in plan.guarantees]


def test_it_is_looked_for_at_the_borders_of_a_few_steps_and_once_at_each(world: World) -> None:
    world.leave(policy())
    for step in (1, 2, 3, 5, 6, 7):
        world.before_step(step)
    assert world.told == []
    world.before_step(8)
    assert len(world.told) == 1
    world.told.clear()
    world.before_step(9)
    world.told.clear()
    world.before_step(8)
    world.leave(policy(HALF))
    world.before_step(8)
    assert world.told == [], "the border of step 8 was heeded"
    world.before_step(0)
    assert len(world.told) == 1


def test_it_is_looked_for_before_the_first_step_too(world: World) -> None:
    world.leave(policy())
    world.before_step(0)
    assert [change["step"] for change in world.watch._changes] == [1]


def test_nothing_is_looked_for_while_a_change_is_to_come(world: World) -> None:
    world.watch.recorded = [world.change(7)]
    world.watch.resume(world.run, world.continuity, None, "p")
    world.told.clear()
    world.leave(policy(HALF))
    world.before_step(4)
    assert world.told == []
    world.before_step(7)
    world.before_step(8)
    assert [one[0] for one in world.told] == ["close", "go by", "amend", "amend"]
    assert [one["step"] for one in world.continuity.policy_changes] == [7, 9], "the list itself, which grows"
    assert world.told[-1][2] == [Change("policy.to_come", None, f"from step 9 on, by {OPERATOR}")]
    world.told.clear()
    world.before_step(9)
    assert [one[0] for one in world.told] == ["close", "go by", "amend"]


def test_another_rank_does_what_the_first_one_tells(world: World) -> None:
    change = world.change(5)
    world.a.ranks.rank = 1
    world.a.ranks.told = lambda message: json.dumps(change).encode()  # type: ignore[method-assign]
    raw = world.leave(policy(HALF))
    world.before_step(4)
    files = world.told[0][3]["policy_changes"].files
    assert (world.told[0][3]["policy_changes"].told, files) == ((change,), {})
    assert (world.folder / FILE).read_bytes() == raw


def test_the_policy_in_force_is_no_change(world: World) -> None:
    world.leave(policy(BEFORE))
    world.before_step(4)
    assert world.told == []
    assert list(world.folder.glob("policy-change*")) == []


def test_what_can_not_be_read_is_told_and_the_run_goes_on(world: World) -> None:
    for number, raw in enumerate((b"no json", b"{}", b'{"policy": {"version": 7}}', b"\xff")):
        world.leave(raw)
        with pytest.warns(UserWarning, match="^The run goes on with the policy that it has. ") as told:
            world.before_step(4 * number)
        assert world.refused()["given"] == raw.decode("utf-8", "replace")
        assert world.refused()["why"] in str(told[0].message)
        assert not (world.folder / FILE).exists()
    assert world.told == []


def test_a_failure_without_words_is_told_by_its_kind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise ValueError

    monkeypatch.setattr(world.watch, "_allowed", fails)
    world.leave(policy())
    with pytest.warns(UserWarning, match="ValueError"):
        world.before_step(4)
    assert world.refused()["why"] == "ValueError"


def test_of_what_was_refused_a_megabyte_is_kept(world: World) -> None:
    with pytest.warns(UserWarning, match="too much"):
        world.watch._refuse(None, b"a" * (1 << 20) + b"b", "too much")
    assert world.refused()["given"] == "a" * (1 << 20)


def test_why_a_policy_was_refused_stands_on_a_line_of_its_own(world: World) -> None:
    with pytest.warns(UserWarning, match="too late"):
        world.watch._refuse(None, b"a policy", "too late")
    lines = (world.folder / REFUSED_FILE).read_text().splitlines()
    assert lines == ["{", '  "why": "too late",', '  "given": "a policy"', "}"]


def test_what_came_in_the_place_of_a_file_that_was_read_stays(world: World) -> None:
    path = world.folder / FILE
    path.write_bytes(b"new")
    world.watch._take_away(b"old")
    world.watch._take_away(None)
    assert path.read_bytes() == b"new"
    world.watch._take_away(b"new")
    assert not path.exists()
    world.watch._take_away(b"new")


def test_who_takes_a_file_away_after_it_was_compared_is_not_in_the_way(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.watch, "_content", lambda: b"read")
    world.watch._take_away(b"read")
    assert not (world.folder / FILE).exists()


def test_a_file_is_read_to_a_byte_past_what_may_be(world: World) -> None:
    assert world.watch._content() is None
    world.watch.look()
    assert world.watch._found.empty()
    (world.folder / FILE).write_bytes(b"a" * (MOST_BYTES + 5))
    content = world.watch._content()
    assert content is not None
    assert len(content) == MOST_BYTES + 1


def test_a_change_that_is_too_long_is_not_parsed() -> None:
    text = json.dumps({"policy": policy().to_mapping()}).encode()
    assert policy_watch._read(text.ljust(MOST_BYTES)) == policy()
    found = policy_watch._read(text.ljust(MOST_BYTES + 1))
    assert isinstance(found, PolicyError)
    assert "is longer than 8,388,608 bytes" in str(found)


def test_a_change_may_say_where_a_signed_policy_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def found(url: str, name: str, *, root: str, number: int) -> PolicyFile:
        asked.append((url, name, root, number))
        if number == 8:
            raise PolicyError("number 8 has expired")
        return signed()

    monkeypatch.setattr(policy_watch, "signed_policy", found)
    told = {"url": "there", "name": "main", "root": "R", "number": 7}
    assert policy_watch._read(json.dumps(told).encode()) == signed()
    assert str(policy_watch._read(json.dumps(told | {"number": 8}).encode())) == "number 8 has expired"
    assert asked == [("there", "main", "R", 7), ("there", "main", "R", 8)]
    wrong = policy_watch._read(json.dumps({"url": "there"}).encode())
    assert isinstance(wrong, PolicyError)
    assert str(wrong).startswith(f"{FILE} can't be read: KeyError('name')")


def test_what_comes_after_a_completed_run_is_told_by_its_first_rank(world: World) -> None:
    raw = world.leave(policy())
    for outcome, rank in (("stopped", 0), ("failed", 0), ("completed", 1)):
        world.a.ranks.rank = rank
        world.watch.close(outcome)
        assert not (world.folder / REFUSED_FILE).exists()
    world.a.ranks.rank = 0
    with pytest.warns(UserWarning, match=f"completed before it looked at {FILE}. To go on with it, give the policy"):
        world.watch.close("completed")
    assert world.refused()["given"] == raw.decode()
    assert not (world.folder / FILE).exists()
    world.watch.close("completed")


def test_a_file_that_appears_is_read_by_one_thread(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    goes, seen = threading.Event(), list[str]()

    def look() -> None:
        seen.append(threading.current_thread().name)
        assert threading.current_thread().daemon
        goes.wait(20)

    monkeypatch.setattr(world.watch, "look", look)
    assert world.watch._newest(4, world.continuity) is None
    assert world.watch._thread is None
    (world.folder / FILE).write_bytes(b"{}")
    world.watch._newest(4, world.continuity)
    first = world.watch._thread
    assert first is not None
    world.watch._newest(8, world.continuity)
    assert world.watch._thread is first
    goes.set()
    first.join(20)
    world.watch._newest(12, world.continuity)
    second: Any = world.watch._thread
    assert second is not first
    second.join(20)
    assert seen == ["cosmati-policy"] * 2


def test_the_next_version_of_a_signed_policy_is_taken_up_without_a_file(tmp_path: Path) -> None:
    world = World(tmp_path, vouchers=Source(signed()))
    found = world.watch._newest(4, world.continuity)
    assert found is not None
    assert (found.raw, found.change["step"], found.change["signed"]) == (None, 5, {"number": 2})
    assert found.files == {"ab": b"a voucher"}
    assert world.watch._newest(8, world.continuity) is None


def test_another_runs_version_is_passed_over_and_a_bad_one_is_told_by_its_name(tmp_path: Path) -> None:
    world = World(
        tmp_path,
        vouchers=Source(signed(run="another"), signed(HALF + "  - {class: bold, weight: 0}\n"), PolicyError("gone")),
    )
    assert world.watch._newest(4, world.continuity) is None
    assert not (tmp_path / REFUSED_FILE).exists()
    with pytest.warns(UserWarning, match="goes on with the policy that it has"):
        assert world.watch._newest(4, world.continuity) is None
    assert world.refused()["given"] == "main 2"
    with pytest.warns(UserWarning, match="gone"):
        assert world.watch._newest(4, world.continuity) is None
    assert world.refused() == {"why": "gone", "given": ""}


def test_a_file_may_not_name_another_runs_policy(world: World) -> None:
    with pytest.raises(CheckpointError, match="was signed as a change of the run another"):
        world.watch._allowed(signed(run="another"), 4, world.continuity)


def test_a_run_that_takes_only_what_is_signed_takes_no_policy_that_is_declared(world: World) -> None:
    config = replace(world.a.config, require_signed=True)
    world.watch._given = replace(world.watch._given, config=config)
    with pytest.raises(CosmatiError, match="require_signed=True, and"):
        world.watch._allowed(policy(), 4, world.continuity)


def test_a_change_that_only_a_resume_could_make_is_not_made(world: World) -> None:
    assert world.watch._allowed(policy(), 10, world.continuity) is not None
    with pytest.raises(PolicyError, match="would act from step 12 on, and the run ends before it"):
        world.watch._allowed(policy(), 11, world.continuity)
    late = signed(from_step=12)
    with pytest.raises(PolicyError, match="would act from step 12 on, and the run ends before it"):
        world.watch._allowed(late, 4, world.continuity)


@pytest.mark.parametrize(("named", "begin"), [(None, 5), (0, 5), (5, 5), (6, 6), ("soon", 5)])
def test_a_change_acts_from_the_next_step_on_or_a_later_one_that_is_signed(
    world: World, named: object, begin: int
) -> None:
    found = world.watch._allowed(signed(**({} if named is None else {"from_step": named})), 4, world.continuity)
    assert found is not None
    assert found["step"] == begin


def test_what_a_change_is_held_against_goes_on_record_but_for_its_text(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def change(was: object, now: PolicyFile, assembly: Any, step: int) -> Any:
        asked.append((was, now, assembly.policy.policy_digest, step))
        return {"text": "long", "root": "R", "number": 3}, [Change("policy.changed_by", None, "the authority")]

    monkeypatch.setattr(policy_watch, "change_policy", change)
    world.continuity.anchor = "the anchor"
    assert world.watch._allowed(policy(), 4, world.continuity) == {
        "step": 5,
        "text": policy().to_mapping(),
        "by": "the authority",
        "signed": None,
        "anchor": {"root": "R", "number": 3},
    }
    assert asked == [("the anchor", policy(), policy().digest, 5)]


def test_routes_and_rows_that_wait_go_by_the_policy_that_acts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    routed, waiting = list[Any](), list[Any]()
    monkeypatch.setattr(world.a.router, "go_by", lambda *given: routed.append(given))
    monkeypatch.setattr(world.a.deferred_rows, "go_by", waiting.append)
    world.watch._data = SimpleNamespace(
        measured={7: (1, {"trust": "high"})}, row_kinds=[SimpleNamespace(band=1, grades=(("trust", "low"),))]
    )
    measured = MEASURED.replace("weight: 1}", "weight: 0.5}")
    facts = world.watch._go_by(world.change(5, measured), world.continuity)
    ((compiled, kind_of, token_kinds),) = routed
    assert waiting == [compiled] == [facts["policy"]]
    kinds = [(one.band, dict(one.grades)["trust"]) for one in compiled.kinds]
    assert kinds[kind_of(7)] == ("high", "high")
    assert kinds[kind_of(0)] == ("low", "")
    assert [kinds[number] for number in token_kinds] == [("high", "low")]


def test_who_acts_by_a_signed_policy_has_its_voucher_from_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vouchers, asked = Source(), list[Any]()
    world = World(tmp_path, vouchers=vouchers)
    monkeypatch.setattr(policy_watch, "kept_policy", lambda *given: asked.append(given) or "kept")  # type: ignore[func-returns-value]
    change = world.change(5, signed={"number": 2}, anchor={"root": "R", "number": 2})
    facts = world.watch._go_by(change, world.continuity)
    assert asked == [(tmp_path / "ledger" / policy_watch.FOLDER, {"number": 2})]
    assert facts["vouched_policy"] == "kept"
    assert facts["policy"].policy_digest == b"rebased"
    assert vouchers.told == [(None, "kept")]
    assert world.told[0][2:] == (facts["policy"], {"text": policy().to_mapping(), "root": "R", "number": 2})
    world.a.ranks.rank = 1
    assert world.watch._go_by(change, world.continuity)["vouched_policy"] is None
    world.a.ranks.rank = 0
    assert world.watch._go_by(world.change(5), world.continuity)["vouched_policy"] is None
    assert len(asked) == 1
