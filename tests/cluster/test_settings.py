"""Settings: what is said of a wrong one, and that the page of them is what the program takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cluster.api.errors import InvalidRequestError
from cluster.cli import app
from cluster.config import ClusterConfig, TenantShare, load_config
from cluster.settings_page import settings_page

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_is_what_the_program_takes() -> None:
    assert PAGE.read_text(encoding="utf-8") == settings_page(), "run: make settings"
    for name, field in (*ClusterConfig.model_fields.items(), *TenantShare.model_fields.items()):
        assert f"| `{name}` |" in settings_page()
        assert field.description, f"{name} needs a sentence"


def test_the_example_on_the_page_is_accepted(tmp_path: Path) -> None:
    _, example, *_ = settings_page().split("```")
    file = tmp_path / "config.yaml"
    file.write_text(example.removeprefix("yaml"))
    config = load_config({}, config_file=file, environ={})
    assert {name: tenant.share for name, tenant in config.tenants.items()} == {"acme": "variables", "globex": "none"}
    assert config.default_share == "template"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_num_seqs": "abc"}, "max_num_seqs is 'abc', must be an integer from 1 to 4096 or 'auto'"),
    ({"max_num_seqs": 0}, "max_num_seqs is 0, must be an integer from 1 to 4096 or 'auto'"),
    ({"gpu_memory_fraction": 1}, "gpu_memory_fraction is 1, must be a number above 0 and below 1"),
    ({"max_queue": -1}, "max_queue is -1, must be an integer of at least 0"),
    ({"prefix_caching": "maybe"}, "prefix_caching is 'maybe', must be true or false"),
    ({"default_share": "all"}, "default_share is 'all', must be 'none', 'user', 'template' or 'variables'"),
    ({"trusted_proxies": [1]}, "trusted_proxies.0 is 1, must be text"),
    ({"lora": "x"}, "lora is 'x', must be a map from text to text"),
    ({"colour": "red"}, "colour: no such setting"),
    ({"tenants": {"a": {"weight": 0}}}, "tenants.a.weight is 0, must be a number from 0.001 to 1000"),
    ({"tenants": {"a": {"share": "public"}}}, "tenants.a.share is 'public', must be 'none', 'user', 'template' or"),
    ({"tenants": {"a": {"colour": 1}}}, "tenants.a.colour: no such setting"),
    ({"tls_key_file": "k"}, "tls_cert_file and tls_key_file are needed together"),
    ({"threads": -1, "workers": 0}, "workers is 0, must be an integer from 1 to 4096; threads is -1, must be"),
]


@pytest.mark.parametrize(("given", "told"), WRONG, ids=[told.split(",")[0] for _, told in WRONG])
def test_a_wrong_setting_is_told_with_its_value_and_what_is_allowed(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        load_config(given, environ={})
    assert caught.value.message.startswith(told)
    assert "pydantic" not in caught.value.message
    assert "Input should be" not in caught.value.message


def test_a_flag_is_judged_by_the_same_words() -> None:
    done = CliRunner().invoke(app, ["serve", "--max-num-seqs", "abc"])
    assert isinstance(done.exception, InvalidRequestError)
    assert done.exception.message == "max_num_seqs is 'abc', must be an integer from 1 to 4096 or 'auto'"


def test_a_tenant_s_policy_comes_from_the_environment_and_flags_too() -> None:
    text = "{acme: {share: user}}"
    assert load_config({}, environ={"WATCHWORD_TENANTS": text}).tenants["acme"].share == "user"
    assert load_config({"tenants": yaml.safe_load(text)}, environ={}).tenants["acme"].share == "user"
