"""The kernels compile for GPUs that this machine does not have."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from barrier_paths import count_arrivals, unsafe_instructions

import scree_triton

PROGRAM = Path(__file__).with_name("compile_for_target.py")
PACKAGE = Path(scree_triton.__file__).parent
#: Names of kernels in Gluon.
GLUON = re.compile("sm90|cluster")
#: Capability -> calls; none means all calls.
TARGETS = {86: (), **dict.fromkeys((80, 100, 120), ("attention_window", "grouped_product"))}


@pytest.mark.parametrize("capability", TARGETS)
def test_kernels_compile_for_capability(capability, tmp_path):
    compile_for(capability, TARGETS[capability], tmp_path)


def compile_for(capability, calls, cache, minimum=6):
    """Compile kernels in a process of its own, with a cache; at least `minimum` are not cached."""
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
    assert int(done.stdout.split()[-2]) >= minimum
    return done.stdout


@pytest.fixture(scope="module")
def hopper_cache(tmp_path_factory):
    """Compile every kernel for Hopper with the installed Triton; return the cache directory."""
    cache = tmp_path_factory.mktemp("hopper")
    compile_for(90, (), cache)
    return cache


@pytest.fixture(scope="module")
def hopper_ptx(hopper_cache):
    """Return the PTX of the Gluon kernels by path."""
    paths = [path for path in hopper_cache.glob("*/*.ptx") if GLUON.search(path.name)]
    return {path: path.read_text() for path in paths}


def test_kernels_have_readable_names_in_profilers(hopper_cache):
    paths = [*hopper_cache.glob("*/*.ptx")]
    assert len(paths) > 50
    for path in paths:
        (name,) = re.findall(r"\.entry (\w+)\(", path.read_text())
        assert name == path.stem and re.fullmatch("_?[a-z0-9]+(_[a-z0-9]+)*_kernel", name), name


def test_second_process_reuses_compiled_kernels(hopper_cache):
    def files():
        return {path: path.stat().st_mtime_ns for path in hopper_cache.glob("*/*")}

    before = files()
    done = compile_for(90, ("rms_norm", "grouped_product"), hopper_cache, minimum=0)
    assert files() == before, done


def test_kernels_compile_for_hopper_with_all_gluon_kernels(hopper_ptx):
    names = {path.stem for path in hopper_ptx}
    sources = [*PACKAGE.glob("*/*_sm90.py"), PACKAGE / "segments/cluster_sm90.py"]
    kernels = {
        name
        for source in sources
        for name in re.findall(r"^def (\w+_kernel)\(", source.read_text(), re.MULTILINE)
    }
    assert kernels and kernels == names


def test_hopper_kernels_have_a_barrier_between_wait_and_arrival(hopper_ptx):
    assert sum(map(count_arrivals, hopper_ptx.values())) > 100
    unsafe = {path.stem: [*unsafe_instructions(ptx)] for path, ptx in hopper_ptx.items()}
    assert not {name: found for name, found in unsafe.items() if found}


@pytest.mark.parametrize("barrier", ["bar.sync", "bar.warp.sync and elect.sync"])
def test_unsafe_instructions_of_a_kernel_without_barriers_finds_arrivals(barrier, hopper_ptx):
    (ptx,) = [t for path, t in hopper_ptx.items() if path.stem == "grouped_weight_sm90_kernel"]
    removed = (
        r"\b(bar|barrier)\.sync\b.*" if barrier == "bar.sync" else r"\b(bar\.warp|elect)\.sync.*"
    )
    assert [*unsafe_instructions(re.sub(removed, "", ptx))]


LOOP = """
    setmaxnreg.inc.sync.aligned.u32 160;
$L__BB0_1:
    {barrier}
    @%p1 mbarrier.arrive.shared.b64 _, [%r1];
waitLoop:
    mbarrier.try_wait.parity.shared.b64 complete, [%r2], %r3;
    @!complete bra.uni waitLoop;
    @%p2 bra $L__BB0_1;
    ret;
"""


@pytest.mark.parametrize(
    "barrier, registers, count",
    [
        ("", 160, 1),
        ("bar.sync 0, 128;", 160, 0),
        ("bar.warp.sync -1;", 160, 1),  # of one warp, in a group of four
        ("bar.warp.sync -1;", 24, 0),
        ("", 24, 1),
    ],
)
def test_unsafe_instructions_follows_the_edge_of_a_loop(barrier, registers, count):
    ptx = LOOP.format(barrier=barrier).replace("160", str(registers))
    assert len([*unsafe_instructions(ptx)]) == count
