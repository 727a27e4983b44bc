"""Selection of kernels: order, `kernel=`, `explain`, and packages that bring kernels."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import scree
from scree.dispatch import registry
from scree.dispatch.operation import OPERATIONS


@pytest.fixture
def arr() -> scree.Array:
    return scree.from_lengths(np.arange(5.0), [2, 0, 3])


@pytest.fixture(autouse=True)
def only_standard_kernels() -> Iterator[None]:
    """Begin every test with the standard implementations only.

    Registrations of the test are removed after it.
    """
    scree.namespace(np.zeros(1))
    with registry.isolated(standard_only=True):
        yield


def provide(name: str, reason: str | None = None, operation: str = "softmax") -> list[Any]:
    """Register a provider that gives its name back, or rejects with a reason.

    The calls that it ran.
    """
    calls: list[Any] = []

    @scree.register_kernel(operation, provider=name, rejects=lambda call: reason)
    def run(call: Any) -> str:
        calls.append(call)
        return name

    return calls


def test_providers_run_from_newest_to_standard(arr: scree.Array) -> None:
    provide("old")
    assert scree.softmax(arr) == "old"
    calls = provide("new")
    assert scree.softmax(arr) == "new"
    assert [call.x is arr for call in calls] == [True], "a kernel gets the validated call"
    provide("picky", "it is Sunday")
    assert scree.softmax(arr) == "new"
    assert isinstance(scree.softmax(arr, kernel="standard"), scree.Array)
    assert [k.provider for k in OPERATIONS["softmax"].kernels] == [
        "picky",
        "new",
        "old",
        "standard",
    ]


def test_kernel_argument_that_rejects_or_is_unknown_raises(arr: scree.Array) -> None:
    provide("ready")
    provide("picky", "it is Sunday")
    assert scree.softmax(arr, kernel="ready") == "ready"
    with pytest.raises(
        ValueError, match=r"^softmax: kernel='picky' rejects this call: it is Sunday$"
    ):
        scree.softmax(arr, kernel="picky")
    with pytest.raises(
        ValueError,
        match=r"^kernel: expected one of 'picky', 'ready', 'standard' for softmax, got 'absent'$",
    ):
        scree.softmax(arr, kernel="absent")


def test_explain_names_the_provider_and_the_rejections(arr: scree.Array) -> None:
    provide("ready")
    provide("picky", "it is Sunday")
    found = scree.explain("softmax", arr)
    assert (found.operation, found.provider, found.rejected) == (
        "softmax",
        "ready",
        {"picky": "it is Sunday"},
    )
    assert str(found) == "softmax: runs on 'ready'\n  'picky' rejects: it is Sunday"
    assert str(scree.explain("softmax", arr, kernel="standard")) == "softmax: runs on 'standard'"
    with pytest.raises(ValueError, match="rejects this call: it is Sunday"):
        scree.explain("softmax", arr, kernel="picky")


CALLS = {
    **{name: lambda x: (x[..., 0],) for name in ("softmax", "log_softmax", "logsumexp")},
    "rms_norm": lambda x: (x, x.values[0]), "layer_norm": lambda x: (x, x.values[0], x.values[0]), "rope": lambda x: (x,),
    "conv1d": lambda x: (x, np.ones((3, 4, 2))), "swiglu": lambda x: (x,), "split": lambda x: (x, (1, 3)),
    "attention": lambda x: (x[:, :, None, :],) * 3, "scatter": lambda x: (x, np.arange(5), 5),
    "pack": lambda x: (list(x),), "grouped_matmul": lambda x: (x, np.ones((3, 4, 2))),
}  # fmt: skip


@pytest.mark.parametrize("operation", CALLS)
def test_explain_takes_the_arguments_of_the_operation(operation: str) -> None:
    args = CALLS[operation](scree.from_lengths(np.ones((5, 4)), [2, 0, 3]))
    assert scree.explain(operation, *args).provider == "standard"
    if hasattr(scree, operation):
        getattr(scree, operation)(*args)


def test_registering_a_provider_twice_replaces_its_kernel(arr: scree.Array) -> None:
    provide("mine")
    provide("other")
    again = provide("mine")
    assert [k.provider for k in OPERATIONS["softmax"].kernels] == ["mine", "other", "standard"]
    scree.softmax(arr)
    assert len(again) == 1


def test_unregister_kernel_removes_the_provider(arr: scree.Array) -> None:
    provide("mine")
    scree.unregister_kernel("softmax", "mine")
    scree.unregister_kernel("softmax", "mine")  # once is enough, twice is no error
    assert scree.explain("softmax", arr).provider == "standard"


@pytest.mark.parametrize(
    "do", [lambda *args: provide(args[1], operation=args[0]), scree.unregister_kernel]
)
def test_misspelt_operations_and_the_standard_path_raise(do: Callable[[str, str], Any]) -> None:
    with pytest.raises(
        ValueError, match=r"operation: expected one of append_paged, .*softmax, .*, got 'sofmax'"
    ):
        do("sofmax", "mine")
    with pytest.raises(ValueError, match="provider: 'standard' names the standard implementation"):
        do("softmax", "standard")


def test_exceptions_of_kernels_propagate(arr: scree.Array) -> None:
    @scree.register_kernel("softmax", provider="broken")
    def run(call: Any) -> Any:
        raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        scree.softmax(arr)


# -------------------------------------------------------------------------------------------------
# entry points
class Entries:
    """Stands for `importlib.metadata.entry_points`, with one entry for one library."""

    def __init__(self, library: str, value: str) -> None:
        self.entry, self.asked = metadata.EntryPoint(library, value, registry.ENTRY_POINTS), 0

    def __call__(self, *, group: str, name: str) -> Iterator[metadata.EntryPoint]:
        self.asked += 1
        return iter([self.entry] if (group, name) == (self.entry.group, self.entry.name) else [])


def register() -> None:
    """What a package declares as its entry point."""
    provide("packaged")


def half() -> None:
    """An entry point that registers a kernel and then raises."""
    provide("half")
    raise OSError("no driver")


def broken() -> None:
    """An entry point that cannot register."""
    raise OSError("no driver")


def entries(monkeypatch: pytest.MonkeyPatch, value: str) -> Entries:
    found = Entries("numpy", value)
    monkeypatch.setattr(metadata, "entry_points", found)
    registry.forget_plugins("numpy")
    return found


def test_packages_register_once_and_for_their_library_alone(
    monkeypatch: pytest.MonkeyPatch, arr: scree.Array
) -> None:
    found = entries(monkeypatch, "test_registry:register")
    registry.load_plugins("torch")
    assert scree.explain("softmax", arr).provider == "standard"
    for _ in range(2):
        registry.load_plugins("numpy")
    assert found.asked <= 2, "the group is looked through once for each library"
    assert scree.softmax(arr) == "packaged"


def test_entry_point_that_raises_leaves_no_kernel(
    monkeypatch: pytest.MonkeyPatch, arr: scree.Array
) -> None:
    entries(monkeypatch, "test_registry:half")
    with pytest.raises(ImportError, match="no driver"):
        registry.load_plugins("numpy")
    assert scree.explain("softmax", arr).provider == "standard"


@pytest.mark.parametrize(
    "value", ["test_registry:broken", "test_registry:absent", "no_such_package.kernels:register"]
)
def test_packages_that_do_not_load_are_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    entries(monkeypatch, value)
    for _ in range(2):  # and not forgotten
        with pytest.raises(
            ImportError, match=f"the entry point numpy = {value} of an unknown package"
        ) as caught:
            registry.load_plugins("numpy")
        assert registry.ENTRY_POINTS in str(caught.value) and str(caught.value.__cause__) in str(
            caught.value
        )


def test_first_array_of_a_library_loads_its_packages() -> None:
    """However it comes in: no namespace has to be asked for first."""
    code = (
        "import importlib.metadata as m, numpy as np\n"
        "m.entry_points = lambda *, group, name: print(group, name) or []\n"
        "import scree; print('imported'); scree.softmax(scree.from_lengths(np.zeros(3), [1, 2])); scree.namespace(np.zeros(1))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines() == ["imported", "scree.kernels numpy"]


@pytest.mark.parametrize("is_prepared", [False, True])
def test_kernel_that_is_unavailable_falls_back_once_with_a_warning(is_prepared: bool) -> None:
    """A call of another dtype still asks the kernel; one of the same kind does not."""
    import torch

    from scree.dispatch.operation import KernelUnavailableError

    asked = []

    def run(call: Any) -> Any:
        asked.append(call.x.dtype)
        raise KernelUnavailableError("it does not compile")

    arr = scree.from_lengths(torch.ones(3), [1, 2])
    with registry.isolated():
        prepare = (lambda call: lambda x: run(SimpleNamespace(x=x))) if is_prepared else None
        scree.register_kernel("softmax", provider="broken", prepare=prepare)(run)
        with pytest.warns(RuntimeWarning, match="'broken' cannot run this kind of call"):
            first = scree.softmax(arr)
        count = len(asked)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = scree.softmax(arr)
        assert len(asked) == count
        assert torch.equal(first.values, again.values)
        assert scree.explain("softmax", arr).rejected["broken"] == "it does not compile"
        with pytest.raises(ValueError, match="it does not compile"):
            scree.softmax(arr, kernel="broken")
        with pytest.warns(RuntimeWarning):
            scree.softmax(arr.with_values(torch.ones(3, dtype=torch.float64)))
        assert asked[-1] == torch.float64
