"""Layout kernels compared with NumPy loops over rows; in Triton's interpreter without a GPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import scree
from scree import backends
from scree.backends import backend
from scree.construct import OffsetsCall
from scree.dispatch import registry
from scree.dispatch.operation import OPERATIONS
from scree.layout import Layout
from scree_triton.layout import (
    concat,
    gather,
    padding,
    scatter_add,
    scatter_add_bucketed,
    scatter_indices,
    strided_copy,
)
from scree_triton.runtime.launch import INTERPRETED

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETED else "cuda"
LENGTHS = (3, 0, 17, 1, 40)
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float64,
)


def numbers(*shape, dtype=torch.float32, seed=0):
    return (
        (10 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
        .to(dtype)
        .to(DEVICE)
    )


def rows_of(x):
    """The rows of a ragged array as NumPy arrays, with the tokens in front."""
    values = np.moveaxis(x.values.detach().cpu().numpy(), x.ragged_dim, 0)
    return np.split(values, np.cumsum(x.lengths.cpu().numpy()))[:-1]


def equal(x, rows):
    """Whether a ragged array has these rows and nothing else."""
    found = rows_of(x)
    return len(found) == len(rows) and all(np.array_equal(a, b) for a, b in zip(found, rows))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_every_dtype(dtype, dim):
    total = sum(LENGTHS)
    x = scree.from_lengths(
        numbers(*((total, 3), (3, total))[dim], dtype=dtype), LENGTHS, ragged_dim=dim
    )
    rows = rows_of(x)
    for side in ("right", "left"):
        padded, mask = scree.to_padded(x, side=side, fill_value=1, length=44, kernel="triton")
        for i, row in enumerate(rows):
            cut = slice(0, len(row)) if side == "right" else slice(44 - len(row), 44)
            right, real = np.ones((44, 3), row.dtype), np.zeros(44, bool)
            right[cut], real[cut] = row, True
            assert np.array_equal(np.moveaxis(padded[i].cpu().numpy(), dim, 0), right)
            assert np.array_equal(mask[i].cpu().numpy(), real)
        for m in (mask, mask.to(torch.int32)):
            assert equal(scree.from_padded(padded, m, ragged_dim=dim, kernel="triton"), rows)
        if side == "right":
            assert equal(
                scree.from_padded(padded, lengths=LENGTHS, ragged_dim=dim, kernel="triton"), rows
            )
    chosen = torch.tensor([4, 2, 2, 0], device=DEVICE)
    assert scree.explain("select", x, x.layout, x.offsets[:-1]).provider == "triton"
    assert equal(x[chosen], [rows[i] for i in (4, 2, 2, 0)])
    assert equal(x[:, ::-1], [row[::-1] for row in rows]) if dim == 0 else True
    other = (2, 9, 0, 0, 5)
    y = scree.from_lengths(
        numbers(*((16, 3), (3, 16))[dim], dtype=dtype, seed=1), other, ragged_dim=dim
    )
    joined = scree.namespace(x).concat([x, y, x], axis=dim + 1)
    assert equal(joined, [np.concatenate(parts) for parts in zip(rows, rows_of(y), rows)])
    if dim == 0:
        index = scree.from_lengths(torch.tensor([60, 0, 0, 7, 60], device=DEVICE), [2, 3])
        everything = np.concatenate(rows)
        assert equal(
            scree.gather(x, index, kernel="triton"), [everything[[60, 0]], everything[[0, 7, 60]]]
        )


def test_taken_again():
    """Later calls with other indices, and other index dtypes, on the same rows skip the checks."""
    x, like = (
        scree.from_lengths(numbers(61, 3), LENGTHS),
        scree.from_lengths(torch.zeros(5, device=DEVICE), [2, 0, 3]),
    )
    for y in (x, x.values):
        for dtype in (torch.uint8, torch.int64, torch.uint8):
            for chosen in ([60, 0, 0, 7, 60], [1, 2, 3, 4, 5]):
                index = like.with_values(torch.tensor(chosen, dtype=dtype, device=DEVICE))
                assert torch.equal(scree.gather(y, index, kernel="triton").values, x.values[chosen])
    xp, joined = scree.namespace(x), scree.from_lengths(numbers(61, 3, seed=1), LENGTHS[::-1])
    for seed in range(2, 5):
        one, other = (
            x.with_values(numbers(61, 3, seed=seed)),
            joined.with_values(numbers(61, 3, seed=seed + 5)),
        )
        for pair in ((one, other), (one, one), (other, one)):
            found = xp.concat(pair, axis=1)
            assert equal(found, [np.concatenate(parts) for parts in zip(*map(rows_of, pair))])
            assert found.layout is xp.concat(pair, axis=1).layout  # counted once
    with pytest.raises(ValueError, match=r"arrays\[1\]: expected the element axes"):
        xp.concat([x, joined.with_values(numbers(61, 4))], axis=1)


@pytest.mark.parametrize(("token", "long"), [((), False), ((2,), False), ((), True)])
def test_many_rows(token, long, monkeypatch):
    """More rows than one search step, many of them empty, many per program; int32 and int64."""
    monkeypatch.setattr(strided_copy, "needs_int64", lambda *tokens: long)
    for config in (
        padding.pad_config,
        padding.unpad_config,
        gather.select_config,
        concat.concat_config,
    ):
        config.cache_clear()
    lengths = torch.randint(-3, 5, (700,), generator=torch.Generator().manual_seed(0)).clamp(min=0)
    x = scree.from_lengths(numbers(int(lengths.sum()), *token), lengths)
    rows = rows_of(x)
    padded, _ = scree.to_padded(x, kernel="triton")
    assert equal(scree.from_padded(padded, lengths=lengths, kernel="triton"), rows)
    assert equal(x[:, ::-1], [row[::-1] for row in rows])
    joined = scree.namespace(x).concat([x, x[::-1]], axis=1)
    assert equal(joined, [np.concatenate(pair) for pair in zip(rows, rows[::-1])])


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int16, torch.float32, torch.float64],
    ids=lambda dtype: str(dtype)[6:],
)
def test_single_unit_tokens_equal_the_reference(dtype):
    """Several tokens per thread, of one, two and many rows; and the last tokens of a program."""
    values = numbers(2223, dtype=dtype).requires_grad_(dtype.is_floating_point)
    x = scree.from_lengths(values, [1500, 0, 3, 0, 1, 706, 8, 5])
    rows = rows_of(x)
    padded, _ = scree.to_padded(x, length=1502, kernel="triton")
    assert all(
        np.array_equal(padded[i, : len(row)].detach().cpu().numpy(), row)
        for i, row in enumerate(rows)
    )
    assert not padded[1].any() and not padded[0, 1500:].any()
    assert equal(scree.from_padded(padded, lengths=x.lengths, total=2223, kernel="triton"), rows)
    flipped = x[:, ::-1]
    assert equal(flipped, [row[::-1] for row in rows])
    joined = scree.namespace(x).concat([x, flipped], axis=1)
    assert equal(joined, [np.concatenate([row, row[::-1]]) for row in rows])
    if dtype.is_floating_point:
        for y, right in ((flipped, rows), (joined, [2 * row for row in rows])):
            (dx,) = torch.autograd.grad(y.values, values, y.values.detach(), retain_graph=True)
            assert equal(x.with_values(dx), right)


def test_offsets_of_two_dtypes():
    values, cu = numbers(5), torch.tensor([0, 2, 5], device=DEVICE)
    x, y = (scree.from_offsets(values, cu.to(dtype)) for dtype in (torch.int32, torch.int64))
    joined = scree.namespace(x).concat([x, y], axis=1)
    assert equal(joined, [np.concatenate([row, row]) for row in rows_of(x)])


def test_rejections_name_the_reason():
    x = scree.from_lengths(numbers(5, 2), [2, 3])
    assert "up to 4" in scree.explain("join", **{f"x{i}": x for i in range(5)}).rejected["triton"]
    assert (
        "one data type"
        in scree.explain("join", x=x, y=x.with_values(x.values.double())).rejected["triton"]
    )
    assert (
        "no complex64"
        in scree.explain("pad", x.with_values(x.values.to(torch.complex64))).rejected["triton"]
    )
    assert "one element" in scree.explain("pad", x.with_values(x.values[:, :0])).rejected["triton"]
    places = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    assert (
        "not add bool"
        in scree.explain("scatter_add", x.values.bool(), places, 6).rejected["triton"]
    )


@pytest.mark.parametrize("size", [9, 130])  # sorted as bytes, and bucketed
@pytest.mark.parametrize(
    ("width", "many"), [((), 128), ((3,), 8), ((600,), 8)]
)  # the tokens of place 6 in chunks, or by one program
def test_many_tokens_in_one_place(width, size, many, monkeypatch):
    """Sums of chunks in a fixed order; narrow tokens in any order unless determinism is asked for."""
    monkeypatch.setattr(scatter_add_bucketed, "MAX_SPLIT_PLACES", many)
    scatter_add.scatter_add_config.cache_clear()
    x = numbers(300, *width)
    index = torch.where(
        torch.rand(300, generator=torch.Generator().manual_seed(2)) < 0.6,
        5,
        torch.randint(0, size, (300,), generator=torch.Generator().manual_seed(3)),
    ).to(DEVICE)
    index[40:60] = 6
    exact = np.zeros((size, *width))
    np.add.at(exact, index.cpu().numpy(), x.cpu().numpy().astype(np.float64))
    for ordered in (False, True):
        monkeypatch.setattr(
            torch, "are_deterministic_algorithms_enabled", lambda ordered=ordered: ordered
        )
        found = scree.scatter_add(x, index, size, kernel="triton")
        assert (
            np.abs(found.cpu().numpy() - exact).max()
            <= 300 * 2**-24 * np.abs(x.cpu().numpy()).sum(0).max()
        )
    assert torch.equal(found, scatter_add.scatter_add(x, index, size))


@pytest.mark.parametrize("count", [200] if INTERPRETED else [200, 60_000, 200_000])
def test_zipf_distributed_places_equal_the_reference(count):
    """Frequencies as of words: buckets, helper programs and split places in one call."""
    size, generator = count // 2, torch.Generator().manual_seed(4)
    index = torch.multinomial(
        1 / torch.arange(1, size + 1, dtype=torch.float32),
        count,
        replacement=True,
        generator=generator,
    )
    x = numbers(count, 40)
    exact = torch.zeros((size, 40), dtype=torch.float64).index_add(0, index, x.cpu().double())
    bound = torch.zeros_like(exact).index_add(0, index, x.cpu().double().abs())
    found = scree.scatter_add(x, index.to(DEVICE), size, kernel="triton")
    assert bool(((found.cpu() - exact).abs() <= 500 * 2**-24 * bound).all())
    assert torch.equal(found, scatter_add.scatter_add(x, index.to(DEVICE), size))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32, torch.int64])
@pytest.mark.parametrize("width", [1, 2, 3, 20])
def test_narrow_tokens(dtype, width):
    """Atomic additions: integers are exact, half precision is added in float32."""
    x, index = (
        numbers(300, width, dtype=dtype),
        torch.randint(-2, 9, (300,), generator=torch.Generator().manual_seed(3)).to(DEVICE),
    )
    found = scatter_add.scatter_add(x, index, 7).cpu()
    known, wide = (
        ((index >= 0) & (index < 7)).cpu(),
        torch.float64 if dtype.is_floating_point else dtype,
    )
    exact = torch.zeros((7, width), dtype=wide).index_add(
        0, index.cpu()[known], x.cpu()[known].to(wide)
    )
    most = (
        x.abs().sum().item() * max(torch.finfo(dtype).eps, 2**-24) if dtype.is_floating_point else 0
    )
    assert found.dtype == dtype and (found.to(wide) - exact).abs().max() <= most


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64])
def test_sums_beyond_the_cache(dtype, monkeypatch):
    """Sums in parts, the last one shorter; half precision uses scratch memory for one part."""
    monkeypatch.setattr(scatter_add, "l2_budget", lambda device: 500)
    x, index = (
        numbers(300, 3, dtype=dtype),
        torch.randint(-2, 103, (300,), generator=torch.Generator().manual_seed(3)).to(DEVICE),
    )
    config = scatter_add.AtomicConfig(
        x.device,
        dtype,
        index.dtype,
        x.shape,
        100,
        scatter_add.ACC_TYPES[dtype],
        scatter_add.ACC_DTYPES[scatter_add.ACC_TYPES[dtype]],
    )
    assert 100 // config.part_size >= 2 and 100 % config.part_size
    found, known = config.run(x, index), (index >= 0) & (index < 100)
    exact = torch.zeros((100, 3), dtype=torch.float64).index_add(
        0, index[known].cpu(), x[known].cpu().double()
    )
    most = (
        x.abs().sum().item() * max(torch.finfo(dtype).eps, 2**-24) if dtype.is_floating_point else 0
    )
    assert found.dtype == dtype and (found.cpu().double() - exact).abs().max() <= most


def test_scatter_with_duplicates_keeps_the_last_token():
    x, index = (
        numbers(300, 2),
        torch.randint(0, 7, (300,), generator=torch.Generator().manual_seed(3)).to(DEVICE),
    )
    x.requires_grad_()
    found = scree.scatter(x, index, 9, kernel="triton")
    right, source = np.zeros((9, 2), np.float32), np.full(9, -1)
    for i, place in enumerate(index.tolist()):
        right[place], source[place] = x[i].detach().cpu().numpy(), i
    assert np.array_equal(found.detach().cpu().numpy(), right)
    dy = numbers(9, 2, seed=1)
    (dx,) = torch.autograd.grad(found, x, dy)
    right = np.zeros((300, 2), np.float32)
    for place, i in enumerate(source):
        if i >= 0:
            right[i] = dy[place].cpu().numpy()
    assert np.array_equal(dx.cpu().numpy(), right)


def test_scatter_add_of_an_array_with_a_tail_ignores_the_tail():
    """In the first call and in later calls with the same metadata."""
    x = numbers(7, 2)
    rows = scree.Array.from_layout(
        x, Layout(backend(x), torch.tensor([0, 2, 5], device=DEVICE), 7, 4)
    )
    right, places = np.zeros((8, 2), np.float32), [4, 1, 1, 0, 6, 9, 2]
    for token, place in zip(x.cpu().numpy()[:5], places):
        right[place] += token
    index = rows.with_values(torch.tensor(places, dtype=torch.int32, device=DEVICE))
    for _ in range(2):
        assert np.array_equal(scree.scatter_add(rows, index, 8).cpu().numpy(), right)
    assert np.array_equal(
        scree.scatter_add(rows, index.values.to(torch.int64), 8).cpu().numpy(), right
    )


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("chosen", [(4, 2, 2, 0), (4, 0, 2), (0, 1, 2, 3, 4)])
def test_gradient_of_rows(chosen, dim):
    """Gradients of repeated rows are added; rows that are not selected have a gradient of 0."""
    total = sum(LENGTHS)
    values = numbers(*((total, 3), (3, total))[dim]).requires_grad_()
    x = scree.from_lengths(values, LENGTHS, ragged_dim=dim)
    y = x[list(chosen)]
    dy = y.with_values(numbers(*y.values.shape, seed=1))
    (dx,) = torch.autograd.grad(y.values, values, dy.values)
    right = [np.zeros((length, 3)) for length in LENGTHS]
    for i, row in zip(chosen, rows_of(dy)):
        right[i] += row
    assert np.allclose(np.moveaxis(dx.cpu().numpy(), dim, 0), np.concatenate(right), rtol=1e-6)


@pytest.mark.parametrize(("dim", "few"), [(0, 8000), (1, 8000), (0, 7999)])
def test_mask_with_holes_equals_the_reference(dim, few, monkeypatch):
    """With and without the number of tokens; in one pass and in two."""
    monkeypatch.setattr(scatter_indices, "MAX_SLOTS_ONE_PASS", few)
    scatter_indices.mark_config.cache_clear()
    mask = (torch.rand(4, 2000, generator=torch.Generator().manual_seed(0)) < 0.3).to(DEVICE)
    mask[1], mask[2] = False, True  # so that whole blocks are empty or full
    padded = numbers(*((4, 2000, 2), (4, 2, 2000))[dim]).requires_grad_()
    count = int(mask.sum())
    rows = [
        np.moveaxis(p, dim, 0)[m] for p, m in zip(padded.detach().cpu().numpy(), mask.cpu().numpy())
    ]
    y = scree.from_padded(padded, mask, ragged_dim=dim, kernel="triton")
    assert equal(y, rows)
    dy = numbers(*y.values.shape, seed=1)
    (dx,) = torch.autograd.grad(y.values, padded, dy)
    right = np.zeros((4, 2000, 2), np.float32)
    right[mask.cpu().numpy()] = np.moveaxis(dy.cpu().numpy(), dim, 0)
    assert np.array_equal(np.moveaxis(dx.cpu().numpy(), dim + 1, 1), right)
    for total in (count + 5, None):
        offsets, slots = scatter_indices.mask_indices(mask, total, torch.int64)
        assert offsets.tolist() == y.offsets.tolist() and (
            total is None or slots[count:].tolist() == [mask.numel()] * 5
        )
        assert slots[:count].tolist() == np.flatnonzero(mask.cpu().numpy()).tolist()


@pytest.mark.parametrize("kernel", ["triton", "standard"])
def test_a_mask_is_read_once(kernel, monkeypatch, isolated_registry):
    """Where a read costs: the kernels read the offsets, the standard path the mask; both are cached."""
    seen, lib = [], backend(numbers(1))
    away = replace(
        lib, peek=lambda x: None, read=lambda x: seen.append(tuple(x.shape)) or lib.read(x)
    )
    monkeypatch.setitem(backends._by_type, torch.Tensor, away)
    if kernel == "standard":
        scree.unregister_kernel("mark", "triton")
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]], device=DEVICE)
    padded = numbers(3, 4, 2)
    y = scree.from_padded(padded, mask, kernel=kernel)
    assert seen == ([(4,)] if kernel == "triton" else [(3, 4), (4,)])
    assert torch.equal(
        y.values, padded[mask > 0]
    ) and y.layout.host_offsets.tolist() == y.offsets.tolist() == [0, 3, 3, 4]
    assert y.max_length == 3 and y.offsets.dtype == torch.int32
    for shape in ((0, 4, 2), (2, 0, 2)):
        y = scree.from_padded(
            numbers(*shape), torch.ones(shape[:2], dtype=torch.bool, device=DEVICE), kernel=kernel
        )
        assert (
            y.offsets.tolist() == [0] * (shape[0] + 1)
            and y.values.shape == (0, 2)
            and y.max_length == 0
        )


def test_padding_with_equal_metadata_is_checked_once(isolated_registry):
    """Except for floating-point zeros, because -0.0 equals 0.0."""
    x = scree.from_lengths(numbers(61, 2).abs(), LENGTHS)
    for fill in (0, 0.0, -0.0):
        assert scree.to_padded(x, fill_value=fill)[0].signbit().any() == (str(fill) == "-0.0")
    checked, kernel = [], registry.kernels("pad")[0]
    scree.register_kernel(
        "pad",
        provider=kernel.provider,
        rejects=lambda call: checked.append(call) or kernel.rejects(call),
        prepare=kernel.prepare,
    )(kernel.run)
    first, mask = scree.to_padded(x, fill_value=-1)
    padded, same = scree.to_padded(x * 2, fill_value=-1)
    assert len(checked) == 1
    assert torch.equal(padded, torch.where(mask[..., None], first * 2, -1)) and torch.equal(
        mask, same
    )


def test_indices_out_of_bounds_read_and_write_nothing():
    """Tokens without a valid index are 0."""
    index = torch.tensor([-1, 2, 3, 1 << 40], device=DEVICE)
    assert gather.gather(numbers(3, 2), index, False)[[0, 2, 3]].abs().max() == 0
    assert scatter_add.scatter_add(numbers(4, 2), index, 3)[:2].abs().max() == 0
    for x in (numbers(4, 1), numbers(4, 64)):  # scattered directly, and by lookup
        found = gather.scatter_unique(x, index, 3)
        assert found[:2].abs().max() == 0 and torch.equal(found[2], x[1])
    assert scatter_indices.last_tokens(index, 3).tolist() == [-1, -1, 1]


def test_group_and_scatter_round_trip():
    """The path of a mixture of experts, with its gradient."""
    x, ids = (
        numbers(30, 4).requires_grad_(),
        torch.randint(0, 5, (30,), generator=torch.Generator().manual_seed(0)).to(DEVICE),
    )
    grouped, index = scree.group(x, ids, 5)
    assert equal(grouped, [x.detach().cpu().numpy()[ids.cpu().numpy() == i] for i in range(5)])
    back = scree.scatter(grouped, index, 30, kernel="triton")
    assert torch.equal(back, x)
    dy = numbers(30, 4, seed=1)
    (dx,) = torch.autograd.grad(back, x, dy)
    assert torch.equal(dx, dy)


@pytest.mark.parametrize("count", [0, 1, 1024, 20_000])
def test_offsets_from_lengths(count):
    """On any device, without a read of the lengths."""
    given = torch.arange(count, device=DEVICE) % 7
    for dtype in (torch.int32, torch.int64):
        call = OffsetsCall(given.to(dtype), torch.int32)
        assert (
            OPERATIONS["offsets"].run_call(call, "triton").tolist()
            == np.cumsum([0, *given.tolist()]).tolist()
        )


def test_gradients_of_gradients():
    """All of these functions are linear: the gradient of the gradient is the function again."""
    x = scree.from_lengths(numbers(61, 2).requires_grad_(), LENGTHS)
    index = scree.from_lengths(torch.tensor([3, 0, 3], device=DEVICE), [1, 2])
    pairs = torch.arange(61, device=DEVICE) // 2
    functions = {
        "pad": lambda rows: scree.to_padded(rows)[0],
        "unpad": lambda rows: scree.from_padded(scree.to_padded(rows)[0], lengths=LENGTHS).values,
        "gather": lambda rows: scree.gather(rows, index).values,
        "scatter_add": lambda rows: scree.scatter_add(rows, pairs, 40),
        "scatter": lambda rows: scree.scatter(rows, pairs, 40),
        "select": lambda rows: rows[[4, 2, 2]].values,
        "join": lambda rows: scree.namespace(rows).concat([rows, rows * 2], axis=1).values,
    }
    for name, f in functions.items():
        y = f(x)
        dy, other = torch.ones_like(y).requires_grad_(), numbers(61, 2, seed=1)
        (dx,) = torch.autograd.grad(y, x.values, dy, create_graph=True)
        assert torch.equal(torch.autograd.grad(dx, dy, other)[0], f(x.with_values(other))), name


def test_pack_of_device_rows_does_not_synchronize():
    rows = [numbers(n, 2) for n in LENGTHS]
    if not INTERPRETED:
        torch.cuda.set_sync_debug_mode("error")
    try:
        arr = scree.pack(rows)
    finally:
        if not INTERPRETED:
            torch.cuda.set_sync_debug_mode("default")
    assert arr.offsets.tolist() == [0, 3, 3, 20, 21, 61]
    assert equal(arr, [row.cpu().numpy() for row in rows])
