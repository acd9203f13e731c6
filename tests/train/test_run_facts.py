"""The facts of a run, as those see it who record it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
import torch
from torch import nn

from cosmati.core.loss import Regression
from cosmati.core.state import model_tensors, parameter_root
from cosmati.data.in_memory import InMemory
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.facts import RunFacts, describe_environment, describe_hardware, facts_of
from cosmati.train.prepare import Ingredients, prepare

CPU = torch.device("cpu")


def _facts(model: nn.Module, **config: object) -> RunFacts:
    source = InMemory((torch.zeros(24, 3), torch.zeros(24, 1)), 4)
    settings = RunConfig(**{"name": "small", "budget": "2ep", "seed": 5, "num_microbatches": 2} | config)
    ready = prepare(Ingredients(model, Regression(), source, [SGD(lr=0.1)], (), None, None, settings))
    return facts_of(ready.assembly, "digest")


def test_facts_are_those_of_the_assembly(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    facts = _facts(model, run_folder=tmp_path)
    assert (facts.recipe, facts.seed, facts.num_microbatches, facts.data_digest) == ("small", 5, 2, "digest")
    assert facts.num_steps == 12
    assert (facts.regions, facts.policy) == (("all",), None)
    assert facts.model_root == parameter_root(model_tensors(model))
    assert facts.environment == describe_environment(CPU)
    assert facts.hardware == describe_hardware(CPU)
    assert facts.plan.holds("resume")


def test_the_models_root_is_taken_only_where_it_is_kept() -> None:
    assert _facts(nn.Linear(3, 1)).model_root == b""


def test_the_root_follows_the_model(tmp_path: Path) -> None:
    roots = set()
    for value in (0.0, 1.0):
        model = nn.Linear(3, 1)
        nn.init.constant_(model.bias, value)
        nn.init.zeros_(model.weight)
        roots.add(_facts(model, run_folder=tmp_path).model_root)
    assert len(roots) == 2
    assert all(len(root) == 32 for root in roots)


def test_the_environment_is_all_that_may_change_bits() -> None:
    was = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = describe_environment(CPU)
    finally:
        torch.set_num_threads(was)
    assert two["threads"] == "2"
    assert two["python"] == platform.python_version()
    assert two["torch"] == torch.__version__
    assert two["device"] == describe_hardware(CPU)
    assert two["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert (two["cuda"], two["platform"]) == (torch.version.cuda or "", platform.platform())


def test_a_processor_is_named_by_the_kernel_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    text = "processor\t: 0\nmodel name\t: Abacus: the first\nmodel name\t: Abacus II\n"
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert describe_hardware(CPU) == "Abacus: the first, 3 cores"


@pytest.mark.parametrize("content", ["", "processor: 0\n", None])
def test_a_processor_without_a_name_is_that_of_the_platform(
    monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    def read(path: Path) -> str:
        if content is None:
            raise OSError
        return content

    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "z80")
    assert describe_hardware(CPU) == "z80, 3 cores"
    monkeypatch.setattr(platform, "processor", lambda: "6502")
    assert describe_hardware(CPU) == "6502, 3 cores"


def test_the_switches_of_kernels_are_told_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR"):
        monkeypatch.delenv(name, raising=False)
    told = []
    for tf32, mkldnn in ((True, True), (False, True), (True, False)):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", mkldnn)
        told.append([one for text in describe_environment(torch.device("cpu")).values() for one in text.split(", ")])
    for (tf32, mkldnn), found in zip((("on", "on"), ("off", "on"), ("on", "off")), told, strict=True):
        assert {f"TF32 in cuDNN {tf32}", f"oneDNN {mkldnn}"} <= set(found)
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert any("MKL_CBWR=COMPATIBLE" in text for text in describe_environment(torch.device("cpu")).values())
