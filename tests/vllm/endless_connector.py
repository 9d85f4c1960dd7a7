"""A KV connector that claims prompts which begin with a token, and loads them until their request is aborted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

FIRST_TOKEN = 77


@dataclass
class Ended(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """Requests whose loads end with this step."""

    request_ids: set[str] = field(default_factory=set)


class EndlessConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Nothing is ever written to the blocks of a request."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._loading: set[str] = set()
        self._ended = Ended()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if request.all_token_ids[0] != FIRST_TOKEN:
            return 0, False
        return request.num_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._loading.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Ended:
        ended, self._ended = self._ended, Ended()
        return ended

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        if request.request_id in self._loading:
            self._loading.remove(request.request_id)
            self._ended.request_ids.add(request.request_id)
        return False, None

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, block_ids)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        metadata = self._connector_metadata
        return None, metadata.request_ids or None if isinstance(metadata, Ended) else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...
