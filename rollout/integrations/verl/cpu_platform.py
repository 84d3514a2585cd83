"""A verl platform without accelerators, to try the whole loop on a CPU: `VERL_PLATFORM=cpu`. It is slow.

Ray is told of as many logical GPUs as there are ranks (`ray_kwargs.ray_init.num_gpus`), which verl places its workers
by. examples/verl/smoke.sh has everything that is needed.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


class _NoDevice(types.ModuleType):
    """Stands where torch.cuda would: what torch.cpu has is torch.cpu's, everything else does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, _nothing)


def _nothing(*args: Any, **kwargs: Any) -> int:
    return 0


def _device_module() -> types.ModuleType:
    module = _NoDevice("torch_without_device")
    vars(module).update(
        is_available=lambda: False,
        get_device_name=lambda *args: "CPU",
        current_device=lambda: torch.device("cpu"),
        mem_get_info=lambda *args: (1 << 30, 2 << 30),
        set_device=_nothing,
        get_rng_state=lambda *args: torch.get_rng_state(),
        set_rng_state=lambda state, *args: torch.set_rng_state(state),
    )
    return module


def register() -> None:
    """Make the platform known to verl, and let verl's process groups be made without a second backend."""
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import PlatformRegistry

    module = _device_module()

    @PlatformRegistry.register(platform="cpu")
    class PlatformCPU(PlatformBase):
        device_name = property(lambda self: "cpu")
        vendor_name = property(lambda self: "cpu")
        device_module = property(lambda self: module)

        def is_available(self) -> bool:
            return True

        def current_device(self) -> Any:
            return torch.device("cpu")

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None:
            return None

        def synchronize(self, device_index: int | None = None) -> None:
            return None

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings: str) -> None:
            return None

        def empty_cache(self) -> None:
            return None

        def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"

        @contextmanager
        def nvtx_range(self, msg: str) -> Iterator[None]:
            yield

        def profiler_start(self) -> None:
            return None

        def profiler_stop(self) -> None:
            return None

        def ray_resource_name(self) -> str:
            return "GPU"

        def ray_noset_envvars(self) -> list[str]:
            return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

        def is_ipc_supported(self) -> bool:
            return False

        def cudart(self) -> Any:
            return None

    _one_backend_per_device()


def _one_backend_per_device() -> None:
    """verl asks for "cpu:gloo,<device>:<backend>"; on CPU that names cpu twice, which torch refuses."""
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(backend, str):
            backend = ",".join(dict.fromkeys(backend.split(",")))
        return original(backend, *args, **kwargs)

    vars(dist)["init_process_group"] = init_process_group
