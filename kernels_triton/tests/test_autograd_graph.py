"""The nodes that a call adds to autograd's graph: every node takes 5 to 8 us of a backward pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import scree
from scree_triton.attention import interface

LENGTHS = (4, 0, 3)


def nodes_of(out: Any) -> list[str]:
    """Return the names of the nodes between results and leaves."""
    results = out if isinstance(out, tuple) else (out,)
    waiting = [(x.values if isinstance(x, scree.Array) else x).grad_fn for x in results]
    seen: dict[Any, str] = {}
    while waiting:
        node = waiting.pop()
        if (
            node is not None
            and node not in seen
            and node.name() != "torch::autograd::AccumulateGrad"
        ):
            seen[node] = node.name()
            waiting += [following for following, _ in node.next_functions]
    return sorted(seen.values())


Call = Callable[[scree.Array, scree.Array, scree.Array, torch.Tensor], Any]
CALLS: dict[str, tuple[Call, list[str]]] = {
    "attention": (lambda q, k, v, w: scree.attention(q, k, v, causal=True), ["AttentionBackward"]),
    "attention, window": (
        lambda q, k, v, w: scree.attention(q, k, v, causal=True, window=2, softcap=5.0),
        ["AttentionBackward"],
    ),
    "attention, lse": (
        lambda q, k, v, w: scree.attention(q, k, v, return_lse=True),
        ["AttentionBackward", "TBackward0"],
    ),
    "rms_norm": (lambda q, k, v, w: scree.rms_norm(q, w), ["NormBackward"]),
    "rms_norm, residual": (lambda q, k, v, w: scree.rms_norm(q, w, residual=k), ["NormBackward"]),
    "layer_norm": (lambda q, k, v, w: scree.layer_norm(q, w, w), ["NormBackward"]),
    "rope": (lambda q, k, v, w: scree.rope(q), ["RopeBackward"]),
    "swiglu": (lambda q, k, v, w: scree.swiglu(q), ["SwigluBackward"]),
    "softmax": (lambda q, k, v, w: scree.softmax(q), ["SoftmaxBackward"]),
    "sum": (lambda q, k, v, w: scree.namespace(q).sum(q, axis=1), ["ReduceBackward"]),
}


def test_nodes_call_the_gradient_without_the_function_of_pytorch() -> None:
    """Fails if `_backward_cls`, which is private, no longer names the class of the nodes."""
    x = scree.from_lengths(torch.randn(sum(LENGTHS), 2, 16, requires_grad=True), LENGTHS)
    node = type(scree.attention(x, x, x).values.grad_fn)
    assert node.apply is interface._attention_gradient
    assert node is interface._differentiable_attention.function._backward_cls


@pytest.mark.parametrize("name", CALLS)
def test_call_adds_these_nodes_to_the_graph(name: str) -> None:
    call, expected = CALLS[name]
    rows = scree.from_lengths(torch.zeros(sum(LENGTHS), 2, 16), LENGTHS)
    q, k, v = (
        rows.with_values(torch.randn(sum(LENGTHS), 2, 16, requires_grad=True)) for _ in range(3)
    )
    weight = torch.ones(16, requires_grad=True)
    for _ in range(2):  # a call that selects a kernel, and a call from the cache
        assert nodes_of(call(q, k, v, weight)) == expected
