"""The composition root of a gateway: which parts, in which order, and how they are taken down again."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from importlib.metadata import version

from starlette.types import ASGIApp

from cache_service.block_key import BlockKeyer, ModelIdentity
from cluster.api.secret import channel_token, load_or_create_secret
from cluster.api.worker_state import WorkerInfo
from cluster.auth.authenticator import Authenticator
from cluster.auth.proxy import IdentityHeaders
from cluster.backend import ModelInfo
from cluster.cluster_metrics import ClusterCollector
from cluster.config import ClusterConfig
from cluster.dispatch import Dispatcher, WorkerPool
from cluster.grpc_server import GrpcServer, GrpcServerConfig, build_grpc_server
from cluster.http.config import HttpConfig
from cluster.http_app import build_http_app
from cluster.metrics import GatewayMetrics
from cluster.prompts.builder import PromptBuilder
from cluster.prompts.tokenizer import load_tokenizer
from cluster.remote_router import RemoteRouter
from cluster.serving.core import ServedModel, ServingCore
from cluster.serving.token_table import TokenTable
from cluster.worker_client import WorkerClient
from router.actor import create_router
from router.config import AdmissionConfig, RouterConfig, TenantLimits
from workers.model_source import resolve_model


@dataclass
class GatewayParts:
    """What a gateway serves and how to end it."""

    http_app: ASGIApp
    grpc_server: GrpcServer
    router: RemoteRouter
    pool: WorkerPool

    async def close(self) -> None:
        await self.pool.close()
        await self.router.stop()


async def build_gateway_parts(config: ClusterConfig, app_name: str) -> GatewayParts:
    """Waits for the first worker: its weights, dtype and KV layout are part of every block key."""
    secret = load_or_create_secret(config.secret_path)
    token = channel_token(secret)
    create_router(app_name, router_config(config), config.redis_url_file, config.index_namespace)
    router = RemoteRouter(app_name)
    router.start()
    worker = await router.first_worker()
    pool = WorkerPool(lambda address, epoch: WorkerClient(address, token, epoch))
    metrics = _metrics(router)
    core = ServingCore(
        [await asyncio.to_thread(_served_model, config, secret, worker)],
        Dispatcher(router, pool),
        require_user=config.require_user,
        observer=metrics.generation,
    )
    authenticator = Authenticator(config.keys_path, allow_anonymous=config.is_loopback)

    async def count_workers() -> int:
        return router.num_workers

    http_app = build_http_app(core, authenticator, metrics, _http_config(config), count_workers=count_workers)
    identity_headers = IdentityHeaders(config.trusted_proxies, config.identity_headers)
    grpc_server = build_grpc_server(core, authenticator, _grpc_config(config, authenticator), identity_headers)
    return GatewayParts(http_app, grpc_server, router, pool)


def _metrics(router: RemoteRouter) -> GatewayMetrics:
    metrics, collector = GatewayMetrics(), ClusterCollector()
    metrics.registry.register(collector)

    async def refresh() -> None:
        collector.stats = await router.stats()

    metrics.refresh = refresh
    return metrics


def router_config(config: ClusterConfig) -> RouterConfig:
    limits = TenantLimits(
        requests_per_min=config.tenant_requests_per_min or None,
        tokens_per_min=config.tenant_tokens_per_min or None,
    )
    return RouterConfig(admission=AdmissionConfig(max_queued_requests=config.max_queue, default_limits=limits))


def _http_config(config: ClusterConfig) -> HttpConfig:
    return HttpConfig(
        version=version("watchword"),
        request_timeout_s=config.request_timeout_s,
        debug_headers=config.debug_headers,
        trusted_proxies=config.trusted_proxies,
        identity_headers=config.identity_headers,
    )


def _grpc_config(config: ClusterConfig, authenticator: Authenticator) -> GrpcServerConfig:
    return GrpcServerConfig(
        host=config.host,
        port=config.grpc_port,
        tls_cert_file=config.tls_cert_file,
        tls_key_file=config.tls_key_file,
        is_reflection_on=authenticator.is_open,
        request_timeout_s=config.request_timeout_s,
        debug_metadata=config.debug_headers,
    )


def _served_model(config: ClusterConfig, secret: bytes, worker: WorkerInfo) -> ServedModel:
    identity = ModelIdentity(
        worker.model, worker.weights_digest, worker.dtype, worker.kv_layout, worker.block_size_tokens
    )
    source = resolve_model(config.model_spec)
    tokenizer = load_tokenizer(source.path)
    info = ModelInfo(
        name=config.served_model_name or worker.model,
        max_model_len=worker.max_model_len,
        vocab_size=worker.vocab_size,
        eos_token_ids=worker.eos_token_ids,
        adapters=tuple(name for name, _ in worker.adapters),
    )
    return ServedModel(
        info=info,
        prompts=PromptBuilder(tokenizer),
        tokens=TokenTable.from_tokenizer(tokenizer.backend),
        keyer=BlockKeyer(secret, identity),
        adapter_digests=dict(worker.adapters),
        created_unix_s=int(time.time()),
    )
