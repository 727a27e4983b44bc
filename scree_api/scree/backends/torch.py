"""The backend of PyTorch."""

import ctypes
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import array_api_compat.torch as xp
import numpy as np
import torch
from torch._C._functorch import (
    get_unwrapped,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    peek_interpreter_stack,
)
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.utils.checkpoint import checkpoint

from . import UNREADABLE, Backend

_PLAIN_TYPES = torch.Tensor, torch.nn.Parameter
_count_dispatch_modes = torch._C._len_torch_dispatch_stack
MAX_INLINE_BYTES = 1 << 16  # copies up to this size are part of the launch in CUDA


def _peek(x: torch.Tensor) -> np.ndarray | None:
    if (
        torch.compiler.is_compiling()
        or type(x) is not torch.Tensor
        or x.device.type != "cpu"
        or is_functorch_wrapped_tensor(x)
    ):
        return None
    with _untraced(x):
        return np.asarray(x)


def _read(x: torch.Tensor) -> np.ndarray:
    if torch.compiler.is_compiling():  # before functions that Dynamo cannot trace
        raise TypeError(UNREADABLE)
    while is_gradtrackingtensor(x):
        x = get_unwrapped(x)
    if is_functorch_wrapped_tensor(x) or type(x) not in _PLAIN_TYPES:
        raise TypeError(UNREADABLE)
    with _untraced(x):
        if x.device.type != "cuda" or x.nbytes > MAX_INLINE_BYTES:
            return np.asarray(x.detach().cpu())
        # A non-blocking copy has pinned memory as target. Pageable memory takes CUDA 15 us longer.
        host = x.detach().to("cpu", non_blocking=True).numpy()
        torch.cuda.current_stream(x.device).synchronize()
        return host.copy()


def _intercepts_calls() -> bool:
    # One function for all, because every function that a cached call runs takes host time.
    return is_dynamo_compiling() or _count_dispatch_modes() > 0 or forward_ad._current_level >= 0


def _row_ids(repeats: torch.Tensor, total: int) -> torch.Tensor:
    return torch.repeat_interleave(repeats, output_size=total)


def _uniform(key: torch.Generator, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    if not isinstance(key, torch.Generator):
        raise TypeError(f"key: expected a torch.Generator, got {type(key).__name__}")
    return torch.rand(shape, generator=key, device=like.device)


@contextmanager
def _without_transforms() -> Iterator[None]:
    with temporarily_clear_interpreter_stack(), torch.inference_mode(False):
        yield


def _untraced(offsets: torch.Tensor) -> AbstractContextManager[None]:
    """Return a context without transforms and inference mode.

    Transforms wrap their intermediate results, and no backward pass may save tensors of inference
    mode.
    """
    if (
        torch.compiler.is_compiling()
        or is_functorch_wrapped_tensor(offsets)
        or offsets.is_inference()
    ):
        return nullcontext()
    if torch.is_inference_mode_enabled() or peek_interpreter_stack():
        return _without_transforms()
    return nullcontext()


def _checkpoint(f: Callable[..., Any]) -> Callable[..., Any]:
    """Checkpoint `f` outside of torch.func, which has no hooks on saved tensors."""
    if not torch.compiler.is_compiling() and peek_interpreter_stack():
        return f
    return partial(checkpoint, f, use_reentrant=False, preserve_rng_state=False)


def _from_numpy(host: np.ndarray, dtype: torch.dtype, device: Any) -> torch.Tensor:
    """Return a tensor; large arrays are copied to a GPU from pinned memory.

    A copy of more than 64 KB from pageable memory waits for all work of the GPU.
    """
    if device is None or torch.device(device).type != "cuda" or torch.compiler.is_compiling():
        return xp.asarray(host, dtype=dtype, device=device)
    tensor = torch.asarray(host, dtype=dtype)
    # A CUDA graph reads the memory when it is replayed.
    if tensor.nbytes > MAX_INLINE_BYTES or torch.cuda.is_current_stream_capturing():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _stream_key(offsets: torch.Tensor) -> Callable[[], Hashable] | None:
    if torch.compiler.is_compiling() or type(offsets) is not torch.Tensor or not offsets.is_cuda:
        return None
    return _current_stream(offsets.device.index)


def _raw_stream(offsets: torch.Tensor) -> Callable[[], int] | None:
    if _stream_key(offsets) is None:
        return None
    return partial(torch._C._cuda_getCurrentRawStream, offsets.device.index)


@cache
def _current_stream(index: int) -> Callable[[], Hashable]:
    """Return a function that identifies the current stream of a CUDA device, and the capture on it."""
    raw_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream

    def identify() -> Hashable:
        stream = raw_stream(index)
        # CUDA cannot capture the default stream, which is 0.
        if stream and torch.cuda.is_current_stream_capturing():
            return stream, _capture_id(stream)
        return stream

    return identify


def _capture_id(stream: int) -> Hashable:
    """Return the number of the capture on a stream; a new object where the driver does not tell."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    try:
        get_info = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    # Another operating system or vendor; then no two calls in a graph share derived data.
    except (OSError, AttributeError):
        return object()
    arguments = ctypes.byref(status), ctypes.byref(number), None, None, None
    is_known = get_info(ctypes.c_void_p(stream), *arguments) == 0
    return number.value if is_known else object()


def _write(x: torch.Tensor, index: tuple[torch.Tensor, ...], values: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x.index_put_(index, values)


def _metadata(x: Any) -> tuple[Any, ...]:
    return type(x), x.dtype, x.shape, x.stride(), x.device, x.requires_grad


def _make_guard(arrays: list[torch.Tensor]) -> Callable[..., bool] | None:
    """Return the guard of compiled PyTorch code, which runs in C++, or else one in Python.

    PyTorch's guard rejects a tensor that occurs twice, as one array of scales of keys and of values.
    Tensor subclasses have no guard: they must see every operator.
    """
    if any(type(x) not in _PLAIN_TYPES for x in arrays):
        return None
    expected = [_metadata(x) for x in arrays]

    def check_metadata(*others: Any) -> bool:
        return (
            all(isinstance(x, torch.Tensor) for x in others)
            and [*map(_metadata, others)] == expected
            and not peek_interpreter_stack()
        )

    if not _TENSOR_GUARDS:
        return check_metadata
    ids = [*map(id, arrays)]
    repeated = [i for i, x in enumerate(ids) if ids.index(x) < i]
    if len(repeated) > 1:
        return check_metadata
    different = [x for i, x in enumerate(arrays) if i not in repeated]
    check = _TENSOR_GUARDS(*different, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    if not repeated:
        return check
    second = repeated[0]
    first = ids.index(ids[second])

    def check_different(*others: Any) -> bool:
        if others[first] is others[second]:
            return check(*others[:second], *others[second + 1 :])
        return check_metadata(*others)

    return check_different


def _tensor_guards() -> Any:
    """Return PyTorch's class of tensor guards; None if it is missing or has another interface."""
    guards, x = getattr(torch._C._dynamo.guards, "TensorGuards", None), torch.empty(1)
    if guards is None:
        return None
    try:
        is_valid = guards(x, dynamic_dims_sizes=None, dynamic_dims_strides=None).check(x)
    # Another interface of this private class; `_make_guard` then compares the metadata itself.
    except TypeError:
        return None
    return guards if is_valid else None


_TENSOR_GUARDS = _tensor_guards()

BACKEND = Backend(
    "torch",
    xp,
    _peek,
    _read,
    row_ids=_row_ids,
    uniform=_uniform,
    from_numpy=_from_numpy,
    checkpoint=_checkpoint,
    take_aligned=lambda x, axis, index: torch.gather(x, axis, index.to(torch.int64)),
    is_compiling=torch.compiler.is_compiling,
    is_forward_mode=lambda: forward_ad._current_level >= 0,
    intercepts_calls=_intercepts_calls,
    stream_key=_stream_key,
    raw_stream=_raw_stream,
    untraced=_untraced,
    to_device=lambda x, device: x.to(device),
    # One node of the graph, so the backward pass makes one array.
    split=torch.split,
    write=_write,
    erf=torch.special.erf,
    word_dtype="int64",
    activations={
        "relu": torch.relu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
        "silu": torch.nn.functional.silu,
    },
    make_guard=_make_guard,
)
