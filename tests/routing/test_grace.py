"""The field `grace`, and that a class is taken from a policy in mid-run and nothing else is changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.errors import PolicyError
from cosmati.routing.policy import resolve_time
from cosmati.routing.policy_file import load_policy
from cosmati.routing.tightening import without_class
from tests.routing.samples import CLASSES, compiled, policy_of
from tests.routing.test_policy_oracle import RULES, oracle_table

STEPS = 10
PLAIN = "version: 1\ntaxonomy: t\nrules:\n  - {class: '**', weight: 1}\n"


@given(RULES, st.lists(st.tuples(st.sampled_from(range(len(CLASSES))), st.integers(0, STEPS + 2)), max_size=4))
def test_only_that_class_is_taken_and_only_from_that_step(
    rules: list[dict[str, object]], taken: list[tuple[int, int]]
) -> None:
    if oracle_table(rules) is None:
        return
    before = policy = compiled(rules)
    for class_id, step in taken:
        policy = without_class(policy, class_id, step)
    assert [phase.start_step for phase in policy.phases[1:]] == [phase.end_step for phase in policy.phases[:-1]]
    assert (policy.phases[0].start_step, policy.phases[-1].end_step) == (0, STEPS)
    assert len({phase.name for phase in policy.phases}) == len(policy.phases)
    first = {c: min(step for class_id, step in taken if class_id == c) for c, _ in taken}
    for step in range(STEPS):
        old, new = before.phase_at(step), policy.phase_at(step)
        for c in range(len(CLASSES)):
            is_taken = step >= first.get(c, STEPS)
            wanted = (
                ((0.0,) * len(before.regions), "reject")
                if is_taken
                else (before.route(c, step), before.decision[c][old])
            )
            assert (policy.route(c, step), policy.decision[c][new]) == wanted
            assert policy.routes[policy.route_id(c, new)] == policy.route(c, step)


@pytest.mark.parametrize(
    ("text", "reason", "answer"),
    [
        ("", "expiry", ("stop", 0)),
        ("grace: {}", "revocation", ("stop", 0)),
        ("grace: {revocation: reject}", "revocation", ("reject", 0)),
        ("grace: {revocation: reject}", "licence", ("stop", 0)),
        ("grace: {expiry: {finish: 7ba}}", "expiry", ("stop", 7)),
        ("grace: {expiry: {finish: 0.25dur}}", "expiry", ("stop", 10)),
        ("grace: {expiry: reject, licence: reject}", "expiry", ("reject", 0)),
    ],
)
def test_what_a_grace_answers(text: str, reason: str, answer: tuple[str, int]) -> None:
    grace = load_policy(PLAIN + text + "\n").grace
    found = ("stop", 0) if grace is None else grace.answer(reason, lambda span: resolve_time(span, num_steps=40))  # type: ignore[arg-type]
    assert found == answer


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{revocation: {finish: 1ba}}", r"grace.revocation"),
        ("{expiry: {finish: soon}}", "write '100ba'"),
        ("{expiry: {finish: 1.5dur}}", "write '100ba'"),
        ("{expiry: {finish: 1ep}}", "write '100ba'"),
        ("{expiry: later}", "'stop' or 'reject'"),
        ("{expires: stop}", "did you mean expiry"),
        ("stop", "grace"),
    ],
)
def test_a_grace_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        load_policy(f"{PLAIN}grace: {text}\n")


def test_what_is_signed_covers_the_grace() -> None:
    rules: list[dict[str, object]] = [{"class": "**", "weight": 1}]
    plain = policy_of(rules)
    assert "grace" not in plain.to_mapping(), "policies without one keep their digest"
    digests = {
        policy_of(rules, grace=one).digest
        for one in ({}, {"revocation": "reject"}, {"licence": "reject"}, {"expiry": {"finish": "1ba"}})
    }
    assert len(digests | {plain.digest}) == 5
    assert policy_of(rules, grace={}).digest == policy_of(rules, grace={"expiry": "stop"}).digest


def test_what_a_run_does_is_shown(tmp_path: Path) -> None:
    plain = "version: 1\ntaxonomy: software-licences\nrules: [{class: '**', weight: 1}]\n"
    for text, told in (
        (plain, "expiry: stop; revocation: stop; licence: stop"),
        (
            f"{plain}grace: {{expiry: {{finish: 0.1dur}}, licence: reject}}\n",
            "expiry: finish 0.1dur; revocation: stop; licence: reject",
        ),
    ):
        (tmp_path / "policy.yaml").write_text(text)
        result = CliRunner().invoke(app, ["policy", "show", str(tmp_path / "policy.yaml")])
        assert result.output.endswith(f"Where nobody vouches for a class any more: {told}\n")
