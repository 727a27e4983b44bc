"""Operations for JAX by the Triton kernels of PyTorch, launched by custom calls.

While JAX traces a call, the functions that serve PyTorch run on tensors without data: the forward
pass, and autograd's backward pass. Their launches are recorded. JAX runs the recorded launches, so
an operation needs no other code here. A call that needs PyTorch's own functions besides the kernels,
forward or backward, is rejected.

A call is separated into arrays and a `Signature`, which is static. Offsets are arrays, so one
compiled function serves all offsets of one shape.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad
from jax.sharding import NamedSharding, PartitionSpec

from scree import Array
from scree.backends import backend
from scree.dispatch.call_cache import option_types
from scree.dispatch.operation import OPERATIONS
from scree.layout import Layout

from .. import KERNELS
from ..runtime.calls import attributes_of, make_call
from ..runtime.recording import RecordedLaunch, Recording, record
from .devices import capability, rejects_arrays, rejects_partitioning
from .primitive import UNAVAILABLE, define_primitive, record_failure
from .triton_call import TORCH_DTYPES, array_type, memory_of, run_recording


class Entry(NamedTuple):
    """Properties of an operation that JAX runs by kernels."""

    has_gradient: bool = True
    """False if the kernels have no gradient."""
    first_array: Callable[[list[Any]], Any] | None = None
    """Function of the results that returns a replacement for the call's first array.

    The gradient of the replacement is the gradient of the first array. Backward kernels that do not read
    the first array need it. None if the gradient does not depend on the first array.
    """


#: The most signatures in each cache: each number of tokens is another signature. Recording a program again
#: gives the same launches.
MAX_SIGNATURES = 1024
#: The operations that JAX runs by kernels, besides attention.
TABLE: dict[str, Entry] = {
    "append_paged": Entry(has_gradient=False),
    "cross_entropy": Entry(),
    "grouped_matmul": Entry(),
    # With a residual the second result is the sum that is normalized. The norms read the sum only.
    "layer_norm": Entry(first_array=lambda results: results[-1]),
    "log_softmax": Entry(first_array=lambda results: results[0]),
    "logsumexp": Entry(),
    "paged_attention": Entry(has_gradient=False),
    "rms_norm": Entry(first_array=lambda results: results[-1]),
    "rope": Entry(),
    "segment_mean": Entry(),
    "segment_reduce": Entry(),
    "segment_scan": Entry(),
    "softmax": Entry(first_array=lambda results: jnp.log(results[0])),
    "swiglu": Entry(),
}


# --- Calls without arrays
class _Dense(NamedTuple):
    """An array of a call, by its index."""

    index: int


class _Rows(NamedTuple):
    """A layout of a call: the index of its offsets, and its static attributes."""

    offsets: int
    total: int
    max_length: int | None


class _Ragged(NamedTuple):
    """A ragged array of a call."""

    values: int
    rows: _Rows
    ragged_dim: int


class _Option(NamedTuple):
    """An option of a call, with its types, because 1 == 1.0 == True."""

    types: tuple[type, ...]
    value: Any


class Signature(NamedTuple):
    """The static part of a call: JAX compiles one function per value."""

    operation: str
    attributes: tuple[Any, ...]
    """The attributes of the call record, with the classes above in place of arrays."""
    types: tuple[tuple[tuple[int, ...], np.dtype], ...]
    """Shape and dtype of each array."""


def _kind_of(signature: Signature) -> Hashable:
    """Return the key in `UNAVAILABLE` of calls with any number of tokens and rows."""

    def kind_of(x: Any) -> Any:
        if isinstance(x, _Ragged):
            return "ragged", x.values, x.rows.offsets, x.ragged_dim
        return ("rows", x.offsets) if isinstance(x, _Rows) else x

    return (
        signature.operation,
        tuple(map(kind_of, signature.attributes)),
        tuple((shape[1:], dtype) for shape, dtype in signature.types),
    )


def _is_of_jax(call: Any) -> bool:
    """Return whether the arrays of a call, which are of one library, are arrays of JAX."""
    for name in attributes_of(type(call)):
        x = getattr(call, name)
        if isinstance(x, Array | Layout):
            return isinstance(x.offsets, jax.Array)
        if isinstance(x, jax.Array):
            return True
    return False


def _separate(operation: str, call: Any) -> tuple[Signature, list[Any], dict[int, Layout]]:
    """Return the signature and the arrays of a call, and its layouts by the index of their offsets."""
    arrays: list[Any] = []
    layouts: dict[int, Layout] = {}

    def index_of(x: Any, is_argument: bool) -> int:
        # Each argument has its own gradient, even if two are one array.
        if not (is_argument and jnp.issubdtype(x.dtype, jnp.floating)):
            for i, y in enumerate(arrays):
                if x is y:
                    return i
        arrays.append(x)
        return len(arrays) - 1

    def rows_of(layout: Layout) -> _Rows:
        rows = _Rows(index_of(layout.offsets, False), layout.total, layout.max_length)
        layouts.setdefault(rows.offsets, layout)
        return rows

    def separate(x: Any, is_argument: bool) -> Any:
        if isinstance(x, Array):
            return _Ragged(index_of(x.values, is_argument), rows_of(x.layout), x.ragged_dim)
        if isinstance(x, Layout):
            return rows_of(x)
        if isinstance(x, jax.Array):
            return _Dense(index_of(x, is_argument))
        if isinstance(x, type) and issubclass(x, np.generic):
            return np.dtype(x)
        return x if isinstance(x, np.dtype) else _Option(option_types((x,)), x)

    separated = tuple(
        separate(getattr(call, x), arg) for x, arg in attributes_of(type(call)).items()
    )
    types = tuple((tuple(x.shape), np.dtype(x.dtype)) for x in arrays)
    return Signature(operation, separated, types), arrays, layouts


def _join(signature: Signature, arrays: Sequence[Any]) -> Any:
    """Return the call record with this signature on arrays of JAX or PyTorch."""
    layouts: dict[_Rows, Layout] = {}

    def layout_of(rows: _Rows) -> Layout:
        if rows not in layouts:
            offsets = arrays[rows.offsets]
            layouts[rows] = Layout(backend(offsets), offsets, rows.total, rows.max_length)
        return layouts[rows]

    def join(x: Any) -> Any:
        if isinstance(x, _Dense):
            return arrays[x.index]
        if isinstance(x, _Ragged):
            return Array.from_layout(arrays[x.values], layout_of(x.rows), x.ragged_dim)
        if isinstance(x, _Rows):
            return layout_of(x)
        if isinstance(x, np.dtype) and isinstance(arrays[0], torch.Tensor):
            return TORCH_DTYPES[x]
        return x.value if isinstance(x, _Option) else x

    # The call was validated already, with other arrays.
    record_type = OPERATIONS[signature.operation].record
    return make_call(record_type, map(join, signature.attributes))


def _results_of(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _values_of(x: Any) -> Any:
    return x.values if isinstance(x, Array) else x


# --- The launches
def _kernels(operation: str) -> tuple[Any, Callable[[Any], Any]]:
    """Return the module of an operation's kernels, and its function of a call."""
    entry = KERNELS[operation]
    module = import_module(f"..{entry.module}", __package__)
    return module, getattr(module, entry.function or operation)


@dataclass(frozen=True)
class _Program:
    """The launches of a call and of its gradient, and the tensors on which they were recorded."""

    forward: Recording
    backward: Recording
    inputs: list[torch.Tensor]
    results: list[torch.Tensor]
    shapes: list[tuple[int | None, int]]
    """Index of the offsets and ragged axis of each result; (None, 0) for a dense array."""
    residuals: list[torch.Tensor]
    """Tensors that the forward launches write and the backward launches read, besides results."""
    saved_inputs: list[int]
    """Indices of the inputs that the backward launches read."""
    saved_results: list[int]
    result_grads: list[torch.Tensor | None]
    input_grads: list[torch.Tensor | None]
    """Gradient of each input that needs one; None if the kernels compute none."""


def _inputs_of(signature: Signature, needs_grad: Sequence[bool]) -> list[torch.Tensor]:
    return [
        torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="meta", requires_grad=needed)
        for (shape, dtype), needed in zip(signature.types, needs_grad, strict=True)
    ]


@lru_cache(MAX_SIGNATURES)
def _record_program(signature: Signature, needs_grad: tuple[bool, ...]) -> _Program:
    """Record the launches of a call, and of the gradients of some of its arrays."""
    inputs = _inputs_of(signature, needs_grad)
    with record() as recording, torch.set_grad_enabled(any(needs_grad)):
        wrapped = _results_of(_kernels(signature.operation)[1](_join(signature, inputs)))
        results = [_values_of(x) for x in wrapped]
        num_forward = len(recording.steps)
        result_grads = [
            torch.empty(x.shape, dtype=x.dtype, device="meta") if x.requires_grad else None
            for x in results
        ]
        input_grads: Sequence[torch.Tensor | None] = ()
        if grads := [x for x in result_grads if x is not None]:
            input_grads = torch.autograd.grad(
                [x for x in results if x.requires_grad],
                [x for x, needed in zip(inputs, needs_grad) if needed],
                grads,
                allow_unused=True,
            )
    steps, zeros = recording.steps, recording.zeros
    forward, backward = (
        Recording(part, zeros) for part in (steps[:num_forward], steps[num_forward:])
    )
    saved = [*inputs, *results]
    written, read = _memory_written(forward), _tensors_of(backward)
    known = {memory_of(x) for x in saved}
    offsets = {id(x): i for i, x in enumerate(inputs)}
    return _Program(
        forward,
        backward,
        inputs,
        results,
        [
            (offsets[id(x.offsets)], x.ragged_dim) if isinstance(x, Array) else (None, 0)
            for x in wrapped
        ],
        [written[memory] for memory in read if memory in written and memory not in known],
        [i for i, x in enumerate(inputs) if memory_of(x) in read],
        [i for i, x in enumerate(results) if memory_of(x) in read],
        result_grads,
        list(input_grads),
    )


def _check_recorded(program: _Program) -> None:
    """Raise `ValueError` if a result depends on more than the recorded launches."""
    grads = [x for x in program.result_grads if x is not None]
    contents = {memory_of(x) for x in (*program.inputs, *grads)}
    results = [*program.results, *(x for x in program.input_grads if x is not None)]
    for recording in program.forward, program.backward:
        written, zeros = _memory_written(recording), {memory_of(x) for x in recording.zeros}
        for memory, x in _tensors_of(recording).items():
            if memory not in contents and memory not in written:
                raise ValueError("a kernel reads what a function of PyTorch writes")
            if x._version:
                raise ValueError("a function of PyTorch changes an array")
        contents |= {*written, *zeros}
    if not all(memory_of(x) in contents and _fills_memory(x) for x in results):
        raise ValueError("a function of PyTorch computes a result")


def _fills_memory(x: torch.Tensor) -> bool:
    """Return whether a tensor has all of its memory in order; a part or a broadcast has not."""
    return x.is_contiguous() and x.numel() * x.element_size() == x.untyped_storage().nbytes()


def _tensors_of(recording: Recording) -> dict[int, torch.Tensor]:
    """Return memory -> tensor for the arguments of all launches, in order."""
    tensors: dict[int, torch.Tensor] = {}
    for step in recording.steps:
        arguments = step.arguments if isinstance(step, RecordedLaunch) else (step.keys,)
        for x in arguments:
            x = x[0] if isinstance(x, tuple) else x
            if isinstance(x, torch.Tensor):
                tensors.setdefault(memory_of(x), x)
    return tensors


def _memory_written(recording: Recording) -> dict[int, torch.Tensor]:
    """Return memory -> tensor for all tensors that the launches write."""
    tensors: dict[int, torch.Tensor] = {}
    for step in recording.steps:
        if not isinstance(step, RecordedLaunch):
            tensors.setdefault(memory_of(step.result), step.result)
            continue
        for name, x in zip(step.kernel.arg_names, step.arguments):
            if name in step.written:
                x = x[0] if isinstance(x, tuple) else x
                tensors.setdefault(memory_of(x), x)
    return tensors


class _Static(NamedTuple):
    """The static part of both primitives."""

    signature: Signature
    needs_grad: tuple[bool, ...]

    @property
    def program(self) -> _Program:
        return _record_program(*self)


# --- The primitives
def _types(first: Any, tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the abstract values of tensors; under shard_map they vary over the axes of `first`."""
    mesh = first.sharding.mesh
    return [
        first.update(
            shape=x.shape,
            dtype=x.dtype,
            weak_type=False,
            sharding=NamedSharding(mesh, PartitionSpec(*(None for _ in x.shape))),
        )
        for x in map(array_type, tensors)
    ]


def _forward_types(first: Any, *_: Any, static: _Static) -> list[Any]:
    return _types(first, [*static.program.results, *static.program.residuals])


def _forward_kernels(*arrays: Any, static: _Static) -> list[Any]:
    program = static.program
    results = [*program.results, *program.residuals]
    return run_recording(
        program.forward, capability(), list(zip(program.inputs, arrays, strict=True)), results
    )


class _State(threading.local):
    runs_standard = False


_state = _State()


def _standard(signature: Signature, *arrays: Any) -> list[Any]:
    """Run the standard implementation, without kernels for the operations that it calls."""
    operation = OPERATIONS[signature.operation]
    before, _state.runs_standard = _state.runs_standard, True
    try:
        result = operation.run_call(_join(signature, arrays), "standard")
    finally:
        _state.runs_standard = before
    return [_values_of(x) for x in _results_of(result)]


def _forward_standard(*arrays: Any, static: _Static) -> list[Any]:
    # The standard backward pass uses no residuals.
    types = map(array_type, static.program.residuals)
    return [*_standard(static.signature, *arrays), *(jnp.zeros(x.shape, x.dtype) for x in types)]


def _backward_types(first: Any, *_: Any, static: _Static) -> list[Any]:
    return _types(first, static.program.input_grads)


def _saved_tensors(program: _Program) -> list[torch.Tensor]:
    return [
        *(program.inputs[i] for i in program.saved_inputs),
        *(program.results[i] for i in program.saved_results),
        *program.residuals,
    ]


def _backward_kernels(*arrays: Any, static: _Static) -> list[Any]:
    program = static.program
    grads = [x for x in program.result_grads if x is not None]
    tensors = [*_saved_tensors(program), *grads]
    return run_recording(
        program.backward, capability(), list(zip(tensors, arrays, strict=True)), program.input_grads
    )


def _backward_standard(*arrays: Any, static: _Static) -> list[Any]:
    """Compute the gradients without kernels, from the arrays that the kernels need.

    The gradient does not depend on the other arrays, or `Entry.first_array` replaces them.
    """
    (signature, needs_grad), program = static, static.program
    rest = iter(arrays)
    inputs = {i: next(rest) for i in program.saved_inputs}
    results = [next(rest) for _ in program.saved_results]
    for _ in program.residuals:
        next(rest)
    grads = [None if x is None else next(rest) for x in program.result_grads]
    first_array = TABLE[signature.operation].first_array
    if 0 not in inputs and first_array is not None:
        inputs[0] = first_array(results)
    zeros = ((i, jnp.zeros(*x)) for i, x in enumerate(signature.types) if i not in inputs)
    inputs |= dict(zeros)
    # JAX would sum the gradients of these zeros over all devices if they did not vary over the mesh.
    *inputs, _ = vary_alike([*(inputs[i] for i in range(len(inputs))), arrays[0]])

    def run(*differentiated: Any) -> list[Any]:
        replaced = iter(differentiated)
        arrays = [next(replaced) if n else x for n, x in zip(needs_grad, inputs)]
        values = _standard(signature, *arrays)
        return [x for x, g in zip(values, grads) if g is not None]

    _, pull = jax.vjp(run, *(x for x, needed in zip(inputs, needs_grad) if needed))
    return list(pull([g for g in grads if g is not None]))


def _rules(standard: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the rules for `jax.vmap` and for derivatives, which transform `standard`."""

    def batch(arrays: Any, axes: Any, *, static: _Static) -> Any:
        results = jax.vmap(partial(standard, static=static), in_axes=tuple(axes))(*arrays)
        return results, [0] * len(results)

    def derive(arrays: Any, tangents: Any, *, static: _Static) -> Any:
        tangents = tuple(map(ad.instantiate_zeros, tangents))
        return jax.jvp(partial(standard, static=static), tuple(arrays), tangents)

    return batch, derive


def _static_kind(*_: Any, static: _Static) -> Hashable:
    return _kind_of(static.signature)


_forward_primitive = define_primitive(
    "scree_kernels",
    _forward_types,
    _forward_kernels,
    _forward_standard,
    *_rules(_forward_standard),
    _static_kind,
)
_backward_primitive = define_primitive(
    "scree_kernels_gradient",
    _backward_types,
    _backward_kernels,
    _backward_standard,
    *_rules(_backward_standard),
    _static_kind,
)
#: Primitive -> its function on CUDA.
PRIMITIVES = {_forward_primitive: _forward_kernels, _backward_primitive: _backward_kernels}


# --- The gradient
@jax.tree_util.register_static
@dataclass(frozen=True)
class _Needs:
    """The arrays that are differentiated, as a static part of the residuals."""

    needs_grad: tuple[bool, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(signature: Signature, *arrays: Any) -> tuple[Any, ...]:
    static = _Static(signature, (False,) * len(arrays))
    results = _forward_primitive.bind(*arrays, static=static)
    return tuple(results[: len(static.program.results)])


def _forward(signature: Signature, *primals: Any) -> tuple[tuple[Any, ...], Any]:
    arrays = [x.value for x in primals]
    needs_grad = tuple(
        bool(x.perturbed) and jnp.issubdtype(x.value.dtype, jnp.floating) for x in primals
    )
    static = _Static(signature, needs_grad)
    program = static.program
    if any(needs_grad) and not all(x is not None for x in program.input_grads or [None]):
        raise NotImplementedError(
            f"{signature.operation}: the Triton kernels compute no gradient of one of the arrays; use "
            "jax.lax.stop_gradient or kernel='standard'"
        )
    outputs = _forward_primitive.bind(*arrays, static=static)
    results, residuals = outputs[: len(program.results)], outputs[len(program.results) :]
    saved = [
        *(arrays[i] for i in program.saved_inputs),
        *(results[i] for i in program.saved_results),
        *residuals,
    ]
    return tuple(results), (_Needs(needs_grad), saved)


def _backward(signature: Signature, saved: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
    needs, arrays = saved
    static = _Static(signature, needs.needs_grad)
    result_grads = [
        jnp.zeros(g.shape, g.dtype) if isinstance(g, SymbolicZero) else g
        for g, tensor in zip(grads, static.program.result_grads, strict=True)
        if tensor is not None
    ]
    found = iter(_backward_primitive.bind(*vary_alike([*arrays, *result_grads]), static=static))
    return tuple(next(found) if needed else None for needed in needs.needs_grad)


_differentiable.defvjp(_forward, _backward, symbolic_zeros=True)
_run = jax.jit(_differentiable, static_argnums=0)


def vary_alike(arrays: Sequence[Any]) -> list[Any]:
    """Return the arrays so that all vary over the same axes of a mesh inside `jax.shard_map`.

    If an array was the same on all devices, JAX then sums its gradient over the devices.
    """
    axes = [_varying_axes(jax.typeof(x)) for x in arrays]
    union = frozenset().union(*axes)
    return [_vary(x, tuple(union - own)) if union - own else x for x, own in zip(arrays, axes)]


def _vary(x: Any, axes: tuple[str, ...]) -> Any:
    # JAX before 0.8 has `pvary` only, and later versions deprecate it.
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axes, to="varying")
    return jax.lax.pvary(x, axes)


def _varying_axes(aval: Any) -> frozenset[str]:
    # JAX before 0.10 has the axes as `vma`.
    manual = getattr(aval, "manual_axis_type", None)
    return getattr(aval, "vma", frozenset()) if manual is None else manual.varying


# --- The interface for scree
def rejects(operation: str, call: Any) -> str | None:
    """Return why the kernels cannot serve a call, from host metadata only; None if they can."""
    if _state.runs_standard:
        return "the standard implementation replaces the Triton kernels for JAX here"
    if not _is_of_jax(call):
        return "the Triton kernels for JAX take arrays of JAX"
    signature, arrays, layouts = _separate(operation, call)
    if reason := rejects_arrays(*arrays) or rejects_partitioning(*arrays):
        return reason
    if any(layout.cut is not None for layout in layouts.values()):
        return "the Triton kernels for JAX take no shards"
    for x in arrays:
        if np.dtype(x.dtype) not in TORCH_DTYPES:
            return f"the Triton kernels for JAX do not take {x.dtype}"
        if 0 in x.shape:
            return "the Triton kernels for JAX need at least one token and one row"
    for x in signature.attributes:
        if isinstance(x, _Ragged) and x.ragged_dim:
            return (
                "the Triton kernels for JAX need the ragged axis to be the first one of the values"
            )
        if isinstance(x, np.dtype) and x not in TORCH_DTYPES:
            return f"the Triton kernels for JAX do not compute {x}"
    if any(x == np.int64 for x in signature.attributes if isinstance(x, np.dtype)):
        return "the Triton kernels for JAX compute no 64-bit integers"
    try:
        hash(signature)
    except TypeError:
        return "the Triton kernels for JAX take arrays of JAX, and options that can be hashed"
    if UNAVAILABLE and (reason := UNAVAILABLE.get(_kind_of(signature))):
        return reason
    return _rejects_signature(signature)


@lru_cache(MAX_SIGNATURES)
def _rejects_signature(signature: Signature) -> str | None:
    """Return why the kernels cannot serve calls with a signature; None if they can."""
    operation = signature.operation
    # A traced call may be differentiated later, so its backward pass is recorded too.
    needs_grad = tuple(
        TABLE[operation].has_gradient and jnp.issubdtype(dtype, jnp.floating)
        for _, dtype in signature.types
    )
    kernels = _kernels(operation)[0]
    if reason := kernels.rejects(_join(signature, _inputs_of(signature, needs_grad))):
        return reason  # type: ignore[no-any-return]
    try:
        _check_recorded(_record_program(signature, needs_grad))
    except ValueError as error:
        return f"the Triton kernels for JAX need nothing of PyTorch between launches, but {error}"
    # A launch config or a function of PyTorch may raise any error on tensors without data.
    except Exception as error:
        return record_failure(operation, _kind_of(signature), error)
    return None


def run(operation: str, call: Any) -> Any:
    """Compute a call for which `rejects` returns None."""
    signature, arrays, layouts = _separate(operation, call)
    values = _run(signature, *vary_alike(arrays))
    program = _record_program(signature, (False,) * len(arrays))
    results = tuple(
        x if offsets is None else Array.from_layout(x, layouts[offsets], dim)
        for x, (offsets, dim) in zip(values, program.shapes, strict=True)
    )
    return results if len(results) > 1 else results[0]
