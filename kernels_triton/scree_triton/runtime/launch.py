"""Launch compiled kernels without the JIT's argument inspection at every call.

Every kernel has a class decorated by `launch_args` with one field per non-constexpr parameter, in the kernel's order. The annotation of a
field says how the launcher passes the parameter::

    @launch_args
    class ForwardArgs:
        Q: Descriptor  # (tensor, shape): read through a TMA descriptor
        X: Pointer
        x_stride: Stride  # the JIT specializes a stride on 1 and on multiples of 16
        count: Number  # not specialized

    launch = Launch(forward_kernel, dict(BLOCK=64), dict(num_warps=4), (64,), args=ForwardArgs)
    launch(programs, ForwardArgs(Q=(q, ragged(...)), X=x, x_stride=x.stride(0), count=3))

`Launch` compares the field names with the kernel's parameters when it is constructed, so a call checks nothing.
`launch_on_device(launch, programs, args)` also selects the CUDA device of the tensors.
"""

import inspect
from collections.abc import Callable
from functools import cache, lru_cache
from math import gcd, prod
from typing import Annotated, Any, NamedTuple, dataclass_transform

import torch
import triton
from triton import knobs

INTERPRETED = knobs.runtime.interpret
_MOST_ENCODED = 4096
_address = torch.Tensor.data_ptr
# The interface of the launcher in C is Triton's own affair; these are the ones that are known here.
_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
_KNOWN = (3, 6), (3, 7)
_CUTS = _VERSION > (
    3,
    6,
)  # numbers that do not fit into 32 bits, where the older one raises OverflowError
# What torch.cuda calls, without its check that CUDA is initialized: tensors on the device are there already.
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


@cache
def empty(kind: str) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]:
    """Make a tensor of this shape, strides and dtype, uninitialized, on the current device of this kind.

    What compiled code of PyTorch calls where it is there: half the time of `empty_like`.
    """
    found = getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None)
    return found or (
        lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=kind)
    )


def contiguous(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A shape and its strides in memory without gaps, as `empty` takes them."""
    return tuple(shape), tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def ragged_shape(
    heads: int, dim: int, stride: int, head: int, width: int = 0
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides that describe values (total, heads, dim).

    A head is reached by its column, a multiple of `head`; where it is read as one of `width` numbers, more than it has, by its
    number.
    """
    if width > dim:
        return (0x7FFF0000, 0x7FFF0000, 1 << 30, heads, dim), (
            (1 << 34) - stride,
            stride,
            stride,
            head,
            1,
        )
    width = (heads - 1) * head + dim
    return (0x7FFF0000, 0x7FFF0000, 1 << 30, width), ((1 << 34) - stride, stride, stride, 1)


class Ragged:
    """How the copy engine sees values (total, heads, dim): tiles of rows that end where a row of the batch ends.

    Two dimensions are put before the token dimension, which is declared 2**30 tokens long. A tile of the row
    ``[start, start + length)`` is read at token ``2**30 - length + r``, so that the end of the dimension is the end of the
    row; the two dimensions in front move the address back, by wrapping around 2**64. The idea is that of Triton's own
    ``triton.tools.ragged_tma``; here heads and head_dim share the last dimension, unless the tiles of a head, some `parts` of
    `block` numbers each, are wider than it is, by zeros.
    """

    __slots__ = ("block", "shape", "strides")

    def __init__(
        self, heads: int, dim: int, stride: int, head: int, block: int = 0, parts: int = 1
    ):
        self.block = block or dim
        self.shape, self.strides = ragged_shape(heads, dim, stride, head, self.block * parts)

    def typed(self, base: torch.Tensor, rows: int) -> Any:
        """The descriptor as Gluon's compiler wants to see it."""
        block = [1] * (len(self.shape) - 1) + [self.block]
        block[2] = rows
        return _gluon(base, self.shape, self.strides, block)


class Tiled:
    """How it sees an array of this shape: tiles of some rows and `columns` columns of the last two axes, 0 beyond the ends."""

    __slots__ = ("columns", "shape", "strides")

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], columns: int):
        self.shape, self.strides, self.columns = shape, strides, columns

    def typed(self, base: torch.Tensor, rows: int) -> Any:
        """The descriptor as Triton's compiler wants to see it."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(
            base,
            list(self.shape),
            list(self.strides),
            [1] * (len(self.shape) - 2) + [rows, self.columns],
        )


class Boxed(Tiled):
    """The same for a kernel in Gluon."""

    __slots__ = ()

    def typed(self, base: torch.Tensor, rows: int) -> Any:
        """The descriptor as Gluon's compiler wants to see it."""
        return _gluon(
            base, self.shape, self.strides, [1] * (len(self.shape) - 2) + [rows, self.columns]
        )


def _gluon(
    base: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: list[int]
) -> Any:
    """A descriptor of Gluon, with the layout of a tile in shared memory."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    dtype = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[
        base.dtype
    ]
    return TensorDescriptor(
        base, list(shape), list(strides), block, gl.NVMMASharedLayout.get_default_for(block, dtype)
    )


ragged = cache(
    Ragged
)  # one object for all tensors that differ in their tokens alone: a key that costs nothing to compare
tiled = lru_cache(_MOST_ENCODED)(Tiled)
boxed = lru_cache(_MOST_ENCODED)(Boxed)


class _Described(NamedTuple):
    """The fields that Triton's launcher reads from a tensor descriptor."""

    base: torch.Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


Pointer = Annotated[torch.Tensor, "pointer"]
Stride = Annotated[int, "stride"]
Number = Annotated[int | float, "number"]
Descriptor = Annotated[tuple[torch.Tensor, Ragged | Tiled], "descriptor"]
_KINDS = "descriptor", "pointer", "stride", "number"


@dataclass_transform(kw_only_default=True)
def launch_args(cls: type) -> Any:
    """Turn a class of annotated fields into the constructor of the named arguments of one kernel.

    The fields are the kernel's parameters before its constants, in the kernel's order, annotated as `Descriptor`,
    `Pointer`, `Stride` or `Number`, in this order. The constructor takes them by name and returns the tuple (pointers,
    strides, numbers, described, shapes). It is a generated function, as in `collections.namedtuple`: that costs 0.2
    microseconds, where an instance of a class costs four times as much and would be taken apart again at every launch.
    """
    kinds = {name: kind.__metadata__[0] for name, kind in cls.__annotations__.items()}
    order = [_KINDS.index(kind) for kind in kinds.values()]
    if order != sorted(order):
        raise TypeError(f"{cls.__name__}: the fields must be ordered {', '.join(_KINDS)}")
    described, *others = (
        [name for name, kind in kinds.items() if kind == wanted] for wanted in _KINDS
    )
    groups = [*others, [f"{x}[0]" for x in described], [f"{x}[1]" for x in described]]
    packed = ", ".join(f"({''.join(f'{x}, ' for x in group)})" for group in groups)
    constructor = eval(f"lambda {', '.join(kinds)}: ({packed})")
    constructor.__name__ = constructor.__qualname__ = cls.__name__
    constructor.__doc__, constructor.__module__ = cls.__doc__, cls.__module__
    constructor.fields = tuple(kinds)
    return constructor


def _launcher(compiled: Any, described: bool) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The launcher in C of a compiled variant, and what it wants between the stream and the kernel's arguments."""
    run, launch = compiled.run, compiled.run.launch
    if described:  # what Triton wraps around it encodes the descriptors
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    fixed = compiled.function, run.launch_cooperative_grid, run.launch_pdl
    if _VERSION == (3, 6):  # scratch memory, metadata, hooks
        return launch, (*fixed, None, None, compiled.packed_metadata, None, None, None)
    fixed = (
        *fixed,
        compiled.packed_metadata,
        None,
        None,
        None,
        None,
        None,
        run.arg_annotations,
        run.kernel_signature,
    )
    n = 4 + len(fixed)
    return lambda *args: launch(*args[:n], args[n:]), fixed


def _large(*numbers: int | float) -> bool:
    """Whether a number needs more than 32 bits, and with it another variant."""
    return max(0, *numbers) >= 1 << 31


def _kind(x: int) -> int:
    """What the JIT looks at in a pointer or a stride, beside its type."""
    return 0 if x % 16 == 0 else 1 if x == 1 else 2


class Launch:
    """A Triton kernel with its constants fixed.

    One is made for one device. The JIT inspects every argument at every call to choose a variant, and Triton encodes every
    descriptor anew. Here the variants are kept by which pointers and strides are multiples of 16, as mostly all are, and launched
    directly, with descriptors that are encoded once for each tensor they describe. Calls with numbers beyond 32 bits go through
    the JIT.

    Parameters
    ----------
    kernel
        The jitted function. Its parameters come in the order descriptors, pointers, strides, other numbers, constants,
        and the other numbers are not specialized.
    constants, options
        Its constexpr arguments, in its order, and its compile options.
    rows
        The rows of a tile of each descriptor.
    args
        The kernel's named arguments, declared with `launch_args`. Their field names and the names of the constants must be the names of the
        kernel's parameters.
    """

    __slots__ = (
        "constants",
        "encoded",
        "index",
        "kernel",
        "metadata",
        "options",
        "rows",
        "values",
        "variants",
    )

    def __init__(
        self,
        kernel: Any,
        constants: dict[str, Any],
        options: dict[str, Any],
        rows: tuple[int, ...] = (),
        args: Any = None,
    ):
        if args is not None and (*args.fields, *constants) != tuple(kernel.arg_names):
            raise TypeError(
                f"{args.__name__} and the constants do not match the parameters of the kernel: "
                f"expected {tuple(kernel.arg_names)}, got {(*args.fields, *constants)}"
            )
        self.kernel, self.constants, self.options, self.rows = kernel, constants, options, rows
        self.values = tuple(constants.values())
        self.variants: dict[int | tuple[int, ...], tuple[Callable[..., None], tuple[Any, ...]]] = {}
        self.encoded: dict[tuple, tuple] = {}

    def __call__(
        self,
        programs: int,
        pointers: Any,
        strides: tuple[int, ...] | None = None,
        numbers: tuple[int | float, ...] = (),
        described: tuple[torch.Tensor, ...] = (),
        shapes: tuple[Ragged | Tiled, ...] = (),
    ) -> None:
        """Launch on the current device and its current stream; the tensors must be on this device.

        The second argument holds the kernel's named arguments, see `launch_args`. Callers that are not converted yet pass the groups of these one by
        one: pointers, strides, numbers, and the tensors read through descriptors with their shapes.
        """
        if strides is None:
            pointers, strides, numbers, described, shapes = pointers
        addresses = [*map(_address, pointers), *strides]
        kind: int | tuple[int, ...] = gcd(16, *addresses)
        if kind != 16:
            kind = tuple(map(_kind, addresses))
        variant = self.variants.get(kind)
        if variant is not None and not (_CUTS and _large(*strides, *numbers)):
            launch, fixed = variant
            descriptors = ()
            if shapes:
                key = *map(_address, described), *shapes
                descriptors = self.encoded.get(key) or self._encode(key, described, shapes)
            try:
                launch(
                    programs,
                    1,
                    1,
                    current_stream(self.index),
                    *fixed,
                    *descriptors,
                    *addresses,
                    *numbers,
                    *self.values,
                )
                return
            except (
                OverflowError
            ):  # a number beyond 32 bits, for which the JIT below has another variant
                pass
        typed = [shape.typed(x, rows) for x, shape, rows in zip(described, shapes, self.rows)]
        compiled = self.kernel[(programs,)](
            *typed, *pointers, *strides, *numbers, **self.constants, **self.options
        )
        if not _large(*strides, *numbers) and _VERSION in _KNOWN and not INTERPRETED:
            self._keep(kind, compiled, pointers[0].get_device())

    def _keep(self, kind: int | tuple[int, ...], compiled: Any, index: int) -> None:
        """Remember a variant, unless it needs scratch memory or somebody listens to launches."""
        run = compiled.run
        scratch = run.global_scratch_size or run.profile_scratch_size
        if not (
            scratch or knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls
        ):
            self.index, self.metadata = index, getattr(compiled.metadata, "tensordesc_meta", None)
            self.variants[kind] = _launcher(compiled, bool(self.rows))

    def _encode(
        self, key: tuple, described: tuple[torch.Tensor, ...], shapes: tuple[Ragged | Tiled, ...]
    ) -> tuple:
        """The launcher's arguments for the descriptors, kept together, and each by itself: mostly one of them is new."""
        if len(self.encoded) >= _MOST_ENCODED:
            self.encoded.clear()
        from triton.backends.nvidia.driver import make_tensordesc_arg

        found: tuple = ()
        for i, (base, shape, how) in enumerate(zip(described, shapes, self.metadata)):
            own = i, _address(base), shape
            if own not in self.encoded:
                self.encoded[own] = (
                    *make_tensordesc_arg(_Described(base, shape.shape, shape.strides), how),
                )
            found += self.encoded[own]
        self.encoded[key] = found
        return found
