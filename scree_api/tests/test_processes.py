"""A rank that fails or hangs fails the test, and threads that never end do not keep it."""

import ctypes
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks


def fail_beside_a_thread(rank: int, folder: Path) -> None:
    """Raise on rank 1, while rank 0 waits for it; a thread of each rank never ends."""
    threading.Thread(target=threading.Event().wait).start()
    if rank == 1:
        raise ValueError("the cause")
    dist.all_reduce(torch.zeros(1))


def finish_beside_a_thread(rank: int, folder: Path) -> None:
    """Finish, while another thread never ends."""
    threading.Thread(target=threading.Event().wait).start()
    (folder / f"done-{rank}").touch()


def hold_the_interpreter(rank: int, folder: Path) -> None:
    """Sleep in C without releasing the interpreter, so that no thread of Python runs."""
    ctypes.PyDLL(None).sleep(100)


def test_run_ranks_of_a_failing_rank_raises_its_traceback_first(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as error:
        run_ranks(fail_beside_a_thread, 2, tmp_path)
    text = str(error.value)
    assert "ValueError: the cause" in text and "in fail_beside_a_thread" in text
    # The other rank may be ended before it fails.
    assert "error-0" not in text or text.index("error-1") < text.index("error-0")


def test_run_ranks_ends_ranks_with_threads_that_never_end(tmp_path: Path) -> None:
    run_ranks(finish_beside_a_thread, 1, tmp_path)
    assert (tmp_path / "done-0").exists()


def test_run_ranks_of_a_rank_that_hangs_raises_its_stack(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"Timeout(.|\n)*in hold_the_interpreter"):
        run_ranks(hold_the_interpreter, 1, tmp_path, limit=1)
