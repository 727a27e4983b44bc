"""Kernels that do not compile: gradients and operators fall back to other implementations."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from program_calls import CALLS, NOT_DIFFERENTIABLE, make_inputs, run
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.errors import OutOfResources

import scree
from scree.dispatch import registry
from scree.dispatch.operation import KernelUnavailableError
from scree_triton.attention import launch_configs, tile_scheduler
from scree_triton.attention.base_config import LaunchConfig
from scree_triton.attention.portable_config import PortableConfig
from scree_triton.layout import offsets, scatter_indices, standard
from scree_triton.layout.concat import concat, split
from scree_triton.layout.linear_map import LINEAR_MAPS
from scree_triton.runtime import fallback, launch

pytestmark = [] if launch.INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if launch.INTERPRETED else "cuda"
ROWS = (5, 17, 0, 1, 9)
REPLACED = "another implementation replaces a kernel"
DIFFERENTIABLE = [name for name in CALLS if name not in NOT_DIFFERENTIABLE]
#: The operation of `scree.explain`, for calls with kernels of one module.
EXPLAINED = {
    "attention": "attention",
    "rms_norm": "rms_norm",
    "rope": "rope",
    "swiglu": "swiglu",
    "softmax": "softmax",
    "cross_entropy": "cross_entropy",
    "linear_cross_entropy": "linear_cross_entropy",
    "cross_entropy_options": "cross_entropy",
    "linear_cross_entropy_options": "linear_cross_entropy",
}


@pytest.fixture
def kernels_fail(monkeypatch):
    """Return a function that makes every launch from now on fail to compile."""
    monkeypatch.setattr(fallback, "_UNAVAILABLE", {})

    class Kernel:
        """Kernel that needs more shared memory than the device has."""

        __name__ = "big_kernel"

        def __getitem__(self, grid):
            def run(*args, **constants):
                raise OutOfResources(300_000, 100_000, "shared memory")

            return run

    def fail():
        plain = launch.Launch.__call__

        def call(self, programs, args):
            kernel, variants, failures = self.kernel, self.variants, dict(self.failures)
            self.kernel, self.variants = Kernel(), {}
            try:
                plain(self, programs, args)
            finally:
                self.kernel, self.variants, self.failures = kernel, variants, failures

        monkeypatch.setattr(launch.Launch, "__call__", call)

    with registry.isolated():
        yield fail


class PassThrough(TorchDispatchMode):
    """Dispatch mode under which calls go through the operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def loss_of(name, inputs):
    out = CALLS[name](inputs.array(inputs.x), inputs.weight, inputs.classes)
    return out.float().nan_to_num(0.0, 0.0, 0.0).square().sum()


def gradients_of(loss, inputs):
    grads = torch.autograd.grad(loss, inputs[1:3], allow_unused=True)
    return [g for g in grads if g is not None]


def assert_close(got, expected):
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_backward_whose_kernels_do_not_compile_falls_back(name, kernels_fail):
    inputs = make_inputs(DEVICE, lengths=ROWS)
    expected = gradients_of(loss_of(name, inputs), inputs)
    losses = [loss_of(name, inputs), loss_of(name, inputs)]
    kernels_fail()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [gradients_of(loss, inputs) for loss in losses]
    for got in results:
        assert_close(got, expected)
    messages = [str(w.message) for w in caught if "replaces a kernel" in str(w.message)]
    assert len(messages) == len(set(messages))
    if name in EXPLAINED:
        assert len(messages) == 1 and "big_kernel does not compile" in messages[0]


@pytest.mark.parametrize("name", CALLS)
def test_operators_whose_kernels_do_not_compile_fall_back(name, kernels_fail):
    inputs = make_inputs(DEVICE, lengths=ROWS)
    if name in NOT_DIFFERENTIABLE:
        expected = CALLS[name](inputs.array(inputs.x), inputs.weight, inputs.classes)
    else:
        loss = loss_of(name, inputs)
        expected = [loss.detach(), *gradients_of(loss, inputs)]
    kernels_fail()
    with PassThrough(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", REPLACED, RuntimeWarning)
        if name in NOT_DIFFERENTIABLE:
            got = CALLS[name](inputs.array(inputs.x), inputs.weight, inputs.classes)
            assert_close([got], [expected])
            return
        loss = loss_of(name, inputs)
        got = [loss.detach(), *gradients_of(loss, inputs)]
    assert_close(got, expected)


@pytest.mark.parametrize(
    "name", ["attention", "layer_norm", "linear_cross_entropy_options", "flip"]
)
def test_compiled_program_whose_kernels_do_not_compile_trains(name, kernels_fail):
    inputs = make_inputs(DEVICE, lengths=ROWS)

    def program(x, weight):
        return loss_of(name, inputs._replace(x=x, weight=weight))

    loss = program(inputs.x, inputs.weight)
    expected = [loss.detach(), *gradients_of(loss, inputs)]
    compiled = torch.compile(program, backend="aot_eager")
    kernels_fail()
    with pytest.warns(RuntimeWarning, match=REPLACED):
        loss = compiled(inputs.x, inputs.weight)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", REPLACED, RuntimeWarning)
        got = [loss.detach(), *gradients_of(loss, inputs)]
    assert_close(got, expected)


def test_explain_says_that_a_gradient_falls_back(kernels_fail):
    inputs = make_inputs(DEVICE, lengths=ROWS)
    x = inputs.array(inputs.x)
    loss = scree.swiglu(x).values.sum()
    kernels_fail()
    with pytest.warns(RuntimeWarning, match=REPLACED):
        loss.backward()
    explanation = scree.explain("swiglu", x)
    assert explanation.provider == "triton"
    assert "big_kernel does not compile" in explanation.note
    half = x.with_values(x.values.detach().half())
    assert scree.explain("swiglu", half).note is None


@pytest.mark.parametrize("window", [(1 << 30, 0), (1 << 30, 1 << 30)])
def test_schedule_without_kernels_has_the_tiles_of_the_kernels(window):
    lengths, attended = torch.tensor([5, 0, 70, 33]), torch.tensor([5, 3, 70, 0])
    arguments = [
        torch.nn.functional.pad(x.cumsum(0), (1, 0)).int().to(DEVICE) for x in (lengths, attended)
    ]
    total = 120  # 12 tokens are in the tail
    got = tile_scheduler._schedule_by_rows(*arguments, total, 32, *window)
    expected = tile_scheduler.schedule_tiles(*arguments, total, 32, *window)
    assert got.shape == expected.shape and got[0, 0] == expected[0, 0]
    count = int(got[0, 0])
    tiles = [sorted(x[1 : count + 1, :5].tolist()) for x in (got, expected)]
    assert tiles[0] == tiles[1]


def test_schedule_that_does_not_compile_falls_back(monkeypatch):
    inputs = make_inputs(DEVICE, lengths=ROWS)
    expected = loss_of("attention", inputs)

    def fail(*args):
        raise OutOfResources(300_000, 100_000, "shared memory")

    monkeypatch.setattr(fallback, "_UNAVAILABLE", {})
    monkeypatch.setattr(tile_scheduler, "_failures", {})
    monkeypatch.setattr(tile_scheduler, "_schedule_tiles", fail)
    with pytest.warns(RuntimeWarning, match="the tile schedule does not compile"):
        loss = loss_of("attention", inputs)
    torch.testing.assert_close(loss, expected)


#: Rows 3, 0, 2, and two tokens in the tail.
OFFSETS = torch.tensor([0, 3, 3, 5], dtype=torch.int32, device=DEVICE)
STARTS = torch.tensor([4, 0, 6], dtype=torch.int32, device=DEVICE)
INDEX = torch.tensor([3, -1, 0, 9, 1], dtype=torch.int32, device=DEVICE)
REPEATED = torch.tensor([3, -1, 3, 9, 1, 0, 1], dtype=torch.int32, device=DEVICE)
KEPT = torch.tensor([5, 6, -1, 2], device=DEVICE)
LAYOUT_CALLS = [
    ("pad", (7, 2), (OFFSETS, 0, 4, False, 1.5, True)),
    ("pad", (7, 2), (OFFSETS, 0, 2, True, 0.0, True)),
    ("pad", (2, 7), (OFFSETS, 1, 4, True, 0.0, False)),
    ("unpad", (3, 4, 2), (OFFSETS, 0, 7, False)),
    ("unpad", (3, 2, 4), (OFFSETS, 1, 7, True)),
    ("unpad", (3, 2), (OFFSETS, 0, 7, True)),
    ("gather", (4, 2), (INDEX, False)),
    ("scatter_add", (7, 2), (REPEATED, 4)),
    ("scatter_unique", (5, 2), (INDEX, 4)),
    ("scatter_last", (7, 2), (REPEATED, KEPT)),
    ("gather_last", (4, 2), (REPEATED, KEPT)),
    ("select", (8, 2), (OFFSETS, STARTS, 0, 7, -1, True)),
    ("select", (2, 8), (OFFSETS, STARTS, 1, 7, 1, True)),
    ("select_backward", (7, 2), ((8, 2), OFFSETS, STARTS, 0, -1, True)),
    ("select_backward", (7, 2), ((8, 2), OFFSETS, STARTS, 0, 1, False)),
]


@pytest.mark.parametrize("name, shape, args", LAYOUT_CALLS)
def test_standard_layout_operation_equals_the_kernel(name, shape, args):
    x = torch.arange(1.0, 1 + torch.Size(shape).numel(), device=DEVICE).reshape(shape)
    expected, got = LINEAR_MAPS[name].run(x, *args), getattr(standard, name)(x, *args)
    if not isinstance(expected, tuple):
        expected, got = [expected], [got]
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


def test_standard_concat_and_split_equal_the_kernels():
    xs = [torch.arange(14.0, device=DEVICE).reshape(7, 2), torch.ones((6, 2), device=DEVICE)]
    rows = [OFFSETS, torch.tensor([0, 1, 4, 6], dtype=torch.int32, device=DEVICE)]
    joined = concat(xs, rows, 0)
    assert torch.equal(standard.concat(xs, rows, 0), joined)
    parts = split(joined, rows, [7, 6], 0), standard.split(joined, rows, [7, 6], 0)
    for x, y in zip(*parts, strict=True):
        assert torch.equal(x, y)


def test_standard_indices_equal_the_kernels():
    lengths = torch.tensor([3, 0, 2], dtype=torch.int32, device=DEVICE)
    assert torch.equal(
        offsets._standard(lengths, torch.int64), offsets.offsets_from_lengths(lengths, torch.int64)
    )
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 1]], dtype=torch.bool, device=DEVICE)
    for total in (4, 6, 3):
        got = scatter_indices._standard_mask_indices(mask, total, torch.int32)
        expected = scatter_indices.mask_indices(mask, total, torch.int32)
        assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(got, expected))
    last = scatter_indices.last_tokens(REPEATED, 4)
    assert torch.equal(scatter_indices._standard_last_tokens(REPEATED, 4), last)


@pytest.mark.parametrize("name", [n for n in DIFFERENTIABLE if not n.startswith("attention")])
def test_second_derivative_equals_the_standard_implementation(name):
    def second(inputs):
        (first,) = torch.autograd.grad(loss_of(name, inputs), inputs[1:2], create_graph=True)
        return gradients_of(first.square().sum(), inputs)

    inputs = make_inputs(DEVICE, lengths=ROWS)
    with registry.isolated(standard_only=True):
        expected = second(inputs)
    for got, wanted in zip(second(inputs), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


def test_index_changed_before_the_backward_raises():
    inputs = make_inputs(DEVICE, lengths=ROWS)
    index = torch.arange(32, device=DEVICE)
    taken = scree.gather(inputs.x, scree.Array(index, inputs.offsets), kernel="triton")
    index += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        taken.values.sum().backward()


def test_index_of_inference_mode_can_be_trained_with():
    inputs = make_inputs(DEVICE, lengths=ROWS)
    with torch.inference_mode():
        index = torch.arange(32, device=DEVICE)
    taken = scree.gather(inputs.x, scree.Array(index, inputs.offsets), kernel="triton")
    (dx,) = torch.autograd.grad(taken.values.sum(), inputs.x)
    assert torch.equal(dx, torch.ones_like(dx))


class BrokenConfig(LaunchConfig):
    """Launch config of kernels that are not portable, of which some do not compile."""

    broken = "forward"

    def __init__(self, device, dtype, layouts, has_left, has_right, causal, softcap, alibi, *_):
        super().__init__(device, dtype, layouts)
        self.arguments = device, dtype, layouts, has_left, has_right, softcap, alibi, False, False

    def prepare_forward(self, *args):
        return self.prepare("forward", *args)

    def prepare_backward(self, *args):
        return self.prepare("backward", *args)

    def prepare(self, name, *args):
        def fail(*args):
            raise KernelUnavailableError("a Hopper kernel does not compile")

        if self.broken == f"preparation of {name}":
            fail()
        config = PortableConfig(*self.arguments)
        return fail if name == self.broken else getattr(config, f"prepare_{name}")(*args)


@pytest.mark.parametrize("operators", [False, True])
@pytest.mark.parametrize("broken", ["forward", "backward", "preparation of backward"])
def test_attention_kernel_that_does_not_compile_is_replaced_by_a_portable_one(
    broken, operators, monkeypatch
):
    inputs = make_inputs(DEVICE, lengths=ROWS)
    expected = run("attention", inputs)
    monkeypatch.setattr(fallback, "_UNAVAILABLE", {})
    monkeypatch.setattr(launch_configs, "CONFIG_CACHE", {})
    monkeypatch.setattr(launch_configs, "select_config", BrokenConfig)
    monkeypatch.setattr(BrokenConfig, "broken", broken)
    x = inputs.array(inputs.x)
    with (
        warnings.catch_warnings(record=True) as caught,
        PassThrough() if operators else nullcontext(),
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            for got, wanted in zip(run("attention", inputs), expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    messages = [str(w.message) for w in caught if "a Hopper kernel" in str(w.message)]
    assert len(messages) == 1 and REPLACED in messages[0]
    heads = x.with_values(inputs.x.detach().reshape(-1, 4, 16))
    explanation = scree.explain("attention", heads, heads, heads)
    assert explanation.provider == "triton" and "a Hopper kernel" in explanation.note
