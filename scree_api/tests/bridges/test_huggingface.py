"""Padded and flattened batches of Hugging Face, compared with its own collator and tokenizers."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ragged_cases import INSTALLED, arrays, assert_same, few_examples, make_values

import scree
from scree.bridges import from_hf_flattened, from_hf_padded, to_hf_flattened, to_hf_padded, to_numpy
from scree.bridges.dlpack import on_host
from scree.layout import Layout

LENGTHS = [3, 0, 2, 5]


def to_library(x: np.ndarray, library: str) -> Any:
    """Return a dense array in another library."""
    return scree.from_lengths(x, [len(x)]).to_backend(library).values


@few_examples
@given(arr=arrays(), side=st.sampled_from(("right", "left")))
def test_padded_round_trip(arr: scree.Array, side: str) -> None:
    padded, mask = to_hf_padded(arr, side=side, fill_value=1)
    assert mask.dtype == np.int64
    assert padded.shape[:2] == mask.shape
    assert_same(from_hf_padded(padded, mask), on_host(arr))


@pytest.mark.parametrize("library", INSTALLED)
@pytest.mark.parametrize("padding", ["right", "left", "anywhere", "none"])
def test_from_hf_padded_with_padding_on_any_side(library: str, padding: str) -> None:
    position = np.arange(6)
    masks = {
        "right": position < np.asarray([[3], [0], [6]]), "left": position >= np.asarray([[3], [6], [0]]),
        "anywhere": make_values((3, 6), "int64") % 3 != 1, "none": np.zeros((3, 6), bool),
    }  # fmt: skip
    mask, hidden = masks[padding], make_values((3, 6, 2), "float32")
    integer = np.int32 if library == "jax" else np.int64
    arr = to_numpy(
        from_hf_padded(to_library(hidden, library), to_library(mask.astype(integer), library))
    )
    np.testing.assert_array_equal(arr.lengths, mask.sum(axis=1))
    np.testing.assert_array_equal(arr.values, hidden[mask])


@pytest.mark.parametrize("library", INSTALLED)
def test_to_hf_padded_mask_is_the_widest_integer(library: str) -> None:
    arr = scree.from_lengths(make_values((10,), "float32"), LENGTHS).to_backend(library)
    padded, mask = to_hf_padded(arr)
    assert str(mask.dtype).endswith("int32" if library == "jax" else "int64")
    assert_same(from_hf_padded(padded, mask).to_numpy(), arr.to_numpy())


@pytest.mark.needs("torch")
def test_torch_gradients_pass_both_ways() -> None:
    import torch

    values = torch.rand(10, 2).requires_grad_()
    padded, mask = to_hf_padded(scree.from_lengths(values, LENGTHS), side="left")
    weight = torch.rand(10, 2)
    (from_hf_padded(padded, mask).values * weight).sum().backward()
    assert torch.equal(values.grad, weight)
    values.grad = None
    embedded = from_hf_flattened(to_hf_flattened(scree.from_lengths(values, LENGTHS)))[
        "inputs_embeds"
    ]
    (embedded.values * weight).sum().backward()
    assert torch.equal(values.grad, weight)


@pytest.mark.needs("jax", "mlx")
@pytest.mark.parametrize("library", ["jax", "mlx"])
def test_jax_and_mlx_gradients_pass_both_ways(library: str) -> None:
    if library == "jax":
        import jax

        xp, grad = jax.numpy, jax.grad
    else:
        import mlx.core as xp

        grad = xp.grad
    weight = xp.reshape(xp.arange(20.0), (10, 2))
    mask = xp.arange(5)[None, :] < xp.asarray(LENGTHS)[:, None]

    def loss(values: Any) -> Any:
        padded, _ = to_hf_padded(scree.from_lengths(values, LENGTHS))
        flat = to_hf_flattened(from_hf_padded(padded, mask))
        return xp.sum(from_hf_flattened(flat)["inputs_embeds"].values * weight)

    np.testing.assert_array_equal(np.asarray(grad(loss)(weight)), np.asarray(weight))


@pytest.mark.needs("torch", "tokenizers", "transformers")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("tensors", ["np", "pt"])
def test_from_hf_padded_of_a_tokenizer_batch(side: str, tensors: str) -> None:
    import tokenizers
    import transformers

    vocabulary = tokenizers.models.WordLevel(
        {"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3, "c": 4}, unk_token="[UNK]"
    )
    raw_tokenizer = tokenizers.Tokenizer(vocabulary)
    raw_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw_tokenizer, pad_token="[PAD]", padding_side=side
    )
    batch = tokenizer(["a b c", "c", "b unseen"], padding=True, return_tensors=tensors)
    unpadded = from_hf_padded(batch)
    assert set(unpadded) == set(batch) - {"attention_mask"}
    assert [row.tolist() for row in unpadded["input_ids"]] == [[2, 3, 4], [4], [3, 1]]
    assert all(x.layout is unpadded["input_ids"].layout for x in unpadded.values())
    padded, mask = to_hf_padded(unpadded["input_ids"], side=side, fill_value=tokenizer.pad_token_id)
    assert padded.tolist() == batch["input_ids"].tolist()
    assert mask.tolist() == batch["attention_mask"].tolist()


@pytest.mark.needs("torch", "transformers")
@pytest.mark.parametrize("tensors", ["np", "pt"])
def test_to_hf_flattened_agrees_with_the_collator(tensors: str) -> None:
    import transformers

    texts = [[5, 6, 7], [8], [9, 10]]
    collator = transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_tensors=tensors
    )
    collated = collator([{"input_ids": text} for text in texts])
    ids = from_hf_flattened(collated)["input_ids"]
    assert [row.tolist() for row in ids] == texts
    flat = to_hf_flattened(ids, labels=ids)
    assert set(flat) == set(collated)
    for name, x in collated.items():
        if isinstance(x, int):
            assert flat[name] == x
        else:
            assert flat[name].dtype == x.dtype
            assert flat[name].tolist() == x.tolist()


@few_examples
@given(arr=arrays())
def test_flattened_round_trip_shares_memory(arr: scree.Array) -> None:
    flat = to_hf_flattened(arr)
    name = "input_ids" if arr.ndim == 2 else "inputs_embeds"
    back = from_hf_flattened(flat)[name]
    assert_same(back, on_host(arr))
    assert np.shares_memory(back.values, arr.values) or not arr.size
    if (np.diff(arr.offsets) > 0).all():
        del flat["cu_seq_lens_q"]  # position_ids alone give the starts
        assert_same(from_hf_flattened(flat)[name], on_host(arr))


def test_invalid_batch_raises() -> None:
    ids = scree.from_lengths(make_values((10,), "int64"), LENGTHS)
    padded, mask = to_hf_padded(ids)
    with pytest.raises(ValueError, match="attention_mask: expected a mask, got None"):
        from_hf_padded(padded)
    with pytest.raises(
        ValueError,
        match="attention_mask: expected a mask as an argument or in the batch, got the names "
        "input_ids",
    ):
        from_hf_padded({"input_ids": padded})
    with pytest.raises(
        ValueError, match=r"attention_mask: expected shape \(n, L\), got \(4, 5, 1\)"
    ):
        from_hf_padded({"input_ids": padded, "attention_mask": mask[..., None]})
    with pytest.raises(ValueError, match=r"labels: expected shape \(4, 5\)"):
        from_hf_padded({"input_ids": padded, "labels": mask[0]}, mask)
    with pytest.raises(ValueError, match="cu_seq_lens_q or position_ids"):
        from_hf_flattened({"input_ids": padded})
    with pytest.raises(ValueError, match=r"input_ids: expected shape \(1, 5\)"):
        from_hf_flattened({"input_ids": padded, "position_ids": padded})
    with pytest.raises(ValueError, match="labels: expected"):
        to_hf_flattened(ids, labels=scree.from_lengths(make_values((10,), "int64"), [10]))


@pytest.mark.gpu
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    "dtype, rest", [("int64", ()), ("float16", (3,)), ("float32", (2, 64)), ("bool", ())]
)
def test_padded_round_trip_on_a_device(side: str, dtype: str, rest: tuple[int, ...]) -> None:
    arr = scree.from_lengths(make_values((10, *rest), dtype), LENGTHS)
    padded, mask = to_hf_padded(arr.to_backend("torch", device="cuda"), side=side, fill_value=1)
    expected, expected_mask = to_hf_padded(arr, side=side, fill_value=1)
    np.testing.assert_array_equal(padded.cpu().numpy(), expected)
    np.testing.assert_array_equal(mask.cpu().numpy(), expected_mask)
    assert_same(from_hf_padded(padded, mask).to_numpy(), arr)


@pytest.mark.needs("torch")
def test_to_hf_flattened_leaves_out_the_tail() -> None:
    import torch

    backend = scree.from_lengths(torch.arange(2), [2]).layout.backend
    # As a compiled function returns it.
    layout = Layout(backend, torch.tensor([0, 2, 4]), 6)
    tail = scree.from_lengths(torch.arange(6), [6]).from_layout(torch.arange(6), layout)
    batch = scree.bridges.to_hf_flattened(tail, labels=tail)
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3]]
    assert batch["labels"].tolist() == [[-100, 1, -100, 3]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1]]
