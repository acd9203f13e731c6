"""Pictures of the methods that act over a run or on a step, each made by the method itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import cosmati.methods.functional as cf
from cards.drawing import INK, MUTED, STONES, Canvas, Frame
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Classification
from cosmati.core.method import Position
from cosmati.core.pieces import Pieces
from cosmati.methods import SAM, SWA, DepthCurriculum, ScaleSchedule, StochasticDepth
from cosmati.methods.layers import GyroDropoutLayer
from cosmati.optim import Cosine

Drawn = tuple[Canvas, str]
_STEPS = 100


class _Weight(nn.Module):
    """A model of one weight."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value]))


def _noisy_path() -> list[float]:
    """Return a weight over a run: towards 1 on noisy gradients."""
    noise = torch.randn(_STEPS, generator=torch.Generator().manual_seed(7)).tolist()
    path, weight = [], 0.0
    for step in range(_STEPS):
        weight += 0.12 * (1.0 - weight) + 0.11 * noise[step]
        path.append(weight)
    return path


def _path_frame(words: str) -> tuple[Canvas, Frame, list[float]]:
    canvas, path = Canvas(words, 178), _noisy_path()
    frame = Frame(canvas, (0, _STEPS), (0, 1.45))
    frame.axes("steps", "one weight", [(0, "0"), (1, "1")])
    frame.canvas.dashed([frame.at(0, 1), frame.at(_STEPS, 1)])
    return canvas, frame, path


def _key(canvas: Canvas, left: float, top: float, names: dict[str, str]) -> None:
    for place, (name, colour) in enumerate(names.items()):
        y = top + 16 * place
        canvas.line([(left, y - 4), (left + 16, y - 4)], colour, width=3)
        canvas.text(left + 22, y, name)


def ema() -> Drawn:
    """Draw a noisy weight and its average."""
    canvas, frame, path = _path_frame("A noisy weight over a run, and its average, which is smooth")
    averaged, smoothed = _Weight(path[0]), []
    for value in path:
        cf.compute_ema(_Weight(value), averaged, smoothing=0.9)
        smoothed.append(averaged.weight.item())
    frame.curve(range(_STEPS), path, MUTED, width=1.2)
    frame.curve(range(_STEPS), smoothed, STONES[0], width=2.6)
    _key(canvas, 270, 112, {"in training": MUTED, "evaluated": STONES[0]})
    return canvas, "A weight that's driven to 1 by noisy gradients, and its average by `compute_ema(smoothing=0.9)`."


def swa() -> Drawn:
    """Draw a noisy weight and the mean of its last part."""
    canvas, frame, path = _path_frame("A noisy weight over a run, and the mean of its last third")
    method, state, means = SWA(update_interval="2ba"), {}, {}
    model, budget = _Weight(), Budget(Time.parse(f"{_STEPS}ba"))
    for step, value in enumerate(path, 1):
        at = Position(Clock(step=step), budget, 0, 0, model, Classification(2))
        state = method.after(state, Pieces({"weight": torch.tensor([value])}), at, None)
        if found := method.evaluation_weights(state, at):
            means[step] = float(found["weight"])
    for moment in (70, 97):
        canvas.dashed([frame.at(moment, 0), frame.at(moment, 1.45)])
    frame.curve(range(_STEPS), path, MUTED, width=1.2)
    frame.curve(list(means), list(means.values()), STONES[0], width=2.6)
    _key(canvas, 150, 112, {"in training": MUTED, "evaluated": STONES[0]})
    return (
        canvas,
        "A weight that's driven to 1 by noisy gradients, and its mean from 70 to 97 % of the run, as `SWA` takes it.",
    )


def layer_freezing() -> Drawn:
    """Draw which of ten layers learn, over a run."""
    canvas = Canvas("Ten layers over a run: from the half on they stop learning, from the input on", 134)
    learns = torch.zeros(10, 40)
    for column in range(40):
        model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(10)])
        num_frozen, _ = cf.freeze_layers(model, torch.optim.SGD(model.parameters(), lr=1.0), column / 39)
        learns[: 10 - num_frozen, column] = 1
    _layers_over_a_run(canvas, learns, "frozen")
    return canvas, "Which of ten layers learn, over a run with the defaults."


def depth_curriculum() -> Drawn:
    """Draw which of ten layers learn, over a run."""
    canvas = Canvas("Ten layers over a run: up to the half they begin to learn, from the output down", 134)
    learns, model = torch.zeros(10, 40), nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(10)])
    names, budget = [name for name, _ in model.named_parameters()], Budget(Time.parse("39ba"))
    for column in range(40):
        at = Position(Clock(step=column), budget, 0, 0, model, Classification(1))
        shut = DepthCurriculum().frozen(names, at)
        learns[:, column] = torch.tensor([float(name not in shut) for name in reversed(names)])
    _layers_over_a_run(canvas, learns, "not yet")
    return canvas, "Which of ten layers learn, over a run with the defaults."


def _layers_over_a_run(canvas: Canvas, learns: Tensor, otherwise: str) -> None:
    canvas.cells(70, 10, 9.4, learns)
    canvas.text(0, 20, "output", colour=MUTED)
    canvas.text(0, 102, "input", colour=MUTED)
    canvas.text(446, 124, "the run", anchor="end", colour=MUTED)
    canvas.rect(70, 115, 9, 9, STONES[0])
    canvas.text(84, 124, "learns")
    canvas.rect(150, 115, 9, 9, MUTED, opacity=0.3)
    canvas.text(164, 124, otherwise)


def scale_schedule() -> Drawn:
    """Draw a schedule as it is, and dilated."""
    canvas = Canvas("A learning rate's schedule, and the same in half the steps", 178)
    frame = Frame(canvas, (0, _STEPS), (0, 1.1))
    frame.axes("steps", "learning rate", [(0, "0"), (1, "1")])
    schedule = Cosine(warmup="0.1dur")
    for ratio, colour in ((1.0, MUTED), (ScaleSchedule(ratio=0.5).dilation(), STONES[0])):
        budget = Budget(Time.parse(f"{_STEPS}ba"), ratio=ratio)
        steps = budget.num_steps
        assert steps is not None
        frame.curve(range(steps), [schedule.multiplier(step / steps, budget) for step in range(steps)], colour)
    _key(canvas, 318, 44, {"as written": MUTED, "ratio=0.5": STONES[0]})
    return (
        canvas,
        '`Cosine(warmup="0.1dur")` as written, and with `ScaleSchedule(ratio=0.5)`: the warm-up shrinks alike.',
    )


class _Block(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        """Return the input."""
        return input


def stochastic_depth() -> Drawn:
    """Draw how often each of ten blocks is kept."""
    model = StochasticDepth(target_layer_name=_Block, drop_rate=0.4).apply(
        nn.Sequential(*[_Block() for _ in range(10)])
    )
    canvas = Canvas("How often each of ten blocks is computed: less, the nearer the output it is", 150)
    for place, block in enumerate(model):
        kept = 1 - float(block.drop_rate)
        x = 20 + place * 43
        canvas.rect(x, 22, 34, 96, MUTED, opacity=0.2)
        canvas.rect(x, 118 - 96 * kept, 34, 96 * kept, STONES[0])
        canvas.text(x + 17, 16, f"{kept:.0%}", anchor="middle", colour=MUTED, size=12)
    canvas.text(20, 138, "nearest the input", colour=MUTED)
    canvas.text(441, 138, "nearest the output", anchor="end", colour=MUTED)
    return canvas, "How often each of ten residual blocks is computed in training, with `drop_rate=0.4`."


def gyro_dropout() -> Drawn:
    """Draw which units are kept over steps, with plain dropout and with gyro dropout."""
    canvas, steps, units, size = (
        Canvas("Which units are kept over 24 steps: with gyro dropout patterns come back", 172),
        24,
        14,
        8.6,
    )
    torch_state = torch.get_rng_state()
    torch.manual_seed(0)
    plain = torch.stack([nn.Dropout(0.5)(torch.ones(units)) for _ in range(steps)]).t() / 2
    torch.set_rng_state(torch_state)
    layer = GyroDropoutLayer(p=0.5, sigma=4, tau=1, interval=3, name="layer")
    gyro = torch.stack([layer(torch.ones(1, units))[0] for _ in range(steps)]).t() / 2
    for left, name, kept in ((0, "dropout", plain), (242, "gyro dropout", gyro)):
        canvas.text(left, 14, name)
        canvas.cells(left, 22, size, kept)
        canvas.text(left + steps * size, 162, "24 steps", anchor="end", colour=MUTED)
        canvas.text(left, 162, "14 units", colour=MUTED)
    return (
        canvas,
        "Which units are kept (filled), step by step. Here 4 subnetworks take turns of 3 steps; the defaults have 256.",
    )


def gradient_clipping() -> Drawn:
    """Draw the norms of 40 gradients before and after."""
    generator = torch.Generator().manual_seed(3)
    norms = (0.55 * torch.randn(40, generator=generator)).exp() * 0.7
    norms[[11, 29]] = torch.tensor([4.2, 3.1])
    canvas = Canvas("Forty gradients' norms, of which the peaks are cut at 1", 162)
    frame = Frame(canvas, (0, 40), (0, 4.4), height=112)
    frame.axes("40 steps", "gradient norm", [(1, "1"), (4, "4")])
    for step, norm in enumerate(norms.tolist()):
        model = _Weight()
        model.weight.grad = torch.tensor([norm])
        cf.apply_gradient_clipping(model, "norm", 1.0)
        x, top = frame.at(step + 0.1, norm)
        _, clipped = frame.at(step, model.weight.grad.norm().item())
        foot = frame.top + frame.height
        canvas.rect(x, top, 7.4, foot - top, MUTED, opacity=0.25)
        canvas.rect(x, clipped, 7.4, foot - clipped, STONES[0])
    canvas.dashed([frame.at(0, 1), frame.at(40, 1)])
    return canvas, "Norms of 40 gradients, and what `clipping_threshold=1.0` leaves of them."


def sam() -> Drawn:
    """Draw a step of SAM on a loss of two weights."""
    canvas = Canvas("Level lines of a loss; the gradient is taken at a point a little uphill", 190)
    scale, centre = 62.0, (250.0, 104.0)

    def place(weights: Tensor) -> tuple[float, float]:
        return centre[0] + scale * float(weights[0]), centre[1] - scale * float(weights[1])

    def loss_of(weights: Tensor) -> Tensor:
        return 0.18 * weights[0] ** 2 + 1.2 * (weights[1] - 0.25 * torch.sin(1.6 * weights[0])) ** 2

    turn = torch.linspace(0, 2 * torch.pi, 90)
    for level in (0.06, 0.25, 0.6, 1.1):
        x = (level / 0.18) ** 0.5 * torch.cos(turn)
        y = (level / 1.2) ** 0.5 * torch.sin(turn) + 0.25 * torch.sin(1.6 * x)
        canvas.line([place(point) for point in torch.stack([x, y], 1)], MUTED, width=0.8)
    weights = torch.tensor([-1.7, 0.2], requires_grad=True)
    (gradient,) = torch.autograd.grad(loss_of(weights), weights)
    model, budget = _Weight(), Budget(Time.parse("1ba"))
    at = Position(Clock(), budget, 0, 0, model, Classification(2))
    method = SAM(rho=0.55)
    uphill = method.perturbation(Pieces({"w": weights.detach()}), Pieces({"w": gradient}), at)
    assert uphill is not None
    worst = (weights.detach() + uphill.tensors["w"]).requires_grad_()
    (there,) = torch.autograd.grad(loss_of(worst), worst)
    start = weights.detach()
    canvas.arrow(place(start), place(worst.detach()), STONES[2])
    canvas.arrow(place(start), place(start - 0.9 * gradient), MUTED)
    canvas.arrow(place(start), place(start - 0.9 * there), STONES[0], 2.6)
    canvas.dot(*place(start), INK, radius=4)
    canvas.dot(*place(worst.detach()), STONES[2], radius=4)
    _key(
        canvas,
        0,
        20,
        {
            "up to the worst point nearby": STONES[2],
            "step by the gradient here": MUTED,
            "step by the gradient there": STONES[0],
        },
    )
    return (
        canvas,
        "Level lines of a loss of two weights, and a step with `SAM(rho=0.55)`, drawn large, beside a plain one.",
    )


PICTURES: dict[str, Callable[[], Drawn]] = {
    "DepthCurriculum": depth_curriculum,
    "EMA": ema,
    "GradientClipping": gradient_clipping,
    "GyroDropout": gyro_dropout,
    "LayerFreezing": layer_freezing,
    "SAM": sam,
    "ScaleSchedule": scale_schedule,
    "StochasticDepth": stochastic_depth,
    "SWA": swa,
}
