"""The kernels beside attention on a small fixed set; without a GPU in Triton's interpreter."""
import pytest
import torch
from kernels_reference import OPERATIONS, Case, check, f16, f32, inputs, run

import scree
from scree_triton import segments
from scree_triton.launch import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
LAYOUTS = ((5, 0, 33, 70, 1), (0, 0), ())
CASES = [
    *(Case(name, f32, operation.tokens[0], LAYOUTS[0], wide=True) for name, operation in OPERATIONS.items()),
    *(Case(name, f16, operation.tokens[1], (3, 0, 20), bounded=True)
      for name, operation in OPERATIONS.items()),
    *(Case(name, f32, operation.tokens[0], lengths) for name, operation in OPERATIONS.items() for lengths in LAYOUTS[1:]),
    *(Case(name, f32, (24,), (4, 3), sliced=True) for name in ("rms_norm", "layer_norm", "softmax", "sum")),
    Case("rope", f32, (2, 16), (4, 3), sliced=True),
    Case("grouped_matmul", f32, (24,), (4, 3), sliced=True),
]
LONG = [Case(name, f32, token, (300, 2, 0, 40, *(4,) * 9))
        for name, token in (("softmax", ()), ("log_softmax", (3,)), ("logsumexp", ()), ("sum", (3,)), ("max", ()))]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_error(case):
    check(case, DEVICE)


@pytest.mark.parametrize("case", LONG, ids=lambda c: c.id)
def test_rows_longer_than_a_share(case, monkeypatch):
    monkeypatch.setattr(segments, "_ELEMENTS", 64)
    monkeypatch.setattr(segments, "_MOST_TILES", 2)
    check(case, DEVICE)


@pytest.mark.parametrize("name, dtype", [
    ("any", torch.bool), ("all", torch.bool),
    ("count_nonzero", torch.bool),
    *((name, dtype) for name in ("any", "all", "sum", "prod", "max", "min") for dtype in (torch.int32, torch.int64))])
def test_integers(name, dtype):
    lengths = [3, 0, 40, 1]
    x = scree.from_lengths(torch.randint(-3, 4, (44, 2), device=DEVICE).to(dtype), lengths)
    op = "sum" if name == "count_nonzero" else name
    wide = torch.int64 if name == "count_nonzero" else dtype
    assert scree.explain("segment_reduce", op, x.values, x.layout, wide).provider == "triton"
    found = getattr(scree.namespace(x), name)(x, axis=1)
    limit = torch.iinfo(dtype) if dtype != torch.bool else None
    for row, got in zip(x.values.split(lengths), found):
        row = row.to(torch.int64) if dtype != torch.bool else row
        if name in ("max", "min"):
            worst = limit.min if name == "max" else limit.max
            expected = (row.amax(0) if name == "max" else row.amin(0)) if len(row) else torch.full_like(got, worst)
        else:
            expected = row.sum(0) if name == "count_nonzero" else getattr(row, name)(0)
        assert torch.equal(got.to(torch.int64), expected.to(torch.int64))


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "softmax", "sum", "max", "rope", "grouped_matmul"])
def test_compiled(name):
    """Traced whole, forward and backward."""
    case = Case(name, f32, OPERATIONS[name].tokens[0], (5, 0, 33))
    x, parameters, dy = inputs(case, DEVICE)

    def f(values, cu, parameters):
        y = OPERATIONS[name].run(scree.from_offsets(values * 1.0, cu), *parameters)
        return y.values if isinstance(y, scree.Array) else y

    torch._dynamo.reset()
    y = torch.compile(f, fullgraph=True, backend="aot_eager")(x.values, x.offsets, parameters)
    found = [y, *torch.autograd.grad(y, [x.values, *parameters], dy)]
    assert all(torch.equal(a, b) for a, b in zip(run(case, x, parameters, dy), found))


def test_reasons():
    x = scree.from_lengths(torch.zeros(3, 4, dtype=torch.float64, device=DEVICE), [3])
    with pytest.raises(ValueError, match="float64"):
        scree.rms_norm(x, kernel="triton")
    assert scree.explain("rms_norm", x, None, None, 1e-6).provider == "standard"
