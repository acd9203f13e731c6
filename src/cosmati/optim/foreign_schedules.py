"""The schedule to write in place of a scheduler of PyTorch's, transformers' or Composer's.

Theirs are objects that change an optimizer's rates, or need a trainer's state; a schedule here is a curve over the run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

_WARMUPS = {"cosine": "Cosine", "linear": "Linear", "polynomial_decay": "Polynomial", "constant": "Constant"}


def schedule_in_place_of(given: object) -> str:
    """Return the words that name the schedule to write; empty where nothing is known of what's given."""
    scheduler: Any = given
    name = type(given).__name__
    if isinstance(given, LRScheduler):
        call = _in_steps(scheduler)
        if call is None:
            return (
                f"a PyTorch {name} sets an optimizer's rates itself. Write what it does as a schedule: an object with "
                "multiplier(fraction_elapsed, budget); or give a built optimizer, keep your loop, and call both there"
            )
        return f"a PyTorch {name} sets an optimizer's rates itself. Write {call}" + (
            ", with 'ep' in place of 'ba' if its step() was called once an epoch" if "ba'" in call else ""
        )
    if name in _COMPOSERS and type(given).__module__.startswith("composer."):
        return f"Composer's {name} needs Composer's state. Write {_composers(name, scheduler)}"
    return ""


def _in_steps(scheduler: Any) -> str | None:  # noqa: ANN401  (attributes that PyTorch's stubs don't all have)
    """Return the call that gives a PyTorch scheduler's curve, its times in steps; None where there's none."""
    rate = scheduler.optimizer.param_groups[0].get("initial_lr") or 1.0
    find = _TORCHS.get(type(scheduler).__name__)
    return None if find is None else find(scheduler, rate)


def _linear(scheduler: Any, _: float) -> str | None:  # noqa: ANN401
    end = f"{scheduler.total_iters}ba"
    if scheduler.start_factor == 1:
        return f"Linear(t_max={end!r}, final={scheduler.end_factor:g})"
    return f"Constant(warmup={end!r})" if scheduler.end_factor == 1 else None


def _lambda(scheduler: Any, _: float) -> str | None:  # noqa: ANN401
    """Read transformers' `get_..._schedule_with_warmup`, which are such."""
    function = scheduler.lr_lambdas[0]
    if not isinstance(function, functools.partial) or "num_warmup_steps" not in function.keywords:
        return None
    steps = function.keywords
    kind = getattr(function.func, "__name__", "").removeprefix("_get_").partition("_schedule")[0]
    if kind not in _WARMUPS or steps.get("num_cycles", 0.5) != 0.5:
        return None
    told = [f"warmup='{steps['num_warmup_steps']}ba'"]
    if "num_training_steps" in steps:
        told.append(f"t_max='{steps['num_training_steps']}ba'")
    if "power" in steps:
        told += [f"power={steps['power']:g}", f"final={steps['lr_end'] / steps['lr_init']:g}"]
    return f"{_WARMUPS[kind]}({', '.join(told)})"


def _sequence(scheduler: Any, rate: float) -> str | None:  # noqa: ANN401
    """Read a warm-up by LinearLR with one scheduler after it."""
    parts, milestones = scheduler._schedulers, scheduler._milestones  # noqa: SLF001  (PyTorch has no public names)
    if len(parts) != 2 or type(parts[0]).__name__ != "LinearLR" or parts[0].end_factor != 1:
        return None
    start, then = milestones[0], parts[1]
    if type(then).__name__ == "CosineAnnealingLR":
        return f"Cosine(warmup='{start}ba', t_max='{start + then.T_max}ba', final={then.eta_min / rate:g})"
    if type(then).__name__ == "LinearLR" and then.start_factor == 1:
        return f"Linear(warmup='{start}ba', t_max='{start + then.total_iters}ba', final={then.end_factor:g})"
    return None


def _one_cycle(scheduler: Any, _: float) -> str:  # noqa: ANN401
    group = scheduler.optimizer.param_groups[0]
    # Its first phase ends one step before the share of the run that was asked for.
    warmup = round(scheduler._schedule_phases[0]["end_step"]) + 1  # noqa: SLF001
    final = group["min_lr"] / group["max_lr"]
    return (
        f"Cosine(warmup='{warmup}ba', t_max='{scheduler.total_steps}ba', final={final:g}) with lr={group['max_lr']:g}, "
        "whose warm-up is a line"
    )


_TORCHS: Mapping[str, Callable[[Any, float], str | None]] = {
    "CosineAnnealingLR": lambda s, rate: f"Cosine(t_max='{s.T_max}ba', final={s.eta_min / rate:g})",
    "CosineAnnealingWarmRestarts": lambda s, rate: (
        f"CosineWarmRestarts(cycle='{s.T_0}ba', growth={s.T_mult:g}, final={s.eta_min / rate:g})"
    ),
    "ExponentialLR": lambda s, _: f"Exponential(every='1ba', factor={s.gamma:g})",
    "LambdaLR": _lambda,
    "LinearLR": _linear,
    "MultiStepLR": lambda s, _: (
        f"MultiStep(milestones={tuple(f'{step}ba' for step in sorted(s.milestones.elements()))}, factor={s.gamma:g})"
    ),
    "OneCycleLR": _one_cycle,
    "PolynomialLR": lambda s, _: f"Polynomial(t_max='{s.total_iters}ba', power={s.power:g})",
    "SequentialLR": _sequence,
    "StepLR": lambda s, _: f"Step(every='{s.step_size}ba', factor={s.gamma:g})",
}

_DECAY = {"t_warmup": "warmup", "t_max": "t_max", "alpha_f": "final", "power": "power"}
_FALLS = {"t_warmup": "warmup", "step_size": "every", "milestones": "milestones", "gamma": "factor"}
_COMPOSERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "ConstantScheduler": ("Constant", {}),
    "ConstantWithWarmupScheduler": ("Constant", {"t_warmup": "warmup"}),
    "CosineAnnealingScheduler": ("Cosine", _DECAY),
    "CosineAnnealingWarmRestartsScheduler": (
        "CosineWarmRestarts",
        {"t_0": "cycle", "t_mult": "growth", "alpha_f": "final"},
    ),
    "CosineAnnealingWithWarmupScheduler": ("Cosine", _DECAY),
    "ExponentialScheduler": ("Exponential", {"decay_period": "every", "gamma": "factor"}),
    "LinearScheduler": ("Linear", _DECAY),
    "LinearWithWarmupScheduler": ("Linear", _DECAY),
    "MultiStepScheduler": ("MultiStep", _FALLS),
    "MultiStepWithWarmupScheduler": ("MultiStep", _FALLS),
    "PolynomialScheduler": ("Polynomial", _DECAY),
    "PolynomialWithWarmupScheduler": ("Polynomial", _DECAY),
    "StepScheduler": ("Step", _FALLS),
}


def _composers(name: str, scheduler: Any) -> str:  # noqa: ANN401
    """Return the call that gives a Composer scheduler's curve; one here begins at 1, so its peak goes into the rate."""
    kind, names = _COMPOSERS[name]
    peak = getattr(scheduler, "alpha_i", getattr(scheduler, "alpha", 1.0))
    final = getattr(scheduler, "alpha_f", 0.0)
    if peak == 0:
        if not final or hasattr(scheduler, "t_warmup"):
            return "what it does as an object with multiplier(fraction_elapsed, budget): no schedule here begins at 0"
        kind, names, peak = "Constant", {"t_max": "warmup"}, final  # A line that rises from 0 is a warm-up.
    values = {ours: _plain(getattr(scheduler, own)) for own, ours in names.items() if hasattr(scheduler, own)}
    if "final" in values:
        values["final"] = final / peak
    call = f"{kind}({', '.join(f'{ours}={value!r}' for ours, value in values.items())})"
    return call if peak == 1 else f"{call} with lr times {peak:g}"


def _plain(value: Any) -> object:  # noqa: ANN401
    """Return a number, or a time of Composer's as a string."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    as_text = getattr(value, "to_timestring", None)
    return as_text() if callable(as_text) else value
