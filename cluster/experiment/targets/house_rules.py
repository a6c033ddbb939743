"""One registered prompt template for the experiment, so that blocks of wider scopes are shared as well.

Two spellings of a region render to the same tokens and are different values: sharing between them would be a fault.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from cache_service.block_key import BlockKeyer
from cluster.api.ids import TenantId, new_request_id
from cluster.api.prompt import PromptRef
from cluster.api.request import Request
from cluster.api.sampling import SamplingParams
from cluster.prompts.catalog import TemplateCatalog
from cluster.prompts.chat_encoder import ChatEncoder
from cluster.prompts.sandbox import SandboxLimits, TemplateSandbox
from cluster.prompts.store import TemplateStore
from cluster.prompts.tokenizer import Tokenizer
from workers.engine import LLMEngine

TEMPLATE_ID = "house-rules"
TENANT = TenantId("experiment")
REGIONS = ("north", "North", "south")
_BODY = {
    "messages": [
        {
            "role": "system",
            "content": "You work for the branch in the {{ region | lower }}. Be brief and friendly. Never promise "
            "a date. Answer in the language of the question. Say so when you do not know.",
        }
    ],
    "variables": {"region": {"type": "string", "share": "shared"}},
}


def prompt_ref(region: str) -> PromptRef:
    return PromptRef(TEMPLATE_ID, variables={"region": region})


def catalog_with_template(tokenizer: Tokenizer, keyer: BlockKeyer) -> TemplateCatalog:
    """Holds one template, registered for the experiment's tenant."""
    store = TemplateStore(Path(_folder().name), lambda tenant: keyer.identity("tenant", tenant))
    catalog = TemplateCatalog(store, ChatEncoder(tokenizer), keyer, sandbox=_sandbox())
    catalog.put(TENANT, TEMPLATE_ID, _BODY)
    return catalog


def warm_up(engine: LLMEngine, catalog: TemplateCatalog) -> None:
    """Runs the template's own blocks through the engine: only a warm-up may publish them."""
    for prompt in catalog.all_warm_ups():
        nobody = prompt.spans[-1].fields
        assert nobody.tenant is not None
        assert nobody.user is not None
        request = Request(
            request_id=new_request_id(),
            model="warm-up",
            prompt_token_ids=prompt.token_ids,
            sampling=SamplingParams(max_tokens=1, seed=0, temperature=0.0),
            spans=prompt.spans,
            block_keys=catalog.keyer.prompt_keys(prompt.token_ids, prompt.spans),
            tenant_hash=nobody.tenant,
            user_hash=nobody.user,
        )
        engine.add_request(request, is_warm_up=True)
    while engine.has_work:
        engine.step()


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Lives as long as the process: a store may be read again at any time."""
    return tempfile.TemporaryDirectory(prefix="watchword-experiment-")


@cache
def _sandbox() -> TemplateSandbox:
    """Its processes take longer to start than a round to run, so all engines of a run share them."""
    return TemplateSandbox(SandboxLimits(num_processes=1, cpu_s=10.0, wait_s=30.0))
