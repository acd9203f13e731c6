"""Python files outside of any package as modules: a study's own file, in this process and in those that run for it."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from cosmati.errors import RunError

# A name of its own: a file called json.py mustn't stand in for the standard library's.
_PREFIX = "file_"


class _AsWritten(SourceFileLoader):
    """Compiles a file each time: on a full disk Python may leave half of a compiled one, and read that ever after."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def load_module(path: Path) -> ModuleType:
    """Run a Python file as a module. What lies beside it can be imported, also later and by processes of its own.

    Raises:
        RunError: there is no such file, or it raises an error.
    """
    if not path.is_file() or path.suffix != ".py":
        msg = f"{path} is no Python file. Give the path of a .py file."
        raise RunError(msg)
    name = f"{_PREFIX}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_AsWritten(name, str(path)))
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent.resolve())
    sys.path.insert(0, folder)
    # Dataclasses look their module up by name.
    sys.modules[spec.name] = module
    keeps_none, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # see `_AsWritten`; for what lies beside it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        msg = f"{path} can't be read: {type(error).__name__}: {error}"
        raise RunError(msg) from error
    finally:
        sys.dont_write_bytecode = keeps_none
        if folder in sys.path:  # the file may have changed it
            sys.path.remove(folder)
    # For what functions import when they're called. At the end: it mustn't stand in for what is installed.
    if folder not in sys.path:
        sys.path.append(folder)
    return module


def call_of(file: str, kind: type, default: str) -> object:
    """Call the function that `FILE[:name]` names, without arguments, and check what it returns.

    Raises:
        RunError: no such file or function, or it returns something else.
    """
    path, _, name = file.partition(":")
    name = name or default
    module = load_module(Path(path))
    function = getattr(module, name, None)
    if not callable(function):
        own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        msg = f"{path} has no function {name!r}. It has {', '.join(own) or 'none'}: name one as {path}:NAME."
        raise RunError(msg)
    made = function()
    if not isinstance(made, kind):
        msg = f"{name} in {path} returns a {type(made).__name__}, and a {kind.__name__} is needed."
        raise RunError(msg)
    return made


def files_behind(pickled: bytes) -> tuple[Path, ...]:
    """Return the files, loaded by `load_module`, that a pickle takes functions from: who reads it loads them before.

    A function of a module that lies beside such a file counts too: loading the file finds what it's called there.
    """
    named = [name for name in list(sys.modules) if name.encode() in pickled]
    folders = {folder for name in named if (file := _file_of(name)) for folder in file.parents}
    found = [
        (name, file) for name in list(sys.modules) if name.startswith(_PREFIX) and (file := _file_of(name)) is not None
    ]
    return tuple(file for name, file in found if name in named or file.parent in folders)


def _file_of(name: str) -> Path | None:
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file).resolve() if isinstance(file, str) else None


def load_once(path: Path) -> None:
    """Run a Python file as a module where this process hasn't."""
    loaded = sys.modules.get(f"{_PREFIX}{path.stem}")
    if loaded is None or not loaded.__file__ or Path(loaded.__file__).resolve() != path:
        load_module(path)
