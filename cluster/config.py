"""ClusterConfig: everything an operator can set, and the only reader of environment variables and config files.

Strength rises: default < YAML file < environment (WATCHWORD_<FIELD>) < flag. Unknown names are refused, because a
mistyped isolation setting that is silently ignored is worse than a server that does not start.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.api.errors import InvalidRequestError
from cluster.config_fields import explain
from cluster.config_sources import read_environment, read_file

FIRST_AUTO_SEQS = 4  # where max_num_seqs 'auto' begins
ShareWord = Literal["none", "user", "template", "variables"]


def default_state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "watchword"


class TenantShare(BaseModel):
    """What one tenant gets while others want it too, and at most. None: as for everybody."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: float = Field(1.0, ge=0.001, le=1000, description="turns in the queue beside tenants of weight 1")
    requests_per_min: float | None = Field(None, ge=0, description="in place of tenant_requests_per_min; 0: no limit")
    tokens_per_min: float | None = Field(None, ge=0, description="in place of tenant_tokens_per_min; 0: no limit")
    share: ShareWord | None = Field(None, description="in place of default_share")


class ClusterConfig(BaseModel):
    """Validated on construction; travels to every actor. Holds paths of secrets, never secrets."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # What is served
    model: str = Field("smollm2", description="'smollm2' (installed weights), a model folder, a GGUF file or a hub id")
    served_model_name: str | None = Field(None, description="name in the API; default: derived from the model")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="of weights and KV cache; 'auto': bfloat16 where the processor multiplies it, else float32"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where workers compute; 'auto': on GPUs if there is one for each"
    )
    lora: dict[str, str] = Field(default_factory=dict, description="adapter name -> folder")
    lora_dir: Path | None = Field(
        None, description="operators may load adapters from folders below this one; computes in torch, not in C kernels"
    )

    # Where it listens
    host: str = Field("127.0.0.1", description="address of HTTP and gRPC; a public one needs API keys")
    http_port: int = Field(8000, ge=0, le=65535, description="port of the OpenAI API; 0: any free one")
    grpc_port: int = Field(9000, ge=0, le=65535, description="port of the gRPC API; 0: any free one")
    gateways: int = Field(1, ge=1, le=256, description="gateway replicas")
    worker_host: str = Field(
        "127.0.0.1", description="where workers and the router listen; 'node': their Ray node's address"
    )

    # Who may ask
    keys_file: Path | None = Field(None, description="API keys; default: keys.json in the state folder, if it exists")
    secret_file: Path | None = Field(None, description="cluster secret; default: made in the state folder, mode 0600")
    state_dir: Path = Field(
        default_factory=default_state_dir, description="what outlives a restart: keys, secret, registered templates"
    )
    require_user: bool = Field(False, description="refuse requests whose key and body name no user")
    trusted_proxies: tuple[str, ...] = Field((), description="peer addresses whose identity headers count")
    identity_headers: tuple[str, ...] = Field(
        ("x-openwebui-user-id",), description="headers in which a trusted proxy names the user"
    )
    debug_headers: bool = Field(False, description="show X-Watchword-Worker to everyone, not only to operators")
    tls_cert_file: Path | None = Field(None, description="certificate chain (PEM) of HTTP and gRPC; default: no TLS")
    tls_key_file: Path | None = Field(None, description="key of the certificate (PEM)")

    # How tokens are made
    workers: int = Field(1, ge=1, le=4096, description="worker replicas")
    max_workers: int = Field(0, ge=0, le=4096, description="how many there may be under load; 0: always as many")
    upscale_delay_s: float = Field(30.0, ge=0, description="how long more workers must be needed")
    downscale_delay_s: float = Field(600.0, ge=0, description="how long fewer workers must be enough")
    threads: int = Field(0, ge=0, le=1024, description="CPU threads of one worker; 0: the cores divided by workers")
    block_size: int = Field(16, ge=1, le=256, description="tokens in a KV block")
    kv_blocks: int = Field(0, ge=0, description="KV blocks of one worker; 0: from kv_memory_gib")
    kv_memory_gib: float = Field(
        1.0, gt=0, description="memory of one worker's KV pool; on a GPU, unless given: gpu_memory_fraction"
    )
    gpu_memory_fraction: float = Field(
        0.9, gt=0, lt=1, description="share of what weights and the largest step leave free on a GPU, for KV blocks"
    )
    kv_window_fraction: float = Field(
        0.5, gt=0, le=1, description="share of KV blocks that sliding-window layers have room for at a time; 1: all"
    )
    batch_invariant: bool = Field(True, description="False: a GPU's fastest products; rows may then feel one another")
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] = Field(
        8, description="sequences in a step; 'auto': from 4 up to max_num_seqs_limit, as far as marker pairs stay clean"
    )
    max_num_seqs_limit: int = Field(64, ge=4, le=4096, description="how far max_num_seqs 'auto' may go")
    max_num_batched_tokens: int = Field(512, ge=1, description="token budget of a step")
    max_model_len: int = Field(0, ge=0, description="longest prompt plus output; 0: the model's context")
    batching: Literal["continuous", "static"] = Field(
        "continuous", description="'static': a batch runs to its end before the next starts; for bisection"
    )
    layout: Literal["packed", "padded"] = Field(
        "packed", description="rows of a step end to end, or padded to the longest; for bisection"
    )
    kernel: Literal["auto", "native", "torch"] = Field(
        "auto", description="CPU kernels: our own or torch's; 'auto': our own where they run"
    )
    prefix_caching: bool = Field(True, description="false: no block is ever reused")
    isolation_check: Literal["off", "check", "poison"] = Field(
        "check", description="look at block tables before each step; 'poison' also overwrites stale memory"
    )
    verify_checksums: float = Field(
        0.0, ge=0, le=1, description="share of shared blocks with a checksum, verified on hit"
    )
    user_idle_timeout_s: float = Field(3600.0, gt=0, description="a user's blocks unused for so long are dropped")
    session_idle_timeout_s: float = Field(1800.0, gt=0, description="a session's blocks unused for so long are dropped")

    # Who shares what
    templates_dir: Path | None = Field(None, description="prompt templates (YAML front matter + Jinja2)")
    default_share: ShareWord = Field(
        "variables",
        description="how far a tenant's blocks are shared at most, unless tenants.NAME.share says otherwise",
    )

    # Is anything leaking?
    sentinel_period_s: float = Field(60.0, ge=0, description="marker pairs through each worker so often; 0: never")
    planted_fault: str | None = Field(
        None, description="a fault for tests, NAME or NAME@RANK; refused without its gate"
    )

    # Which worker
    redis_url_file: Path | None = Field(None, description="file with the Redis URL, password included")
    redis_url: str | None = Field(None, description="Redis URL; default: an embedded server of our own")
    routing_policy: Literal["watchword", "round_robin", "power_of_two", "least_tokens", "random"] = Field(
        "watchword", description="which worker answers; all but 'watchword' are blind to what workers have cached"
    )

    # Who gets how much
    max_queue: int = Field(256, ge=0, description="requests that may wait for a worker; beyond it 503")
    tenant_requests_per_min: float = Field(0.0, ge=0, description="of each tenant; beyond it 429; 0: no limit")
    tenant_tokens_per_min: float = Field(0.0, ge=0, description="of each tenant; beyond it 429; 0: no limit")
    tenants: dict[str, TenantShare] = Field(
        default_factory=dict, description="by name: weight, requests_per_min, tokens_per_min, share; others as above"
    )

    # For how long
    body_timeout_s: float = Field(60.0, gt=0, description="a request's body must have come after so long, else 408")
    request_timeout_s: float = Field(600.0, gt=0, description="longest life of one request")
    drain_timeout_s: float = Field(30.0, ge=0, description="how long running streams may go on at shutdown")
    drain_settle_s: float | None = Field(
        None, ge=0, le=600, description="how long /ready says no before the gateway stops; default 5, on loopback 0"
    )
    drain_file: Path | None = Field(
        None, description="while this file is there, made after the start, gateway and worker say that they drain"
    )

    @model_validator(mode="after")
    def _check(self) -> ClusterConfig:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file are needed together")
        if self.max_num_seqs == "auto" and self.sentinel_period_s == 0:
            raise ValueError("max_num_seqs 'auto' needs the sentinel: sentinel_period_s must be above 0")
        if self.redis_url is not None and self.redis_url_file is not None:
            raise ValueError("redis_url and redis_url_file exclude each other")
        if 0 < self.max_workers < self.workers:
            raise ValueError(f"max_workers is {self.max_workers}, fewer than workers, which is {self.workers}")
        return self

    @property
    def most_workers(self) -> int:
        return max(self.workers, self.max_workers)

    @property
    def largest_batch(self) -> int:
        """Sequences that a step may ever hold."""
        return self.max_num_seqs_limit if self.max_num_seqs == "auto" else self.max_num_seqs

    @property
    def model_spec(self) -> str | None:
        """None stands for the weights that come with the installation."""
        return None if self.model == "smollm2" else self.model

    @property
    def index_namespace(self) -> str:
        return "watchword"

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def settle_s(self) -> float:
        """Nobody balances over a loopback address."""
        if self.drain_settle_s is not None:
            return self.drain_settle_s
        return 0.0 if self.is_loopback else 5.0

    @property
    def keys_path(self) -> Path:
        return self.keys_file or self.state_dir / "keys.json"

    @property
    def secret_path(self) -> Path:
        return self.secret_file or self.state_dir / "cluster.api.secret"


def load_config(
    flags: Mapping[str, Any], *, config_file: Path | None = None, environ: Mapping[str, str] | None = None
) -> ClusterConfig:
    """Merges file, environment and flags (None = not given). Raises InvalidRequestError naming the field and value."""
    environ = os.environ if environ is None else environ
    merged: dict[str, Any] = {}
    if config_file is not None:
        merged.update(read_file(config_file))
    merged.update(read_environment(environ, ClusterConfig.model_fields))
    merged.update({name: value for name, value in flags.items() if value is not None})
    try:
        return ClusterConfig(**merged)
    except ValidationError as error:
        raise InvalidRequestError(explain(error, ClusterConfig)) from None
