"""`watchword keys`: who may ask. Changes take effect in a running server with its next request."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.api.errors import InvalidRequestError
from cluster.api.principal import Role
from cluster.api.terminal import width_of
from cluster.auth.key_record import KeyRecord
from cluster.auth.key_store import create_key, list_keys, revoke_key, rotate_key
from cluster.config import load_config

keys_app = typer.Typer(no_args_is_help=True, help="Create, list, revoke and rotate API keys.")
console = Console(stderr=True, width=width_of(sys.stderr))

KeysFile = Annotated[Path | None, typer.Option("--keys-file", help="default: keys.json in the state folder")]
AsJson = Annotated[bool, typer.Option("--json", help="for machines")]


@keys_app.command()
def create(
    tenant: Annotated[str, typer.Option(help="the customer that the key belongs to")],
    user: Annotated[str | None, typer.Option(help="the key is this user; a user in a request nests below it")] = None,
    delegate: Annotated[bool, typer.Option("--delegate", help="may name any user of its tenant")] = False,
    operator: Annotated[bool, typer.Option("--operator", help="may read metrics and manage templates")] = False,
    keys_file: KeysFile = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it: this is the only time that it can be seen.

    Without --user, --delegate or --operator every holder of the key counts as one and the same user.
    """
    roles = {role for role, given in ((Role.DELEGATE, delegate), (Role.OPERATOR, operator)) if given}
    record, key = create_key(_path(keys_file), tenant, roles=frozenset(roles), user=user)
    if as_json:
        typer.echo(json.dumps({"key": key, **_public(record)}))
        return
    console.print(f"key of tenant {tenant} ({_rights(record)}):", highlight=False, markup=False)
    typer.echo(key)


@keys_app.command("list")
def list_(
    tenant: Annotated[str | None, typer.Option(help="only this customer's keys")] = None,
    keys_file: KeysFile = None,
    as_json: AsJson = False,
) -> None:
    """Show the keys, without their secrets."""
    records = list_keys(_path(keys_file), tenant)
    if as_json:
        typer.echo(json.dumps([_public(record) for record in records]))
        return
    table = Table("id", "tenant", "rights")
    for record in records:
        table.add_row(record.id, Text(record.tenant), Text(_rights(record)))  # names are text, not markup
    Console(width=width_of(sys.stdout)).print(table)


@keys_app.command()
def revoke(key_id: Annotated[str, typer.Argument(help="id of the key")], keys_file: KeysFile = None) -> None:
    """Take a key out of force."""
    record = revoke_key(_path(keys_file), _id_of(key_id))
    console.print(f"revoked {record.id}")


@keys_app.command()
def rotate(key_id: Annotated[str, typer.Argument(help="id of the key")], keys_file: KeysFile = None) -> None:
    """Give a key a new secret; its holder keeps identity and cache, the old secret stops working."""
    _, key = rotate_key(_path(keys_file), _id_of(key_id))
    typer.echo(key)


def _path(keys_file: Path | None) -> Path:
    return load_config({"keys_file": keys_file}).keys_path


def _id_of(key_id: str) -> str:
    if "." in key_id:
        raise InvalidRequestError("give the key's id, the part before the dot; a secret does not belong in a command")
    return key_id


def _public(record: KeyRecord) -> dict[str, object]:
    return {name: value for name, value in record.to_dict().items() if name != "sha256"}


def _rights(record: KeyRecord) -> str:
    if record.user is not None:
        return f"user {record.user}"
    return " and ".join(sorted(role.value for role in record.roles)) or "one shared user"
