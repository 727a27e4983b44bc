"""The ragged array: packed `values` and `offsets`, frozen, with the operators of the standard and `at`.

`Array` knows its layout and nothing above. Its operators, indexing and iteration call functions of
higher layers through one hook, `UPPER`, which `scree.namespace` fills on import. Display and
conversions attach from their own modules.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, overload

import numpy as np

from . import checks
from .backends import backend, is_array
from .hints import missing_from_array
from .layout import SHARD_LAYOUTS, Layout, check_offsets
from .records import record

T = TypeVar("T")

#: Versions of the standard that a namespace may be asked for.
VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12", "2025.12")


@dataclass(slots=True, eq=False, repr=False)
class UpperLayers:
    """The functions of higher layers that methods of `Array` call.

    Attributes
    ----------
    namespaces
        Per name of a loaded library, its namespace that accepts ragged arrays.
    getitem
        ``getitem(arr, key)`` indexes.
    update
        ``update(arr, key, operation, value)`` returns the array with the entries updated.
    unpack
        ``unpack(arr)`` returns the rows as a list.
    """

    namespaces: dict[str, Any]
    getitem: Callable[[Array, Any], Any]
    update: Callable[[Array, Any, str, Any], Array]
    unpack: Callable[[Array], list[Any]]


def _not_filled(*args: Any) -> NoReturn:
    raise RuntimeError("scree.namespace fills this hook; import scree, not a module of it")


#: Filled by `scree.namespace`.
UPPER = UpperLayers({}, _not_filled, _not_filled, _not_filled)


class CachedAttribute(Generic[T]):
    """Decorator of a method without arguments: its result becomes an attribute of the object.

    A property would run Python code at every access. Compilers cannot trace
    `functools.cached_property`.
    """

    def __init__(self, derive: Callable[[Any], T]) -> None:
        self.derive, self.name, self.__doc__ = derive, derive.__name__, derive.__doc__

    # There is no `__set__`, so Python looks for a stored result before it calls this.
    def __get__(self, obj: Any, owner: type | None = None) -> T:
        if obj is None:
            return self  # type: ignore[return-value]  # the attribute of the class
        result = obj.__dict__[self.name] = self.derive(obj)
        return result


@dataclass(frozen=True, eq=False, repr=False)
class Array:
    """Rows of different lengths, end to end in one dense buffer.

    Parameters
    ----------
    values
        Dense array of any library that follows the Array API standard, all rows end to end along
        `ragged_dim`.
    offsets
        (n + 1,) int32 or int64 array of the same library and device, ``[0, L0, L0 + L1, ...]``;
        what FlashAttention calls ``cu_seqlens``. Kept as it is, never copied.
    ragged_dim
        The axis of `values` along which the rows lie.
    max_length
        A bound on the longest row, a Python integer. It makes shapes static under ``jax.jit`` and
        ``torch.compile`` and on devices whose memory is not read for free.

    Raises
    ------
    TypeError
        If values and offsets are not arrays of one library, or offsets are not int32 or int64.
    ValueError
        If a shape does not fit or, where reading them is free, if the offsets do not start at 0,
        fall, or do not end at the number of tokens. Elsewhere `validate` checks that on request.

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

    __array_ufunc__ = None  # NumPy arrays leave mixed operators to this class

    def __post_init__(self) -> None:
        values, offsets = self.values, self.offsets
        lib = backend(values, "values")
        checks.check_dense("offsets", offsets, values)
        if values.ndim == 0:
            raise ValueError("values: expected at least one axis, got a 0-d array")
        checks.check_integer("ragged_dim", self.ragged_dim, 0, values.ndim, ", the axes of values")
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
            longest = checks.check_integer("max_length", self.max_length, 0)
            object.__setattr__(self, "max_length", longest)
        if not lib.is_compiling():
            shard_layout = SHARD_LAYOUTS.get(id(offsets))
            if (
                shard_layout is not None
                and shard_layout.cut is not None
                and shard_layout.cut.has_tokens(shard_layout, self.total_length)
            ):
                self.__dict__["layout"] = shard_layout
                return  # `shard` made these offsets, so they need no check
        host = self.layout.host_offsets
        if host is not None:
            self._check(host)

    @classmethod
    def unchecked(cls, values: Any, offsets: Any, ragged_dim: int, max_length: int | None) -> Array:
        """Return an array of parts that fit, without any check.

        Inside a transform the parts may be no arrays at all.
        """
        self = object.__new__(cls)
        self.__dict__.update(
            values=values, offsets=offsets, ragged_dim=ragged_dim, max_length=max_length
        )
        return self

    @classmethod
    def from_layout(cls, values: Any, layout: Layout, ragged_dim: int = 0) -> Array:
        """Return an array on a layout that fits, without any check."""
        self = object.__new__(cls)
        fields = self.__dict__  # not every compiler traces `update`
        fields["values"] = values
        fields["offsets"] = layout.offsets
        fields["ragged_dim"] = ragged_dim
        fields["max_length"] = layout.max_length
        fields["layout"] = layout
        return self

    @property
    def shard_layout(self) -> Layout | None:
        """The layout if this is a shard, else None; for pytrees, which keep it with the shard."""
        layout: Layout | None = self.__dict__.get("layout")
        if layout is None or layout.cut is None:
            return None
        return layout.cut.static_layout(layout)

    @classmethod
    def from_leaves(
        cls,
        values: Any,
        offsets: Any,
        ragged_dim: int,
        max_length: int | None,
        shard_layout: Layout | None,
    ) -> Array:
        """Return an array of the leaves and the static parts of a pytree, without any check."""
        if shard_layout is not None:
            return cls.from_layout(values, shard_layout, ragged_dim)
        return cls.unchecked(values, offsets, ragged_dim, max_length)

    def _check(self, host: np.ndarray) -> None:
        check_offsets(host, self.total_length)
        longest = int(np.max(host[1:] - host[:-1], initial=0))
        if self.max_length is not None and self.max_length < longest:
            raise ValueError(
                f"max_length: expected at least {longest}, the longest row, got {self.max_length}"
            )

    def validate(self) -> Array:
        """Check the values of the offsets on any device, and return the array itself.

        This waits for a device.

        Returns
        -------
        Array
            The array itself.

        Raises
        ------
        ValueError
            If the offsets do not start at 0, fall or do not end at the number of tokens, or
            `max_length` is too small.

        Examples
        --------
        >>> import numpy as np, scree
        >>> scree.from_lengths(np.zeros(5), [2, 3]).validate().batch_size
        2
        """
        self._check(self.layout.read_offsets())
        return self

    @CachedAttribute
    def layout(self) -> Layout:
        """The row boundaries with everything derived from them, shared by all arrays of one layout."""
        return Layout(backend(self.offsets), self.offsets, self.total_length, self.max_length)

    def with_values(self, values: Any, *, ragged_dim: int | None = None) -> Array:
        """Return an array with other values on the same layout; nothing is copied.

        Parameters
        ----------
        values
            Dense array of the same library and device, with the same number of tokens along the
            ragged axis.
        ragged_dim
            The ragged axis of the new values; by default the ragged axis of this array.

        Returns
        -------
        Array
            (n, None, ...) array on the layout of this array.

        Raises
        ------
        TypeError
            If the values are not a dense array of the library.
        ValueError
            If they are on another device, or have another number of tokens.

        Examples
        --------
        >>> import numpy as np, scree
        >>> scree.from_lengths(np.arange(5), [2, 3]).with_values(np.zeros((5, 8))).shape
        (2, None, 8)
        """
        old, layout = self.values, self.layout
        dim, device = self.ragged_dim if ragged_dim is None else ragged_dim, layout.backend.device
        if type(dim) is not int:
            dim = checks.check_integer("ragged_dim", dim)
        if type(values) is not type(old) or device(values) != device(old):
            checks.check_dense("values", values, old)
        if not 0 <= dim < values.ndim or values.shape[dim] != old.shape[self.ragged_dim]:
            raise ValueError(
                f"values: expected {self.total_length} tokens along axis {dim}, got shape {tuple(values.shape)}"
            )
        return Array.from_layout(values, layout, dim)

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        # Not int(...), which would make a constant of a size that torch.export varies.
        rows: int = self.offsets.shape[0] - 1
        return rows

    @property
    def total_length(self) -> int:
        """Number of tokens in the values: of all rows, and of the tail where there is one."""
        tokens: int = self.values.shape[self.ragged_dim]
        return tokens

    @property
    def lengths(self) -> Any:
        """(n,) tokens of each row, an array of the same library."""
        return self.layout.lengths

    @property
    def element_shape(self) -> tuple[int, ...]:
        """The shape of one token: the shape of the values without the ragged axis."""
        shape = tuple(self.values.shape)
        return shape[: self.ragged_dim] + shape[self.ragged_dim + 1 :]

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The shape ``(n, None, ...)``; None marks the ragged axis.

        None is the standard's value for an unknown size.
        """
        shape = tuple(self.values.shape)
        return (self.batch_size, *shape[: self.ragged_dim], None, *shape[self.ragged_dim + 1 :])

    @property
    def ndim(self) -> int:
        """Number of axes: the batch, the ragged axis and the axes of an element."""
        return int(self.values.ndim) + 1

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod([*self.values.shape])

    @property
    def dtype(self) -> Any:
        """Data type of the values."""
        return self.values.dtype

    @property
    def device(self) -> Any:
        """Device of the values; None where a trace hides it."""
        device = self.layout.backend.device(self.values)
        return getattr(self.values, "device", None) if device is None else device

    @property
    def nbytes(self) -> int:
        """Bytes of values and offsets together."""
        return sum(_nbytes(self.layout.xp, x) for x in (self.values, self.offsets))

    @property
    def mT(self) -> Array:  # noqa: N802 (the standard's name)
        """The array with its last two axes swapped."""
        if self.ndim < 3:
            raise ValueError(
                f"mT: expected at least two axes after the batch, got shape {self.shape}"
            )
        last, xp = self.values.ndim - 1, self.layout.xp
        dim = {last: last - 1, last - 1: last}.get(self.ragged_dim, self.ragged_dim)
        return self.with_values(xp.matrix_transpose(self.values), ragged_dim=dim)

    def to_device(self, device: Any, /, *, stream: Any = None) -> Array:
        """Return the array on another device.

        Parameters
        ----------
        device
            Device of the library, as `device` of its arrays.
        stream
            Must be None.

        Returns
        -------
        Array
            The array with values and offsets on the device.

        Raises
        ------
        ValueError
            If `stream` is not None.

        Examples
        --------
        >>> import numpy as np, scree
        >>> scree.from_lengths(np.zeros(5), [2, 3]).to_device("cpu").device
        'cpu'
        """
        if stream is not None:
            raise ValueError("stream: expected None, scree knows no streams of a library")
        checks.check_whole("arr", self.layout)
        old, move = self.layout, self.layout.backend.to_device
        offsets = move(self.offsets, device)
        layout = Layout(old.backend, offsets, self.total_length, old.max_length, old.host_offsets)
        return Array.from_layout(move(self.values, device), layout, self.ragged_dim)

    @property
    def at(self) -> At:
        """Takes the index of entries to update: ``arr.at[key].set(value)``; see `scree.at`."""
        checks.check_whole("arr", self.layout)
        return At(self)

    if TYPE_CHECKING:  # attached by `scree.bridges.methods`

        def to_backend(self, library: Any, *, device: Any = None) -> Array: ...
        def to_numpy(self) -> Array: ...
        def tolist(self) -> list[Any]: ...
        def to(self, *args: Any, **kwargs: Any) -> Array: ...
        def pin_memory(self) -> Array: ...
        def record_stream(self, stream: Any) -> None: ...
        def __arrow_c_schema__(self) -> Any: ...
        def __arrow_c_array__(self, requested_schema: Any = None) -> Any: ...

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        if api_version is not None and api_version not in VERSIONS:
            versions = ", ".join(VERSIONS)
            raise ValueError(f"api_version: expected one of {versions}, got {api_version!r}")
        return UPPER.namespaces[self.layout.backend.name]

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "a ragged array is not a NumPy array: use arr.values, scree.unpack(arr) or scree.to_padded(arr)"
        )

    if not TYPE_CHECKING:  # a type checker would take it for a dense array
        # Otherwise PyTorch takes the rows as a sequence of numbers if all have one token.
        def __dlpack__(self, **kwargs: Any) -> NoReturn:
            raise TypeError(
                "a ragged array is not a dense array: use arr.values, scree.unpack(arr) or scree.to_padded(arr)"
            )

        def __dlpack_device__(self) -> NoReturn:
            self.__dlpack__()

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> NoReturn:
            if name[:1] == "_" or "values" not in self.__dict__:  # while it is made or copied
                raise AttributeError(f"a ragged array has no attribute {name!r}")
            xp = UPPER.namespaces[self.layout.backend.name]
            raise AttributeError(missing_from_array(self, name, xp))

    @overload
    def __getitem__(self, key: Array | slice) -> Array: ...

    @overload
    def __getitem__(self, key: Any) -> Any: ...

    def __getitem__(self, key: Any) -> Any:
        cut = self.layout.cut
        if cut is not None:
            return cut.call("getitem", "indexing", UPPER.getitem, (self, key), {})
        return UPPER.getitem(self, key)

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise TypeError(
            "a ragged array does not change: scree.at(arr)[...].set(value) returns a new one"
        )

    def __len__(self) -> int:
        return self.batch_size

    def __iter__(self) -> Iterator[Any]:
        return iter(UPPER.unpack(self))

    def __contains__(self, value: Any) -> NoReturn:
        raise TypeError("a ragged array has no `in`: use xp.any(arr == value)")

    def __bool__(self) -> NoReturn:
        raise TypeError("the truth value of a ragged array is ambiguous: use xp.any or xp.all")

    def __copy__(self) -> Array:
        return Array.from_layout(self.values, self.layout, self.ragged_dim)

    def __deepcopy__(self, memo: dict[int, Any]) -> Array:
        checks.check_whole("arr", self.layout)
        parts = copy.deepcopy((self.values, self.offsets), memo)
        return Array.unchecked(*parts, self.ragged_dim, self.max_length)

    def __reduce__(self) -> tuple[Any, ...]:
        checks.check_whole("arr", self.layout)
        return restore, (self.values, self.offsets, self.ragged_dim, self.max_length)

    # Operators of the standard.

    def __neg__(self) -> Array:
        return _unary("negative", self)

    def __pos__(self) -> Array:
        return _unary("positive", self)

    def __abs__(self) -> Array:
        return _unary("abs", self)

    def __invert__(self) -> Array:
        return _unary("bitwise_invert", self)

    def __add__(self, other: Any, /) -> Array:
        return _binary("add", self, other)

    def __sub__(self, other: Any, /) -> Array:
        return _binary("subtract", self, other)

    def __mul__(self, other: Any, /) -> Array:
        return _binary("multiply", self, other)

    def __truediv__(self, other: Any, /) -> Array:
        return _binary("divide", self, other)

    def __floordiv__(self, other: Any, /) -> Array:
        return _binary("floor_divide", self, other)

    def __mod__(self, other: Any, /) -> Array:
        return _binary("remainder", self, other)

    def __pow__(self, other: Any, /) -> Array:
        return _binary("pow", self, other)

    def __and__(self, other: Any, /) -> Array:
        return _binary("bitwise_and", self, other)

    def __or__(self, other: Any, /) -> Array:
        return _binary("bitwise_or", self, other)

    def __xor__(self, other: Any, /) -> Array:
        return _binary("bitwise_xor", self, other)

    def __lshift__(self, other: Any, /) -> Array:
        return _binary("bitwise_left_shift", self, other)

    def __rshift__(self, other: Any, /) -> Array:
        return _binary("bitwise_right_shift", self, other)

    def __matmul__(self, other: Any, /) -> Array:
        return _binary("matmul", self, other)

    def __radd__(self, other: Any, /) -> Array:
        return _reflected("add", self, other)

    def __rsub__(self, other: Any, /) -> Array:
        return _reflected("subtract", self, other)

    def __rmul__(self, other: Any, /) -> Array:
        return _reflected("multiply", self, other)

    def __rtruediv__(self, other: Any, /) -> Array:
        return _reflected("divide", self, other)

    def __rfloordiv__(self, other: Any, /) -> Array:
        return _reflected("floor_divide", self, other)

    def __rmod__(self, other: Any, /) -> Array:
        return _reflected("remainder", self, other)

    def __rpow__(self, other: Any, /) -> Array:
        return _reflected("pow", self, other)

    def __rand__(self, other: Any, /) -> Array:
        return _reflected("bitwise_and", self, other)

    def __ror__(self, other: Any, /) -> Array:
        return _reflected("bitwise_or", self, other)

    def __rxor__(self, other: Any, /) -> Array:
        return _reflected("bitwise_xor", self, other)

    def __rlshift__(self, other: Any, /) -> Array:
        return _reflected("bitwise_left_shift", self, other)

    def __rrshift__(self, other: Any, /) -> Array:
        return _reflected("bitwise_right_shift", self, other)

    def __rmatmul__(self, other: Any, /) -> Array:
        return _reflected("matmul", self, other)

    def __eq__(self, other: Any, /) -> Array:  # type: ignore[override]  # object returns a bool
        return _binary("equal", self, other)

    def __ne__(self, other: Any, /) -> Array:  # type: ignore[override]  # object returns a bool
        return _binary("not_equal", self, other)

    def __lt__(self, other: Any, /) -> Array:
        return _binary("less", self, other)

    def __le__(self, other: Any, /) -> Array:
        return _binary("less_equal", self, other)

    def __gt__(self, other: Any, /) -> Array:
        return _binary("greater", self, other)

    def __ge__(self, other: Any, /) -> Array:
        return _binary("greater_equal", self, other)


def restore(values: Any, offsets: Any, ragged_dim: int, max_length: int | None) -> Array:
    """Return the array of a pickle; checks it, as `Array` does."""
    return Array(values, offsets, ragged_dim, max_length)


@record
class At:
    """A ragged array that takes the index of the entries to update."""

    array: Array

    def __getitem__(self, key: Any) -> Update:
        return Update(self.array, key)


@record
class Update:
    """Selected entries of a ragged array; every method returns a new array."""

    array: Array
    key: Any

    def set(self, value: Any) -> Array:
        """Return the array with the entries set to `value`.

        Parameters
        ----------
        value
            A number, or an array that broadcasts against the selected entries.

        Returns
        -------
        Array
            New array on the same layout.

        Raises
        ------
        TypeError
            If the dtype of the array cannot represent `value`.
        ValueError
            If `value` does not broadcast against the entries.

        Examples
        --------
        >>> import scree
        >>> arr = scree.from_lists([[1, 2], [3]])
        >>> arr.at[:, 0].set(0).tolist()
        [[0, 2], [0]]
        """
        return UPPER.update(self.array, self.key, "set", value)

    def add(self, value: Any) -> Array:
        """Return the array with `value` added to the entries.

        Parameters
        ----------
        value
            A number, or an array that broadcasts against the selected entries.

        Returns
        -------
        Array
            New array on the same layout.

        Raises
        ------
        TypeError
            If the dtype of the array cannot represent `value`.
        ValueError
            If `value` does not broadcast against the entries.

        Examples
        --------
        >>> import scree
        >>> arr = scree.from_lists([[1, 2], [3]])
        >>> arr.at[arr > 1].add(10).tolist()
        [[1, 12], [13]]
        """
        return UPPER.update(self.array, self.key, "sum", value)

    def multiply(self, value: Any) -> Array:
        """Return the array with the entries multiplied by `value`.

        Parameters
        ----------
        value
            A number, or an array that broadcasts against the selected entries.

        Returns
        -------
        Array
            New array on the same layout.

        Raises
        ------
        TypeError
            If the dtype of the array cannot represent `value`.
        ValueError
            If `value` does not broadcast against the entries.

        Examples
        --------
        >>> import scree
        >>> arr = scree.from_lists([[1, 2], [3]])
        >>> arr.at[1].multiply(2).tolist()
        [[1, 2], [6]]
        """
        return UPPER.update(self.array, self.key, "prod", value)

    def min(self, value: Any) -> Array:
        """Return the array with the minimum of the entries and `value`.

        Parameters
        ----------
        value
            A number, or an array that broadcasts against the selected entries.

        Returns
        -------
        Array
            New array on the same layout.

        Raises
        ------
        TypeError
            If the dtype of the array cannot represent `value`.
        ValueError
            If `value` does not broadcast against the entries.

        Examples
        --------
        >>> import scree
        >>> arr = scree.from_lists([[1, 2], [3]])
        >>> arr.at[:, 0].min(2).tolist()
        [[1, 2], [2]]
        """
        return UPPER.update(self.array, self.key, "min", value)

    def max(self, value: Any) -> Array:
        """Return the array with the maximum of the entries and `value`.

        Parameters
        ----------
        value
            A number, or an array that broadcasts against the selected entries.

        Returns
        -------
        Array
            New array on the same layout.

        Raises
        ------
        TypeError
            If the dtype of the array cannot represent `value`.
        ValueError
            If `value` does not broadcast against the entries.

        Examples
        --------
        >>> import scree
        >>> arr = scree.from_lists([[1, 2], [3]])
        >>> arr.at[:, 0].max(2).tolist()
        [[2, 2], [3]]
        """
        return UPPER.update(self.array, self.key, "max", value)


def _nbytes(xp: Any, x: Any) -> int:
    """Return the bytes of an array; the standard has no itemsize."""
    size = int(math.prod(x.shape))
    if xp.isdtype(x.dtype, "bool"):
        return size
    bits = (xp.iinfo if xp.isdtype(x.dtype, "integral") else xp.finfo)(x.dtype).bits
    parts = 2 if xp.isdtype(x.dtype, "complex floating") else 1
    return parts * int(bits) // 8 * size


def _unary(function: str, x: Array) -> Array:
    result: Array = getattr(UPPER.namespaces[x.layout.backend.name], function)(x)
    return result


def _binary(function: str, x: Array, other: Any) -> Array:
    if not isinstance(other, OPERANDS) and not is_array(other):
        return NotImplemented  # type: ignore[no-any-return]  # Python asks the other operand
    result: Array = getattr(UPPER.namespaces[x.layout.backend.name], function)(x, other)
    return result


def _reflected(function: str, x: Array, other: Any) -> Array:
    if not isinstance(other, OPERANDS) and not is_array(other):
        return NotImplemented  # type: ignore[no-any-return]  # Python asks the other operand
    result: Array = getattr(UPPER.namespaces[x.layout.backend.name], function)(other, x)
    return result


#: Operands besides dense arrays.
OPERANDS = Array, *checks.NUMBERS
