"""Cross-entropy beyond what every operation is tested for: chunks, gradients of the forward pass, targets, numbers, memory."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional
from kernels_reference import bf16, distance, f16, f32

import scree
from scree.dispatch import registry
from scree_triton.losses import cross_entropy, linear_cross_entropy
from scree_triton.runtime.launch import INTERPRETED

pytestmark = [] if INTERPRETED else pytest.mark.gpu
DEVICE = "cpu" if INTERPRETED else "cuda"
HALF = f16 if INTERPRETED else bf16  # the interpreter has no bfloat16


def problem(lengths, width, classes, dtype, bias=True, seed=0):
    """Hidden states, weight, bias and targets; every fourth token has none."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, device=DEVICE).to(dtype).requires_grad_()

    total = sum(lengths)
    x, weight = random(total, width), random(classes, width)
    targets = torch.randint(classes, (total,), generator=generator, device=DEVICE)
    targets[1::4] = -100
    offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
    rows = scree.from_offsets(x, offsets)
    return rows, weight, random(classes) if bias else None, rows.with_values(targets)


def exact(x, weight, bias, targets, reduction, dtype=torch.float64):
    """The loss and the gradients of all inputs, by PyTorch."""
    leaves = [
        p.detach().to(dtype).requires_grad_() for p in (x.values, weight, bias) if p is not None
    ]
    loss = functional.cross_entropy(
        functional.linear(*leaves).to(torch.promote_types(dtype, f32)),
        targets.values,
        reduction=reduction,
    )
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


# Tokens of a chunk, and the most classes that one pass reads: the 50 classes take one pass or two.
@pytest.fixture(params=[(2, 100), (1, 100), (2, 0)], ids=str)
def small_chunks(request, monkeypatch):
    tokens, many = request.param
    monkeypatch.setattr(linear_cross_entropy, "max_chunk_tokens", lambda *sizes: tokens)
    monkeypatch.setattr(linear_cross_entropy, "MAX_CLASSES_PER_WIDTH", many)
    monkeypatch.setattr(linear_cross_entropy, "SECOND_PASS_TILE", (4, 16))


@pytest.mark.parametrize(
    ("max_logits", "products"),
    [(None, 1 + 4), (99, 1 + 4), (100, 3), (250, 2), (10_000, 1)],
    ids=str,
)
def test_allowed_logits_are_computed_once(max_logits, products, monkeypatch):
    """Two tokens are enough for one pass over their logits; otherwise there are two passes."""
    monkeypatch.setattr(linear_cross_entropy, "MIN_CHUNK_TOKENS", 2)
    monkeypatch.setattr(linear_cross_entropy, "MAX_CLASSES_PER_WIDTH", 0)
    monkeypatch.setattr(linear_cross_entropy, "SECOND_PASS_TILE", (16, 16))
    visits, visit = [], linear_cross_entropy.visit_logits
    monkeypatch.setattr(
        linear_cross_entropy,
        "visit_logits",
        lambda *args, **options: (visits.append(args), visit(*args, **options)),
    )
    x, weight, bias, targets = parts = problem([3, 0, 4, 2], 24, 50, f32, True)
    leaves = [x.values, weight, bias]
    loss = scree.linear_cross_entropy(
        x, weight, targets, bias, max_logits=max_logits, kernel="triton"
    )
    results = loss.detach(), *torch.autograd.grad(loss, leaves)
    for got, expected in zip(results, exact(*parts, "mean", torch.float64), strict=True):
        assert distance(got, expected) < 1e-6
    assert len(visits) == products


@pytest.mark.parametrize("reduction, bias", [("mean", True), ("sum", False)])
@pytest.mark.parametrize("dtype", [f32, f16] if INTERPRETED else [f32, f16, bf16])
def test_chunks(small_chunks, dtype, reduction, bias):
    """Losses and gradients are as exact as eager products, also of a second backward pass with a factor."""
    parts = problem([3, 0, 4, 2], 24, 50, dtype, bias)
    right, rough = (exact(*parts, reduction, d) for d in (torch.float64, dtype))
    leaves = [p for p in (parts[0].values, *parts[1:3]) if p is not None]
    loss = scree.linear_cross_entropy(
        *parts[:2], parts[3], parts[2], reduction=reduction, kernel="triton"
    )
    again = [torch.autograd.grad(loss * factor, leaves, retain_graph=True) for factor in (0.3, 1.0)]
    assert loss.dtype == f32
    assert distance(loss.detach(), right[0]) <= 2 * distance(rough[0], right[0]) + 4e-7
    floor = {f16: 3e-4, bf16: 2.4e-3, f32: 4e-7}[dtype]
    for factor, gradients in zip((0.3, 1.0), again):
        for got, expected, other in zip(gradients, right[1:], rough[1:]):
            assert got.dtype == dtype
            assert distance(got, expected * factor) <= 2 * distance(other, expected) + floor


@pytest.mark.parametrize(
    ("small_chunks", "bias"), [((4, 100), False), ((4, 0), True)], indirect=["small_chunks"]
)
@pytest.mark.parametrize("classes", [5, 24, *range(25, 32)])
def test_linear_cross_entropy_any_number_of_classes_agrees_with_float64(
    small_chunks, bias, classes
):
    """The last classes have products of their own, in one pass and in two."""
    parts = problem([3, 0, 4, 2], 16, classes, HALF, bias)
    right, rough = (exact(*parts, "sum", d) for d in (torch.float64, HALF))
    leaves = [p for p in (parts[0].values, *parts[1:3]) if p is not None]
    loss = scree.linear_cross_entropy(
        *parts[:2], parts[3], parts[2], reduction="sum", kernel="triton"
    )
    results = [loss.detach(), *torch.autograd.grad(loss, leaves)]
    floor = {f16: 3e-4, bf16: 2.4e-3}[HALF]
    for got, expected, other in zip(results, right, rough, strict=True):
        assert distance(got, expected) <= 2 * distance(other, expected) + floor


@pytest.mark.parametrize(
    ("classes", "dtype", "sizes"),
    [
        (7, f16, [7]),
        (16, f16, [16]),
        (50257, bf16, [50256, 1]),
        (31, f16, [24, 7]),
        (31, f32, [31]),
    ],
)
def test_aligned_blocks_cover_all_classes(classes, dtype, sizes):
    logits = torch.empty((1, classes), dtype=dtype)
    blocks = linear_cross_entropy.aligned_blocks(logits)
    assert [logits[:, block].shape[1] for block in blocks] == sizes
    assert torch.equal(torch.cat([torch.arange(classes)[b] for b in blocks]), torch.arange(classes))


def test_only_the_gradients_that_are_wanted(small_chunks):
    x, weight, bias, targets = problem([5, 3], 16, 20, f32)
    weight.requires_grad_(False)
    loss = scree.linear_cross_entropy(x, weight, targets, bias, kernel="triton")
    loss.backward()
    assert weight.grad is None
    right = exact(x, weight, bias, targets, "mean")
    assert distance(x.values.grad, right[1]) < 1e-6 and distance(bias.grad, right[3]) < 1e-6


def test_a_scaled_loss_saves_small_gradients_in_float16():
    """Gradients of float16 wait for the factor of the loss; those of the forward pass would be 0 before it comes."""
    x, weight, _, targets = problem([9], 16, 100, f16, bias=False)
    with torch.no_grad():
        weight *= 1e-3  # probabilities of 1 / 100
    loss = scree.linear_cross_entropy(x, weight, targets, reduction="sum", kernel="triton") / 30000
    loss = loss.float() * 65536
    found = torch.autograd.grad(loss, [x.values, weight])
    for got, expected in zip(found, exact(x, weight, None, targets, "sum")[1:]):
        assert distance(got, expected * 65536 / 30000) < 2e-3


def test_the_logits_stay_as_they_are():
    x = scree.from_lengths(torch.randn(7, 33, device=DEVICE, requires_grad=True), [3, 0, 4])
    before = x.values.detach().clone()
    scree.cross_entropy(
        x, x.with_values(torch.arange(7, device=DEVICE)), kernel="triton"
    ).backward()
    assert torch.equal(x.values.detach(), before)


@pytest.mark.parametrize("dtype", [f32, HALF])
@pytest.mark.parametrize("classes", [100, 77])
def test_large_numbers(dtype, classes):
    """Logits near 300 and of minus infinity lose no more than their own precision."""
    x = (torch.randn(9, classes, device=DEVICE) + 300).to(dtype)
    x[2, 5:50], x[3, :-1] = -math.inf, -math.inf
    x.requires_grad_()
    targets = torch.full((9,), classes - 1, device=DEVICE)
    losses = scree.cross_entropy(x, targets, reduction="none", kernel="triton")
    wide = x.detach().double().requires_grad_()
    right = functional.cross_entropy(wide, targets, reduction="none")
    assert torch.allclose(losses.double(), right, rtol=1e-6, atol=1e-6)
    got, expected = (
        torch.autograd.grad(losses.sum(), x)[0],
        torch.autograd.grad(right.sum(), wide)[0],
    )
    assert distance(got, expected) < (1e-6 if dtype == f32 else 5e-3)


@pytest.mark.parametrize("dtype", [f32, HALF])
@pytest.mark.parametrize("classes", [20, 73])  # all held at once, or walked over
def test_logits_anywhere_in_memory(classes, dtype):
    """Rows that begin at any place of 16 bytes, and end at any; what stands beside them is NaN."""
    targets = torch.arange(7, device=DEVICE) % 5 - 1
    targets = cross_entropy.Targets(torch.where(targets < 0, -100, targets), None, -100)
    dy = torch.rand(7, device=DEVICE)
    per_vector = 16 // dtype.itemsize
    # Rows of 96 logits begin at equal places, rows of 97 at all places.
    for width, places in ((96, range(per_vector + 1)), (97, (0, 3))):
        for at in places:
            base = torch.full((7, width), math.nan, device=DEVICE, dtype=dtype)
            x = base[:, at : at + classes]
            x.copy_(torch.randn(x.shape, device=DEVICE))
            wide = x.double().requires_grad_()
            right = functional.cross_entropy(wide, targets.classes, reduction="none")
            losses, stats, _ = cross_entropy.forward(x, targets)
            assert torch.allclose(losses.double(), right, rtol=1e-6, atol=1e-6)
            exact = torch.autograd.grad(right, wide, dy.double())[0]
            assert distance(cross_entropy.backward(dy, x, stats, targets), exact) < (
                1e-6 if dtype == f32 else 5e-3
            )
            cross_entropy.visit_logits(x, targets, losses=losses, out=x, dlosses=dy)
            assert distance(x, exact) < (1e-6 if dtype == f32 else 5e-3)
            assert base[:, :at].isnan().all() and base[:, at + classes :].isnan().all()


def test_targets_that_do_not_exist():
    """Where nobody looks at them beforehand, the loss and the gradient of the token are NaN, and of no other."""
    x = torch.randn(5, 20, device=DEVICE)
    targets = cross_entropy.Targets(torch.tensor([3, 20, -1, 19, -100], device=DEVICE), None, -100)
    losses, stats, _ = cross_entropy.forward(x, targets)
    assert losses.isnan().tolist() == [False, True, True, False, False] and losses[4] == 0
    dx = cross_entropy.backward(torch.ones_like(losses), x, stats, targets)
    assert (
        dx.isnan().all(1).tolist()
        == dx.isnan().any(1).tolist()
        == [False, True, True, False, False]
    )
    assert not dx[4].any()


@pytest.mark.parametrize(
    "classes", [20, 40 if INTERPRETED else 2500]
)  # of a program that holds them all, and of one that does not
def test_what_does_not_count_reaches_nothing(classes):
    """NaN and infinity in the logits of tokens without a target."""
    x = torch.randn(5, classes, device=DEVICE)
    x[1], x[4] = math.nan, math.inf
    x.requires_grad_()
    rows = scree.from_offsets(x, torch.tensor([0, 2, 5], device=DEVICE, dtype=torch.int32))
    targets = torch.tensor([3, -100, 1, 19, -100], device=DEVICE)
    loss = scree.cross_entropy(rows, rows.with_values(targets), kernel="triton")
    wide = x.detach().double()[[0, 2, 3]].requires_grad_()
    right = functional.cross_entropy(wide, targets[[0, 2, 3]])
    (dx,), (exact,) = torch.autograd.grad(loss, x), torch.autograd.grad(right, wide)
    assert (
        distance(loss.detach(), right.detach()) < 1e-6
        and distance(dx[[0, 2, 3]], exact) < 1e-6
        and not dx[[1, 4]].any()
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("ignored", [0, 1])  # all of the tokens, or half of them
def test_the_mean_over_nothing(compiled, ignored):
    """It is NaN, and its gradient 0; the same from a compiled function."""
    x, weight, _, _ = problem([3, 5], 16, 20, f32, bias=False)
    targets = torch.arange(8, device=DEVICE) % (ignored + 1)

    def both(x, weight):
        logits = torch.nn.functional.linear(x, weight)
        first = scree.cross_entropy(logits, targets, ignore_index=0, kernel="triton")
        return first, scree.linear_cross_entropy(
            x, weight, targets, ignore_index=0, kernel="triton"
        )

    torch._dynamo.reset()
    found = (torch.compile(both, fullgraph=True, backend="aot_eager") if compiled else both)(
        x.values, weight
    )
    right = exact(x, weight, None, x.with_values(torch.where(targets == 0, -100, targets)), "mean")
    for loss in found:
        gradients = torch.autograd.grad(loss, (x.values, weight), retain_graph=True)
        if ignored == 0:
            assert loss.isnan() and not any(g.any() for g in gradients)
        else:
            assert all(
                distance(got.detach(), expected) < 1e-6
                for got, expected in zip((loss, *gradients), right)
            )


def test_reasons():
    x = torch.zeros(3, 4, dtype=torch.float64, device=DEVICE)
    targets = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="float64"):
        scree.cross_entropy(x, targets, kernel="triton")
    assert scree.explain("linear_cross_entropy", x, x, targets).provider == "standard"
    assert (
        "32 bits"
        in scree.explain("cross_entropy", x.float(), targets, ignore_index=-1 << 40).rejected[
            "triton"
        ]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [3001, 32000, 50257, 128256, 256000])
def test_many_classes(classes):
    generator = torch.Generator("cuda").manual_seed(0)
    x = (
        torch.randn(300, classes, generator=generator, device="cuda")
        .mul(3)
        .to(bf16)
        .requires_grad_()
    )
    targets = torch.randint(classes, (300,), generator=generator, device="cuda")
    losses = scree.cross_entropy(x, targets, reduction="none", kernel="triton")
    wide = x.detach().double().requires_grad_()
    right = functional.cross_entropy(wide, targets, reduction="none")
    assert distance(losses, right) < 1e-6
    dy = torch.randn(300, generator=generator, device="cuda")
    got, expected = (
        torch.autograd.grad(losses, x, dy)[0],
        torch.autograd.grad(right, wide, dy.double())[0],
    )
    assert distance(got, expected) < 4e-3


@pytest.mark.gpu
def test_more_than_2_31_logits():
    """The last tokens against themselves alone."""
    x = torch.empty((40000, 65536), dtype=f16, device="cuda").uniform_(-4, 4)
    targets = torch.arange(40000, device="cuda")
    losses, stats, _ = cross_entropy.forward(x, cross_entropy.Targets(targets, None, -100))
    alone = cross_entropy.Targets(targets[-8:], None, -100)
    right, right_stats, _ = cross_entropy.forward(x[-8:], alone)
    assert torch.equal(losses[-8:], right)
    dx = cross_entropy.backward(
        torch.ones_like(losses), x, stats, cross_entropy.Targets(targets, None, -100)
    )
    assert torch.equal(
        dx[-8:], cross_entropy.backward(torch.ones_like(right), x[-8:], right_stats, alone)
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "width, classes, more", [(1024, 8192, 1024 * 8192), (256, 131072, 4096 * (256 + 4096))]
)
def test_all_logits_never_exist(width, classes, more):
    """The peak is that of the gradients and the logits of 1,024 tokens; or of 4,096 tokens and 4,096 classes, and those tokens."""
    x, weight, _, targets = problem([4000, 192, 4000], width, classes, bf16, bias=False)
    for p in torch.autograd.grad(
        scree.linear_cross_entropy(x, weight, targets, kernel="triton"), (x.values, weight)
    ):
        assert p.isfinite().all()  # and cuBLAS has its memory
    del p
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    scree.linear_cross_entropy(x, weight, targets, kernel="triton").backward()
    assert torch.cuda.max_memory_allocated() - before < 2 * (weight.numel() + x.size + more) + (
        4 << 20
    )
    sample = slice(0, 512)  # the reference of all tokens would not fit
    part = scree.from_lengths(x.values[sample].detach().requires_grad_(), [512])
    right, rough = (
        exact(part, weight, None, part.with_values(targets.values[sample]), "sum", d)[1]
        for d in (torch.float64, bf16)
    )
    scale = (targets.values >= 0).sum()
    assert distance(x.values.grad[sample] * scale, right) <= 2 * distance(rough, right) + 2.4e-3


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_losses_alike_are_checked_once(isolated_registry, reduction):
    x = scree.from_lengths(torch.randn(5, 9, device=DEVICE), [2, 0, 3])
    checked, kernel = [], registry.kernels("cross_entropy")[0]
    scree.register_kernel(
        "cross_entropy",
        provider=kernel.provider,
        rejects=lambda call: checked.append(call) or kernel.rejects(call),
        prepare=kernel.prepare,
    )(kernel.run)
    if INTERPRETED:  # as if the host could not look at the targets
        x.layout.backend = replace(x.layout.backend, peek=lambda x: None)
    for _ in range(3):
        targets = x.with_values(torch.randint(9, (5,), device=DEVICE))
        wanted = functional.cross_entropy(x.values, targets.values, reduction=reduction)
        found = scree.cross_entropy(x, targets, reduction=reduction)
        assert torch.allclose(found.values if reduction == "none" else found, wanted)
    assert len(checked) == 1


#: Options of the losses; "weights" stands for class weights.
OPTIONS = {
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 3.0},
    "z_loss": {"z_loss": 0.2},
    "weights": {"class_weights": True},
    "smoothing and weights": {"label_smoothing": 0.3, "class_weights": True},
    "all": {"label_smoothing": 0.1, "softcap": 4.0, "z_loss": 0.1, "class_weights": True},
}
REDUCTIONS = ["mean", "sum", "row_mean", "none"]


def class_weights_of(classes):
    generator = torch.Generator(DEVICE).manual_seed(5)
    return torch.rand(classes, generator=generator, device=DEVICE) + 0.25


def exact_loss(logits, targets, reduction, *, softcap=None, z_loss=0.0, **options):
    """The loss and the accuracy of logits (total, classes) by PyTorch, in the dtype of the logits."""
    rows, targets = targets.lengths.tolist(), targets.values
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    weights = options.pop("class_weights", None)
    weights = None if weights is None else weights.to(logits.dtype)

    def reduce(logits, targets, reduction):
        counted = (targets != -100).to(logits.dtype)
        total = counted if reduction == "none" else counted.sum() if reduction == "mean" else 1
        squares = z_loss * torch.logsumexp(logits, 1) ** 2 * counted
        correct = (logits.argmax(1) == targets).to(logits.dtype)
        if reduction != "none":
            squares, correct = squares.sum() / total, correct.sum() / total
        loss = functional.cross_entropy(logits, targets, weights, reduction=reduction, **options)
        return loss + squares, correct

    if reduction != "row_mean":
        return reduce(logits, targets, reduction)
    parts = zip(logits.split(rows), targets.split(rows))
    return [torch.stack(results) for results in zip(*(reduce(*part, "mean") for part in parts))]


def check_options(run, leaves, reduction, exact, rough, tolerance):
    """Compare loss, accuracy and gradients of `run(*leaves)` with exact ones; `rough` are eager."""
    loss, accuracy = run(*leaves)
    loss, accuracy = (x.values if isinstance(x, scree.Array) else x for x in (loss, accuracy))
    assert loss.dtype == accuracy.dtype == f32
    assert loss.requires_grad and not accuracy.requires_grad
    dy = torch.linspace(0.5, 1.5, loss.numel(), device=DEVICE).reshape(loss.shape)
    results = []
    for dtype, function in ((torch.float64, exact), (leaves[0].dtype, rough)):
        wide = [p.detach().to(dtype).requires_grad_() for p in leaves]
        expected, expected_accuracy = function(*wide)
        gradients = torch.autograd.grad(expected, wide, dy.to(expected.dtype))
        results.append([expected.detach(), *gradients])
    got = [loss.detach(), *torch.autograd.grad(loss, leaves, dy)]
    for x, right, eager, leaf in zip(got, *results, [loss, *leaves]):
        nan = right.isnan()
        assert x.dtype == leaf.dtype and torch.equal(x.isnan(), nan)
        x, right, eager = (p.masked_fill(nan, 0) for p in (x, right, eager))
        assert distance(x, right) <= 2 * distance(eager, right) + tolerance
    return accuracy, expected_accuracy


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("classes, dtype", [(20, f32), (77, HALF)])
def test_options_agree_with_float64(name, classes, dtype, reduction):
    options = dict(OPTIONS[name])
    if options.get("class_weights"):
        options["class_weights"] = class_weights_of(classes)
    if name == "all" and reduction == "row_mean":
        options["z_loss"] = 0.0
    generator = torch.Generator(DEVICE).manual_seed(1)
    lengths = [3, 4, 1, 9]
    # Multiples of 1/4: some logits are equal, and softcaps keep them apart.
    x = (torch.randn(17, classes, generator=generator, device=DEVICE) * 8).round() / 4
    targets = torch.randint(classes, (17,), generator=generator, device=DEVICE)
    targets[::2] = x.argmax(1)[::2]
    targets[[1, 5, 16]] = -100
    rows = scree.from_lengths(targets, lengths)

    def run(x):
        logits = scree.from_offsets(x, rows.offsets)
        return scree.cross_entropy(
            logits,
            logits.with_values(targets),
            reduction=reduction,
            return_accuracy=True,
            kernel="triton",
            **options,
        )

    def exact(x):
        wide = x.to(torch.promote_types(x.dtype, f32))
        return exact_loss(wide, rows, reduction, **options)

    tolerance = {f32: 2e-6, f16: 1e-3, bf16: 4e-3}[dtype]
    leaf = x.to(dtype).requires_grad_()
    accuracy, expected = check_options(run, [leaf], reduction, exact, exact, tolerance)
    assert torch.allclose(accuracy.double(), expected.double()) and accuracy.any()


@pytest.mark.parametrize("softcap", [8.0, 30.0, 1000.0])
@pytest.mark.parametrize("classes", [20, 77])  # all held at once, or walked over
def test_softcapped_logits_in_float32_have_the_error_of_their_size(classes, softcap):
    generator = torch.Generator(DEVICE).manual_seed(2)
    x = torch.randn(40, classes, generator=generator, device=DEVICE).requires_grad_()
    targets = torch.randint(classes, (40,), generator=generator, device=DEVICE)
    options = dict(softcap=softcap, reduction="sum")
    loss = scree.cross_entropy(x, targets, kernel="triton", **options)
    (got,) = torch.autograd.grad(loss, x)
    wide = x.detach().double().requires_grad_()
    capped = softcap * torch.tanh(wide / softcap)
    expected = functional.cross_entropy(capped, targets, reduction="sum")
    (right,) = torch.autograd.grad(expected, wide)
    assert distance(loss.detach(), expected.detach()) < 3e-7
    # Gradients of classes other than the target are products, without a difference.
    is_target = functional.one_hot(targets, classes).bool()
    error = (got - right).abs() / right.abs()
    assert error.masked_fill(is_target | (right.abs() < 1e-30), 0).max() < 1e-6


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kernel", ["standard", "triton"])
@pytest.mark.parametrize("weights", [(-1.0, -2.0, -0.5), (-3.0, 1.0, 0.5)])
def test_class_weights_with_a_negative_sum_agree_with_float64(kernel, reduction, weights):
    generator = torch.Generator(DEVICE).manual_seed(3)
    x = torch.randn(7, 3, generator=generator, device=DEVICE).requires_grad_()
    rows = scree.from_lengths(torch.tensor([0, 0, 1, 2, 0, -100, 1], device=DEVICE), [3, 4])
    weights = torch.tensor(weights, device=DEVICE)
    logits = scree.from_offsets(x, rows.offsets)
    loss = scree.cross_entropy(
        logits, rows, class_weights=weights, reduction=reduction, kernel=kernel
    )
    loss = loss.values if isinstance(loss, scree.Array) else loss
    wide = x.detach().double().requires_grad_()
    expected, _ = exact_loss(wide, rows, reduction, class_weights=weights)
    dy = torch.ones_like(expected)
    (got,) = torch.autograd.grad(loss, x, dy.float())
    (right,) = torch.autograd.grad(expected, wide, dy)
    assert distance(loss.detach(), expected.detach()) < 1e-6 and distance(got, right) < 1e-6


@pytest.mark.parametrize("reduction", ["mean", "row_mean"])
@pytest.mark.parametrize("name", ["smoothing", "softcap", "weights", "all"])
def test_options_of_the_linear_loss_agree_with_float64(small_chunks, name, reduction):
    check_linear_options(name, reduction, compiled=False)


# A compiled program calls an operator, and does not see its chunks.
@pytest.mark.parametrize("small_chunks", [(2, 100)], indirect=True)
@pytest.mark.parametrize("reduction", ["mean", "row_mean"])
@pytest.mark.parametrize("name", ["smoothing", "softcap", "weights", "all"])
def test_options_of_the_compiled_linear_loss_agree_with_float64(small_chunks, name, reduction):
    check_linear_options(name, reduction, compiled=True)


def check_linear_options(name, reduction, compiled):
    """Compare the loss of a product, its accuracy and gradients with PyTorch in float64."""
    x, weight, bias, targets = problem([3, 1, 4, 2], 24, 50, f32)
    targets.values[0] = 7
    options = dict(OPTIONS[name])
    if options.get("class_weights"):
        options["class_weights"] = class_weights_of(50)
    if name == "all" and reduction == "row_mean":
        options["z_loss"] = 0.0

    def run(values, weight, bias):
        rows = scree.from_offsets(values, x.offsets)
        return scree.linear_cross_entropy(
            rows,
            weight,
            rows.with_values(targets.values),
            bias,
            reduction=reduction,
            return_accuracy=True,
            kernel="triton",
            **options,
        )

    def exact(*leaves):
        return exact_loss(functional.linear(*leaves), targets, reduction, **options)

    torch._dynamo.reset()
    function = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    leaves = [x.values, weight, bias]
    accuracy, expected = check_options(function, leaves, reduction, exact, exact, 3e-6)
    assert torch.allclose(accuracy.double(), expected.double(), equal_nan=True)


@pytest.mark.parametrize("reduction", ["mean", "none", "row_mean"])
@pytest.mark.parametrize("name", ["smoothing", "all"])
def test_options_of_compiled_losses_agree_with_eager_ones(name, reduction):
    options = dict(OPTIONS[name])
    if options.get("class_weights"):
        options["class_weights"] = class_weights_of(40)
    if name == "all" and reduction == "row_mean":
        options["z_loss"] = 0.0
    x = torch.randn(9, 40, device=DEVICE).requires_grad_()
    offsets = torch.tensor([0, 4, 4, 9], device=DEVICE, dtype=torch.int32)
    targets = torch.arange(9, device=DEVICE) * 4
    targets[3] = -100

    def run(x):
        rows = scree.from_offsets(x, offsets)
        results = scree.cross_entropy(
            rows,
            rows.with_values(targets),
            reduction=reduction,
            return_accuracy=True,
            kernel="triton",
            **options,
        )
        return [y.values if isinstance(y, scree.Array) else y for y in results]

    torch._dynamo.reset()
    eager, compiled = run(x), torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    for got, expected in zip(compiled, eager):
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    dy = torch.ones_like(eager[0])
    gradients = [torch.autograd.grad(loss, x, dy)[0] for loss in (compiled[0], eager[0])]
    assert torch.allclose(*gradients, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("classes", [20, 77])
def test_accuracy_of_equal_logits_counts_the_first_class(classes):
    x = torch.zeros(4, classes, device=DEVICE)
    x[:, 5] = x[:, 9] = 2.0
    targets = torch.tensor([5, 9, 0, -100], device=DEVICE)
    _, accuracy = scree.cross_entropy(
        x, targets, reduction="none", return_accuracy=True, kernel="triton"
    )
    assert accuracy.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("classes", [20, 77])
def test_options_with_targets_that_do_not_exist_give_nan(classes):
    x = torch.randn(5, classes, device=DEVICE)
    targets = cross_entropy.Targets(
        torch.tensor([3, classes, -1, 19, -100], device=DEVICE), None, -100
    )
    header = torch.zeros(16, device=DEVICE)
    header[0], header[1] = classes, 1
    weights = torch.cat([header, torch.ones(classes, device=DEVICE)])
    options = cross_entropy.LossOptions(0.1, 3.0, 0.1, classes, weights)
    accuracies = torch.empty(5, device=DEVICE)
    losses, stats, _ = cross_entropy.forward(x, targets, "none", True, options, accuracies)
    assert losses.isnan().tolist() == [False, True, True, False, False] and losses[4] == 0
    assert not accuracies[[1, 2, 4]].any()
    dx = cross_entropy.backward(torch.ones_like(losses), x, stats, targets, None, options)
    assert dx.isnan().all(1).tolist() == [False, True, True, False, False] and not dx[4].any()


def test_rejected_options_say_why():
    x = torch.randn(3, 4, device=DEVICE)
    targets = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    weights = torch.ones(4, device=DEVICE, requires_grad=True)
    explanation = scree.explain("cross_entropy", x, targets, class_weights=weights)
    assert "no gradient of class_weights" in explanation.rejected["triton"]
    rows = scree.from_lengths(x, [3])
    explanation = scree.explain(
        "cross_entropy",
        rows,
        rows.with_values(targets),
        class_weights=weights.detach(),
        z_loss=0.1,
        reduction="row_mean",
    )
    assert "class_weights without z_loss" in explanation.rejected["triton"]


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [3001, 32768, 50257, 128256])
@pytest.mark.parametrize("name", ["smoothing", "softcap", "all"])
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_options_with_many_classes_agree_with_float64(name, classes, dtype):
    options = dict(OPTIONS[name])
    if options.get("class_weights"):
        options["class_weights"] = class_weights_of(classes)
    generator = torch.Generator("cuda").manual_seed(classes)
    x = torch.randn(200, classes, generator=generator, device="cuda").mul(3)
    targets = torch.randint(classes, (200,), generator=generator, device="cuda")
    targets[::3], targets[1::7] = x.argmax(1)[::3], -100
    leaf, rows = x.to(dtype).requires_grad_(), scree.from_lengths(targets, [150, 50])

    def run(x):
        return scree.cross_entropy(x, targets, return_accuracy=True, kernel="triton", **options)

    def exact(x):
        wide = x.to(torch.promote_types(x.dtype, f32))
        return exact_loss(wide, rows, "mean", **options)

    tolerance = {f32: 2e-6, bf16: 4e-3}[dtype]
    accuracy, expected = check_options(run, [leaf], "mean", exact, exact, tolerance)
    assert torch.allclose(accuracy.double(), expected.double()) and accuracy > 0.2
