"""GPU tests of all kernels but attention: operations, dtypes, widths, layouts; against float64."""

import math

import pytest
import torch
from kernels_reference import (
    OPERATIONS,
    Case,
    bf16,
    check,
    check_product,
    distance,
    f16,
    f32,
    inputs,
    offsets,
    run,
)

import scree

pytestmark = pytest.mark.gpu

MIXED = (1, 63, 64, 65, 0, 127, 128, 129, 300, 5, 191, 193)
ROWWISE = ("softmax", "log_softmax", "logsumexp", "sum", "mean", "max", "min", "cumulative_sum")
CASES = [
    *(
        Case(name, dtype, token, MIXED, bounded=bounded)
        for name, operation in OPERATIONS.items()
        for token in operation.tokens
        for dtype, bounded in ((bf16, True), (f32, False), *[(f16, False)] * (name not in ROWWISE))
    ),
    *(
        Case(name, f32, operation.tokens[0], lengths, wide=True)
        for name, operation in OPERATIONS.items()
        for lengths in (MIXED, (), (0, 0, 7), (5,) * 1000)
    ),
    *(
        Case(name, dtype, token, lengths, slack=slack)
        for name in ("softmax", "log_softmax", "sum", "max", "cumulative_sum")
        for dtype, token, slack in ((f32, (), 0), (bf16, (24,), 100))
        for lengths in (
            (70000, *(4,) * 900, 0, 0, 300),
            (4,) * 3000,
            (20000, 3, 9000),
            (1,),
            (0,) * 5000 + (9,),
        )
    ),
    *(
        Case(name, dtype, (), (70000, 65536, 30000, 20000, 0, 16385, 40001), slack=slack)
        for name in ("softmax", "log_softmax", "logsumexp", "max")
        for dtype, slack in ((f32, 0), (f16, 100))
    ),
    *(
        Case(name, dtype, token, MIXED, slack=100)
        for name in ("pad", "pad left", "pad and unpad", "gather", "flip")
        for dtype, token in ((f32, ()), (bf16, (24,)))
    ),
    *(
        Case(name, bf16, (48,), MIXED, sliced=True)
        for name in OPERATIONS
        if "rope" not in name and name != "rms_norm of a sum"
    ),
    *(
        Case(name, f32, (), (300, 0, 4), slack=200_000, bounded=True)
        for name in ("softmax", "cumulative_sum", "sum")
    ),
    *(
        Case(name, f32, (), (length,) * 3000, bounded=True)
        for name in ("softmax", "cumulative_sum", "max")
        for length in (1, 4)
    ),
    Case("rms_norm of a sum", bf16, (2, 48), MIXED, sliced=True),
    *(
        Case(name, bf16, (3, 64), MIXED, sliced=True)
        for name in ("rope", "rope interleaved", "rope of q and k")
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_error(case):
    check(case, "cuda")


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_sync_and_equal_bits(name):
    case = Case(name, bf16, OPERATIONS[name].tokens[0], MIXED)
    x, parameters, dy = inputs(case, "cuda")
    expected = run(case, x, parameters, dy)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fresh = scree.from_offsets(x.values, x.offsets)
        found = run(case, fresh, parameters, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(expected, found))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "dtype, token, slack", [(f32, (), 0), (bf16, (), 100), (f16, (24,), 100), (bf16, (1024,), 0)]
)
def test_gradient_of_a_product(dtype, token, slack, compiled):
    check_product((*MIXED, 3000, 0, 20000), token, dtype, "cuda", slack, compiled)


@pytest.mark.parametrize("name", OPERATIONS)
def test_compiled(name):
    case = Case(name, bf16, OPERATIONS[name].tokens[0], MIXED)
    x, parameters, dy = inputs(case, "cuda")

    def f(values, cu, parameters):
        y = OPERATIONS[name].run(scree.from_offsets(values * 1.0, cu), *parameters)
        return y.values if isinstance(y, scree.Array) else y

    expected = run(case, x, parameters, dy)
    torch._dynamo.reset()
    y = torch.compile(f, fullgraph=True)(x.values, x.offsets, parameters)
    found = [y, *torch.autograd.grad(y, [x.values, *parameters], dy)]
    for a, b in zip(expected, found):
        assert distance(a.nan_to_num(), b.nan_to_num().double()) < 1e-2


@pytest.mark.parametrize("name", OPERATIONS)
def test_graph(name):
    case = Case(name, bf16, OPERATIONS[name].tokens[0], MIXED)
    x, parameters, dy = inputs(case, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(case, x, parameters, dy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run(case, x, parameters, dy)
    fresh = inputs(case, "cuda", seed=1)
    with torch.no_grad():
        for a, b in zip((x.values, *parameters, dy), (fresh[0].values, *fresh[1], fresh[2])):
            a.copy_(b)
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(captured, run(case, *fresh[:2], fresh[2]))
    )


@pytest.mark.parametrize(
    "name", ["rms_norm", "softmax", "sum", "cumulative_sum", "rope", "gather", "flip", "concat"]
)
def test_more_than_2_31_elements(name):
    """The last row against itself alone."""
    length, width = 1000, 1024
    n = (1 << 31) // (width * length) + 2
    x = torch.empty((n * length, width), dtype=f16, device="cuda").uniform_(-1, 1)
    weight = [torch.ones(width, dtype=f16, device="cuda")] if name == "rms_norm" else []
    shape = (-1, 8, 128) if name == "rope" else (-1, width)

    def last(values, lengths):
        with torch.no_grad():
            y = OPERATIONS[name].run(
                scree.from_offsets(values.view(shape), offsets(lengths, "cuda")), *weight
            )
        return y.values[-length:] if isinstance(y, scree.Array) else y[-1]

    assert torch.allclose(
        last(x, (length,) * n).float(), last(x[-length:], (length,)).float(), rtol=2e-3, atol=1e-5
    )


@pytest.mark.parametrize("length", [10_000_000])
def test_skew(length):
    """One row of 10M tokens among 1M rows of 4."""
    lengths = torch.full((1_000_001,), 4, device="cuda")
    lengths[500_000] = length
    cu = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    values = torch.randn(int(cu[-1]), device="cuda")
    x = scree.from_offsets(values, cu)
    ids = torch.repeat_interleave(torch.arange(len(lengths), device="cuda"), lengths)
    exact = torch.zeros(len(lengths), dtype=torch.float64, device="cuda").index_add_(
        0, ids, values.double()
    )
    found = scree.namespace(x).sum(x, axis=1)
    assert distance(found, exact) < 1e-6
    assert abs(float(found[500_000]) - float(exact[500_000])) < 1e-6 * math.sqrt(length) * 10
    y = scree.softmax(x, kernel="triton").values
    lse = torch.zeros_like(exact).index_add_(0, ids, values.double().exp()).log()
    assert distance(y, (values.double() - lse[ids]).exp()) < 1e-6
    running = torch.cat([exact.new_zeros(1), values.double().cumsum(0)])
    found = scree.namespace(x).cumulative_sum(x, axis=1).values
    assert distance(found, running[1:] - running[cu[:-1].long()][ids]) < 1e-6
    found = scree.namespace(x).argmax(x, axis=1)
    before, row, after = values.split([2_000_000, length, 2_000_000])
    assert torch.equal(
        found,
        torch.cat(
            [before.view(-1, 4).argmax(1), row.argmax(0, keepdim=True), after.view(-1, 4).argmax(1)]
        ),
    )
