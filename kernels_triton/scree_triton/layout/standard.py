"""The layout operations in PyTorch's own functions, for devices on which a kernel does not compile.

Every function takes the arguments of the function of the same name that launches kernels.
"""

from collections.abc import Sequence

import torch

from .scatter_add import ACC_DTYPES, ACC_TYPES


def pad(
    x: torch.Tensor,
    offsets: torch.Tensor,
    dim: int,
    length: int,
    left: bool,
    fill: float,
    with_mask: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows padded to a length, and the mask of their tokens."""
    begins, ends = offsets[:-1, None], offsets[1:, None]
    slots = torch.arange(length, device=x.device)
    tokens = ends - length + slots if left else begins + slots
    mask = (tokens >= begins) & (tokens < ends)
    padded = _take(x, torch.where(mask, tokens, -1).flatten(), dim, fill)
    padded = padded.unflatten(dim, mask.shape).movedim(dim, 0)
    return padded, mask if with_mask else mask.new_empty((0,))


def unpad(x: torch.Tensor, offsets: torch.Tensor, dim: int, total: int, left: bool) -> torch.Tensor:
    """Return the tokens of padded rows."""
    length, (rows, slots, has_row) = x.shape[dim + 1], _rows_of_tokens(offsets, total)
    if left:
        slots = slots + length - torch.diff(offsets, append=offsets[-1:])[rows]
    valid = has_row & (slots >= 0) & (slots < length)
    index = torch.where(valid, rows * length + slots, -1)
    return _take(x.movedim(0, dim).flatten(dim, dim + 1), index, dim)


def gather(x: torch.Tensor, index: torch.Tensor, distinct: bool) -> torch.Tensor:
    """Return the tokens at `index`; 0 for an index out of bounds."""
    return _take(x, index, 0)


def scatter_add(x: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """Return the sum of the tokens of each index."""
    valid = (index >= 0) & (index < size)
    out = x.new_zeros((size + 1, *x.shape[1:]), dtype=ACC_DTYPES[ACC_TYPES[x.dtype]])
    out.index_add_(0, torch.where(valid, index, size), x.to(out.dtype))
    return out[:size].to(x.dtype)


def scatter_unique(x: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """Scatter tokens to an index without duplicates."""
    valid = (index >= 0) & (index < size)
    out = x.new_zeros((size + 1, *x.shape[1:]))
    return out.index_copy_(0, torch.where(valid, index, size).long(), x)[:size]


def scatter_last(x: torch.Tensor, index: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Scatter tokens; `kept` is the token of each place, or -1."""
    return _take(x, kept, 0)


def gather_last(dy: torch.Tensor, index: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `scatter_last`."""
    is_kept = _take(kept, index, 0, -1) == torch.arange(index.shape[0], device=dy.device)
    return _take(dy, torch.where(is_kept, index, -1), 0)


def select(
    x: torch.Tensor,
    offsets: torch.Tensor,
    starts: torch.Tensor,
    dim: int,
    total: int,
    step: int,
    distinct: bool,
    fill: int = 0,
) -> torch.Tensor:
    """Return rows whose tokens are at `starts`, `starts + step` ... in x."""
    return _take(x, _sources(offsets, starts, total, step), dim, fill)


def select_backward(
    dy: torch.Tensor,
    shape: Sequence[int],
    offsets: torch.Tensor,
    starts: torch.Tensor,
    dim: int,
    step: int,
    distinct: bool,
) -> torch.Tensor:
    """Return the gradient of `select` for an x of this shape."""
    sources = _sources(offsets, starts, dy.shape[dim], step)
    return scatter_add(dy.movedim(dim, 0), sources, shape[dim]).movedim(0, dim)


def concat(xs: Sequence[torch.Tensor], offsets: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenate row i of each array."""
    total, out = sum(x.shape[dim] for x in xs), None
    for x, index in zip(xs, _scatter_indices(offsets, [x.shape[dim] for x in xs]), strict=True):
        part = scatter_unique(x.movedim(dim, 0), index, total)
        out = part if out is None else out + part
    assert out is not None
    return out.movedim(0, dim)


def split(
    dy: torch.Tensor, offsets: Sequence[torch.Tensor], totals: Sequence[int], dim: int
) -> list[torch.Tensor]:
    """Return the arrays whose rows were concatenated."""
    return [_take(dy, index, dim).contiguous() for index in _scatter_indices(offsets, totals)]


def _take(x: torch.Tensor, index: torch.Tensor, dim: int, fill: float = 0) -> torch.Tensor:
    """Return the entries at `index` along an axis; `fill` for an index out of bounds."""
    size = x.shape[dim]
    if size == 0:
        return x.new_full((*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :]), fill)
    valid = (index >= 0) & (index < size)
    taken = x.index_select(dim, index.clamp(0, size - 1))
    axes = valid.view(*(-1 if axis == dim else 1 for axis in range(x.ndim)))
    return torch.where(axes, taken, torch.full((), fill, dtype=x.dtype, device=x.device))


def _rows_of_tokens(
    offsets: torch.Tensor, total: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return per token its row, its position there, and whether it belongs to a row."""
    tokens, count = torch.arange(total, device=offsets.device), offsets.shape[0] - 1
    rows = torch.searchsorted(offsets[1:].long().contiguous(), tokens, right=True)
    clipped = rows.clamp(max=max(count - 1, 0))
    return clipped, tokens - offsets[clipped], rows < count


def _sources(offsets: torch.Tensor, starts: torch.Tensor, total: int, step: int) -> torch.Tensor:
    """Return per token of a selection the token that it copies, or -1."""
    if starts.shape[0] == 0:
        return offsets.new_full((total,), -1)
    rows, positions, has_row = _rows_of_tokens(offsets, total)
    return torch.where(has_row, starts[rows] + positions * step, -1)


def _scatter_indices(offsets: Sequence[torch.Tensor], totals: Sequence[int]) -> list[torch.Tensor]:
    """Return per array the index of each token in the concatenation; -1 for the tail."""
    starts, indices = sum(x.long() for x in offsets), []
    for x, total in zip(offsets, totals, strict=True):
        rows, positions, has_row = _rows_of_tokens(x, total)
        indices.append(torch.where(has_row, starts[rows] + positions, -1))
        starts = starts + torch.diff(x, append=x[-1:])
    return indices
