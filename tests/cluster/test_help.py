"""`--help` shows every word that was written for it, and commands that ask a server read its key from one variable."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
import typer
from typer.testing import CliRunner

from cluster.cli import app
from cluster.commands.options import API_KEY_ENV


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


ROOT = typer.main.get_command(app)
COMMANDS = dict(commands(ROOT))  # type: ignore[arg-type]


def words(text: str) -> str:
    """Without the frame that help is drawn in, nor where its lines break."""
    return re.sub(r"[\s│╭╮╰╯─]+", "", text)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_no_word_of_the_help_is_lost(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"})
    assert shown.exit_code == 0
    for param in COMMANDS[path].params:
        assert words(getattr(param, "help", None) or "") in words(shown.output), param.name
    for line in (COMMANDS[path].help or "").splitlines():
        assert words(line) in words(shown.output)


def test_a_server_s_key_comes_from_one_variable() -> None:
    keyed = {path: param for path, command in COMMANDS.items() for param in command.params if param.name == "api_key"}
    assert {path[0] for path in keyed} >= {"bench", "bench-peers", "check", "trace", "experiment"}
    assert {param.envvar for param in keyed.values()} == {API_KEY_ENV}
