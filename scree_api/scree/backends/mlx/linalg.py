"""Linear algebra of the Array API standard for ``mlx.core``, including its ``linalg`` extension.

MLX multiplies inexact dtypes only, its solvers do not broadcast, and several functions of the
standard are missing. This module fills those gaps.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import namedtuple
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

import mlx.core as mx

from .reductions import normalize_axes, sum

Array: TypeAlias = mx.array
Dtype: TypeAlias = mx.Dtype


def matmul(x1: Array, x2: Array, /) -> Array:
    """Return the matrix product; integers use a broadcast product, which needs O(n k m) memory."""
    dtype = mx.result_type(x1, x2)
    if mx.issubdtype(dtype, mx.inexact):
        return mx.matmul(x1, x2)
    a, b = x1[None] if x1.ndim == 1 else x1, x2[:, None] if x2.ndim == 1 else x2
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"matmul of shapes {x1.shape} and {x2.shape}: the inner sizes differ")
    out = mx.sum(a[..., :, :, None] * b[..., None, :, :], -2).astype(dtype)
    return mx.squeeze(out, tuple(i for i, x in ((-2, x1), (-1, x2)) if x.ndim == 1))


def tensordot(x1: Array, x2: Array, /, *, axes: Any = 2) -> Array:
    """Return the tensor contraction, for integers too."""
    if isinstance(axes, int):
        axes = range(x1.ndim - axes, x1.ndim), range(axes)
    summed1, summed2 = (
        normalize_axes(x, tuple(summed)) for x, summed in zip((x1, x2), axes, strict=True)
    )
    free1 = [axis for axis in range(x1.ndim) if axis not in summed1]
    free2 = [axis for axis in range(x2.ndim) if axis not in summed2]
    shape1, shape2 = [x1.shape[axis] for axis in free1], [x2.shape[axis] for axis in free2]
    inner = math.prod(x1.shape[axis] for axis in summed1)
    matrix1 = mx.reshape(mx.transpose(x1, [*free1, *summed1]), (math.prod(shape1), inner))
    matrix2 = mx.reshape(mx.transpose(x2, [*summed2, *free2]), (inner, math.prod(shape2)))
    return mx.reshape(matmul(matrix1, matrix2), (*shape1, *shape2))


def vecdot(x1: Array, x2: Array, /, *, axis: int = -1) -> Array:
    """Return the vector dot product, for integers too; accurate over long float axes."""
    if x1.shape[axis] != x2.shape[axis]:
        raise ValueError(
            f"vecdot of shapes {x1.shape} and {x2.shape}: the sizes of axis {axis} differ"
        )
    return sum(mx.conj(x1) * x2, axis=axis, dtype=mx.result_type(x1, x2))


def _diagonal(x: Array, /, *, offset: int = 0) -> Array:
    return mx.diagonal(x, offset, -2, -1)


def _trace(x: Array, /, *, offset: int = 0, dtype: Dtype | None = None) -> Array:
    return sum(_diagonal(x, offset=offset), axis=-1, dtype=dtype)


def _outer(x1: Array, x2: Array, /) -> Array:
    return x1[:, None] * x2[None, :]


def _vector_norm(x: Array, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Array:
    magnitude = mx.abs(x)
    if math.isinf(ord):
        return (mx.max if ord > 0 else mx.min)(magnitude, axis, keepdims)
    if ord == 0:
        return sum((magnitude != 0).astype(magnitude.dtype), axis=axis, keepdims=keepdims)
    if ord == 1:
        return sum(magnitude, axis=axis, keepdims=keepdims)
    if ord == 2:
        return mx.sqrt(sum(mx.square(magnitude), axis=axis, keepdims=keepdims))
    return sum(magnitude**ord, axis=axis, keepdims=keepdims) ** (1 / ord)


def _matrix_norm(x: Array, /, *, keepdims: bool = False, ord: Any = "fro") -> Array:
    return mx.linalg.norm(x if ord in ("nuc", 2, -2) else mx.abs(x), ord, [-2, -1], keepdims)


def _matrix_power(x: Array, n: int, /) -> Array:
    """Return the power by repeated squaring."""
    if n < 0:
        x, n = mx.linalg.inv(x), -n
    out = mx.broadcast_to(mx.eye(x.shape[-1], dtype=x.dtype), x.shape)
    while n:
        if n & 1:
            out = matmul(out, x)
        if n > 1:
            x = matmul(x, x)
        n >>= 1
    return out


_QR = namedtuple("_QR", "Q R")
_SVD = namedtuple("_SVD", "U S Vh")
_EIG = namedtuple("_EIG", "eigenvalues eigenvectors")
_SLOGDET = namedtuple("_SLOGDET", "sign logabsdet")


def _returning(result: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` with its results in the namedtuple ``result``."""
    return functools.wraps(fn)(lambda x, /: result(*fn(x)))


def _qr(x: Array, /, *, mode: str = "reduced") -> Any:
    """Return Q and R; ``complete`` uses the reduced factors of ``[x, identity]``."""
    rows, cols = x.shape[-2:]
    if mode == "complete" and rows > cols:
        identity = mx.broadcast_to(mx.eye(rows, dtype=x.dtype), (*x.shape[:-1], rows))
        q, r = mx.linalg.qr(mx.concat([x, identity], -1))
        r = r[..., :cols]
    else:
        q, r = mx.linalg.qr(x)
    return _QR(q, r)


def _svd(x: Array, /, *, full_matrices: bool = True) -> Any:
    u, s, vh = mx.linalg.svd(x)
    k = s.shape[-1]
    return _SVD(u, s, vh) if full_matrices else _SVD(u[..., :k], s, vh[..., :k, :])


def _svdvals(x: Array, /) -> Any:
    return mx.linalg.svd(x, compute_uv=False)


def _is_nonzero_singular_value(x: Array, s: Array, rtol: Any) -> Array:
    """Return which singular values ``s`` of ``x`` exceed the tolerance."""
    rtol = max(x.shape[-2:]) * mx.finfo(s.dtype).eps if rtol is None else rtol
    return s > mx.max(s, -1, True) * (rtol[..., None] if isinstance(rtol, mx.array) else rtol)


def _matrix_rank(x: Array, /, *, rtol: Any = None) -> Array:
    return mx.sum(_is_nonzero_singular_value(x, _svdvals(x), rtol), -1)


def _pinv(x: Array, /, *, rtol: Any = None) -> Array:
    u, s, vh = _svd(x, full_matrices=False)
    keep = _is_nonzero_singular_value(x, s, rtol)
    inverse = mx.where(keep, 1 / mx.where(keep, s, mx.ones_like(s)), mx.zeros_like(s))
    return mx.matmul(mx.conj(vh).mT * inverse[..., None, :], mx.conj(u).mT)


def _solve(x1: Array, x2: Array, /) -> Array:
    """Return the solution of linear systems; broadcasts the batch axes."""
    b = x2[..., None] if x2.ndim == 1 else x2
    batch = mx.broadcast_shapes(x1.shape[:-2], b.shape[:-2])
    out = mx.linalg.solve(*(mx.broadcast_to(a, (*batch, *a.shape[-2:])) for a in (x1, b)))
    return out[..., 0] if x2.ndim == 1 else out


def warn_on_float64(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``fn`` warn on float64 input, whose result MLX silently narrows to complex64."""

    @functools.wraps(fn)
    def checked(x: Array, /, *args: Any, **kwargs: Any) -> Any:
        if x.dtype == mx.float64:
            warnings.warn(
                f"MLX has no complex128: {fn.__name__.lstrip('_')} of float64 gives complex64; use "
                "astype(x, float32)",
                RuntimeWarning,
                stacklevel=2,
            )
        return fn(x, *args, **kwargs)

    return checked


def make_extension(library: Any, unchanged: str, *functions: Callable[..., Any]) -> ModuleType:
    """Return an extension module of the standard.

    It contains the names `unchanged` of `library`, and `functions` under their names without a
    leading underscore.
    """
    name = library.__name__.rpartition(".")[2]
    module = ModuleType(
        f"{__package__}.namespace.{name}", f"The {name} extension of the standard for mlx.core."
    )
    members = {key: getattr(library, key) for key in unchanged.split()} | {
        f.__name__.lstrip("_"): f for f in functions
    }
    vars(module).update(members, __all__=sorted(members))
    return module


linalg = make_extension(
    mx.linalg,
    "cholesky cross det eigvalsh inv",
    mx.matrix_transpose,
    matmul,
    tensordot,
    vecdot,
    _diagonal,
    _matrix_norm,
    _matrix_power,
    _matrix_rank,
    _outer,
    _pinv,
    _qr,
    _solve,
    _svd,
    _svdvals,
    _trace,
    _vector_norm,
    _returning(_EIG, mx.linalg.eigh),
    _returning(_SLOGDET, mx.linalg.slogdet),
    _returning(_EIG, warn_on_float64(mx.linalg.eig)),
    warn_on_float64(mx.linalg.eigvals),
)
