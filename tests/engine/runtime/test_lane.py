"""Lanes run work in order and carry its failures to whoever waits."""

from __future__ import annotations

import threading

import pytest

from deepinfer_engine.runtime.lane import InlineLane, ThreadLane


def test_thread_lane_keeps_order_off_the_calling_thread():
    lane, order, threads = ThreadLane(), [], set()

    def work(i: int):
        order.append(i)
        threads.add(threading.get_ident())

    jobs = [lane.launch(lambda i=i: work(i)) for i in range(50)]
    for job in jobs:
        job.result()
    lane.close()
    assert order == list(range(50))
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_work_behind_a_failure_fails_the_same_way():
    lane, ran = ThreadLane(), []

    def fail():
        raise ValueError("broken step")

    first, second = lane.launch(fail), lane.launch(lambda: ran.append(1))
    for job in (first, second):
        with pytest.raises(ValueError, match="broken step"):
            job.result()
    lane.close()
    assert ran == []


def test_inline_lane_runs_at_once():
    ran = []
    InlineLane().launch(lambda: ran.append(1)).result()
    assert ran == [1]
    with pytest.raises(ZeroDivisionError):
        InlineLane().launch(lambda: 1 / 0)  # pyright: ignore[reportArgumentType]
