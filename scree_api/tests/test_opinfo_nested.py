"""PyTorch's own samples of nested tensors: scree against the per-row reference of `njt_op_db`.

The database has jagged nested tensors (contiguous, transposed, with holes) and a reference that
calls the dense operation per row. By default a few samples of one dtype run per operation;
SCREE_OPINFO=all runs every sample in every dtype.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import copy
from typing import Any

import pytest
import torch
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, ReductionOpInfo, UnaryUfuncInfo
from torch.testing._internal.opinfo.definitions.nested import njt_op_db

import scree

pytestmark = pytest.mark.needs("torch")

RUN_ALL = os.environ.get("SCREE_OPINFO") == "all"
SAMPLES_PER_OPERATION = 6
DATABASE = {op.full_name: op for op in njt_op_db if op.supports_njt}
REAL = (torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.uint8)
COMPLEX = (torch.complex64,)
#: The dtypes of the full run, one or two per kind. The default run takes an operation's first one.
DTYPES = (*REAL, torch.float16, torch.bfloat16, *INTEGERS, *COMPLEX, torch.bool)
TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float64: 1e-7}

SAME_NAME = """
abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_or
bitwise_right_shift bitwise_xor ceil conj copysign cos cosh exp expm1 floor floor_divide hypot imag
isfinite isinf isnan log log10 log1p log2 logaddexp logical_and logical_not logical_or logical_xor
maximum minimum nextafter positive pow real reciprocal remainder round sign signbit sin sinh sqrt
square tan tanh trunc
""".split()
RENAMED = {
    "bitwise_not": "bitwise_invert",
    "clamp_max": "minimum",
    "clamp_min": "maximum",
    "neg": "negative",
    "mul": "multiply",
    "sub": "subtract",
    "div.no_rounding_mode": "divide",
    "true_divide": "divide",
    "conj_physical": "conj",
    "sgn": "sign",
    "max.binary": "maximum",
    "min.binary": "minimum",
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "__radd__": "add",
    "__rmul__": "multiply",
    "__rand__": "bitwise_and",
    "__ror__": "bitwise_or",
    "__rxor__": "bitwise_xor",
}
CONVERSIONS = {
    "bfloat16": "bfloat16",
    "bool": "bool",
    "byte": "uint8",
    "char": "int8",
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "int": "int32",
    "long": "int64",
    "short": "int16",
    "cdouble": "complex128",
    "cfloat": "complex64",
}
#: The samples of `masked` have no masks.
REDUCTIONS = {
    "all": "all",
    "any": "any",
    "amax": "max",
    "amin": "min",
    "mean": "mean",
    "sum": "sum",
    "prod": "prod",
    "argmax": "argmax",
    "argmin": "argmin",
    "count_nonzero": "count_nonzero",
    "masked.amax": "max",
    "masked.amin": "min",
    "masked.mean": "mean",
    "masked.sum": "sum",
    "masked.prod": "prod",
    "masked.argmax": "argmax",
    "masked.argmin": "argmin",
}


def _elementwise(name: str) -> Callable[..., Any]:
    return lambda xp, *args: getattr(xp, name)(*args)


def _conversion(name: str) -> Callable[..., Any]:
    return lambda xp, x: xp.astype(x, getattr(torch, name))


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(xp: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        axis = tuple(dim) if isinstance(dim, list | tuple) else dim
        return function(xp, x, axis=axis, keepdims=keepdim)

    return call


def _named_reduction(name: str) -> Callable[..., Any]:
    return _reduction(lambda xp, x, **options: getattr(xp, name)(x, **options))


def _extremum(name: str) -> Callable[..., Any]:
    def call(xp: Any, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        value = getattr(xp, name)(x, axis=dim, keepdims=keepdim)
        if dim is None:
            return value
        return value, getattr(xp, f"arg{name}")(x, axis=dim, keepdims=keepdim)

    return call


def _index(dim: int, index: int | slice) -> tuple[int | slice, ...]:
    return (*(slice(None),) * dim, index)


def _select(xp: Any, x: Any, dim: int, index: int) -> Any:
    selected = x[_index(dim, index)]
    # The reference returns one tensor per row.
    return list(xp.unstack(selected)) if dim == x.ragged_dim + 1 else selected


def _split(xp: Any, x: Any, split_size_or_sections: int, dim: int) -> list[Any]:
    size = split_size_or_sections
    length = x.max_length if x.shape[dim] is None else x.shape[dim]
    return [x[_index(dim, slice(i, i + size))] for i in range(0, length, size)]


def _split_with_sizes(xp: Any, x: Any, split_sizes: list[int], dim: int) -> list[Any]:
    first, _ = split_sizes
    return [x[_index(dim, slice(None, first))], x[_index(dim, slice(first, None))]]


def _chunk(xp: Any, x: Any, chunks: int, dim: int) -> list[Any]:
    return _split(xp, x, -(-x.shape[dim] // chunks), dim)


def _matmul(xp: Any, x: Any, other: Any) -> Any:
    if not isinstance(x, scree.Array):
        return (other.mT @ x.mT).mT
    if not isinstance(other, scree.Array):
        return x @ other
    (x, _), (other, _) = scree.to_padded(x.mT), scree.to_padded(other)
    return x.mT @ other


def _rms_norm(xp: Any, x: Any, normalized_shape: tuple[int, ...], weight: Any) -> Any:
    flat = xp.reshape(x, (*x.shape[: -weight.ndim], -1))
    # PyTorch's default is the spacing of the dtype in which it computes.
    eps = xp.finfo(xp.float64 if x.dtype == xp.float64 else xp.float32).eps
    return xp.reshape(xp.ragged.rms_norm(flat, xp.reshape(weight, (-1,)), eps=eps), x.shape)


def _index_put(xp: Any, x: Any, indices: list[Any], values: Any) -> Any:
    # The samples list every row, and one position for all rows.
    positions = [int(index[0]) for index in indices[1:]]
    return scree.at(x)[(slice(None), *positions)].set(values)


def _embedding_bag(xp: Any, weight: Any, x: Any, mode: str, per_sample_weights: Any) -> Any:
    tokens = xp.take(weight, x, axis=0)
    if per_sample_weights is not None:
        tokens = tokens * xp.expand_dims(per_sample_weights, axis=-1)
    return getattr(xp, mode)(tokens, axis=1)


def _logsumexp(xp: Any, x: Any, axis: int | None, keepdims: bool) -> Any:
    if axis == x.ragged_dim + 1 and not keepdims:
        return xp.ragged.logsumexp(x)
    return xp.log(xp.sum(xp.exp(x), axis=axis, keepdims=keepdims))


#: PyTorch's name -> the call of functions of scree, in every dtype of the database.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _elementwise(name) for name in SAME_NAME},
    **{name: _elementwise(function) for name, function in RENAMED.items()},
    **{name: _conversion(dtype) for name, dtype in CONVERSIONS.items()},
    **{name: _named_reduction(function) for name, function in REDUCTIONS.items()},
    "__rdiv__": lambda xp, x, y: xp.divide(y, x),
    "__rmod__": lambda xp, x, y: xp.remainder(y, x),
    "__rpow__": lambda xp, x, y: xp.pow(y, x),
    "__rsub__": lambda xp, x, y: xp.subtract(y, x),
    "rsub": lambda xp, x, y: xp.subtract(y, x),
    "bmm": lambda xp, x, mat2: x @ mat2,
    "chunk": _chunk,
    "clone": lambda xp, x, memory_format=None: xp.astype(x, x.dtype, copy=True),
    "fill": lambda xp, x, value: xp.full_like(x, value),
    "index_put": _index_put,
    "linalg.vector_norm": _reduction(lambda xp, x, **opts: xp.linalg.vector_norm(x, **opts)),
    "masked.norm": _reduction(lambda xp, x, **opts: xp.linalg.vector_norm(x, **opts)),
    "masked.std": _reduction(lambda xp, x, **opts: xp.std(x, correction=1, **opts)),
    "masked.var": _reduction(lambda xp, x, **opts: xp.var(x, correction=1, **opts)),
    "masked_select": lambda xp, x, mask: x[mask],
    "matmul": _matmul,
    "max.reduction_with_dim": _extremum("max"),
    "min.reduction_with_dim": _extremum("min"),
    "narrow": lambda xp, x, dim, start, length: x[_index(dim, slice(start, start + length))],
    "nn.functional.embedding": lambda xp, weight, x: xp.take(weight, x, axis=0),
    "nn.functional.embedding_bag": _embedding_bag,
    "nn.functional.linear": lambda xp, x, weight, bias=None: (
        x @ weight.mT if bias is None else x @ weight.mT + bias
    ),
    "nn.functional.rms_norm": _rms_norm,
    "select": _select,
    "split": _split,
    "split_with_sizes": _split_with_sizes,
    "squeeze": lambda xp, x, dim: xp.squeeze(x, axis=dim) if x.shape[dim] == 1 else x,
    "std": _reduction(lambda xp, x, **opts: xp.std(x, correction=1, **opts)),
    "to": lambda xp, x, dtype: xp.astype(x, dtype),
    "unflatten": lambda xp, x, dim, sizes: xp.reshape(
        x, (*x.shape[:dim], *sizes, *x.shape[dim + 1 :])
    ),
    "unsqueeze": lambda xp, x, dim: xp.expand_dims(x, axis=dim),
    "var": _reduction(lambda xp, x, **opts: xp.var(x, correction=1, **opts)),
    "where": lambda xp, x, condition, other: xp.where(condition, x, other),
}

#: PyTorch's name -> an expression that users of scree write instead, for real floating point.
EXPRESSIONS: dict[str, Callable[..., Any]] = {
    "complex": lambda xp, x, y: x + 1j * y,
    "deg2rad": lambda xp, x: x * (xp.pi / 180),
    "exp2": lambda xp, x: xp.pow(2, x),
    "float_power": lambda xp, x, y: xp.pow(xp.astype(x, xp.float64), xp.astype(y, xp.float64)),
    "fmax": lambda xp, x, y: xp.where(xp.isnan(x) | (x < y), y, x),
    "fmin": lambda xp, x, y: xp.where(xp.isnan(x) | (x > y), y, x),
    "fmod": lambda xp, x, y: x - xp.trunc(x / y) * y,
    "frac": lambda xp, x: x - xp.trunc(x),
    "heaviside": lambda xp, x, y: xp.where(x == 0, y, xp.astype(x > 0, y.dtype)),
    "isclose": lambda xp, x, y: xp.abs(x - y) <= 1e-8 + 1e-5 * xp.abs(y),
    "isneginf": lambda xp, x: x == -xp.inf,
    "isposinf": lambda xp, x: x == xp.inf,
    "ldexp": lambda xp, x, y: x * xp.pow(2, y),
    "masked.logsumexp": _reduction(_logsumexp),
    "nan_to_num": lambda xp, x: xp.where(
        xp.isnan(x), 0, xp.clip(x, xp.finfo(x.dtype).min, xp.finfo(x.dtype).max)
    ),
    "nanmean": _reduction(
        lambda xp, x, **opts: (
            xp.sum(xp.where(xp.isnan(x), 0, x), **opts)
            / xp.sum(xp.astype(~xp.isnan(x), x.dtype), **opts)
        )
    ),
    "nansum": _reduction(lambda xp, x, **opts: xp.sum(xp.where(xp.isnan(x), 0, x), **opts)),
    "nn.functional.celu": lambda xp, x: xp.where(x > 0, x, xp.expm1(x)),
    "nn.functional.elu": lambda xp, x: xp.where(x > 0, x, xp.expm1(x)),
    "nn.functional.hardshrink": lambda xp, x: xp.where(xp.abs(x) > 0.5, x, 0),
    "nn.functional.hardsigmoid": lambda xp, x: xp.clip(x / 6 + 0.5, 0, 1),
    "nn.functional.hardtanh": lambda xp, x: xp.clip(x, -1, 1),
    "nn.functional.logsigmoid": lambda xp, x: -xp.logaddexp(0, -x),
    "nn.functional.mish": lambda xp, x: x * xp.tanh(xp.logaddexp(0, x)),
    "nn.functional.prelu": lambda xp, x, weight: xp.where(x > 0, x, weight * x),
    "nn.functional.relu": lambda xp, x: xp.maximum(x, 0),
    "nn.functional.relu6": lambda xp, x: xp.clip(x, 0, 6),
    # The slope of inference, which is not random.
    "nn.functional.rrelu": lambda xp, x: xp.where(x > 0, x, (1 / 8 + 1 / 3) / 2 * x),
    "nn.functional.selu": lambda xp, x: (
        1.0507009873554805 * xp.where(x > 0, x, 1.6732632423543772 * xp.expm1(x))
    ),
    "nn.functional.silu": lambda xp, x: x / (1 + xp.exp(-x)),
    "nn.functional.softplus": lambda xp, x: xp.logaddexp(0, x),
    "nn.functional.softshrink": lambda xp, x: x - xp.clip(x, -0.5, 0.5),
    "nn.functional.softsign": lambda xp, x: x / (1 + xp.abs(x)),
    "nn.functional.tanhshrink": lambda xp, x: x - xp.tanh(x),
    "nn.functional.threshold": lambda xp, x, threshold, value: xp.where(x > threshold, x, value),
    "polar": lambda xp, x, y: x * xp.exp(1j * y),
    "rad2deg": lambda xp, x: x * (180 / xp.pi),
    "rsqrt": lambda xp, x: 1 / xp.sqrt(x),
    "sigmoid": lambda xp, x: 1 / (1 + xp.exp(-x)),
    "sinc": lambda xp, x: xp.where(x == 0, 1, xp.sin(xp.pi * x) / (xp.pi * x)),
    "special.entr": lambda xp, x: xp.where(x > 0, -x * xp.log(x), xp.where(x < 0, -xp.inf, 0.0)),
}

#: The same for complex input.
COMPLEX_EXPRESSIONS: dict[str, Callable[..., Any]] = {
    "angle": lambda xp, x: xp.atan2(xp.imag(x), xp.real(x)),
    "isreal": lambda xp, x: xp.imag(x) == 0,
    "nn.functional.silu.complex": lambda xp, x: x / (1 + xp.exp(-x)),
}
CALLS = {**FUNCTIONS, **EXPRESSIONS, **COMPLEX_EXPRESSIONS}

#: Reason -> PyTorch's operations that have samples and no call here.
WITHOUT_CALL: dict[str, list[str]] = {
    "The nested samples lack the options and repeat div.no_rounding_mode, round, std or var.": """
div.floor_rounding div.trunc_rounding round.decimals_0 round.decimals_3 round.decimals_neg_3
std.unbiased var.unbiased
""".split(),
    "The standard has no complex32.": ["chalf"],
    "No one-line expression has PyTorch's gradient outside the domain of the function.": """
logit xlogy special.xlog1py
""".split(),
    "It needs a CUDA compiler.": """
jiterator_unary jiterator_binary jiterator_binary_return_by_ref
""".split(),
    "The standard gives no access to the bits of a number.": ["frexp", "hash_tensor"],
    "The standard has no number theory.": ["gcd", "lcm"],
    "The standard has no gamma functions.": """
digamma igamma igammac lgamma mvlgamma.mvlgamma_p_1 mvlgamma.mvlgamma_p_3 mvlgamma.mvlgamma_p_5
polygamma.polygamma_n_0 polygamma.polygamma_n_1 polygamma.polygamma_n_2 polygamma.polygamma_n_3
polygamma.polygamma_n_4 special.polygamma.special_polygamma_n_0 special.zeta
""".split(),
    "The standard has no error function.": """
erf erfc erfinv special.erfcx special.log_ndtr special.ndtr special.ndtri
""".split(),
    "The standard has no Bessel functions.": """
i0 special.airy_ai special.bessel_j0 special.bessel_j1 special.bessel_y0 special.bessel_y1
special.i0e special.i1 special.i1e special.modified_bessel_i0 special.modified_bessel_i1
special.modified_bessel_k0 special.modified_bessel_k1 special.scaled_modified_bessel_k0
special.scaled_modified_bessel_k1 special.spherical_bessel_j0
""".split(),
    "The standard has no orthogonal polynomials.": """
special.chebyshev_polynomial_t special.chebyshev_polynomial_u special.chebyshev_polynomial_v
special.chebyshev_polynomial_w special.hermite_polynomial_h special.hermite_polynomial_he
special.laguerre_polynomial_l special.legendre_polynomial_p special.shifted_chebyshev_polynomial_t
special.shifted_chebyshev_polynomial_u special.shifted_chebyshev_polynomial_v
special.shifted_chebyshev_polynomial_w
""".split(),
}

#: Operation -> its dtypes that do not run, with the reason.
WITHOUT_DTYPE: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(
        ("std", "var", "masked.std", "masked.var"),
        (COMPLEX, "The standard has no variance of complex numbers."),
    ),
    **dict.fromkeys(
        ("max.reduction_with_dim", "min.reduction_with_dim"),
        ((torch.bool,), "PyTorch has no argmax of booleans, which finds the position."),
    ),
    **dict.fromkeys(
        ("masked_select", "where"),
        (COMPLEX, "The database compares numbers to make the condition; complex ones raise."),
    ),
    "nn.functional.rms_norm": (COMPLEX, "The norm is of real numbers."),
    "real": (tuple(set(DTYPES) - set(COMPLEX)), "In the standard, real takes complex numbers."),
}


def is_along_rows(sample: Any) -> bool:
    """Return whether the axis of a sample is the ragged axis."""
    return sample.kwargs["dim"] == sample.input._ragged_idx


def lengths(x: Any) -> list[int]:
    """Return the lengths of the rows of a nested tensor."""
    return scree.bridges.from_torch_nested(x).lengths.tolist()


#: Reason -> whether a sample of an operation is left out.
WITHOUT_SAMPLE: dict[str, Callable[[str, Any], bool]] = {
    "PyTorch's reference lacks the batch axis.": lambda name, sample: (
        name in ("narrow", "split", "split_with_sizes", "unflatten", "unsqueeze")
        and sample.kwargs["dim"] == 0
    ),
    "PyTorch's reference raises for a row that is too short.": lambda name, sample: (
        name == "narrow" and is_along_rows(sample) and min(lengths(sample.input)) < 3
    ),
    "PyTorch's reference raises where the number of pieces differs per row.": (
        lambda name, sample: (
            name == "split"
            and is_along_rows(sample)
            and len({-(-n // 3) for n in lengths(sample.input)}) > 1
        )
    ),
    "The size of a chunk differs per row; slices of scree have one size.": lambda name, sample: (
        name == "chunk" and is_along_rows(sample)
    ),
    "PyTorch's reference does not stack the numbers that it selects.": lambda name, sample: (
        name == "select" and sample.input.ndim == 2 and is_along_rows(sample)
    ),
    "xp.argmax of all entries requires the ragged axis in front.": lambda name, sample: (
        name.removeprefix("masked.") in ("argmax", "argmin")
        and sample.kwargs.get("dim") is None
        and sample.input._ragged_idx != 1
    ),
    "PyTorch's reference reads the ragged axis as the channels.": lambda name, sample: (
        name == "nn.functional.prelu" and sample.kwargs["weight"].ndim == 1
    ),
    "xp.take has no padding_idx, whose gradient is zero.": lambda name, sample: (
        name == "nn.functional.embedding" and "padding_idx" in sample.kwargs
    ),
    "Along the ragged axis scree takes one integer for all rows.": lambda name, sample: (
        name == "index_put" and any(len(set(i.tolist())) > 1 for i in sample.kwargs["indices"][1:])
    ),
}

#: The result has the dtype of the standard in scree, and another dtype in PyTorch.
OTHER_DTYPE = ("all", "any", "masked.argmax", "masked.argmin")
#: PyTorch does not differentiate nested tensors of complex numbers.
COMPLEX_RESULT = ("cdouble", "cfloat", "complex", "polar")


#: Samples per kind of operation in one dtype, and of the operations with another number. A smaller
#: number fails, so that no sample disappears unnoticed.
COUNTS_PER_KIND = {UnaryUfuncInfo: 11, BinaryUfuncInfo: 91, ReductionOpInfo: 125}
COUNTS = {
    "argmax": 55,
    "argmin": 55,
    "bmm": 3,
    "chunk": 92,
    "clone": 13,
    "count_nonzero": 68,
    "index_put": 34,
    "masked.amax": 57,
    "masked.amin": 57,
    "masked.argmax": 55,
    "masked.argmin": 55,
    "masked.logsumexp": 57,
    "masked.mean": 57,
    "masked.norm": 57,
    "masked.prod": 57,
    "masked.std": 57,
    "masked.sum": 57,
    "masked.var": 57,
    "masked_select": 3,
    "matmul": 10,
    "max.reduction_with_dim": 57,
    "min.reduction_with_dim": 57,
    "narrow": 56,
    "nn.functional.embedding": 1,
    "nn.functional.embedding_bag": 4,
    "nn.functional.linear": 18,
    "nn.functional.prelu": 2,
    "nn.functional.rms_norm": 9,
    "prod": 57,
    "select": 77,
    "split": 50,
    "split_with_sizes": 12,
    "squeeze": 16,
    "to": 22,
    "unflatten": 48,
    "unsqueeze": 57,
    "where": 91,
}


def count(name: str) -> int:
    """Return the number of samples of an operation in one dtype."""
    return COUNTS.get(name) or COUNTS_PER_KIND[type(DATABASE[name])]


def dtypes(name: str) -> list[Any]:
    """Return the dtypes of an operation that run; in the default run the first one."""
    if name in EXPRESSIONS:
        candidates = REAL
    elif name in COMPLEX_EXPRESSIONS:
        candidates = COMPLEX
    else:
        candidates = DTYPES
    excluded, _ = WITHOUT_DTYPE.get(name, ((), ""))
    supported = [x for x in candidates if x in DATABASE[name].dtypes and x not in excluded]
    return supported if RUN_ALL else supported[:1]


def is_nested(x: Any) -> bool:
    """Return whether `x` is a nested tensor."""
    return isinstance(x, torch.Tensor) and x.is_nested


def convert(x: Any) -> Any:
    """Convert nested tensors to ragged arrays; return anything else unchanged."""
    return scree.bridges.from_torch_nested(x) if is_nested(x) else x


def parts(x: Any) -> list[Any]:
    """Return the rows of a nested tensor or ragged array, or the dense tensor itself, in a list."""
    if isinstance(x, tuple | list):
        return [part for item in x for part in parts(item)]
    if isinstance(x, scree.Array):
        return list(scree.unpack(x))
    return list(x.unbind()) if x.is_nested else [x]


def gradients(outputs: list[Any], inputs: list[Any]) -> list[Any]:
    """Return the gradients of a weighted sum of the finite outputs; None where there is none."""
    flat = [x.flatten() for x in outputs if x.requires_grad]
    flat = [torch.where(x.isfinite(), x, 0.0) for x in flat if x.numel()]
    if not flat:
        return [None] * len(inputs)
    total = sum((x * torch.arange(1.0, 1 + len(x)).cos()).sum() for x in flat)
    result = torch.autograd.grad(total, inputs, allow_unused=True)
    return [x.values() if is_nested(x) else x for x in result]


def cast(x: Any, dtype: Any) -> Any:
    """Convert a float32 tensor of a sample to another dtype; return anything else unchanged.

    PyTorch draws no random integers and booleans for nested tensors. Integers are never zero, so
    that they divide.
    """
    if not isinstance(x, torch.Tensor) or x.dtype != torch.float32 or dtype == torch.float32:
        return x
    values = x.detach()
    if dtype == torch.bool:
        result = values > 0
    elif dtype in INTEGERS:
        values = 4 * (values.abs() if dtype == torch.uint8 else values)
        result = (values.sign() * values.abs().ceil()).to(dtype)
    else:
        result = values.to(dtype).requires_grad_(x.requires_grad)
    # The reference reads these attributes.
    for name in ("_batch_dim", "_ndim"):
        if hasattr(x, name):
            setattr(result, name, getattr(x, name))
    return result


def samples(name: str, dtype: Any) -> list[Any]:
    """Return the samples of an operation, in the default run spread over the database's list."""
    op = DATABASE[name]
    has_gradient = op.supports_autograd and dtype in REAL and name not in COMPLEX_RESULT
    drawn = torch.float32 if dtype in (*INTEGERS, torch.bool) else dtype
    torch.manual_seed(0)
    result = []
    for sample in op.sample_inputs("cpu", drawn, requires_grad=has_gradient):
        if any(leaves_out(name, sample) for leaves_out in WITHOUT_SAMPLE.values()):
            continue
        sample.input = cast(sample.input, dtype)
        sample.args = tuple(cast(x, dtype) for x in sample.args)
        sample.kwargs = {key: cast(x, dtype) for key, x in sample.kwargs.items()}
        if name == "where":
            # The reference looks for a nested tensor in the arguments without a name.
            condition, other = sample.kwargs.pop("condition"), sample.kwargs.pop("other")
            if hasattr(sample.input, "_batch_dim"):
                condition._batch_dim = sample.input._batch_dim
            sample.args = (condition, other)
        result.append(sample)
    assert len(result) >= count(name)
    step = 1 if RUN_ALL else -(-len(result) // SAMPLES_PER_OPERATION)
    return result[::step]


def reference(op: Any, sample: Any) -> list[Any]:
    """Return PyTorch's results for a sample, which it may change."""
    sample = copy(sample)
    sample.kwargs = dict(sample.kwargs)
    if "reduction" in sample.name and sample.input.lengths() is not None:
        # The reference reads the whole buffer, holes included.
        rows = list(sample.input.unbind())
        sample.input = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return parts(op.ref(op, sample))


PAIRS = [(name, dtype) for name in CALLS for dtype in dtypes(name)]


def test_every_operation_has_a_call_or_a_reason() -> None:
    reasons = [name for names in WITHOUT_CALL.values() for name in names]
    assert len(reasons) == len(set(reasons))
    assert not set(reasons) & set(CALLS)
    assert set(reasons) | set(CALLS) == set(DATABASE), (
        "add a new operation of PyTorch to CALLS or WITHOUT_CALL"
    )


def test_no_operation_or_sample_disappears() -> None:
    assert {name for name, _ in PAIRS} == set(CALLS)
    assert len(PAIRS) == (1037 if RUN_ALL else 184)
    assert sum(count(name) for name in CALLS) == 8621


@pytest.mark.parametrize(
    ("name", "dtype"), PAIRS, ids=[f"{name}-{str(dtype)[6:]}" for name, dtype in PAIRS]
)
def test_scree_agrees_with_the_reference_per_row(name: str, dtype: Any) -> None:
    op = DATABASE[name]
    rtol = TOLERANCES.get(dtype, 1e-4)
    for sample in samples(name, dtype):
        tensors = [sample.input, *sample.args, *sample.kwargs.values()]
        leaves = [x for x in tensors if isinstance(x, torch.Tensor) and x.requires_grad]
        arrays = [convert(x) for x in (sample.input, *sample.args)]
        options = {key: convert(x) for key, x in sample.kwargs.items()}
        xp = scree.namespace(
            *[x for x in (*arrays, *options.values()) if isinstance(x, scree.Array)]
        )
        expected = reference(op, sample)
        actual = parts(CALLS[name](xp, *arrays, **options))
        assert len(actual) == len(expected), sample.name
        for a, b in zip(actual, expected, strict=True):
            assert a.shape == b.shape, sample.name
            torch.testing.assert_close(
                a,
                b,
                rtol=rtol,
                atol=rtol / 10,
                equal_nan=True,
                check_dtype=name not in OTHER_DTYPE,
                msg=lambda text, name=sample.name: f"{name}: {text}",
            )
        if leaves:
            pairs = zip(gradients(actual, leaves), gradients(expected, leaves), strict=True)
            for a, b in pairs:
                if a is not None or b is not None:
                    a, b = (torch.zeros((), dtype=dtype) if x is None else x for x in (a, b))
                    torch.testing.assert_close(
                        *torch.broadcast_tensors(a, b),
                        rtol=10 * rtol,
                        atol=rtol,
                        equal_nan=True,
                        msg=lambda text, name=sample.name: f"gradient, {name}: {text}",
                    )
