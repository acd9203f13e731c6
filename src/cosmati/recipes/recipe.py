"""A recipe: everything that makes a run, frozen, with a name; and how single settings of it are changed."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, get_type_hints

import torch
from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError
from torch import nn

from cosmati.core.batch import Data
from cosmati.core.later import told_fields, untold
from cosmati.core.loss import LossFunction
from cosmati.core.method import Method
from cosmati.core.plan import describe
from cosmati.core.rng import DefaultGenerators, position_key
from cosmati.core.source import Source
from cosmati.errors import CosmatiError, PlanError
from cosmati.optim import Optimizer
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import PolicyFile
from cosmati.train.config import LEARNING_CADENCES, WITNESSING, RunConfig
from cosmati.train.named_evaluations import Evaluations
from cosmati.train.observers import Observer
from cosmati.train.trainer import Trainer

_CONFIG = RunConfig()
_OF_THE_RECORD = (
    "sensitive",
    "sharding",
    "shard_ranks",
    "tensor_parallel",
    "checkpoint_async",
    "checkpoint_to",
    *LEARNING_CADENCES,
    *WITNESSING,
)
_NOT_OF_THE_TEXT = ("seed", "run_folder", "task", "require_signed", "trusted_roots", "artifacts", *_OF_THE_RECORD)
"""What says where a run is kept, what it is called, what it was prepared with and refuses, and not how it trains."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What makes a run. Model, data and evaluation are made anew for each one.

    Args:
        name: of the recipe.
        model: makes the model; its initial weights follow from the seed.
        loss: `loss(model, data)`.
        data: makes the source of the rows, or what is iterated over.
        optimizers: the first one that matches takes a parameter.
        methods: training methods, in any order.
        evaluation: makes what is measured; None measures nothing.
        config: the settings of the run.
        policy: which class may teach which region.
        taxonomy: the classes that policy and data speak of.
        task: what is learnt from what, in words, for the record; empty takes the one in `config`.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: LossFunction
    data: Callable[[], Source | Iterable[Data]]
    optimizers: tuple[Optimizer, ...]
    methods: tuple[Method, ...] = ()
    evaluation: Callable[[], Evaluations] | None = None
    config: RunConfig = _CONFIG
    policy: PolicyFile | None = None
    taxonomy: Taxonomy | None = None
    task: str = ""

    def trainer(self, *, run_folder: str | Path | None = None, observers: Sequence[Observer] = ()) -> Trainer:
        """Return a trainer for this recipe.

        Args:
            run_folder: where record, checkpoints and ledger go; None takes the one in `config`.
            observers: told of every step, evaluation, checkpoint and the end.
        """
        config = dataclasses.replace(
            self.config,
            name=self.name,
            task=self.task or self.config.task,
            run_folder=run_folder or self.config.run_folder,
        )
        return Trainer(
            self.build_model(),
            self.loss,
            self.data(),
            optimizers=self.optimizers,
            methods=self.methods,
            policy=self.policy,
            taxonomy=self.taxonomy,
            evaluation=self.evaluation() if self.evaluation else None,
            observers=observers,
            config=config,
        )

    def build_model(self) -> nn.Module:
        """Make the model, with the initial weights of the seed."""
        generators = DefaultGenerators(torch.device("cpu"))
        with generators.restored():
            generators.seed(position_key(self.config.seed, "init"))
            return self.model()

    def with_settings(self, settings: Mapping[str, object]) -> Recipe:
        """Return the recipe with single settings changed.

        Args:
            settings: value by dotted name: `config.seed`, `methods.0.alpha`, `optimizers.0.schedule.warmup`.

        Raises:
            PlanError: no such setting, or a value that it can't have.
        """
        recipe, left = self, dict(settings)
        while left:
            # Some go together only: what isn't possible yet may be, once the others have changed.
            errors = dict[str, PlanError]()
            for name, value in left.items():
                try:
                    recipe = _changed(recipe, name.split("."), value, name)
                except PlanError as error:
                    errors[name] = error
            if len(errors) == len(left):
                raise next(iter(errors.values()))
            left = {name: left[name] for name in errors}
        return recipe

    @property
    def text(self) -> str:
        """The recipe as JSON text: names of its functions, and all options of its parts."""
        unsaid = {*_NOT_OF_THE_TEXT, *untold(self.config)}
        facts = {
            "name": self.name,
            "model": _label(self.model),
            "loss": _label(self.loss),
            "data": _label(self.data),
            "evaluation": _label(self.evaluation) if self.evaluation else None,
            "optimizers": [_call(optimizer) for optimizer in self.optimizers],
            "methods": [describe(method) for method in self.methods],
            "config": {k: v for k, v in dataclasses.asdict(self.config).items() if k not in unsaid},
            "policy": self.policy.digest.hex() if self.policy else None,
        }
        return json.dumps(facts, indent=1, default=str)


def parse_setting(text: str) -> tuple[str, object]:
    """Read `name=value`; the value is JSON, or else a string.

    Raises:
        PlanError: there is no `=`.
    """
    name, separator, value = text.partition("=")
    if not separator or not name:
        msg = f"{text!r} is no setting. Write name=value, such as config.seed=3."
        raise PlanError(msg)
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _changed(part: Any, path: Sequence[str], value: object, whole: str) -> Any:  # noqa: ANN401  (any frozen dataclass)
    """Return a copy of a part of a recipe in which what the path names has the value."""
    first, *rest = path
    if isinstance(part, tuple):
        index = int(first) if first.isdigit() else -1
        if not 0 <= index < len(part):
            msg = f"{whole}: there is no {first!r} here. {len(part)} entries are counted from 0."
            raise PlanError(msg)
        inner = _changed(part[index], rest, value, whole) if rest else _refuse_whole(whole)
        return (*part[:index], inner, *part[index + 1 :])
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        msg = f"{whole}: {first!r} would be a setting of {type(part).__name__}, which has none."
        raise PlanError(msg)
    known = [field.name for field in dataclasses.fields(part) if field.init]
    if first not in known:
        near = difflib.get_close_matches(first, known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        msg = f"{whole}: {type(part).__name__} has no setting {first!r}.{hint} It has {', '.join(known)}."
        raise PlanError(msg)
    new = _changed(getattr(part, first), rest, value, whole) if rest else _converted(part, first, value, whole)
    try:
        return dataclasses.replace(part, **{first: new})
    except CosmatiError as error:
        raise PlanError(f"{whole}={value}: {error}") from error


def _refuse_whole(whole: str) -> object:
    msg = f"{whole} is a part with settings of its own. Name one of them, such as {whole}.lr."
    raise PlanError(msg)


def _converted(part: object, field: str, value: object, whole: str) -> object:
    """Read a value as the field's annotated type."""
    # Of this field alone: another one's names may be known only where they were written.
    owner = next(one for one in type(part).__mro__ if field in vars(one).get("__annotations__", {}))
    own = {"__module__": owner.__module__, "__annotations__": {field: owner.__annotations__[field]}}
    try:
        hint = get_type_hints(type(owner.__name__, (), own))[field]
        return TypeAdapter(getattr(hint, "accepts", hint)).validate_python(value)
    except (PydanticSchemaGenerationError, NameError) as error:
        msg = f"{whole} can't be given as text: change it in the recipe's file, or name a setting inside it."
        raise PlanError(msg) from error
    except ValidationError as error:
        msg = f"{whole}={value!r} isn't possible: {error.errors()[0]['msg']}."
        raise PlanError(msg) from error


def _label(function: object) -> str:
    if isinstance(function, partial):
        # Its own text has the function's address, which is another one in each process.
        given = [*map(_label, function.args), *(f"{name}={_label(value)}" for name, value in function.keywords.items())]
        return f"{_label(function.func)}({', '.join(given)})"
    if isinstance(function, MethodType) and dataclasses.is_dataclass(function.__self__):
        return f"{function.__self__!r}.{function.__name__}"
    if isinstance(function, type) or hasattr(function, "__qualname__"):
        return str(getattr(function, "__qualname__", function))
    return repr(function)


def _call(optimizer: Optimizer) -> str:
    chosen = told_fields(optimizer)
    options = [f"{name}={_label(value) if callable(value) else repr(value)}" for name, value in chosen.items()]
    return f"{type(optimizer).__name__}({', '.join(options)})"
