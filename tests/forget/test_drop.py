"""Drop against the run that never had the class's modules nor its content, which the tests make by themselves."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from cosmati.audit.weights import check_weights
from cosmati.cli.main import app
from cosmati.errors import ForgetError, RefutedError
from cosmati.forget.asked import ToForget
from cosmati.forget.certificate import verify_certificate
from cosmati.forget.past_run import PastRun
from cosmati.forget.planning import plan_deletion
from cosmati.forget.request import Request
from tests.forget.samples import ISOLATED, bare, forgotten, maker, tensors, trained, without
from tests.train.isolated.samples import CASES, source

pytestmark = pytest.mark.long

PERSONAL = ToForget(classes=("personal",))


@pytest.mark.parametrize("name", ["CNN, expert with BatchNorm", "GPT, low rank"])
def test_what_is_left_is_the_run_that_never_had_it(name: str, tmp_path: Path) -> None:
    """Weights, BatchNorm's statistics and averages, under Muon and AdamW."""
    case, data = CASES[name], source(CASES[name])
    run = trained(maker(case, data, chosen=ISOLATED), tmp_path / "run")
    done = forgotten(run, PERSONAL, None, tmp_path / "out", "drop")
    truth = tensors(trained(maker(bare(name), data), tmp_path / "truth", without(classes=["personal"])))
    found = tensors(done.out)
    assert {n.partition("/average/")[2] or n for n in found} == {
        n.partition("/average/")[2] or n for n in truth if not n.startswith("optimizer/")
    }
    averages = {n.partition("/average/")[2]: v for n, v in truth.items() if "/average/" in n}
    for n, value in found.items():
        of = n.partition("/average/")[2]
        assert torch.equal(value, averages[of] if of else truth[n]), n
    assert len(averages) > 2
    assert not [n for n in found if "isolated" in n]
    assert [n for n in tensors(run) if "isolated" in n], "the control"
    verified = verify_certificate(done.certificate or Path(), done.out / "ledger")
    assert "no step gave personal weight in trunk" in verified.checked
    # Those that have it still have the ledger's signature, and aren't the model's any more.
    before, after = (one / "checkpoints" / "step-00000006" / "model.safetensors" for one in (run, done.out))
    ledger = PastRun(done.out).ledger
    assert check_weights(ledger, after).step == 6
    for old in (before, run / "checkpoints" / "step-00000004" / "model.safetensors"):
        assert check_weights(PastRun(run).ledger, old)
        with pytest.raises(RefutedError, match="dropped"):
            check_weights(ledger, old)


def test_a_promise_that_a_killed_run_had_taken_back_stays_so(tmp_path: Path) -> None:
    """`run.json` still says what the run began with; its last checkpoint doesn't."""
    case = CASES["MLP, low rank"]
    run = trained(maker(case, source(case), chosen=ISOLATED), tmp_path / "run")
    option = plan_deletion(Request.open(PastRun(run), PERSONAL, None)).option("drop")
    assert option is not None
    assert option.is_possible
    state = run / "checkpoints" / "step-00000006" / "state.json"
    told = json.loads(state.read_text())
    told["withdrawn"].append(["isolated(personal, own)", "step 3 was left out"])
    state.write_text(json.dumps(told))
    record = PastRun(run).record
    (run / "run.json").write_text(dataclasses.replace(record, outcome="running").to_json())
    with pytest.raises(ForgetError, match=r"isolated\(personal, own\) was taken back: step 3 was left out"):
        forgotten(run, PERSONAL, None, tmp_path / "out", "drop")


def test_another_run_begins_from_what_is_left(tmp_path: Path) -> None:
    case = CASES["MLP, low rank"]
    data = source(case)
    done = forgotten(
        trained(maker(case, data, chosen=ISOLATED), tmp_path / "run"), PERSONAL, None, tmp_path / "out", "drop"
    )
    child = maker(bare("MLP, low rank"), data, config={"load_weights": done.out})
    trained(child, tmp_path / "child")
    exported = CliRunner().invoke(
        app, ["export", str(done.out), "--to", "safetensors", "--out", str(tmp_path / "model")]
    )
    assert exported.exit_code == 0, exported.output
    assert not [name for name in load_file(tmp_path / "model" / "model.safetensors") if "isolated" in name]
    with pytest.raises(ForgetError, match="they're gone already"):
        forgotten(done.out, PERSONAL, None, tmp_path / "twice", "drop")
    assert not (done.out / "succeeded.json").exists()
