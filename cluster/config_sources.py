"""Where settings are read from: a YAML file and environment variables. Knows nothing of what they mean."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.api.errors import InvalidRequestError

ENV_PREFIX = "WATCHWORD_"
# Read by other parts, not by this model: the gate of the planted faults, the tests' data folder, the weights' cache,
# the key of the commands that ask a server.
_FOREIGN_ENV = frozenset(
    {
        "WATCHWORD_ALLOW_PLANTED_FAULTS",
        "WATCHWORD_SHARED",
        "WATCHWORD_CONFIG",
        "WATCHWORD_CACHE",
        "WATCHWORD_API_KEY",
    }
)


def read_file(path: Path) -> dict[str, Any]:
    """The settings in a YAML file, by name. Raises InvalidRequestError naming the file."""
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequestError(f"config file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequestError(f"config file {path} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise InvalidRequestError(f"config file {path} is not valid YAML: {error}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise InvalidRequestError(f"config file {path} must hold a mapping, not a {type(loaded).__name__}")
    return {str(name).replace("-", "_"): value for name, value in loaded.items()}


def read_environment(environ: Mapping[str, str], known: Container[str]) -> dict[str, Any]:
    """The settings among WATCHWORD_* variables. Raises InvalidRequestError for one that is not in `known`."""
    found: dict[str, Any] = {}
    for name, value in environ.items():
        if not name.startswith(ENV_PREFIX) or name in _FOREIGN_ENV:
            continue
        field = name[len(ENV_PREFIX) :].lower()
        if field not in known:
            raise InvalidRequestError(f"environment variable {name} names no setting")
        if not value:
            continue  # set to nothing: not given
        found[field] = parse_value(value, f"environment variable {name}")
    return found


def parse_value(text: str, where: str) -> Any:
    """Lists and maps are written as YAML, '[10.0.0.1, 10.0.0.2]'; all else stays text, which the field converts."""
    if not text.startswith(("[", "{")):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise InvalidRequestError(f"{where} is neither a list nor a map: {text!r}") from None
