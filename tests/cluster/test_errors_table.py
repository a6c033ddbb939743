"""Every error has one row, and the row is one that both transports can send."""

from __future__ import annotations

import grpc
import pytest

from cluster.api import errors
from cluster.errors_table import ERROR_TABLE, row_of
from cluster.http.protocol_errors import HttpRefusal

ERROR_CLASSES = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.WatchwordError)
]


@pytest.mark.parametrize("kind", ERROR_CLASSES)
def test_every_error_class_has_a_row_of_its_own(kind: type[errors.WatchwordError]) -> None:
    row = ERROR_TABLE[kind]
    assert 400 <= row.http_status <= 599
    assert row.grpc_status in grpc.StatusCode.__members__


def test_the_list_of_classes_is_not_empty_and_rows_are_found_through_bases() -> None:
    assert len(ERROR_CLASSES) >= 14
    assert row_of(HttpRefusal(413, "too large", "body_too_large")) is ERROR_TABLE[errors.InvalidRequestError]
    assert row_of(errors.OverloadedError("full")).http_status == 503


def test_caller_faults_are_not_worth_a_retry_and_overload_is() -> None:
    assert not any(row.should_retry for kind, row in ERROR_TABLE.items() if 400 <= row.http_status < 429)
    assert row_of(errors.RateLimitedError).should_retry
    assert row_of(errors.OverloadedError).should_retry
