"""A sharded checkpoint of two processes continues on one and on four, with the same losses."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import run_ranks
from test_distributed import Model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from scree.data import TokenBudgetSampler, collate

LENGTHS = np.clip(np.random.default_rng(0).lognormal(2.5, 1, 160).astype(int), 2, 64)
#: Batches per optimizer step, summed over processes, and steps before and after the checkpoint.
WINDOW, BEFORE, AFTER = 4, 3, 3


class Run:
    """A training run of one process in a group, or of a single process without a group."""

    def __init__(self, group: Any = None) -> None:
        self.group, self.num_ranks, rank = group, 1, 0
        self.model: Any = Model()
        if group is not None:
            self.num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
            fully_shard(self.model, mesh=dist.device_mesh.DeviceMesh.from_group(group, "cpu"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.sampler = TokenBudgetSampler(
            LENGTHS,
            96,
            rank=rank,
            num_ranks=self.num_ranks,
            cost=(100, 1),
            window=WINDOW // self.num_ranks,
        )

    def train(self, steps: int) -> list[float]:
        """Return the loss of each step."""
        window, losses = WINDOW // self.num_ranks, []
        batches = iter(self.sampler)
        for _ in range(steps):
            indices = list(islice(batches, window))
            step = [collate([torch.arange(LENGTHS[i]) % 50 for i in batch]) for batch in indices]
            sums = torch.tensor([0.0, sum(x.total_length - x.batch_size for x in step)])
            if self.group is not None:
                dist.all_reduce(sums, group=self.group)
            for ids in step:
                loss = self.model(ids)
                (loss * self.num_ranks / sums[1]).backward()
                sums[0] += loss.detach()
            self.optimizer.step()
            self.optimizer.zero_grad()
            total = sums[:1].clone()
            if self.group is not None:
                dist.all_reduce(total, group=self.group)
            losses.append(float(total / sums[1]))
        return losses

    def state(self) -> dict[str, Any]:
        """Return the sharded state of the run."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "sampler": self.sampler.state_dict()}

    def load(self, path: Path) -> None:
        """Continue from a checkpoint of any number of processes."""
        state = self.state()
        dcp.load(state, checkpoint_id=path, process_group=self.group, no_dist=self.group is None)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.sampler.load_state_dict(state["sampler"])


def work(rank: int, folder: Path) -> None:
    """Save in a group of two processes; load in a group of four, and in one process."""
    losses, two = {}, dist.new_group([0, 1])
    if rank < 2:
        run = Run(two)
        run.train(BEFORE)
        dcp.save(run.state(), checkpoint_id=folder / "checkpoint", process_group=two)
        losses[2] = run.train(AFTER)
    dist.barrier()
    for size, group in ((4, dist.group.WORLD), (1, None)):
        if rank < size:
            run = Run(group)
            run.load(folder / "checkpoint")
            losses[size] = run.train(AFTER)
    if rank == 0:
        losses[0] = Run().train(1)
        torch.save(losses, folder / "losses.pt")


def test_checkpoint_of_two_processes_continues_on_one_and_on_four(tmp_path: Path) -> None:
    run_ranks(work, 4, tmp_path)
    losses = torch.load(tmp_path / "losses.pt")
    np.testing.assert_allclose(losses[1], losses[2], rtol=1e-5)
    np.testing.assert_allclose(losses[4], losses[2], rtol=1e-5)
    # The loss is below the loss of an untrained model, so the parameters were loaded.
    assert losses[2][0] < losses[0][0] - 0.05
