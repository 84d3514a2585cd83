"""Names of server actors, by which trainer processes and agent loops find them in their Ray namespace."""

from __future__ import annotations

from typing import Any

PREFIX = "moebius_server_"


def server_name(replica: int, suffix: str = "") -> str:
    """Name of the server of a policy's replica; `suffix` is that of reward models and teachers."""
    return f"{PREFIX}{replica}{suffix}"


def servers() -> list[Any]:
    """Handles of all servers of the policy in this namespace, in the order of their replicas."""
    import ray

    names = [name for name in ray.util.list_named_actors() if name.startswith(PREFIX)]
    numbers = sorted(int(number) for name in names if (number := name.removeprefix(PREFIX)).isdigit())
    return [ray.get_actor(server_name(number)) for number in numbers]
