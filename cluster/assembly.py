"""The composition root of a gateway: which parts, in which order, and how they are taken down again."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from importlib.metadata import version

from starlette.types import ASGIApp

from cache_service.block_key import BlockKeyer, ModelIdentity, identity
from cluster.adapters import AdapterManager, AnnouncedAdapters
from cluster.api.channel import PurgeUser
from cluster.api.drain_notice import DrainNotice
from cluster.api.secret import channel_token, load_or_create_secret
from cluster.api.worker_state import WorkerInfo
from cluster.auth.authenticator import Authenticator
from cluster.auth.proxy import IdentityHeaders
from cluster.backend import ModelInfo
from cluster.cluster_metrics import ClusterCollector
from cluster.config import FIRST_AUTO_SEQS, ClusterConfig, TenantShare
from cluster.control_client import ControlClient
from cluster.dispatch import Dispatcher, WorkerPool
from cluster.grpc_server import GrpcServer, GrpcServerConfig, build_grpc_server
from cluster.http.adapter_routes import AdapterRoutes
from cluster.http.cache_routes import CacheRoutes
from cluster.http.config import HttpConfig
from cluster.http.inspection_routes import InspectionRoutes
from cluster.http.prompt_routes import PromptRoutes
from cluster.http_app import build_http_app
from cluster.inspection import Inspector
from cluster.metrics import GatewayMetrics
from cluster.prompts.builder import PromptBuilder
from cluster.prompts.catalog import PinBudget, TemplateCatalog
from cluster.prompts.chat_encoder import ChatEncoder
from cluster.prompts.policy import Share, SharingPolicy
from cluster.prompts.store import TemplateStore
from cluster.prompts.tokenizer import Tokenizer, load_tokenizer
from cluster.remote_router import RemoteRouter
from cluster.sentinel.governor import BatchGovernor
from cluster.sentinel.metrics import SentinelMetrics
from cluster.sentinel.probe import MarkerProbe
from cluster.sentinel.sentinel import Sentinel
from cluster.serving.core import ServedModel, ServingCore
from cluster.serving.token_table import TokenTable
from cluster.template_warmer import TemplateWarmer
from cluster.worker_client import WorkerClient
from cluster.worker_health import WorkerHealth
from router.actor import ensure_router
from router.config import AdmissionConfig, RouterConfig, TenantLimits
from router.fallback import FallbackConfig, FallbackRouter
from router.settings import RouterSettings
from workers.model_source import resolve_model


@dataclass
class GatewayParts:
    """What a gateway serves and how to end it."""

    http_app: ASGIApp
    grpc_server: GrpcServer
    router: RemoteRouter
    pool: WorkerPool
    drain_notice: DrainNotice
    tasks: tuple[asyncio.Task[None], ...]

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await self.pool.close()
        await self.router.stop()


async def build_gateway_parts(config: ClusterConfig, app_name: str, deployed_unix_s: float) -> GatewayParts:
    """Waits for the first worker: its weights, dtype and KV layout are part of every block key.

    `deployed_unix_s` is when the application was deployed with this configuration.
    """
    secret = load_or_create_secret(config.secret_path)
    token = channel_token(secret)
    settings = router_settings(config, secret, deployed_unix_s)
    await ensure_router(app_name, settings)
    fallback = FallbackRouter(FallbackConfig(num_gateways=config.gateways), settings)
    router = RemoteRouter(app_name, token, fallback=fallback)
    router.start()
    worker = await router.first_worker()
    pool = WorkerPool(lambda address, epoch: WorkerClient(address, token, epoch))
    metrics = _metrics(router)
    keyer = BlockKeyer(secret, _identity_of(worker))
    tokenizer = await asyncio.to_thread(_load_tokenizer, config)
    catalog = _template_catalog(config, keyer, tokenizer, worker)
    prompts = PromptBuilder(tokenizer, catalog=catalog)
    announced = AnnouncedAdapters(lambda: router.live_workers)
    model = _served_model(config, worker, keyer, prompts, tokenizer, announced)
    core = ServingCore(
        [model],
        Dispatcher(router, pool),
        require_user=config.require_user,
        observer=metrics.generation,
    )
    control = ControlClient(router, token)
    adapters = AdapterManager(control, config.state_dir / "adapters.json", worker.model, announced)
    if config.lora_dir is not None:
        await adapters.sync()
    warmer = TemplateWarmer(catalog, keyer, control, worker.model)
    await warmer.sync()
    sentinel = _sentinel(config, MarkerProbe(model, pool, control), control, metrics, router)
    authenticator = Authenticator(config.keys_path, allow_anonymous=config.is_loopback)
    inspector = Inspector(router, control, keyer, authenticator, sentinel)

    drain_notice = DrainNotice(config.drain_file)

    def is_draining() -> bool:
        return drain_notice.is_given

    async def count_workers() -> int:
        return router.num_workers

    http_config = _http_config(config)
    http_app = build_http_app(
        core,
        authenticator,
        metrics,
        http_config,
        count_workers=count_workers,
        count_quarantined=WorkerHealth(router.stats).count_quarantined,
        is_draining=is_draining,
        extra_routes=[
            *PromptRoutes(catalog, prompts.watch, http_config, on_change=warmer.sync).routes(),
            *_cache_routes(core, control).routes(),
            *InspectionRoutes(inspector).routes(),
            *AdapterRoutes(adapters, http_config).routes(),
        ],
    )
    identity_headers = IdentityHeaders(config.trusted_proxies, config.identity_headers)
    grpc_config = _grpc_config(config, authenticator)
    grpc_server = build_grpc_server(core, authenticator, grpc_config, identity_headers, is_draining)
    going_on = [warmer.run()]
    if config.lora_dir is not None:
        going_on.append(adapters.run())
    if sentinel is not None:
        going_on.append(sentinel.run())
    tasks = tuple(asyncio.create_task(one) for one in going_on)
    return GatewayParts(http_app, grpc_server, router, pool, drain_notice, tasks)


def _cache_routes(core: ServingCore, control: ControlClient) -> CacheRoutes:
    async def purge_user(user_hash: bytes) -> int:
        return await control.call_all(PurgeUser(user_hash))

    return CacheRoutes(core, purge_user)


def _sentinel(
    config: ClusterConfig, probe: MarkerProbe, control: ControlClient, metrics: GatewayMetrics, router: RemoteRouter
) -> Sentinel | None:
    """Every gateway has one; together they probe each worker once a period."""
    if config.sentinel_period_s == 0:
        return None
    governor = None
    if config.max_num_seqs == "auto":
        governor = BatchGovernor(probe, control, FIRST_AUTO_SEQS, config.max_num_seqs_limit)
    period_s = config.sentinel_period_s * config.gateways
    return Sentinel(probe, control, SentinelMetrics(metrics.registry), lambda: router.live_workers, period_s, governor)


def _identity_of(worker: WorkerInfo) -> ModelIdentity:
    return ModelIdentity(
        worker.source_model, worker.weights_digest, worker.dtype, worker.kv_layout, worker.block_size_tokens
    )


def _load_tokenizer(config: ClusterConfig) -> Tokenizer:
    return load_tokenizer(resolve_model(config.model_spec).path)


def _template_catalog(
    config: ClusterConfig, keyer: BlockKeyer, tokenizer: Tokenizer, worker: WorkerInfo
) -> TemplateCatalog:
    """A quarter of each worker's pool may be pinned, and half of that by one tenant."""
    budget = PinBudget(worker.num_blocks // 4, worker.num_blocks // 8)
    store = TemplateStore(config.state_dir / "prompts", lambda tenant: keyer.identity("tenant", tenant))
    catalog = TemplateCatalog(store, ChatEncoder(tokenizer), keyer, budget=budget, policy=sharing_policy(config, keyer))
    catalog.load_folder(config.templates_dir)
    return catalog


def sharing_policy(config: ClusterConfig, keyer: BlockKeyer) -> SharingPolicy:
    """The operator's word for each tenant, by the tenant's hash."""
    shares = {name: tenant.share for name, tenant in config.tenants.items() if tenant.share is not None}
    tenants: dict[bytes, Share] = {keyer.identity("tenant", name): Share(share) for name, share in shares.items()}
    return SharingPolicy(Share(config.default_share), tenants)


def _metrics(router: RemoteRouter) -> GatewayMetrics:
    metrics, collector = GatewayMetrics(), ClusterCollector()
    metrics.registry.register(collector)

    async def refresh() -> None:
        collector.stats = await router.stats()
        collector.num_local_routes = router.num_local_routes

    metrics.refresh = refresh
    return metrics


def router_settings(config: ClusterConfig, secret: bytes, deployed_unix_s: float) -> RouterSettings:
    """Tenants are known to the router by their keyed hash, as in every query."""
    limits = TenantLimits(
        requests_per_min=config.tenant_requests_per_min or None,
        tokens_per_min=config.tenant_tokens_per_min or None,
    )
    admission = AdmissionConfig(max_queued_requests=config.max_queue, default_limits=limits)
    return RouterSettings(
        config=RouterConfig(admission=admission),
        policy=config.routing_policy,
        redis_url_file=config.redis_url_file,
        index_namespace=config.index_namespace,
        secret_file=config.secret_path,
        channel_host=config.worker_host,
        tenant_limits=tuple(
            (identity(secret, "tenant", tenant), _limits_of(share, limits))
            for tenant, share in sorted(config.tenants.items())
        ),
        deployed_unix_s=deployed_unix_s,
    )


def _limits_of(share: TenantShare, default: TenantLimits) -> TenantLimits:
    requests, tokens = share.requests_per_min, share.tokens_per_min
    return TenantLimits(
        weight=share.weight,
        requests_per_min=default.requests_per_min if requests is None else requests or None,
        tokens_per_min=default.tokens_per_min if tokens is None else tokens or None,
    )


def _http_config(config: ClusterConfig) -> HttpConfig:
    return HttpConfig(
        version=version("watchword"),
        request_timeout_s=config.request_timeout_s,
        body_timeout_s=config.body_timeout_s,
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


def _served_model(
    config: ClusterConfig,
    worker: WorkerInfo,
    keyer: BlockKeyer,
    prompts: PromptBuilder,
    tokenizer: Tokenizer,
    adapters: AnnouncedAdapters,
) -> ServedModel:
    info = ModelInfo(
        name=config.served_model_name or worker.model,
        max_model_len=worker.max_model_len,
        vocab_size=worker.vocab_size,
        eos_token_ids=worker.eos_token_ids,
    )
    return ServedModel(
        info=info,
        prompts=prompts,
        tokens=TokenTable.from_tokenizer(tokenizer.backend),
        keyer=keyer,
        adapter_digests=adapters,
        created_unix_s=int(time.time()),
    )
