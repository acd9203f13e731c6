"""Runs small trainings and prints, as JSON, the digests of what each ends with: `worker.py [RUN ...]`.

It is handed to an interpreter of its own, so that `ATEN_CPU_CAPABILITY` and its kin are set before torch is loaded.
It uses the public API alone, but for what stands under "The inside", and imports nothing of the tests: the same file
runs against the sources of another commit too.

Add a run where a way through the step has none yet; `make golden` then writes its digests.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from torch import Tensor, nn

import cosmati
from cosmati import Classification, InMemory, LanguageModel, Loss, Observer, RunConfig, SubStep, Taxonomy, Trainer
from cosmati.ledger.row_keys import RowKeys
from cosmati.methods import EMA, SAM, GradientClipping, LabelSmoothing, LayerFreezing, MixUp, SelectiveBackprop
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.models.mlp import MLP
from cosmati.models.resnet import ResNet, ResNetConfig
from cosmati.optim import SGD, AdamW, Cosine, Muon
from cosmati.routing.policy_file import load_policy

# The inside: what has no public name is imported here and nowhere else, so that moving it means changing one place.


def digest_of(model: nn.Module) -> str:
    """Return the root over parameters and buffers."""
    from cosmati.core.state import model_tensors, parameter_root

    return parameter_root(model_tensors(model)).hex()


def fix_environment_facts() -> None:
    """Let entry 0 of every ledger speak of the same machine, whichever it is: its facts aren't bits of the training."""
    for name in ("facts", "ledger", "run_folder"):  # the last two: as they were before 0.2
        module = f"cosmati.train.{name}"
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(module).describe_environment = lambda device: {"device": "any"}


def take_exact_roots() -> None:
    """Let PyTorch's square root be IEEE 754's: MKL's begins with an estimate that each maker's CPUs have of their own.

    `MKL_CBWR` doesn't change that: AdamW had other bits on Intel's CPUs than on AMD's.
    """

    def root(values: Tensor) -> Tensor:
        dtype = values.dtype if values.is_floating_point() else torch.get_default_dtype()
        return torch.from_numpy(np.sqrt(np.asarray(values.double()))).to(dtype)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it's overridden
        for name, kernel in (
            ("sqrt", root),
            ("sqrt_", lambda values: values.copy_(root(values))),
            ("sqrt.out", lambda values, *, out: out.copy_(root(values))),
        ):
            ATEN.impl(name, kernel, "CPU")


ATEN = torch.library.Library("aten", "IMPL")
COMMON = {"budget": "4ba", "checkpoint_every": "3ba", "num_threads": 1, "device": "cpu"}
TWO_RANKS = "on two ranks: "
TAXONOMY = Taxonomy("t", "1", (("open", "free to learn from"), ("doubtful", "only near the output, and less")))
RULES = """
rules:
  - {class: open, weight: 1}
  - {class: doubtful, region: near_input, weight: 0}
  - {class: doubtful, region: near_output, weight: 0.3}
"""
PHASES = """
phases: [{name: early, until: 0.5dur}, {name: late}]
rules:
  - {class: open, weight: 1}
  - {class: open, region: near_input, phase: late, weight: 0.7}
  - {class: doubtful, region: near_input, phase: late, weight: 0}
  - {class: doubtful, region: near_output, phase: late, weight: 0.3}
  - {class: doubtful, phase: early, decision: defer}
"""


def policy(near_input: Sequence[str], rules: str = RULES) -> Any:
    """Return a policy over two regions, the first made of the globs."""
    names = json.dumps(list(near_input))
    regions = f"{{near_input: {{params: {names}}}, near_output: {{params: '*', exclude: {names}}}}}"
    return load_policy(f"version: 1\ntaxonomy: t\nregions: {regions}\n{rules}")


class Unrolled(nn.Module):
    """A layer that is used twice, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.again, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.again(torch.tanh(self.again(self.stem(rows)))))
        return self.head(F.dropout(hidden, 0.2, self.training))


class Autoencoder(nn.Module):
    """Two halves that learn by losses of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(4, 6)


class Scales(nn.Module):
    """Two products, whose gradients are the rows themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Parameter(torch.ones(1, 3)), nn.Parameter(torch.ones(1, 3))

    def forward(self, rows: Tensor) -> Tensor:
        return rows * self.near + rows * self.far


def total(model: Scales, data: Tensor) -> Loss:
    per_row = model(data).sum(1)
    return Loss(per_row.sum(), float(len(data)), per_row)


def reconstruction(model: Autoencoder, data: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model.decode(torch.tanh(model.encode(data[0]))), data[0])


def separation(model: Autoencoder, data: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model.encode(data[0]), data[1])


def source(kind: str, **options: Any) -> InMemory:
    """Return rows of two classes: 72, of which a step takes 32, or a few zeros."""
    if kind == "zeros":
        # A gradient of -0 has to stay one where the other microbatches have none.
        classes, rows = torch.arange(8) % 2, torch.tensor([[-0.0, 0.0, 1.0]]).repeat(8, 1)
        return InMemory(rows, 2, class_ids=classes, class_names=("open", "doubtful"), **options)
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(4, (72,), generator=generator)
    if kind == "tokens":
        data: Any = torch.randint(32, (72, 13), generator=generator)
    else:
        # Sums of uniform draws: normal ones come from other code where the CPU has wide registers.
        inputs = torch.rand(72, *((1, 8, 8) if kind == "images" else (6,)), generator=generator)
        data = (inputs * 2 - 1 + labels.view(-1, *[1] * (inputs.ndim - 1)) / 4, labels)
    classes = (torch.arange(72) % 3 == 0).long()
    return InMemory(data, 32, class_ids=classes, class_names=("open", "doubtful"), **options)


CLASSIFICATION = Classification(4)


@dataclass(frozen=True)
class Run:
    """One training: what a `Trainer` is given."""

    model: Any
    data: str
    optimizers: Sequence[Any]
    loss: Any = CLASSIFICATION
    methods: Sequence[Any] = ()
    policy: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)


small_mlp = partial(MLP, (6, 24, 16, 4))
small_resnet = partial(ResNet, ResNetConfig(num_classes=4, widths=(4, 8)))


def small_gpt(**options: Any) -> GPT:
    return GPT(GPTConfig(vocabulary_size=32, sequence_length=12, width=16, num_blocks=2, num_heads=2, **options))


SGD_MOMENTUM = SGD(lr=0.1, momentum=0.9, weight_decay=1e-3)
MUON = (Muon(lr=0.02, weight_decay=0.01, schedule=Cosine()), AdamW(lr=1e-2))
dense = partial(Run, small_mlp, "rows")
resnet = partial(Run, small_resnet, "images")
gpt = partial(Run, small_gpt, "tokens", loss=LanguageModel(32))
ONE, FOUR = {"num_microbatches": 1}, {"num_microbatches": 4}
WITHOUT_FOLDER = FOUR | {"run_folder": None, "checkpoint_every": None}
CLIPPING = GradientClipping(clipping_type="norm", clipping_threshold=0.1)

RUNS = {
    "dense, SGD, V = 1": dense([SGD_MOMENTUM], config=ONE),
    "dense, SGD, V = 4": dense([SGD_MOMENTUM], config=FOUR),
    "dense, AdamW, schedule, clipping, V = 1": dense(
        [AdamW(lr=1e-2, schedule=Cosine())], methods=[CLIPPING], config=ONE
    ),
    "dense, AdamW, schedule, clipping, V = 4": dense(
        [AdamW(lr=1e-2, schedule=Cosine())], methods=[CLIPPING], config=FOUR
    ),
    "dense, ledger without policy, V = 1": dense([SGD_MOMENTUM], config=ONE | {"ledger": True}),
    "dense, SAM, EMA, V = 1": dense([SGD_MOMENTUM], methods=[SAM(interval=2), EMA(half_life="2ba")], config=ONE),
    "dense, SAM of each step, V = 4": dense([SGD_MOMENTUM], methods=[SAM()], config=FOUR),
    "dense, LayerFreezing, V = 4": dense(MUON, methods=[LayerFreezing(freeze_start=0.1)], config=FOUR),
    "dense, SelectiveBackprop, V = 4": dense(
        [SGD_MOMENTUM], methods=[SelectiveBackprop(start=0.0, end=1.0)], config=FOUR
    ),
    "layer used twice, dropout, V = 4": Run(Unrolled, "rows", [AdamW(lr=1e-2)], config=FOUR),
    "two sub-steps, V = 4": Run(
        Autoencoder,
        "rows",
        [SGD(lr=0.1, momentum=0.9, parameters="encode.*"), AdamW(lr=1e-2, parameters="decode.*")],
        loss=[SubStep("apart", separation, "encode.*"), SubStep("whole", reconstruction, "decode.*")],
        config=FOUR,
    ),
    "resnet, SGD, MixUp, V = 1": resnet([SGD_MOMENTUM], methods=[MixUp()], config=ONE),
    "resnet, SGD, MixUp, LabelSmoothing, EMA, V = 4": resnet(
        [SGD_MOMENTUM], methods=[MixUp(), LabelSmoothing(), EMA(half_life="2ba")], config=FOUR
    ),
    "resnet, governed, padded, SAM, EMA, V = 4": resnet(
        MUON,
        methods=[SAM(interval=2), EMA(half_life="2ba"), CLIPPING],
        policy=policy(["stem.*", "blocks.0.*"]),
        config=FOUR | {"update_norm_every": 2},
        source={"tail": "pad"},
    ),
    "zeros of both signs, governed, V = 2": Run(
        Scales,
        "zeros",
        [SGD(lr=0.1, momentum=0.9)],
        loss=total,
        policy=policy(["near"]),
        config={"num_microbatches": 2},
    ),
    "gpt, AdamW, V = 1": gpt([AdamW(lr=1e-2)], config=ONE),
    "gpt, Muon and AdamW, V = 4": gpt(MUON, config=FOUR),
    "gpt, tied, dropout, V = 4": Run(
        partial(small_gpt, tied=True, dropout=0.1),
        "tokens",
        [AdamW(lr=1e-2)],
        loss=LanguageModel(32),
        config=WITHOUT_FOLDER,
    ),
    "gpt, bfloat16, V = 4": gpt([AdamW(lr=1e-2)], config=FOUR | {"precision": "bfloat16"}),
    "gpt, governed, phases, V = 4": gpt(
        MUON, policy=policy(["embedding.*", "blocks.0.*"], PHASES), config=FOUR | {"details_every": 2}
    ),
    "gpt, governed, V = 1": gpt([SGD_MOMENTUM], policy=policy(["embedding.*", "blocks.0.*"]), config=ONE),
}
ON_TWO_RANKS = (
    "zeros of both signs, governed, V = 2",
    "resnet, governed, padded, SAM, EMA, V = 4",
    "gpt, governed, phases, V = 4",
)


class Digests(Observer):
    """Keeps the digest of the last checkpoint's state."""

    state = b""

    def on_checkpoint(self, clock: Any, state_digest: bytes, parameter_root: bytes) -> None:
        self.state = state_digest


def train(run: Run, folder: Path) -> dict[str, Any]:
    """Train and return the digests; the folder's name is the log's, so it is the same for every run."""
    digests = Digests()
    torch.manual_seed(0)
    trainer = Trainer(
        run.model(),
        run.loss,
        source(run.data, **run.source),
        optimizers=run.optimizers,
        methods=run.methods,
        policy=run.policy,
        taxonomy=TAXONOMY if run.policy else None,
        observers=[digests],
        config=RunConfig(**COMMON | {"run_folder": folder} | run.config),
    )
    trainer.fit()
    found: dict[str, Any] = {"parameters": digest_of(trainer.model)}
    if digests.state:  # Only the rank that writes knows; the others leave before its ledger is closed.
        found["checkpoint"] = digests.state.hex()
        if (folder / "ledger").exists():
            found["ledger"] = ledger_leaves(folder / "ledger")
    return found


def fix_secrets(folder: Path) -> Path:
    """Give a run to come a key and a salt that are no secret: with drawn ones no ledger is the same twice."""
    private = folder / "private"
    private.mkdir(mode=0o700, parents=True)
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for name, content in (
        ("operator.key", pem),
        ("rows.salt", bytes(32)),
        ("rows.keys", RowKeys(bytes(32)).to_bytes()),
    ):
        (private / name).write_bytes(content)
        (private / name).chmod(0o600)
    return folder


def ledger_leaves(directory: Path) -> dict[str, str]:
    """Return SHA-256 of each entry, with its kind: read as tlog-tiles has it, from the widest partial bundle."""
    bundle = max((directory / "tile/entries/000.p").iterdir(), key=lambda path: int(path.name)).read_bytes()
    leaves, kinds = {}, ("run", "step", "resume", "checkpoint", "end", "amend", "evaluation", "time")
    while bundle:
        size = int.from_bytes(bundle[:2], "big")
        entry, bundle = bundle[2 : 2 + size], bundle[2 + size :]
        if kinds[entry[1]] in ("evaluation", "time"):
            continue  # What the machine measured and its clock said: no bits of the training.
        leaves[f"{len(leaves)} {kinds[entry[1]]}"] = hashlib.sha256(entry).hexdigest()
    return leaves


def as_rank(rank: int, base: Path) -> None:
    """Train as one of two ranks; the first writes what it found."""
    dist.init_process_group("gloo", init_method=f"file://{base}/store", rank=rank, world_size=2)
    found = {TWO_RANKS + name: train(RUNS[name], base / str(i) / "run") for i, name in enumerate(ON_TWO_RANKS)}
    dist.destroy_process_group()
    if rank == 0:
        (base / "found.json").write_text(json.dumps(found))


def start_ranks(base: Path) -> list[Any]:
    """Fork two ranks, before anything is trained here: they needn't load PyTorch anew."""
    for index in range(len(ON_TWO_RANKS)):
        fix_secrets(base / str(index) / "run")
    forked = multiprocessing.get_context("fork")
    ranks = [forked.Process(target=as_rank, args=(rank, base)) for rank in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which are NumPy's here and rest
        for rank in ranks:
            rank.start()
    return ranks


def train_all(names: Sequence[str], base: Path) -> dict[str, Any]:
    """Train the named runs, or all of them, on two ranks too."""
    ranks = [] if names else start_ranks(base / "ranks")
    try:
        found = {name: train(RUNS[name], fix_secrets(base / str(i) / "run")) for i, name in enumerate(names or RUNS)}
        for rank in ranks:
            rank.join(timeout=280)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    if any(rank.exitcode for rank in ranks):
        sys.exit(f"The ranks ended with {[rank.exitcode for rank in ranks]}.")
    return found | (json.loads((base / "ranks" / "found.json").read_text()) if ranks else {})


def main(arguments: Sequence[str]) -> None:
    """Print the digests of the named runs, or of all of them."""
    torch.set_num_threads(1)
    fix_environment_facts()
    take_exact_roots()
    with tempfile.TemporaryDirectory() as folder:
        runs = train_all(arguments, Path(folder))
    sys.stdout.write(json.dumps({"cosmati": str(Path(cosmati.__file__).parent), "runs": runs}))


if __name__ == "__main__":
    main(sys.argv[1:])
