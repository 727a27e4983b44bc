"""Convolution along the tokens of each row."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..array import Array
from ..broadcasting import check_ragged, mask_tail
from ..checks import check_dense, check_floating, check_integer, check_same_dtype, check_shape
from ..dispatch.operation import define_operation
from ..dtypes import accumulation_dtype
from ..records import record
from .row_chunks import map_rows
from .shift import has_neighbor

__all__ = ["conv1d"]


@record
class Conv1dCall:
    """A validated call of `conv1d`.

    Attributes
    ----------
    x, weight, bias, padding, groups, dilation
        See `conv1d`.
    """

    x: Array
    weight: Any
    bias: Any = None
    padding: str = "causal"
    groups: int = 1
    dilation: int = 1

    def __post_init__(self) -> None:
        x, weight = check_ragged("x", self.x), self.weight
        if x.ragged_dim != 0 or x.ndim != 3:
            raise ValueError(f"x: expected a ragged array (n, None, channels), got {x.shape}")
        check_floating("x", x.values)
        channels, groups = int(x.values.shape[1]), check_integer("groups", self.groups, 1)
        if channels % groups:
            raise ValueError(
                f"groups: expected a divisor of the {channels} channels of x, got {groups}"
            )
        check_dense("weight", weight, x.values)
        check_same_dtype("weight", weight, x)
        shape = tuple(weight.shape)
        if len(shape) != 3 or shape[1] != channels // groups or not shape[2] or shape[0] % groups:
            raise ValueError(
                f"weight: expected shape (out, {channels // groups}, width) with out a multiple of groups={groups} and "
                f"at least one position, as in torch.nn.Conv1d, got {shape}"
            )
        if self.bias is not None:
            check_dense("bias", self.bias, x.values)
            check_same_dtype("bias", self.bias, x)
            check_shape("bias", self.bias, shape[:1], "one number per output channel")
        if self.padding not in ("causal", "same"):
            raise ValueError(f"padding: expected 'causal' or 'same', got {self.padding!r}")
        check_integer("dilation", self.dilation, 1)

    @property
    def distances(self) -> list[int]:
        """The position, relative to the result, of the token that each entry of the kernel takes."""
        span = (self.weight.shape[2] - 1) * self.dilation
        before = span if self.padding == "causal" else span // 2
        return [i * self.dilation - before for i in range(self.weight.shape[2])]


def conv1d(
    x: Array,
    weight: Any,
    bias: Any = None,
    *,
    padding: str = "causal",
    groups: int = 1,
    dilation: int = 1,
    kernel: str | None = None,
) -> Array:
    """Convolve the tokens of each row; tokens before and after a row count as 0.

    The result has the rows of `x`. As in PyTorch, the kernel is not reversed. With as many groups
    as channels the convolution is depthwise, as in Mamba (Gu and Dao, 2023): it costs one
    multiplication per element and entry of the kernel.

    Parameters
    ----------
    x
        (n, None, channels) floating-point ragged array. Half precision is computed in float32.
    weight
        (out, channels / groups, width), the layout of ``torch.nn.Conv1d``, with the dtype of `x`.
    bias
        (out,) with the dtype of `x`, or None.
    padding
        "causal": the result at a token depends on this token and the tokens before it. "same": on
        tokens before and after it; with an even width one more token after it, as in PyTorch.
    groups
        Number of groups of channels that are convolved separately.
    dilation
        Distance of the tokens that adjacent entries of the kernel take.
    kernel
        The provider that must run the call; by default the first kernel that accepts.

    Returns
    -------
    Array
        (n, None, out) on the layout of `x`, with its dtype.

    Raises
    ------
    TypeError
        If `x` is not a ragged array of floating-point numbers, or an argument has another library
        or dtype.
    ValueError
        If a shape does not fit, or `padding`, `groups` or `dilation` is out of range.

    Examples
    --------
    >>> import numpy as np, scree
    >>> x = scree.from_lengths(np.asarray([[1.0], [2.0], [4.0], [8.0]]), [3, 1])
    >>> difference = np.asarray([[[-1.0, 1.0]]])
    >>> [row.ravel().tolist() for row in scree.conv1d(x, difference)]
    [[1.0, 1.0, 2.0], [8.0]]
    """
    options = {"padding": padding, "groups": groups, "dilation": dilation}
    return _conv1d.run({"x": x, "weight": weight, "bias": bias}, options, kernel)


@define_operation("conv1d", Conv1dCall)
def _conv1d(call: Conv1dCall) -> Array:
    # The temporary arrays have the channels of the result.
    share = -(-call.weight.shape[0] // max(call.weight.shape[1] * call.groups, 1))
    values = map_rows(partial(_convolve_rows, call), call.x, per_token=True, scale=share)
    return call.x.with_values(values)


def _convolve_rows(call: Conv1dCall, x: Array) -> Any:
    layout, xp = x.layout, x.layout.xp
    wide = accumulation_dtype(xp, x.dtype)
    weight = xp.astype(call.weight, wide, copy=False)
    values = xp.astype(mask_tail(x, x.values), wide, copy=False)
    # A token farther away than the longest row is in no row. A compiler would specialize on that.
    limit = None if layout.backend.is_compiling() else layout.max_length_bound
    taps = [(i, d) for i, d in enumerate(call.distances) if limit is None or abs(d) < limit]
    distances = [0, *(distance for _, distance in taps)]
    before, after = -min(distances), max(distances)
    # Slices of one padded array are views, so the backward pass keeps no copy per tap.
    values = _pad(xp, values, before, after, layout.device)
    out = None
    for i, distance in taps:
        start = before + distance
        product = _multiply(
            xp, values[start : start + layout.total, :], weight[:, :, i], call.groups
        )
        # The product is masked, not the values, for which the backward pass would keep a copy.
        mask = has_neighbor(layout, distance)
        product = product if mask is None else xp.where(mask[:, None], product, 0.0)
        out = product if out is None else out + product
        del product  # one array less while the next tap is computed
    if out is None:
        out = xp.zeros((layout.total, weight.shape[0]), dtype=wide, device=layout.device)
    if call.bias is not None:
        out = out + xp.astype(call.bias, wide, copy=False)
    return xp.astype(mask_tail(Array.from_layout(out, layout), out), x.dtype, copy=False)


def _pad(xp: Any, values: Any, before: int, after: int, device: Any) -> Any:
    """Return the values with tokens of 0 before and after them."""
    parts = [values]
    if before:
        shape = (before, values.shape[1])
        parts.insert(0, xp.zeros(shape, dtype=values.dtype, device=device))
    if after:
        parts.append(xp.zeros((after, values.shape[1]), dtype=values.dtype, device=device))
    return xp.concat(parts, axis=0) if len(parts) > 1 else values


def _multiply(xp: Any, values: Any, weight: Any, groups: int) -> Any:
    """Return (total, out) for values (total, channels) and one tap of the weight, (out, channels / groups)."""
    out, width = weight.shape
    if groups == 1:
        return values @ xp.permute_dims(weight, (1, 0))
    if width == 1 and out == groups:
        return values * weight[:, 0]
    total = values.shape[0]
    values = xp.permute_dims(xp.reshape(values, (total, groups, width)), (1, 0, 2))
    weight = xp.permute_dims(xp.reshape(weight, (groups, out // groups, width)), (0, 2, 1))
    return xp.reshape(xp.permute_dims(values @ weight, (1, 0, 2)), (total, out))
