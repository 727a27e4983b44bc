"""Run the custom calls of JAX in Triton's interpreter, in place of jaxlib's launches on a GPU.

A buffer of a result contains garbage before the launch. A kernel must not change a buffer that it is
declared to read only.
"""

import zlib
from types import SimpleNamespace

import jax
import numpy as np
import torch
from jax.interpreters import mlir
from lower_for_jax import fields

from scree_triton.jax import attention, devices, operations, triton_call


def _compile(step, capability):
    """Return the launch in place of a compiled kernel, and the types of its arguments."""
    types = [
        "fp32" if isinstance(x, float) else "i64" if isinstance(x, int) else "pointer"
        for x in step.arguments
    ]
    return SimpleNamespace(step=step, metadata=SimpleNamespace()), types


class _Calls:
    """The launches by the attribute of their custom call."""

    def __init__(self):
        self.launches = []

    def encode(self, compiled, capability, programs, parameters):
        self.launches.append((compiled.step, programs, parameters))
        return str(len(self.launches) - 1).encode()

    def ffi_call(self, target, results, input_output_aliases):
        def call(*operands, opaque):
            step, programs, parameters = self.launches[int(zlib.decompress(opaque))]

            def run(*arrays):
                return _run(step, programs, parameters, arrays, results, input_output_aliases)

            types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
            return jax.pure_callback(run, types, *operands)

        return call


def _run(step, programs, parameters, operands, results, aliases):
    """Run one launch on NumPy arrays, and return its results."""
    operands = [np.array(x) for x in operands]
    originals = [x.copy() for x in operands]
    outputs = [np.full(x.shape, 77, x.dtype) for x in results]
    for operand, result in aliases.items():
        outputs[result] = operands[operand]
    buffers = iter([*operands, *(x for i, x in enumerate(outputs) if i not in aliases.values())])
    arguments = []
    for argument, parameter in zip(step.arguments, parameters, strict=True):
        ((field, content),) = fields(parameter)
        if field != 1:
            arguments.append(argument)
            continue
        # Each parameter has its own buffer, as long as the memory of the tensor of the recording.
        buffer = next(buffers)
        assert buffer.nbytes == argument.untyped_storage().nbytes()
        buffer.reshape(-1).view(np.uint8)[: dict(fields(content)).get(1, 0)] = 0
        tensor = torch.from_numpy(buffer.reshape(-1).view(np.uint8)).view(argument.dtype)
        arguments.append(tensor)
    assert next(buffers, None) is None
    step.kernel[(programs,)](*arguments, **step.constants, **step.options)
    for i, (x, original) in enumerate(zip(operands, originals)):
        assert i in aliases or x.tobytes() == original.tobytes(), (
            step.kernel,
            "changed an operand",
        )
    return outputs


def interpret(monkeypatch):
    """Let JAX run the kernels on the CPU, in the interpreter, until the end of a test."""
    calls = _Calls()
    monkeypatch.setattr(devices, "PLATFORMS", ("cpu",))
    monkeypatch.setattr(triton_call, "compile_launch", _compile)
    monkeypatch.setattr(triton_call, "_kernel_call", calls.encode)
    monkeypatch.setattr(triton_call, "ffi_call", calls.ffi_call)
    for primitive, kernels in (operations.PRIMITIVES | attention.PRIMITIVES).items():
        rule = mlir.lower_fun(kernels, multiple_results=True)
        mlir.register_lowering(primitive, rule, platform="cpu")
