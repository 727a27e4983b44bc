"""Two processes over gloo.

DDP and FSDP2 train on ragged batches as one process does, and find the tensors inside of them.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import scree

LENGTHS = [[3, 0, 5, 8], [7, 1]]  # rows of each process
STEPS = 2
Tree = dict[str, tuple[scree.Array, torch.Tensor]]


class Layer(torch.nn.Module):
    """A layer of a transformer; what comes and goes holds a ragged array deep inside."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, batch: Tree) -> Tree:
        x, real = batch["rows"]
        xp = scree.namespace(x)
        heads = self.qkv(xp.ragged.rms_norm(x).values).unflatten(1, (3, 2, 4))
        y = xp.ragged.attention(*(x.with_values(part) for part in heads.unbind(1)), causal=True)
        return {"rows": (x + x.with_values(self.out(y.values.flatten(1))), real)}


class Model(torch.nn.Module):
    """Two layers, and one that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.unused = torch.nn.Sequential(Layer(), Layer()), torch.nn.Linear(2, 2)

    def forward(self, batch: Tree) -> Tree:
        return self.layers(batch)


def batch(lengths: list[int]) -> Tree:
    """Rows whose numbers follow from their lengths."""
    rows = [
        torch.randn((length, 8), generator=torch.Generator().manual_seed(length))
        for length in lengths
    ]
    return {"rows": (scree.pack(rows), torch.tensor(lengths) > 0)}


def train(model: torch.nn.Module, lengths: list[int], share: float) -> dict[str, torch.Tensor]:
    """The parameters after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x, real = model(batch(lengths))["rows"]
        energy = scree.namespace(x).sum(x * x, axis=(1, 2))[real]
        (share * energy.sum()).backward()
        optimizer.step()
    return {name.removeprefix("module."): x for name, x in model.state_dict().items()}


def ddp(model: Model) -> torch.nn.Module:
    """Find the parameters that an output depends on through ragged arrays."""
    return torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


def fsdp(model: Model, **options: Any) -> torch.nn.Module:
    """Every layer a unit of its own."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (len(LENGTHS),))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, **options)
    return model


def half(model: Model) -> torch.nn.Module:
    """Converts what comes to bfloat16: the values, and not the offsets."""
    return fsdp(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


WRAPPERS = {wrap.__name__: wrap for wrap in (ddp, fsdp, half)}


def work(rank: int, folder: Path) -> None:
    """One of the processes."""
    for name, wrap in WRAPPERS.items():
        model, seen = Model(), []

        def look(layer: Layer, args: Any, out: Any, seen: list[Any] = seen) -> None:
            seen += [
                (type(x).__name__, x.dtype, x.offsets.dtype)
                for x in (args[0]["rows"][0], out["rows"][0])
            ]

        for layer in model.layers:
            layer.register_forward_hook(look)
        found = train(
            wrap(model), LENGTHS[rank], len(LENGTHS) / sum(map(len, LENGTHS))
        )  # the mean over processes is taken
        whole = {
            key: x.full_tensor() if isinstance(x, dist.tensor.DTensor) else x
            for key, x in found.items()
        }
        torch.save((whole, seen), folder / f"{name}-{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("processes")
    run_ranks(work, len(LENGTHS), path)
    return path


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_two_processes_train_as_one(wrapper: str, folder: Path) -> None:
    rows = [length for part in LENGTHS for length in part]
    start, want = Model().state_dict(), train(Model(), rows, 1 / len(rows))
    precision = torch.bfloat16 if wrapper == "half" else torch.float32
    for rank in range(len(LENGTHS)):
        found, seen = torch.load(folder / f"{wrapper}-{rank}.pt")
        assert seen == [("Array", precision, torch.int32)] * (2 * 2 * STEPS)
        for name, x in want.items():
            moved = float((x - start[name]).abs().max())
            torch.testing.assert_close(
                found[name], x, rtol=0, atol=16 * torch.finfo(precision).eps * moved
            )
            assert (moved > 0) == (not name.startswith("unused"))
