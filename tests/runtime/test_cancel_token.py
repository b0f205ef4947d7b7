"""CancelToken: who is told, in what order, with which reason, and until when."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from greenroom import CancelToken
from greenroom.testing import FakeClock


async def test_a_cancel_goes_down_the_tree_and_never_up() -> None:
    root = CancelToken()
    child, sibling = root.child(), root.child()
    child.cancel("enough")
    assert (child.cancelled, sibling.cancelled, root.cancelled) == (True, False, False)
    root.cancel("all")
    await asyncio.wait_for(sibling.wait(), 1)
    assert sibling.reason == "all"
    assert child.reason == "enough"
    assert root.child().cancelled, "a child made later starts cancelled"


def test_a_deadline_bounds_the_children() -> None:
    clock = FakeClock()
    parent = CancelToken(timeout=10, monotonic=clock.monotonic)
    assert parent.child(timeout=60).remaining == 10
    assert parent.child(timeout=5).remaining == 5
    assert CancelToken().remaining is None


async def test_a_deadline_counts_down_and_never_below_nothing() -> None:
    clock = FakeClock()
    token = CancelToken(timeout=2, monotonic=clock.monotonic)
    child = token.child()
    assert child.remaining == 2
    await clock.advance(1.5)
    assert token.remaining == child.remaining == 0.5
    await clock.advance(5)
    assert token.remaining == 0
    assert not token.cancelled, "a deadline tells; cancelling is somebody's act"
    assert token.child(timeout=1).remaining == 0
    assert CancelToken(timeout=0, monotonic=clock.monotonic).remaining == 0


def test_a_fresh_token_is_neither_cancelled_nor_hard_and_has_no_reason() -> None:
    token = CancelToken()
    assert (token.cancelled, token.hard, token.reason) == (False, False, "")
    token.cancel()
    assert (token.cancelled, token.hard, token.reason) == (True, False, "")


def test_the_first_reason_stays_and_a_second_cancel_can_only_make_it_hard() -> None:
    token = CancelToken()
    child, grandchild = token.child(), token.child().child()
    told: list[str] = []
    child.on_cancel(lambda: told.append("once"))
    token.cancel("first")
    token.cancel("second")
    assert (token.hard, child.hard, grandchild.hard) == (False, False, False)
    token.cancel("third", hard=True)
    token.cancel("fourth")
    assert (token.hard, child.hard) == (True, True)
    assert (token.reason, child.reason) == ("first", "first")
    assert told == ["once"]


def test_a_hard_cancel_is_hard_all_the_way_down_and_for_children_made_later() -> None:
    token = CancelToken()
    grandchild = token.child().child()
    token.cancel("stop", hard=True)
    assert (grandchild.hard, token.child().hard, token.child().reason) == (True, True, "stop")
    soft = CancelToken()
    soft.cancel("stop")
    assert not soft.child().hard


def test_a_grandchild_is_reached_over_a_child_that_nobody_holds() -> None:
    token = CancelToken()
    grandchild = token.child().child()
    gc.collect()
    token.cancel("stop")
    assert grandchild.cancelled


def test_a_callback_is_called_once_unless_it_is_taken_back() -> None:
    token = CancelToken()
    told: list[str] = []
    token.on_cancel(lambda: told.append("a"))
    forget = token.on_cancel(lambda: told.append("b"))
    token.on_cancel(lambda: told.append("c"))
    forget()
    forget()  # harmless
    token.cancel()
    token.cancel()
    assert told == ["a", "c"]
    token.on_cancel(lambda: told.append("late"))()
    assert told == ["a", "c", "late"], "at once when it is cancelled already"


def test_the_same_callback_twice_is_two_callbacks() -> None:
    token = CancelToken()
    told: list[str] = []

    def tell() -> None:
        told.append("x")

    token.on_cancel(tell)
    token.on_cancel(tell)()
    token.cancel()
    assert told == ["x"]


def test_a_callback_that_fails_keeps_nobody_from_hearing_and_is_not_hidden() -> None:
    token = CancelToken()
    child = token.child()
    told: list[str] = []

    def fails() -> None:
        raise ValueError("first")

    def fails_too() -> None:
        raise KeyError("second")

    token.on_cancel(fails)
    token.on_cancel(fails_too)
    token.on_cancel(lambda: told.append("told"))
    with pytest.raises(ValueError, match="first"):
        token.cancel("stop")
    assert told == ["told"]
    assert (child.cancelled, child.reason) == (True, "stop")
    token.cancel()  # nothing is told twice


def test_a_callback_may_cancel_again() -> None:
    token = CancelToken()
    told: list[bool] = []

    def again() -> None:
        token.cancel("again")
        told.append(token.cancelled)

    token.on_cancel(again)
    token.cancel("stop")
    assert (told, token.reason) == ([True], "stop")


async def test_waiting_ends_with_the_cancel_and_leaves_nothing_behind() -> None:
    token = CancelToken()
    waiters = [asyncio.create_task(token.wait()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(waiter.done() for waiter in waiters)
    waiters[0].cancel()
    await asyncio.wait(waiters[:1])
    assert len(token._callbacks) == 1, "who gave up waiting is forgotten"
    token.cancel()
    token.cancel(hard=True)
    await asyncio.wait_for(waiters[1], 1)
    await asyncio.wait_for(token.wait(), 1)


def test_seconds_and_hardness_are_named_by_whoever_gives_them() -> None:
    anything: Any = CancelToken
    with pytest.raises(TypeError):
        anything(5)
    with pytest.raises(TypeError):
        anything().cancel("stop", True)
    with pytest.raises(TypeError):
        anything().child(5)
