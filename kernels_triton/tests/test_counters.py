"""The choice of counters by stream and by captured memory, with stand-ins for CUDA."""

from types import SimpleNamespace

import pytest
import torch

from scree_triton.runtime import counters as module
from scree_triton.runtime.recording import record

DEVICE = torch.device("cuda", 0)
MEMORY = [torch.empty(1) for _ in range(5)]


@pytest.fixture
def cuda(monkeypatch):
    """A device with a current stream, which may be capturing, and a list of the allocations."""
    state = SimpleNamespace(stream=0, is_capturing=False, allocated=[])

    def allocate(shape, dtype, device):
        state.allocated.append(torch.zeros(shape, dtype=dtype))
        return state.allocated[-1]

    def zeros(shape, dtype, device=None):
        return torch.empty(shape, dtype=dtype).zero_()

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(module, "current_stream", lambda index: state.stream)
    monkeypatch.setattr(module, "_is_capturing", lambda: state.is_capturing)
    monkeypatch.setattr(module, "persistent_zeros", allocate)
    monkeypatch.setattr(module, "_RESERVED", 4)
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    state.counters_of = module.counters.__wrapped__(DEVICE)
    return state


def test_each_stream_has_counters_of_its_own(cuda):
    used = []
    for stream in (0, 7, 8, 7, 0):
        cuda.stream = stream
        used.append(cuda.counters_of(MEMORY[0]).data_ptr())
    assert used[3:] == used[1::-1] and len(set(used)) == 3
    assert len(cuda.allocated) == 1


def test_captured_graphs_share_counters_only_with_the_same_memory(cuda):
    cuda.stream = 7
    eager = cuda.counters_of(MEMORY[0])
    cuda.is_capturing = True
    first, second, again = (cuda.counters_of(MEMORY[i]) for i in (0, 1, 0))
    assert again is first and len({x.data_ptr() for x in (eager, first, second)}) == 3
    cuda.is_capturing = False
    assert cuda.counters_of(MEMORY[0]) is eager


def test_a_graph_fills_counters_where_none_are_left(cuda):
    """Allocations during a capture belong to the graph; the next call of a new stream reserves more."""
    cuda.stream, cuda.is_capturing = 7, True
    assert cuda.counters_of(MEMORY[0]) is not cuda.counters_of(MEMORY[0])
    cuda.is_capturing = False
    cuda.counters_of(MEMORY[0])
    cuda.is_capturing = True
    used = [cuda.counters_of(x) for x in MEMORY]
    assert all(cuda.counters_of(x) is y for x, y in zip(MEMORY[:3], used))
    assert len({x.data_ptr() for x in used}) == 5 and len(cuda.allocated) == 1
    cuda.stream, cuda.is_capturing = 8, False
    cuda.counters_of(MEMORY[0])
    assert len(cuda.allocated) == 2


def test_default_streams_of_threads_share_no_counters(cuda):
    """All threads have one handle for a stream of their own."""
    cuda.stream = 2
    assert cuda.counters_of(MEMORY[0]) is not cuda.counters_of(MEMORY[0])


def test_recorded_launches_get_zeros_of_their_own():
    with record() as recording:
        zeros = module.counters(torch.device("meta"))(torch.empty(1, device="meta"))
    assert [x is zeros for x in recording.zeros] == [True]
