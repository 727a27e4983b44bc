"""What a program around the kernels sees: devices, streams, graphs, compilers and dispatch modes."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import pytest
import torch
from program_calls import CALLS, HEADS, LENGTHS, NOT_DIFFERENTIABLE, READS_OFFSETS, make_inputs, run
from stress import is_equal, stress_streams
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import scree
from scree_triton.runtime import compile as operators
from scree_triton.runtime import launch
from scree_triton.runtime.launch import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
#: Rows that the interpreter computes in reasonable time.
ROWS = (5, 17, 0, 1, 9) if INTERPRETED else LENGTHS
on_gpu = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
#: Calls with atomic additions, whose order varies unless the algorithms are deterministic.
UNORDERED = ("linear_cross_entropy", "linear_cross_entropy_options", "var")
#: Calls that a compiler or a CUDA graph can contain.
TRACEABLE = [name for name in CALLS if name not in READS_OFFSETS]


def assert_equal(got, expected, name=""):
    for x, y in zip(got, expected, strict=True):
        if name in UNORDERED:
            torch.testing.assert_close(x.cpu(), y.cpu(), rtol=2e-2, atol=1e-4, equal_nan=True)
        else:
            assert is_equal(x.cpu(), y.cpu()), name


class Recorder(TorchDispatchMode):
    """Dispatch mode that keeps the names of scree's operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "scree_triton":
            self.names.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


# --- Dispatch modes and subclasses
@pytest.mark.parametrize("name", CALLS)
def test_dispatch_mode_sees_calls_and_changes_no_result(name):
    inputs = make_inputs(DEVICE, lengths=ROWS)
    plain = run(name, inputs)
    with Recorder() as recorder:
        recorded = run(name, inputs)
    assert recorder.names or name in ("product", "sort"), name
    assert_equal(recorded, plain, name)


class Wrapped(torch.Tensor):
    """Tensor subclass that keeps the names of scree's operators that it meets."""

    names: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.namespace == "scree_triton":
            cls.names.append(func._schema.name.split("::")[1])
        args = torch.utils._pytree.tree_map_only(Wrapped, lambda x: x.inner, args)
        return torch.utils._pytree.tree_map_only(
            torch.Tensor, Wrapped, func(*args, **(kwargs or {}))
        )


@pytest.mark.parametrize("name", ["attention", "rms_norm", "rope", "swiglu", "softmax", "sum"])
def test_tensor_subclass_sees_calls(name):
    inputs = make_inputs(DEVICE, lengths=ROWS)
    x, weight = inputs.x.detach(), inputs.weight.detach()
    expected = CALLS[name](inputs.array(x), weight, inputs.classes)
    Wrapped.names.clear()
    got = CALLS[name](inputs.array(Wrapped(x)), Wrapped(weight), inputs.classes)
    assert Wrapped.names and isinstance(got, Wrapped)
    assert_equal([got.inner], [expected])


@pytest.mark.parametrize("name", TRACEABLE)
def test_fake_tensors_have_the_shape_and_dtype_of_results(name):
    from torch._subclasses import FakeTensorMode

    inputs = make_inputs(DEVICE, lengths=ROWS)
    expected = run(name, inputs)
    with FakeTensorMode() as mode:
        fakes = type(inputs)(*(mode.from_tensor(x) for x in inputs))
        got = run(name, fakes)
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in expected]


# --- FLOP counts
def count_pairs(lengths, causal, window=(None, None)):
    """Count pairs of a query and a key, one loop per row."""
    pairs = 0
    for length in lengths:
        for i in range(length):
            left = 0 if window[0] is None else i - window[0]
            right = length - 1 if window[1] is None else i + window[1]
            right = min(right, i) if causal else right
            pairs += max(min(right, length - 1) - max(left, 0) + 1, 0)
    return pairs


MASKS = [(True, (None, None)), (False, (None, None)), (False, (3, 2)), (True, (4, None))]


@pytest.mark.parametrize("causal, window", MASKS)
def test_flop_counter_counts_attention_by_real_pairs(causal, window):
    inputs = make_inputs(DEVICE, lengths=ROWS)
    x = inputs.array(inputs.x.reshape(-1, HEADS, 16))
    with FlopCounterMode(display=False) as counter:
        out = scree.attention(x, x, x, causal=causal, window=window, kernel="triton")
        forward = counter.get_total_flops()
        out.values.sum().backward()
    pairs = count_pairs(ROWS, causal, window)
    assert forward == 2 * pairs * HEADS * 2 * 16
    assert counter.get_total_flops() == forward + 2 * pairs * HEADS * 5 * 16


def test_flop_counter_counts_a_bound_on_fake_tensors():
    from torch._subclasses import FakeTensorMode

    inputs = make_inputs(DEVICE, lengths=ROWS)
    values = inputs.x.detach().reshape(-1, HEADS, 16)
    with FakeTensorMode() as mode, FlopCounterMode(display=False) as counter:
        values = mode.from_tensor(values)
        x = scree.Array(values, mode.from_tensor(inputs.offsets), max_length=max(ROWS))
        scree.attention(x, x, x, causal=True, kernel="triton")
    bound = 2 * sum(ROWS) * max(ROWS) * HEADS * 2 * 16
    assert counter.get_total_flops() == bound


def test_flop_counter_counts_products():
    inputs = make_inputs(DEVICE, lengths=ROWS)
    total, (_, k, m) = sum(ROWS), (0, *inputs.weight.shape)
    with FlopCounterMode(display=False) as counter:
        run("grouped_product", inputs)
    assert counter.get_total_flops() == 3 * 2 * total * k * m
    with FlopCounterMode(display=False) as counter:
        run("linear_cross_entropy", inputs)
    assert counter.get_total_flops() == 3 * 2 * total * k * 50


# --- Selective activation checkpointing
@pytest.mark.parametrize("policy, launches", [("MUST_SAVE", 1), ("PREFER_RECOMPUTE", 2)])
def test_selective_checkpoint_policy_saves_attention(policy, launches, monkeypatch):
    seen = []

    def decide(ctx, op, *args, **kwargs):
        if op is torch.ops.scree_triton.attention.default:
            seen.append(ctx.is_recompute)
            return CheckpointPolicy[policy]
        return CheckpointPolicy.PREFER_RECOMPUTE

    from scree_triton.attention.base_config import LaunchConfig

    count, forward = [], LaunchConfig.forward
    monkeypatch.setattr(LaunchConfig, "forward", lambda *args: count.append(1) or forward(*args))
    inputs = make_inputs(DEVICE, lengths=ROWS)
    expected = run("attention", inputs)
    count.clear()

    def program(x, weight):
        return CALLS["attention"](inputs.array(x), weight, inputs.classes)

    out = checkpoint(
        program, inputs.x, inputs.weight, use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(decide),
    )  # fmt: skip
    grads = torch.autograd.grad(out.square().sum(), inputs.x)
    assert seen and len(count) == launches
    assert_equal([out.detach(), *grads], expected)


# --- torch.compile
class Block(torch.nn.Module):
    """A layer of a language model with two residual connections."""

    def __init__(self):
        super().__init__()
        make = torch.nn.Linear
        self.qkv, self.out = make(64, 3 * 64, bias=False), make(64, 64, bias=False)
        self.up, self.down = make(64, 2 * 64, bias=False), make(64, 64, bias=False)
        self.norms = torch.nn.ParameterList([torch.ones(64), torch.ones(64)])

    def forward(self, x, y):
        xp = scree.namespace(x)
        qkv = y.with_values(self.qkv(y.values).unflatten(1, (-1, 16)))
        q, k, v = xp.ragged.split(qkv, (4, 4, 4), axis=2)
        q, k = xp.ragged.rope(q, k)
        a = xp.ragged.attention(q, k, v, causal=True)
        y = a.with_values(self.out(a.values.flatten(1)))
        y, x = xp.ragged.rms_norm(y, self.norms[0], residual=x)
        y = xp.ragged.swiglu(y.with_values(self.up(y.values)))
        y = y.with_values(self.down(y.values))
        y, x = xp.ragged.rms_norm(y, self.norms[1], residual=x)
        return x, y


class Model(torch.nn.Module):
    """Blocks between an embedding and a linear cross-entropy."""

    def __init__(self, depth):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(50, 64)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(depth))
        self.to(DEVICE)

    def forward(self, tokens, offsets):
        x = y = scree.Array(self.embedding(tokens), offsets, max_length=max(ROWS))
        for block in self.blocks:
            x, y = block(x, y)
        labels = y.with_values(tokens.roll(-1))
        return scree.namespace(y).ragged.linear_cross_entropy(y, self.embedding.weight, labels)


def step(depth):
    """Return a compiled model's loss after its backward pass, and the same model's eager loss."""
    torch._dynamo.reset()
    inputs, model = make_inputs(DEVICE, lengths=ROWS), Model(depth)
    loss = torch.compile(model, fullgraph=True)(inputs.classes, inputs.offsets)
    loss.backward()
    return float(loss.detach()), float(model(inputs.classes, inputs.offsets).detach())


def test_compile_time_grows_linearly_with_depth():
    """No operator of a deep model is formatted as text, and 8 more layers cost as much as 8 before.

    Inductor and the compiled code run in a process without other libraries.
    """
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    two, eight, sixteen = map(float, done.stdout.split()[-3:])
    per_layer = (eight - two) / 6
    assert sixteen - eight < 8 * max(2 * per_layer, 0.5), (two, eight, sixteen)


FIRST_CALL = """
import torch
import scree
norm = torch.compile(scree.rms_norm, fullgraph=True, backend="aot_eager")
x = torch.arange(6.0).reshape(2, 3)
assert torch.allclose(norm(x), scree.rms_norm(x)), norm(x)
"""


def test_first_call_of_a_process_on_dense_arrays_may_be_compiled():
    """It registers the kernels while Dynamo traces."""
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def test_register_lowerings_knows_every_operator():
    from torch._inductor.lowering import lowerings

    operators.register_lowerings()
    assert all(operator._opoverload in lowerings for operator in operators.OPERATORS)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_compiled_norm_computes_the_gradient_of_the_weight_only_if_needed(is_frozen):
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    inputs = make_inputs(DEVICE, lengths=ROWS)
    weight = inputs.weight.detach().requires_grad_(not is_frozen)
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    program = torch.compile(
        lambda x, w: CALLS["rms_norm"](inputs.array(x), w, inputs.classes), backend=backend
    )
    program(inputs.x, weight).sum().backward()
    (node,) = [n for g in graphs for n in g.nodes if "norm_backward" in str(n.target)]
    *_, needs_dweight, needs_dbias = node.args
    assert needs_dweight is not is_frozen and needs_dbias is False
    assert (weight.grad is None) == is_frozen


@on_gpu
@pytest.mark.parametrize(
    "name, mode",
    [
        *((name, "reduce-overhead") for name in TRACEABLE),
        # This mode differs in matrix products only.
        *((name, "max-autotune") for name in ("attention", "rms_norm", "linear_cross_entropy")),
    ],
)
def test_compile_with_cuda_graphs_gives_eager_results(name, mode):
    torch._dynamo.reset()
    inputs = make_inputs(DEVICE, torch.bfloat16)
    expected = run(name, inputs)

    def program(x, weight):
        out = CALLS[name](inputs.array(x), weight, inputs.classes)
        product = out.nan_to_num(0.0, 0.0, 0.0)
        product = product @ product.mT if out.ndim > 1 else product
        return out if name in NOT_DIFFERENTIABLE else (out, product)

    compiled = torch.compile(program, mode=mode)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(inputs.x, inputs.weight)
        if name in NOT_DIFFERENTIABLE:
            got = [out]
        else:
            loss = out[0].float().nan_to_num(0.0, 0.0, 0.0).square().sum() + 0 * out[1].sum()
            grads = torch.autograd.grad(loss, inputs[1:3], allow_unused=True)
            got = [out[0].detach(), *(g for g in grads if g is not None)]
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=3e-2, atol=3e-2, equal_nan=True)


# --- Devices
@on_gpu
@pytest.mark.parametrize("name", TRACEABLE)
def test_launches_run_under_the_device_of_the_tensors(name, monkeypatch):
    """Stand-in for a second GPU: the current device is said to be another one."""
    inputs = make_inputs(DEVICE, torch.bfloat16)
    expected = run(name, inputs)
    selected, plain_device = [], torch.cuda.device

    @contextmanager
    def select(device):
        with plain_device(device):
            selected.append(device)
            yield
            selected.pop()

    call = launch.Launch.__call__

    def checked(self, programs, args):
        assert selected, "a kernel was launched without its device"
        call(self, programs, args)

    monkeypatch.setattr(launch, "device_count", lambda: 2)
    monkeypatch.setattr(launch, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", select)
    monkeypatch.setattr(launch.Launch, "__call__", checked)
    for cache in caches():
        cache.cache_clear()
    try:
        assert_equal(run(name, inputs), expected, name)
    finally:
        monkeypatch.undo()
        for cache in caches():
            cache.cache_clear()


def caches():
    """Return the caches of launch configs, whose methods remember whether to select a device."""
    import sys

    from scree_triton.attention import launch_configs

    launch_configs.CONFIG_CACHE.clear()
    for module in [m for key, m in sys.modules.items() if key.startswith("scree_triton.")]:
        for value in vars(module).values():
            if callable(getattr(value, "cache_clear", None)) and "onfig" in value.__name__:
                yield value


@on_gpu
@two_gpus
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", TRACEABLE)
def test_second_gpu_gives_the_bits_of_the_first(name, compiled):
    assert torch.cuda.current_device() == 0
    torch._dynamo.reset()
    results = []
    for device in ("cuda:0", "cuda:1"):
        inputs = make_inputs(device, torch.bfloat16)
        if compiled:

            def program(x, weight, inputs=inputs):
                return CALLS[name](inputs.array(x), weight, inputs.classes)

            out = torch.compile(program)(inputs.x, inputs.weight)
            grads = ()
            if name not in NOT_DIFFERENTIABLE:
                loss = out.float().nan_to_num(0.0, 0.0, 0.0).square().sum()
                grads = torch.autograd.grad(loss, inputs[1:3], allow_unused=True)
            results.append([out.detach(), *(g for g in grads if g is not None)])
        else:
            results.append(run(name, inputs))
    assert_equal(*results, name)


# --- Threads, streams and graphs
@on_gpu
def test_new_thread_whose_first_cuda_call_is_a_launch_gives_equal_bits():
    inputs = make_inputs("cuda", torch.bfloat16)
    values = [torch.randn(sum(LENGTHS), 4, 64, device="cuda", dtype=torch.bfloat16)]
    values.append(values[0].clone())  # another address, whose descriptors are not encoded yet
    base = inputs.array(values[0])

    def attend(x):
        with torch.no_grad():
            return scree.attention(*[base.with_values(x)] * 3, causal=True).values

    expected = attend(values[0])
    with ThreadPoolExecutor(1) as executor:
        assert torch.equal(executor.submit(attend, values[1]).result(), expected)


@on_gpu
def test_streams_that_share_a_layout_give_equal_bits(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert not stress_streams(rounds=500)


@on_gpu
@pytest.mark.parametrize("name", TRACEABLE)
def test_captured_graph_gives_eager_bits_and_follows_the_offsets(name):
    """The layout lives outside of the graph and was used before; then its offsets change in place."""
    inputs = make_inputs("cuda", torch.bfloat16)
    array = inputs.array(inputs.x.detach())
    call = CALLS[name]
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call(array, inputs.weight, inputs.classes)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = call(array, inputs.weight, inputs.classes)
        graph.replay()
        eager = call(inputs.array(inputs.x.detach()), inputs.weight, inputs.classes)
        torch.cuda.synchronize()
        assert_equal([captured], [eager], name)
        other = (*LENGTHS[::-1],)
        inputs.offsets.copy_(torch.from_numpy(np.r_[0, np.cumsum(other)]))
        graph.replay()
        eager = call(inputs.array(inputs.x.detach()), inputs.weight, inputs.classes)
        torch.cuda.synchronize()
        assert_equal([captured], [eager], name)


@on_gpu
def test_two_graphs_of_one_layout_do_not_share_memory():
    inputs = make_inputs("cuda", torch.bfloat16)
    array = inputs.array(inputs.x.detach())
    call = CALLS["attention"]
    with torch.no_grad():
        expected = call(array, inputs.weight, inputs.classes)
        graphs, outputs = [], []
        for _ in range(2):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                outputs.append(call(array, inputs.weight, inputs.classes))
        graphs[1].replay()  # before the first graph ever ran
        torch.cuda.synchronize()
        assert torch.equal(outputs[1], expected)


@on_gpu
def test_autotune_under_capture_measures_nothing(monkeypatch):
    from scree_triton.attention import autotune, launch_configs

    inputs = make_inputs("cuda", torch.bfloat16)
    call = CALLS["attention"]  # head_dim 16: portable kernels on every device
    with torch.no_grad():
        expected = call(inputs.array(inputs.x), inputs.weight, inputs.classes)
        monkeypatch.setattr(launch_configs, "AUTOTUNE", True)
        monkeypatch.setattr(launch_configs, "CONFIG_CACHE", {})
        monkeypatch.setattr(autotune, "milliseconds", lambda *args: pytest.fail("measured"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call(inputs.array(inputs.x), inputs.weight, inputs.classes)
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(out, expected)


if __name__ == "__main__":  # the process of `test_compile_time_grows_linearly_with_depth`
    from torch._inductor import config, exc

    from scree_triton.runtime.launch import Launch

    def refuse(*args):
        raise AssertionError("Inductor formats the arguments of an operator without a lowering")

    exc.OperatorIssue.operator_str = staticmethod(refuse)
    config.force_disable_caches = True
    compiled, eager = step(1)  # also starts Inductor and its compiler
    assert abs(compiled - eager) < 1e-3 * abs(eager), (compiled, eager)
    Launch.__call__ = lambda *args: None  # leaves the time of compilation
    for depth in (2, 8, 16):
        start = time.process_time()
        step(depth)
        print(time.process_time() - start)
