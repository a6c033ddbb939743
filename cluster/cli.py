"""`watchword`: the command line. Each subcommand lives in a file of its own; heavy imports happen when it runs."""

from __future__ import annotations

import sys

import typer

from cluster.api.errors import WatchwordError
from cluster.commands.bench import bench
from cluster.commands.bench_peers import bench_peers
from cluster.commands.check import check
from cluster.commands.keys import keys_app
from cluster.commands.serve import serve
from cluster.commands.trace import trace
from cluster.experiment.cli import experiment
from router.simulate.cli import EXAMPLES, simulate

app = typer.Typer(
    name="watchword",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve large language models to many users and prove that they cannot see one another.",
)
app.command()(serve)
app.command()(experiment)
app.command()(check)
app.command()(trace)
app.command()(bench)
app.command("bench-peers")(bench_peers)
app.command(help=EXAMPLES)(simulate)
app.add_typer(keys_app, name="keys")


def main() -> None:
    """Entry point. What a person did wrong is one line on stderr and status 2, never a traceback."""
    try:
        app()
    except WatchwordError as error:
        print(f"watchword: {error.message}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.filename is None:
            raise  # not about a file that a person named
        print(f"watchword: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
