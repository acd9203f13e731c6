"""What is launched: a script, or a recipe that `cosmati train` trains."""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cosmati.errors import RunError
from cosmati.launch.engine import RankProgram

JOB = "{job}"
"""In an argument: the job's id."""
_FOLDER = "--run-folder"
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def program_of(
    file: str,
    arguments: Sequence[str] = (),
    *,
    settings: Sequence[str] = (),
    run_folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> RankProgram:
    """Return what every rank is to run; the file is read, and not run.

    Args:
        file: a script, or `FILE[:FUNCTION]` with a function that returns a Recipe (`recipe` where none is named).
        arguments: a script's.
        settings: a recipe's, `NAME=VALUE`.
        run_folder: a recipe's; None is `runs/ID`.
        environment: what is set besides this process's environment.

    Raises:
        RunError: there's no such file, or it's a script that is given a recipe's settings, or the other way round.
    """
    if other := [word for word in arguments if not isinstance(word, str)]:
        raise RunError(f"A script's arguments are text, and {other[0]!r} isn't. Write it as on a command line: '1'.")
    path, colon, function = file.partition(":")
    is_recipe = _defines(Path(path), function or "recipe")
    if colon and not is_recipe:
        raise RunError(f"{path} has no function {function!r} that returns a recipe. Name one of its own: {path}:NAME.")
    if is_recipe and arguments:
        told = " ".join(arguments)
        msg = f"{path} is a recipe, and takes no arguments ({told}). Change its settings: --set NAME=VALUE."
        raise RunError(msg)
    if not is_recipe and (settings or run_folder is not None):
        told = "--set" if settings else "--run-folder"
        msg = (
            f"{path} is a script (it has no function recipe()), and {told} is for recipes. Give a script arguments of "
            f"its own after --, and a run folder by its RunConfig."
        )
        raise RunError(msg)
    folder = Path.cwd()
    if not is_recipe:
        command = (str(Path(path).absolute()), *arguments)
    else:
        more = [word for setting in settings for word in ("--set", setting)]
        where = (folder / "runs" / JOB if run_folder is None else run_folder).absolute()
        command = ("-m", "cosmati", "train", f"{Path(path).absolute()}{colon}{function}", _FOLDER, str(where), *more)
    return RankProgram(command=command, folder=folder, python=Path(sys.executable), environment=dict(environment or {}))


def of_job(program: RankProgram, job_id: str) -> RankProgram:
    """Return a job's program: `{job}` in its arguments is the job's id; in the place of its file it's a name."""
    first = 1 + (program.command.index(_FOLDER) if program.command[0] == "-m" else 0)
    arguments = (word.replace(JOB, job_id) for word in program.command[first:])
    return dataclasses.replace(program, command=(*program.command[:first], *arguments))


def folder_in_name_of(program: RankProgram, job_id: str) -> Path | None:
    """Return the run folder that a recipe's program names after its job; None where it has another one, or says it."""
    if program.command[0] != "-m" or JOB not in (told := program.command[program.command.index(_FOLDER) + 1]):
        return None
    return Path(told.replace(JOB, job_id))


def in_own_folder(program: RankProgram) -> RankProgram:
    """Return a recipe's program with a run folder of the job's own, beside the one that it was given."""
    if program.command[0] != "-m":  # a script, whose arguments are its own
        return program
    place = program.command.index(_FOLDER) + 1
    own = str(Path(program.command[place]).parent / JOB)
    return dataclasses.replace(program, command=(*program.command[:place], own, *program.command[place + 1 :]))


def _defines(path: Path, function: str) -> bool:
    """Return whether a file defines a function, or imports something of that name."""
    try:
        tree = ast.parse(path.read_bytes())
    except OSError as error:
        raise RunError(f"{path} can't be read: {error.strerror}. Give a script or a recipe's file.") from error
    except (SyntaxError, ValueError) as error:
        raise RunError(f"{path} is no Python that could be run: {error}. Mend it, and launch it again.") from error
    return function in {name for statement in _statements(tree) for name in _names_in(statement)}


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield what stands at a file's own level, also within `if`, `try`, `with` and loops; not a script's main part."""
    for node in ast.iter_child_nodes(tree):
        is_main = isinstance(node, ast.If) and any(getattr(one, "id", "") == "__name__" for one in ast.walk(node.test))
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case) and not isinstance(node, _SCOPES):
            yield from () if is_main else _statements(node)


def _names_in(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {one.asname or one.name for one in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {
        one.id
        for target in targets
        for one in ast.walk(target)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    }
