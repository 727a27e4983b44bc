"""The ragged array: packed `values` and `offsets`, frozen, with the operators of the standard."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from . import backends, checks, display, layout


@dataclass(frozen=True, eq=False, repr=False)
class Array:
    """Rows of different lengths, end to end in one dense buffer.

    Parameters
    ----------
    values
        Dense array of any library that follows the Array API standard, all rows end to end along `ragged_dim`.
    offsets
        (n + 1,) int32 or int64 array of the same library and device, ``[0, L0, L0 + L1, ...]``; what FlashAttention calls
        ``cu_seqlens``. Kept as it is, never copied.
    ragged_dim
        The axis of `values` along which the rows lie.
    max_length
        A bound on the longest row, a Python integer. It makes shapes static under ``jax.jit`` and ``torch.compile`` and on
        devices whose memory is not read for free.

    Raises
    ------
    TypeError
        If values and offsets are not arrays of one library, or offsets are not int32 or int64.
    ValueError
        If a shape does not fit or, where reading them is free, if the offsets do not start at 0, fall, or do not end at the
        number of tokens. Elsewhere `validate` checks that on request.

    Examples
    --------
    >>> import numpy as np, scree
    >>> arr = scree.Array(np.arange(5.0), np.asarray([0, 2, 2, 5], dtype=np.int32))
    >>> arr.shape, arr.lengths.tolist()
    ((3, None), [2, 0, 3])
    >>> (arr * 10)[2]
    array([20., 30., 40.])
    """

    values: Any
    offsets: Any
    ragged_dim: int = 0
    max_length: int | None = None

    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None  # NumPy arrays leave mixed operators to this class

    def __post_init__(self) -> None:
        values, offsets = self.values, self.offsets
        lib = backends.backend(values, "values")
        checks.dense("offsets", offsets, values)
        if values.ndim == 0:
            raise ValueError("values: expected at least one axis, got a 0-d array")
        checks.integer("ragged_dim", self.ragged_dim, 0, values.ndim, ", the axes of values")
        if offsets.ndim != 1 or offsets.shape[0] < 1:
            raise ValueError(
                f"offsets: expected one axis of n + 1 entries, got shape {tuple(offsets.shape)}; an empty batch has [0]"
            )
        if offsets.dtype != lib.xp.int32 and offsets.dtype != lib.xp.int64:
            raise TypeError(
                f"offsets: expected int32 or int64, got {offsets.dtype}; convert them with astype"
            )
        if offsets.shape[0] == 1 and self.total_length:
            raise ValueError(
                f"offsets: expected rows for {self.total_length} tokens, got none; an empty batch has no tokens"
            )
        if self.max_length is not None:
            object.__setattr__(self, "max_length", checks.integer("max_length", self.max_length, 0))
        host = self.layout.host
        if host is not None:
            self._check(host)

    @classmethod
    def _restore(cls, values: Any, offsets: Any, ragged_dim: int, max_length: int | None) -> Array:
        """An array of parts that are known to fit (or, inside a transform, that are no arrays at all): no checks."""
        self = object.__new__(cls)
        self.__dict__.update(
            values=values, offsets=offsets, ragged_dim=ragged_dim, max_length=max_length
        )
        return self

    @classmethod
    def _of(cls, values: Any, rows: layout.Layout, ragged_dim: int = 0) -> Array:
        """An array on a layout that is known to fit."""
        self = object.__new__(cls)
        fields = self.__dict__  # entry by entry: not every compiler follows `update`
        fields["values"] = values
        fields["offsets"] = rows.offsets
        fields["ragged_dim"] = ragged_dim
        fields["max_length"] = rows.max_length
        fields["_layout"] = rows
        return self

    def _check(self, host: np.ndarray) -> None:
        layout.check(host, self.total_length)
        longest = int(np.max(host[1:] - host[:-1], initial=0))
        if self.max_length is not None and self.max_length < longest:
            raise ValueError(
                f"max_length: expected at least {longest}, the longest row, got {self.max_length}"
            )

    def validate(self) -> Array:
        """Check the values of the offsets wherever they are (this waits for a device), and return the array itself.

        Raises
        ------
        ValueError
            If the offsets do not start at 0, fall or do not end at the number of tokens, or `max_length` is too small.

        Examples
        --------
        >>> import numpy as np, scree
        >>> scree.from_lengths(np.zeros(5), [2, 3]).validate().batch_size
        2
        """
        self._check(self.layout.read())
        return self

    @property
    def layout(self) -> layout.Layout:
        """The row boundaries with everything derived from them, shared by all arrays of one layout."""
        found = self.__dict__.get("_layout")
        if found is None:
            found = layout.Layout(
                backends.backend(self.offsets), self.offsets, self.total_length, self.max_length
            )
            self.__dict__["_layout"] = found
        return found

    def with_values(self, values: Any, *, ragged_dim: int | None = None) -> Array:
        """The same rows with other values, which share the layout; nothing is copied.

        Parameters
        ----------
        values
            Dense array of the same library and device, with the same number of tokens along the ragged axis.
        ragged_dim
            The ragged axis of the new values; that of this array by default.

        Raises
        ------
        TypeError
            If the values are no dense array of the library.
        ValueError
            If they are on another device, or have another number of tokens.

        Examples
        --------
        >>> import numpy as np, scree
        >>> scree.from_lengths(np.arange(5), [2, 3]).with_values(np.zeros((5, 8))).shape
        (2, None, 8)
        """
        own, rows = self.values, self.layout
        dim, device = self.ragged_dim if ragged_dim is None else ragged_dim, rows.backend.device
        if type(dim) is not int:
            dim = checks.integer("ragged_dim", dim)
        if type(values) is not type(own) or device(values) != device(own):
            checks.dense("values", values, own)
        if not 0 <= dim < values.ndim or values.shape[dim] != own.shape[self.ragged_dim]:
            raise ValueError(
                f"values: expected {self.total_length} tokens along axis {dim}, got shape {tuple(values.shape)}"
            )
        return Array._of(values, rows, dim)

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        rows: int = (
            self.offsets.shape[0] - 1
        )  # not int(...), which would make a constant of a size that torch.export varies
        return rows

    @property
    def total_length(self) -> int:
        """Number of tokens in all rows together."""
        tokens: int = self.values.shape[self.ragged_dim]
        return tokens

    @property
    def lengths(self) -> Any:
        """(n,) tokens of each row, an array of the same library."""
        return self.layout.lengths

    @property
    def element_shape(self) -> tuple[int, ...]:
        """The shape of one token: that of values without the ragged axis."""
        shape = tuple(self.values.shape)
        return shape[: self.ragged_dim] + shape[self.ragged_dim + 1 :]

    @property
    def shape(self) -> tuple[int | None, ...]:
        """``(n, None, ...)``; None, the standard's word for an unknown size, stands where the ragged axis is."""
        shape = tuple(self.values.shape)
        return (self.batch_size, *shape[: self.ragged_dim], None, *shape[self.ragged_dim + 1 :])

    @property
    def ndim(self) -> int:
        """Number of axes: the batch, the ragged axis and those of an element."""
        return int(self.values.ndim) + 1

    @property
    def size(self) -> int:
        """Number of elements."""
        return _size(self.values.shape)

    @property
    def dtype(self) -> Any:
        """Data type of the values."""
        return self.values.dtype

    @property
    def device(self) -> Any:
        """Device of the values; None where a trace hides it."""
        found = self.layout.backend.device(self.values)
        return getattr(self.values, "device", None) if found is None else found

    @property
    def nbytes(self) -> int:
        """Bytes of values and offsets together."""
        return sum(
            _bits(self.layout.xp, x.dtype) // 8 * _size(x.shape)
            for x in (self.values, self.offsets)
        )

    @property
    def mT(self) -> Array:  # noqa: N802 (the standard's name)
        """The array with its last two axes exchanged."""
        if self.ndim < 3:
            raise ValueError(
                f"mT: expected at least two axes behind the batch, got shape {self.shape}"
            )
        last, xp = self.values.ndim - 1, self.layout.xp
        dim = {last: last - 1, last - 1: last}.get(self.ragged_dim, self.ragged_dim)
        return self.with_values(xp.matrix_transpose(self.values), ragged_dim=dim)

    def to_device(self, device: Any, /, *, stream: Any = None) -> Array:
        """The array on another device."""
        if stream is not None:
            raise ValueError("stream: expected None, the streams of a library are not known here")
        move = self.layout.backend.to_device
        moved = layout.Layout(
            self.layout.backend,
            move(self.offsets, device),
            self.total_length,
            self.layout.max_length,
            self.layout.host,
        )
        return Array._of(move(self.values, device), moved, self.ragged_dim)

    def to_backend(self, library: Any, *, device: Any = None) -> Array:
        """The array in another library, on the same memory where both allow it; see `scree.bridges.to_backend`."""
        from .bridges.dlpack import to_backend

        return to_backend(self, library, device=device)

    def to_numpy(self) -> Array:
        """The array on NumPy; see `to_backend`."""
        return self.to_backend("numpy")

    def to(self, *args: Any, **kwargs: Any) -> Array:
        """The array with the device or the dtype that `torch.Tensor.to` takes; for PyTorch alone."""
        from .bridges.torch import to

        return to(self, *args, **kwargs)

    def pin_memory(self) -> Array:
        """The array in pinned memory, which a DataLoader asks for; for PyTorch alone."""
        from .bridges.torch import pin_memory

        return pin_memory(self)

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until `stream` has done its work so far; for PyTorch alone."""
        from .bridges.torch import record_stream

        record_stream(self, stream)

    def __arrow_c_schema__(self) -> Any:
        from .bridges.arrow import to_arrow

        return to_arrow(self).type.__arrow_c_schema__()

    def __arrow_c_array__(self, requested_schema: Any = None) -> Any:
        from .bridges.arrow import to_arrow

        return to_arrow(self).__arrow_c_array__(requested_schema)

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        from .namespace import namespace

        return namespace(self, api_version=api_version)

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "a ragged array is no NumPy array: use arr.values, scree.unpack(arr) or scree.to_padded(arr)"
        )

    def __getitem__(self, key: Any) -> Any:
        from .indexing.getitem import getitem

        return getitem(self, key)

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise TypeError(
            "a ragged array does not change: scree.at(arr)[...].set(value) gives a new one"
        )

    def __len__(self) -> int:
        return self.batch_size

    def __iter__(self) -> Iterator[Any]:
        from .construct import unpack

        return iter(unpack(self))

    def __bool__(self) -> NoReturn:
        raise TypeError("the truth value of a ragged array is ambiguous: use xp.any or xp.all")

    def __copy__(self) -> Array:
        return Array._of(self.values, self.layout, self.ragged_dim)

    def __deepcopy__(self, memo: dict[int, Any]) -> Array:
        parts = copy.deepcopy((self.values, self.offsets), memo)
        return Array._restore(*parts, self.ragged_dim, self.max_length)

    def __reduce__(self) -> tuple[Any, ...]:
        return Array._restore, (self.values, self.offsets, self.ragged_dim, self.max_length)

    def __repr__(self) -> str:
        return display.text(self)

    def _repr_html_(self) -> str:
        return display.html(self)


def _size(shape: tuple[int, ...]) -> int:
    return math.prod([*shape])


def _bits(xp: Any, dtype: Any) -> int:
    """Of one element; the standard has no itemsize."""
    if xp.isdtype(dtype, "bool"):
        return 8
    if xp.isdtype(dtype, "complex floating"):
        return 2 * int(xp.finfo(dtype).bits)
    return int((xp.iinfo if xp.isdtype(dtype, "integral") else xp.finfo)(dtype).bits)


#: Operator -> the standard's function for it.
UNARY = {"neg": "negative", "pos": "positive", "abs": "abs", "invert": "bitwise_invert"}
BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "pow", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift", "matmul": "matmul",
}  # fmt: skip
COMPARISONS = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
}  # fmt: skip


def _namespace(x: Array) -> Any:
    return backends.NAMESPACES.get(x.layout.backend.name) or x.__array_namespace__()


def _operators() -> None:
    operands = Array, *checks.NUMBERS

    def unary(function: str) -> Callable[[Array], Any]:
        return lambda self: getattr(_namespace(self), function)(self)

    def binary(function: str, reflected: bool = False) -> Callable[[Array, Any], Any]:
        def operator(self: Array, other: Any) -> Any:
            if not isinstance(other, operands) and not backends.is_array(other):
                return NotImplemented
            call = getattr(_namespace(self), function)
            return call(other, self) if reflected else call(self, other)

        return operator

    for name, function in UNARY.items():
        setattr(Array, f"__{name}__", unary(function))
    for name, function in (BINARY | COMPARISONS).items():
        setattr(Array, f"__{name}__", binary(function))
    for name, function in BINARY.items():
        setattr(Array, f"__r{name}__", binary(function, reflected=True))


_operators()
