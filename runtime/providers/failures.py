"""From what a provider answered to a ProviderError with kind, code and status. Pure.

Judged by the code and type in the body and by status, never by "HTTP 200". Codes match exactly: an unknown code of a
429 is still a rate limit.
"""

from __future__ import annotations

import json
from typing import Any

from greenroom.runtime.errors import ProviderError
from greenroom.runtime.results import FailureKind

RETRYABLE_STATUS = frozenset({408, 409, 425, 429})
"""Besides every 5xx (529 included)."""

PERMANENT_CODES = frozenset({"insufficient_quota", "billing_hard_limit_reached", "quota_exceeded"})
"""Retrying brings nothing, though the status is 429."""

STATUS_OF_TYPE = {
    "invalid_request_error": 400,
    "exceed_context_size_error": 400,
    "context_length_exceeded": 400,
    "authentication_error": 401,
    "invalid_api_key": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "model_not_found": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "api_error": 500,
    "server_error": 500,
    "overloaded_error": 529,
    "overloaded": 529,
}


def error_of_body(
    error: Any, *, status: int | None = None, retry_after: float | None = None, emitted: bool = False
) -> ProviderError:
    """The error in a body's `error` field (an object, a string, or anything), with the HTTP status if it has one."""
    if isinstance(error, dict):
        message = str(error.get("message") or error.get("type") or json.dumps(error, ensure_ascii=False))
        codes = [str(error[key]) for key in ("code", "type") if error.get(key) not in (None, "")]
    else:
        message, codes = str(error), []
    if status is None:
        status = _status_of(codes)
    return provider_error(message, codes=codes, status=status, retry_after=retry_after, emitted=emitted)


def provider_error(
    message: str,
    *,
    codes: list[str],
    status: int | None,
    retry_after: float | None = None,
    emitted: bool = False,
) -> ProviderError:
    """Kind and retryability from codes and status; without either it is taken as a passing fault."""
    code = next((code for code in codes if not code.isdecimal()), codes[0] if codes else None)
    if status is None:
        kind, retryable = FailureKind.provider, True
    elif status == 429 and PERMANENT_CODES.isdisjoint(codes):
        kind, retryable = FailureKind.provider_rate_limited, True
    elif (status in RETRYABLE_STATUS or status >= 500) and PERMANENT_CODES.isdisjoint(codes):
        kind, retryable = FailureKind.provider, True
    else:
        kind, retryable = FailureKind.provider_permanent, False
    return ProviderError(
        message,
        kind=kind,
        code=code,
        status=status,
        retryable=retryable,
        retry_after=retry_after,
        emitted=emitted,
    )


def error_of_response(body: bytes, status: int, retry_after: float | None) -> ProviderError:
    """The error of a response with an error status, whatever its body is."""
    text = body.decode("utf-8", "replace").strip()
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    error = document.get("error") if isinstance(document, dict) else None
    if error in (None, ""):
        error = {"message": f"HTTP {status}: {text[:500]}" if text else f"HTTP {status} without a body"}
    return error_of_body(error, status=status, retry_after=retry_after)


def broken_stream(message: str, *, emitted: bool) -> ProviderError:
    """The stream ended or broke before the reply was whole."""
    return ProviderError(message, kind=FailureKind.provider_stream, retryable=True, emitted=emitted)


def _status_of(codes: list[str]) -> int | None:
    for code in codes:
        if code.isdecimal() and 400 <= int(code) <= 599:
            return int(code)
    for code in codes:
        if code in STATUS_OF_TYPE:
            return STATUS_OF_TYPE[code]
        if code in PERMANENT_CODES:
            return 429
    return None
