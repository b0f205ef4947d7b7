"""How long to wait before the next attempt. Pure: the jitter's random number is passed in."""

from __future__ import annotations

import math
from datetime import UTC
from email.utils import parsedate_to_datetime

MAX_BACKOFF = 30.0
"""Seconds; no single wait is longer, whatever base, attempt or Retry-After say."""

JITTER = 0.5
"""A wait lies between (1 - JITTER) and 1 times its exponential value."""


def backoff(base: float, attempt: int, random: float, retry_after: float | None = None) -> float:
    """Seconds before attempt `attempt` + 1; `attempt` counts failures from 1, `random` lies in [0, 1).

    A base of 0 switches waiting off, save for what the provider asked for with Retry-After (never shortened below
    it, cut at MAX_BACKOFF).
    """
    if base <= 0:
        own = 0.0
    else:
        exponent = min(max(attempt, 1) - 1, 64)  # 2.0 ** 1024 overflows; the cap is reached long before 64
        own = min(MAX_BACKOFF, base * 2.0**exponent) * (1.0 - JITTER * random)
    return own if retry_after is None else min(MAX_BACKOFF, max(own, retry_after))


def parse_retry_after(value: str | None, now: float) -> float | None:
    """Seconds from a Retry-After header (RFC 9110 §10.2.3: seconds or a date), rounded up; None if it says nothing.

    `now` in Unix seconds. Fractions are taken, NaN and negative numbers are not; a number too large is infinite and
    left to the cap.
    """
    text = (value or "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            when = parsedate_to_datetime(text)
        except (TypeError, ValueError, IndexError):
            return None
        if when.tzinfo is None:
            when = when.replace(tzinfo=UTC)
        return float(max(0, math.ceil(when.timestamp() - now)))
    return None if math.isnan(seconds) or seconds < 0 else seconds
