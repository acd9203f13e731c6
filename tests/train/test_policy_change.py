"""A change of a signed policy in mid-run: the operator alone tightens, the authority loosens, two people readmit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati import PolicyFile, Trainer, load_policy
from cosmati.cli.main import app
from cosmati.errors import CheckpointError
from cosmati.ledger.policy_changes import PolicyInForce
from cosmati.ledger.reader import read_verifier_key
from cosmati.ledger.verify import verify_ledger
from cosmati.provenance.authority.policies import sign_policy
from tests.provenance.authority.test_policies import PolicyPeople
from tests.train.policy_world import Event, Happening, leave
from tests.train.test_signed_policy import text, trainer, verify

pytestmark = pytest.mark.long

STEP = 3


@pytest.fixture(scope="module")
def once_stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run under a policy that Ada has signed, stopped after three steps of six."""
    folder = tmp_path_factory.mktemp("signed")
    people = PolicyPeople(folder).begin()
    people.let_sign("ada", "bob")
    people.sign_text(text(0.5), "ada")
    stop(folder / "run", people.open())
    (folder / "pin").write_text(people.pin)
    return folder


def stop(folder: Path, policy: PolicyFile, step: int = STEP) -> None:
    run = trainer(folder, policy, change=("policy",))
    with run:
        while run.clock.step < step:
            run._take(*run._next(run.feed))  # type: ignore[arg-type, misc]
        run.save()


@pytest.fixture
def people(once_stopped: Path, tmp_path: Path) -> PolicyPeople:
    folder = Path(shutil.copytree(once_stopped, tmp_path / "all"))
    return PolicyPeople(folder, pin=(folder / "pin").read_text())


def resume(people: PolicyPeople, policy: PolicyFile | None) -> str:
    """Go on under a policy; return what the ledger says of policies."""
    trainer(people.root / "run", policy, change=("policy",)).fit()  # type: ignore[arg-type]
    code, said = verify(people.root / "run")
    assert code == 0, said
    return "\n".join(line for line in said.splitlines() if "policy" in line)


def statement(people: PolicyPeople, **other: str | int) -> dict[str, str | int]:
    run = read_verifier_key(people.root / "run" / "ledger").text
    return {"run": run, "previous": load_policy(text(0.5)).digest.hex(), "from_step": STEP} | other


def change(people: PolicyPeople, weight: float, *names: str, **other: str | int) -> PolicyFile:
    said = statement(people, **other)
    ring = people.ring(*(names or ("ada",)))
    sign_policy(people.repository, ring, "main", load_policy(text(weight)).canonical, custom=said)
    return people.open()


def test_the_operator_alone_tightens(people: PolicyPeople) -> None:
    said = resume(people, load_policy(text(0.25)))
    assert "policy.changed_by: the operator, who only tightens" in said
    assert "policy/main/1, signed by" in said
    assert "from step 3 on" in said
    assert "declared: nobody has signed it" in said


def test_the_operator_alone_loosens_nothing(people: PolicyPeople) -> None:
    for weight in (0.6, 1.0):
        with pytest.raises(
            CheckpointError, match=r"would allow more .* cold, body.* Only that authority may"
        ) as caught:
            resume(people, load_policy(text(weight)))
        assert f"0.5 (gate) -> {weight:g}" in str(caught.value)
    # Less for one class, and more for another.
    mixed = text(0.25).replace('"**"', "hot") + "  - {class: cold, region: head, weight: 1.5}\nallow: {amplify: true}\n"
    with pytest.raises(CheckpointError, match=r"cold, head"):
        resume(people, load_policy(mixed))


def test_what_the_run_does_where_data_lack_stays_as_it_was_signed(people: PolicyPeople) -> None:
    with pytest.raises(CheckpointError, match=r"starvation: the usual -> stop\. Only that authority may"):
        resume(people, load_policy(text(0.25) + "starvation: stop\n"))


def test_the_operator_may_give_less_grace_and_the_authority_alone_more(tmp_path: Path) -> None:
    people = PolicyPeople(tmp_path).begin()
    people.let_sign("ada")
    people.sign_text(text(0.5) + "grace: {expiry: {finish: 4ba}, licence: reject}\n", "ada")
    stop(people.root / "run", people.open())
    for more in ("{expiry: {finish: 0.9dur}, licence: reject}", "{expiry: stop, revocation: reject}"):
        with pytest.raises(CheckpointError, match=r"grace for .*Only that authority may"):
            resume(people, load_policy(text(0.5) + f"grace: {more}\n"))
    said = resume(people, load_policy(text(0.5) + "grace: {expiry: {finish: 0.5dur}}\n"))
    assert "policy.changed_by: the operator, who only tightens" in said


def test_no_policy_is_more_than_any(people: PolicyPeople) -> None:
    with pytest.raises(CheckpointError, match="taxonomy absent"):
        resume(people, None)


def test_back_to_what_was_signed_is_loosening_too(people: PolicyPeople) -> None:
    stop(people.root / "run", load_policy(text(0.25)), STEP + 1)
    with pytest.raises(CheckpointError, match="would allow more"):
        resume(people, people.open(number=1))


def test_the_authority_loosens(people: PolicyPeople) -> None:
    said = resume(people, change(people, 1.0))
    assert f"policy.changed_by: the authority {people.pin[:12]}, policy/main/2" in said
    assert "from step 3 on, policy/main/2, signed by" in said
    report = verify_ledger(people.root / "run" / "ledger")
    assert [policy.step for policy in report.policies] == [0, 3]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"previous": "0" * 64}, "signed for the previous 0000"),
        ({"from_step": STEP + 1}, r"may act from step 4 on, and the run is at step 3"),
        ({"from_step": "3"}, "may act from step 3 on"),
    ],
)
def test_a_statement_that_means_something_else_is_refused(
    people: PolicyPeople, other: dict[str, str | int], why: str
) -> None:
    with pytest.raises(CheckpointError, match=why):
        resume(people, change(people, 1.0, **other))


def test_a_change_of_another_run_is_refused(people: PolicyPeople, tmp_path: Path) -> None:
    policy = change(people, 1.0, run="cosmati/other+00000000+AAAA")
    with pytest.raises(CheckpointError, match="was signed as a change of the run cosmati/other"):
        resume(people, policy)
    with pytest.raises(CheckpointError, match="and this is a new one"):
        trainer(tmp_path / "new", policy).fit()


def test_a_version_without_a_statement_loosens_nothing(people: PolicyPeople) -> None:
    people.sign_text(text(1.0), "ada")
    with pytest.raises(CheckpointError, match=r"signed for the run \(none\)"):
        resume(people, people.open())
    people.sign_text(text(0.25), "ada")
    assert "policy/main/3, signed by" in resume(people, people.open()), "and it may tighten"


def test_a_number_that_was_passed_over_is_refused(people: PolicyPeople) -> None:
    people.sign_text(text(0.1), "ada")
    with pytest.raises(CheckpointError, match="policy/main/3 isn't the version after number 1"):
        resume(people, change(people, 1.0))


def test_the_number_goes_on_from_a_version_that_tightens(people: PolicyPeople) -> None:
    people.sign_text(text(0.25), "ada")
    stop(people.root / "run", people.open(), STEP + 1)
    less = load_policy(text(0.25)).digest.hex()
    assert "policy/main/3, signed by" in resume(people, change(people, 1.0, previous=less, from_step=STEP + 1))


def test_what_is_over_isnt_loosened(people: PolicyPeople) -> None:
    """The operator may say of steps that were taken what he likes: the ledger holds them against what was in force."""
    phases = "phases: [{name: gone, until: 3ba}, {name: left}]\nrules:"
    past = text(0.5).replace("rules:", phases) + "  - {class: cold, region: body, phase: gone, weight: 1}\n"
    assert "the operator, who only tightens" in resume(people, load_policy(past))


CLAIMS: dict[str, tuple[Callable[[PolicyInForce], PolicyInForce], str]] = {
    "nobody signed": (lambda policy: replace(policy, facts=None), "hasn't signed that"),
    "another root": (lambda policy: _with(policy, root="0" * 64), "hasn't signed that"),
    "the same number": (lambda policy: _with(policy, target="policy/main/1"), "isn't the version after policy/main/1"),
    "one signer": (lambda policy: replace(policy, readmits=True), "takes two signers"),
    "no statement": (lambda policy: replace(policy, facts={**policy.facts, "statement": {}}), "(none)"),  # type: ignore[dict-item]
    "earlier": (lambda policy: replace(policy, step=STEP - 1), "its signers meant step 3"),
    "another before": (
        lambda policy: replace(policy, before=replace(policy.before, digest=bytes(32))),  # type: ignore[type-var]
        "meant the previous",
    ),
}


def _with(policy: PolicyInForce, **claims: object) -> PolicyInForce:
    assert policy.facts is not None
    return replace(policy, facts={**policy.facts, "sources": [{**policy.facts["sources"][0], **claims}]})


def test_a_ledger_whose_change_nobody_allowed_is_told(people: PolicyPeople) -> None:
    resume(people, change(people, 1.0))
    _, policy = verify_ledger(people.root / "run" / "ledger").policies
    run = read_verifier_key(people.root / "run" / "ledger").text
    assert policy.loosens == ("cold in body, from step 3 on: 0.5 -> 1",)
    assert policy.problems(run) == []
    assert "meant the run" in policy.problems("another")[0]
    for name, (claim, said) in CLAIMS.items():
        problems = claim(policy).problems(run)
        assert any(said in problem for problem in problems), name
    assert replace(policy, loosens=(), facts=None).problems(run) == [], "the operator alone may tighten"


def test_an_operator_who_takes_the_check_out_is_found(people: PolicyPeople, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cosmati.train.continuity.change_policy", lambda was, *_: (was, []))
    trainer(people.root / "run", load_policy(text(1.0)), change=("policy",)).fit()
    code, said = verify(people.root / "run")
    assert code == 1
    assert "from step 3 on more is allowed than was signed (cold in body, from step 3 on: 0.5 -> 1)" in said


def test_back_to_an_earlier_checkpoint_and_its_policy_is_no_loosening(people: PolicyPeople) -> None:
    shutil.copytree(people.root / "run" / "checkpoints", people.root / "kept")
    stop(people.root / "run", load_policy(text(0.25)), STEP + 1)
    shutil.rmtree(people.root / "run" / "checkpoints")
    shutil.copytree(people.root / "kept", people.root / "run" / "checkpoints")
    assert resume(people, people.open()).count("policy/main/1, signed by") == 2


def test_another_authority_loosens_nothing(people: PolicyPeople, tmp_path: Path) -> None:
    other = PolicyPeople(tmp_path / "other").begin()
    other.let_sign("eve")
    said = statement(people)
    sign_policy(other.repository, other.ring("eve"), "main", load_policy(text(0.5)).canonical)
    sign_policy(other.repository, other.ring("eve"), "main", load_policy(text(1.0)).canonical, custom=said)
    with pytest.raises(CheckpointError, match="the authority that signed the policy before hasn't"):
        resume(people, other.open())


def test_two_people_admit_again_what_was_denied(tmp_path: Path) -> None:
    people = PolicyPeople(tmp_path).begin()
    people.let_sign("ada", "bob")
    people.sign_text(text(0), "ada")
    stop(people.root / "run", people.open())
    denied = load_policy(text(0)).digest.hex()
    with pytest.raises(CheckpointError, match="takes two signers, and one has signed"):
        resume(people, change(people, 0.1, "ada", previous=denied))
    said = statement(people, previous=denied)
    with people.repository.change(people.ring("ada", "bob")) as both:  # the same version, signed by both
        both.targets("policy.main")
    vouched = people.open().vouched
    assert vouched is not None
    assert (vouched.statement, len(vouched.voucher.keyids)) == (said, 2)
    assert "from step 3 on, policy/main/2, signed by" in resume(people, people.open())


def test_the_command_signs_a_change(people: PolicyPeople) -> None:
    (people.root / "wider.yaml").write_text(text(1.0))

    def sign(*words: object) -> tuple[int, str]:
        keys = ("--keys", people.root / "own", "--keys", people.root / "ada", "--authority", people.folder)
        given = ["policy", "sign", people.root / "wider.yaml", *keys, *words]
        result = CliRunner().invoke(app, [str(word) for word in given])
        return result.exit_code, result.output

    run = people.root / "run"
    for words, why in (
        (("--run", run), "give --run and --from-step"),
        (("--run", run, "--from-step", 2), "has taken 3 steps"),
        (("--run", "other", "--from-step", 2), "is no verifier key"),
    ):
        code, said = sign(*words)
        assert (code, why in said) == (1, True), said
    assert sign("--run", run, "--from-step", STEP)[0] == 0
    vouched = people.open().vouched
    assert vouched is not None
    assert vouched.statement == statement(people)
    resume(people, people.open())


def going(people: PolicyPeople, what: Event) -> Trainer:
    """Go on with the run under what was signed, with another policy left in its folder after step 4."""
    signed = people.open(number=1)
    seen = Happening({4: what})
    seen.trainer = trainer(people.root / "run", signed, observers=seen, budget="12ba", change=("budget",))
    return seen.trainer


def begun(people: PolicyPeople) -> dict[float, int]:
    """Return the first step of each policy in the ledger, by its weight; whoever resumes opens it anew."""
    names = {load_policy(text(weight)).digest: weight for weight in (0.25, 0.5, 0.6, 1.0)}
    found = verify_ledger(people.root / "run" / "ledger").policies
    return {names[one.digest]: one.step for one in reversed(found)}


def told(people: PolicyPeople) -> Mapping[str, object]:
    return {"url": str(people.folder), "root": people.pin, "name": "main", "number": None}


def test_the_authority_loosens_a_run_that_isnt_stopped(people: PolicyPeople) -> None:
    change(people, 1.0, from_step=7)
    run = going(people, leave(told(people)))
    run.fit()
    code, said = verify(people.root / "run")
    assert code == 0, said
    assert f"from step 4 on, policy.to_come: from step 7 on, by the authority {people.pin[:12]}, policy/main/2" in said
    assert "policy    from step 7 on, policy/main/2, signed by" in said
    assert begun(people) == {0.5: 0, 1.0: 7}
    again = trainer(people.root / "run", people.open(number=1), budget="14ba", change=("budget",))
    again.fit()
    policy = again.assembly.router._policy
    assert policy is not None
    assert policy.policy_digest == load_policy(text(1.0)).digest, "who resumes with the first one goes on under it"
    code, said = verify(people.root / "run")
    assert code == 0, said


def test_the_operator_tightens_a_run_that_isnt_stopped_and_loosens_nothing(people: PolicyPeople) -> None:
    going(people, leave(load_policy(text(0.25)))).fit()
    code, said = verify(people.root / "run")
    assert code == 0, said
    assert "by the operator, who only tightens" in said
    assert "declared: nobody has signed it" in said
    assert (people.root / "run" / "run.json").exists()


@pytest.mark.parametrize("weight", [0.6, 1.0])
def test_what_the_operator_would_loosen_is_left_aside(people: PolicyPeople, weight: float) -> None:
    with pytest.warns(UserWarning, match=r"goes on with the policy that it has\. .*Only that authority may"):
        going(people, leave(load_policy(text(weight)))).fit()
    assert begun(people) == {0.5: 0}


def test_a_signed_one_that_isnt_for_this_run_is_left_aside(people: PolicyPeople) -> None:
    change(people, 1.0, previous="0" * 64)
    with pytest.warns(UserWarning, match="signed for the previous 0000"):
        going(people, leave(told(people))).fit()
    wrong = {**told(people), "root": "0" * 64}
    with pytest.warns(UserWarning, match="another authority's"):
        going_again(people, leave(wrong))


def going_again(people: PolicyPeople, what: Event) -> None:
    seen = Happening({13: what})
    seen.trainer = trainer(
        people.root / "run", people.open(number=1), observers=seen, budget="20ba", change=("budget",)
    )
    seen.trainer.fit()


def test_archives_that_bear_a_change_out_are_kept_with_its_entry(people: PolicyPeople) -> None:
    """Before it acts: a crash in between leaves all that's needed to go on."""
    change(people, 1.0, from_step=7)
    seen = Happening({4: leave(told(people)), 6: lambda _run: 1 // 0})
    seen.trainer = trainer(
        people.root / "run", people.open(number=1), observers=seen, budget="12ba", change=("budget",)
    )
    with pytest.raises(ZeroDivisionError):
        seen.trainer.fit()
    people.folder.rename(people.root / "gone")
    again = trainer(people.root / "run", signed_once(people), budget="12ba", change=("budget",))
    again.fit()
    assert begun(people) == {0.5: 0, 1.0: 7}
    assert verify(people.root / "run")[0] == 0


def signed_once(people: PolicyPeople) -> PolicyFile:
    (people.root / "gone").rename(people.folder)
    policy = people.open(number=1)
    people.folder.rename(people.root / "gone")
    return policy
