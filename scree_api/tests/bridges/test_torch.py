"""Round trips of nested tensors, and ragged arrays as batches of a DataLoader."""

import io
import pickle
from functools import partial
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from hypothesis import given
from ragged_cases import arrays, assert_same, few_examples

import scree
import scree.data
from scree.bridges import from_torch_nested, to_torch_nested


def make_array() -> scree.Array:
    values = torch.arange(12.0).reshape(6, 2).requires_grad_()
    return scree.from_lengths(values, [3, 0, 2, 1])


@few_examples
@given(arr=arrays())
def test_jagged_round_trip_shares_memory(arr: scree.Array) -> None:
    arr = arr.to_backend("torch")
    nested = to_torch_nested(arr)
    assert nested.layout == torch.jagged
    assert nested.size(0) == arr.batch_size
    for row, component in zip(arr, nested.unbind(), strict=True):
        assert torch.equal(row, component)
    back = from_torch_nested(nested)
    assert back.max_length == arr.layout.max_length
    assert back.offsets is arr.offsets
    assert back.values.data_ptr() == arr.values.data_ptr()
    assert_same(back, arr)


@few_examples
@given(arr=arrays(dtypes=("float32", "float16", "int64", "bool")))
def test_strided_round_trip(arr: scree.Array) -> None:
    arr = arr.to_backend("torch")
    if not arr.batch_size:
        with pytest.raises(ValueError, match="at least one row"):
            to_torch_nested(arr, layout=torch.strided)
        return
    nested = to_torch_nested(arr, layout=torch.strided)
    back = from_torch_nested(nested)
    if (
        len(set(arr.lengths.tolist())) == 1 and arr.ragged_dim
    ):  # no axis differs: the first is ragged
        assert back.ragged_dim == 0
    else:
        assert_same(back, arr)
    if not back.ragged_dim:
        assert back.values.data_ptr() == nested.values().data_ptr()


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_gradients_pass_both_ways(layout: torch.layout) -> None:
    arr = make_array()
    back = from_torch_nested(to_torch_nested(arr, layout=layout))
    (back.values * torch.arange(6.0)[:, None]).sum().backward()
    assert torch.equal(arr.values.grad, torch.arange(6.0)[:, None].expand(6, 2))


def test_strided_with_another_ragged_axis_passes_gradients() -> None:
    values = torch.arange(12.0).reshape(2, 6).requires_grad_()
    arr = scree.from_lengths(values, [3, 0, 2, 1], ragged_dim=1)
    back = from_torch_nested(to_torch_nested(arr, layout=torch.strided))
    assert back.ragged_dim == 1
    (back.values * torch.arange(6.0)).sum().backward()
    assert torch.equal(values.grad, torch.arange(6.0).expand(2, 6))


def test_from_torch_nested_transposed_shares_memory() -> None:
    nested = torch.nested.nested_tensor(
        [torch.rand(2, 3), torch.rand(4, 3)], layout=torch.jagged
    ).transpose(1, 2)
    arr = from_torch_nested(nested)
    assert arr.shape == (2, 3, None)
    assert arr.values.data_ptr() == nested.values().data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(arr, nested.unbind(), strict=True))


def test_from_torch_nested_with_holes_packs_with_gradients() -> None:
    dense = torch.arange(24.0).reshape(3, 4, 2).requires_grad_()
    start, length = torch.tensor([1, 0, 2]), torch.tensor([2, 0, 1])
    nested = torch.nested.narrow(dense, 1, start, length, layout=torch.jagged)
    assert nested.lengths() is not None
    arr = from_torch_nested(nested)
    assert arr.lengths.tolist() == [2, 0, 1]
    assert torch.equal(arr.values, torch.cat([dense[0, 1:3], dense[2, 2:3]]))
    arr.values.sum().backward()
    assert dense.grad.sum() == 6
    assert torch.equal(dense.grad[0, 1:3], torch.ones(2, 2))


def test_from_torch_nested_transposed_with_holes_packs() -> None:
    dense = torch.arange(24.0).reshape(3, 4, 2)
    start, length = torch.tensor([1, 0, 2]), torch.tensor([2, 0, 1])
    arr = from_torch_nested(
        torch.nested.narrow(dense, 1, start, length, layout=torch.jagged).transpose(1, 2)
    )
    assert arr.shape == (3, 2, None)
    assert torch.equal(arr.values, torch.cat([dense[0, 1:3], dense[2, 2:3]]).T)


def test_to_torch_nested_of_one_layout_has_one_ragged_size() -> None:
    arr = make_array()
    total = to_torch_nested(arr) + to_torch_nested(
        arr.with_values(arr.values * 2)
    )  # torch refuses different ragged sizes
    assert torch.equal(total.values(), arr.values * 3)


def test_invalid_argument_raises() -> None:
    with pytest.raises(TypeError, match="nested: expected a nested tensor"):
        from_torch_nested(torch.ones(2, 3))
    with pytest.raises(ValueError, match="differ along one axis"):
        from_torch_nested(
            torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 2)], layout=torch.strided)
        )
    with pytest.raises(ValueError, match="at least one component"):
        from_torch_nested(torch.nested.nested_tensor([], layout=torch.strided))
    with pytest.raises(ValueError, match="layout: expected"):
        to_torch_nested(make_array(), layout=torch.sparse_coo)
    with pytest.raises(TypeError, match="expected an array on torch, got one on numpy"):
        scree.from_lengths(make_array().values.detach().numpy(), [6]).to("cpu")


def test_to_accepts_the_arguments_of_a_tensor() -> None:
    arr = make_array()
    assert arr.to("cpu") is arr
    half = arr.to("cpu", torch.float16, non_blocking=True)
    assert half.dtype == torch.float16
    assert half.layout is arr.layout
    copied = arr.to(torch.float32, copy=True)
    assert copied.offsets.data_ptr() != arr.offsets.data_ptr()
    assert_same(copied, arr)
    meta = arr.to("meta")
    assert meta.offsets.device.type == "meta"
    assert meta.lengths.shape == (4,)
    assert arr.to(torch.ones(1, dtype=torch.float64)).dtype == torch.float64


def test_to_passes_gradients() -> None:
    arr = make_array()
    for converted in (
        arr.to("cpu", torch.float64),
        arr.to(torch.float16, copy=True),
        arr.to_device("cpu"),
        arr.to_backend("torch"),
    ):
        arr.values.grad = None
        converted.values.sum().backward()
        assert torch.equal(arr.values.grad, torch.ones(6, 2))


def test_data_loader_with_pack_as_collate_fn() -> None:
    texts = [torch.arange(n) for n in (3, 1, 4, 1, 5)]
    batches = list(torch.utils.data.DataLoader(texts, batch_size=2, collate_fn=scree.pack))
    assert [batch.lengths.tolist() for batch in batches] == [[3, 1], [4, 1], [5]]
    assert torch.equal(torch.cat([batch.values for batch in batches]), torch.cat(texts))
    for batch in batches:  # as a worker process sends it
        assert_same(pickle.loads(ForkingPickler.dumps(batch)), batch)


# ---------------------------------------------------------------- on a device
@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader_pins_ragged_batches(workers: int) -> None:
    samples = [
        {"ids": torch.arange(n), "weight": torch.ones(n, 2) * n, "label": n}
        for n in (3, 1, 4, 1, 5)
    ]
    sampler = scree.data.TokenBudgetSampler(
        [len(sample["ids"]) for sample in samples], 6, shuffle=False
    )
    loader = torch.utils.data.DataLoader(
        samples,
        batch_sampler=sampler,
        collate_fn=partial(scree.data.collate, library="torch"),
        pin_memory=True,
        num_workers=workers,
    )
    batches = list(loader)
    assert [batch["ids"].lengths.tolist() for batch in batches] == [[3, 1], [4, 1], [5]]
    for batch in batches:
        for arr in (batch["ids"], batch["weight"]):
            assert arr.values.is_pinned()
            assert arr.offsets.is_pinned()
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda.set_sync_debug_mode(
                    "error"
                )  # a copy from pinned memory does not synchronize
                try:
                    copied = arr.to("cuda", non_blocking=True)
                    copied.record_stream(torch.cuda.current_stream())
                    assert (
                        copied.layout.host_offsets is not None
                    )  # offsets known on the host stay known
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            assert copied.device.type == "cuda"
            assert_same(copied.to_numpy(), arr)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_round_trip_on_a_device(layout: torch.layout) -> None:
    arr = scree.from_lengths(
        torch.arange(12.0, device="cuda").reshape(6, 2).requires_grad_(), [3, 0, 2, 1]
    )
    nested = to_torch_nested(arr, layout=layout)
    assert nested.device.type == "cuda"
    back = from_torch_nested(nested)
    weight = torch.arange(6.0, device="cuda")[:, None]
    (back.values * weight).sum().backward()
    assert torch.equal(arr.values.grad, weight.expand(6, 2))
    assert_same(
        back.with_values(back.values.detach()).to_numpy(),
        arr.with_values(arr.values.detach()).to_numpy(),
    )


def test_torch_load_reads_ragged_arrays_by_default() -> None:
    arr = scree.from_lengths(torch.arange(5.0), [2, 0, 3])
    file = io.BytesIO()
    torch.save({"batch": arr}, file)
    file.seek(0)
    assert torch.load(file)["batch"].tolist() == arr.tolist()
