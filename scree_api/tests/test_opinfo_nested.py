"""PyTorch's own samples of nested tensors: scree against the per-row reference of `njt_op_db`.

The database gives jagged nested tensors (contiguous, transposed, with holes) and a reference that
calls the dense operation per row. SCREE_OPINFO=all runs every sample; the default is a sample of
them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from libraries import NAMES

import scree

if "torch" not in NAMES:
    pytest.skip("the samples are PyTorch's", allow_module_level=True)
torch = pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="torch.testing._internal needs it")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.opinfo.definitions.nested import njt_op_db

RUN_ALL = os.environ.get("SCREE_OPINFO") == "all"
SAMPLES_PER_OPERATION = None if RUN_ALL else 6
DATABASE = {op.full_name: op for op in njt_op_db if op.supports_njt}

SAME_NAME = """
abs acos acosh add asin asinh atan atan2 atanh ceil conj copysign cos cosh exp expm1 floor
floor_divide hypot isfinite isinf isnan log log10 log1p log2 logaddexp logical_and logical_not
logical_or logical_xor maximum minimum nextafter positive pow reciprocal remainder round sign
signbit sin sinh sqrt square tan tanh trunc
""".split()
RENAMED = {
    "neg": "negative",
    "mul": "multiply",
    "sub": "subtract",
    "div.no_rounding_mode": "divide",
    "true_divide": "divide",
    "conj_physical": "conj",
    "sgn": "sign",
    "round.decimals_0": "round",
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
}
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
}


def _elementwise(name: str) -> Callable[..., Any]:
    return lambda xp, *args: getattr(xp, name)(*args)


def _reduction(name: str) -> Callable[..., Any]:
    def call(xp: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        axis = tuple(dim) if isinstance(dim, list | tuple) else dim
        return getattr(xp, name)(x, axis=axis, keepdims=keepdim)

    return call


#: PyTorch's name -> the call on scree.
CALLS: dict[str, Callable[..., Any]] = {
    **{name: _elementwise(name) for name in SAME_NAME},
    **{name: _elementwise(ours) for name, ours in RENAMED.items()},
    **{name: _reduction(ours) for name, ours in REDUCTIONS.items()},
    "nn.functional.linear": lambda xp, x, weight, bias=None: (
        x @ weight.mT if bias is None else x @ weight.mT + bias
    ),
    "where": lambda xp, x, other, condition: xp.where(condition, x, other),
    "rsub": lambda xp, x, y: xp.subtract(y, x),
    "__rsub__": lambda xp, x, y: xp.subtract(y, x),
    "__rdiv__": lambda xp, x, y: xp.divide(y, x),
    "__rmod__": lambda xp, x, y: xp.remainder(y, x),
    "__rpow__": lambda xp, x, y: xp.pow(y, x),
}

#: Reason -> PyTorch's operations that have samples and no call here.
WITHOUT_CALL: dict[str, list[str]] = {
    "The nested samples lack rounding_mode and repeat div.no_rounding_mode.": [
        "div.floor_rounding"
    ],
    "The samples need integers, for which the database raises on CPU.": """
bitwise_not bitwise_left_shift bitwise_right_shift bitwise_and bitwise_or bitwise_xor lcm gcd
__rand__ __ror__ __rxor__
""".split(),
    "The samples need complex input, for which float32 has none.": """
complex imag nn.functional.silu.complex real angle polar
""".split(),
    "scree has the function with other arguments, and no converter is written here yet.": """
clamp_max clamp_min bmm chunk masked_select matmul max.reduction_with_dim min.reduction_with_dim
nn.functional.rms_norm narrow split split_with_sizes select unflatten index_put squeeze
unsqueeze nn.functional.embedding std std.unbiased var var.unbiased linalg.vector_norm
masked.logsumexp
""".split(),
    "It is a conversion or a fill; the tests of astype and full_like cover it.": """
clone to bfloat16 bool byte char double float half int long short cdouble cfloat chalf fill
""".split(),
    "It needs a CUDA compiler.": """
jiterator_unary jiterator_binary jiterator_binary_return_by_ref
""".split(),
    "The Array API standard and xp.ragged have no such function.": """
deg2rad div.trunc_rounding fmax fmin fmod frac i0 frexp ldexp heaviside isclose
nn.functional.relu nn.functional.elu nn.functional.prelu nn.functional.celu nn.functional.rrelu
nn.functional.selu nn.functional.silu nn.functional.hardsigmoid nn.functional.logsigmoid
nn.functional.mish nn.functional.softsign nn.functional.tanhshrink nn.functional.threshold
igamma igammac nn.functional.softshrink nn.functional.hardshrink nn.functional.hardtanh
nn.functional.relu6 mvlgamma.mvlgamma_p_1 mvlgamma.mvlgamma_p_3 mvlgamma.mvlgamma_p_5
float_power rad2deg round.decimals_3 round.decimals_neg_3 sinc exp2 nan_to_num rsqrt isposinf
isneginf isreal polygamma.polygamma_n_0 polygamma.polygamma_n_1 polygamma.polygamma_n_2
polygamma.polygamma_n_3 polygamma.polygamma_n_4 xlogy sigmoid digamma erf erfc erfinv lgamma
logit nn.functional.embedding_bag nn.functional.softplus nanmean nansum hash_tensor special.i0e
special.i1 special.i1e special.ndtr special.polygamma.special_polygamma_n_0 special.xlog1py
special.zeta special.entr special.ndtri special.log_ndtr special.erfcx special.airy_ai
special.bessel_j0 special.bessel_j1 special.bessel_y0 special.bessel_y1
special.chebyshev_polynomial_t special.chebyshev_polynomial_u special.chebyshev_polynomial_v
special.chebyshev_polynomial_w special.hermite_polynomial_h special.hermite_polynomial_he
special.laguerre_polynomial_l special.legendre_polynomial_p special.modified_bessel_i0
special.modified_bessel_i1 special.modified_bessel_k0 special.modified_bessel_k1
special.scaled_modified_bessel_k0 special.scaled_modified_bessel_k1
special.shifted_chebyshev_polynomial_t special.shifted_chebyshev_polynomial_u
special.shifted_chebyshev_polynomial_v special.shifted_chebyshev_polynomial_w
special.spherical_bessel_j0 masked.sum masked.prod masked.amax masked.amin masked.argmax
masked.argmin masked.mean masked.norm masked.var masked.std
""".split(),
}


def convert(x: Any) -> Any:
    """Convert nested tensors to ragged arrays; return anything else unchanged."""
    return scree.bridges.from_torch_nested(x) if getattr(x, "is_nested", False) else x


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
    found = torch.autograd.grad(total, inputs, allow_unused=True)
    return [x.values() if x is not None and x.is_nested else x for x in found]


def samples(op: Any) -> list[Any]:
    """Return the samples of an operation, in the default run spread over the database's list."""
    torch.manual_seed(0)
    found = list(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd))
    step = 1 if SAMPLES_PER_OPERATION is None else -(-len(found) // SAMPLES_PER_OPERATION)
    return found[::step]


def test_database_is_covered() -> None:
    reasons = [name for names in WITHOUT_CALL.values() for name in names]
    assert len(reasons) == len(set(reasons))
    assert not set(reasons) & set(CALLS)
    assert set(reasons) | set(CALLS) == set(DATABASE), (
        "map a new operation of torch, or say why not"
    )


@pytest.mark.parametrize("name", CALLS)
def test_scree_agrees_with_the_reference_per_row(name: str) -> None:
    op = DATABASE[name]
    checked = 0
    for sample in samples(op):
        if "holes" in sample.name and "batch+ragged" in sample.name:
            continue  # the reference reduces the whole buffer, holes included
        if not any(getattr(x, "is_nested", False) for x in (sample.input, *sample.args)):
            continue  # the reference looks for a nested tensor in these alone
        tensors = [sample.input, *sample.args, *sample.kwargs.values()]
        leaves = [x for x in tensors if isinstance(x, torch.Tensor) and x.requires_grad]
        arrays = [convert(x) for x in (sample.input, *sample.args)]
        options = {key: convert(x) for key, x in sample.kwargs.items()}
        xp = scree.namespace(
            *[x for x in (*arrays, *options.values()) if isinstance(x, scree.Array)]
        )
        expected = parts(op.ref(op, sample))
        got = parts(CALLS[name](xp, *arrays, **options))
        assert len(got) == len(expected), sample.name
        for a, b in zip(got, expected, strict=True):
            assert a.shape == b.shape, sample.name
            torch.testing.assert_close(
                a, b, rtol=1e-4, atol=1e-5, equal_nan=True, check_dtype=False, msg=sample.name
            )
        if op.supports_autograd:
            pairs = zip(gradients(got, leaves), gradients(expected, leaves), strict=True)
            for a, b in pairs:
                if a is not None or b is not None:
                    a, b = (torch.zeros(()) if x is None else x for x in (a, b))
                    torch.testing.assert_close(
                        *torch.broadcast_tensors(a, b), rtol=1e-3, atol=1e-4, equal_nan=True
                    )
        checked += 1
    assert checked
