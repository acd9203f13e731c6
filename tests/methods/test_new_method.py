"""A new method touches three places, and the lists are made of them: shown with the one that the docs' page writes."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.processes import run_python
from tools.list_methods import exports_of, list_of, lists_of, main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "writing-a-method.md").read_text()
COPIED = ("src", "tests", "docs", "tools", "benchmarks", "pyproject.toml", "Makefile")
SUITES = (
    "tests/methods/test_contract.py",
    "tests/methods/test_bad_input.py",
    "tests/methods/test_couplings.py",
    "tests/methods/test_functional.py",
    "tests/docs/test_cards.py",
)


def test_the_lists_are_what_the_files_export() -> None:
    assert main(ROOT, check=True) == 0


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """Return a copy of the tree."""
    made = shutil.ignore_patterns("_build", "_generated", "raw")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=made)
        else:
            shutil.copy(source, tmp_path)
    return tmp_path


def run(house: Path, *command: str) -> str:
    """Run Python in the copy of the tree, and return what it printed."""
    # A fork has modules that plugins of pytest can't be loaded after, and the suites need only the one that's named.
    environment = {
        **os.environ,
        "PYTHONPATH": str(house / "src"),
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    result = run_python(command, cwd=house, env=environment, is_anew=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    return result.stdout


def contents(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file() and "cache" not in str(path)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def made_by_hand(house: Path) -> set[str]:
    """Put the page's method in the places that the page names, and return these."""
    function, method = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[:2]
    [case] = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
    [card] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    places = {"src/cosmati/methods/input_dropout.py", "tests/methods/cases.py", "docs/cards/notes.yaml"}
    assert {place for place in places if f"`{place}`" in PAGE} == places
    (house / "src/cosmati/methods/input_dropout.py").write_text(f"{function}\n\n{method}")
    cases = house / "tests/methods/cases.py"
    cases.write_text(cases.read_text().replace("_CASES = (\n", f"_CASES = (\n    {case.strip()},\n"))
    with (house / "docs/cards/notes.yaml").open("a") as notes:
        notes.write(card)
    return places


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_places_and_every_suite_runs_over_it(house: Path) -> None:
    before = contents(house)
    by_hand = made_by_hand(house)
    assert main(house, check=False) == 0
    run(house, "docs/cards/run_pairs.py", "InputDropout")
    after = contents(house)
    lists = {f"src/cosmati/methods/{name}.py" for name in ("__init__", "functional")}
    assert {name for name in after if after[name] != before.get(name)} == by_hand | lists | {"docs/cards/pairs.json"}
    # What's about the new method, and what's about all of them.
    chosen = ("-p", "no:cacheprovider", "-p", "pytest_timeout", "-q", "-k", "InputDropout or not [")
    said = run(house, "-m", "pytest", *chosen, *SUITES)
    assert int(re.findall(r"(\d+) passed", said)[0]) > 75
    code = "from cosmati.methods import InputDropout, functional as cf; cf.drop_inputs; print(InputDropout())"
    assert run(house, "-c", code) == "InputDropout(p=0.1)\n"


@pytest.mark.long
def test_a_stale_list_is_named_with_the_mend(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_by_hand(house)
    assert main(house, check=True) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0].rsplit("/", 1)[1] for line in said] == ["__init__.py", "functional.py"]
    assert all(line.endswith("Run `make methods`.") for line in said)
    assert main(house, check=False) == 0
    assert main(house, check=True) == 0


METHOD = "class A(Method): pass\nclass _B(Method): pass\nclass C(_B): pass\ndef f(): pass\nclass L(nn.Module): pass\n"


def test_exports_are_told_apart_by_what_they_are() -> None:
    found = exports_of(METHOD + '__all__ = ["A", "C", "L", "f"]', "a.py")
    assert found == {"A": "method", "C": "method", "L": "layer", "f": "function"}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (METHOD, r"a\.py doesn't export A, C\. Name it in __all__"),
        (METHOD + '__all__ = ["A", "f"]', r"doesn't export C\."),
        (METHOD + '__all__ = ["A", "C", "g"]', r"exports g and defines no such"),
        ('def f(): pass\n__all__ = ["f"]', r"doesn't export a method\."),
    ],
)
def test_wrong_exports_are_refused(source: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        exports_of(source, "a.py")


def test_one_name_has_one_file(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text('class A(Method): pass\n__all__ = ["A"]')
    with pytest.raises(ValueError, match=r"one\.py and two\.py both export A\. Rename"):
        lists_of(tmp_path)


def test_long_imports_are_wrapped_and_empty_ones_left_out() -> None:
    names = [f"a_function_with_a_long_name_{i}" for i in range(4)]
    text = list_of({"a": dict.fromkeys(names, "function"), "b": {"B": "method"}}, "function", '"""Doc."""')
    assert "from cosmati.methods.a import (\n    a_function_with_a_long_name_0,\n" in text
    assert "methods.b" not in text
    assert max(map(len, text.splitlines())) <= 120
