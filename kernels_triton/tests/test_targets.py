"""The kernels compile for GPUs that this machine does not have."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("compile_for_target.py")
#: Calls with matrix products, whose tiles depend on the device.
PRODUCTS = ("head_dims", "long_rows", "grouped_product")
#: Capability -> calls; none means all calls.
TARGETS = {86: (), **dict.fromkeys((80, 100, 120), ("attention_window", "grouped_product"))}


@pytest.mark.parametrize("capability", TARGETS)
def test_kernels_compile_for_capability(capability, tmp_path):
    compile_for(capability, TARGETS[capability], tmp_path)


def compile_for(capability, calls, cache):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(capability), *calls],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert int(done.stdout.split()[-2]) > 5


def test_hopper_kernels_have_a_barrier_between_wait_and_arrival(tmp_path):
    """A warp may still poll an mbarrier when another warp of its group arrives and frees the slot.

    Then the slot may be filled again before the slow warp looks, and it waits forever. So all warps
    must meet at a barrier between a wait and the next arrival.
    """
    compile_for(90, PRODUCTS, tmp_path)
    arrivals = 0
    for path in tmp_path.glob("*/*sm90*.ptx"):
        has_waited = False
        for line in path.read_text().splitlines():
            if "mbarrier.try_wait" in line:
                has_waited = True
            elif re.search(r"\bbar\.warp\.sync\b|\b(bar|barrier)\.sync\b.*\b128\b", line):
                has_waited = False
            elif re.search(r"(?<!async\.)mbarrier\.arrive\.shared", line):
                arrivals += 1
                assert not has_waited, (path.name, line)
    assert arrivals > 50
