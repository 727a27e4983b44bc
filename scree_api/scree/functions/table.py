"""KINDS, the table of every function of the Array API standard and its action on ragged arrays.

A kind names the implementation (see `binding.implements`) that serves a function. `plain` names
take no ragged arrays (dtypes, constants, creation from nothing) and are the library's own.
Functions without a meaning on ragged arrays, or without one yet, are `unsupported` and say why; on
dense arrays they are the library's own too.
"""

from typing import NamedTuple


class Kind(NamedTuple):
    """The action of a function on ragged arrays.

    Attributes
    ----------
    name
        The implementation that serves the function; "plain" and "unsupported" have none.
    why
        For "unsupported" the reason, and the alternative.

    Examples
    --------
    >>> import scree
    >>> scree.functions.KINDS["sum"]
    Kind(name='reduction', why='')
    """

    name: str
    why: str = ""


def _all(kind: Kind, names: str) -> dict[str, Kind]:
    return dict.fromkeys(names.split(), kind)


def _each(names: str) -> dict[str, Kind]:
    """Return functions that are each a kind of their own."""
    return {name: Kind(name) for name in names.split()}


def unsupported(why: str, names: str) -> dict[str, Kind]:
    """Return functions that ragged arrays do not have."""
    return _all(Kind("unsupported", why), names)


KINDS: dict[str, Kind] = {
    **_all(Kind("elementwise"), """
        abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_invert bitwise_left_shift bitwise_or
        bitwise_right_shift bitwise_xor ceil clip conj copysign cos cosh divide equal exp expm1 floor floor_divide greater
        greater_equal hypot imag isfinite isinf isnan less less_equal log log10 log1p log2 logaddexp logical_and logical_not
        logical_or logical_xor maximum minimum multiply negative nextafter not_equal positive pow real reciprocal remainder
        round sign signbit sin sinh sqrt square subtract tan tanh trunc where"""),
    **_all(Kind("reduction"), "all any count_nonzero max mean min prod std sum var"),
    **_all(Kind("scan"), "cumulative_prod cumulative_sum"),
    **_all(Kind("arg"), "argmax argmin"),
    **_all(Kind("same_rows"), "astype empty_like full_like ones_like zeros_like"),
    **_all(Kind("dtypes"), "can_cast result_type"),
    **_all(Kind("matrices"), "tril triu"),
    **_each("""
        argsort asarray broadcast_arrays broadcast_to concat diff expand_dims flip isin matmul matrix_transpose moveaxis nonzero
        permute_dims repeat reshape roll searchsorted sort squeeze stack take take_along_axis tensordot tile unique_all
        unique_counts unique_inverse unique_values unstack vecdot"""),
    **unsupported("rows of different lengths are not a dense array; use arr.values, scree.unpack or scree.to_padded",
                  "from_dlpack meshgrid"),
    **_all(Kind("plain"), """
        arange bool broadcast_shapes complex128 complex64 e empty eye finfo float32 float64 full iinfo inf int16 int32 int64
        int8 isdtype linspace nan newaxis ones pi uint16 uint32 uint64 uint8 zeros __array_api_version__
        __array_namespace_info__"""),
}  # fmt: skip

_SPECTRA = "a transform over rows of different lengths has no common frequencies; use scree.unpack, or arr.values for elements"

#: The functions of the standard's extensions.
EXTENSIONS: dict[str, dict[str, Kind]] = {
    "linalg": {
        **_all(Kind("matrices"), """
            cholesky det diagonal eig eigh eigvals eigvalsh inv matrix_norm matrix_power matrix_rank pinv qr slogdet solve svd
            svdvals trace"""),
        **_each("matmul matrix_transpose tensordot vecdot vector_norm"),
        **unsupported("it is defined on vectors of one size; apply it to arr.values", "cross outer"),
    },
    "fft": {
        **unsupported(_SPECTRA, """
            fft fftn fftshift hfft ifft ifftn ifftshift ihfft irfft irfftn rfft rfftn"""),
        **_all(Kind("plain"), "fftfreq rfftfreq"),
    },
}  # fmt: skip
