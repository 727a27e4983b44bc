"""The stress programs find differing bits and hangs."""

import random
import time

import program_calls
import pytest
import stress
import torch

from scree_triton.runtime.launch import INTERPRETED

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


def test_watchdog_of_a_block_that_does_not_end_names_it(capsys):
    status = []
    with stress.watchdog("rows (5, 7)", 0.01, status.append):
        time.sleep(0.3)
    assert status == [3] and "no end after 0.01 s: rows (5, 7)" in capsys.readouterr().out


def test_watchdog_of_a_block_that_ends_is_silent(capsys):
    status = []
    with stress.watchdog("rows (5, 7)", 0.1, status.append):
        pass
    time.sleep(0.2)
    assert not status and not capsys.readouterr().out


@pytest.mark.parametrize("variant", stress.VARIANTS, ids=str)
def test_draw_shape_stays_below_the_limit_and_repeats(variant):
    shapes = [stress.draw_shape(random.Random(seed), variant, 500) for seed in range(50)]
    assert shapes == [stress.draw_shape(random.Random(seed), variant, 500) for seed in range(50)]
    assert all(0 < sum(shape.lengths) < 500 for shape in shapes)
    assert any(0 in shape.lengths for shape in shapes)


def draw(variant, max_tokens=40):
    return stress.draw_shape(random.Random(1), variant, max_tokens)


@pytest.mark.parametrize("variant", stress.INTERPRETED_VARIANTS, ids=["attention", "grouped"])
def test_run_shape_of_right_kernels_finds_nothing(variant):
    assert stress.run_shape(draw(variant), seed=1, passes=2) is None


@pytest.mark.parametrize("wrong_pass, message", [(1, "has other bits"), (0, "standard")])
def test_run_shape_of_a_wrong_result_names_the_shape(wrong_pass, message, monkeypatch):
    make_call, shape = stress.make_call, draw(stress.INTERPRETED_VARIANTS[0])

    def make_wrong_call(*args):
        call, passes = make_call(*args), []

        def run():
            passes.append(call())
            factor = 1.5 if len(passes) - 1 >= wrong_pass and len(passes) < 3 else 1.0
            return [x * factor for x in passes[-1]]

        return run

    monkeypatch.setattr(stress, "make_call", make_wrong_call)
    found = stress.run_shape(shape, seed=1, passes=2)
    assert found is not None and message in found and str(shape.lengths) in found


@pytest.mark.skipif(not INTERPRETED, reason="test_programs runs all operations")
def test_stress_streams_finds_calls_that_differ(monkeypatch):
    results = iter(range(100))
    monkeypatch.setattr(
        stress, "make_inputs", lambda *args: program_calls.make_inputs("cpu", lengths=(3, 0, 2))
    )
    monkeypatch.setattr(stress, "CALLS", {"sum": program_calls.CALLS["sum"]})
    assert stress.stress_streams(3) == []
    monkeypatch.setattr(
        stress, "run", lambda name, inputs: [torch.full((2,), float(next(results)))] * 2
    )
    assert [i for i, _ in stress.stress_streams(3)] == [0, 1, 2]
