"""The libraries under test: array creation, dtypes, and conversion of results to NumPy.

Only this module depends on a particular library. It does not import scree.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")
COMPLEX = ("complex64",)
HALF = ("float16", "bfloat16")

#: Relative spacing and smallest positive number of each floating-point dtype.
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
TINY = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}


@dataclass(frozen=True, slots=True)
class Library:
    """One library on one device.

    Attributes
    ----------
    name
        Name under which the suite runs the library.
    dtypes
        Name of each supported dtype -> dtype of the library.
    array
        ``array(x, dtype)``: the NumPy array `x` as an array of the library.
    read
        ``read(x)``: an array of the library as a NumPy array. Floating point becomes float64,
        complex becomes complex128.
    host
        Whether scree can read offsets on this device without a synchronization, and so compares
        layouts by value.
    is_cuda
        Whether the arrays are on a CUDA device, whose exp, sin and tanh of float32 are less precise.
    default_float, default_integer
        Names of the default dtypes.
    compiles
        Whether the library compiles every operation for every shape. Then many shapes are slow.
    float32_transcendentals
        Whether exp, sin and tanh of float64 have only the precision of float32.
    generator
        ``generator(seed)``: the generator or key of the library's random functions, or None.
    gaps
        Missing function, ``"function-dtype"`` or extension -> reason. The case must fail, and the
        coverage page shows the reason.
    jit
        ``jit(f)``: the compiled function of dense arrays, or None.
    grad
        ``grad(f, *arrays)``: the gradients of a scalar function, or None.
    context
        Context manager in which a case runs.
    """

    name: str
    dtypes: dict[str, Any]
    array: Callable[[np.ndarray, Any], Any]
    read: Callable[[Any], np.ndarray]
    host: bool = True
    is_cuda: bool = False
    default_float: str = "float32"
    default_integer: str = "int64"
    compiles: bool = False
    float32_transcendentals: bool = False
    generator: Callable[[int], Any] | None = None
    gaps: dict[str, str] = field(default_factory=dict)
    jit: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    grad: Callable[..., list[Any]] | None = None
    context: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)

    def dtype_name(self, x: Any) -> str:
        """Return the name of the dtype of an array."""
        return next(name for name, dtype in self.dtypes.items() if x.dtype == dtype)

    def make(self, x: Any, dtype: str) -> Any:
        """Convert the NumPy array `x` to an array of the library, with a dtype given by name."""
        return self.array(np.asarray(x), self.dtypes[dtype])

    def gap(self, operation: str, dtype: str) -> str | None:
        """Return why the library lacks the function that an operation checks, or None."""
        names = f"{operation}-{dtype}", operation, operation.partition(".")[0]
        return next((self.gaps[name] for name in names if name in self.gaps), None)


def _widen(x: np.ndarray) -> np.ndarray:
    return x.astype(
        {"f": np.float64, "V": np.float64, "c": np.complex128}.get(x.dtype.kind, x.dtype)
    )


def _dtypes_of(module: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names if hasattr(module, name)}


@contextmanager
def _ignore_warnings(*messages: str) -> Iterator[None]:
    """Ignore the library's warnings about calls that the cases make on purpose, by their beginning."""
    with warnings.catch_warnings():
        for message in messages:
            warnings.filterwarnings("ignore", message)
        yield


#: NumPy's warning about results that are NaN or infinite.
NO_NUMBER = "(invalid value|divide by zero|overflow) encountered in"

_DTYPES = ("bool", *FLOATS, *INTEGERS, "uint16", "uint32", "uint64", *COMPLEX, "complex128")


def _numpy(device: str | None) -> Library:
    if device not in (None, "cpu"):
        raise ValueError(f"device: expected 'cpu', the only one of NumPy, got {device!r}")
    dtypes = {name: np.dtype(name) for name in _DTYPES if name != "bfloat16"}
    return Library(
        "numpy",
        dtypes,
        lambda x, dtype: np.array(x, dtype=dtype),
        lambda x: _widen(np.asarray(x)),
        default_float="float64",
        generator=np.random.default_rng,
        context=partial(
            _ignore_warnings, NO_NUMBER, "Arrays of 2-dimensional vectors are deprecated"
        ),
    )


def _torch(device: str | None) -> Library:
    import torch

    device_object = torch.device(device or "cpu")

    def read(x: torch.Tensor) -> np.ndarray:
        x = x.detach().cpu().resolve_conj().resolve_neg()
        return _widen((x.to(torch.float64) if x.is_floating_point() else x).numpy())

    def jit(f: Callable[..., Any]) -> Callable[..., Any]:
        # Dynamo recompiles a function at most eight times; all calls here share one code object.
        torch.compiler.reset()
        return torch.compile(f, backend="eager", fullgraph=True)

    def grad(f: Callable[..., Any], *arrays: torch.Tensor) -> list[torch.Tensor]:
        inputs = [x.detach().requires_grad_() for x in arrays]
        return list(torch.autograd.grad(f(*inputs), inputs))

    def array(x: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(x, device=device_object).to(dtype)

    return Library(
        "torch",
        _dtypes_of(torch, ("bool", *FLOATS, *INTEGERS, *COMPLEX, "complex128")),
        array,
        read,
        host=device_object.type == "cpu",
        is_cuda=device_object.type == "cuda",
        generator=lambda seed: torch.Generator(device_object).manual_seed(seed),
        gaps={"unique_all": "PyTorch does not say where a value is first"},
        grad=grad,
        jit=jit,
        context=partial(
            _ignore_warnings,
            "Casting complex values to real discards the imaginary part",
            "ComplexHalf support is experimental",
            # The variance of one token.
            r"(var|std)\(\): degrees of freedom is <= 0",
            # Of the caches of array_api_compat.
            "Dynamo detected a call to a `functools.lru_cache`",
        ),
    )


def _jax(device: str | None) -> Library:
    import jax
    import jax.numpy as jnp

    device_object = jax.devices(device)[0] if device else None
    x64 = jax.config.jax_enable_x64
    names = tuple(
        n for n in _DTYPES if x64 or n not in ("float64", "int64", "uint64", "complex128")
    )
    dtypes = {name: np.dtype(getattr(jnp, name)) for name in names}

    def array(x: np.ndarray, dtype: Any) -> Any:
        return jax.device_put(np.asarray(x).astype(dtype), device_object)

    return Library(
        "jax",
        dtypes,
        array,
        lambda x: _widen(np.asarray(x)),
        host=(device or "cpu") == "cpu",
        is_cuda=jax.devices(device)[0].platform == "gpu",
        default_float="float64" if x64 else "float32",
        default_integer="int64" if x64 else "int32",
        generator=jax.random.key,
        compiles=True,
        jit=jax.jit,
        grad=lambda f, *arrays: list(jax.grad(f, argnums=tuple(range(len(arrays))))(*arrays)),
        context=partial(
            _ignore_warnings,
            # An array as the first argument of isdtype.
            "Implicit conversion of an array to a dtype is deprecated",
            # The cases do not compile, except those about jax.jit.
            r"functions ran on \d+ different numbers of tokens outside of jax.jit",
        ),
    )


def _mlx(device: str | None) -> Library:
    import mlx.core as mx

    if device:
        mx.set_default_device(getattr(mx, device))
    dtypes = {
        "bool": mx.bool_,
        **_dtypes_of(mx, tuple(name for name in _DTYPES if name not in ("bool", "complex128"))),
    }
    if mx.default_device() != mx.Device(mx.cpu):
        del dtypes["float64"]

    def read(x: Any) -> np.ndarray:
        return _widen(np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x))

    def grad(f: Callable[..., Any], *arrays: Any) -> list[Any]:
        gradients = mx.grad(f, argnums=list(range(len(arrays))))(*arrays)
        return [gradients] if isinstance(gradients, mx.array) else list(gradients)

    def array(x: np.ndarray, dtype: Any) -> Any:
        # mx.array converts float64 to float32 by default.
        exact_dtype = mx.float64 if x.dtype == np.float64 else None
        return mx.array(x, dtype=exact_dtype).astype(dtype)

    return Library(
        "mlx",
        dtypes,
        array,
        read,
        host=False,
        default_integer="int32",
        float32_transcendentals=True,
        generator=mx.random.key,
        gaps={
            "complex128": "MLX has no such dtype",
            **dict.fromkeys(
                ("linalg.eig-float64", "linalg.eigvals-float64"),
                "MLX has no complex128 for what comes out",
            ),
        },
        jit=mx.compile,
        grad=grad,
        context=partial(_ignore_warnings, "MLX has no complex128: eig"),
    )


def _strict(device: str | None, **flags: bool) -> Library:
    import array_api_strict as xp

    device_object = xp.Device(device) if device else None
    cpu = xp.Device("CPU_DEVICE")
    dtypes = {
        "bool": xp.bool,
        **_dtypes_of(xp, tuple(name for name in _DTYPES if name not in ("bool", *HALF))),
    }

    gaps = {
        **dict.fromkeys(("isin-float32", "isin-float64"), "array-api-strict takes integers"),
        "isin: invert": "array-api-strict does not look at invert",
    }  # fmt: skip
    if flags:
        sizes = "nonzero unique_all unique_counts unique_inverse unique_values".split()
        gaps |= dict.fromkeys(sizes, "shapes that depend on data are switched off")

    @contextmanager
    def context() -> Iterator[None]:
        with (
            _ignore_warnings(NO_NUMBER),
            xp.ArrayAPIStrictFlags(**flags) if flags else nullcontext(),
        ):
            yield

    return Library(
        "strict_minimal" if flags else "array_api_strict",
        dtypes,
        lambda x, dtype: xp.asarray(x, dtype=dtype, device=device_object),
        lambda x: _widen(np.from_dlpack(x.to_device(cpu))),
        default_float="float64",
        gaps=gaps,
        context=context,
    )


def _dask(device: str | None) -> Library:
    import array_api_compat.dask.array as xp

    if device not in (None, "cpu"):
        raise ValueError(f"device: expected 'cpu' for dask.array, got {device!r}")
    missing = "cross det eig eigh eigvals eigvalsh matrix_power pinv slogdet"
    factorizations = "cholesky inv matrix_rank qr solve svd svdvals"
    return Library(
        "dask",
        {name: np.dtype(name) for name in _DTYPES if name != "bfloat16"},
        lambda x, dtype: xp.asarray(x.astype(dtype)),
        lambda x: _widen(np.asarray(x)),
        host=False,
        default_float="float64",
        gaps={
            "from_dlpack": "dask.array has no DLPack",
            **dict.fromkeys(
                ("broadcast_shapes", *(f"linalg.{name}" for name in missing.split())),
                "dask.array has no such function",
            ),
            **dict.fromkeys(
                (f"linalg.{name}" for name in factorizations.split()),
                "dask.array factors only single matrices",
            ),
            **dict.fromkeys(
                ("unique_all", "unique_inverse"),
                "dask.array does not index an array whose size is not computed yet",
            ),
            **dict.fromkeys(
                ("unique_counts", "unique_values"), "dask.array counts every NaN as one value"
            ),
        },
    )


def _ndonnx(device: str | None) -> Library:
    import ndonnx as xp

    if device not in (None, "cpu"):
        raise ValueError(f"device: expected 'cpu' for ndonnx, got {device!r}")
    missing = "atan2", "broadcast_shapes", "copysign", "hypot", "isin", "isin: invert", "nextafter"
    uniques = "unique_all", "unique_counts", "unique_inverse", "unique_values"
    return Library(
        "ndonnx",
        _dtypes_of(xp, _DTYPES),
        lambda x, dtype: xp.asarray(x).astype(dtype),
        lambda x: _widen(x.unwrap_numpy()),
        default_float="float64",
        gaps={
            **dict.fromkeys(("fft", "linalg"), "ndonnx has no such extension"),
            **dict.fromkeys((*missing, "signbit"), "ndonnx has no such function"),
            **dict.fromkeys(("complex64", "complex128"), "ndonnx has no complex numbers"),
            **dict.fromkeys(("argmax", "argmin"), "the operators of ONNX ignore NaN"),
            **dict.fromkeys(uniques, "the operator of ONNX does not separate NaN"),
            "expand_dims squeeze": "ndonnx takes no tuple of axes",
            "from_dlpack": "ndonnx imports no memory by DLPack",
            "searchsorted": "ndonnx takes only values with one axis",
        },
    )


def _cupy(device: str | None) -> Library:
    import array_api_compat.cupy as xp

    if device not in (None, "cuda"):
        raise ValueError(f"device: expected 'cuda' for CuPy, got {device!r}")
    return Library(
        "cupy",
        {name: np.dtype(name) for name in _DTYPES if name != "bfloat16"},
        lambda x, dtype: xp.asarray(x.astype(dtype)),
        lambda x: _widen(xp.asnumpy(x)),
        host=False,
        is_cuda=True,
        default_float="float64",
    )


#: Name -> loader. The last library is array-api-strict with every optional feature switched off.
LIBRARIES: dict[str, Callable[[str | None], Library]] = {
    "numpy": _numpy,
    "torch": _torch,
    "jax": _jax,
    "mlx": _mlx,
    "array_api_strict": _strict,
    "strict_minimal": lambda device: _strict(
        device, boolean_indexing=False, data_dependent_shapes=False
    ),
}

#: Libraries that lack a part of the standard. Their gaps are known for the first case per operation.
PARTIAL_LIBRARIES: dict[str, Callable[[str | None], Library]] = {"dask": _dask, "ndonnx": _ndonnx}

#: Libraries that need a GPU.
DEVICE_LIBRARIES: dict[str, Callable[[str | None], Library]] = {"cupy": _cupy}


def load(name: str, device: str | None = None) -> Library:
    """Load the library of this name; raise `ImportError` if it is not installed."""
    loaders = LIBRARIES | PARTIAL_LIBRARIES | DEVICE_LIBRARIES
    if name not in loaders:
        raise ValueError(f"backend: expected one of {', '.join(loaders)}, got {name!r}")
    return loaders[name](device)
