"""The Python Array API standard for ``mlx.core``, which array-api-compat does not wrap yet.

Functions that MLX implements as the standard requires are MLX's own objects. The other functions
fill the gaps: reductions and scans in `reductions`, linear algebra in `linalg`, all others here.

- Everything is lazy, except ``nonzero``, ``unique_*`` and ``repeat`` with an array of counts. These
  compute at once and raise under ``mx.compile``.
- Default dtypes are float32, complex64 and int32. Indices and counts are int32: an MLX axis is
  never longer. ``sum``, ``prod`` and the scans promote bool and small signed integers to int32,
  small unsigned integers to uint32.
- float64 exists on the CPU only, and complex128 does not exist. NumPy's float64 stays float64 or
  raises. ``fft`` and ``eig`` of float64 warn and return complex64. An elementwise operation of
  float64 with complex64 returns complex64.
- ``take`` and ``take_along_axis`` do not check bounds. An index out of bounds reads other memory:
  clip indices first. A shift by the width of the dtype or more is undefined.
- Arrays have value semantics, are in unified memory and belong to no device. ``device(x)`` is the
  device on which operations run.
- ``linalg`` runs on the CPU: if the default device is a GPU, call it inside
  ``with mx.stream(mx.cpu)``. Its ``cholesky``, ``det``, ``inv``, ``qr``, ``slogdet`` and ``solve``
  do not accept complex64.
"""

from __future__ import annotations

import builtins
import functools
import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

# Imported names are part of the namespace too.
from .linalg import linalg, make_extension, matmul, tensordot, vecdot, warn_on_float64  # noqa: F401
from .reductions import (  # noqa: F401
    all,
    any,
    cumulative_prod,
    cumulative_sum,
    mean,
    normalize_axes,
    prod,
    std,
    sum,
    var,
)

Array: TypeAlias = mx.array
Dtype: TypeAlias = mx.Dtype
_SCALAR_TYPES = builtins.bool, int, float, complex

# ---------------------------------------------------------------- MLX's own functions

_UNCHANGED = """
    e inf nan pi newaxis Device __version__ int8 int16 int32 int64 uint8 uint16 uint32 uint64
    float16 bfloat16 float32 float64 complex64 tril triu broadcast_arrays broadcast_shapes
    broadcast_to can_cast isdtype abs acos acosh add asin asinh atan atan2 atanh bitwise_and
    bitwise_left_shift bitwise_invert bitwise_or bitwise_right_shift bitwise_xor ceil conj cos
    cosh divide equal exp floor floor_divide greater greater_equal imag isfinite isinf isnan
    less less_equal log log1p log2 log10 logaddexp logical_and logical_not logical_or
    logical_xor maximum minimum multiply negative not_equal positive pow real reciprocal
    remainder round sin sinh square sqrt subtract tan tanh trunc take_along_axis
    matrix_transpose concat expand_dims flip permute_dims roll squeeze stack tile unstack
    count_nonzero where max min meshgrid
""".split()
globals().update({name: getattr(mx, name) for name in _UNCHANGED}, bool=mx.bool_)

# Functions of two operands, of which one may be a Python integer.
_BINARY = """
    add bitwise_and bitwise_or bitwise_xor equal floor_divide greater greater_equal less less_equal
    maximum minimum multiply not_equal remainder subtract where
""".split()


def _take_large_integers(function: Callable[..., Array]) -> Callable[..., Array]:
    """Return an MLX function that takes Python integers from 2^63 on, as NumPy does for uint64."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Array:
        try:
            return function(*args, **kwargs)
        except RuntimeError:  # std::bad_cast
            is_large = [isinstance(x, int) and x >= 1 << 63 for x in args]
            if True not in is_large:
                raise
            if builtins.all(x.dtype != mx.uint64 for x in args if isinstance(x, mx.array)):
                number = args[is_large.index(True)]
                raise OverflowError(
                    f"expected an integer of the dtype of the array, got {number}"
                ) from None
            pairs = zip(args, is_large)
            return function(
                *(mx.array(np.asarray(x, np.uint64)) if large else x for x, large in pairs),
                **kwargs,
            )

    return call


globals().update({name: _take_large_integers(getattr(mx, name)) for name in _BINARY})
_clip = _take_large_integers(mx.clip)


def take(x: Array, indices: Array, /, *, axis: int | None = None) -> Array:
    """Return the entries of an axis at some indices."""
    if x.size == 0 and indices.size == 0 and axis is not None:  # MLX has no gradient
        axis %= x.ndim
        return mx.zeros((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype)
    return mx.take(x, indices, axis=axis)


__array_api_version__ = "2024.12"

_KINDS = "bool", "signed integer", "unsigned integer", "real floating", "complex floating"
_DTYPES = (
    """bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 complex64""".split()
)
_BITS = {1: mx.int8, 2: mx.int16, 4: mx.int32, 8: mx.int64}


# ---------------------------------------------------------------- devices and inspection


def device(x: Array, /) -> mx.Device:
    """Return the device on which operations run: an MLX array itself belongs to no device."""
    return mx.default_device()


def to_device(x: Array, device: Any, /, *, stream: Any = None) -> Array:
    """Return ``x`` if ``device`` is the default device, else raise.

    ``mx.set_default_device`` changes the default device.
    """
    _check_device(device)
    return x


def _check_device(device: Any) -> None:
    if device is not None and device != mx.default_device():
        raise ValueError(
            f"MLX operations run on {mx.default_device()}, not {device}: pass device=None, "
            "or choose the device with mx.set_default_device or mx.stream"
        )


class _Info:
    """The inspection API of the standard."""

    def capabilities(self) -> dict[str, Any]:
        """Return the capabilities: no boolean indexing, no limit on dimensions.

        ``nonzero`` and ``unique_*``, whose shapes depend on data, work outside ``mx.compile`` only.
        """
        return {"boolean indexing": False, "data-dependent shapes": False, "max dimensions": None}

    def default_device(self) -> mx.Device:
        """Return the device on which operations run."""
        return mx.default_device()

    def devices(self) -> list[mx.Device]:
        """Return the default device, the only one that ``device=`` accepts."""
        return [mx.default_device()]

    def default_dtypes(self, *, device: Any = None) -> dict[str, Dtype]:
        """Return the default dtype of each kind."""
        return {
            "real floating": mx.float32,
            "complex floating": mx.complex64,
            "integral": mx.int32,
            "indexing": mx.int32,
        }

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, Dtype]:
        """Return the dtypes by name, without complex128, and without float64 except on the CPU."""
        kind = _KINDS if kind is None else kind
        table = {name.rstrip("_"): getattr(mx, name) for name in _DTYPES}
        is_cpu = (device or mx.default_device()) == mx.cpu
        return {
            name: dtype
            for name, dtype in table.items()
            if mx.isdtype(dtype, kind) and (is_cpu or name != "float64")
        }


def __array_namespace_info__() -> _Info:  # noqa: N807 (the standard's name)
    """Return the inspection API of this namespace."""
    return _Info()


def finfo(type: Any, /) -> Any:
    """Return the limits of a floating-point dtype, or of the dtype of an array."""
    return mx.finfo(getattr(type, "dtype", type))


_IInfo = namedtuple("_IInfo", "bits max min dtype")


def iinfo(type: Any, /) -> Any:
    """Return the limits of an integer dtype, with ``bits``, which MLX lacks."""
    info = mx.iinfo(getattr(type, "dtype", type))
    return _IInfo(8 * info.dtype.size, info.max, info.min, info.dtype)


def result_type(*arrays_and_dtypes: Any) -> Dtype:
    """Return the promoted dtype; a Python scalar changes the kind of the dtype, not the width."""
    typed = [a for a in arrays_and_dtypes if not isinstance(a, _SCALAR_TYPES)]
    if not typed:
        raise ValueError("result_type: expected at least one array or dtype, got none")
    out = mx.result_type(*typed)
    for scalar in arrays_and_dtypes:
        if isinstance(scalar, complex):
            out = mx.result_type(out, mx.complex64)
        elif isinstance(scalar, float) and not mx.issubdtype(out, mx.inexact):
            out = mx.float32
        elif isinstance(scalar, int) and not isinstance(scalar, builtins.bool) and out == mx.bool_:
            out = mx.int32
    return out


# ---------------------------------------------------------------- creation


def _float64_or_none(x: Any) -> Dtype | None:
    """Return float64 if `x` is a float64 array of another library, which MLX narrows silently."""
    name = str(getattr(x, "dtype", "")).rpartition(".")[2]
    if name == "complex128":
        raise ValueError("MLX has no complex128: pass dtype=complex64 to asarray")
    if name == "float64" and mx.default_device() != mx.cpu:
        raise ValueError("MLX has float64 on the CPU only: pass dtype=float32 to asarray")
    return mx.float64 if name == "float64" else None


def asarray(
    obj: Any, /, *, dtype: Dtype | None = None, device: Any = None, copy: bool | None = None
) -> Array:
    """Return ``obj`` as an MLX array; an MLX array is returned itself unless copied or cast.

    NumPy's float64 stays float64 on the CPU and raises elsewhere: it is never narrowed.
    """
    _check_device(device)
    if isinstance(obj, mx.array):
        dtype = obj.dtype if dtype is None else dtype
        if copy is False and dtype != obj.dtype:
            raise ValueError(
                f"a {obj.dtype} array cannot become {dtype} without a copy: leave out copy=False"
            )
        return astype(obj, dtype, copy=copy)
    dtype = _float64_or_none(obj) if dtype is None else dtype
    try:
        return mx.asarray(obj, dtype, copy=copy)
    except RuntimeError:  # MLX reads Python integers as int64
        if dtype is None or dtype != mx.uint64:
            raise
        return mx.array(np.asarray(obj, dtype="uint64"))


def from_dlpack(x: Any, /, *, device: Any = None, copy: bool | None = None) -> Array:
    """Return an MLX array of the data; float64 stays float64 on the CPU and raises elsewhere.

    MLX copies host memory, so ``copy=False`` raises for host arrays.
    """
    if isinstance(x, mx.array) or _float64_or_none(x) is not None:
        return asarray(x, device=device, copy=copy)
    _check_device(device)
    return mx.from_dlpack(x, copy=copy)


def astype(x: Array, dtype: Dtype, /, *, copy: bool | None = True, device: Any = None) -> Array:
    """Return ``x`` in another dtype; ``copy=False`` returns ``x`` itself if the dtype is equal."""
    _check_device(device)
    return x if x.dtype == dtype and not copy else mx.astype(x, dtype)


def arange(
    start: Any,
    /,
    stop: Any = None,
    step: Any = 1,
    *,
    dtype: Dtype | None = None,
    device: Any = None,
) -> Array:
    """Return evenly spaced values in ``[start, stop)``."""
    _check_device(device)
    return mx.arange(0, start, step, dtype) if stop is None else mx.arange(start, stop, step, dtype)


def eye(
    n_rows: int,
    n_cols: int | None = None,
    /,
    *,
    k: int = 0,
    dtype: Dtype | None = None,
    device: Any = None,
) -> Array:
    """Return a matrix with ones on diagonal ``k``."""
    _check_device(device)
    return mx.eye(n_rows, n_cols, k, dtype)


def full(shape: Any, fill_value: Any, *, dtype: Dtype | None = None, device: Any = None) -> Array:
    """Return an array of a shape filled with ``fill_value``."""
    return mx.full(shape, asarray(fill_value, dtype=dtype, device=device), dtype)


def full_like(
    x: Array, /, fill_value: Any, *, dtype: Dtype | None = None, device: Any = None
) -> Array:
    """Return an array of the shape and dtype of ``x`` filled with ``fill_value``."""
    return full(x.shape, fill_value, dtype=x.dtype if dtype is None else dtype, device=device)


def linspace(
    start: Any,
    stop: Any,
    /,
    num: int,
    *,
    dtype: Dtype | None = None,
    device: Any = None,
    endpoint: bool = True,
) -> Array:
    """Return evenly spaced values; the ends may be complex."""
    _check_device(device)
    if isinstance(start, complex) or isinstance(stop, complex):
        re, im = (
            mx.linspace(getattr(complex(start), part), getattr(complex(stop), part), num, endpoint)
            for part in ("real", "imag")
        )
        return _complex(re, im)
    dtype = mx.float32 if dtype is None else dtype
    return (
        mx.full((1,), start, dtype) if num == 1 else mx.linspace(start, stop, num, endpoint, dtype)
    )


def _make_constructor(fn: Callable[..., Array]) -> Callable[..., Array]:
    def create(shape: Any, *, dtype: Dtype | None = None, device: Any = None) -> Array:
        _check_device(device)
        return fn(shape, dtype)

    return create


def _make_constructor_like(fn: Callable[..., Array]) -> Callable[..., Array]:
    def create(x: Array, /, *, dtype: Dtype | None = None, device: Any = None) -> Array:
        _check_device(device)
        return fn(x.shape, x.dtype if dtype is None else dtype)

    return create


empty, ones, zeros = map(_make_constructor, (mx.zeros, mx.ones, mx.zeros))
empty_like, ones_like, zeros_like = map(_make_constructor_like, (mx.zeros, mx.ones, mx.zeros))


# ---------------------------------------------------------------- elementwise


def _promote_and_broadcast(x1: Any, x2: Any) -> Any:
    dtype = result_type(x1, x2)
    return mx.broadcast_arrays(*(asarray(x, dtype=dtype) for x in (x1, x2)))


def _complex(re: Array, im: Array) -> Array:
    return mx.view(mx.stack([re, im], axis=-1), mx.complex64)[..., 0]


def clip(x: Array, /, min: Any = None, max: Any = None) -> Array:
    """Return ``x`` within bounds, each of which may be None, with the dtype of ``x``."""
    return x if min is None and max is None else _clip(x, min, max).astype(x.dtype)


def signbit(x: Array, /) -> Array:
    """Return whether the sign bit is set, from the bits, so that -0.0 and NaN count too."""
    return mx.view(x, _BITS[x.dtype.size]) < 0


def copysign(x1: Any, x2: Any, /) -> Array:
    """Return the magnitude of ``x1`` with the sign of ``x2``."""
    x1, x2 = _promote_and_broadcast(x1, x2)
    return mx.where(signbit(x1) == signbit(x2), x1, -x1)


def hypot(x1: Any, x2: Any, /) -> Array:
    """Return ``sqrt(x1**2 + x2**2)``, scaled by the larger operand to avoid overflow."""
    x1, x2 = (mx.abs(x) for x in _promote_and_broadcast(x1, x2))
    larger = mx.maximum(x1, x2)
    ratio = mx.minimum(x1, x2) / mx.where(larger == 0, mx.ones_like(larger), larger)
    return mx.where(
        mx.isinf(x1) | mx.isinf(x2),
        mx.array(math.inf, larger.dtype),
        larger * mx.sqrt(1 + ratio * ratio),
    )


def nextafter(x1: Any, x2: Any, /) -> Array:
    """Return the next value from ``x1`` towards ``x2``, by a step on the bits.

    A step from zero gives the smallest subnormal.
    """
    x1, x2 = _promote_and_broadcast(x1, x2)
    bits = mx.view(x1, _BITS[x1.dtype.size])
    step = mx.where((x2 > x1) == (x1 > 0), 1, -1).astype(bits.dtype)
    tiny = copysign(mx.view(mx.ones_like(bits), x1.dtype), x2)
    out = mx.where(x1 == 0, tiny, mx.view(bits + step, x1.dtype))
    return mx.where(x1 == x2, x2, mx.where(mx.isnan(x1) | mx.isnan(x2), x1 + x2, out))


def sign(x: Array, /) -> Array:
    """Return the sign; NaN stays NaN."""
    if not mx.issubdtype(x.dtype, mx.floating):
        return mx.sign(x)
    return mx.where(mx.isnan(x), x, mx.sign(x))


def expm1(x: Array, /) -> Array:
    """Return ``exp(x) - 1``, for complex64 too."""
    if x.dtype != mx.complex64:
        return mx.expm1(x)
    re, im = mx.real(x), mx.imag(x)
    half_sine = mx.sin(im / 2)  # cos(im) = 1 - 2 * half_sine^2
    return _complex(
        mx.expm1(re) * mx.cos(im) - 2 * half_sine * half_sine,
        mx.where(im == 0, im, mx.exp(re) * mx.sin(im)),
    )


# ---------------------------------------------------------------- order, search, sets


def sort(x: Array, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
    """Return the sorted array; the sort is stable in both directions."""
    return mx.flip(mx.sort(mx.flip(x, axis), axis), axis) if descending else mx.sort(x, axis)


def argsort(x: Array, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
    """Return the int32 order of a sort that is stable in both directions.

    The order has no gradient; without `stop_gradient` MLX would look for one.
    """
    x = mx.stop_gradient(x)
    if not descending:
        return mx.argsort(x, axis).astype(mx.int32)
    return x.shape[axis] - 1 - mx.flip(mx.argsort(mx.flip(x, axis), axis), axis).astype(mx.int32)


def _make_argreduce(fn: Callable[..., Array]) -> Callable[..., Array]:
    def argreduce(x: Array, /, *, axis: int | None = None, keepdims: bool = False) -> Array:
        # MLX refuses arrays without elements. The result is empty too, so mx.sum has its shape.
        is_empty = x.size == 0 and axis is not None and x.shape[axis] > 0
        out = mx.sum(x, axis, keepdims=keepdims) if is_empty else fn(x, axis, keepdims)
        return out.astype(mx.int32)

    return argreduce


argmax, argmin = _make_argreduce(mx.argmax), _make_argreduce(mx.argmin)


def searchsorted(
    x1: Array, x2: Any, /, *, side: str = "left", sorter: Array | None = None
) -> Array:
    """Return int32 insertion indices; ``x2`` may be a scalar, and ``sorter`` is supported."""
    x1 = x1 if sorter is None else mx.take(x1, sorter)
    x2 = x2 if isinstance(x2, mx.array) else asarray(x2, dtype=result_type(x1, x2))
    return mx.searchsorted(x1, x2, side=side).astype(mx.int32)


def isin(x1: Any, x2: Any, /, *, invert: bool = False) -> Array:
    """Return whether each element of ``x1`` is in ``x2``; NaN never is.

    The search is binary in the sorted ``x2``, so that it stays lazy.
    """
    dtype = result_type(x1, x2)
    x1, x2 = asarray(x1, dtype=dtype), mx.sort(mx.flatten(asarray(x2, dtype=dtype)))
    contained = mx.searchsorted(x2, x1, side="left") < mx.searchsorted(x2, x1, side="right")
    return mx.not_equal(contained & mx.equal(x1, x1), invert)


def _to_numpy(x: Array, name: str) -> Any:
    """Return ``x`` as a NumPy array (bfloat16 as float32); the only function here that computes."""
    try:
        return np.asarray(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)
    except ValueError as error:
        raise ValueError(
            f"the shape of {name} depends on data: call it outside mx.compile and mx.vmap, "
            "or use where() with a mask, which keeps the shape"
        ) from error


def nonzero(x: Array, /) -> tuple[Array, ...]:
    """Return the indices of nonzero elements; computes at once and raises under ``mx.compile``."""
    return tuple(mx.array(i, mx.int32) for i in _to_numpy(x, "nonzero").nonzero())


def _make_unique(result: Any) -> Callable[[Array], Any]:
    """Return the function of the standard whose name and fields the namedtuple `result` has."""

    def unique(x: Array, /) -> Any:
        """Return the unique values; computes at once and raises under ``mx.compile``."""
        parts = getattr(np, result.__name__)(_to_numpy(x, result.__name__))
        parts = parts if isinstance(parts, tuple) else (parts,)
        dtypes = (x.dtype if field == "values" else mx.int32 for field in result._fields)
        out = [mx.array(part, dtype) for part, dtype in zip(parts, dtypes, strict=True)]
        return result(*out) if len(out) > 1 else out[0]

    return unique


unique_all = _make_unique(namedtuple("unique_all", "values indices inverse_indices counts"))
unique_counts = _make_unique(namedtuple("unique_counts", "values counts"))
unique_inverse = _make_unique(namedtuple("unique_inverse", "values inverse_indices"))
unique_values = _make_unique(namedtuple("unique_values", "values"))


# ---------------------------------------------------------------- manipulation


def reshape(x: Array, /, shape: Any, *, copy: bool | None = None) -> Array:
    """Return ``x`` in another shape.

    ``copy=False`` raises: MLX arrays have value semantics and cannot promise a view.
    """
    if copy is False:
        raise ValueError("MLX cannot promise a reshape without a copy: leave out copy=False")
    return mx.reshape(x, shape)


def moveaxis(x: Array, source: Any, destination: Any, /) -> Array:
    """Return ``x`` with axes moved; both arguments may be tuples."""
    source, destination = normalize_axes(x, source), normalize_axes(x, destination)
    order = [a for a in range(x.ndim) if a not in source]
    for to, a in sorted(zip(destination, source, strict=True)):
        order.insert(to, a)
    return mx.transpose(x, order)


def repeat(x: Array, repeats: Any, /, *, axis: int | None = None) -> Array:
    """Return ``x`` with repeated elements.

    With an array of counts it computes at once and raises under ``mx.compile``.
    """
    if isinstance(repeats, int):
        return mx.repeat(x, repeats, axis)
    x, axis = (mx.flatten(x), 0) if axis is None else (x, axis)
    counts = _to_numpy(repeats, "repeat with an array of counts")
    indices = np.repeat(np.arange(x.shape[axis]), counts)
    return mx.take(x, mx.array(indices, mx.int32), axis)


def diff(
    x: Array,
    /,
    *,
    axis: int = -1,
    n: int = 1,
    prepend: Array | None = None,
    append: Array | None = None,
) -> Array:
    """Return the n-th difference, with ``prepend`` and ``append``, which MLX lacks."""
    parts = [a for a in (prepend, x, append) if a is not None]
    return mx.diff(mx.concat(parts, axis) if len(parts) > 1 else x, n, axis)


# ---------------------------------------------------------------- fft

_OPPOSITE_NORM = {"backward": "forward", "forward": "backward", "ortho": "ortho"}


def _hfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    return mx.fft.irfft(mx.conj(x), n, axis, _OPPOSITE_NORM[norm])


def _ihfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    return mx.conj(mx.fft.rfft(x, n, axis, _OPPOSITE_NORM[norm]))


def _rfftfreq(
    n: int, /, *, d: float = 1.0, dtype: Dtype | None = None, device: Any = None
) -> Array:
    return arange(n // 2 + 1, dtype=mx.float32 if dtype is None else dtype, device=device) / (n * d)


def _fftfreq(n: int, /, *, d: float = 1.0, dtype: Dtype | None = None, device: Any = None) -> Array:
    index = arange(n, dtype=mx.float32 if dtype is None else dtype, device=device)
    return mx.where(index < (n + 1) // 2, index, index - n) / (n * d)


fft = make_extension(
    mx.fft,
    "fftshift ifftshift",
    _fftfreq,
    _rfftfreq,
    warn_on_float64(_hfft),
    warn_on_float64(_ihfft),
    *(
        warn_on_float64(getattr(mx.fft, f"{inverse}{real}fft{nd}"))
        for inverse in ("", "i")
        for real in ("", "r")
        for nd in ("", "n")
    ),
)

# Names of this module that are no part of the namespace.
_HELPERS = """
    annotations normalize_axes builtins make_extension math mx namedtuple np warn_on_float64 Any Array
    Callable Dtype TypeAlias
""".split()
__all__ = sorted(
    {
        *_UNCHANGED,
        "__array_api_version__",
        "__array_namespace_info__",
        *(name for name in globals() if name[0] != "_" and name not in _HELPERS),
    }
)


def __dir__() -> list[str]:
    return __all__
