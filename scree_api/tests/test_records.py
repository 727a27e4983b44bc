"""Records are dataclasses with slots."""

import copy
import pickle
from dataclasses import field, fields, replace

import pytest
import torch

from scree.records import record


@record
class Point:
    """A point with a derived field."""

    x: float
    y: float = 2.0
    note: str = field(init=False, default="none")
    norm: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", self.x + self.y)


def test_record_constructs_copies_and_replaces() -> None:
    point = Point(1.0)
    assert (point.x, point.y, point.note, point.norm) == (1.0, 2.0, "none", 3.0)
    assert replace(point, y=5.0).norm == 6.0
    assert copy.copy(point).norm == 3.0 and pickle.loads(pickle.dumps(point)).y == 2.0
    assert [x.name for x in fields(Point)] == ["x", "y", "note", "norm"]
    assert not hasattr(point, "__dict__") and Point(1.0) != Point(1.0)
    for wrong in ({}, {"x": 1.0, "note": "a"}, {"x": 1.0, "z": 2.0}):
        with pytest.raises(TypeError, match="__init__"):
            Point(**wrong)


def test_record_is_traced_by_the_compiler_of_pytorch() -> None:
    function = torch.compile(lambda x: Point(x * 2).norm, backend="eager", fullgraph=True)
    assert function(torch.ones(2)).tolist() == [4.0, 4.0]
