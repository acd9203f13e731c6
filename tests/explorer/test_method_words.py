"""What pages say of a method is what the class itself says, read without importing it."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import cosmati.methods
import cosmati.optim
from cosmati.core.method import Method
from cosmati.explorer.method_words import exclusive_with, known_methods, method_key, words_of

pytestmark = pytest.mark.long


def test_every_method_is_known_with_its_own_first_paragraph() -> None:
    found = known_methods()
    kinds = [getattr(cosmati.methods, name) for name in cosmati.methods.__all__]
    methods = [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Method)]
    assert len(methods) > 25
    for kind in methods:
        words = found[method_key(kind.__name__)]
        first = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]
        assert words.does[0] == " ".join(first.split())
        assert not any("Args:" in text for text in words.does)
    assert {"Muon", "Lion", "ScheduleFreeAdamW"} <= {one.name for one in found.values()}
    assert "Jordan" in found["muon"].paper


def test_what_a_method_may_own_holds_what_it_claims() -> None:
    for kind, claims in (
        (cosmati.methods.EMA(), {"evaluation weights"}),
        (cosmati.methods.SWA(), {"evaluation weights"}),
        (cosmati.methods.MixUp(interpolate_loss=True), {"loss interpolation"}),
        (cosmati.methods.LabelSmoothing(), set()),
    ):
        words = words_of(type(kind).__name__)
        assert words is not None
        assert set(kind.claims) == claims
        assert claims <= set(words.owns)
    ema = words_of("ema")
    assert ema is not None
    ((thing, others),) = exclusive_with(ema)
    assert thing == "evaluation weights"
    assert {"SWA", "ScheduleFreeAdamW"} <= set(others)
    assert "EMA" not in others


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("LabelSmoothing(smoothing=0.1)", "label smoothing"),
        ("EMA", "ema"),
        ("n-gram embeddings", "N-gram\nEmbeddings (size=4)"),
    ],
)
def test_spellings_of_one_method_have_one_key(one: str, other: str) -> None:
    assert method_key(one) == method_key(other)


def test_other_names_have_keys_of_their_own() -> None:
    names = ["EMA", "EMA2", "訓練", "<b>", "..", "!", "?", "width 1.5", "width 15", "C", "C#", "Adam", "Adam++", "(x)"]
    names += [
        "label_smoothing",
        "LabelSmoothing",
        "Muon(lr=0.1) + EMA(half_life='9ba')",
        "Muon(lr=0.1)",
        "",
        "EMA (fast) 2",
    ]
    assert len({method_key(name) for name in names}) == len(names)
    assert words_of("nothing of the kind") is None


def test_reading_the_words_imports_no_torch() -> None:
    code = (
        "import sys; from cosmati.explorer.method_words import words_of; words_of('EMA'); print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
