"""What a sparse tensor consists of."""

from __future__ import annotations

import torch
from torch import Tensor

_BY_ROWS = ("crow_indices", "col_indices", "values")
_BY_COLUMNS = ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: _BY_ROWS,
    torch.sparse_bsr: _BY_ROWS,
    torch.sparse_csc: _BY_COLUMNS,
    torch.sparse_bsc: _BY_COLUMNS,
}


def sparse_parts(tensor: Tensor) -> list[Tensor]:
    """Return indices and values, dense, which take no more memory than the tensor; none where it isn't sparse.

    Equal places of a COO tensor are summed first, so that equal ones have equal parts.
    """
    names = _PARTS.get(tensor.layout, ())
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
    return [getattr(tensor, name)() for name in names]
