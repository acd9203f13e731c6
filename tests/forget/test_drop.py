"""Drop against the run that never had the class's modules nor its content, which the tests make by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cosmati.forget.asked import ToForget
from cosmati.forget.certificate import verify_certificate
from tests.forget.samples import ISOLATED, bare, forgotten, maker, tensors, trained, without
from tests.train.isolated.samples import CASES, source

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
