"""The bits of training: the digests of small runs are those that stand in the repository."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.golden.digests import SOURCE, known, measure, this_platform
from tools.compare_bits import Runs, differences

pytestmark = pytest.mark.long

SMALL = "dense, SGD, V = 1"


@pytest.fixture(scope="module")
def found() -> Runs:
    return measure()


def test_training_gives_the_bits_that_stand_in_the_repository(found: Runs) -> None:
    expected = known(this_platform())
    assert not differences(expected, found), "if the change means it: a changelog.d/NNN.bits.md, and `make golden`"
    assert found.keys() == expected.keys(), "a run is new: `make golden`"


def test_two_ranks_give_the_bits_of_one(found: Runs) -> None:
    together = {name.removeprefix("on two ranks: "): run for name, run in found.items() if name.startswith("on two")}
    assert len(together) == 3
    assert not differences({name: found[name] for name in together}, together)


def test_changed_bits_are_named(tmp_path: Path) -> None:
    """The control: sources of which one product is off by a part in a million."""
    shutil.copytree(SOURCE, tmp_path / "src")
    with (tmp_path / "src/cosmati/models/mlp.py").open("a") as model:
        model.write("\n_exact = MLP.forward\nMLP.forward = lambda self, inputs: _exact(self, inputs) * (1 + 2**-20)\n")
    changed = measure(SMALL, source=tmp_path / "src")
    assert differences({SMALL: known(this_platform())[SMALL]}, changed) == [f"{SMALL}: other parameters, checkpoint"]


def test_a_build_for_cuda_is_held_to_the_digests_of_the_same_version() -> None:
    platform, _, build = this_platform().partition("+")
    assert known(f"{platform}+cu999") == known(this_platform())
    with pytest.raises(LookupError, match="no golden digests"):
        known(f"{platform}.1+{build}")


def test_an_unknown_platform_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(LookupError, match=r"no golden digests for 'plan9 vax torch 9'.*make golden"):
        known("plan9 vax torch 9")
