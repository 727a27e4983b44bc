"""Sharding strategies of the operators for `torch.distributed.tensor.DTensor`.

A strategy is a list of ways to shard an operator over one dimension of a mesh. Each way gives the
placements of the results and of the tensor arguments. A placement is the sharded axis, `REPLICATED`,
or `PARTIAL` for a result that is the sum over the devices. Every operator can run with all tensors
replicated. Tokens are sharded only where the operator takes no offsets, because offsets count the
tokens of all devices.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

REPLICATED, PARTIAL = "replicated", "partial"
#: The placements of the results, and of the tensor arguments in order.
Sharding = tuple[list[int | str], list[int | str]]

_registered = 0  # the operators that DTensor knows: this many at the front of the list


def _present(*tensors: tuple[Any, int | str]) -> list[int | str]:
    """Return the placements of arguments, without optional tensors that are None."""
    return [placement for shape, placement in tensors if shape is not None]


def _attention(devices, q, k, v, slopes, seed, cu_q, cu_k, tiles, *_) -> Iterator[Sharding]:
    # The random numbers of dropout depend on the index of the head among all heads.
    if seed is not None:
        return
    rows, slopes_axis = [REPLICATED] * 3, len(slopes or (0,)) - 1
    if k[1] % devices == 0:
        yield [1, 0], [*_present((q, 1), (k, 1), (v, 1), (slopes, slopes_axis)), *rows]
    elif k[1] == 1 and q[1] % devices == 0:  # all queries share the head of the keys
        placements = (q, 1), (k, REPLICATED), (v, REPLICATED), (slopes, slopes_axis)
        yield [1, 0], [*_present(*placements), *rows]


def _attention_backward(
    devices, q, k, v, slopes, seed, out, lse, dout, dlse, cu_q, cu_k, query_tiles, key_tiles, *_
) -> Iterator[Sharding]:
    if seed is not None:
        return
    slopes_axis = len(slopes or (0,)) - 1
    rows, grads = [REPLICATED] * 4, ((out, 1), (lse, 0), (dout, 1), (dlse, 0))
    if k[1] % devices == 0:
        yield [1, 1, 1], [*_present((q, 1), (k, 1), (v, 1), (slopes, slopes_axis), *grads), *rows]
    elif k[1] == 1 and q[1] % devices == 0:
        placements = (q, 1), (k, REPLICATED), (v, REPLICATED), (slopes, slopes_axis), *grads
        yield [1, PARTIAL, PARTIAL], [*_present(*placements), *rows]


def _norm(devices, x, residual, weight, bias, *_) -> Iterator[Sharding]:
    for axis in range(len(x) - 1):
        parameters = (weight, REPLICATED), (bias, REPLICATED)
        tensors = _present((x, axis), (residual, axis), *parameters)
        yield [axis] * (1 if residual is None else 2), tensors


def _norm_backward(devices, x, weight, bias, dy, dsum, *constants) -> Iterator[Sharding]:
    *_, needs_dweight, needs_dbias = constants
    for axis in range(len(x) - 1):
        results = [PARTIAL if needed else REPLICATED for needed in (needs_dweight, needs_dbias)]
        parameters = (weight, REPLICATED), (bias, REPLICATED)
        yield [axis, *results], _present((x, axis), *parameters, (dy, axis), (dsum, axis))


def _rope(devices, q, k, *arrays_and_options) -> Iterator[Sharding]:
    # Offsets, start positions, frequencies, cosines and sines; no axis of heads.
    arrays = [(x, REPLICATED) for x in arrays_and_options[:5]]
    for axis in range(1, min(len(x) for x in (q, k) if x is not None) - 1):
        yield [axis] * (1 if k is None else 2), _present((q, axis), (k, axis), *arrays)


def _along_all_axes_but_the_last(devices, *tensors) -> Iterator[Sharding]:
    for axis in range(len(tensors[0]) - 1):
        yield [axis], [axis] * len(tensors)


def _along_elements(count: int) -> Callable[..., Iterator[Sharding]]:
    """Return the shardings along element axes of `count` arrays, which precede the offsets."""

    def shardings(devices, *arguments) -> Iterator[Sharding]:
        for axis in range(1, len(arguments[0])):
            yield [axis], [*[axis] * count, REPLICATED]

    return shardings


def _grouped_product(devices, x, weight, offsets) -> Iterator[Sharding]:
    yield [1], [REPLICATED, 2, REPLICATED]
    yield [PARTIAL], [1, 1, REPLICATED]


def _grouped_weight_gradient(devices, x, dy, offsets) -> Iterator[Sharding]:
    yield [1], [1, REPLICATED, REPLICATED]
    yield [2], [REPLICATED, 1, REPLICATED]


#: Operator -> function of the number of devices and of the arguments, with shapes for tensors, that
#: yields the ways to shard a call besides the replicated one.
SHARDINGS: dict[str, Callable[..., Iterator[Sharding]]] = {
    "attention": _attention,
    "attention_backward": _attention_backward,
    "norm": _norm,
    "norm_backward": _norm_backward,
    "rope": _rope,
    "swiglu": _along_all_axes_but_the_last,
    "swiglu_backward": _along_all_axes_but_the_last,
    "softmax": _along_elements(1),
    "softmax_backward": _along_elements(2),
    "segment_reduce": _along_elements(1),
    "segment_reduce_backward": _along_elements(3),
    "segment_scan": _along_elements(1),
    "segment_arg": _along_elements(1),
    "grouped_product": _grouped_product,
    "grouped_weight_gradient": _grouped_weight_gradient,
}
#: Operator that returns a list -> number of tensors in it.
_NUM_RESULTS: dict[str, Callable[..., int]] = {
    "norm": lambda x, residual, *_: 1 if residual is None else 2,
    "rope": lambda q, k, *_: 1 if k is None else 2,
    "split": lambda dy, offsets, totals, dim: len(totals),
}


def register_shardings(operators: list[Any]) -> None:
    """Register the strategies of operators with DTensor, once."""
    global _registered
    if _registered == len(operators):
        return
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    propagator = DTensor._op_dispatcher.sharding_propagator
    for operator in operators[_registered:]:
        overload = operator._opoverload
        # Every argument decides about the results, so all are part of the key of DTensor's cache.
        info = RuntimeSchemaInfo(static_argnum=0, needs_pytree=True)
        propagator.register_op_strategy(overload, _strategy, info)
    _registered = len(operators)


def _strategy(op_schema: Any) -> Any:
    """Return the strategies of a call as DTensor's propagator expects them."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor._op_schema import OpStrategy
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    def placement(kind: int | str) -> Any:
        return Replicate() if kind == REPLICATED else Partial() if kind == PARTIAL else Shard(kind)

    name = op_schema.op._schema.name.split("::")[1]
    mesh = op_schema.get_mesh_from_args()
    arguments = tuple(
        torch.Size(x.shape) if isinstance(x, OpStrategy) else x for x in op_schema.args_schema
    )
    num_tensors = sum(isinstance(x, OpStrategy) for x in tree_leaves(op_schema.args_schema))
    num_results = _NUM_RESULTS.get(name, lambda *_: len(op_schema.op._schema.returns))(*arguments)
    shardings: list[Sharding] = [([REPLICATED] * num_results, [REPLICATED] * num_tensors)]
    shardings += SHARDINGS.get(name, lambda *_: ())(mesh.size(), *arguments)
    strategy = expand_to_full_mesh_op_strategy(
        mesh,
        op_schema,
        [[placement(x) for x in (*results, *tensors)] for results, tensors in shardings],
        input_index=num_results,
    )
    if name in _NUM_RESULTS and num_results == 1:  # a list of one tensor
        for spec in strategy.strategies:
            spec.output_specs = (spec.output_specs,)
    return strategy
