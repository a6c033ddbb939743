"""What a person can get wrong on the command line is told in one line with status 2, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.api.errors import InvalidRequestError
from cluster.config import load_config

MAIN = [sys.executable, "-c", "from cluster.cli import main; main()"]
ROOT = Path(__file__).parents[2]


def watchword(tmp_path: Path, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WATCHWORD_")}
    kept |= {"WATCHWORD_STATE_DIR": str(tmp_path / "state"), "COLUMNS": "200"} | environ
    return subprocess.run([*MAIN, *args], capture_output=True, text=True, timeout=280, cwd=ROOT, env=kept)


@pytest.mark.parametrize(
    ("args", "environ", "told"),
    [
        (["keys", "list"], {"WATCHWORD_TRUSTED_PROXIES": "[10.0.0.1"}, "WATCHWORD_TRUSTED_PROXIES"),
        (["keys", "list"], {"WATCHWORD_PREFIX_CACHE": "off"}, "WATCHWORD_PREFIX_CACHE"),
        (["keys", "create", "--tenant", "acme", "--keys-file", "/proc/none/keys.json"], {}, "/proc/none"),
        (["serve", "--set", "trusted_proxies=[10.0.0.1"], {}, "trusted_proxies"),
        (["serve", "--config", str(Path(sys.executable).resolve())], {}, "config file"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, args: list[str], environ: dict[str, str], told: str) -> None:
    done = watchword(tmp_path, *args, **environ)
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_model_that_is_not_there_is_told_before_anything_starts(tmp_path: Path) -> None:
    ports = ["--http-port", "0", "--grpc-port", "0"]
    done = watchword(tmp_path, "serve", *ports, "--model", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "none" in done.stderr
    assert "Traceback" not in done.stderr
    assert "starting Ray" not in done.stderr


def test_names_of_tenants_and_users_are_shown_as_they_are(tmp_path: Path) -> None:
    assert watchword(tmp_path, "keys", "create", "--tenant", "[b]x[/b]", "--user", "[/y]").returncode == 0
    listed = watchword(tmp_path, "keys", "list")
    assert listed.returncode == 0
    assert "[b]x[/b]" in listed.stdout
    assert "user [/y]" in listed.stdout


def test_the_key_for_other_commands_is_no_unknown_setting(tmp_path: Path) -> None:
    assert watchword(tmp_path, "keys", "list", WATCHWORD_API_KEY="ww-1.x").returncode == 0


def test_lists_come_from_the_environment_and_an_empty_variable_is_none() -> None:
    environ = {"WATCHWORD_TRUSTED_PROXIES": "[10.0.0.1, 10.0.0.2]", "WATCHWORD_HOST": ""}
    config = load_config({}, environ=environ)
    assert config.trusted_proxies == ("10.0.0.1", "10.0.0.2")
    assert config.host == "127.0.0.1"
    with pytest.raises(InvalidRequestError, match="trusted_proxies"):
        load_config({}, environ={"WATCHWORD_TRUSTED_PROXIES": "10.0.0.1"})
