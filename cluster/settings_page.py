"""docs/settings.md, made from the settings themselves: `python -m cluster.settings_page > docs/settings.md`."""

from __future__ import annotations

from pathlib import Path

from pydantic.fields import FieldInfo

from cluster.config import ClusterConfig, TenantShare
from cluster.config_fields import allowed_values

# By the first setting that stands under each.
_HEADINGS = {
    "model": "What is served",
    "host": "Where it listens",
    "keys_file": "Who may ask",
    "workers": "How tokens are made",
    "templates_dir": "Who shares what",
    "sentinel_period_s": "Is anything leaking?",
    "redis_url_file": "Which worker",
    "max_queue": "Who gets how much",
    "body_timeout_s": "For how long",
}
_STATE_DIR = "$XDG_STATE_HOME/watchword or ~/.local/state/watchword"

_INTRODUCTION = """# Settings

Every setting can stand in a YAML file (`watchword serve --config FILE`, or `WATCHWORD_CONFIG`), in an environment
variable (`WATCHWORD_` and the name in capitals) or on the command line (`--set NAME=VALUE`; some have a flag of their
own: `watchword serve --help`), the later the stronger. Lists and maps are written as in YAML:
`--set 'trusted_proxies=[10.0.0.1]'`. An unknown name and a value that is not allowed are refused at the start.

```yaml
model: smollm2
workers: 2
default_share: template
tenants:
  acme: {share: variables, weight: 2}
  globex: {share: none, requests_per_min: 60}
```"""


def settings_page() -> str:
    """The page as Markdown: name, default, allowed values and meaning of every setting."""
    lines = [_INTRODUCTION]
    for name, field in ClusterConfig.model_fields.items():
        if name in _HEADINGS:
            lines += ["", f"## {_HEADINGS[name]}", "", *_TABLE_HEAD]
        lines.append(_row(name, field))
    lines += ["", "## Of each tenant in `tenants`", "", *_TABLE_HEAD]
    lines += [_row(name, field) for name, field in TenantShare.model_fields.items()]
    return "\n".join(lines) + "\n"


_TABLE_HEAD = ("| setting | default | allowed | |", "| --- | --- | --- | --- |")


def _row(name: str, field: FieldInfo) -> str:
    cells = (f"`{name}`", _default(name, field), allowed_values(field), field.description or "")
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _default(name: str, field: FieldInfo) -> str:
    if name == "state_dir":
        return _STATE_DIR  # not this machine's
    value = field.get_default(call_default_factory=True)
    match value:
        case None | () | {}:
            return ""
        case bool():
            return str(value).lower()
        case tuple():
            return ", ".join(str(item) for item in value)
        case Path():
            return str(value)
        case _:
            return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    print(settings_page(), end="")
