"""Deletions from runs under a signed policy, which its authority or the operator changed at a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati import InMemory, PolicyFile, RunConfig, Trainer, load_policy
from cosmati.core.loss import Classification
from cosmati.core.source import Source
from cosmati.errors import ProvenanceError
from cosmati.forget.ablation import Wrap
from cosmati.forget.asked import ToForget
from cosmati.forget.past_run import PastRun
from cosmati.forget.planning import plan_deletion
from cosmati.forget.replay import Make
from cosmati.forget.request import Request
from cosmati.ledger.reader import read_verifier_key
from cosmati.ledger.verify import verify_ledger
from cosmati.optim import SGD
from cosmati.provenance.authority.policies import sign_policy
from cosmati.provenance.voucher import FOLDER
from tests.forget.samples import KEPT, differing, forgotten, tensors, unwrapped, without
from tests.forget.stopped import StopAt
from tests.provenance.authority.test_policies import PolicyPeople
from tests.train.test_signed_policy import ROWS, TAXONOMY, text

pytestmark = pytest.mark.long

DATA = InMemory(ROWS, 16, torch.arange(32) % 2, TAXONOMY.classes)
ASKED = ToForget(rows=frozenset({3, 8}))


def trainer(data: Source, folder: Path | None, policy: PolicyFile, **config: Any) -> Trainer:
    torch.manual_seed(1)
    return Trainer(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        Classification(3),
        data,
        optimizers=SGD(lr=0.05, momentum=0.9),
        policy=policy,
        taxonomy=TAXONOMY,
        config=RunConfig(
            **{"budget": "6ba", "num_threads": 1, "num_microbatches": 2, "run_folder": folder} | KEPT | config
        ),
    )


def maker(policy: PolicyFile) -> Make:
    def make(wrap: Wrap, folder: Path | None, /, **config: Any) -> Trainer:
        then = config.pop("then", None)
        return trainer(wrap(DATA), folder, policy if then is None else then.policy_for(policy), **config)

    return make


def stopped_at_3(folder: Path, policy: PolicyFile, wrap: Wrap = unwrapped) -> Path:
    made = trainer(wrap(DATA), folder, policy)
    made.observers.append(StopAt(3))
    made.fit()
    return folder


@pytest.fixture
def people(tmp_path: Path) -> PolicyPeople:
    made = PolicyPeople(tmp_path).begin()
    made.let_sign("ada")
    made.sign_text(text(0.5), "ada")
    return made


def loosened(people: PolicyPeople, run: Path) -> PolicyFile:
    """Return a policy that allows more, signed for a run from step 3 on."""
    said: dict[str, str | int] = {
        "run": read_verifier_key(run / "ledger").text,
        "previous": load_policy(text(0.5)).digest.hex(),
        "from_step": 3,
    }
    sign_policy(people.repository, people.ring("ada"), "main", load_policy(text(1.0)).canonical, custom=said)
    return people.open()


@pytest.mark.parametrize("weight", [1.0, 0.25], ids=["the authority loosens", "the operator tightens"])
def test_a_signed_policy_changes_again_at_the_stop(people: PolicyPeople, weight: float, tmp_path: Path) -> None:
    """What was signed for the run was signed for its successor, whose ledger is the same log."""
    run = stopped_at_3(tmp_path / "run", people.open())
    after = loosened(people, run) if weight > 0.5 else load_policy(text(weight))
    trainer(DATA, run, after, change="policy").fit()
    done = forgotten(run, ASKED, maker(after), tmp_path / "out")
    # Who has signed a policy makes no bits: the truth's are declared.
    wrap = without(rows=ASKED.rows)
    truth = stopped_at_3(tmp_path / "truth", load_policy(text(0.5)), wrap)
    trainer(wrap(DATA), truth, load_policy(text(weight)), change="policy").fit()
    assert not differing(tensors(done.out), tensors(truth))
    found = verify_ledger(done.out / "ledger").policies
    assert [(one.step, one.facts is not None) for one in found][-2:] == [(0, True), (3, weight > 0.5)]


def test_what_the_resume_would_refuse_the_plan_does(people: PolicyPeople, tmp_path: Path) -> None:
    """A recipe that doesn't say who has signed its policy; an archive that doesn't bear out who signed the first."""
    run = stopped_at_3(tmp_path / "run", people.open())
    after = loosened(people, run)
    trainer(DATA, run, after, change="policy").fit()
    option = plan_deletion(Request.open(PastRun(run), ASKED, maker(load_policy(text(1.0))))).option("replay")
    assert option is not None
    (why,) = option.why_not
    assert why.startswith("Steps 3 to the end can't be taken again: From step 3 on, the policy would allow more")
    for path in (run / "ledger" / FOLDER).iterdir():
        path.unlink()
    with pytest.raises(ProvenanceError, match="who signed the policy doesn't hold"):
        Request.open(PastRun(run), ASKED, maker(after))
