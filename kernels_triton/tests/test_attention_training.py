"""Attention in training: steps of a module, checkpoints, autocast, compilers and export.

Without a GPU the kernels run in Triton's interpreter.
"""

import copy
import gc
import weakref

import pytest
import torch
from attention_reference import distance, offsets
from torch.utils.checkpoint import checkpoint

import scree
from scree_triton.attention import interface, metadata
from scree_triton.attention.interface import attention, attention_op, schedule_op
from scree_triton.attention.tile_scheduler import UNBOUNDED, schedule_tiles
from scree_triton.runtime.launch import INTERPRETED

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

f16, f32, f64 = torch.float16, torch.float32, torch.float64
DEVICE = "cpu" if INTERPRETED else "cuda"
LENGTHS = (9, 0, 21, 1)
# The interpreter has no Hopper kernels. On a Hopper GPU float16 with head_dim 64 uses them, and the
# other kinds use the portable kernels.
KINDS = [(f32, 16)] if INTERPRETED else [(f32, 16), (f16, 64), (f16, 80)]
# Some units in the last place, as gradients go through three products. On a GPU a float32 product
# is three TF32 products, 21 bits.
BOUND = {f32: 1e-5 if INTERPRETED else 5e-5, f16: 1e-2}


class Block(torch.nn.Module):
    """Attention with its projections; q, k and v are views of one tensor."""

    def __init__(self, dtype: torch.dtype, dim: int, kernel: str = "triton"):
        super().__init__()
        torch.manual_seed(0)
        self.dim, self.kernel = dim, kernel
        self.qkv = torch.nn.Linear(2 * dim, 6 * dim, dtype=dtype)
        self.out = torch.nn.Linear(2 * dim, 2 * dim, dtype=dtype)
        self.to(DEVICE)

    def forward(self, x: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
        """Return `x` (total, 2 * dim) plus the attention output of each token."""
        rows = scree.from_cu_seqlens(x, cu, max_length=max(LENGTHS))
        q, k, v = (rows.with_values(y) for y in self.qkv(x).view(-1, 3, 2, self.dim).unbind(1))
        y = scree.attention(q, k, v, causal=True, kernel=self.kernel)
        return x + self.out(y.values.flatten(1))


def batch(dtype, dim, seed=1):
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    x, target = (
        torch.randn((sum(LENGTHS), 2 * dim), generator=generator, device=DEVICE).to(dtype)
        for _ in range(2)
    )
    return x, offsets(LENGTHS, DEVICE), target


def gradients(run, block, x, *rest):
    """Return the output of `run`, and the gradients of the sum of its squares.

    The gradients are those of the input and of the block's parameters.
    """
    x = x.detach().requires_grad_()
    y = run(x, *rest)
    return [y, *torch.autograd.grad((y.float() ** 2).sum(), [x, *block.parameters()])]


@pytest.mark.parametrize("dtype, dim", KINDS)
def test_training_steps_match_float64(dtype, dim):
    """Optimizer steps never wait for the device, and match the standard path in float64."""
    x, cu, target = batch(dtype, dim)
    ours = Block(dtype, dim)
    exact = copy.deepcopy(ours).to(f64)
    exact.kernel = "standard"
    start = [p.detach().clone() for p in ours.parameters()]

    def train(block, x, target):
        optimizer = torch.optim.SGD(block.parameters(), lr=0.004, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            (((block(x, cu) - target) ** 2).sum() / x.shape[0]).backward()
            optimizer.step()

    train(exact, x.to(f64), target.to(f64))
    if not INTERPRETED:
        train(copy.deepcopy(ours), x, target)  # compiles
        torch.cuda.set_sync_debug_mode("error")
    try:
        train(ours, x, target)
    finally:
        if not INTERPRETED:
            torch.cuda.set_sync_debug_mode("default")
    for before, p, e in zip(start, ours.parameters(), exact.parameters()):
        # Half precision rounds the parameters themselves at each step.
        assert distance(p - before, e.detach() - before.to(f64)) < (
            BOUND[dtype] if dtype == f32 else 0.05
        )


@pytest.mark.parametrize("dtype, dim", KINDS)
def test_checkpoint_matches_plain_gradients(dtype, dim):
    """Activations that are recomputed in the backward give the same gradients."""
    x, cu, _ = batch(dtype, dim)
    block = Block(dtype, dim)
    plain = gradients(block, block, x, cu)
    again = gradients(lambda *args: checkpoint(block, *args, use_reentrant=False), block, x, cu)
    assert all(distance(b, a.detach().to(f64)) < BOUND[dtype] for a, b in zip(plain, again))


def test_autocast_matches_float32():
    """Attention receives float16 from the projections; gradients are float32."""
    dim = KINDS[-1][1]
    x, cu, _ = batch(f32, dim)
    block = Block(f32, dim)
    plain = gradients(block, block, x, cu)
    with torch.autocast(DEVICE, dtype=f16):
        cast = gradients(block, block, x, cu)
    assert all(
        b.dtype == f32 and distance(b, a.detach().to(f64)) < BOUND[f16] for a, b in zip(plain, cast)
    )
    assert not torch.equal(plain[0], cast[0])


@pytest.mark.parametrize("dtype, dim", KINDS)
def test_compiled_module_matches_eager(dtype, dim):
    """The compiled module is one graph and has the gradients of eager calls."""
    x, cu, _ = batch(dtype, dim)
    block = Block(dtype, dim)
    compiled = torch.compile(
        block, fullgraph=True, backend="aot_eager" if INTERPRETED else "inductor"
    )
    for a, b in zip(gradients(block, block, x, cu), gradients(compiled, block, x, cu)):
        assert distance(b, a.detach().to(f64)) < BOUND[dtype]


def test_compiled_layers_share_tile_schedules(monkeypatch):
    """All layers and their backward passes share the schedules of forward, dq and dkdv."""
    x, cu, _ = batch(f32, 16)
    block = Block(f32, 16)
    made = []
    for module in (interface, metadata):
        monkeypatch.setattr(
            module, "schedule_tiles", lambda *args: made.append(args[3]) or schedule_tiles(*args)
        )

    def layers(x, cu):
        return block(block(x, cu), cu)

    compiled = torch.compile(
        layers, fullgraph=True, backend="aot_eager" if INTERPRETED else "inductor"
    )
    plain = gradients(layers, block, x, cu)
    for _ in range(3):
        made.clear()
        assert all(
            distance(b, a.detach().to(f64)) < BOUND[f32]
            for a, b in zip(plain, gradients(compiled, block, x, cu))
        )
        assert len(made) <= 3  # forward, dq and dkdv; without sharing 6


@pytest.mark.parametrize("dtype, dim", KINDS)
def test_exported_program_runs_on_other_sizes(dtype, dim):
    """An exported program runs on another number of tokens and rows."""
    x, cu, _ = batch(dtype, dim)
    block = Block(dtype, dim)
    tokens, entries = (
        torch.export.Dim("tokens", min=2, max=4096),
        torch.export.Dim("entries", min=2, max=64),
    )
    program = torch.export.export(block, (x, cu), dynamic_shapes=({0: tokens}, {0: entries}))
    assert any("scree_triton" in str(node.target) for node in program.graph.nodes)
    more = torch.cat([x, x[:12]]), offsets((*LENGTHS, 12), DEVICE)
    with torch.no_grad():
        for args in ((x, cu), more):
            assert distance(program.module()(*args), block(*args).to(f64)) < BOUND[dtype]


@pytest.mark.parametrize("dtype, dim", KINDS)
def test_operators_pass_opcheck(dtype, dim):
    """The operators' schemas, fakes and autograd."""
    generator = torch.Generator(device=DEVICE).manual_seed(2)
    q, k, v = (
        torch.randn((sum(LENGTHS), 2, dim), generator=generator, device=DEVICE)
        .to(dtype)
        .requires_grad_()
        for _ in range(3)
    )
    cu = offsets(LENGTHS, DEVICE)
    schedule = cu, cu, sum(LENGTHS), dtype, dim, dim, 0, UNBOUNDED, 0
    # Entries after the last tile have any value, so results cannot be compared.
    torch.library.opcheck(schedule_op, schedule, test_utils=("test_schema", "test_faketensor"))
    tiles, constants = schedule_op(*schedule), (max(LENGTHS), UNBOUNDED, 0, 0.1, 0.0)
    torch.library.opcheck(attention_op, (q, k, v, None, None, cu, cu, tiles, *constants, 0))
    seed, slopes = torch.tensor([3], device=DEVICE), torch.rand((sum(LENGTHS), 2), device=DEVICE)
    torch.library.opcheck(attention_op, (q, k, v, slopes, seed, cu, cu, tiles, *constants, 9000))


def test_gradients_of_some_inputs_match_full_gradients():
    """Check gradients of some inputs and of the log-sum-exp alone; double backward raises."""
    generator = torch.Generator(device=DEVICE).manual_seed(2)
    q, k, v = (
        torch.randn((sum(LENGTHS), 2, 16), generator=generator, device=DEVICE) for _ in range(3)
    )
    cu = offsets(LENGTHS, DEVICE)

    def run(*needed):
        inputs = [x.detach().requires_grad_(x is y) for x, y in zip((q, k, v), needed)]
        return *attention(*inputs, cu, cu, causal=True, scale=0.25), [
            x for x in inputs if x.requires_grad
        ]

    out, lse, every = run(q, k, v)
    full = torch.autograd.grad(out.sum(), every, retain_graph=True)
    for i, needed in enumerate(((q, None, None), (None, k, None), (None, None, v))):
        part, _, inputs = run(*needed)
        assert torch.equal(torch.autograd.grad(part.sum(), inputs)[0], full[i])
    assert not torch.autograd.grad(lse.nan_to_num(neginf=0.0).sum(), every)[
        2
    ].any()  # it does not depend on v
    once = torch.autograd.grad(
        attention(*every, cu, cu, causal=True, scale=0.25)[0].square().sum(),
        every,
        create_graph=True,
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once[0].sum().backward()


def test_cached_schedules_die_with_the_layout():
    gc.collect()
    gc.disable()
    try:
        x = torch.randn((sum(LENGTHS), 2, 16), device=DEVICE, requires_grad=True)
        rows = scree.from_cu_seqlens(x, offsets(LENGTHS, DEVICE), max_length=max(LENGTHS))
        for _ in range(2):
            y = scree.attention(
                rows, rows.with_values(x * 1), rows.with_values(x * 2), causal=True, kernel="triton"
            )
            y.values.sum().backward()
        layout, kept = weakref.ref(rows.layout), len(rows.layout.cache)
        del rows, y
        assert layout() is None and kept
    finally:
        gc.enable()
