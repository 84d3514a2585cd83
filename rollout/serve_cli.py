"""`moebius serve`: a group behind HTTP."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moebius.rollout.errors import BadInput
from moebius.rollout.server_errors import is_loopback

if TYPE_CHECKING:
    from moebius.rollout.config import RolloutConfig

TOKEN_VARIABLE = "MOEBIUS_TOKEN"
GRACE_S = 10  # for connections to end after a signal


def register(app: typer.Typer) -> None:
    """Add the command to `moebius`."""
    app.command()(serve)


def serve(
    config: Annotated[Path, typer.Option(help="YAML file with the settings of the group; see configs/.")],
    host: Annotated[str, typer.Option(help="Address to listen on; any but loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    model_name: Annotated[str | None, typer.Option(help="What clients call the model (default: its folder).")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help=f"File with the token clients must send (default: ${TOKEN_VARIABLE}, or none).")
    ] = None,
    reports: Annotated[Path | None, typer.Option(help="Folder for step reports (default: service.reports).")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting, e.g. engine.policy.threshold=32; repeatable.")
    ] = None,
) -> None:
    """Serve OpenAI's completions API, and vLLM's routes for trainers, until interrupted.

    Unless the configuration says otherwise, the policy is `interactive`: TP when quiet, EP in a burst.
    """
    from moebius.rollout.config import load_config

    token = read_token(token_file)
    check_exposure(host, token)
    settings = for_serving(load_config(config, overrides or []), reports)
    try:
        import uvicorn

        from moebius.rollout.server import make_app
    except ImportError as error:
        raise BadInput(f"moebius serve needs {error.name}: pip install -e '.[serve]'") from error

    from moebius.rollout.output import starting_line
    from moebius.rollout.service import RolloutService
    from moebius.rollout.start import start_group

    typer.echo(starting_line(settings))
    with listen(host, port) as sock, start_group(settings) as group, stopped_by_signals():
        app = make_app(RolloutService(group), model_name=model_name, token=token)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_S))
        where = f"[{host}]" if ":" in host else host
        typer.echo(f"serving on http://{where}:{sock.getsockname()[1]}" + (" (a token is asked for)" if token else ""))
        server.run(sockets=[sock])


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises BadInput when the address cannot be had; found out before ranks are started."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
        )
    except OSError as error:
        raise BadInput(f"--host {host} --port {port}: cannot listen there: {error}; choose another") from error


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """SIGTERM and Ctrl-C end the block in order: the server raises them again when it has ended.

    To be entered after Ray was started, which installs a handler of its own.
    """

    def stop(number: int, frame: object) -> None:
        raise SystemExit(0)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def for_serving(config: RolloutConfig, reports: Path | None = None) -> RolloutConfig:
    """The configuration with what serving changes where nothing was said: the policy, and where reports go."""
    engine, service = config.engine, config.service
    if "policy" not in engine.model_fields_set or "kind" not in engine.policy.model_fields_set:
        engine = engine.model_copy(update={"policy": engine.policy.model_copy(update={"kind": "interactive"})})
    if reports is not None:
        service = service.model_copy(update={"reports": str(reports)})
    return config.model_copy(update={"engine": engine, "service": service})


def read_token(path: Path | None) -> str | None:
    """The token clients must send; None when there is none. Raises BadInput for a file that cannot be read."""
    if path is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--token-file {path}: cannot be read: {error}") from error
    if not token:
        raise BadInput(f"--token-file {path}: it is empty; write the token into it")
    return token


def check_exposure(host: str, token: str | None) -> None:
    """Raises BadInput when others could connect and no token is asked for."""
    if token is None and not is_loopback(host):
        raise BadInput(
            f"--host {host}: anyone who reaches it could use this server; give a token (--token-file, or "
            f"${TOKEN_VARIABLE}), or listen on 127.0.0.1"
        )
