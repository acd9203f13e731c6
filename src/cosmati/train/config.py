"""The settings of a run: frozen, and all that isn't model, data, loss, optimizer or method."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch

from cosmati.core.clock import Time
from cosmati.core.later import later
from cosmati.core.named_settings import NamedSettings
from cosmati.core.parallel_styles import Styles, named_styles
from cosmati.errors import PlanError
from cosmati.ledger.profile import ATTESTED, PROFILES
from cosmati.ledger.witness_http import witness_and_url
from cosmati.provenance.artifact import Artifact, distinct

Precision = Literal["float32", "bfloat16"]
Sharding = Literal["replicated", "optimizer", "full"]

CHANGEABLE = ("policy", "budget", "schedule")
"""What a resumed run may change where it's asked for by name."""

LEARNING_CADENCES = ("direction_every", "update_direction_every", "digests_every", "entropy_every")
"""Settings that say how often the ledger has more of what was learnt than its norm; 0 is never."""

WITNESSING = ("witnesses", "witness_quorum", "ledger_profile")
"""Settings that say who cosigns the ledger, and nothing of how the run trains."""

_PRECISIONS = {
    "float32": ("fp32", "32", "32-true"),
    "bfloat16": ("bf16", "bf16-mixed", "amp_bf16", "16-mixed", "fp16", "amp_fp16", "float16"),
}
"""What other tools call them; float16 has its nearest here."""


class PathSetting:
    """A setting that is given as a string or a path, and read as a path; `~` is the user's own folder."""

    accepts = Path | None
    """What it's read as, for who reads settings from text."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, config: object, owner: type) -> Path | None:
        # A dataclass asks the class itself for the default.
        return None if config is None else config.__dict__[self._name]

    def __set__(self, config: object, value: str | Path | None) -> None:
        config.__dict__[self._name] = None if value is None else Path(value).expanduser()


@dataclass(frozen=True, kw_only=True)
class RunConfig(NamedSettings):
    """How a run goes.

    Args:
        name: of the recipe, for the record.
        budget: length of the run, as a time string (`10ep`, `500ba`, `1e9tok`, `90sec`).
        seed: keys every draw.
        num_microbatches: V, a power of two; None takes 1, or 8 for an elastic or governed run.
        elastic: be able to run on any number of ranks up to V.
        max_ranks: raise V to at least this.
        sharding: what ranks share out, which changes no bit: `replicated` is nothing; `optimizer` its state (ZeRO-1),
            each rank steps its own part of the parameters; `full` parameters, gradients and state (FSDP2). A run may
            go on under another one, on other ranks.
        shard_ranks: with `full`, how many ranks hold one copy together, a power of two; others hold further copies
            (HSDP). None takes all ranks, and so do runs with fewer. It changes no bit either.
        virtual_shards: U, a power of two: a model that offers it computes its large products in so many parts, which
            are summed in one tree. It changes bits, and belongs to what a run is. None doesn't cut them.
        tensor_parallel: T, how many ranks share the parts of one microbatch, which changes no bit: T divides U, and the
            number of ranks is a multiple of it. One process alone computes all parts.
        parallel_styles: for T of a model that can't compute in parts: patterns of its linear layers' names, and for
            each `colwise` or `rowwise`, or PyTorch's objects of these. T changes bits then.
        precision: `bfloat16` runs the forward pass under autocast; parameters and sums stay float32.
        gather_precision: `bfloat16` rounds the weights that a step's passes read, so that full sharding sends half the
            bytes for them; parameters, gradients and sums stay as they are, and evaluations read weights whole. It
            changes bits, under any sharding and on one rank alike.
        compile_blocks: compile each block of every `nn.ModuleList` or `nn.Sequential` by itself.
        num_threads: intra-op threads on CPU; they change gradient bits, so they belong to the recipe.
        deterministic: ask PyTorch for deterministic kernels while `fit` runs.
        device: where the model trains; None takes the model's own.
        run_folder: where record, checkpoints and ledger go, a string or a path; None keeps nothing.
        checkpoint_every: time string, `600sec` of the wall clock too; None keeps the first and the last state.
        checkpoint_async: write checkpoints beside the loop, which waits for no more than a copy of the state.
        checkpoint_to: where published checkpoints are copied, too, below the run folder's name: a folder, or a URL that
            fsspec knows (`s3://bucket/runs`). A run goes on from there, where its folder has no checkpoint as new.
        num_checkpoints: how many to keep.
        evaluate_every: time string; None evaluates at the end only.
        ledger: keep a ledger; None keeps one where there is a run folder, and a policy or signed data.
        details_every: steps between the ledger's gradient norms by class and region, which cost a pass over each
            microbatch's gradients.
        update_norm_every: steps between the ledger's update norms, which cost a copy of the parameters.
        direction_every: steps between sketches of the gradients' directions by class and region; 0 takes none.
        update_direction_every: likewise of the update's direction by region, under a policy.
        digests_every: steps before and after which each region's parameters are hashed for the ledger; 0 for never.
        entropy_every: steps between entropy profiles: by class, of what each region computes; 0 for never.
        check_every: commits between looks at whether loss and gradient are finite, on an accelerator; each look waits
            for it. With 1 nothing bad is ever committed, as on a CPU; a checkpoint is never written before a look.
        on_divergence: `stop`, or `skip` a step whose loss or gradient isn't finite: it's recorded, and the run goes on.
        change: what may differ from the checkpoint that the run resumes from: `policy`, `budget`, `schedule`, or
            several with commas between them.
        load_weights: start from the weights of another run: its folder, one of its checkpoints, or a safetensors file.
        require_signed: refuse data and a policy that nobody vouches for: those that are only declared.
        trusted_roots: digests of the authorities' first roots, of whom alone `require_signed` takes it; without any, of
            those whom the data's own `Authority` names.
        witnesses: who are asked to cosign the ledger's checkpoints, each as `"VKEY URL"`: at the start, every hour and
            at the end. The ledger names them.
        witness_quorum: how many of them an attested run needs; 0 takes all.
        ledger_profile: `self`, whose figures are operator-asserted; or `attested`: without a quorum of its witnesses
            the run doesn't begin, and stops with a checkpoint where it can't be had for an hour.
        artifacts: what was prepared before the run (`artifact(...)`): tokenizer, base weights, statistics, evaluation
            data, reference models. The ledger names them, signed or ungoverned; a resume with others is refused.
        resume_from: `newest` checkpoint, and an error where it's damaged; or the newest one that is `whole`.
        sensitive: classes, or branches of them, of which nothing that is measured stands in the open, beside those that
            the taxonomy calls so: in the ledger their columns are sealed with the run's private/columns.key.
        progress: show a progress bar, or plain lines where there is no terminal.
        task: what is learnt from what, in words: runs of one task are compared. Empty, the name stands for it.
    """

    other_names: ClassVar[dict[str, str]] = {
        "max_epochs": "budget='{}ep'",
        "num_train_epochs": "budget='{}ep'",
        "epochs": "budget='{}ep'",
        "max_steps": "budget='{}ba'",
        "max_duration": "budget",
        "accumulate_grad_batches": "num_microbatches",
        "gradient_accumulation_steps": "num_microbatches",
        "default_root_dir": "run_folder",
        "output_dir": "run_folder",
        "save_folder": "run_folder",
        "run_dir": "run_folder",
        "load_path": "load_weights",
        "bf16": "precision='bfloat16'",
        "tensor_parallel_size": "tensor_parallel",
        "tensor_model_parallel_size": "tensor_parallel",
        "tp_plan": "parallel_styles",
        "parallelize_plan": "parallel_styles",
        "eval_interval": "evaluate_every",
        "eval_every": "evaluate_every",
        "check_val_every_n_epoch": "evaluate_every='{}ep'",
        "val_check_interval": "evaluate_every",
        "eval_steps": "evaluate_every='{}ba'",
        "save_interval": "checkpoint_every",
        "save_steps": "checkpoint_every='{}ba'",
        "save_total_limit": "num_checkpoints",
        "save_num_checkpoints_to_keep": "num_checkpoints",
    }

    name: str = "run"
    budget: str = "1ep"
    seed: int = 0
    num_microbatches: int | None = None
    elastic: bool = False
    max_ranks: int = 1
    sharding: Sharding = "replicated"
    shard_ranks: int | None = None
    virtual_shards: int | None = later(default=None)
    tensor_parallel: int = 1
    parallel_styles: Mapping[str, object] | Styles = later(default=())  # noqa: RUF009  (it is a field)
    precision: Precision = "float32"
    gather_precision: Precision = later(default="float32")  # noqa: RUF009  (it is a field)
    compile_blocks: bool = False
    num_threads: int | None = None
    deterministic: bool = True
    device: str | None = None
    run_folder: PathSetting = PathSetting()
    checkpoint_every: str | None = None
    checkpoint_async: bool = False
    checkpoint_to: str = ""
    num_checkpoints: int = 2
    evaluate_every: str | None = None
    ledger: bool | None = None
    details_every: int = 4
    update_norm_every: int = 10
    direction_every: int = 200
    update_direction_every: int = 200
    digests_every: int = 0
    entropy_every: int = 0
    check_every: int = 1
    on_divergence: Literal["stop", "skip"] = "stop"
    change: tuple[str, ...] | str = ()
    load_weights: PathSetting = PathSetting()
    require_signed: bool = False
    trusted_roots: tuple[str, ...] | str = ()
    witnesses: tuple[str, ...] | str = ()
    witness_quorum: int = 0
    ledger_profile: Literal["self", "attested"] = "self"
    artifacts: tuple[Artifact, ...] = ()
    resume_from: Literal["newest", "whole"] = "newest"
    sensitive: tuple[str, ...] | str = ()
    progress: bool = False
    task: str = ""

    def __post_init__(self) -> None:
        for time in (self.budget, self.checkpoint_every, self.evaluate_every):
            if time is not None:
                Time.parse(time)
        if self.num_microbatches is not None and (
            self.num_microbatches < 1 or self.num_microbatches & (self.num_microbatches - 1)
        ):
            msg = (
                f"V = {self.num_microbatches} microbatches is not a power of two, and gradients are "
                "summed in a binary tree. Use 1, 2, 4, 8, ..."
            )
            raise PlanError(msg)
        self._check_precisions()
        if self.sharding not in get_args(Sharding):
            msg = f"RunConfig.sharding = {self.sharding!r} is not known. Use 'replicated', 'optimizer' or 'full'."
            raise PlanError(msg)
        self._check_shards()
        object.__setattr__(self, "parallel_styles", named_styles(self.parallel_styles))
        self._check_parts()
        if self.resume_from not in ("newest", "whole"):
            msg = f"RunConfig.resume_from = {self.resume_from!r} is not known. Use 'newest' or 'whole'."
            raise PlanError(msg)
        if self.on_divergence not in ("stop", "skip"):
            msg = f"RunConfig.on_divergence = {self.on_divergence!r} is not known. Use 'stop' or 'skip'."
            raise PlanError(msg)
        for name in ("change", "trusted_roots", "witnesses", "sensitive"):
            given = getattr(self, name)
            listed = (one.strip() for one in given.split(",")) if isinstance(given, str) else given
            object.__setattr__(self, name, tuple(listed))
        self._check_witnesses()
        self._check_learning()
        named = (self.artifacts,) if isinstance(self.artifacts, Artifact) else self.artifacts
        object.__setattr__(self, "artifacts", distinct(named))
        if unknown := sorted({*self.change} - {*CHANGEABLE}):
            msg = f"RunConfig.change names {', '.join(unknown)}. What may change is {', '.join(CHANGEABLE)}."
            raise PlanError(msg)
        for name in ("max_ranks", "details_every", "update_norm_every", "check_every", "num_checkpoints"):
            if getattr(self, name) < 1:
                msg = f"RunConfig.{name} = {getattr(self, name)}; it must be at least 1."
                raise PlanError(msg)

    def _check_precisions(self) -> None:
        for precision in (self.precision, self.gather_precision):
            if precision not in ("float32", "bfloat16"):
                found = [name for name, others in _PRECISIONS.items() if str(precision) in others]
                here = f"Here the nearest is {found[0]!r}" if found else "Use 'float32' or 'bfloat16'"
                msg = f"Precision {precision!r} is not known. {here}."
                raise PlanError(msg)

    def _check_shards(self) -> None:
        num = self.shard_ranks
        if num is not None and (num < 2 or num & (num - 1)):
            msg = (
                f"RunConfig.shard_ranks = {num}: so many ranks hold one copy together, and gradients are summed in a "
                "binary tree. Use 2, 4, 8, ...; where each rank is to hold a whole copy, sharding='replicated'."
            )
            raise PlanError(msg)
        if num is not None and self.sharding != "full":
            msg = (
                f"RunConfig.shard_ranks = {num} says on how many ranks parameters are cut, and with "
                f"sharding={self.sharding!r} they aren't. Use sharding='full', or leave it out."
            )
            raise PlanError(msg)

    def _check_parts(self) -> None:
        cut, degree = self.virtual_shards, self.tensor_parallel
        if cut is not None and (cut < 2 or cut & (cut - 1)):
            msg = f"RunConfig.virtual_shards = {cut}; parts are summed in a binary tree. Use 2, 4, 8, ... or None."
            raise PlanError(msg)
        if self.parallel_styles:
            self._check_styles()
        elif degree < 1 or (cut or 1) % degree:
            msg = (
                f"RunConfig.tensor_parallel = {degree} ranks can't share virtual_shards={cut}. Take as many virtual "
                "shards as there may ever be such ranks, or a multiple: virtual_shards=4, tensor_parallel=2. A model "
                "that can't compute in parts is cut by parallel_styles."
            )
            raise PlanError(msg)

    def _check_styles(self) -> None:
        degree = self.tensor_parallel
        if self.virtual_shards is not None:
            msg = (
                "RunConfig has virtual_shards, by which a model cuts itself, and parallel_styles, by which it is cut. "
                "Leave one out: with virtual_shards the bits don't follow from tensor_parallel."
            )
            raise PlanError(msg)
        if degree < 1 or degree & (degree - 1):
            msg = f"RunConfig.tensor_parallel = {degree}; ranks sum in a binary tree. Use 1, 2, 4, 8, ..."
            raise PlanError(msg)

    def _check_learning(self) -> None:
        for name in LEARNING_CADENCES:
            if getattr(self, name) < 0:
                msg = f"RunConfig.{name} = {getattr(self, name)}; it's a number of steps, or 0 for never."
                raise PlanError(msg)
        if self.entropy_every and self.compile_blocks:
            msg = (
                "entropy_every reads what modules compute through hooks, and with these a compiled block would be "
                "compiled to other bits. Leave out entropy_every, or compile_blocks."
            )
            raise PlanError(msg)

    def _check_witnesses(self) -> None:
        num = len(self.witnesses)
        if self.ledger_profile not in PROFILES:
            msg = f"RunConfig.ledger_profile = {self.ledger_profile!r} is not known. Use 'self' or 'attested'."
            raise PlanError(msg)
        if self.ledger_profile == ATTESTED and not num:
            msg = "ledger_profile='attested' takes witnesses to attest it. Give witnesses=['VKEY URL', ...]."
            raise PlanError(msg)
        if not 0 <= self.witness_quorum <= num:
            msg = f"RunConfig.witness_quorum = {self.witness_quorum}, and there are {num} witnesses. Give 0 for all."
            raise PlanError(msg)
        for text in self.witnesses:
            witness_and_url(text)

    def resolve_microbatches(self, *, governed: bool) -> int:
        """Return V."""
        chosen = self.num_microbatches or (8 if governed or self.elastic else 1)
        while chosen < self.max_ranks:
            chosen *= 2
        return chosen

    @property
    def rounds_weights(self) -> bool:
        """Whether a step's passes read weights rounded to bfloat16."""
        return self.gather_precision == "bfloat16"

    def anchored(self) -> RunConfig:
        """Return the settings with places from the root: the process may change its directory, and `.` has no name."""
        places = {"run_folder": self.run_folder, "load_weights": self.load_weights}
        moved: dict[str, Any] = {name: _from_root(path) for name, path in places.items() if path is not None}
        return self if moved.items() <= places.items() else dataclasses.replace(self, **moved)

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context in which forward passes run."""
        if self.precision == "float32" and not torch.is_autocast_enabled(device.type):
            return nullcontext()  # There's nothing to turn off, which would take 20 us.
        return torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bfloat16")


def _in_config() -> dict[str, str]:
    """Return what a trainer is to be told of settings that belong into its `RunConfig`."""
    own = {field.name: f"{field.name}={{!r}}" for field in dataclasses.fields(RunConfig)}
    others = {name: here if "=" in here else f"{here}={{!r}}" for name, here in RunConfig.other_names.items()}
    return {name: f"config=RunConfig({here})" for name, here in (own | others).items()}


TRAINER_NAMES: dict[str, str] = {
    **_in_config(),
    "algorithms": "methods=[...]",
    "args": "config=RunConfig(...)",
    "callbacks": "observers=[...]",
    "compute_metrics": "evaluation=Evaluation(data, metrics)",
    "criterion": "loss=...",
    "dataloader": "data=...",
    "eval_dataloader": "evaluation=Evaluation(data, metrics)",
    "eval_dataset": "evaluation=Evaluation(data, metrics)",
    "logger": "observers=[Tracking(...)]",
    "loggers": "observers=[Tracking(...)]",
    "loss_fn": "loss=...",
    "lr_scheduler": "optimizers=SGD(lr=..., schedule=...)",
    "metrics": "evaluation=Evaluation(data, metrics)",
    "optimizer": "optimizers=...",
    "schedulers": "optimizers=SGD(lr=..., schedule=...)",
    "train_dataloader": "data=...",
    "train_dataset": "data=DataLoader(train_dataset, batch_size=...)",
    "val_dataloaders": "evaluation=Evaluation(data, metrics)",
}
"""What other trainers call their arguments, and what they are here."""


def _from_root(path: Path) -> Path:
    """Return a path whose last part is a name; a link that's on the way keeps its own, but before a `..`."""
    return path.resolve() if ".." in path.parts else path.absolute()
