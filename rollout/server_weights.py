"""The routes by which a trainer sends weights, those of vLLM 0.26 (vllm/entrypoints/serve/dev/rlhf)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, model_validator

from moebius.rollout.errors import BadInput
from moebius.rollout.transports import trainer

if TYPE_CHECKING:
    from moebius.rollout.service import RolloutService


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class InitInfo(_Body):
    """Where the trainer is, and which members the ranks become."""

    master_address: str = Field(min_length=1)
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(1, ge=1)
    world_size: int = Field(ge=2)
    packed: bool | None = None


class InitBody(_Body):
    """Body of /init_weight_transfer_engine."""

    init_info: InitInfo


class StartBody(_Body):
    """Body of /start_weight_update."""

    version: int | None = Field(None, ge=0, description="Policy version of the new weights; None: one more.")
    is_checkpoint_format: Literal[True] = Field(True, description="Names and shapes are always those of checkpoints.")


class UpdateInfo(_Body):
    """What the trainer is about to broadcast."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[Annotated[int, Field(ge=0)]]]
    packed: bool = False
    packed_buffer_size_bytes: int = Field(trainer.BUFFER_BYTES, ge=1)
    packed_num_buffers: int = Field(2, ge=1, description="Of no consequence here.")

    @model_validator(mode="after")
    def _one_per_name(self) -> UpdateInfo:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError(
                f"names, dtype_names and shapes must have one entry per tensor, got {len(self.names)}, "
                f"{len(self.dtype_names)} and {len(self.shapes)}"
            )
        return self


class UpdateBody(_Body):
    """Body of /update_weights."""

    update_info: UpdateInfo


def weight_routes(app: FastAPI, service: RolloutService) -> None:
    """Add the routes. A start, any number of updates and a finish are one update, all or nothing."""
    ranks = service.group.config.total_ranks
    backend: Literal["nccl", "gloo"] = "nccl" if service.group.device == "cuda" else "gloo"
    joined = False

    @app.post("/init_weight_transfer_engine")
    async def init_weight_transfer_engine(body: InitBody) -> dict[str, str]:
        """Have the ranks join the trainer's group; the trainer must do so at the same time."""
        nonlocal joined
        info = body.init_info
        if info.rank_offset + ranks > info.world_size:
            raise BadInput(
                f"init_info: {ranks} ranks from {info.rank_offset} on do not fit into world_size={info.world_size}; "
                f"make it {info.rank_offset + ranks} (see /get_world_size)"
            )
        members = range(info.rank_offset, info.rank_offset + ranks)
        where = (backend, info.master_address, info.master_port)
        await service.on_ranks(trainer.JOIN, [(*where, member, info.world_size) for member in members])
        joined = True
        return {"message": "Weight transfer initialized"}

    @app.post("/start_weight_update")
    async def start_weight_update(body: StartBody | None = None) -> dict[str, str]:
        """Begin an update; one that is open is given up. Requests wait until /finish_weight_update."""
        version = None if body is None else body.version
        await service.begin_update(service.group.policy_version + 1 if version is None else version)
        return {"message": "Weight update started"}

    @app.post("/update_weights")
    async def update_weights(body: UpdateBody) -> dict[str, str]:
        """Receive the announced tensors, which the trainer must broadcast at the same time."""
        if not joined:
            raise BadInput("no trainer is connected: call /init_weight_transfer_engine first")
        info = body.update_info
        call = (backend, info.names, info.dtype_names, info.shapes, info.packed, info.packed_buffer_size_bytes)
        await service.pull_tensors(trainer.RECEIVE, [call] * ranks)
        return {"message": "Weights updated"}

    @app.post("/finish_weight_update")
    async def finish_weight_update() -> dict[str, Any]:
        """The new weights serve from now on."""
        report = await service.commit_update()
        return {"message": "Weight update finished", "version": report.version, "seconds": report.seconds}

    @app.post("/drop_weight_update")
    async def drop_weight_update() -> dict[str, str]:
        """Give an open update up. Unless updates are staged, a full one must follow."""
        await service.drop_update()
        return {"message": "Weight update dropped"}
