"""The call cache: repeated calls select a kernel once, and changed calls select it again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import scree
from scree.dispatch import call_cache, registry
from scree.dispatch.operation import OPERATIONS
from scree.layout import MAX_PAIR_CACHES, Layout
from scree.ops.attention import AttentionCall


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """What a test registers is removed after it; the kernels of PyTorch stay."""
    scree.namespace(torch.zeros(1))
    with registry.isolated():
        yield


@pytest.fixture
def asked() -> list[Any]:
    """The calls of attention for which a kernel was selected; its answer holds for equal calls.

    It gives back what it is given.
    """
    calls: list[Any] = []

    def rejects(call: Any) -> str | None:
        calls.append(call)
        return "no rows" if call.q.batch_size == 0 else None

    def prepare_run(call: Any) -> Callable[..., Any]:
        causal, scale = call.causal, call.scale
        return lambda **arrays: (causal, scale, arrays)

    scree.register_kernel("attention", provider="mine", rejects=rejects, prepare=prepare_run)(
        lambda call: call
    )
    return calls


def rows(offsets: list[int], heads: int = 2) -> scree.Array:
    return scree.Array(torch.randn(offsets[-1], heads, 8), torch.tensor(offsets, dtype=torch.int32))


def like(x: scree.Array) -> scree.Array:
    return x.with_values(torch.randn_like(x.values))


def test_repeated_calls_select_a_kernel_once(asked: list[Any]) -> None:
    q = rows([0, 2, 5])
    k, v = like(q), like(q)
    scree.attention(q, q, q, causal=True)
    causal, _, arrays = scree.attention(q, k, v, causal=True)
    assert len(asked) == 1
    assert causal is True and arrays == {"q": q, "k": k, "v": v, "alibi_slopes": None}


@pytest.mark.parametrize("other", [
    lambda q: {"causal": False}, lambda q: {"scale": 0.5}, lambda q: {"window": 3}, lambda q: {"kernel": "mine"},
    lambda q: {"alibi_slopes": torch.ones(2)},
    lambda q: {"q": q.with_values(torch.randn(5, 4, 8))},
    lambda q: {"q": q.with_values(torch.randn(2, 5, 8).movedim(0, 1))},
    lambda q: {"k": q.with_values(q.values.clone().requires_grad_())},
    lambda q: {name: q.with_values(q.values.double()) for name in "qkv"},
    lambda q: dict.fromkeys("qkv", rows([0, 1, 5])),
    lambda q: dict.fromkeys("kv", rows([0, 1, 5])),
])  # fmt: skip
def test_different_calls_select_a_kernel_again(
    asked: list[Any], other: Callable[[scree.Array], dict[str, Any]]
) -> None:
    q = rows([0, 2, 5])
    arguments = {"q": q, "k": q, "v": q, "causal": True}
    scree.attention(**arguments)
    for _ in range(2):
        scree.attention(**(arguments | other(q)))
    assert len(asked) in (2, 3)  # other rows may be new ones each time
    scree.attention(**arguments)
    assert len(asked) in (2, 3)


@pytest.mark.parametrize("in_c", [True, False])
def test_make_guard_distinguishes_arrays_by_host_metadata(
    monkeypatch: pytest.MonkeyPatch, in_c: bool
) -> None:
    from scree.backends import torch as library

    assert library._TENSOR_GUARDS is not None
    if not in_c:
        monkeypatch.setattr(library, "_TENSOR_GUARDS", None)
    x, y, make_guard = torch.randn(4, 6), torch.randn(4, 6), library.BACKEND.make_guard
    assert make_guard is not None
    same = make_guard([x, y])
    assert same(x, y) and same(y, x) and same(torch.zeros(4, 6), x)
    others = [
        x.double(),
        x[:3],
        x.clone().requires_grad_(),
        torch.randn(6, 4).t(),
        torch.nn.Parameter(x),
        x.to("meta"),
        x[None],
        torch.nn.Parameter(x, requires_grad=False),
        x.numpy(),
        [1.0],
        1.0,
        None,
    ]
    assert not any(same(x, other) or same(other, x) for other in others)
    twice = make_guard([x, x])
    assert twice(x, x) and twice(y, x) and not twice(x, x.double())


@pytest.mark.parametrize("is_same_array", [True, False])
def test_guards_of_torch_reject_every_call_under_a_transform(is_same_array: bool) -> None:
    from scree.backends import torch as library

    x, answers = torch.randn(4, 6), []
    y = x if is_same_array else torch.randn(4, 6)
    make_guard = library.BACKEND.make_guard
    assert make_guard is not None
    guard = make_guard([x, y])
    assert guard is not None and guard(x, y)

    def ask(z: torch.Tensor) -> torch.Tensor:
        answers.extend([guard(x, y), guard(z, y)])
        return z.sum()

    torch.func.grad(ask)(x)
    torch.func.vmap(ask)(x[None])
    torch.func.jvp(ask, (x,), (x,))
    assert answers == [False] * 6
    assert guard(x, y)


class Passive(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [
    Passive,
    lambda: FakeTensorMode(allow_non_fake_inputs=True),
    lambda: FlopCounterMode(display=False),
    forward_ad.dual_level,
])  # fmt: skip
def test_prepared_kernel_does_not_run_under_a_mode_that_intercepts_calls(
    asked: list[Any], mode: Callable[[], Any]
) -> None:
    q = rows([0, 2, 5])
    k, v = like(q), like(q)
    for _ in range(2):
        scree.attention(q, k, v)
    assert len(asked) == 1
    with mode():
        assert isinstance(scree.attention(q, k, v), AttentionCall)
    assert len(asked) == 2
    scree.attention(q, k, v)
    assert len(asked) == 2


def test_explain_of_a_cached_call_names_the_kernel(asked: list[Any]) -> None:
    q = rows([0, 2, 5])
    k, v = like(q), like(q)
    for _ in range(2):
        scree.attention(q, k, v)
    assert len(asked) == 1
    assert scree.explain("attention", q, k, v).provider == "mine"


def test_prepared_kernel_runs_only_on_its_stream(asked: list[Any]) -> None:
    stream = 0

    def current_stream(offsets: torch.Tensor) -> Callable[[], int]:
        return lambda: stream

    plain = rows([0, 2, 5])
    with_streams = replace(
        plain.layout.backend, stream_key=current_stream, raw_stream=current_stream
    )
    layout = Layout(with_streams, plain.offsets, plain.total_length)
    q = scree.Array.from_layout(plain.values, layout)
    k, v = like(q), like(q)
    for stream in (0, 7, 0, 7, 8, 0):  # noqa: B007 (current_stream returns it)
        scree.attention(q, k, v)
    assert len(asked) == 3


def test_wrong_arguments_after_a_cached_call_raise(asked: list[Any]) -> None:
    q = rows([0, 2, 5])
    scree.attention(q, q, q, causal=True)
    with pytest.raises(TypeError, match="window"):
        scree.attention(q, q, q, causal=True, window=[1, 2])
    # Equal to the options of cached calls, but of another type.
    scree.attention(q, q, q, causal=True, window=1, scale=1.0, softcap=1.0)
    valid = {"causal": True, "window": 1, "scale": 1.0, "softcap": 1.0}
    for wrong in ({"causal": 1}, {"window": True}, {"window": 1.0}, {"scale": True},
                  {"softcap": True}, {"deterministic": 0}, {"return_lse": 0.0}):  # fmt: skip
        with pytest.raises(TypeError, match=next(iter(wrong))):
            scree.attention(q, q, q, **(valid | wrong))
    with pytest.raises(ValueError, match="q: expected values"):
        turned = q.with_values(torch.randn(2, 5, 8), ragged_dim=1)
        scree.attention(turned, q, q, causal=True)
    with pytest.raises(TypeError, match="alibi_slopes"):
        scree.attention(q, q, q, causal=True, alibi_slopes=[1.0, 2.0])
    with pytest.raises(TypeError, match="k: expected a ragged array"):
        scree.attention(q, q.values, q, causal=True)
    with pytest.raises(ValueError, match="k: expected head_dim 8"):
        scree.attention(q, like(q.with_values(torch.randn(5, 2, 4))), q, causal=True)


def test_cached_selection_is_dropped_when_kernels_change(asked: list[Any]) -> None:
    q = rows([0, 2, 5])
    scree.attention(q, q, q)
    scree.register_kernel("attention", provider="newer")(lambda call: "newer")
    assert [scree.attention(q, q, q) for _ in range(2)] == ["newer"] * 2
    scree.unregister_kernel("attention", "newer")
    assert scree.attention(q, q, q)[2]["q"] is q
    assert len(asked) == 2


def test_kernel_with_its_own_condition_is_checked_at_each_call(asked: list[Any]) -> None:
    q, picky = rows([0, 2, 5]), []

    @scree.register_kernel(
        "attention", provider="picky", rejects=lambda call: picky.append(call) or "not today"
    )
    def run(call: Any) -> None:
        raise AssertionError

    for _ in range(2):
        scree.attention(q, q, q)
    assert len(picky) == len(asked) == 2


@pytest.mark.parametrize(("library", "count"), [("numpy", 1), ("torch", 3)])
def test_kernels_of_another_library_do_not_keep_calls_from_the_cache(
    asked: list[Any], library: str, count: int
) -> None:
    """A library that is loaded later puts its kernels in front, and they reject all other arrays."""
    with registry.loading_library(library):
        register = scree.register_kernel(
            "attention", provider="other", rejects=lambda call: "a reason"
        )
        register(lambda call: call)
    operation = OPERATIONS["attention"]
    names = [kernel.provider for kernel in operation.kernels]
    order = ["other", "mine", *(name for name in names if name not in ("other", "mine"))]
    operation.kernels = [operation.kernels[names.index(name)] for name in order]
    q = rows([0, 2, 5])
    for _ in range(3):
        scree.attention(q, q, q)
    assert len(asked) == count


def test_call_cache_does_not_keep_rows_alive(asked: list[Any]) -> None:
    gc.disable()
    try:
        q = rows([0, 2, 5])
        gone = [weakref.ref(x) for x in (q.layout, q.values, q.offsets)]
        scree.attention(q, like(q), like(q))
        asked.clear()
        del q
        assert [x() for x in gone] == [None] * 3
    finally:
        gc.enable()


def test_pair_caches_of_new_rows_are_bounded(asked: list[Any]) -> None:
    q = rows([0, 2, 5])
    gone = []
    for _ in range(20):
        k = rows([0, 3, 7])
        scree.attention(q, k, k)
        gone.append(weakref.ref(k.offsets))
    del k
    gc.collect()
    asked.clear()
    assert sum(x() is not None for x in gone) <= MAX_PAIR_CACHES


def test_guards_of_new_arrays_are_bounded(asked: list[Any]) -> None:
    q = rows([0, 2, 5])
    for heads in range(1, 30):
        x = q.with_values(torch.randn(5, heads, 8))
        scree.attention(x, x, x)
    # A list of entries has two keys, one of them for `Operation.recall`.
    assert all(len(kept) == call_cache.MAX_GUARDS for kept in q.layout.cache.values())
    scree.attention(x, x, x)
    assert len(asked) == 29


def test_keys_of_new_options_are_bounded(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MAX_KEYS", 10)
    q = rows([0, 2, 5])
    for i in range(1, 30):
        scree.attention(q, q, q, scale=1 / i)
    assert len(q.layout.cache) == 10


@pytest.fixture
def everywhere() -> list[str]:
    """Kernels of all operations whose answer holds for equal calls.

    The operations that were asked about.
    """
    names: list[str] = []
    for name in OPERATIONS:

        def run(call: Any, name: str = name) -> Any:
            names.append(name)
            return OPERATIONS[name].kernels[-1].run(call)  # the standard implementation

        def prepare_run(call: Any, name: str = name) -> Callable[..., Any]:
            facts = {field: getattr(call, field) for field in options_of(call)}
            names.append(name)
            return lambda **arrays: (
                OPERATIONS[name].kernels[-1].run(OPERATIONS[name].record(**arrays, **facts))
            )

        scree.register_kernel(name, provider="mine", prepare=prepare_run)(run)
    return names


def options_of(call: Any) -> list[str]:
    """The fields of a call that are no arrays."""
    arrays = {
        "x",
        "k",
        "q",
        "v",
        "values",
        "layout",
        "weight",
        "bias",
        "residual",
        "start",
        "inv_freq",
        "cos",
        "sin",
        "alibi_slopes",
        "targets",
        "class_weights",
        "logits",
        "arr",
        "index",
    }
    return [field.name for field in fields(call) if field.init and field.name not in arrays]


def classes_of(x: scree.Array) -> scree.Array:
    return x.with_values(torch.zeros(x.total_length, dtype=torch.int64))


def numbers_of(x: scree.Array) -> scree.Array:
    return x.with_values(torch.arange(x.total_length))


def first(x: scree.Array) -> scree.Array:
    """The first head alone."""
    return x.with_values(x.values[:, 0])


XP = scree.namespace(torch.zeros(1)).__dict__

#: A right call on rows of tokens (2, 8), and arguments that are wrong in its place.
RIGHT_AND_WRONG: dict[str, tuple[Callable[..., Any], list[Callable[[scree.Array], tuple[tuple[Any, ...], dict[str, Any]]]]]] = {
    **{name: (getattr(scree, name), [
        lambda x: ((x,), {}), lambda x: ((x.values,), {}), lambda x: ((like(x).with_values(x.values.int()),), {}),
        lambda x: ((x,), {"kernel": "nobody"}), lambda x: ((x,), {"kernel": ["mine"]}), lambda x: ((None,), {}),
        lambda x: ((x,), {"axis": True}), lambda x: ((x,), {"axis": 1.0}), lambda x: ((x,), {"axis": 0}),
    ]) for name in ("softmax", "log_softmax", "logsumexp")},
    **{name: (getattr(scree, name), [
        lambda x: ((x, torch.ones(8)), {}), lambda x: ((x, torch.ones(7)), {}), lambda x: ((x, [1.0] * 8), {}),
        lambda x: ((x, torch.ones(8)), {"eps": -1.0}), lambda x: ((x, torch.ones(8)), {"eps": "small"}),
        lambda x: ((x, torch.ones(8)), {"residual": x.values}), lambda x: ((x, torch.ones(8)), {"residual": x[..., :4]}),
        lambda x: ((x.with_values(x.values.int()), torch.ones(8)), {}), lambda x: ((x, x), {}),
        lambda x: ((x, torch.ones(8)), {"residual": rows([0, 1, 5])}),
    ]) for name in ("rms_norm", "layer_norm")},
    "rope": (scree.rope, [
        lambda x: ((x, x), {"theta": 1}), lambda x: ((x, x), {"theta": 0}), lambda x: ((x, x), {"theta": True}),
        lambda x: ((x, x[..., :4]), {"theta": 1}), lambda x: ((x, x.values), {"theta": 1}), lambda x: ((x, rows([0, 1, 5])), {}),
        lambda x: ((x, x), {"theta": 1, "start": torch.zeros(3, dtype=torch.int32)}),
        lambda x: ((x, x), {"theta": 1, "start": torch.zeros(2)}), lambda x: ((x[..., :7], None), {"theta": 1}),
    ]),
    "swiglu": (scree.swiglu, [
        lambda x: ((x,), {}), lambda x: ((x[..., :7],), {}), lambda x: ((x.with_values(x.values.int()),), {}),
        lambda x: ((x,), {"kernel": "nobody"}),
    ]),
    "split": (scree.split, [
        lambda x: ((x, [3, 5]), {}), lambda x: ((x, [3, 4]), {}), lambda x: ((x, [3, 5.0]), {}), lambda x: ((x, 8), {}),
        lambda x: ((x, [3, 5]), {"axis": 1}), lambda x: ((x, [3, 5]), {"axis": "last"}), lambda x: ((x, [9, -1]), {}),
    ]),
    "cross_entropy": (lambda x, *args, **options: scree.cross_entropy(first(x), *args, **options), [
        lambda x: ((x, classes_of(x)), {}), lambda x: ((x, classes_of(x)), {"reduction": "most"}),
        lambda x: ((x, classes_of(x)), {"ignore_index": -100.0}), lambda x: ((x, classes_of(x).values), {}),
        lambda x: ((x, x), {}), lambda x: ((x, classes_of(rows([0, 1, 5]))), {}),
        lambda x: ((x, classes_of(x)), {"label_smoothing": 2}), lambda x: ((x, classes_of(x)), {"class_weights": torch.ones(3)}),
    ]),
    "matmul": (lambda x, weight: XP["matmul"](first(x), weight), [
        lambda x: ((x, torch.ones(2, 8, 3)), {}), lambda x: ((x, torch.ones(3, 8, 3)), {}),
        lambda x: ((x, torch.ones(2, 7, 3)), {}), lambda x: ((x, torch.ones(2, 8, 3).double()), {}),
        lambda x: ((x, torch.ones(2, 8, 3, 1)), {}),
    ]),
    "scatter": (scree.scatter, [
        lambda x: ((x, numbers_of(x), 9), {}), lambda x: ((x, numbers_of(x), -1), {}), lambda x: ((x, numbers_of(x), 9.0), {}),
        lambda x: ((x, x, 9), {}), lambda x: ((x, numbers_of(rows([0, 1, 5])), 9), {}), lambda x: ((x, [1] * 5, 9), {}),
        lambda x: ((x, numbers_of(x), 9), {"kernel": "nobody"}), lambda x: ((x, numbers_of(x), 4), {}),
    ]),
    "sum": (XP["sum"], [
        lambda x: ((x,), {"axis": 1}), lambda x: ((x,), {"axis": 7}), lambda x: ((x,), {"axis": 0}),
        lambda x: ((x,), {"axis": 1.0}), lambda x: ((x,), {"axis": 1, "dtype": "wide"}),
    ]),
    "cumulative_sum": (XP["cumulative_sum"], [
        lambda x: ((x,), {"axis": 1}), lambda x: ((x,), {"axis": 0}), lambda x: ((x,), {}), lambda x: ((x,), {"axis": 4}),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT_AND_WRONG)
def test_wrong_call_raises_the_same_with_and_without_a_cached_call(
    name: str, everywhere: list[str]
) -> None:
    f, (right, *wrong) = RIGHT_AND_WRONG[name]
    for arguments in wrong:
        refused = []
        for before in (False, True):
            x = rows([0, 2, 5])
            asked = []
            for _ in range(2 * before):
                args, options = right(like(x))
                f(*args, **options)
                asked.append(len(everywhere))
            assert len(set(asked)) == before  # nothing was asked for the second call
            args, options = arguments(like(x))
            with pytest.raises((TypeError, ValueError)) as error:
                f(*args, **options)
            refused.append((error.type, str(error.value)))
        assert refused[0] == refused[1]


@pytest.mark.parametrize("is_ragged", [True, False])
def test_repeated_calls_on_paged_caches_select_a_kernel_once(is_ragged: bool) -> None:
    calls: list[Any] = []

    def prepare(call: Any) -> Callable[..., Any]:
        return lambda **arrays: arrays

    for name in ("paged_attention", "append_paged"):
        scree.register_kernel(name, provider="mine", rejects=calls.append, prepare=prepare)(
            lambda call: call
        )
    q, k = rows([0, 1, 2]), rows([0, 1, 2])
    pages, numbers = torch.zeros(4, 2, 2, 8), torch.arange(4, dtype=torch.int32)
    lengths, table = torch.tensor([3, 2]), numbers.reshape(2, 2)
    if is_ragged:
        table = scree.from_lengths(numbers, [2, 2])

    def attend(**changes: Any) -> Any:
        arguments = {"q": q, "k_pages": pages, "v_pages": pages.clone(), "page_table": table}
        return scree.paged_attention(**(arguments | {"kv_lengths": lengths} | changes))

    def append(**changes: Any) -> Any:
        arguments = {"k": k, "v": k, "k_pages": pages, "v_pages": pages, "page_table": table}
        return scree.append_paged(**(arguments | {"kv_lengths": lengths} | changes))

    attend(window=1, scale=1.0, split_size=1)
    append(q=q.with_values(q.values), rope={"theta": 1.0, "rotary_dim": 2})
    for f in (attend, append):
        f()
        before = len(calls)
        result = f(kv_lengths=lengths + 1)
        assert len(calls) == before and result["kv_lengths"].tolist() == [4, 3]
        f(k_pages=torch.zeros(8, 2, 2, 8)[::2])
        f(k_pages=torch.zeros(4, 2, 2, 8).transpose(1, 2))
        assert len(calls) == before + 2
        with pytest.raises(TypeError, match="page_table"):
            f(page_table=[[0, 1], [2, 3]])
        with pytest.raises(ValueError, match="kv_lengths"):
            f(kv_lengths=lengths[:1])
    scale = torch.ones(2)
    for scales in ({"k_scale": 0.5}, {"v_scale": 0.5}, {"k_scale": 0.5, "v_scale": 2.0}, {"k_scale": 2},
                   {"k_scale": scale, "v_scale": 0.5}, {"k_scale": scale, "v_scale": scale}):  # fmt: skip
        before = len(calls)
        for _ in range(2):
            result = attend(**scales)
            assert {name: result[name] for name in scales} == scales
        assert len(calls) == before + 1, scales
    assert attend(k_scale=scale, v_scale=scale + 1)["v_scale"].tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="k_scale"):
        attend(k_scale=torch.ones(3), v_scale=0.5)
    with pytest.raises(TypeError, match="k_scale"):
        attend(k_scale=[1.0, 1.0], v_scale=0.5)
    wrongs: list[dict[str, Any]] = [{"causal": 1}, {"window": True}, {"split_size": True}]
    for wrong in (*wrongs, {"return_lse": 0}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            attend(**({"window": 1, "scale": 1.0, "split_size": 1} | wrong))
    for wrong in ({"rotary_dim": 2.0}, {"rotary_dim": 2, "interleaved": 0}):
        with pytest.raises(TypeError, match=[*wrong][-1]):
            append(q=q.with_values(q.values), rope={"theta": 1.0} | wrong)
