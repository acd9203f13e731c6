"""What loss functions return: a scalar, a `Loss`, something that has one, or a refusal before anything is committed."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati import huggingface_loss
from cosmati.core.batch import Data
from cosmati.core.labels import _count_elsewhere, count_labels, predicts_next
from cosmati.core.loss import Loss, as_loss
from cosmati.errors import BatchError
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.observers import History
from cosmati.train.trainer import Trainer

pytestmark = pytest.mark.long

V = [1, 4]


def _rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)


def _model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def _mean(model: nn.Module, data: Data) -> Tensor:
    return F.cross_entropy(model(data[0]), data[1])


def _sum(model: nn.Module, data: Data) -> Loss:
    return Loss(F.cross_entropy(model(data[0]), data[1], reduction="sum"), float(len(data[1])))


def _train(loss: Any, data: Any = None, num_microbatches: int = 1, **given: Any) -> Trainer:
    config = RunConfig(budget="2ba", num_microbatches=num_microbatches, num_threads=1)
    model = given.pop("model") if "model" in given else _model()
    trainer = Trainer(model, loss, [data or _rows()], optimizers=[SGD(lr=0.1)], config=config, **given)
    trainer.fit()
    return trainer


def _weights(model: nn.Module) -> list[list[float]]:
    return [parameter.tolist() for parameter in model.parameters()]


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


KINDS: dict[str, Callable[[Tensor | Loss], object]] = {
    "dictionary": lambda loss: {"loss": loss, "accuracy": torch.tensor(0.5)},
    "ordered": lambda loss: OrderedDict(logits=torch.zeros(3), loss=loss),
    "dataclass": lambda loss: Output(loss, torch.zeros(3)),  # type: ignore[arg-type]
    "one value": lambda loss: loss.reshape(1) if isinstance(loss, Tensor) else loss,
}


@pytest.mark.parametrize("num_microbatches", V)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [_mean, _sum])
def test_what_has_a_loss_trains_on_it(given: Any, kind: str, num_microbatches: int) -> None:
    expected = _weights(_train(given, num_microbatches=num_microbatches).model)
    found = _train(lambda model, data: KINDS[kind](given(model, data)), num_microbatches=num_microbatches)
    assert _weights(found.model) == expected != _weights(_model())


REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "terms": (lambda x: {"ce": x.sum(), "aux": x.mean()}, r"returned a dict of 'ce', 'aux', .*as 'loss'"),
    "number": (lambda x: x.sum().item(), "returned a float, and not a scalar tensor"),
    "nothing": (lambda x: None, "returned a NoneType"),
    "pair": (lambda x: (x.sum(), x), r"returned a tuple, .*Loss\(\.\.\., aux="),
    "no loss": (lambda x: SimpleNamespace(loss=None), "returned a SimpleNamespace"),
    "values": (lambda x: x.square().mean(1), r"has shape \(\d,\), and a loss is a scalar\. Return its mean"),
    "empty": (lambda x: x[:0].sum(1), r"has shape \(0,\)"),
    "count": (lambda x: (x > 0).sum(), r"of type torch\.int64, which has no gradient"),
    "detached": (lambda x: x.sum().detach(), r"has no graph, .*\.detach\(\) or \.item\(\)"),
    "detached sum": (lambda x: Loss(x.sum().detach(), 2.0), "has no graph"),
    "summed values": (lambda x: Loss(x.square().mean(1), 2.0), r"has shape \(\d,\)"),
    "negative": (lambda x: Loss(x.sum(), -2.0), r"has weight -2\.0\. .*negate the sum"),
    "negative tensor": (lambda x: Loss(x.sum(), torch.tensor(-2)), "has weight -2"),
    "no number": (lambda x: Loss(x.sum(), torch.tensor(math.nan)), "has weight nan"),
    "infinite": (lambda x: Loss(x.sum(), math.inf), "has weight inf"),
}


@pytest.mark.parametrize("num_microbatches", V)
@pytest.mark.parametrize("kind", REFUSED)
def test_anything_else_is_refused_before_it_is_committed(kind: str, num_microbatches: int) -> None:
    make, match = REFUSED[kind]
    model = _model()
    with pytest.raises(BatchError, match=match):
        _train(lambda model, data: make(model(data[0])), num_microbatches=num_microbatches, model=model)
    assert _weights(model) == _weights(_model())


def test_a_microbatch_that_weighs_nothing_needs_no_graph() -> None:
    """Two of four microbatches have no positives: the step is that of the others."""
    rows, targets = _rows()
    positive = torch.arange(8) < 4

    def loss(model: nn.Module, data: Data) -> Loss:
        x, y, chosen = data
        if not chosen.any():
            return Loss(torch.zeros(()), chosen.sum())
        return Loss(F.cross_entropy(model(x[chosen]), y[chosen], reduction="sum"), chosen.sum())

    found = _train(loss, (rows, targets, positive), 4)
    expected = _train(_sum, (rows[:4], targets[:4]), 1)
    for one, other in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_microbatch_that_weighs_nothing_teaches_nothing_whatever_its_sum() -> None:
    rows, targets = _rows()
    counts = torch.arange(8) < 4

    def loss(model: nn.Module, data: Data) -> Loss:
        return Loss(F.cross_entropy(model(data[0]), data[1], reduction="sum"), data[2].sum())

    history = History()
    found = _train(loss, (rows, targets, counts), 4, observers=[history])
    expected = _train(_sum, (rows[:4], targets[:4]), 1)
    for one, other in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert history.losses[0][1] == pytest.approx(float(_mean(_model(), (rows[:4], targets[:4])).detach()), rel=1e-6)


def test_rows_that_are_all_ignored_weigh_nothing() -> None:
    rows, targets = _rows()
    targets[:2] = -100

    def loss(model: nn.Module, data: Data) -> Loss:
        return Loss(F.cross_entropy(model(data[0]), data[1], reduction="sum"), (data[1] != -100).sum())

    history = History()
    _train(loss, (rows, targets), 4, observers=[history])
    assert history.losses[0][1] == pytest.approx(float(F.cross_entropy(_model()(rows), targets).detach()), rel=1e-6)
    # Where no row has a label, there is no step.
    rested = _train(loss, (rows, torch.full_like(targets, -100)), 1)
    assert all(
        torch.equal(one, other) for one, other in zip(rested.model.parameters(), _model().parameters(), strict=True)
    )


def test_the_scalar_is_the_mean_and_the_users_own_where_it_is_one() -> None:
    value = torch.tensor(6.0, requires_grad=True)
    assert as_loss(value) is value
    assert as_loss({"loss": Loss(value, 3.0, aux={"balance": value / 6})}).mean().item() == 3.0
    assert as_loss(Loss(value, value / 2)).mean().item() == 2.0, "a weight may be learnt too"


def test_off_the_cpu_nobody_looks_at_a_weight() -> None:
    """A look would wait for the accelerator; on the `meta` device it's an error."""
    value = torch.ones((), device="meta", requires_grad=True)
    found = as_loss(Loss(value, torch.ones((), device="meta")))
    assert isinstance(found, Loss)
    assert found.sum.grad_fn is not None
    assert found.sum.device.type == "meta"


# ------------------------------------------------------------------------------------- means over labels, at V > 1


def _labelled(num_ignored: tuple[int, ...]) -> dict[str, Tensor]:
    """Four microbatches of two rows; so many labels of each are ignored."""
    rows, targets = _rows()
    labels = targets.clone()
    for microbatch, ignored in enumerate(num_ignored):
        labels[2 * microbatch : 2 * microbatch + ignored] = -100
    return {"x": rows, "labels": labels}


def _bare(model: nn.Module, data: Data) -> Tensor:
    return F.cross_entropy(model(data["x"]), data["labels"])


def test_a_mean_over_unequally_many_labels_is_refused() -> None:
    data = _labelled((0, 1, 0, 1))
    model = _model()
    with pytest.raises(BatchError, match=r"have \[2, 1, 2, 1\] labels .*cosmati\.huggingface_loss, else Loss\("):
        _train(_bare, data, 4, model=model)
    assert _weights(model) == _weights(_model())
    with pytest.raises(BatchError, match=r"have \[2, 1, 2, 1\] labels"):
        _train(lambda model, data: _bare(model, {"x": data[0], "labels": data[1]}), tuple(data.values()), 4)
    _train(_bare, data, 1)


def test_a_mean_over_equally_many_labels_is_the_plain_one() -> None:
    data = _labelled((1, 1, 1, 1))
    found, plain = _train(_bare, data, 4), _model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        _bare(plain, data).backward()
        optimizer.step()
    for one, other in zip(found.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_loss_that_tells_its_weight_is_weighed() -> None:
    data = _labelled((0, 1, 0, 1))

    def weighed(model: nn.Module, data: Data) -> Loss:
        num_labels = (data["labels"] != -100).sum()
        return Loss(_bare(model, data) * num_labels, num_labels)

    found, whole = _train(weighed, data, 4), _train(_bare, data, 1)
    for one, other in zip(found.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("data", [torch.zeros(4, 3), {"x": torch.zeros(4)}, (torch.zeros(4), torch.zeros(4)), (1, 2)])
def test_where_there_are_no_labels_none_are_counted(data: Any) -> None:
    assert count_labels(nn.Identity(), data) == (0.0, 1.0)


PLACES: dict[str, Callable[[Tensor, Tensor], tuple[Any, Callable[[Any], tuple[Tensor, Tensor]]]]] = {
    "third": lambda x, y: ((x, torch.ones(8, 1), y), lambda d: (d[0] * d[1], d[2])),
    "before": lambda x, y: ((y, x), lambda d: (d[1], d[0])),
    "after a number": lambda x, y: ((3, "train", x, y), lambda d: (d[2], d[3])),
    "nested": lambda x, y: ({"x": x, "heads": {"first": y}}, lambda d: (d["x"], d["heads"]["first"])),
    "array": lambda x, y: ({"x": x, "own": y.numpy()}, lambda d: (d["x"], torch.as_tensor(d["own"]))),
    "list": lambda x, y: ({"x": x, "own": y.tolist()}, lambda d: (d["x"], torch.as_tensor(d["own"]))),
    "narrow": lambda x, y: ({"x": x, "labels": y.short()}, lambda d: (d["x"], d["labels"].long())),
} | {
    name: lambda x, y, name=name: ({"x": x, name: y}, lambda d: (d["x"], d[name]))  # type: ignore[misc]
    for name in ("label_ids", "lm_labels", "tgt", "target_ids", "start_positions")
}


@pytest.mark.parametrize("place", PLACES)
def test_ignored_labels_are_seen_wherever_they_are(place: str) -> None:
    rows, targets = _rows()

    def run(targets: Tensor) -> Trainer:
        data, read = PLACES[place](rows, targets)
        return _train(lambda model, data: F.cross_entropy(model(read(data)[0]), read(data)[1]), data, 4)

    run(targets)
    targets[::2] = -100
    run(targets)
    targets[1] = 0
    targets[0] = 1
    with pytest.raises(BatchError, match=r"have \[(2|all), 1, 1, 1\] labels"):
        run(targets)


def test_each_of_several_tensors_has_equally_many_labels_in_all_microbatches() -> None:
    rows, targets = _rows()
    data = {"x": rows, "first": targets.clone(), "second": targets.clone()}
    data["first"][::4] = -100
    data["second"][2::4] = -100

    def loss(model: nn.Module, data: Data) -> Tensor:
        out = model(data["x"])
        return F.cross_entropy(out, data["first"]) + F.cross_entropy(out, data["second"])

    with pytest.raises(BatchError, match=r"have \[1, 1, 1, 1\] labels .*, and not equally many in each of"):
        _train(loss, data, 4)
    data["second"] = data["first"].clone()
    with pytest.raises(BatchError, match="labels"):
        _train(loss, data, 4)
    data["first"][:] = data["second"][:] = 1
    _train(loss, data, 4)


def test_a_microbatch_without_any_label_has_fewer_than_the_others() -> None:
    data = _labelled((2, 0, 0, 0))

    def guarded(model: nn.Module, data: Data) -> Tensor:
        return _bare(model, data) if (data["labels"] >= 0).any() else model(data["x"]).sum() * 0

    with pytest.raises(BatchError, match=r"have \[0, 2, 2, 2\] labels"):
        _train(guarded, data, 4)


def test_integers_that_are_no_labels_may_be_as_they_like() -> None:
    rows, targets = _rows()
    sound = torch.full((8, 5), -100, dtype=torch.int16)
    sound[0] = 7
    ids = torch.arange(8)
    _train(lambda model, data: _mean(model, data[:2]), (rows, targets, sound, ids, ["-100"] * 8, [0] * 8), 4)


def test_labels_on_an_accelerator_are_counted_alike() -> None:
    """On the `meta` device, where a look at a value is an error; the values are compared by tests that need a GPU."""
    rows, targets = _rows()
    targets[0] = -100
    data = {"x": rows, "own": targets, "labels": torch.ones(8, 3, dtype=torch.int64)}
    on_device = {name: tensor.to("meta") for name, tensor in data.items()}
    assert [one.device.type for one in count_labels(nn.Identity(), on_device)] == ["meta", "meta"]  # type: ignore[union-attr]
    found = _count_elsewhere([(targets, False, 0), (data["labels"], True, 1), (torch.arange(4), False, 2)])
    assert (found + torch.tensor([0, 1])).tolist() == pytest.approx(count_labels(nn.Identity(), data), rel=1e-15)


def _tiny(name: str, **more: Any) -> nn.Module:
    """Return a small model of Hugging Face's by its class's name."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    small = {"vocab_size": 11, "hidden_size": 8, "d_model": 8, "n_embd": 8, "num_hidden_layers": 1, "n_layer": 1,
             "num_layers": 1, "d_ff": 8, "d_kv": 4, "num_heads": 2, "n_head": 2, "num_attention_heads": 2,
             "num_key_value_heads": 2, "intermediate_size": 8, "encoder_layers": 1, "decoder_layers": 1,
             "encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 8, "encoder_ffn_dim": 8,
             "max_position_embeddings": 16, "n_positions": 16}  # fmt: skip
    own = kind.config_class().to_dict()
    rates = {key: 0.0 for key in own if key.endswith(("dropout", "pdrop", "dropout_rate", "dropout_prob"))}
    torch.manual_seed(0)
    chosen = {key: value for key, value in (small | more).items() if key in own or key in more}
    config = kind.config_class(
        **(chosen | rates | {"use_cache": False, "pad_token_id": 0, "decoder_start_token_id": 0})
    )
    model: nn.Module = kind(config)
    return model.train()


class Around(nn.Module):
    """A user's own module around a model."""

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, **data: Any) -> Any:
        return self.models[0](**data)


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),  # type: ignore[return-value]
    "around": Around,
    "both": lambda model: Around(Around(torch.compile(model, backend="eager"))),  # type: ignore[arg-type]
}
OWN = ("GPT2LMHeadModel", "LlamaForCausalLM", "BartForCausalLM", "T5ForConditionalGeneration", "BertForMaskedLM")


@pytest.mark.filterwarnings("ignore")  # of torch.compile
@pytest.mark.parametrize(("name", "wrapped"), [(name, "around") for name in OWN] + [(OWN[0], one) for one in WRAPPED])
def test_the_weight_of_a_hugging_face_model_is_what_it_averages_over(name: str, wrapped: str) -> None:
    model = WRAPPED[wrapped](_tiny(name))
    tokens = torch.randint(1, 11, (4, 6), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :1] = labels[1, 2:] = labels[2:, 4:] = -100
    data = {"input_ids": tokens, "labels": labels}
    whole = model(**data).loss
    parts = [huggingface_loss(model, {key: value[i : i + 1] for key, value in data.items()}) for i in range(4)]
    mean = sum(part.sum for part in parts) / sum(part.weight for part in parts)
    torch.testing.assert_close(mean, whole)
    even = {"input_ids": tokens, "labels": tokens.clone()}
    even["labels"][0, 0] = -100
    if predicts_next(model):  # The first label of a row isn't predicted: whether it's ignored makes no difference.
        _train(lambda model, data: model(**data).loss, even, 4, model=model)
    else:
        with pytest.raises(BatchError, match=r"have \[5, 6, 6, 6\] labels"):
            _train(lambda model, data: model(**data).loss, even, 4, model=model)


def test_where_models_differ_huggingface_loss_is_refused() -> None:
    model = Around(_tiny("GPT2LMHeadModel"), _tiny("BertForMaskedLM"))
    tokens = torch.ones(2, 4, dtype=torch.int64)
    with pytest.raises(BatchError, match=r"how many labels the Around averages .*returns Loss\("):
        huggingface_loss(model, {"input_ids": tokens, "labels": tokens})


def test_hugging_faces_own_loss_is_refused_or_weighed() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 8, "vocab_size": 11}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **sizes, **rates)).train()
    tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[1:, 3:] = -100
    data = {"input_ids": tokens, "labels": labels}

    def own(model: nn.Module, data: Data) -> object:
        return model(**data)

    with pytest.raises(BatchError, match=r"have \[7, 4\] labels .*huggingface_loss"):
        _train(own, data, 2, model=copy.deepcopy(model))
    weighed = _train(huggingface_loss, data, 2, model=copy.deepcopy(model))
    whole = _train(own, data, 1, model=model)
    for one, other in zip(weighed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    # The first label of a row isn't predicted: whether it's ignored makes no difference.
    labels = tokens.clone()
    labels[0, 0] = -100
    _train(own, {"input_ids": tokens, "labels": labels}, 2, model=model)
