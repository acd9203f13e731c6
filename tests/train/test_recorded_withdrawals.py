"""What a replay goes by of what an authority took back: as of each step, as the ledger says."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import nn

from cosmati.core.clock import Clock
from cosmati.train.loss_state import loss_module
from cosmati.train.recorded_vouchers import RecordedVouchers


def test_each_step_goes_by_what_was_taken_back_until_then() -> None:
    tightened: list[str] = []
    made: Any = object.__new__(RecordedVouchers)
    made._a = SimpleNamespace(router=SimpleNamespace(tighten=tightened.append))
    made._told, made._withdrawn = [(2, "first"), (5, "second"), (7, None)], None
    type_of: Any = type(made)
    own = type("Own", (type_of,), {"withdrawals": None, "_tightened": lambda self, _: self._withdrawn})
    made.__class__ = own
    amended: list[tuple[int, dict[str, Any]]] = []
    run: Any = SimpleNamespace(
        facts=SimpleNamespace(artifacts=()), amend=lambda clock, _changes, **facts: amended.append((clock.step, facts))
    )
    assert made.resume(None, Clock(step=1)) is None
    for step in range(1, 9):
        made.before_step(run, Clock(step=step), lambda: None)
    assert [(step, facts["withdrawn"]) for step, facts in amended] == [(2, "first"), (5, "second"), (7, None)]
    assert tightened == ["first", "second"]
    later: Any = made.resume(None, Clock(step=6))
    assert later.withdrawn == "second"
    assert made.resume(None, Clock(step=6)) is None


def test_the_module_that_a_loss_is() -> None:
    class Loss(nn.Module):
        def forward(self, model: nn.Module, data: Any) -> Any:
            return model(data)

        def other(self, model: nn.Module, data: Any, scale: float = 1.0) -> Any:
            return model(data) * scale

    loss = Loss()
    for one in (loss, loss.other, partial(loss.other, scale=2.0), partial(partial(loss, None), None)):
        assert loss_module(one) is loss
    for other in (lambda model, data: model(data), len, [].append, partial(max, 1), None):
        assert loss_module(other) is None
