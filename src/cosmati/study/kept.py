"""Keep what was last worked out of a study: a page asks for the same comparisons from several places."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

from cosmati.records.study import StudyRecord

P = ParamSpec("P")
T = TypeVar("T")


class _Same:
    """A study that equals itself alone: comparing two by their content would take as long as the work."""

    def __init__(self, study: StudyRecord) -> None:
        self.study = study

    def __hash__(self) -> int:
        return id(self.study)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.study is other.study


def kept(num: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Keep the last `num` answers of a function whose first argument is a study.

    The other arguments can be hashed, and nobody changes an answer. A study is held as long as an answer about it is.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @lru_cache(maxsize=num)
        def answer(same: _Same, *rest: Any, **named: Any) -> Any:  # noqa: ANN401  (whatever the function takes)
            return cast("Callable[..., Any]", function)(same.study, *rest, **named)

        @wraps(function)
        def asked(*args: P.args, **named: P.kwargs) -> T:
            study, *rest = args
            return cast("T", cast("Callable[..., Any]", answer)(_Same(cast("StudyRecord", study)), *rest, **named))

        return asked

    return decorate
