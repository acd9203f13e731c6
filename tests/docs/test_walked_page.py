"""What walks through a page notices what isn't so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.docs.walked_page import blocks_of, walk

PAGE = """
# A page

Save this as `parts/one.py`:

```python
NUMBER = 3
```

```python
from parts.one import NUMBER

print("a number,", NUMBER)
```

```text
a number, ...
```

```sh
printf 'one\\ntwo\\n'
```

```text
one
two
```

```
not run
```
"""


def walked(text: str, folder: Path) -> None:
    (folder / "page.md").write_text(text)
    (folder / "empty").mkdir(exist_ok=True)
    walk(folder / "page.md", folder / "empty")


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")


def test_files_are_saved_code_and_commands_run_and_results_compared(tmp_path: Path) -> None:
    assert [block.file for block in blocks_of(PAGE)] == ["parts/one.py", "", "", "", ""]
    walked(PAGE, tmp_path)
    assert "parts.one" not in sys.modules
    assert str(tmp_path / "empty") not in sys.path


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("a number, ...\n", "another number, ...\n"),
        ("one\ntwo\n```\n\n```\n", "one\n```\n\n```\n"),
        ("printf", "false; printf"),
        ("```text\none\ntwo", "```text\nError: one"),
        ('print("a', 'raise ValueError("a'),
    ],
)
def test_what_is_not_so_is_noticed(tmp_path: Path, right: str, wrong: str) -> None:
    assert right in PAGE
    with pytest.raises((AssertionError, ValueError)):
        walked(PAGE.replace(right, wrong), tmp_path)


def test_a_command_that_should_fail_is_compared_by_its_error(tmp_path: Path) -> None:
    failing = "```sh\necho 'Error: no such thing' >&2; exit 1\n```\n\n```text\nError: no ... thing\n```\n"
    walked(failing, tmp_path)
    with pytest.raises(AssertionError, match="line 5"):
        walked(failing.replace("no ...", "some ..."), tmp_path)
