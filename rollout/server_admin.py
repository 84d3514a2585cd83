"""Routes that trainers and operators use, named and shaped as those of vLLM 0.26 (vllm/entrypoints/serve)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from moebius.rollout.server_errors import error_body
from moebius.rollout.server_metrics import Metrics
from moebius.rollout.service_types import Mode

if TYPE_CHECKING:
    from moebius.rollout.service import RolloutService

PauseMode = Literal["abort", "wait", "keep"]
_MODES: dict[PauseMode, Mode] = {"abort": "abort", "wait": "finish", "keep": "park"}
Tag = Literal["weights", "kv_cache"]


class AbortBody(BaseModel):
    """Body of /abort_requests."""

    model_config = ConfigDict(extra="forbid")

    request_ids: list[str] | None = Field(None, description="Ids of answers; none at all: every request.")


def admin_routes(app: FastAPI, service: RolloutService, metrics: Metrics) -> None:
    """Add the routes that do not sample."""
    _state_routes(app, service, metrics)
    _pause_routes(app, service)


def _state_routes(app: FastAPI, service: RolloutService, metrics: Metrics) -> None:
    config = service.group.config
    unavailable: dict[int | str, dict[str, Any]] = {503: {"description": "Nothing can be sampled any more."}}

    @app.get("/health", response_model=None, responses=unavailable)
    @app.get("/ping", response_model=None, responses=unavailable)
    async def health() -> Response:
        """200 while requests are served or wait for something."""
        stats = service.stats()
        if stats.dead is not None:
            return JSONResponse(error_body(stats.dead, 503), 503)
        return JSONResponse({"status": "ok" if stats.blocked is None else stats.blocked})

    @app.get("/metrics", response_model=None)
    async def page() -> Response:
        """For Prometheus."""
        from prometheus_client import CONTENT_TYPE_LATEST

        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Version of this package."""
        from importlib import metadata

        return {"version": metadata.version("moebius-rollout")}

    @app.get("/get_world_size")
    async def get_world_size(include_dp: bool = True) -> dict[str, int]:
        """Ranks of all replicas; all take part in weight transfer."""
        return {"world_size": config.total_ranks}

    @app.get("/server_info")
    async def server_info(config_format: Literal["text", "json"] = "text") -> dict[str, Any]:
        """The configuration: under vllm_config what trainers look for, under moebius all of it."""
        engine = config.engine
        like_vllm: dict[str, Any] = {
            "model_config": {
                "model": engine.model,
                "dtype": engine.dtype,
                "max_model_len": service.group.max_model_len,
                "logprobs_mode": engine.logprobs_mode,
            },
            "parallel_config": {"world_size": config.total_ranks, "data_parallel_size": 1},
            "weight_transfer_config": {"backend": "nccl" if service.group.device == "cuda" else "gloo"},
            "lora_config": None,
        }
        told = like_vllm if config_format == "json" else str(like_vllm)
        return {"vllm_config": told, "moebius": config.model_dump(mode="json")}


def _pause_routes(app: FastAPI, service: RolloutService) -> None:
    @app.post("/pause")
    async def pause(mode: PauseMode = "abort", clear_cache: bool = True) -> dict[str, str]:
        """Sample nothing until /resume. What is live is aborted, waited for, or kept; what comes meanwhile waits."""
        await service.pause(_MODES[mode])
        if clear_cache and mode != "keep":
            await service.clear_kv_cache()
        return {"status": "paused"}

    @app.post("/resume")
    async def resume() -> dict[str, str]:
        """Go on after /pause."""
        await service.resume()
        return {"status": "resumed"}

    @app.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        """Whether the service is paused."""
        return {"is_paused": service.stats().paused}

    @app.post("/abort_requests")
    async def abort_requests(body: AbortBody) -> dict[str, Any]:
        """End requests with the tokens they have."""
        wanted = body.request_ids
        # A request with several prompts is several here, named after it.
        found = None
        if wanted:
            found = [name for name in service.requests() if name in wanted or name.rpartition("-")[0] in wanted]
        return {"status": "aborted", "aborted": await service.abort(found)}

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_running_requests: bool = False, reset_external: bool = False) -> dict[str, bool]:
        """Forget cached prefixes, also when requests are live, which go on afterwards."""
        await service.clear_kv_cache()
        return {"success": True}

    @app.post("/sleep", response_model=None)
    async def sleep(
        level: Annotated[int, Query(ge=1, le=2)] = 1,
        mode: PauseMode = "abort",
        tags: Annotated[list[Tag] | None, Query()] = None,
    ) -> Response:
        """Give memory back until /wake_up. Level 1 keeps the weights in host memory, level 2 does not keep them."""
        await service.sleep(tags or None, keep_weights=level == 1, mode=_MODES[mode])
        return Response(status_code=200)

    @app.post("/wake_up", response_model=None)
    async def wake_up(tags: Annotated[list[Tag] | None, Query()] = None) -> Response:
        """Take the memory again; no tags: all of it."""
        await service.wake_up(tags or None)
        return Response(status_code=200)

    @app.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        """Whether some memory is given back."""
        return {"is_sleeping": bool(service.stats().asleep)}
