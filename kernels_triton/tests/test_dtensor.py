"""DTensor: operators run on the shards of two processes, with the results of one."""

import socket
import subprocess
import sys
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import scree

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OFFSETS = torch.tensor([0, 3, 3, 8], dtype=torch.int32)


def make(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def attention(a, q, k, v):
    return scree.attention(a(q), a(k), a(v), causal=True).values


def rms_norm(a, x, weight):
    y, total = scree.rms_norm(a(x), weight, residual=a(x))
    return y.values + total.values


def rope(a, q, k):
    q, k = scree.rope(a(q), a(k))
    return q.values + k.values.sum(1, keepdim=True)


#: Name -> function of `a`, which makes a ragged array, and of tensors; their shapes; the sharded
#: axis of each, or None.
CALLS = {
    "attention": (attention, [(8, 4, 16), (8, 2, 16), (8, 2, 16)], [1, 1, 1]),
    "attention_one_key_head": (attention, [(8, 4, 16), (8, 1, 16), (8, 1, 16)], [1, None, None]),
    # Not sharded: the random numbers depend on the index of a head among all heads.
    "attention_dropout": (
        lambda a, q: scree.attention(a(q), a(q), a(q), dropout=0.5, seed=3).values,
        [(8, 4, 16)],
        [1],
    ),
    "rms_norm_tokens": (rms_norm, [(8, 4, 16), (16,)], [0, None]),
    "rms_norm_heads": (rms_norm, [(8, 4, 16), (16,)], [1, None]),
    "layer_norm": (
        lambda a, x, w, b: scree.layer_norm(a(x), w, b).values,
        [(8, 16), (16,), (16,)],
        [0, None, None],
    ),
    "rope": (rope, [(8, 4, 16), (8, 2, 16)], [1, 1]),
    "swiglu": (lambda a, x: scree.swiglu(a(x)).values, [(8, 16)], [0]),
    "softmax": (lambda a, x: scree.softmax(a(x)).values, [(8, 4)], [1]),
    "sum": (lambda a, x: scree.namespace(x).sum(a(x), axis=1), [(8, 4)], [1]),
    "max": (lambda a, x: scree.namespace(x).max(a(x), axis=1), [(8, 4)], [1]),
    "cumulative_sum": (
        lambda a, x: scree.namespace(x).cumulative_sum(a(x), axis=1).values,
        [(8, 4)],
        [1],
    ),
    "product_of_columns": (lambda a, x, w: (a(x) @ w).values, [(8, 4), (3, 4, 6)], [None, 2]),
    "product_of_rows": (lambda a, x, w: (a(x) @ w).values, [(8, 4), (3, 4, 6)], [1, 1]),
    # Not sharded by a strategy: the operator runs on all tokens on every device.
    "attention_tokens": (attention, [(8, 4, 16), (8, 2, 16), (8, 2, 16)], [0, 0, 0]),
    "attention_uneven_heads": (attention, [(8, 3, 16), (8, 3, 16), (8, 3, 16)], [1, 1, 1]),
    "to_padded": (lambda a, x: scree.to_padded(a(x), length=6)[0], [(8, 4)], [1]),
    "cross_entropy": (
        lambda a, x: scree.cross_entropy(a(x), a(torch.arange(8) % 4, None)),
        [(8, 4)],
        [1],
    ),
}


#: Calls that run through operators only, so that they need no `implicit_replication`.
OPERATORS_ONLY = ("attention", "rms_norm_heads", "rope", "softmax", "product_of_columns")


def check(name, distribute, offsets):
    """Compare a call on shards with the call on whole tensors."""
    from torch.distributed.tensor import DTensor, Shard

    function, shapes, axes = CALLS[name]
    whole = [make(*shape).to(DEVICE).requires_grad_() for shape in shapes]
    whole_offsets = OFFSETS.to(DEVICE)  # one object: device offsets are not compared by value

    def whole_array(x, axis=0):
        return scree.Array(x.to(DEVICE), whole_offsets, max_length=5)

    expected = function(whole_array, *whole)
    expected.square().sum().backward()
    shards = [distribute(x.detach(), axis).requires_grad_() for x, axis in zip(whole, axes)]

    def array(x, axis=0):
        x = x if isinstance(x, DTensor) else distribute(x, axis)
        return scree.Array(x, offsets, max_length=5)

    out = function(array, *shards)
    torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-4, atol=1e-5)
    out.square().sum().backward()
    for x, y in zip(shards, whole):
        torch.testing.assert_close(x.grad.full_tensor(), y.grad, rtol=1e-4, atol=1e-5)
    if name.startswith(("attention_one", "rms_norm", "rope", "swiglu", "softmax", "sum")):
        assert out.placements == (Shard(axes[0]),), out.placements


def run_all(rank, port, failures):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication

    if DEVICE == "cpu":
        from fast_interpreter import speed_up_interpreter

        speed_up_interpreter()
    scree.namespace(torch.zeros(1))
    address = f"tcp://localhost:{port}"
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=2)
    mesh = dist.init_device_mesh(DEVICE, (2,))

    def distribute(x, axis):
        return distribute_tensor(x, mesh, [Replicate() if axis is None else Shard(axis)])

    for name in CALLS:
        try:
            with implicit_replication():
                check(name, distribute, OFFSETS.to(DEVICE))
            if name in OPERATORS_ONLY:
                check(name, distribute, distribute(OFFSETS, None))
        except Exception:
            failures[f"{name} on rank {rank}"] = traceback.format_exc()[-3000:]
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")
def test_operators_on_shards_give_the_results_of_one_process():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    with mp.Manager() as manager:
        failures = manager.dict()
        mp.spawn(run_all, (port, failures), nprocs=2)
        assert not failures, "\n".join(f"{name}: {why}" for name, why in failures.items())


def test_kernels_do_not_import_dtensor():
    code = """
import sys, torch, scree, scree_triton
scree.namespace(torch.zeros(1))
scree_triton.register()
assert "torch.distributed.tensor" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
