"""Python files outside of any package as modules: a study's own file, in this process and in those that run for it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from cosmati.errors import RunError

# A name of its own: a file called json.py mustn't stand in for the standard library's.
_PREFIX = "file_"


def load_module(path: Path) -> ModuleType:
    """Run a Python file as a module.

    Raises:
        RunError: there is no such file, or it raises an error.
    """
    if not path.is_file() or path.suffix != ".py":
        msg = f"{path} is no Python file. Give the path of a .py file."
        raise RunError(msg)
    spec = importlib.util.spec_from_file_location(f"{_PREFIX}{path.stem}", path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    # Dataclasses look their module up by name.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        msg = f"{path} can't be read: {type(error).__name__}: {error}"
        raise RunError(msg) from error
    finally:
        sys.path.pop(0)
    return module


def files_behind(pickled: bytes) -> tuple[Path, ...]:
    """Return the files, loaded by `load_module`, that a pickle takes functions from: who reads it loads them before."""
    modules = {name: module for name, module in sys.modules.items() if name.startswith(_PREFIX)}
    return tuple(
        Path(module.__file__).resolve()
        for name, module in modules.items()
        if module.__file__ and name.encode() in pickled
    )


def load_once(path: Path) -> None:
    """Run a Python file as a module where this process hasn't."""
    loaded = sys.modules.get(f"{_PREFIX}{path.stem}")
    if loaded is None or not loaded.__file__ or Path(loaded.__file__).resolve() != path:
        load_module(path)
