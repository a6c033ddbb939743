"""Options that several commands have: spelled, and read from the environment, in one way."""

from __future__ import annotations

from typing import Annotated

import typer

API_KEY_ENV = "WATCHWORD_API_KEY"

ServerUrl = Annotated[str, typer.Option(help="server, with or without /v1")]
ApiKey = Annotated[str | None, typer.Option(help="key of the server: ID.SECRET", envvar=API_KEY_ENV)]
OperatorKey = Annotated[str | None, typer.Option(help="an operator's key of the server", envvar=API_KEY_ENV)]
