"""`make mutants`: what is changed and what isn't, what is drawn, which tests are chosen, and a whole run on a toy."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tools.mutants import line_map
from tools.mutants.__main__ import _survivors
from tools.mutants.line_map import tree_digest
from tools.mutants.nearest import FEW, choose
from tools.mutants.nearest import Test as MappedTest
from tools.mutants.operators import IMPORTED, Mutant, find
from tools.mutants.sample import draw, mutants_of, read_equivalents
from tools.mutants.sandbox import Sandbox

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]


def changes(source: str) -> set[str]:
    """Every change of a source, as the first line that differs."""
    text = source.encode()
    return {mutant.difference(text)[1] for mutant in find(text, "page.py") if mutant.is_real(text)}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", {"a <= b", "a >= b"}),
        ("a == b", {"a != b"}),
        ("a is not None", {"a is None"}),
        ("a not in b", {"a in b"}),
        ("a < b < c", {"a <= b < c", "a >= b < c", "a < b <= c", "a < b >= c"}),
        ("a + (b - c)", {"a - (b - c)", "a + (b + c)"}),
        (
            "a * b // c % d ** e",
            {"a // b // c % d ** e", "a * b * c % d ** e", "a * b // c // d ** e", "a * b // c % d * e"},
        ),
        ("a and b or c", {"a or b or c", "a and b and c"}),
        ("x = 7", {"x = 8", "x = 6"}),
        ("x = 0", {"x = 1"}),
        ("x = 0.5", set()),
        ("x = True", {"x = False"}),
        ("x = not (a or b)", {"x = (a or b)", "x = not (a and b)"}),
        ("y = x[a:b]", {"y = x[:b]", "y = x[a:]"}),
        ("x = f(a, b, c=d)", {"x = f(b, a, c=d)"}),
        ("x = f(*a, b)", set()),
        ("x = min(a, b)", {"x = max(a, b)"}),
        ("x = a.any()", {"x = a.all()"}),
        ("x = 1 if a else b", {"x = 2 if a else b", "x = 0 if a else b", "x = 1 if not (a) else b"}),
        ("x = [a for a in b if a.c]", {"x = [a for a in b if not (a.c)]"}),
        ("a.b = c", {"pass"}),
        ("a[b] = c", {"pass"}),
        ("a = c", set()),
        ("f()", {"pass"}),
        ("a += b", {"a -= b", "pass"}),
        ("def f():\n    return x", {"return None"}),
        ("def f():\n    return None", set()),
        ("def f(a=1):\n    g()", {"def f(a=2):", "def f(a=0):", "pass"}),
        ("if a:\n    raise E", {"if not (a):", "pass"}),
        ("if a:\n    msg = 'no'\n    raise E(msg)", {"if not (a):", "pass"}),
        ("if a:\n    b = 'no'\nelse:\n    raise E", {"if not (a):"}),
        ("if not a:\n    b = c", {"if a:"}),
        ("x = 'é'; y = 1", {"x = 'é'; y = 2", "x = 'é'; y = 0"}),
        ("f(\n    a,\n    b,\n)", {"b,", "pass"}),
    ],
)
def test_every_change_of_a_line(source: str, expected: set[str]) -> None:
    assert changes(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""1 < 2."""',
        "x: Literal[1] = y",
        "def f(a: Literal[1]) -> Literal[2]: ...",
        "Pair: TypeAlias = A[1] | B",
        "__all__ = [f(1, 2)]",
        "if TYPE_CHECKING:\n    import a\n    a.b = 1",
        "raise ValueError(f(1, 2) + 3)",
        "msg = f(1, 2)",
        "x = ValueError(1, 2)",
        'x = f"{a + 1:03d}"',
        "logger.info(a, b)",
        "assert a < 1",
        "x = zip(a, strict=True)",
    ],
)
def test_what_only_people_read_is_left_alone(source: str) -> None:
    assert changes(source) == set()


def lines(*numbers: int) -> int:
    return sum(1 << number for number in numbers)


def test_a_mutant_knows_what_is_near_and_whether_it_runs_at_import() -> None:
    text = "A = 10\n\nclass B:\n    c = 20\n\n    def d(self, e=30):\n        if e:\n            return 40\n\n"
    text += "def f():\n    A"
    found = {mutant.edit[2]: mutant for mutant in find(text.encode(), "page.py") if mutant.kind == "off by one"}
    function, file = lines(7, 8), lines(7, 8, 11) | IMPORTED
    assert (found["11"].near, found["11"].at_import) == ((lines(11), file), True)
    assert (found["21"].near, found["21"].at_import) == ((0, function, file), True)
    assert (found["31"].near, found["31"].at_import) == ((0, function, function, file), True)
    assert (found["41"].near, found["41"].at_import) == ((lines(8), function, function, file), False)


def test_a_sample_is_even_over_lines_and_fixed_by_its_seed() -> None:
    source = b"x = 5\nf(1, 2, 3, 4, 5, 6, 7, 8)\ny = a < b\n" * 40
    mutants = list(find(source, "page.py"))
    first = [mutant.line for mutant, _ in zip(draw(mutants, "seed"), range(120), strict=False)]
    assert sorted(first) == list(range(1, 121))
    assert [m.key for m in draw(mutants, "seed")] == [m.key for m in draw(mutants, "seed")]
    assert [m.key for m in draw(mutants, "seed")] != [m.key for m in draw(mutants, "other")]
    assert Counter(m.key for m in draw(mutants, "seed")) == Counter(m.key for m in mutants)


def mutant(*, at_import: bool = False, own: int = 0) -> Mutant:
    path, near = "src/cosmati/core/page.py", (own or lines(5, 6), lines(*range(3, 10)), lines(*range(1, 21)))
    return Mutant(path=path, line=5, near=near, at_import=at_import, kind="not", edit=(0, 0, ""))


def mapped(name: str, work: float, *ran: int, outcome: str = "passed") -> MappedTest:
    bits = lines(*ran)
    return MappedTest(name=name, work=work, seconds=9.0, outcome=outcome, lines={"src/cosmati/core/page.py": bits})


def names(tests: list[MappedTest]) -> list[str]:
    return [test.name for test in tests]


def test_the_nearest_tests_run_the_statement_and_stand_in_its_room() -> None:
    tests = [
        mapped("tests/optim/test_a.py::quick", 0.1, 6),
        mapped("tests/core/test_b.py::slow", 2, 5, 8),
        mapped("tests/core/test_b.py::quick", 1, 5),
        mapped("tests/core/test_b.py::fails", 1, 5, outcome="failed"),
        mapped("tests/core/test_b.py::elsewhere", 1, 4, 7),
        mapped("tests/test_house.py::everything", 1, 1),
    ]
    chosen = names(choose(mutant(), tests))
    assert chosen == ["tests/core/test_b.py::quick", "tests/core/test_b.py::slow", "tests/optim/test_a.py::quick"]
    assert names(choose(mutant(at_import=True), tests)) == ["tests/test_house.py::everything", *chosen]


def test_a_line_that_no_test_runs_gets_those_of_its_function_then_of_its_file_then_of_its_room() -> None:
    function, file = mapped("tests/optim/a.py::f", 1, 3), mapped("tests/core/a.py::f", 1, 1)
    room, golden = mapped("tests/core/b.py::f", 1), mapped("tests/golden/a.py::f", 1)
    far = mapped("tests/train/a.py::f", 1)
    assert choose(mutant(), [far, room, file, function]) == [function]
    assert choose(mutant(), [far, room, file]) == [file]
    assert choose(mutant(), [far, golden, room]) == [room, golden]
    assert choose(mutant(own=lines(1, 15)), [far, room, file, function]) == [file]


def test_one_case_of_every_test_comes_before_the_second_of_any() -> None:
    cases = [mapped(f"tests/core/a.py::f[{n}]", 1, 5) for n in range(4)]
    other = mapped("tests/core/a.py::g", 2, 5)
    assert choose(mutant(), [*cases, other], work=4, few=4) == [cases[0], cases[1], other]
    assert choose(mutant(), [mapped("tests/core/a.py::slow", 100, 5)], work=4, few=0) != []


def test_each_line_of_the_file_is_run_by_two_tests_before_any_others() -> None:
    """Thousands make an object, and few read the attribute that isn't set."""
    makers = [mapped(f"tests/core/a.py::f{n}", 1, 5) for n in range(9)]
    readers = [mapped(f"tests/core/b.py::{name}", work, 5, 12, 13) for name, work in (("g", 3), ("h", 5), ("i", 4))]
    chosen = choose(mutant(), [*makers, *readers], work=10, few=0)
    assert chosen == [*makers[:3], readers[0], readers[2]]
    assert choose(mutant(), [*makers, mapped("tests/core/b.py::g", 3, 12)], work=3, few=0) == makers[:3]
    house = mapped("tests/test_house.py::everything", 8)
    assert choose(mutant(at_import=True), [*readers, *makers, house], work=10, few=0) == [house, *makers[:2]]


def test_few_tests_all_run_whatever_they_take() -> None:
    slow = [mapped(f"tests/core/a.py::f[{n}]", 1000, 5) for n in range(FEW)]
    assert choose(mutant(), slow) == slow
    assert choose(mutant(), [*slow, mapped("tests/core/a.py::g", 1, 5)])[0].work == 1
    assert len(choose(mutant(), [*slow, mapped("tests/core/a.py::g", 1, 5)])) == 1


def test_survivors_are_found_again_beside_changes_that_change_nothing(tmp_path: Path) -> None:
    """Of `pow(a, a)` the arguments may be swapped: that is no other program, and no line differs."""
    path = "src/cosmati/core/page.py"
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text("def most(a, b):\n    return pow(a, a), a < b\n")
    wanted = {"path": path, "before": "return pow(a, a), a < b", "after": "return pow(a, a), a <= b"}
    results = [wanted | {"state": "survived"}, wanted | {"after": "return pow(a, a), a >= b", "state": "killed"}]
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, results)))
    found = list(_survivors(list(mutants_of(tmp_path, ["core"])), tmp_path / "results.jsonl", tmp_path))
    assert [one.edit[2].strip() for one in found] == ["<="]


TOY = {
    "pyproject.toml": '[tool.pytest.ini_options]\naddopts = ["--import-mode=importlib"]\n',
    "src/cosmati/__init__.py": "",
    "src/cosmati/core/clamp.py": (
        "TOP = {False: 3.0}[False]\n\n\ndef clamp(x):\n    if x > TOP:\n        return TOP\n    return x\n"
    ),
    "tests/core/test_clamp.py": (
        "from cosmati.core.clamp import clamp\n\n\ndef test_broken():\n    assert clamp(5.0) == 5.0\n\n\n"
        "def test_clamp():\n    assert (clamp(5.0), clamp(1.0)) == (3.0, 1.0)\n"
    ),
    "tools/equivalent_mutants.toml": (
        '[[equivalent]]\nfile = "src/cosmati/core/clamp.py"\nline = "if x > TOP:"\nbecomes = "if x >= TOP:"\n'
        'reason = "at x = TOP both give TOP"\n'
    ),
}


@pytest.mark.timeout(400)
def test_a_toy_with_one_surviving_mutant(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("coverage", reason="the extra `mutants` isn't installed")
    from tools.mutants.__main__ import main

    for name, text in TOY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    arguments = ["--seed", "1", "--rooms", "core", "--num", "30", "--jobs", "1"]
    assert main(arguments, tmp_path) == 0
    printed = capfd.readouterr().out.splitlines()
    assert printed[-1] == "mutants: 3 of 4 killed", printed
    assert "  tests/core/test_clamp.py::test_broken" in printed  # it fails without a mutant, so it can't kill
    assert sum("breaks the import" in line for line in printed) == 2  # the key, the index
    assert printed[-8].startswith("survived: src/cosmati/core/clamp.py:5 comparison (1 tests, ")
    assert printed[-7:-3] == [
        "  - if x > TOP:",
        "  + if x >= TOP:",
        "  equivalent: at x = TOP both give TOP",
        "",
    ]
    tests = json.loads((tmp_path / ".mutants/map.json").read_text())["tests"]
    (known,) = [test for test in tests if test["name"].endswith("test_clamp")]
    ran = int(known["lines"]["src/cosmati/core/clamp.py"], 16)
    assert ran == lines(5, 6, 7) | IMPORTED
    kept = sorted((tmp_path / ".mutants").glob("results-*.jsonl"))
    before = kept[0].read_text()
    assert main(arguments, tmp_path) == 0  # all is known: nothing runs again
    assert (len(kept), kept[0].read_text()) == (1, before)
    assert capfd.readouterr().out.splitlines()[-1] == "mutants: 3 of 4 killed"


@pytest.mark.timeout(400)
def test_a_module_against_its_own_tests(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from tools.mutants.module import main

    for name, text in TOY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    own, test = "src/cosmati/core/clamp.py", "tests/core/test_clamp.py"
    assert main([own, test, "--jobs", "1"], tmp_path) == 2
    assert "these fail without a mutant:\n  tests/core/test_clamp.py::test_broken" in capfd.readouterr().out
    assert main([own, f"{test}::test_clamp", "--all", "--jobs", "1"], tmp_path) == 1
    printed = capfd.readouterr().out.splitlines()
    assert printed[-1] == "mutants: 3 of 4 killed", printed
    assert "  + if x >= TOP:" in printed
    assert main([own, f"{test}::test_clamp", "--all", "--lines", "6-7", "--jobs", "1"], tmp_path) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "mutants: 2 of 2 killed"
    with pytest.raises(SystemExit, match=r"No tests could be collected from tests/core/test_none\.py"):
        main([own, "tests/core/test_none.py"], tmp_path)
    with pytest.raises(SystemExit, match=r"tools/none\.py is no file of src/cosmati"):
        main(["tools/none.py", f"{test}::test_clamp"], tmp_path)


SHARED = """
import pytest

from cosmati.core.clamp import clamp
from tests.processes import run_python


@pytest.fixture(scope="module")
def clamped():
    return clamp(5.0)


def test_that_has_the_fixture_made(clamped):
    assert clamped == 3.0 > clamp(1.0)


def test_that_finds_it_made(clamped):
    assert clamped < 4


def test_that_has_the_server_begun():
    assert run_python(["-c", "pass"]).returncode == 0


def test_that_forks():
    assert run_python(["-c", "from cosmati.core.clamp import clamp; assert clamp(1.0) == 1.0"]).returncode == 0
"""


@pytest.mark.timeout(400)
def test_what_tests_share_or_have_run_in_forks_is_theirs(tmp_path: Path) -> None:
    pytest.importorskip("coverage", reason="the extra `mutants` isn't installed")
    forks = {"tests/__init__.py": "", "tests/processes.py": (ROOT / "tests/processes.py").read_text()}
    for name, text in {**TOY, **forks, "tests/core/test_shared.py": SHARED}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / ".mutants").mkdir()
    with Sandbox(tmp_path) as sandbox:
        found = line_map.read_or_build(tmp_path, sandbox, tmp_path / ".mutants", 1)
    ran = {one.name.rpartition("::")[2]: one.lines.get("src/cosmati/core/clamp.py", 0) & ~IMPORTED for one in found}
    assert ran["test_that_has_the_fixture_made"] == lines(5, 6, 7), "and what it runs itself"
    assert ran["test_that_finds_it_made"] == lines(5, 6)
    assert ran["test_that_has_the_server_begun"] == 0
    assert ran["test_that_forks"] & lines(5, 6, 7) == lines(5, 7)
    (forking,) = [one for one in found if one.name.endswith("test_that_forks")]
    assert forking.work >= forking.seconds > 0


def test_the_list_of_equivalent_mutants_fits_the_source() -> None:
    equivalents = read_equivalents(ROOT / "tools" / "equivalent_mutants.toml")
    listed = {(e.file, e.line, e.becomes) for e in equivalents}
    found = set()
    for file in {e.file for e in equivalents}:
        source = (ROOT / file).read_bytes()
        text = [line.strip() for line in source.decode().splitlines()]
        near = (mutant for mutant in find(source, file) if any(text[mutant.line - 1] == line for _, line, _ in listed))
        found |= {(file, *mutant.difference(source)) for mutant in near if mutant.is_real(source)}
    assert listed - found == set(), "These mutants don't exist any more: take them from the list."


def test_an_unknown_room_and_an_equivalent_without_a_reason_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no room src/cosmati/attic"):
        list(mutants_of(ROOT, ["attic"]))
    listed = tmp_path / "equivalent.toml"
    listed.write_text('[[equivalent]]\nfile = "a"\nline = "b"\nbecomes = "c"\nreason = " "\n')
    with pytest.raises(ValueError, match="needs a reason"):
        read_equivalents(listed)


def test_another_environment_is_mapped_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a package is absent, tests are skipped."""
    before = tree_digest(tmp_path)
    assert tree_digest(tmp_path) == before
    monkeypatch.setattr(line_map, "distributions", list)
    assert tree_digest(tmp_path) != before
