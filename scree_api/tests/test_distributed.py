"""Two processes over gloo, balanced by the sampler, have the losses of one process."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from torch.distributed.fsdp import fully_shard

import scree
from scree.data import TokenBudgetSampler, collate

NUM_RANKS, WINDOW = 2, 3
LENGTHS = np.clip(np.random.default_rng(0).lognormal(3, 1, 80).astype(int), 1, 128)
Steps = Iterator[list[scree.Array]]


class Model(torch.nn.Module):
    """One layer of attention over embeddings, and a classifier of tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.qkv = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 48)
        self.head = torch.nn.Linear(16, 50)

    def forward(self, ids: scree.Array) -> torch.Tensor:
        q, k, v = (
            ids.with_values(part)
            for part in self.qkv(self.embedding(ids.values)).unflatten(1, (3, 2, 8)).unbind(1)
        )
        out = scree.namespace(q).ragged.attention(q, k, v, causal=True)
        logits = ids.with_values(self.head(out.values.flatten(1)))
        targets = scree.shift(ids, -1, fill_value=-100)
        return scree.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def steps_of(rank: int, num_ranks: int) -> Steps:
    """Return the batches of each optimizer step on one rank."""
    window = WINDOW * NUM_RANKS // num_ranks
    sampler = TokenBudgetSampler(
        LENGTHS, 128, rank=rank, num_ranks=num_ranks, cost=(100, 1), window=window
    )
    rows = [torch.arange(int(n)) % 50 for n in LENGTHS]
    batches = [collate([rows[i] for i in batch]) for batch in sampler]
    return (batches[i : i + window] for i in range(0, len(batches), window))


def train(model: torch.nn.Module, rank: int, num_ranks: int) -> list[float]:
    """Return the loss of each step, by the recipe of the documentation."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in steps_of(rank, num_ranks):
        # Each row has one token without a target.
        count = torch.tensor(float(sum(x.total_length - x.batch_size for x in step)))
        if num_ranks > 1:
            dist.all_reduce(count)
        sum_of_losses = torch.zeros(())
        for i, ids in enumerate(step):
            is_last = i + 1 == len(step)
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(is_last)
            with model.no_sync() if hasattr(model, "no_sync") and not is_last else nullcontext():
                loss = model(ids)
                (loss * num_ranks / count).backward()
            sum_of_losses += loss.detach()
        if num_ranks > 1:
            dist.all_reduce(sum_of_losses)
        losses.append(float(sum_of_losses / count))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def work(rank: int, folder: Path) -> None:
    """Train in one of the processes."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (NUM_RANKS,))
    wrapped = {
        "ddp": torch.nn.parallel.DistributedDataParallel(Model()),
        "fsdp": fully_shard(Model(), mesh=mesh),
    }
    losses = {name: train(model, rank, NUM_RANKS) for name, model in wrapped.items()}
    torch.save(losses, folder / f"losses-{rank}.pt")


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[float]]]:
    folder = tmp_path_factory.mktemp("processes")
    run_ranks(work, NUM_RANKS, folder)
    return [torch.load(folder / f"losses-{rank}.pt") for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_losses_of_balanced_ranks_equal_one_process(
    wrapper: str, losses: list[dict[str, list[float]]]
) -> None:
    expected = train(Model(), 0, 1)
    assert len(expected) >= 3
    assert expected[-1] < expected[0]
    for rank in range(NUM_RANKS):
        np.testing.assert_allclose(losses[rank][wrapper], expected, rtol=2e-6)
