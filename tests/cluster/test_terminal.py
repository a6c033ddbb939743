"""Tables in a file keep their names whole; at a terminal they fit it."""

from __future__ import annotations

import io
import os

import pytest
from rich.console import Console
from rich.table import Table

from cluster.api.terminal import width_of

NAMES = ["freed_while_referenced", "detokenizer_lookahead_shared", "prefix_of_first_tokens", "key_without_variables"]


@pytest.fixture(autouse=True)
def _no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


def _printed(width: int | None) -> str:
    file = io.StringIO()
    table = Table(*NAMES)
    table.add_row(*NAMES)
    Console(file=file, width=width).print(table)
    return file.getvalue()


def test_a_file_holds_every_name_whole() -> None:
    assert all(_printed(width_of(io.StringIO())).count(name) == 2 for name in NAMES)
    assert not all(_printed(80).count(name) == 2 for name in NAMES), "a table that fits 80 columns shows nothing"


def test_a_terminal_or_who_says_how_wide_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as terminal:
        assert width_of(terminal) is None
    os.close(leader)
    monkeypatch.setenv("COLUMNS", "100")
    assert width_of(io.StringIO()) is None
