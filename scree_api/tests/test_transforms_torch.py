"""Under the transforms of PyTorch.

Compiled once for all lengths, exported, differentiated twice, mapped, checkpointed, wrapped.
"""

import operator as op
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_transforms import (
    INDEX,
    LENGTHS,
    LONGEST,
    OPERATIONS,
    OTHER,
    STANDARD,
    apply,
    expected,
    judged,
    loss,
    slope,
    standard,
    values,
    weights,
)
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import scree

BATCHES = [LENGTHS, OTHER, [5, 9, 2], [70, 70, 1, 0, 3], [1, 2]]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        # Of the caches of array_api_compat.
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
        yield


def compiled(f: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(f, backend="aot_eager", fullgraph=True, **options)


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def test_parts_of_split_share_one_gradient_node() -> None:
    x = scree.Array(torch.ones(5, 6, requires_grad=True), offsets([2, 3]))
    parts = scree.split(x, (1, 2, 3))
    assert scree.explain("split", x, (1, 2, 3)).provider == "torch"
    assert len({part.values.grad_fn for part in parts}) == 1


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, weights and index."""
    return torch.tensor(values()).to(dtype), torch.tensor(weights()).to(dtype), torch.tensor(INDEX)


def drawn(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and index for so many tokens."""
    v, _, index = tensors()
    if sum(lengths) == len(v):
        return v, index
    rng = torch.Generator().manual_seed(0)
    v = torch.randn((sum(lengths), 8), generator=rng)
    return v, torch.randint(0, len(v), (len(v),), generator=rng, dtype=torch.int32)


@pytest.mark.parametrize(
    "name", [name for name in OPERATIONS if name not in ("norms", "rope")]
)  # those are in Block
def test_one_graph_serves_all_lengths(name: str) -> None:
    """No break; no new graph for other offsets, totals or numbers of rows.

    Values and gradients are those of the oracle.
    """

    def step(v: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, index: torch.Tensor) -> Any:
        x = scree.from_cu_seqlens(v, offsets, max_length=LONGEST)
        found = apply(name, x, w, index)
        return found, judged(x.layout.xp, found)

    step(*tensors()[:2], offsets(LENGTHS), tensors()[2])  # PyTorch has been met before
    function = compiled(step, dynamic=True)
    for lengths in BATCHES[:2] if name in ("windowed", "reductions") else BATCHES:
        (v, index), w = drawn(lengths), tensors()[1]
        v, w = v.requires_grad_(), w.requires_grad_()
        found, energy = function(v, w, offsets(lengths), index)
        of_v, of_w = torch.autograd.grad(energy, (v, w))
        if sum(lengths) != sum(LENGTHS):
            torch.testing.assert_close(
                found, step(v, w, offsets(lengths), index)[0], rtol=1e-4, atol=1e-5
            )
            continue
        np.testing.assert_allclose(
            found.detach(), expected(name, values(), weights(), lengths), rtol=1e-4, atol=1e-5
        )
        dx, dw, want = slope(name, lengths)
        assert abs(np.vdot(of_v, dx) + np.vdot(of_w, dw) - want) < 1e-5 * np.linalg.norm(dx)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("name", STANDARD)
def test_the_functions_of_the_standard_compile_for_sizes_that_vary(name: str) -> None:
    """A size that a compiler does not know is compared as it allows, not looked for among others.

    One graph serves all.
    """
    function = torch.compile(partial(standard, name), backend="eager", fullgraph=True, dynamic=True)
    standard(name, *drawn(LENGTHS), offsets(LENGTHS))  # PyTorch has been met before
    for lengths in (LENGTHS, [5, 9, 2], [7, 0, 1, 20]):
        inputs = (*drawn(lengths), offsets(lengths))
        for found, right in zip(function(*inputs), standard(name, *inputs), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert (
        counters["stats"]["unique_graphs"] == 1 or name == "experts"
    )  # as many steps as their tiles need


def test_reductions_of_no_tokens_compile() -> None:
    def reduced(values: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
        x = scree.from_offsets(values, offsets, max_length=2)
        xp = scree.namespace(x)
        return [
            getattr(xp, name)(x, axis=axis)
            for name in ("sum", "max", "mean", "any")
            for axis in (None, 1, (0, 1))
        ]

    for rows in (0, 3):
        inputs = torch.zeros(0, 2), torch.zeros(rows + 1, dtype=torch.int32)
        for found, right in zip(
            torch.compile(reduced, backend="eager", fullgraph=True)(*inputs),
            reduced(*inputs),
            strict=True,
        ):
            torch.testing.assert_close(found, right, equal_nan=True)


@pytest.mark.parametrize("name", STANDARD)
def test_the_functions_of_the_standard_under_vmap(name: str) -> None:
    v, index = torch.stack([tensors()[0], -tensors()[0]]), tensors()[2]
    found = torch.func.vmap(
        lambda one: tuple(standard(name, one, index, offsets(LENGTHS))), out_dims=0
    )(v)
    rows = zip(*(standard(name, one, index, offsets(LENGTHS)) for one in v), strict=True)
    for one, right in zip(found, rows, strict=True):
        torch.testing.assert_close(one, torch.stack(right), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_sizes_may_be_read_inside_of_a_gradient_but_not_under_vmap() -> None:
    v = torch.arange(5.0)

    def f(v: torch.Tensor) -> torch.Tensor:
        x = scree.from_cu_seqlens(v, offsets([2, 3]))
        return torch.sum(x[x.with_values(scree.positions(x)) > 0].values ** 2)

    assert torch.func.grad(f)(v).tolist() == [0.0, 2.0, 0.0, 6.0, 8.0]
    with pytest.raises(TypeError, match="depends on the offsets, which a traced"):
        torch.func.vmap(
            lambda v: scree.namespace(v).unique_values(scree.from_lengths(v, [2, 3])[v > 1])
        )(torch.stack([v, v]))


COLD = """
import torch, scree
weight = torch.nn.Parameter(torch.ones(2))
def f(v, offsets):
    x = scree.from_cu_seqlens(v, offsets, max_length=3)
    xp = scree.namespace(x)
    return xp.sum(scree.rms_norm(2 * x, weight) * weight + v[0, :], axis=1)
args = torch.ones(5, 2), torch.tensor([0, 2, 5], dtype=torch.int32)
assert torch.equal(torch.compile(f, backend="eager", fullgraph=True)(*args), f(*args))
"""


def test_first_call_of_a_process_compiles() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COLD], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("is_paged", [False, True])
def test_attention_in_forward_mode_has_the_directional_derivative(is_paged: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    values, direction = torch.randn(2, 7, 2, 8, generator=generator, dtype=torch.float64)
    caches = torch.randn(2, 8, 4, 2, 8, generator=generator, dtype=torch.float64)
    pages, lengths = torch.arange(8)[:7, None], torch.tensor([1, 2, 3, 4, 1, 2, 3])
    x = scree.from_lengths(values, [1] * 7 if is_paged else [3, 4])

    def attend(values: torch.Tensor) -> torch.Tensor:
        q = x.with_values(values)
        if is_paged:
            return scree.paged_attention(q, *caches, pages, lengths).values
        return scree.attention(q, x, x, causal=True).values

    step = 1e-6 * direction
    expected = (attend(values + step) - attend(values - step)) / 2e-6
    with forward_ad.dual_level():
        out = attend(forward_ad.make_dual(values, direction))
        tangent = forward_ad.unpack_dual(out).tangent
        torch.testing.assert_close(tangent, expected, rtol=1e-6, atol=1e-8)


def test_index_that_reads_offsets_names_the_reason_under_compile() -> None:
    x = scree.from_lengths(torch.arange(4.0), [1, 3])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="depends on the offsets"):
        compiled(lambda x: x[:, :2].values)(x)
    assert torch.compile(lambda x: x[:, :2].values, backend="eager")(x).tolist() == [0, 1, 2]


def test_matmul_of_a_tensor_and_a_ragged_array_raises_under_compile() -> None:
    x = scree.from_lengths(torch.arange(8.0).reshape(4, 2), [1, 3])
    w = torch.ones(2, 2)
    with pytest.raises(TypeError, match="matmul: expected a ragged array"):
        _ = w @ x
    with pytest.raises(torch._dynamo.exc.Unsupported, match="matmul: expected a ragged array"):
        compiled(lambda w, x: (w @ x).values)(w, x)
    assert torch.equal(compiled(lambda w, x: (x @ w).values)(w, x), (x @ w).values)


def test_operators_between_ragged_arrays_and_tensors_compile() -> None:
    def f(v: torch.Tensor, n: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
        x, i = scree.from_cu_seqlens(v, offsets), scree.from_cu_seqlens(n, offsets)
        real = [
            op.add,
            op.sub,
            op.mul,
            op.truediv,
            op.floordiv,
            op.mod,
            op.pow,
            op.lt,
            op.le,
            op.gt,
            op.ge,
            op.eq,
            op.ne,
        ]
        whole = [op.and_, op.or_, op.xor, op.lshift, op.rshift]
        found = [g(a, b).values for g in real for a, b in ((x, v[0]), (v[0], x))]
        return [
            *found,
            *(g(a, b).values for g in whole for a, b in ((i, n[0]), (n[0], i))),
            (x @ v[:3]).values,
        ]

    args = torch.rand(5, 3) + 1, torch.randint(1, 4, (5, 3)), offsets([2, 3])
    for one, other in zip(compiled(f)(*args), f(*args), strict=True):
        torch.testing.assert_close(one, other)


class Block(torch.nn.Module):
    """A layer of a transformer on ragged arrays, which come and go as pytrees."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(8, 16), torch.nn.Linear(8, 8)

    def forward(self, x: scree.Array) -> scree.Array:
        xp = scree.namespace(x)
        y = x.with_values(self.qkv(xp.ragged.rms_norm(x).values))
        q, k, v = (
            y.with_values(part.unflatten(1, (-1, 2))) for part in y.values.split([8, 4, 4], dim=1)
        )
        z = xp.ragged.attention(xp.ragged.rope(q), xp.ragged.rope(k), v, causal=True)
        return x + x.with_values(self.out(z.values.flatten(1)))


def energy(x: scree.Array) -> torch.Tensor:
    return scree.namespace(x).sum(x * x, axis=1).sum()


def batch(lengths: list[int] = LENGTHS) -> scree.Array:
    generator = torch.Generator().manual_seed(0)
    return scree.from_cu_seqlens(
        torch.randn((sum(lengths), 8), generator=generator), offsets(lengths), max_length=LONGEST
    )


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block()


def gradients(
    f: Callable[[scree.Array], torch.Tensor], block: torch.nn.Module, x: scree.Array
) -> list[torch.Tensor]:
    return list(torch.autograd.grad(f(x), list(block.parameters())))


def test_a_block_of_a_transformer_is_one_graph(block: Block) -> None:
    plain, function = (
        (lambda x: energy(block(x))),
        compiled(lambda x: energy(block(x)), dynamic=True),
    )
    for lengths in BATCHES:
        x = batch(lengths)
        torch.testing.assert_close(
            gradients(function, block, x), gradients(plain, block, x), rtol=1e-4, atol=1e-4
        )
    assert counters["stats"]["unique_graphs"] == 1


def test_a_block_is_exported_for_all_lengths(block: Block) -> None:
    from torch.export import Dim

    class Dense(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return self.block(scree.from_cu_seqlens(values, offsets, max_length=LONGEST)).values

    x = batch()
    dims = {"values": {0: Dim("total", min=2, max=4096)}, "offsets": {0: Dim("n", min=3, max=512)}}
    program = torch.export.export(Dense(), (x.values, x.offsets), dynamic_shapes=dims)
    for lengths in BATCHES:
        x = batch(lengths)
        torch.testing.assert_close(program.module()(x.values, x.offsets), block(x).values)


def test_checkpoints_autocast_and_inference_mode(block: Block) -> None:
    x = batch()
    with torch.inference_mode():
        once = block(x).values
    plain = gradients(
        lambda x: energy(block(x)), block, x
    )  # on the layout that inference mode has met first
    kept = gradients(
        lambda x: energy(torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)), block, x
    )
    torch.testing.assert_close(kept, plain)
    with torch.autocast("cpu", torch.bfloat16):
        low = block(x).values
        found = gradients(lambda x: energy(block(x)), block, x)
    assert low.dtype == torch.float32
    epsilon = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(low, once, rtol=8 * epsilon, atol=8 * epsilon)
    for one, other in zip(found, plain, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(
            one, other, rtol=0.1, atol=8 * epsilon * float(other.abs().max())
        )


def test_a_wrapped_module_sees_the_tensors_of_a_batch(block: Block, tmp_path: Path) -> None:
    plain = gradients(lambda x: energy(block(x)), block, batch())
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(block)
        energy(model(batch())).backward()
    finally:
        torch.distributed.destroy_process_group()
    torch.testing.assert_close([p.grad for p in block.parameters()], plain)


@pytest.mark.parametrize("name", OPERATIONS)
def test_first_and_second_derivatives(name: str) -> None:
    where, index = offsets([4, 0, 2, 3]), torch.tensor([3, 0, 8, 8, 1, 2, 5, 4, 0])
    v, w = (
        torch.tensor(x, requires_grad=True)
        for x in (values(4, np.float64)[:9], weights(dtype=np.float64))
    )
    function = partial(apply_to, name, where, index)
    assert torch.autograd.gradcheck(function, (v, w), fast_mode=True)
    if (
        name != "attention"
    ):  # PyTorch's fused kernel has no second derivative; "windowed" takes the standard path
        assert torch.autograd.gradgradcheck(function, (v, w), fast_mode=True)


def apply_to(
    name: str, where: torch.Tensor, index: torch.Tensor, v: torch.Tensor, w: torch.Tensor
) -> torch.Tensor:
    return apply(name, scree.from_cu_seqlens(v, where), w, index)


@pytest.mark.parametrize("name", OPERATIONS)
def test_function_transforms_over_parameters(name: str) -> None:
    v, w, index = tensors()
    x = scree.from_cu_seqlens(v, offsets(LENGTHS))
    gradient = torch.func.grad(lambda w: loss(name, x, w, index))
    plain = w.clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(name, x, plain, index), plain)
    torch.testing.assert_close(gradient(w), want, rtol=1e-4, atol=1e-6)
    mapped = torch.func.vmap(gradient)(torch.stack([w, 2 * w]))
    torch.testing.assert_close(mapped[0], want, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        torch.func.vmap(lambda w: apply(name, x, w, index))(torch.stack([w, 2 * w]))[1],
        apply(name, x, 2 * w, index),
        rtol=1e-4,
        atol=1e-5,
    )
    x.layout.lengths.numpy()  # what the layout keeps belongs to no transform


@pytest.mark.parametrize("name", OPERATIONS)
def test_nothing_is_read_from_a_device(name: str) -> None:
    """Forward and backward on tensors that have no memory.

    Every read of a value, every size that depends on one, raises.
    """
    v, w = (torch.empty(shape, device="meta", requires_grad=True) for shape in ((9, 8), (8, 8)))
    x = scree.from_cu_seqlens(v, torch.empty(5, dtype=torch.int32, device="meta"), max_length=7)
    index = torch.empty(9, dtype=torch.int64, device="meta")
    with pytest.raises(RuntimeError, match="meta"):
        x.offsets[1].item()
    found = torch.autograd.grad(loss(name, x, w, index), (v, w))
    assert [g.shape for g in found] == [v.shape, w.shape]


def test_offsets_are_wide_where_nothing_is_read() -> None:
    values, few = (
        torch.empty(2**31, dtype=torch.int8, device="meta"),
        torch.empty(4, dtype=torch.int32, device="meta"),
    )
    ids = torch.empty(1, dtype=torch.int32, device="meta").expand(2**31)
    for arr in (
        scree.from_lengths(values, few),
        scree.from_segment_ids(values, ids, 4),
        scree.group(values, ids, 4)[0],
    ):
        assert arr.offsets.dtype == torch.int64
    arr = scree.from_offsets(values[1:], torch.empty(5, dtype=torch.int32, device="meta"))
    assert scree.namespace(arr).repeat(arr, 2, axis=1).offsets.dtype == torch.int64
    assert scree.from_lengths(values[1:], few).offsets.dtype == torch.int32


def test_functions_of_known_lengths_read_nothing_from_a_device() -> None:
    q = scree.from_lengths(torch.empty((300, 2, 8), device="meta"), [100, 0, 200])
    k = scree.from_lengths(torch.empty((330, 2, 8), device="meta"), [130, 0, 200])
    for found in (
        scree.attention(q, k, k, causal=True, softcap=3.0),
        q[[2, 0]],
        q[:, 1:],
        q[:, :, :1].values,
        scree.bucket(q)[0],
    ):
        assert (found.values if isinstance(found, scree.Array) else found).device.type == "meta"


def test_a_window_bounds_the_work_where_nothing_is_read() -> None:
    rows = (
        torch.empty((4096, 2, 8), device="meta"),
        torch.empty(9, dtype=torch.int32, device="meta"),
    )
    x = scree.from_cu_seqlens(*rows, max_length=4096)

    def work(window: int | None) -> int:
        with FlopCounterMode(display=False) as counter:
            scree.attention(x, x, x, causal=True, window=window)
        return counter.get_total_flops()

    assert (
        work(64) * 64 == work(None) * 3
    )  # what 64 queries see are 127 keys, in 3 tiles of 64 at most


def test_torch_functions_on_ragged_arrays_raise_and_name_the_alternative() -> None:
    x = scree.from_lengths(torch.ones(5, 2), [2, 3])
    for f in (torch.exp, torch.nn.Linear(2, 2), lambda x: torch.cat([x, x])):
        with pytest.raises(
            TypeError,
            match=r"of torch takes no ragged arrays: use a function of scree\.namespace\(arr\)",
        ):
            f(x)
