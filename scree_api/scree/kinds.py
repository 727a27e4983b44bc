"""THE table: every function of the Array API standard, and how it acts on ragged arrays.

A kind names the lifter (in `lift.py`) that turns a library's function into one that knows ragged arrays. `plain` names
take no arrays of rows (dtypes, constants, creation from nothing) and are the library's own. What has no meaning on ragged
arrays, or none yet, is `unsupported` and says why; on dense arrays it is the library's own too.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """How a function acts on ragged arrays; `why` says why it does not, and what does."""

    name: str
    why: str = ""


def _all(kind: Kind, names: str) -> dict[str, Kind]:
    return dict.fromkeys(names.split(), kind)


def unsupported(why: str, names: str) -> dict[str, Kind]:
    """Functions that ragged arrays do not have."""
    return _all(Kind("unsupported", why), names)


_LATER = "it has no ragged form yet; apply it to arr.values where the rows do not matter, or to scree.to_padded(arr)"
_SHAPE = "a ragged array has one axis of unknown size; reshape arr.values and use arr.with_values"
_GRID = "rows of different lengths make no matrix; use scree.to_padded(arr) or loop over the rows"

KINDS: dict[str, Kind] = {
    **_all(Kind("elementwise"), """
        abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_invert bitwise_left_shift bitwise_or
        bitwise_right_shift bitwise_xor ceil clip conj copysign cos cosh divide equal exp expm1 floor floor_divide greater
        greater_equal hypot imag isfinite isinf isnan less less_equal log log10 log1p log2 logaddexp logical_and logical_not
        logical_or logical_xor maximum minimum multiply negative nextafter not_equal positive pow real reciprocal remainder
        round sign signbit sin sinh sqrt square subtract tan tanh trunc where"""),
    **_all(Kind("reduction"), "all any count_nonzero max mean min prod std sum var"),
    **_all(Kind("scan"), "cumulative_prod cumulative_sum"),
    **_all(Kind("same_rows"), "astype empty_like full_like ones_like zeros_like"),
    **_all(Kind("matmul"), "matmul"),
    **_all(Kind("take"), "take"),
    **_all(Kind("concat"), "concat"),
    **_all(Kind("stack"), "stack"),
    **_all(Kind("dtypes"), "can_cast result_type"),
    **_all(Kind("plain"), """
        arange asarray bool broadcast_shapes complex128 complex64 e empty eye finfo float32 float64 from_dlpack full iinfo
        inf int16 int32 int64 int8 isdtype linspace meshgrid nan newaxis ones pi uint16 uint32 uint64 uint8 zeros
        __array_api_version__ __array_namespace_info__"""),
    **unsupported(_LATER, """
        argmax argmin argsort broadcast_arrays broadcast_to diff expand_dims flip isin moveaxis nonzero permute_dims repeat
        roll searchsorted sort squeeze take_along_axis tensordot tile unstack vecdot unique_all unique_counts
        unique_inverse unique_values"""),
    **unsupported(_SHAPE, "reshape matrix_transpose"),
    **unsupported(_GRID, "tril triu"),
}  # fmt: skip

#: The functions of the extensions act on dense matrices; their names are the library's own.
EXTENSIONS = ("linalg", "fft")
