"""The composition root of the application: which deployments, with which settings and resources."""

from __future__ import annotations

import os
import time
from typing import Any, Literal

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from cluster.api.errors import InvalidRequestError
from cluster.config import FIRST_AUTO_SEQS, ClusterConfig, load_config
from cluster.gateway import Gateway
from router.actor import ROUTER_NAMESPACE, router_name
from workers.actor import WorkerReplica, WorkerSettings
from workers.config import Batching, EngineConfig, IsolationCheck, Layout
from workers.model_source import ModelSourceError, resolve_model
from workers.planted import PlantedFault
from workers.runner_config import RunnerConfig

APP_NAME = "watchword"
_FAULT_FACTORY = "cluster.experiment.faults.live:engine_parts"
# Serve asks every 2 s; a process that is gone is noticed at once, one that hangs after the time-out.
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 30.0


def build(args: dict[str, Any]) -> serve.Application:
    """Entry point of Serve config files: `import_path: cluster.app:build`, settings under `args`."""
    return build_app(load_config(args))


def build_app(config: ClusterConfig) -> serve.Application:
    """The gateway in front, the workers behind it."""
    worker = _worker_deployment(config).bind(worker_settings(config))
    return _gateway_deployment(config).bind(config, APP_NAME, time.time(), worker)


def model_name(config: ClusterConfig) -> str:
    """The name under which the model is served. Raises InvalidRequestError when there is no such model."""
    try:
        return config.served_model_name or resolve_model(config.model_spec).name
    except ModelSourceError as error:
        raise InvalidRequestError(str(error), param="model") from None


def worker_settings(config: ClusterConfig) -> WorkerSettings:
    """What a worker replica is told; paths of secrets, never secrets."""
    return WorkerSettings(
        model=model_name(config),
        engine=_engine_config(config),
        runner=_runner_config(config),
        secret_file=config.secret_path,
        channel_host=config.worker_host,
        router_name=router_name(APP_NAME),
        router_namespace=ROUTER_NAMESPACE,
        redis_url_file=config.redis_url_file,
        index_namespace=config.index_namespace,
        drain_timeout_s=config.drain_timeout_s,
        drain_file=config.drain_file,
        quarantine_dir=config.state_dir / "quarantine",
        planted=planted_fault(config.planted_fault),
        lora_dir=config.lora_dir,
        first_max_num_seqs=FIRST_AUTO_SEQS if config.max_num_seqs == "auto" else None,
    )


def planted_fault(spec: str | None) -> PlantedFault | None:
    """NAME, or NAME@RANK for one replica alone. Raises PermissionDeniedError while the gate is shut, here and there."""
    if spec is None:
        return None
    from cluster.experiment.faults.live import engine_parts  # the whole experiment: not for every server

    name, at, rank = spec.partition("@")
    engine_parts(name)  # refuses while it can still be told to a person
    return PlantedFault(_FAULT_FACTORY, name, int(rank) if at else None)


def _worker_deployment(config: ClusterConfig) -> serve.Deployment:
    threads = num_threads(config)
    return serve.deployment(
        WorkerReplica,
        name="Worker",
        **_replicas(config),
        max_ongoing_requests=64,  # control calls only: tokens do not pass through Serve
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=config.drain_timeout_s + 10,
        ray_actor_options={
            "num_cpus": 1,
            "num_gpus": 1 if worker_device(config) == "cuda" else 0,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(threads)}},
        },
    )


def _replicas(config: ClusterConfig) -> dict[str, Any]:
    if not config.max_workers:
        return {"num_replicas": config.workers}
    scaling = AutoscalingConfig(
        min_replicas=config.workers,
        max_replicas=config.max_workers,
        upscale_delay_s=config.upscale_delay_s,
        downscale_delay_s=config.downscale_delay_s,
        policy=AutoscalingPolicy(policy_function="cluster.autoscaling:workers_needed"),
    )
    return {"autoscaling_config": scaling}


def _gateway_deployment(config: ClusterConfig) -> serve.Deployment:
    return serve.deployment(
        Gateway,
        name="Gateway",
        num_replicas=config.gateways,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=config.settle_s + config.drain_timeout_s + 10,
        ray_actor_options={"num_cpus": 0.5},
    )


def worker_device(config: ClusterConfig) -> Literal["cpu", "cuda"]:
    """Where workers compute. `auto` is a GPU for each worker, if the Ray cluster has that many."""
    if config.device != "auto":
        return config.device
    num_gpus = ray.cluster_resources().get("GPU", 0) if ray.is_initialized() else 0
    return "cuda" if num_gpus >= config.most_workers else "cpu"


def num_threads(config: ClusterConfig) -> int:
    """Threads of one worker: its share of the cores unless told otherwise. Part of the numerics, so never changed while
    workers come and go."""
    return config.threads or max(1, (os.cpu_count() or 1) // config.most_workers)


def _engine_config(config: ClusterConfig) -> EngineConfig:
    # The pool's size and the model's context are the runner's to say: the worker fills them in.
    return EngineConfig(
        num_blocks=1,
        max_model_len=config.max_model_len or 1 << 30,
        block_size=config.block_size,
        max_num_seqs=config.largest_batch,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.largest_batch),
        batching=Batching(config.batching),
        layout=Layout(config.layout),
        prefix_caching=config.prefix_caching,
        isolation_check=IsolationCheck(config.isolation_check),
        checksum_blocks=config.verify_checksums,
        user_idle_timeout_s=config.user_idle_timeout_s,
        session_idle_timeout_s=config.session_idle_timeout_s,
    )


def _runner_config(config: ClusterConfig) -> RunnerConfig:
    return RunnerConfig(
        model=config.model_spec,
        device=worker_device(config),
        dtype=config.dtype,
        block_size=config.block_size,
        num_blocks=config.kv_blocks or None,
        kv_cache_bytes=None if config.kv_blocks else int(config.kv_memory_gib * (1 << 30)),
        gpu_memory_fraction=None if "kv_memory_gib" in config.model_fields_set else config.gpu_memory_fraction,
        window_fraction=config.kv_window_fraction,
        batch_invariant=config.batch_invariant,
        max_model_len=config.max_model_len or None,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.largest_batch),
        max_num_seqs=config.largest_batch,
        adapters=tuple(config.lora.items()),
        may_load_adapters=config.lora_dir is not None,
        threads=num_threads(config),
        kernel=config.kernel,
        layout=config.layout,
    )
