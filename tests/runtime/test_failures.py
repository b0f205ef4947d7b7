"""What is tried again and what is not: by code and status, exactly."""

from __future__ import annotations

import json

import pytest

from greenroom.runtime.providers.failures import error_of_response

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504, 529)
FINAL = (400, 401, 403, 404, 405, 413, 422, 451)
SHAPES = [
    lambda code: json.dumps({"error": {"message": "m", "code": code}}),
    lambda code: json.dumps({"error": {"message": "m", "type": code}}),
    lambda code: json.dumps({"type": "error", "error": {"type": code, "message": "m"}}),
]


@pytest.mark.parametrize("status", RETRIED)
def test_passing_faults_are_tried_again(status: int) -> None:
    for body in (b"", b"<html>", b'{"error": "text"}', b'{"error": {"message": "m", "code": "never_heard_of"}}'):
        error = error_of_response(body, status, None)
        assert error.retryable
        assert error.status == status
        assert error.kind == ("provider_rate_limited" if status == 429 else "provider")


@pytest.mark.parametrize("status", FINAL)
def test_what_is_wrong_stays_wrong(status: int) -> None:
    error = error_of_response(b'{"error": {"message": "m"}}', status, None)
    assert (error.retryable, error.kind) == (False, "provider_permanent")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("code", ["insufficient_quota", "billing_hard_limit_reached"])
def test_a_used_up_quota_is_no_rate_limit(shape: object, code: str) -> None:
    body = shape(code).encode()  # type: ignore[operator]  # one of the shapes above
    error = error_of_response(body, 429, 3.0)
    assert (error.retryable, error.kind, error.code) == (False, "provider_permanent", code)


@pytest.mark.parametrize("code", ["insufficient_quota_soon", "quota", "tokens"])
def test_codes_are_compared_exactly(code: str) -> None:
    body = json.dumps({"error": {"message": "m", "code": code}}).encode()
    error = error_of_response(body, 429, 3.0)
    assert (error.retryable, error.kind, error.retry_after) == (True, "provider_rate_limited", 3.0)
