"""Shards over NCCL: attention of rows that are cut over two GPUs equals attention of whole rows."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import scree
from scree.distributed import shard, unshard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

LAYOUTS = {
    "one row": [5000],
    "a long row and short ones": [4001, 17, 0, 300, 1, 129],
    "similar rows": [700, 650, 801, 640, 720],
    "log-normal": np.random.default_rng(0).lognormal(5, 1.5, 60).astype(int).tolist(),
}
OPTIONS = [
    {"causal": True},
    {"causal": True, "window": 200},
    {"causal": False},
    {"causal": False, "window": (130, 70)},
]


def attend(values, lengths, options, mesh=None, exchange=None, causal=False):
    """Return the output, the log-sum-exp and the gradients, as whole rows in float32."""
    leaves = [x.detach().clone().requires_grad_() for x in values]
    base = scree.from_lengths(leaves[0], lengths)
    arrays = [base, *(base.with_values(x) for x in leaves[1:3])]
    if mesh is not None:
        arrays = [shard(x, mesh, exchange=exchange, causal=causal) for x in arrays]
    out, lse = scree.attention(*arrays, sinks=leaves[3], return_lse=True, **options)
    weights = base.with_values(values[0].detach())
    if mesh is not None:
        weights = shard(weights, mesh, exchange=exchange, causal=causal)
    (out.values * weights.values).float().sum().backward()
    grads = [x.grad.float() for x in leaves]
    if mesh is not None:
        out, lse = unshard(out), unshard(lse)
        for x in grads:
            dist.all_reduce(x)
    return [out.values.detach().float(), lse.values.detach().float(), *grads]


def work(rank, folder):
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), 2)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, device_id=device)
    mesh = dist.device_mesh.init_device_mesh("cuda", (2,))
    for name, lengths in LAYOUTS.items():
        generator = torch.Generator(device).manual_seed(0)
        total = sum(lengths)
        values = [
            torch.randn(total, heads, 64, generator=generator, device=device).to(torch.bfloat16)
            for heads in (8, 4, 4)
        ]
        values.append(torch.randn(8, generator=generator, device=device))
        for options in OPTIONS:
            wide = [x.float() for x in values]
            reference = attend(wide, lengths, options)
            whole = attend(values, lengths, options)
            for exchange, causal in (("keys", False), ("keys", True), ("heads", False)):
                actual = attend(values, lengths, options, mesh, exchange, causal)
                for expected, own, x in zip(reference, whole, actual):
                    finite = torch.isfinite(expected)
                    assert torch.equal(torch.isfinite(x), finite)
                    error, usual = (float((y - expected)[finite].abs().max()) for y in (x, own))
                    scale = float(expected[finite].abs().max())
                    bound = 2 * usual + 1e-3 * scale
                    assert error <= bound, (name, options, exchange, error, usual, scale)
    dist.barrier()
    dist.destroy_process_group()


def test_attention_of_shards_equals_whole_rows(tmp_path: Path):
    torch.multiprocessing.spawn(work, (tmp_path,), 2)
