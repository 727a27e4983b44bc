"""Dtypes of intermediate results, and conversion to booleans."""

from typing import Any

from .backends import constant

_accumulation_dtypes: dict[Any, Any] = {}


@constant
def accumulation_dtype(xp: Any, dtype: Any) -> Any:
    """Return the dtype to accumulate in: float32 for half precision, else the dtype itself."""
    if (xp, dtype) not in _accumulation_dtypes:
        half = xp.isdtype(dtype, "real floating") and xp.finfo(dtype).bits < 32
        _accumulation_dtypes[xp, dtype] = xp.float32 if half else dtype
    return _accumulation_dtypes[xp, dtype]


def real_dtype(xp: Any, dtype: Any) -> Any:
    """Return the dtype of the real part."""
    if not xp.isdtype(dtype, "complex floating"):
        return dtype
    return xp.float32 if dtype == xp.complex64 else xp.float64


def is_nonzero(xp: Any, values: Any) -> Any:
    """Return which values are not 0, by comparison.

    The standard casts no complex number to a boolean.
    """
    return values if xp.isdtype(values.dtype, "bool") else values != 0
