"""Reports, their sinks and the stopwatch."""

from __future__ import annotations

import doctest
import json
import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import meshrl.metrics
from meshrl.metrics import JSONLSink, StepReport, Stopwatch, TensorBoardSink, read_metrics


def test_docstring_examples_are_true():
    assert doctest.testmod(meshrl.metrics).failed == 0


@given(st.lists(st.tuples(st.floats(0, 10), st.lists(st.floats(0, 0.5), max_size=3)), max_size=6))
def test_stopwatch_phases_add_up_to_the_wall_time_unless_laps_overlap(intervals):
    now = 100.0
    watch = Stopwatch(clock=lambda: now)
    expected = 0.0
    for index, (length, laps) in enumerate(intervals):
        now += length
        for lap in laps:
            watch.lap(f"lap{index}", lap)
        watch.rest("rest")
        expected += max(length, sum(laps))
    assert math.isclose(sum(watch.seconds.values()), expected, rel_tol=1e-9, abs_tol=1e-9)


def test_a_written_report_is_on_disk_before_the_sink_is_closed(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    sink = JSONLSink(path)
    sink.write(StepReport(1, {"reward": 0.5}, {"train": 0.25}))
    assert read_metrics(path) == [{"step": 1, "metrics": {"reward": 0.5}, "seconds": {"train": 0.25}}]
    sink.close()


def test_not_a_number_is_written_as_null_so_that_every_json_reader_can_read_the_file(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    sink = JSONLSink(path)
    sink.write(StepReport(1, {"loss": math.nan, "ratio": math.inf}))
    sink.close()

    def refuse(constant: str):
        raise AssertionError(constant)

    row = json.loads(path.read_text(), parse_constant=refuse)
    assert row["metrics"] == {"loss": None, "ratio": None}


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "metrics": {}, "seconds": {}}\n{"step": 2, "met')
    assert [row["step"] for row in read_metrics(path)] == [1]


def test_tensorboard_reads_back_what_was_written(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink.write(StepReport(3, {"reward": 0.5}, {"train": 0.25}, samples=("47+85= 231$",)))
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("metrics/reward")] == [(3, 0.5)]
    assert [(event.step, event.value) for event in events.Scalars("seconds/train")] == [(3, 0.25)]
    assert "47+85= 231$" in str(events.Tensors("samples/text_summary"))
