"""What a run is, as those see it who record it: frozen, and without the trainer."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cosmati.core.plan import Plan
from cosmati.provenance.artifact import Artifact
from cosmati.provenance.voucher import VouchedData, VouchedPolicy, Withdrawn
from cosmati.routing.policy import CompiledPolicy
from cosmati.routing.policy_file import PolicyFile
from cosmati.train.assembly import Assembly


@dataclass(frozen=True)
class PolicyChanges:
    """The changes of a policy without a stop, as the ledger says them, and files that bear out who signed them.

    Attributes:
        told: the oldest first; each has the `step` from which on it acts, the policy's `text`, `by` whom, how it was
            `signed`, and the `anchor` of what may follow it.
        files: by their SHA-256 in hex; those that may not be kept yet.
    """

    told: tuple[Mapping[str, Any], ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a run is before its first step.

    Attributes:
        recipe: name of the recipe.
        plan: methods, settings, promises.
        seed: the run's seed.
        num_microbatches: V.
        num_steps: steps of the whole run, None where that isn't known ahead.
        regions: names of the model's regions.
        policy: compiled; None trains every region on every row.
        data_digest: hex digest of the data, empty where they have none.
        model_root: Merkle root of the model's parameters and buffers, 32 bytes.
        environment: everything outside the recipe that may change bits.
        hardware: the device in words.
        identity: what makes the run this one and no other, by name.
        parameters: names of each region's parameters.
        policy_text: the policy as its digest covers it; None without one.
        vouched: who vouched for the data; None where nobody was asked.
        task: what is learnt from what, in words; empty where nobody has said it.
        withdrawn: what they have taken back since; None for nothing.
        data_text: what the data's digest is of, where somebody vouches for them.
        vouched_policy: who vouched for the policy; None where it's declared.
        artifacts: what was prepared before the run: by whom, and whether anybody vouches for it.
        policy_changes: that were made without a stop, or are to come.
        sensitive: classes of which nothing that is measured is told in the open.
        tensor_parallel: T, how many ranks compute a microbatch together.
    """

    recipe: str
    plan: Plan
    seed: int
    num_microbatches: int
    num_steps: int | None
    regions: tuple[str, ...]
    policy: CompiledPolicy | None
    data_digest: str
    model_root: bytes
    environment: Mapping[str, str]
    hardware: str
    identity: Mapping[str, Any] = field(default_factory=dict)
    parameters: tuple[tuple[str, ...], ...] = ()
    policy_text: Mapping[str, Any] | None = None
    vouched: VouchedData | None = None
    task: str = ""
    withdrawn: Withdrawn | None = None
    data_text: str = ""
    vouched_policy: VouchedPolicy | None = None
    artifacts: tuple[Artifact, ...] = ()
    policy_changes: PolicyChanges = PolicyChanges()
    sensitive: tuple[str, ...] = ()
    tensor_parallel: int = 1


def facts_of(
    assembly: Assembly,
    data_digest: str,
    identity: Mapping[str, Any] | None = None,
    policy: PolicyFile | None = None,
    vouched: VouchedData | None = None,
    data_text: str = "",
    artifacts: tuple[Artifact, ...] = (),
) -> RunFacts:
    """Gather the facts of a run that is about to start; the model's root is taken where a folder keeps it."""
    a = assembly
    return RunFacts(
        recipe=a.config.name,
        plan=a.plan,
        seed=a.config.seed,
        num_microbatches=a.num_microbatches,
        num_steps=a.budget.num_steps,
        regions=a.regions.names,
        policy=a.policy,
        data_digest=data_digest,
        model_root=a.layout.digest() if a.config.run_folder is not None else b"",
        environment=describe_environment(a.device),
        hardware=describe_hardware(a.device),
        identity=identity or {},
        parameters=a.regions.parameters,
        policy_text=policy.to_mapping() if policy else None,
        vouched=vouched,
        task=a.config.task,
        data_text=data_text,
        vouched_policy=policy.vouched if policy else None,
        artifacts=artifacts,
        tensor_parallel=a.config.tensor_parallel,
    )


def describe_environment(device: torch.device) -> dict[str, str]:
    """Return everything outside the recipe that may change bits."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": describe_hardware(device),
        "threads": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": _describe_kernels(),
        "cuda": torch.version.cuda or "",
        "platform": platform.platform(),
    }


_CHOOSE_KERNELS = ("DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_DYNAMIC", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
"""Environment variables by which libraries of kernels choose others. PyTorch's own has a fact to itself."""


def _describe_kernels() -> str:
    """Return the switches of PyTorch's and of its libraries that choose other kernels for the same operation."""
    mkldnn = "on" if torch.backends.mkldnn.enabled else "off"
    tf32 = "on" if torch.backends.cudnn.allow_tf32 else "off"
    chosen = [f"{name}={os.environ[name]}" for name in _CHOOSE_KERNELS if name in os.environ]
    products = f"float32 products {torch.get_float32_matmul_precision()}"
    return ", ".join([f"oneDNN {mkldnn}", products, f"TF32 in cuDNN {tf32}", *chosen])


def describe_hardware(device: torch.device) -> str:
    """Return the device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"
