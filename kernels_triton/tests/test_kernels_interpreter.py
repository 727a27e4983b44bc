"""The kernels beside attention on a small fixed set; without a GPU in Triton's interpreter."""

import pytest
import torch
from kernels_reference import OPERATIONS, Case, check, check_product, f16, f32, inputs, offsets, run
from torch.autograd import forward_ad

import scree
from scree_triton.runtime.launch import INTERPRETED
from scree_triton.segments import interface, reductions, wide_features

DEVICE = "cpu" if INTERPRETED else "cuda"
LAYOUTS = ((5, 0, 33, 70, 1), (0, 0), ())
CASES = [
    *(
        Case(
            name,
            f32,
            operation.tokens[0],
            (5, 0, 8, 1) if "entropy" in name else LAYOUTS[0],
            wide=True,
        )  # a program a token
        for name, operation in OPERATIONS.items()
    ),
    *(
        Case(name, f16, operation.tokens[1], (3, 0, 20), bounded=True)
        for name, operation in OPERATIONS.items()
    ),
    *(
        Case(name, f32, operation.tokens[0], lengths)
        for name, operation in OPERATIONS.items()
        for lengths in LAYOUTS[1:]
    ),
    *(
        Case(name, f32, (24,), (4, 3), sliced=True)
        for name in ("rms_norm", "layer_norm", "swiglu", "softmax", "sum")
    ),
    *(
        Case(name, f32, (2, 16), (4, 3), sliced=True)
        for name in ("rms_norm of a sum", "rope", "rope of q and k")
    ),
    Case(
        "rms_norm of a sum", f16, (2, 1024), (20, 0, 11)
    ),  # more tokens than the programs of the backward have at once
    Case("grouped_matmul", f32, (24,), (4, 3), sliced=True),
    *(
        Case(name, f32, (10, 1024), (3, 0, 2)) for name in ("rope interleaved", "rope of q and k")
    ),  # more heads than at a time
]
LONG = [
    Case(name, f32, token, (300, 2, 0, 40, *(4,) * 9))
    for name, token in (
        ("softmax", ()),
        ("log_softmax", (3,)),
        ("logsumexp", ()),
        ("sum", (3,)),
        ("mean", ()),
        ("mean", (3,)),
        ("max", ()),
        ("cumulative_sum", ()),
        ("cumulative_sum", (3,)),
    )
]
LONG += [
    Case(name, f32, (), (300, 200, 0, 90)) for name in ("softmax", "sum", "cumulative_sum")
]  # several warps a program
LONG += [
    Case(
        name, f32, (), (150, 140, 0, 160, 130), bounded=True
    )  # second visits close behind the first
    for name in ("softmax", "max", "cumulative_sum")
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_error(case):
    check(case, DEVICE)


@pytest.mark.parametrize(
    "name",
    [
        "rms_norm",
        "rms_norm of a sum",
        "layer_norm",
        "swiglu",
        "softmax",
        "logsumexp",
        "sum",
        "max",
        "cumulative_sum",
        "rope of q and k",
    ],
)
def test_calls_alike(name):
    """What is kept with the rows holds nothing of the contents of the arrays that it came from, and heeds `no_grad`."""
    case = Case(name, f32, OPERATIONS[name].tokens[0], (5, 0, 8, 1))
    x, parameters, dy = inputs(case, DEVICE)
    other = x.with_values(torch.randn_like(x.values).requires_grad_())
    alone = scree.Array(other.values, other.offsets.clone())
    found, expected = run(case, other, parameters, dy), run(case, alone, parameters, dy)
    assert all(map(torch.equal, found, expected))
    with torch.no_grad():
        y = run(case, other, parameters)[0]
    assert torch.equal(y, expected[0]) and not y.requires_grad


@pytest.mark.parametrize("theta", [0.3, 10000.0])
@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_of_far_positions(theta, interleaved):
    """An angle of thousands of turns is as exact as the first ones."""
    values, start = (
        torch.randn(40, 2, 32, device=DEVICE),
        torch.tensor([5, 0, 1 << 20], device=DEVICE),
    )
    x = scree.from_lengths(values, [20, 0, 20])
    found = scree.rope(x, theta=theta, interleaved=interleaved, start=start, kernel="triton").values
    position = torch.cat([torch.arange(20) + 5, torch.arange(20) + (1 << 20)]).double()
    angle = position[:, None, None] * theta ** (-torch.arange(0, 32, 2).double() / 32)
    wide = values.double().cpu()
    a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    parts = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    right = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    assert (found.cpu() - right).abs().max() <= 2 * torch.finfo(f32).eps * wide.abs().max()


@pytest.mark.parametrize("case", LONG, ids=lambda c: c.id)
def test_rows_longer_than_a_share(case, monkeypatch):
    cut_small(monkeypatch)
    check(case, DEVICE)


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("any", torch.bool),
        ("all", torch.bool),
        ("count_nonzero", torch.bool),
        *(
            (name, dtype)
            for name in ("any", "all", "sum", "prod", "max", "min")
            for dtype in (torch.int32, torch.int64)
        ),
    ],
)
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
            expected = (
                (row.amax(0) if name == "max" else row.amin(0))
                if len(row)
                else torch.full_like(got, worst)
            )
        else:
            expected = row.sum(0) if name == "count_nonzero" else getattr(row, name)(0)
        assert torch.equal(got.to(torch.int64), expected.to(torch.int64))


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("token", [(), (3,)])
@pytest.mark.parametrize("dtype", [f16, f32, torch.float64, torch.int64])
def test_truth_of_numbers(dtype, token, cut, monkeypatch):
    """As the standard path has it, where NaN is true and -0.0 is not, but on numbers as they are."""
    if cut:
        cut_small(monkeypatch)
    lengths = [300, 0, 40, 1, *(4,) * 9, 40]
    generator = torch.Generator(DEVICE).manual_seed(0)
    numbers = torch.tensor(
        [0.0, -0.0, 3.0, 1e-6, torch.nan] if dtype.is_floating_point else [0, 0, -1 << 32, 1, 3],
        device=DEVICE,
    )
    values = numbers[
        torch.randint(0, 5, (sum(lengths), *token), generator=generator, device=DEVICE)
    ].to(dtype)
    values[:300], values[-40:] = numbers[4], 0
    values[150] = 0
    x = scree.from_lengths(values, lengths)
    for name in ("any", "all"):
        assert (
            scree.explain("segment_reduce", name, values, x.layout, torch.bool).provider == "triton"
        )
        found = getattr(scree.namespace(x), name)(x, axis=1)
        assert found.dtype == torch.bool
        assert torch.equal(
            found, torch.stack([getattr(row != 0, name)(0) for row in values.split(lengths)])
        )


def test_truth_of_other_numbers():
    """Numbers that the kernels do not read are compared with 0 before."""
    x = scree.from_lengths(
        torch.tensor([1, 0, 2, 0], dtype=torch.int8, device=DEVICE), [1, 2, 0, 1]
    )
    assert (
        scree.explain("segment_reduce", "any", x.values, x.layout, torch.bool).provider
        == "standard"
    )
    assert scree.namespace(x).any(x, axis=1).tolist() == [True, True, False, False]
    assert scree.namespace(x).all(x, axis=1).tolist() == [True, False, True, False]


def test_mean_is_one_operation():
    """No sum that is divided later, whatever is divided."""
    for dtype in (f16, f32, torch.int32):
        x = scree.from_lengths(torch.arange(8, device=DEVICE).to(dtype), [3, 0, 5])
        out = dtype if dtype.is_floating_point else f32
        assert scree.explain("segment_mean", "mean", x.values, x.layout, out).provider == "triton"
        found = scree.namespace(x).mean(x, axis=1)
        assert (
            torch.equal(found[::2], torch.tensor([1, 5], dtype=out, device=DEVICE))
            and found[1].isnan()
        )


def cut_small(monkeypatch):
    """Make tiles, partitions and parts so short that long rows are cut."""
    for name, value in dict(
        _TOKENS_PER_WARP=32,
        _PARTITION_TILES=1,
        _MAX_WARPS=2,
        _MAX_UNCUT_TILES=2,
        _PART_SIZE=64,
        _PART_STEP=64,
    ).items():
        monkeypatch.setattr(interface, name, value)
    monkeypatch.setattr(wide_features, "_MIN_PARTITION_STEPS", 0)
    monkeypatch.setattr(interface, "_launch_config", interface._launch_config.__wrapped__)


@pytest.mark.parametrize(
    "dtype, token, lengths",
    [
        (f32, (), (3, 0, 40, 1, 0, 17, 2)),
        (f16, (), (0, 150, 1, 0, 70, 5)),
        (f32, (2,), (0, 40, 3)),
        (f16, (2,), (5, 0, 0, 21)),
    ],
)
def test_gradient_of_a_product(dtype, token, lengths, monkeypatch):
    check_product(lengths, token, dtype, DEVICE)
    cut_small(monkeypatch)
    check_product(lengths, token, dtype, DEVICE)


transformed_calls = pytest.mark.parametrize(
    "run",
    [
        lambda x, w: scree.softmax(x).values,
        lambda x, w: scree.attention(*[x[:, :, None]] * 3, causal=True).values,
        lambda x, w: scree.rms_norm(x, w).values,
        lambda x, w: scree.rope(x).values,
        lambda x, w: scree.to_padded(x, length=4)[0],
        lambda x, w: scree.namespace(x).sum(x, axis=1),
        lambda x, w: (
            scree.gather(x, x.with_values(torch.tensor([1, 0, 4, 4, 2], device=DEVICE))).values
        ),
        lambda x, w: scree.cross_entropy(
            x, x.with_values(torch.tensor([1, 0, 7, 4, 2], device=DEVICE))
        ),
    ],
    ids=["softmax", "attention", "rms_norm", "rope", "pad", "sum", "gather", "cross_entropy"],
)


@transformed_calls
def test_transforms_of_torch_func_take_the_standard_path(run):
    rows, values, weights = (
        offsets((2, 0, 3), DEVICE),
        torch.randn(3, 5, 8, device=DEVICE),
        torch.randn(3, 8, device=DEVICE),
    )

    def f(values, weight):
        return run(scree.from_offsets(values, rows), weight)

    right = torch.stack([f(*one) for one in zip(values, weights)])
    assert torch.allclose(torch.func.vmap(f)(values, weights), right, rtol=1e-5, atol=1e-6)
    slope = torch.func.grad(lambda x: f(x, weights[0]).square().sum())(values[0])
    leaf = values[0].clone().requires_grad_()
    assert torch.allclose(
        slope,
        torch.autograd.grad(f(leaf, weights[0]).square().sum(), leaf)[0],
        rtol=1e-4,
        atol=1e-5,
    )


#: Calls whose standard path is `torch.segment_reduce`, which has no tangents.
WITHOUT_TANGENTS = {"softmax", "sum"}


@transformed_calls
def test_forward_mode_loses_no_tangent(run, request):
    rows, weight = offsets((2, 0, 3), DEVICE), torch.randn(8, device=DEVICE)
    values, tangent = torch.randn(2, 5, 8, device=DEVICE)

    def f(values):
        return run(scree.from_offsets(values, rows), weight)

    leaf = values.clone().requires_grad_()
    f(values)  # prepares the kernels
    out = f(leaf)
    (slope,) = torch.autograd.grad(out.sum(), leaf)
    with forward_ad.dual_level():
        inputs = forward_ad.make_dual(values, tangent)
        if request.node.callspec.id in WITHOUT_TANGENTS:
            with pytest.raises(NotImplementedError, match="must implement the jvp function"):
                f(inputs)
            return
        dual = forward_ad.unpack_dual(f(inputs))
    assert torch.allclose(dual.primal, out, rtol=1e-5, atol=1e-5)
    assert torch.allclose(dual.tangent.sum(), (slope * tangent).sum(), rtol=1e-4, atol=1e-4)


def test_one_long_row_says_nothing_of_the_others():
    """Tiles are as wide as the other rows, where the host knows a long one; a bound that is no row's length is none."""
    assert (
        interface._select_sizes(14_000_000, 1_000_001, 10_000_000).width
        == interface._select_sizes(4_000_000, 1_000_000, 4).width
        == 4
    )
    assert interface._select_sizes(14_000_000, 1_000_001, 14_000_000).width == 16


@pytest.mark.parametrize("map", [reductions.NONE, reductions.SOFTMAX], ids=["reduced", "mapped"])
def test_counts_of_parts_are_left_as_found(map, monkeypatch):
    """The next call on the stream finds zeros."""
    cut_small(monkeypatch)
    counts = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(wide_features, "counters", lambda device, number: counts[:number])
    x = torch.randn(580, device=DEVICE)
    rows = interface.Rows(
        torch.tensor([0, 150, 290, 450, 580], dtype=torch.int32, device=DEVICE), 160
    )
    first = interface.over_rows(x, rows, reductions.LSE, map)
    assert not counts.any()
    assert torch.equal(first, interface.over_rows(x, rows, reductions.LSE, map))


def test_first_rows_counts_rows_and_is_cached():
    """The cache serves all calls with the same rows."""
    lengths = [3, 0, 0, 300, 1, *(4,) * 40]
    x = scree.from_lengths(torch.zeros(sum(lengths), device=DEVICE), lengths)
    first_rows = interface.rows_of(x.layout).first_rows(16, 32)
    positions = [offset + row for row, offset in enumerate(x.offsets.tolist()[:-1])]
    expected = [sum(position < 16 * p for position in positions) for p in range(33)]
    assert first_rows.tolist() == expected
    assert interface.rows_of(x.layout).first_rows(16, 32) is first_rows


@pytest.mark.parametrize(
    "edges", [(0, 4, 8, 12), (0, 4, 4, 8), (0, 3, 7, 11)], ids=["even", "empty", "uneven"]
)
def test_rows_that_may_be_of_one_length(edges):
    """As many tokens as if all rows were as long as the longest: where they are not, some tokens are behind the last row."""
    rows = interface.Rows(torch.tensor(edges, dtype=torch.int32, device=DEVICE), 4)
    x = torch.randn(12, device=DEVICE)
    expected = torch.cat(
        [*(x[a:b].softmax(0) for a, b in zip(edges, edges[1:])), 0 * x[edges[-1] :]]
    )
    torch.testing.assert_close(
        interface.over_rows(x, rows, reductions.LSE, reductions.SOFTMAX), expected
    )


@pytest.mark.parametrize("longest", [None, 5])
def test_tokens_behind_the_last_row(longest, monkeypatch):
    """More of them than a share has: they become 0, and are in no reduction."""
    cut_small(monkeypatch)
    rows = interface.Rows(torch.tensor([0, 5, 5, 8], dtype=torch.int32, device=DEVICE), longest)
    x = torch.randn(308, 3, device=DEVICE)
    x[8:] = torch.nan
    parts = x[:8].split([5, 0, 3])
    expected = torch.cat([part.softmax(0) for part in parts] + [torch.zeros(300, 3, device=DEVICE)])
    torch.testing.assert_close(
        interface.over_rows(x, rows, reductions.LSE, reductions.SOFTMAX), expected
    )
    running = interface.over_rows(x, rows, reductions.SUM, reductions.CUMULATIVE)
    torch.testing.assert_close(
        running,
        torch.cat([part.cumsum(0) for part in parts] + [torch.zeros(300, 3, device=DEVICE)]),
    )
    torch.testing.assert_close(
        interface.over_rows(x, rows, reductions.SUM), torch.stack([part.sum(0) for part in parts])
    )


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("width", [(), (3,)])
@pytest.mark.parametrize("dtype", [f16, f32, torch.int32])
def test_first_extremum(dtype, width, cut, monkeypatch):
    """Ties go to the first, NaN is the extremum, both zeros are equal; -1 in empty rows."""
    if cut:
        cut_small(monkeypatch)
    lengths = [300, 0, 40, 1, 2, *(4,) * 9, 0, 7]
    generator = torch.Generator(DEVICE).manual_seed(0)
    values = torch.randint(-3, 4, (sum(lengths), *width), generator=generator, device=DEVICE).to(
        dtype
    )
    if dtype.is_floating_point:
        special = torch.tensor(
            [0.0, -0.0, 0.0, -0.0, 2.5, -torch.inf, torch.inf, torch.nan],
            dtype=dtype,
            device=DEVICE,
        )
        chosen = torch.randint(0, 8, values.shape, generator=generator, device=DEVICE)
        values = torch.where(
            torch.arange(len(values), device=DEVICE).view(-1, *(1,) * len(width)) > 320,
            special[chosen],
            values,
        )
    elif dtype == torch.int32:
        values[5], values[310] = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    x = scree.from_lengths(values, lengths)
    for name in ("max", "min"):
        assert scree.explain("segment_arg", name, x.values, x.layout, dtype).provider == "triton"
        found = getattr(scree.namespace(x), f"arg{name}")(x, axis=1).tolist()
        exact = values.double().cpu().numpy()  # NumPy takes the first, and NaN
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        rows = [exact[a : a + n] for a, n in zip(starts, lengths)]
        assert found == [
            getattr(r, f"arg{name}")(0).tolist() if len(r) else torch.full(width, -1).tolist()
            for r in rows
        ]


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    "name, dtype",
    [(name, dtype) for name in ("sum", "prod") for dtype in (torch.int32, torch.int64)],
)
def test_scan_of_integers(name, dtype, cut, monkeypatch):
    if cut:
        cut_small(monkeypatch)
    lengths = [300, 0, 40, 1, *(4,) * 9]
    x = scree.from_lengths(
        torch.randint(-3, 4, (sum(lengths), 2), device=DEVICE).to(dtype), lengths
    )
    if name == "prod":
        x = x.with_values(x.values.sign() + (x.values == 0))  # 1 and -1
    assert scree.explain("segment_scan", name, x.values, x.layout, dtype).provider == "triton"
    found = getattr(scree.namespace(x), f"cumulative_{name}")(x, axis=1, dtype=dtype)
    expected = [getattr(torch, f"cum{name}")(row, 0) for row in x.values.split(lengths)]
    assert torch.equal(found.values, torch.cat(expected).to(dtype))


@pytest.mark.parametrize(
    "name",
    [
        "rms_norm",
        "rms_norm of a sum",
        "layer_norm",
        "softmax",
        "sum",
        "mean",
        "max",
        "cumulative_sum",
        "swiglu",
        "rope",
        "rope of q and k",
        "grouped_matmul",
        "pad",
        "pad and unpad",
        "pad and unpad by mask",
        "cross_entropy of rows",
        "linear_cross_entropy of rows",
        "gather",
        "scatter",
        "scatter_add",
        "flip",
        "concat",
    ],
)
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
    assert all(
        torch.allclose(a, b, 0, 0, equal_nan=True)
        for a, b in zip(run(case, x, parameters, dy), found)
    )


def test_reasons():
    x = scree.from_lengths(torch.zeros(3, 4, dtype=torch.float64, device=DEVICE), [3])
    with pytest.raises(ValueError, match="float64"):
        scree.rms_norm(x, kernel="triton")
    assert scree.explain("rms_norm", x, eps=1e-6).provider == "standard"
