"""Numbers brought into a type of numbers: whole ones exactly, or not at all."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def as_exact(value: object, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return numbers in a type that holds them. Fractions are rounded to it, and what is finite stays finite.

    Args:
        value: an array, a number, or lists of numbers.
        dtype: of the same kind, or a wider one: no fraction becomes a whole number, and no negative type unsigned.

    Raises:
        ValueError: it doesn't hold them; the message says why.
    """
    array = np.asarray(value)
    is_array = isinstance(value, np.ndarray | np.generic)
    if is_array and array.dtype == dtype:
        return array
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ValueError(f"its dtype is {array.dtype}")
    with np.errstate(over="ignore"):
        found = array.astype(dtype)
    if dtype.kind in "iu" and array.dtype.kind in "iu" and array.size:
        limits, least, most = np.iinfo(dtype), int(array.min()), int(array.max())
        if not limits.min <= least <= most <= limits.max:
            raise ValueError(f"it holds {limits.min} to {limits.max}, and has {least} to {most}")
    elif dtype.kind == "f":
        # Lists of mixed numbers are rounded by NumPy before anybody sees them.
        _refuse_rounded(array if is_array else np.asarray(value, object), found)
        if array.dtype.kind == "f" and (np.isfinite(array) & ~np.isfinite(found)).any():
            raise ValueError(f"it has a number beyond {np.finfo(dtype).max}")
    return found


def _refuse_rounded(given: NDArray[Any], found: NDArray[Any]) -> None:
    """Refuse whole numbers that became others as floats."""
    if given.dtype.kind not in "iuO" or not (np.abs(found) >= 2.0 ** (np.finfo(found.dtype).nmant + 1)).any():
        return
    for one, number in zip(given.reshape(-1).tolist(), found.reshape(-1).tolist(), strict=True):
        if isinstance(one, int | np.integer) and int(one) != number:
            raise ValueError(f"it doesn't hold {one} exactly")
