"""Launch compiled Triton kernels from JAX, by jaxlib's custom call for them.

The call's target is "triton_kernel_call_ffi", which the CUDA plugin of jaxlib registers. Its
attribute is a zlib-compressed message of protocol buffers: the machine code, the grid, and one
parameter per kernel argument. The format is `jaxlib/gpu/triton.proto`. Exported programs contain such
messages, so jaxlib must keep reading them.

The array parameters are first the operands of the call, then its results. A result before an operand
is therefore passed as an operand without contents, and the result reuses its memory.
"""

import struct
import zlib
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import triton
from jax import lax
from jax.ffi import ffi_call
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from ..runtime.recording import RecordedLaunch, RecordedSort, Recording

TARGET = "triton_kernel_call_ffi"
#: JAX dtype -> PyTorch dtype.
TORCH_DTYPES = {
    np.dtype(name): dtype
    for name, dtype in (
        (jnp.bfloat16, torch.bfloat16),
        (jnp.float16, torch.float16),
        (jnp.float32, torch.float32),
        (jnp.float64, torch.float64),
        (jnp.float8_e4m3fn, torch.float8_e4m3fn),
        (jnp.float8_e5m2, torch.float8_e5m2),
        (jnp.bool_, torch.bool),
        (jnp.uint8, torch.uint8),
        (jnp.int32, torch.int32),
        (jnp.int64, torch.int64),
    )
}
_JAX_DTYPES = {dtype: jax_dtype for jax_dtype, dtype in TORCH_DTYPES.items()}
_VARINT, _DOUBLE_WORD, _BYTES, _WORD = 0, 1, 2, 5  # wire types of protocol buffers
#: Kernel, compute capability, variant, constants and options -> the compiled kernel and the types of
#: its arguments.
COMPILED: dict[tuple, tuple[Any, list[str]]] = {}


def meta(x: Any) -> torch.Tensor:
    """Return a tensor without data, with the shape and dtype of a JAX array."""
    return torch.empty(x.shape, dtype=TORCH_DTYPES[np.dtype(x.dtype)], device="meta")


def run_recording(
    recording: Recording,
    capability: int,
    inputs: Sequence[tuple[torch.Tensor, Any]],
    results: Sequence[torch.Tensor],
) -> list[Any]:
    """Run the recorded launches on JAX arrays, and return the arrays of the results.

    Parameters
    ----------
    recording
        The launches.
    capability
        The compute capability to compile for, for instance 90.
    inputs
        The tensors on which the launches were recorded, each with its JAX array.
    results
        Tensors that the launches write.

    Returns
    -------
    list
        One JAX array per tensor of `results`, with its shape and dtype.

    Raises
    ------
    ValueError
        If a launch has a part of an array, reads memory without contents, or has memory that it
        writes as two arguments; or if no launch writes a result.
    """
    arrays = {memory_of(x): array for x, array in inputs}
    zeros = {memory_of(x) for x in recording.zeros}
    for step in recording.steps:
        if isinstance(step, RecordedSort):
            arrays[memory_of(step.result)] = sort_descending(arrays[memory_of(step.keys)])
        else:
            _launch(step, capability, arrays, zeros)
    return [_contents(arrays, x) for x in results]


def _contents(arrays: dict[int, Any], x: torch.Tensor) -> Any:
    """Return the array in the memory of a tensor, with the tensor's shape and dtype."""
    if memory_of(x) not in arrays:
        raise ValueError("no recorded launch writes a result")
    if not x.is_contiguous():
        raise ValueError("a result is not contiguous")
    array, expected = arrays[memory_of(x)], array_type(x)
    # The kernels write booleans as bytes.
    return array.reshape(expected.shape).astype(expected.dtype)


def memory_of(x: torch.Tensor) -> int:
    """Return the identity of the memory of a tensor, which a tensor without data has too.

    Raises
    ------
    ValueError
        If the tensor is a part of another one.
    """
    if x.storage_offset():
        raise ValueError("a launch on a part of an array cannot be recorded")
    return x.untyped_storage()._cdata  # type: ignore[no-any-return]


def array_type(x: torch.Tensor) -> Any:
    """Return shape and dtype of the JAX array for a tensor that a launch config allocated.

    An int64 number is a pair of int32 numbers, as JAX has no int64 by default.
    """
    if x.dtype == torch.int64:
        return jax.ShapeDtypeStruct((*x.shape, 2), jnp.int32)
    return jax.ShapeDtypeStruct(tuple(x.shape), _JAX_DTYPES[x.dtype])


def sort_descending(keys: Any) -> Any:
    """Return non-negative int64 keys in descending order.

    Keys and result are (slots, 2) int32, the low word before the high word.
    """
    low, high = (keys[:, 0].view(jnp.uint32), keys[:, 1])
    high, low = lax.sort((~high, ~low), num_keys=2)
    return jnp.stack([(~low).view(jnp.int32), ~high], axis=1)


def _launch(step: RecordedLaunch, capability: int, arrays: dict[int, Any], zeros: set[int]) -> None:
    """Launch one kernel, and replace its written arrays in `arrays` by the results."""
    compiled, types = compile_launch(step, capability)
    arguments = [
        (name, argument, kind)
        for name, argument, kind in zip(step.kernel.arg_names, step.arguments, types)
        if kind != "constexpr"
    ]
    results = _trailing_results(step, arrays)
    descriptors = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    parameters: list[bytes] = []
    operands: list[Any] = []
    aliases: dict[int, int] = {}  # memory that the kernel writes -> index of its operand
    for name, argument, kind in arguments:
        if not isinstance(argument, torch.Tensor | tuple):
            parameters.append(_number(argument, kind))
            continue
        tensor = argument[0] if isinstance(argument, tuple) else argument
        memory = memory_of(tensor)
        is_zeroed = memory in zeros and memory not in arrays
        if memory not in results:
            if memory not in arrays:
                if name not in step.written:
                    raise ValueError(f"{step.kernel.__name__} reads {name}, which has no contents")
                empty = array_type(tensor)
                arrays[memory] = lax.empty(empty.shape, empty.dtype)
            if name in step.written:
                aliases[memory] = len(operands)
            operands.append(arrays[memory])
        if isinstance(argument, tuple):
            parameters += _descriptor(argument[1], next(descriptors))
        else:
            bytes_to_zero = tensor.untyped_storage().nbytes() if is_zeroed else 0
            parameters.append(_message(1, _uint(1, bytes_to_zero) + _uint(2, 16)))
    for memory, operand in aliases.items():
        if any(x is arrays[memory] for i, x in enumerate(operands) if i != operand):
            raise ValueError(f"{step.kernel.__name__} has two arguments in memory that it writes")
    call = ffi_call(
        TARGET,
        [*results.values(), *(jax.typeof(operands[i]) for i in aliases.values())],
        input_output_aliases={x: len(results) + i for i, x in enumerate(aliases.values())},
    )
    opaque = zlib.compress(_kernel_call(compiled, capability, step.programs, parameters), 1)
    arrays.update(zip((*results, *aliases), call(*operands, opaque=opaque)))


def _trailing_results(step: RecordedLaunch, arrays: dict[int, Any]) -> dict[int, Any]:
    """Return memory -> type of the last tensors of a launch that are written and have no contents.

    These tensors need no operand: the call allocates them as results.
    """
    results: dict[int, Any] = {}
    for name, argument in reversed(list(zip(step.kernel.arg_names, step.arguments))):
        if isinstance(argument, torch.Tensor):
            memory = memory_of(argument)
            if name not in step.written or memory in arrays or memory in results:
                break
            results[memory] = array_type(argument)
        elif isinstance(argument, tuple):
            break
    return dict(reversed(results.items()))


def compile_launch(step: RecordedLaunch, capability: int) -> tuple[Any, list[str]]:
    """Return the compiled kernel of a launch, and the types of its arguments."""
    kernel = step.kernel
    typed = [
        argument[1].typed(argument[0], argument[2]) if isinstance(argument, tuple) else argument
        for argument in step.arguments
    ]
    target = GPUTarget("cuda", capability, 32)
    backend, bind = _binder(kernel, target)
    options = {
        "debug": kernel.debug or knobs.runtime.debug,
        "instrumentation_mode": knobs.compilation.instrumentation_mode,
        **step.options,
    }
    bound, specialization, _ = bind(*typed, **step.constants, **options)
    key = (
        kernel,
        capability,
        repr(specialization),
        *step.constants.values(),
        *sorted(step.options.items()),
    )
    if key not in COMPILED:
        parsed, signature, constants, attributes = kernel._pack_args(
            backend, {**step.constants, **options}, bound, specialization, None
        )
        source = ASTSource
        if kernel.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource as source  # noqa: N813
        compiled = triton.compile(
            source(kernel, signature, constants, attributes), target=target, options=parsed.__dict__
        )
        COMPILED[key] = compiled, list(signature.values())
    return COMPILED[key]


@cache
def _binder(kernel: Any, target: GPUTarget) -> tuple[Any, Any]:
    backend = make_backend(target)
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


# --- The message of protocol buffers
def _varint(x: int) -> bytes:
    x &= (1 << 64) - 1  # negative numbers are encoded in two's complement
    encoded = bytearray()
    while x > 127:
        encoded.append(x & 127 | 128)
        x >>= 7
    encoded.append(x)
    return bytes(encoded)


def _uint(field: int, x: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(x)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(content)) + content


def _packed(field: int, numbers: Sequence[int]) -> bytes:
    return _message(field, b"".join(map(_varint, numbers)))


def _number(x: float, kind: str) -> bytes:
    """Return the parameter of a number of a type of Triton, for instance "i32"."""
    if kind == "fp32":
        return _varint(7 << 3 | _WORD) + struct.pack("<f", x)
    if kind == "fp64":
        return _varint(8 << 3 | _DOUBLE_WORD) + struct.pack("<d", x)
    return _uint({"i32": 3, "u32": 4, "i64": 5, "u64": 6}[kind], int(x))


def _descriptor(shape: Any, metadata: dict[str, Any]) -> list[bytes]:
    """Return the parameters of a TMA descriptor: the descriptor, its shape and its strides."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    content = (
        _uint(1, TMA_DTYPE_DEVICE_TO_HOST[metadata["elem_type"]])
        + _uint(2, metadata["swizzle"])
        + _packed(3, shape.shape)
        + _packed(4, shape.strides)
        + _packed(5, metadata["block_size"])
        + _uint(6, 0)
    )
    return [
        _message(9, _message(1, content)),
        *(_number(x, "i32") for x in shape.shape),
        *(_number(x, "i64") for x in shape.strides),
    ]


def _kernel_call(
    compiled: Any, capability: int, programs: int, parameters: Sequence[bytes]
) -> bytes:
    """Return the message of one launch."""
    metadata, code = compiled.metadata, compiled.asm
    name, shared = compiled.name.encode(), metadata.shared
    image = _message(1, code["cubin"]) + _message(2, name) + _uint(3, shared)
    # jaxlib finds the loaded machine code by name and PTX. It copies and hashes both at every launch,
    # and the hash of the machine code is much shorter than the PTX.
    digest = sha256(code["cubin"]).hexdigest().encode()
    kernel = b"".join(
        [
            _message(1, name),
            _uint(2, metadata.num_warps),
            _uint(3, shared),
            _message(4, digest),
            _uint(6, capability),
            _uint(10, 1),  # CTAs per cluster
            _message(11, image),
        ]
    )
    call = b"".join(
        [
            _message(1, kernel),
            _uint(2, programs),
            _uint(3, 1),
            _uint(4, 1),
            *(_message(5, x) for x in parameters),
        ]
    )
    return _message(1, call) + _message(4, name)
