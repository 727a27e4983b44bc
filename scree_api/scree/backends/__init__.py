"""One `Backend` per array library: the functions that its standard namespace lacks.

Only `records` is a lower layer. Only this package, `providers`, `bridges` and the training
programs of `demo` name a library. A library that follows the standard and has no module here works
too, through `generic`.
"""

# functools imports it from here too: importing `threading` takes longer than importing this module.
from _thread import RLock
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
from array_api_compat import is_array_api_obj

from ..records import record

#: Root module of an array's type -> the module of this package for the library.
LIBRARIES = {
    **{name: name for name in ("numpy", "torch", "jax", "mlx", "dask", "ndonnx")},
    "jaxlib": "jax",
}

#: The error of `Backend.read` under a trace.
UNREADABLE = "the size of this result depends on the offsets, which a traced or compiled function cannot read; make it outside"

F = TypeVar("F", bound=Callable[..., Any])


def _standard_device(x: Any) -> Any:
    return x.device


def _standard_to_device(x: Any, device: Any, /) -> Any:
    return x.to_device(device)


def _never() -> bool:
    return False


def _none(x: Any) -> None:
    return None


def _unchanged(f: Callable[..., Any]) -> Callable[..., Any]:
    return f


@record
class Backend:
    """The functions of one array library that its standard namespace lacks.

    Attributes
    ----------
    name
        The library's name.
    xp
        Its namespace of the Array API standard.
    peek
        ``peek(x)`` returns an integer array as NumPy where reading is free (in host memory, already
        computed), else None. It never waits, never copies from a device and never breaks a trace.
    read
        ``read(x)`` returns an integer array as NumPy, and waits and copies if necessary. It raises
        `TypeError` under a trace.
    row_ids
        ``row_ids(repeats, total)`` returns each index i of `repeats`, ``repeats[i]`` times, without
        reading the values. The result has `total` entries. None where the library has nothing
        faster than a binary search.
    device, to_device
        ``device(x)`` returns the device of an array, or None where a trace hides it or the library
        chooses it. ``to_device(x, device)`` returns the array on another device.
    uniform
        ``uniform(key, shape, like)`` returns random numbers in [0, 1) from an explicit key or
        generator. None where the library has no random numbers.
    from_numpy
        ``from_numpy(host, dtype, device)`` returns an array of the library. None where `asarray` is
        good enough.
    is_compiling
        ``is_compiling()`` returns whether a compiler traces the program, so that NumPy must not be
        used. It is always False where traced arrays have a type of their own: `peek` returns None
        for them.
    is_forward_mode
        ``is_forward_mode()`` returns whether arrays may have tangents, which a kernel would drop.
    intercepts_calls
        ``intercepts_calls()`` returns whether forward mode, a dispatch mode, or a compiler that traces
        the Python code of the caller must see every call. Then no prepared kernel runs, because it
        would call the device directly. It takes less time than `is_compiling`, which is also True
        where a compiler only follows the arrays.
    stream_key
        ``stream_key(offsets)`` returns a function that identifies the stream on which the device of
        the offsets runs the caller's work at present. Data derived on one stream is not used on
        another. None where the library has no streams, or the device has none.
    raw_stream
        ``raw_stream(offsets)`` returns a function that returns 0 if the current stream is the default
        stream. It takes less time than the function of `stream_key`. None where `stream_key` returns
        None.
    untraced
        ``untraced(offsets)`` is the context in which data derived from offsets is computed. The
        data is kept as long as the offsets, so it must not belong to a trace unless the offsets do.
    checkpoint
        ``checkpoint(f)`` returns `f` with a backward pass that recomputes intermediate results; `f`
        itself in a library without gradients.
    gathers_rows_by_tiles
        ``gathers_rows_by_tiles()`` returns whether per-row entries are repeated per tile first, and
        then per token. The gradient then adds one number per tile at an address, instead of one per
        token. Many atomic additions at one address wait for each other.
    take_aligned
        ``take_aligned(x, axis, index)`` is `take_along_axis` for arrays whose other axes are equal.
        None unless the library's own function makes a compiler specialize on their sizes.
    split
        ``split(x, sizes, axis)`` returns the parts of an array along an axis as views. None where
        operations are compiled for every shape, or run later.
    write
        ``write(x, index, values)`` returns `x` with ``x[index] = values``, for a tuple of integer
        arrays: the same memory where the library writes in place, a new array elsewhere. None where
        the library has no such function.
    erf
        ``erf(x)`` is the error function of float32 and wider dtypes. None where the library has
        none, or an inaccurate one.
    activations
        Name -> the library's own "relu", "gelu", "gelu_tanh" or "silu", which computes half
        precision in float32. Functions of the standard compute the others.
    word_dtype
        The name of the dtype in which numbers of 32 bits are computed: "int64" in a library with
        too few functions of uint32.
    has_dlpack
        False where the library exchanges no memory by DLPack. Its arrays are copied through NumPy.
    make_guard
        ``make_guard(arrays)`` returns a function that checks whether other arrays have the same
        host-visible metadata (dtype, shape, strides, device), or None if such calls must not be
        cached. Under a transform the function returns False. The field is None where validating a
        call is cheaper than caching it.
    """

    name: str
    xp: Any
    peek: Callable[[Any], np.ndarray | None]
    read: Callable[[Any], np.ndarray]
    row_ids: Callable[[Any, int], Any] | None = None
    device: Callable[[Any], Any] = _standard_device
    to_device: Callable[[Any, Any], Any] = _standard_to_device
    uniform: Callable[[Any, tuple[int, ...], Any], Any] | None = None
    from_numpy: Callable[[np.ndarray, Any, Any], Any] | None = None
    is_compiling: Callable[[], bool] = _never
    is_forward_mode: Callable[[], bool] = _never
    intercepts_calls: Callable[[], bool] = _never
    stream_key: Callable[[Any], Callable[[], Hashable] | None] | None = None
    raw_stream: Callable[[Any], Callable[[], int] | None] = _none
    untraced: Callable[[Any], AbstractContextManager[Any]] = nullcontext
    checkpoint: Callable[[Callable[..., Any]], Callable[..., Any]] = _unchanged
    gathers_rows_by_tiles: Callable[[], bool] = _never
    take_aligned: Callable[[Any, int, Any], Any] | None = None
    split: Callable[[Any, list[int], int], Any] | None = None
    write: Callable[[Any, tuple[Any, ...], Any], Any] | None = None
    erf: Callable[[Any], Any] | None = None
    activations: Mapping[str, Callable[[Any], Any]] | None = None
    word_dtype: str = "uint32"
    has_dlpack: bool = True
    make_guard: Callable[[list[Any]], Callable[..., bool] | None] | None = None

    def __repr__(self) -> str:
        return f"Backend({self.name!r})"

    def from_host(self, host: np.ndarray, dtype: Any, device: Any) -> Any:
        """Return an array of the library on a device."""
        if self.from_numpy is not None:
            return self.from_numpy(host, dtype, device)
        return self.xp.asarray(host, dtype=dtype, device=device)

    def take_along_axis(self, x: Any, index: Any, axis: int) -> Any:
        """Return the entries of `x` at `index` along an axis >= 0."""
        sizes = zip(x.shape, index.shape, strict=True)
        if self.take_aligned is not None and all(
            dim == axis or m == n for dim, (m, n) in enumerate(sizes)
        ):
            return self.take_aligned(x, axis, index)
        return self.xp.take_along_axis(x, index, axis=axis)

    def on_different_devices(self, x: Any, y: Any) -> bool:
        """Return whether two arrays are known to be on different devices."""
        a, b = self.device(x), self.device(y)
        return a is not None and b is not None and bool(a != b)


def override(xp: Any, **functions: Callable[..., Any]) -> Any:
    """Return the namespace `xp` with some of its functions replaced."""
    module = ModuleType(xp.__name__, xp.__doc__)
    vars(module).update(vars(xp), **functions)
    return module


#: Functions that run once per library, when its first array is passed to scree. `scree.providers`
#: registers kernels there, and `scree.namespace` builds the library's namespace.
LOAD_HOOKS: list[Callable[[Backend], None]] = []

#: Held while a library is loaded, so that no thread sees it without its namespace and kernels.
_loading = RLock()
_by_type: dict[type, Backend] = {}
_by_name: dict[str, Backend] = {}


def add_load_hook(hook: Callable[[Backend], None]) -> None:
    """Run a function for every library that is already loaded, and for each one loaded later."""
    LOAD_HOOKS.append(hook)
    for lib in list(_by_name.values()):
        hook(lib)


def backend(x: Any, name: str = "x") -> Backend:
    """Return the backend of a dense array; `name` is the argument that an error names."""
    lib = _by_type.get(type(x))
    return lib if lib is not None else _resolve(x, name)


def is_array(x: Any) -> bool:
    """Return whether `x` is an array of some library.

    Python scalars, lists and ragged arrays are not.
    """
    return type(x) in _by_type or _library(type(x)) is not None or _is_standard(x)


def _is_standard(x: Any) -> bool:
    # CuPy's arrays have no namespace.
    is_dense = hasattr(x, "__dlpack_device__") and not hasattr(x, "ragged_dim")
    return is_dense and is_array_api_obj(x)


def constant(f: F) -> F:
    """Mark a function of constants, so that `torch.compile` calls it instead of tracing it."""
    # As torch.compiler.assume_constant_result does, but without importing PyTorch.
    f.__dict__["_dynamo_marked_constant"] = True
    return f


@constant
def _library(cls: type) -> str | None:
    """Return the module in `LIBRARIES` of a class or one of its bases.

    None if there is none, or if instances of the class cannot be arrays.
    """
    if not hasattr(cls, "shape"):
        return None
    roots = (base.__module__.partition(".")[0] for base in cls.__mro__)
    return next((LIBRARIES[root] for root in roots if root in LIBRARIES), None)


def backend_by_name(library: str) -> Backend:
    """Import a library by its name and return its backend."""
    if library in LIBRARIES.values():
        return _load(library)
    module = import_module(library)
    if not hasattr(module, "empty"):
        raise TypeError(
            f"library: expected one that follows the Array API standard, got {library!r}"
        )
    return backend(module.empty(0))


def _load(library: str) -> Backend:
    _import(library)
    return _by_name[library]


@constant
def _import(library: str) -> None:
    with _loading:
        if library not in _by_name:
            _register(import_module(f"{__name__}.{library}").BACKEND)


def _load_generic(x: Any) -> Backend:
    with _loading:
        lib: Backend = import_module(f"{__name__}.generic").make(x)
        if lib.name not in _by_name:
            _register(lib)
        return _by_name[lib.name]


def _register(lib: Backend) -> None:
    _by_name[lib.name] = lib
    try:
        for hook in LOAD_HOOKS:
            hook(lib)
    except BaseException:
        del _by_name[lib.name]  # the next array runs the hooks again
        raise


def _resolve(x: Any, name: str) -> Backend:
    library = _library(type(x))
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name}: expected an array without a mask, which would be lost, got a numpy.ma array; "
            "pass x.filled(...) and select with ~x.mask"
        )
    if library is None and not _is_standard(x):
        raise TypeError(
            f"{name}: expected a dense array of a library that follows the Array API standard, got {type(x).__name__}; "
            "convert it first, for instance with numpy.asarray"
        )
    lib = _load_generic(x) if library is None else _load(library)
    _by_type[type(x)] = lib
    return lib
