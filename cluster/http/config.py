"""HttpConfig: what an operator can set of the HTTP side."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """`debug_headers` shows the serving worker to everyone, not only to operators."""

    version: str = "0"
    max_body_bytes: int = 10_000_000
    max_prompts: int = 128
    body_timeout_s: float = 60.0  # from a request's head to the last byte of its body
    request_timeout_s: float = 600.0
    debug_headers: bool = False
    trusted_proxies: tuple[str, ...] = ()
    identity_headers: tuple[str, ...] = ("x-openwebui-user-id",)

    def __post_init__(self) -> None:
        if not 1024 <= self.max_body_bytes <= 1 << 30:
            raise ValueError(f"max_body_bytes is {self.max_body_bytes}, must be in [1024, {1 << 30}]")
        if not 1 <= self.max_prompts <= 4096:
            raise ValueError(f"max_prompts is {self.max_prompts}, must be in [1, 4096]")
        for name in ("body_timeout_s", "request_timeout_s"):
            timeout_s = getattr(self, name)
            if not timeout_s > 0:
                raise ValueError(f"{name} is {timeout_s}, must be above 0")
