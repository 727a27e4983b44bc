"""The Python Array API standard over ``mlx.core``: what MLX has right is MLX's own object, the gaps are filled.

Sums and their like are in `mlx_sums`, linear algebra in `mlx_linalg`, all else below.

- Lazy: only ``nonzero``, ``unique_*`` and ``repeat`` with an array of counts compute; they raise under ``mx.compile``.
- Default dtypes are float32, complex64, int32; indices and counts are int32, for an MLX axis is never longer.
  ``sum``, ``prod`` and the scans lift bool and small integers to int32, small unsigned integers to uint32.
- float64 exists on the CPU only and there is no complex128: NumPy's float64 stays float64 or raises; ``fft`` and
  ``eig`` of float64 warn and give complex64; an elementwise mix of float64 with complex64 is complex64.
- Indices out of bounds in ``take`` and ``take_along_axis`` are not checked and read foreign memory: clip them first.
  A shift by the width of the dtype or more is undefined.
- Arrays have value semantics, live in unified memory and belong to no device: ``device(x)`` is where operations run.
- ``linalg`` runs on the CPU: where the default device is a GPU, call it inside ``with mx.stream(mx.cpu)``. Its
  ``cholesky``, ``det``, ``inv``, ``qr``, ``slogdet`` and ``solve`` take no complex64.
"""

from __future__ import annotations

import builtins
import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from .linalg import extension, linalg, matmul, narrowing, tensordot, vecdot  # noqa: F401 (parts of the namespace)
from .sums import all, any, axes_of, cumulative_prod, cumulative_sum, mean, prod, std, sum, var  # noqa: F401

Array: TypeAlias = mx.array
Dtype: TypeAlias = mx.Dtype
_SCALAR = builtins.bool, int, float, complex

# ---------------------------------------------------------------- what MLX has right, under the same name

_SAME = """
    e inf nan pi newaxis Device __version__ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16
    float32 float64 complex64 tril triu broadcast_arrays broadcast_shapes broadcast_to can_cast isdtype abs acos
    acosh add asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_invert bitwise_or
    bitwise_right_shift bitwise_xor ceil conj cos cosh divide equal exp floor floor_divide greater greater_equal
    imag isfinite isinf isnan less less_equal log log1p log2 log10 logaddexp logical_and logical_not logical_or
    logical_xor maximum minimum multiply negative not_equal positive pow real reciprocal remainder round sin sinh
    square sqrt subtract tan tanh trunc take take_along_axis matrix_transpose concat expand_dims flip permute_dims
    roll squeeze stack tile unstack count_nonzero where max min meshgrid
""".split()
globals().update({name: getattr(mx, name) for name in _SAME}, bool=mx.bool_)

__array_api_version__ = "2024.12"

_KINDS = "bool", "signed integer", "unsigned integer", "real floating", "complex floating"
_DTYPES = (
    """bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 complex64""".split()
)
_BITS = {1: mx.int8, 2: mx.int16, 4: mx.int32, 8: mx.int64}


# ---------------------------------------------------------------- devices and inspection


def device(x: Array, /) -> mx.Device:
    """Return the device on which operations on ``x`` run: MLX arrays have none of their own."""
    return mx.default_device()


def to_device(x: Array, device: Any, /, *, stream: Any = None) -> Array:
    """Return ``x`` if ``device`` is the current one, else raise: ``mx.set_default_device`` chooses another."""
    _here(device)
    return x


def _here(device: Any) -> None:
    if device is not None and device != mx.default_device():
        raise ValueError(
            f"MLX operations run on {mx.default_device()}, not {device}: pass device=None, "
            "or choose the device with mx.set_default_device or mx.stream"
        )


class _Info:
    def capabilities(self) -> dict[str, Any]:
        """No boolean indexing; shapes that depend on data (``nonzero``, ``unique_*``) only outside ``mx.compile``."""
        return {"boolean indexing": False, "data-dependent shapes": False, "max dimensions": None}

    def default_device(self) -> mx.Device:
        return mx.default_device()

    def devices(self) -> list[mx.Device]:
        return [mx.default_device()]

    def default_dtypes(self, *, device: Any = None) -> dict[str, Dtype]:
        return {
            "real floating": mx.float32,
            "complex floating": mx.complex64,
            "integral": mx.int32,
            "indexing": mx.int32,
        }

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, Dtype]:
        """Leave out complex128, and float64 where the device is not the CPU."""
        kind = _KINDS if kind is None else kind
        table = {name.rstrip("_"): getattr(mx, name) for name in _DTYPES}
        cpu = (device or mx.default_device()) == mx.cpu
        return {
            name: d
            for name, d in table.items()
            if mx.isdtype(d, kind) and (cpu or name != "float64")
        }


def __array_namespace_info__() -> _Info:  # noqa: N807
    return _Info()


def finfo(type: Any, /) -> Any:
    return mx.finfo(getattr(type, "dtype", type))


_IInfo = namedtuple("_IInfo", "bits max min dtype")


def iinfo(type: Any, /) -> Any:
    """Add ``bits``."""
    info = mx.iinfo(getattr(type, "dtype", type))
    return _IInfo(8 * info.dtype.size, info.max, info.min, info.dtype)


def result_type(*arrays_and_dtypes: Any) -> Dtype:
    """Take Python scalars too: they lift the kind, never the width."""
    typed = [a for a in arrays_and_dtypes if not isinstance(a, _SCALAR)]
    if not typed:
        raise ValueError("result_type needs at least one array or dtype")
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


def _wide(x: Any) -> Dtype | None:
    """Return float64 for a foreign float64, which MLX by itself would narrow without a word; else None."""
    name = str(getattr(x, "dtype", "")).rpartition(".")[2]
    if name == "complex128":
        raise ValueError("MLX has no complex128: pass dtype=complex64 to asarray")
    if name == "float64" and mx.default_device() != mx.cpu:
        raise ValueError("MLX has float64 on the CPU only: pass dtype=float32 to asarray")
    return mx.float64 if name == "float64" else None


def asarray(
    obj: Any, /, *, dtype: Dtype | None = None, device: Any = None, copy: bool | None = None
) -> Array:
    """Return an MLX array itself unless copied or cast; keep NumPy's float64 (CPU) or refuse it, never narrow it."""
    _here(device)
    if isinstance(obj, mx.array):
        dtype = obj.dtype if dtype is None else dtype
        if copy is False and dtype != obj.dtype:
            raise ValueError(
                f"a {obj.dtype} array cannot become {dtype} without a copy: leave out copy=False"
            )
        return astype(obj, dtype, copy=copy)
    dtype = _wide(obj) if dtype is None else dtype
    try:
        return mx.asarray(obj, dtype, copy=copy)
    except RuntimeError:  # MLX reads Python integers as int64
        if dtype is None or dtype != mx.uint64:
            raise
        return mx.array(np.asarray(obj, dtype="uint64"))


def from_dlpack(x: Any, /, *, device: Any = None, copy: bool | None = None) -> Array:
    """Keep float64 (CPU) or refuse it; MLX copies host memory, so ``copy=False`` raises there."""
    if isinstance(x, mx.array) or _wide(x) is not None:
        return asarray(x, device=device, copy=copy)
    _here(device)
    return mx.from_dlpack(x, copy=copy)


def astype(x: Array, dtype: Dtype, /, *, copy: bool | None = True, device: Any = None) -> Array:
    _here(device)
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
    _here(device)
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
    _here(device)
    return mx.eye(n_rows, n_cols, k, dtype)


def full(shape: Any, fill_value: Any, *, dtype: Dtype | None = None, device: Any = None) -> Array:
    return mx.full(shape, asarray(fill_value, dtype=dtype, device=device), dtype)


def full_like(
    x: Array, /, fill_value: Any, *, dtype: Dtype | None = None, device: Any = None
) -> Array:
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
    """Take complex ends."""
    _here(device)
    if isinstance(start, complex) or isinstance(stop, complex):
        re, im = (
            mx.linspace(getattr(complex(start), p), getattr(complex(stop), p), num, endpoint)
            for p in ("real", "imag")
        )
        return _complex(re, im)
    dtype = mx.float32 if dtype is None else dtype
    return (
        mx.full((1,), start, dtype) if num == 1 else mx.linspace(start, stop, num, endpoint, dtype)
    )


def _filled(fn: Callable[..., Array]) -> Callable[..., Array]:
    def create(shape: Any, *, dtype: Dtype | None = None, device: Any = None) -> Array:
        _here(device)
        return fn(shape, dtype)

    return create


def _filled_like(fn: Callable[..., Array]) -> Callable[..., Array]:
    def create(x: Array, /, *, dtype: Dtype | None = None, device: Any = None) -> Array:
        _here(device)
        return fn(x.shape, x.dtype if dtype is None else dtype)

    return create


empty, ones, zeros = map(_filled, (mx.zeros, mx.ones, mx.zeros))
empty_like, ones_like, zeros_like = map(_filled_like, (mx.zeros, mx.ones, mx.zeros))


# ---------------------------------------------------------------- elementwise


def _pair(x1: Any, x2: Any) -> Any:
    dtype = result_type(x1, x2)
    return mx.broadcast_arrays(*(asarray(x, dtype=dtype) for x in (x1, x2)))


def _complex(re: Array, im: Array) -> Array:
    return mx.view(mx.stack([re, im], axis=-1), mx.complex64)[..., 0]


def clip(x: Array, /, min: Any = None, max: Any = None) -> Array:
    """Both bounds may be None; the result keeps the dtype of ``x``."""
    return x if min is None and max is None else mx.clip(x, min, max).astype(x.dtype)


def signbit(x: Array, /) -> Array:
    return mx.view(x, _BITS[x.dtype.size]) < 0


def copysign(x1: Any, x2: Any, /) -> Array:
    x1, x2 = _pair(x1, x2)
    return mx.where(signbit(x1) == signbit(x2), x1, -x1)


def hypot(x1: Any, x2: Any, /) -> Array:
    """Scaled by the larger side, so that it does not overflow."""
    x1, x2 = (mx.abs(x) for x in _pair(x1, x2))
    big = mx.maximum(x1, x2)
    ratio = mx.minimum(x1, x2) / mx.where(big == 0, mx.ones_like(big), big)
    return mx.where(
        mx.isinf(x1) | mx.isinf(x2), mx.array(math.inf, big.dtype), big * mx.sqrt(1 + ratio * ratio)
    )


def nextafter(x1: Any, x2: Any, /) -> Array:
    """One step on the bits, through zero to the smallest subnormal."""
    x1, x2 = _pair(x1, x2)
    bits = mx.view(x1, _BITS[x1.dtype.size])
    step = mx.where((x2 > x1) == (x1 > 0), 1, -1).astype(bits.dtype)
    tiny = copysign(mx.view(mx.ones_like(bits), x1.dtype), x2)
    out = mx.where(x1 == 0, tiny, mx.view(bits + step, x1.dtype))
    return mx.where(x1 == x2, x2, mx.where(mx.isnan(x1) | mx.isnan(x2), x1 + x2, out))


def sign(x: Array, /) -> Array:
    """NaN stays NaN."""
    return (
        mx.where(mx.isnan(x), x, mx.sign(x)) if mx.issubdtype(x.dtype, mx.floating) else mx.sign(x)
    )


def expm1(x: Array, /) -> Array:
    """Take complex64."""
    if x.dtype != mx.complex64:
        return mx.expm1(x)
    re, im = mx.real(x), mx.imag(x)
    half = mx.sin(im / 2)
    return _complex(
        mx.expm1(re) * mx.cos(im) - 2 * half * half, mx.where(im == 0, im, mx.exp(re) * mx.sin(im))
    )


# ---------------------------------------------------------------- order, search, sets


def sort(x: Array, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
    """Stable both ways."""
    return mx.flip(mx.sort(mx.flip(x, axis), axis), axis) if descending else mx.sort(x, axis)


def argsort(x: Array, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
    """Stable both ways; int32. The order has no gradient, which MLX itself would look for."""
    x = mx.stop_gradient(x)
    if not descending:
        return mx.argsort(x, axis).astype(mx.int32)
    return x.shape[axis] - 1 - mx.flip(mx.argsort(mx.flip(x, axis), axis), axis).astype(mx.int32)


def _arg(fn: Callable[..., Array]) -> Callable[..., Array]:
    def arg(x: Array, /, *, axis: int | None = None, keepdims: bool = False) -> Array:
        nothing = (
            x.size == 0 and axis is not None and x.shape[axis] > 0
        )  # MLX refuses arrays without elements
        return (mx.sum(x, axis, keepdims=keepdims) if nothing else fn(x, axis, keepdims)).astype(
            mx.int32
        )

    return arg


argmax, argmin = _arg(mx.argmax), _arg(mx.argmin)


def searchsorted(
    x1: Array, x2: Any, /, *, side: str = "left", sorter: Array | None = None
) -> Array:
    """Take a scalar ``x2`` and a ``sorter``; int32."""
    x1 = x1 if sorter is None else mx.take(x1, sorter)
    x2 = x2 if isinstance(x2, mx.array) else asarray(x2, dtype=result_type(x1, x2))
    return mx.searchsorted(x1, x2, side=side).astype(mx.int32)


def isin(x1: Any, x2: Any, /, *, invert: bool = False) -> Array:
    """By binary search in sorted ``x2``, so lazy; NaN is in nothing."""
    dtype = result_type(x1, x2)
    x1, x2 = asarray(x1, dtype=dtype), mx.sort(mx.flatten(asarray(x2, dtype=dtype)))
    found = mx.searchsorted(x2, x1, side="left") < mx.searchsorted(x2, x1, side="right")
    return mx.not_equal(found & mx.equal(x1, x1), invert)


def _host(x: Array, name: str) -> Any:
    """``x`` in NumPy (bfloat16 as float32): the only place that computes."""
    try:
        return np.asarray(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)
    except ValueError as error:
        raise ValueError(
            f"the shape of {name} depends on data: call it outside mx.compile and mx.vmap, "
            "or use where() with a mask, which keeps the shape"
        ) from error


def nonzero(x: Array, /) -> tuple[Array, ...]:
    """Compute at once; raise under ``mx.compile``."""
    return tuple(mx.array(i, mx.int32) for i in _host(x, "nonzero").nonzero())


def _unique(kind: Any) -> Callable[[Array], Any]:
    def unique(x: Array, /) -> Any:
        """Compute at once; raise under ``mx.compile``."""
        found = getattr(np, kind.__name__)(_host(x, kind.__name__))
        found = found if isinstance(found, tuple) else (found,)
        dtypes = (x.dtype if field == "values" else mx.int32 for field in kind._fields)
        out = [mx.array(a, dtype) for a, dtype in zip(found, dtypes, strict=True)]
        return kind(*out) if len(out) > 1 else out[0]

    return unique


unique_all = _unique(namedtuple("unique_all", "values indices inverse_indices counts"))
unique_counts = _unique(namedtuple("unique_counts", "values counts"))
unique_inverse = _unique(namedtuple("unique_inverse", "values inverse_indices"))
unique_values = _unique(namedtuple("unique_values", "values"))


# ---------------------------------------------------------------- manipulation


def reshape(x: Array, /, shape: Any, *, copy: bool | None = None) -> Array:
    """``copy=False`` raises: MLX arrays have value semantics and cannot promise a view."""
    if copy is False:
        raise ValueError("MLX cannot promise a reshape without a copy: leave out copy=False")
    return mx.reshape(x, shape)


def moveaxis(x: Array, source: Any, destination: Any, /) -> Array:
    """Take tuples of axes."""
    source, destination = axes_of(x, source), axes_of(x, destination)
    order = [a for a in range(x.ndim) if a not in source]
    for to, a in sorted(zip(destination, source, strict=True)):
        order.insert(to, a)
    return mx.transpose(x, order)


def repeat(x: Array, repeats: Any, /, *, axis: int | None = None) -> Array:
    """Take an array of counts: computes at once then, and raises under ``mx.compile``."""
    if isinstance(repeats, int):
        return mx.repeat(x, repeats, axis)
    x, axis = (mx.flatten(x), 0) if axis is None else (x, axis)
    rows = np.repeat(np.arange(x.shape[axis]), _host(repeats, "repeat with an array of counts"))
    return mx.take(x, mx.array(rows, mx.int32), axis)


def diff(
    x: Array,
    /,
    *,
    axis: int = -1,
    n: int = 1,
    prepend: Array | None = None,
    append: Array | None = None,
) -> Array:
    """Take ``prepend`` and ``append``."""
    parts = [a for a in (prepend, x, append) if a is not None]
    return mx.diff(mx.concat(parts, axis) if len(parts) > 1 else x, n, axis)


# ---------------------------------------------------------------- fft

_SWAP = {"backward": "forward", "forward": "backward", "ortho": "ortho"}


def _hfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    return mx.fft.irfft(mx.conj(x), n, axis, _SWAP[norm])


def _ihfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    return mx.conj(mx.fft.rfft(x, n, axis, _SWAP[norm]))


def _rfftfreq(
    n: int, /, *, d: float = 1.0, dtype: Dtype | None = None, device: Any = None
) -> Array:
    return arange(n // 2 + 1, dtype=mx.float32 if dtype is None else dtype, device=device) / (n * d)


def _fftfreq(n: int, /, *, d: float = 1.0, dtype: Dtype | None = None, device: Any = None) -> Array:
    up = arange(n, dtype=mx.float32 if dtype is None else dtype, device=device)
    return mx.where(up < (n + 1) // 2, up, up - n) / (n * d)


fft = extension(
    mx.fft,
    "fftshift ifftshift",
    _fftfreq,
    _rfftfreq,
    narrowing(_hfft),
    narrowing(_ihfft),
    *(
        narrowing(getattr(mx.fft, f"{i}{r}fft{n}"))
        for i in ("", "i")
        for r in ("", "r")
        for n in ("", "n")
    ),
)

_TOOLS = """annotations axes_of builtins extension math mx namedtuple narrowing np Any Array Callable Dtype TypeAlias""".split()
__all__ = sorted(
    {
        *_SAME,
        "__array_api_version__",
        "__array_namespace_info__",
        *(name for name in globals() if name[0] != "_" and name not in _TOOLS),
    }
)


def __dir__() -> list[str]:
    return __all__
