import math
import threading
import time

import pytest

from stallbench.spans import Timeline


def test_a_span_has_its_length_and_its_place_on_the_timeline():
    timeline = Timeline()
    with timeline.span("save", step=5) as save, timeline.span("write", parent=save.id):
        time.sleep(0.02)
    frame = timeline.frame().set_index("kind")
    assert 0.02 <= frame.loc["write"].end_s - frame.loc["write"].start_s < 1
    assert (
        frame.loc["save"].start_s <= frame.loc["write"].start_s <= frame.loc["write"].end_s <= frame.loc["save"].end_s
    )
    assert frame.loc["write"].parent == frame.loc["save"].id


def test_the_accelerator_is_waited_for_before_each_timestamp():
    calls = []
    timeline = Timeline(lambda: calls.append(time.sleep(0.01)))
    with timeline.span("step"):
        pass
    assert len(calls) == 2
    assert timeline.spans[0].duration_s >= 0.01


def test_a_background_thread_does_not_wait_for_the_accelerator():
    calls = []
    timeline = Timeline(lambda: calls.append(1))
    thread = threading.Thread(target=lambda: timeline.end(timeline.begin("sync")))
    thread.start()
    thread.join()
    assert calls == [] and timeline.spans[0].duration_s >= 0


def test_a_span_cut_short_has_no_end():
    timeline = Timeline()
    with pytest.raises(OSError), timeline.span("save"):
        raise OSError
    assert math.isnan(timeline.frame().end_s[0])


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind='nap' is no kind of span"), Timeline().span("nap"):
        pass
