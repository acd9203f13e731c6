"""Train PyTorch models faster by composing training methods, and govern what they learn while they do.

    from cosmati import Classification, InMemory, RunConfig, Trainer

The names below are the ones that most programs need; the rest is in the rooms (`cosmati.methods`, `cosmati.optim`,
`cosmati.routing`, `cosmati.ledger`, ...). They're imported when first used, so `import cosmati` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cosmati.core.batch import Batch
    from cosmati.core.lineage import Lineage
    from cosmati.core.loss import Classification, LanguageModel, Loss, MixedTarget, Regression, huggingface_loss
    from cosmati.core.method import Method, Position, Stage
    from cosmati.core.plan import Plan
    from cosmati.data.in_memory import InMemory
    from cosmati.data.loader import StreamingLoader
    from cosmati.data.source import StreamingSource
    from cosmati.data.streaming import StreamingDataset
    from cosmati.provenance.taxonomy import Taxonomy, software_licences
    from cosmati.routing.policy_file import PolicyFile, load_policy
    from cosmati.routing.signed_policy import signed_policy
    from cosmati.train.artifacts import artifact
    from cosmati.train.assembly import SubStep
    from cosmati.train.config import RunConfig
    from cosmati.train.evaluation import Evaluation, Stateful, accuracy, batches
    from cosmati.train.observers.observer import History, Observer
    from cosmati.train.outcome import StepOutcome, StepReport
    from cosmati.train.run.result import RunResult
    from cosmati.train.trainer import Trainer

_HOMES = {
    "core.batch": ("Batch",),
    "core.lineage": ("Lineage",),
    "core.loss": ("Classification", "LanguageModel", "Loss", "MixedTarget", "Regression", "huggingface_loss"),
    "core.method": ("Method", "Position", "Stage"),
    "core.plan": ("Plan",),
    "data.in_memory": ("InMemory",),
    "data.loader": ("StreamingLoader",),
    "data.source": ("StreamingSource",),
    "data.streaming": ("StreamingDataset",),
    "provenance.taxonomy": ("Taxonomy", "software_licences"),
    "routing.policy_file": ("PolicyFile", "load_policy"),
    "routing.signed_policy": ("signed_policy",),
    "train.artifacts": ("artifact",),
    "train.assembly": ("SubStep",),
    "train.config": ("RunConfig",),
    "train.evaluation": ("Evaluation", "Stateful", "accuracy", "batches"),
    "train.observers.observer": ("History", "Observer"),
    "train.outcome": ("StepOutcome", "StepReport"),
    "train.run.result": ("RunResult",),
    "train.trainer": ("Trainer",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "Classification",
    "Evaluation",
    "History",
    "InMemory",
    "LanguageModel",
    "Lineage",
    "Loss",
    "Method",
    "MixedTarget",
    "Observer",
    "Plan",
    "PolicyFile",
    "Position",
    "Regression",
    "RunConfig",
    "RunResult",
    "Stage",
    "Stateful",
    "StepOutcome",
    "StepReport",
    "StreamingDataset",
    "StreamingLoader",
    "StreamingSource",
    "SubStep",
    "Taxonomy",
    "Trainer",
    "accuracy",
    "artifact",
    "batches",
    "huggingface_loss",
    "load_policy",
    "signed_policy",
    "software_licences",
]


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__version__"]


if not TYPE_CHECKING:  # to whom it would say that any name is there

    def __getattr__(name: str) -> Any:  # noqa: ANN401  (any of the names above)
        if name not in _HOME_OF:
            msg = f"module 'cosmati' has no attribute {name!r}"
            raise AttributeError(msg)
        return getattr(importlib.import_module(f"cosmati.{_HOME_OF[name]}"), name)
