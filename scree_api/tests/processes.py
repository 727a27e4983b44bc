"""Processes of one gloo group, for tests of several ranks.

They end without the end of the interpreter, which waits for threads of PyTorch, and in which a
thread that calls Python aborts the process.
"""

from __future__ import annotations

import faulthandler
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException

#: Seconds after which an operation of the group raises, because a rank is missing.
TIMEOUT = 60


def run_ranks(
    work: Callable[[int, Path], None], num_ranks: int, folder: Path, limit: float = 240
) -> None:
    """Run `work(rank, folder)` in each process of a group.

    Parameters
    ----------
    work
        A function of a module, because the processes import it.
    num_ranks
        The number of processes.
    folder
        An empty folder, for the results of `work`.
    limit
        Seconds after which a rank that has not ended fails, with the stacks of its threads.

    Raises
    ------
    AssertionError
        If a rank fails, with the tracebacks of all ranks that failed, the first failure first.
    """
    try:
        torch.multiprocessing.spawn(_run, (num_ranks, work, folder, limit), num_ranks)
    except ProcessExitedException as error:
        reports = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
        texts = [f"{path.name}:\n{text}" for path in reports if (text := path.read_text())]
        raise AssertionError("\n".join([str(error), *texts])) from None


def _run(
    rank: int, num_ranks: int, work: Callable[[int, Path], None], folder: Path, limit: float
) -> None:
    """Run `work` in one process, and end the process."""
    with (folder / f"error-{rank}").open("w") as report:
        # A thread of C ends a process in which no thread of Python runs any more.
        faulthandler.dump_traceback_later(limit, exit=True, file=report)
        try:
            torch.set_num_threads(1)
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(folder / "store"), num_ranks),
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=TIMEOUT),
            )
            work(rank, folder)
        # The report has the traceback of any failure; then threads that never end do not matter.
        except BaseException:
            traceback.print_exc(file=report)
            report.flush()
            os._exit(1)
        os._exit(0)
