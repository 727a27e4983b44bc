"""Options of the rotary embedding, compared with a loop over rows and pairs in float64."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import scree
from scree.ops.rope import RopeCall
from scree_triton.norms import rope as kernels
from scree_triton.runtime.device import INTERPRETED

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETED else "cuda"
LENGTHS = (5, 0, 1, 9)
STARTS = (3, 90, 0, 40)
HEAD_DIM = 24
POSITIONS = 64

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def drawn_frequencies(count):
    return np.random.default_rng(count).uniform(-4, 4, count)


def drawn_tables(half):
    return np.random.default_rng(half).standard_normal((2, POSITIONS, half))


def as_tensor(x, dtype=torch.float32):
    return torch.tensor(x, dtype=dtype, device=DEVICE)


#: Name -> options of `rope`; frequencies are numbers, and tables have given widths.
CASES = {
    "plain": {},
    "partial": {"rotary_dim": 16},
    "partial of an odd number of pairs": {"rotary_dim": 10, "interleaved": True},
    "frequencies": {"inv_freq": 12},
    "partial frequencies": {"inv_freq": 5, "interleaved": True},
    "tables": {"tables": 12},
    "partial tables": {"tables": 4, "interleaved": True},
    "linear": {"scaling": {"rope_type": "linear", "factor": 3.0}, "theta": 100.0},
    "Llama 3": {"scaling": LLAMA, "theta": 500.0},
    "YaRN": {"scaling": YARN, "theta": 500.0, "rotary_dim": 20},
}


def arguments(options):
    """Return the options as `rope` takes them, with tensors."""
    options = dict(options)
    if "inv_freq" in options:
        options["inv_freq"] = as_tensor(drawn_frequencies(options["inv_freq"]))
    if "tables" in options:
        options["cos"], options["sin"] = map(as_tensor, drawn_tables(options.pop("tables")))
    return options


def expected(rows, starts, options):
    """Rotate float64 rows (tokens, heads, head_dim), pair by pair."""
    options, results = dict(options), []
    half = options.get("inv_freq", options.get("tables", options.get("rotary_dim", HEAD_DIM) // 2))
    if "tables" in options:
        cos, sin = drawn_tables(half).astype(np.float32).astype(np.float64)
    else:
        if "inv_freq" in options:
            frequencies, factor = drawn_frequencies(half).astype(np.float32), 1.0
        else:
            theta, scaling = options.get("theta", 10000.0), options.get("scaling")
            frequencies, factor = scree.rope_frequencies(2 * half, theta=theta, scaling=scaling)
        angle = np.arange(POSITIONS)[:, None] * frequencies.astype(np.float64)
        cos, sin = np.cos(angle) * factor, np.sin(angle) * factor
    for row, start in zip(rows, starts):
        out = row.copy()
        for token, position in enumerate(range(start, start + len(row))):
            for i in range(half):
                j, k = (2 * i, 2 * i + 1) if options.get("interleaved") else (i, i + half)
                a, b = row[token, :, j], row[token, :, k]
                out[token, :, j] = a * cos[position, i] - b * sin[position, i]
                out[token, :, k] = b * cos[position, i] + a * sin[position, i]
        results.append(out)
    return np.concatenate(results) if results else np.zeros((0, *rows.shape[1:]))


def draw(heads, lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), heads, HEAD_DIM, generator=generator).to(DEVICE)
    return scree.from_lengths(values, list(lengths))


def rows_of(x, lengths):
    return np.split(x.values.detach().double().cpu().numpy(), np.cumsum(lengths))[:-1]


def assert_close(got, wanted, kernel="triton"):
    # The standard implementation rounds angles, of up to 200 radians here, to float32.
    atol = 1e-5 if kernel == "triton" else 1e-4
    np.testing.assert_allclose(got.detach().double().cpu().numpy(), wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("name", CASES)
def test_rope_with_options_agrees_with_a_loop(name):
    options, start = CASES[name], torch.tensor(STARTS, device=DEVICE)
    q, k = draw(3, LENGTHS, 0), draw(1, LENGTHS, 1)
    for kernel in ("triton", "standard"):
        got = scree.rope(q, k, start=start, kernel=kernel, **arguments(options))
        for x, y in zip((q, k), got):
            assert_close(y.values, expected(rows_of(x, LENGTHS), STARTS, options), kernel)
    for lengths in ((0, 0), ()):
        empty = scree.rope(draw(3, lengths, 0), kernel="triton", **arguments(options))
        assert empty.values.shape == (0, 3, HEAD_DIM)


@pytest.mark.parametrize("name", CASES)
def test_gradient_of_rope_with_options_is_the_transpose(name):
    """The gradient of <y, rope(x)> is the transpose of the rotation applied to y."""
    options = arguments(CASES[name])
    x, y = draw(2, LENGTHS, 0), draw(2, LENGTHS, 1)
    results = []
    for kernel in ("triton", "standard"):
        values = x.values.clone().requires_grad_()
        out = scree.rope(x.with_values(values), kernel=kernel, **options)
        results.append(torch.autograd.grad(out.values, values, y.values)[0])
    torch.testing.assert_close(*results, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_operator_of_rope_with_options_agrees_with_the_kernel(name):
    options, x = arguments(CASES[name]), draw(2, LENGTHS, 0)
    values = x.values.clone().requires_grad_()
    wanted = scree.rope(x, kernel="triton", **options).values
    with FlopCounterMode(display=False):  # a dispatch mode
        got = scree.rope(x.with_values(values), kernel="triton", **options).values
    assert torch.equal(got, wanted)
    gradient = torch.autograd.grad(got.sum(), values)[0]
    values = x.values.clone().requires_grad_()
    scree.rope(x.with_values(values), kernel="triton", **options).values.sum().backward()
    assert torch.equal(gradient, values.grad)


@pytest.mark.parametrize("name", CASES)
def test_fallback_of_rope_with_options_agrees_with_the_kernel(name):
    call = arguments(CASES[name])
    q, k = draw(2, LENGTHS, 0), draw(1, LENGTHS, 1)
    tables = [call.pop(key, None) for key in ("inv_freq", "cos", "sin")]
    record = RopeCall(q, k, **call, **dict(zip(("inv_freq", "cos", "sin"), tables)))
    rotation = kernels.rotation_of(q, None, tables, record)
    for sign in (1, -1):
        arguments_of_call = q.values, k.values, rotation, sign
        got = kernels.rotate.__wrapped__(*arguments_of_call)
        for x, y in zip(got, kernels._standard(*arguments_of_call)):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in CASES if name != "plain"])
def test_append_paged_with_options_of_rope(name):
    options = arguments(CASES[name])
    kv_lengths = [n + start for n, start in zip(LENGTHS, (3, 0, 0, 40))]
    q, k = draw(3, LENGTHS, 0), draw(2, LENGTHS, 1)
    counts = [-(-n // 4) for n in kv_lengths]
    pages = torch.arange(sum(counts), dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor(kv_lengths, device=DEVICE)
    results = []
    for kernel in ("triton", "standard"):
        caches = [torch.zeros(sum(counts), 4, 2, HEAD_DIM, device=DEVICE) for _ in range(2)]
        results.append(
            scree.append_paged(
                *caches,
                *(k, k, scree.from_lengths(pages, counts), lengths),
                q=q,
                rope=options,
                kernel=kernel,
            )
        )
    starts = [n - m for n, m in zip(kv_lengths, LENGTHS)]
    wanted_k = expected(rows_of(k, LENGTHS), starts, CASES[name])
    wanted_q = expected(rows_of(q, LENGTHS), starts, CASES[name])
    tokens = np.concatenate(
        [
            4 * first + np.arange(start, n)
            for first, start, n in zip(np.cumsum([0, *counts]), starts, kv_lengths)
        ]
    )
    for (k_pages, _, rotated), kernel in zip(results, ("triton", "standard")):
        assert_close(k_pages.reshape(-1, 2, HEAD_DIM)[torch.tensor(tokens)], wanted_k, kernel)
        assert_close(rotated.values, wanted_q, kernel)


def test_positions_after_the_tables_are_refused_where_the_host_can_read_them():
    """Repeated calls are checked too, though kernels are prepared."""
    cos, sin = map(as_tensor, drawn_tables(12))
    x = draw(2, (4, 2), 0)
    for positions, is_valid in (
        ((0, 0), True),
        ((60, 62), True),
        ((0, 63), False),
        ((-1, 0), False),
    ):
        start = torch.tensor(positions, device=DEVICE)
        for _ in range(2):
            if is_valid or not INTERPRETED:  # a device reads the first or the last row
                scree.rope(x, cos=cos, sin=sin, start=start, kernel="triton")
                continue
            with pytest.raises(ValueError, match=r"cos: expected at least 65 rows|start: expected"):
                scree.rope(x, cos=cos, sin=sin, start=start, kernel="triton")
