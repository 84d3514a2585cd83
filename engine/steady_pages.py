"""Pages for a running request that has room in those it holds: nothing to take, and mostly nothing to cache.

vLLM asks its allocator for every request of every iteration, 3 to 4 us each. Where the answer is "none", as for most
tokens, it is given here; iterations that draft, which have no steady form, ask for all of their requests.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.request import RequestStatus


class SteadyPages:
    """Takes the place of `allocate_slots` of a manager with one kind of pages, those of full attention."""

    def __init__(self, manager: Any) -> None:
        self._manager, self._allocate = manager, manager.allocate_slots
        (self._pages,) = manager.coordinator.single_type_managers
        self._page, self._longest, self._caches = self._pages.block_size, manager.max_model_len, manager.enable_caching
        manager.allocate_slots = self.allocate_slots

    def allocate_slots(self, request: Any, num_new_tokens: int, *others: Any, **named: Any) -> Any:
        """As `KVCacheManager.allocate_slots`."""
        pages, name, known = self._pages, request.request_id, request.num_computed_tokens + num_new_tokens
        if (
            others
            or num_new_tokens < 1
            or request.status is not RequestStatus.RUNNING
            or (named and (len(named) > 1 or named.get("num_lookahead_tokens") != 0))
            or min(known, self._longest) > self._page * len(pages.req_to_blocks.get(name, ()))
            or (self._caches and min(known, request.num_tokens) // self._page > pages.num_cached_block.get(name, 0))
            or name in pages._partial_hit_reqs
        ):
            return self._allocate(request, num_new_tokens, *others, **named)
        return self._manager.empty_kv_cache_blocks
