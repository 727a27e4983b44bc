"""Activations and the error function, for ragged and dense arrays."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from ..array import Array
from ..backends import backend
from ..broadcasting import as_values, mask_tail, with_values_like
from ..checks import check_floating
from ..dtypes import accumulation_dtype

__all__ = ["erf", "gelu", "relu", "silu"]


def relu(x: Any, /) -> Any:
    """Compute the rectified linear unit ``max(x, 0)``; its gradient at 0 is 0.

    Parameters
    ----------
    x
        Ragged or dense floating-point array.

    Returns
    -------
    Array or dense array
        Like `x`. NaN stays NaN.

    Raises
    ------
    TypeError
        If `x` is not an array of floating-point numbers.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.relu(scree.from_lengths(np.asarray([-1.0, 2.0]), [1, 1])).values
    array([0., 2.])
    """
    return _apply(x, "relu")


def gelu(x: Any, /, *, approximate: str = "none") -> Any:
    """Compute the Gaussian error linear unit (Hendrycks and Gimpel, 2016).

    It is ``x * (1 + erf(x / sqrt(2))) / 2``.

    Parameters
    ----------
    x
        Ragged or dense floating-point array. Half precision is computed in float32.
    approximate
        "none", or "tanh" for the approximation of the paper, ``x * (1 + tanh(sqrt(2 / pi) * (x +
        0.044715 * x ** 3))) / 2``, as in GPT-2.

    Returns
    -------
    Array or dense array
        Like `x`. The result at -inf is 0, and the gradients at -inf and inf are 0 and 1.

    Raises
    ------
    TypeError
        If `x` is not an array of floating-point numbers.
    ValueError
        If `approximate` is neither "none" nor "tanh".

    Examples
    --------
    >>> import numpy as np, scree
    >>> x = scree.from_lengths(np.asarray([-1.0, 0.0, 1.0]), [1, 2])
    >>> scree.gelu(x).values.round(4), scree.gelu(x, approximate="tanh").values.round(4)
    (array([-0.1587,  0.    ,  0.8413]), array([-0.1588,  0.    ,  0.8412]))
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate: expected 'none' or 'tanh', got {approximate!r}")
    return _apply(x, "gelu" if approximate == "none" else "gelu_tanh")


def silu(x: Any, /) -> Any:
    """Compute the sigmoid linear unit ``x / (1 + exp(-x))``, also called swish.

    Parameters
    ----------
    x
        Ragged or dense floating-point array. Half precision is computed in float32.

    Returns
    -------
    Array or dense array
        Like `x`. The result at -inf is 0, and the gradients at -inf and inf are 0 and 1.

    Raises
    ------
    TypeError
        If `x` is not an array of floating-point numbers.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.silu(scree.from_lengths(np.asarray([-1.0, 0.0, 1.0]), [1, 2])).values.round(4)
    array([-0.2689,  0.    ,  0.7311])
    """
    return _apply(x, "silu")


def erf(x: Any, /) -> Any:
    """Compute the error function ``2 / sqrt(pi) * integral of exp(-t ** 2) from 0 to x``.

    PyTorch and JAX compute it with their own functions. The other libraries use polynomials that
    interpolate ``erf(x) / x`` and ``exp(x ** 2) * erfc(x)`` at Chebyshev nodes. Their error is below
    2 ulp.

    Parameters
    ----------
    x
        Ragged or dense floating-point array. Half precision is computed in float32.

    Returns
    -------
    Array or dense array
        Like `x`.

    Raises
    ------
    TypeError
        If `x` is not an array of floating-point numbers.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.erf(scree.from_lengths(np.asarray([-np.inf, 0.0, 0.5]), [1, 2])).values.round(6)
    array([-1.      ,  0.      ,  0.5205])
    """
    return _apply(x, "erf")


#: Numbers of which one block of the polynomials is computed.
BLOCK = 1 << 16
#: ``erf(x) / x - 1`` as a polynomial in ``x ** 2`` for 0 <= x <= 1; its error is 8e-18.
ERF_OVER_X = (
    0.12837916709551256,
    -0.37612638903183543,
    0.11283791670945006,
    -0.02686617064323777,
    0.0052239776071164225,
    -0.0008548325975389692,
    0.00012055294904839707,
    -1.492473690741966e-05,
    1.6447424703317362e-06,
    -1.6208483801871705e-07,
    1.3720064546777686e-08,
    -7.795898827002142e-10,
)
#: ``exp(x ** 2) * erfc(x)`` as a polynomial in ``14.4 / (x + 3) - 2.6`` for 1 <= x <= 6; the error of
#: erfc is 4e-18.
SCALED_ERFC = (
    0.20798329133342885,
    0.15436117429436919,
    0.04969844540339464,
    0.012713147695692198,
    0.002479314697078186,
    0.0003316029605764125,
    1.9563583246137112e-05,
    -2.4255574719050315e-06,
    -5.541274478467714e-07,
    4.526700764248741e-09,
    1.1339538061744706e-08,
    2.6381508985080735e-10,
    -2.571511429603255e-10,
    -6.047405945991704e-12,
    6.0857915906870915e-12,
)


def _apply(x: Any, name: str) -> Any:
    """Return an activation of `x`: the library's own function, or its formula in a wide dtype.

    Magnitudes of at least the bound do not reach the function, because ``inf * 0`` would make the
    result or its gradient NaN. There the result is 0 or `x`.
    """
    values = as_values(x)
    lib = backend(values, "x")
    xp, dtype = lib.xp, values.dtype
    check_floating("x", values)
    if isinstance(x, Array):
        values = mask_tail(x, values)
    function = (lib.activations or {}).get(name)
    if function is None:
        values = xp.astype(values, accumulation_dtype(xp, dtype), copy=False)
        function = partial(FORMULAS[name], xp)
    bound = BOUNDS.get(name)
    if bound is None:
        out = function(values)
    else:
        out = xp.where(values < bound, function(xp.clip(values, -bound, bound)), values)
    return with_values_like(x, xp.astype(out, dtype, copy=False))


def _relu(xp: Any, x: Any) -> Any:
    return xp.where(x <= 0, 0.0, x)


def _silu(xp: Any, x: Any) -> Any:
    # Not abs(x), whose gradient at 0 is 0.
    power = xp.exp(xp.where(x < 0, x, -x))
    return x * (xp.where(x < 0, power, 1.0) / (1 + power))


def _gelu(xp: Any, x: Any) -> Any:
    return x * (0.5 + 0.5 * _erf(xp, x * math.sqrt(0.5)))


def _gelu_tanh(xp: Any, x: Any) -> Any:
    return x * (0.5 + 0.5 * xp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _erf(xp: Any, x: Any) -> Any:
    lib = backend(x)
    if lib.erf is not None:
        return lib.erf(x)
    if lib.split is None:
        return erf_by_polynomials(xp, x)
    # The polynomials have several temporary arrays, which stay small in blocks.
    flat = xp.reshape(x, (-1,))
    size = flat.shape[0]
    starts = range(0, max(size, 1), BLOCK)
    parts = [erf_by_polynomials(xp, flat[i : min(i + BLOCK, size)]) for i in starts]
    return xp.reshape(parts[0] if len(parts) == 1 else xp.concat(parts), x.shape)


def erf_by_polynomials(xp: Any, x: Any) -> Any:
    """Return the error function with functions of the standard, for libraries without an accurate one."""
    magnitude = xp.abs(x)
    is_near = magnitude < 1
    near = xp.where(is_near, x, 0.0)
    near = near + near * _polynomial(ERF_OVER_X, near * near)
    far = xp.where(magnitude > 6, 6.0, magnitude)  # not xp.minimum: NaN stays NaN
    far = 1 - xp.exp(-far * far) * _polynomial(SCALED_ERFC, 14.4 / (far + 3) - 2.6)
    return xp.where(is_near, near, xp.where(x < 0, -far, far))


def _polynomial(coefficients: tuple[float, ...], x: Any) -> Any:
    out = x * coefficients[-1] + coefficients[-2]
    for coefficient in coefficients[-3::-1]:
        out = out * x + coefficient
    return out


#: Name -> formula in functions of the standard.
FORMULAS = {"relu": _relu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "silu": _silu, "erf": _erf}
#: Name -> the magnitude from which the function is `x` or 0 in every dtype.
BOUNDS = {"gelu": 40.0, "gelu_tanh": 40.0, "silu": 800.0}
