"""What the HTTP front answers when something is wrong, always in OpenAI's format; and who may ask at all."""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError, QueueFull, unknown_key

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.responses import JSONResponse
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_LIMIT = 64 << 20  # bytes
OPEN_PATHS = ("/health", "/ping")  # need no token
_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error", 429: "rate_limit_error", 503: "service_unavailable_error",
}  # fmt: skip


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error answer."""
    plain = message.encode("utf-8", "backslashreplace").decode("utf-8")
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": plain, "type": kind, "param": param, "code": code or status}}


def status_of(error: MoebiusError) -> int:
    """The HTTP status of an error of ours."""
    if isinstance(error, BadInput):
        return 400
    if isinstance(error, QueueFull):
        return 429
    return 503 if isinstance(error, GroupNotReady) else 500


def answer_to(error: MoebiusError) -> JSONResponse:
    """The answer to an error of ours."""
    from fastapi.responses import JSONResponse

    status = status_of(error)
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse(error_body(str(error), status), status, headers=headers)


def describe_fault(fault: dict[str, Any], fields: dict[str, list[str]]) -> tuple[str, str | None]:
    """A fault that pydantic found in a request, in words, and the field it is in."""
    where = [str(part) for part in fault["loc"] if part not in ("body", "query")]
    name = ".".join(where)
    if fault["type"] == "json_invalid":
        return f"the body is not valid JSON: {fault.get('ctx', {}).get('error', fault['msg'])}", None
    if fault["type"] == "extra_forbidden" and len(where) == 1:
        known = next((names for names in fields.values() if names), [])
        return unknown_key(where[0], known), name
    if not name and isinstance(fault.get("input"), bytes | str):
        return "the body must be a JSON object, sent with Content-Type: application/json", None
    if fault["type"] == "missing":
        return f"{name}: required, but not set" if name else "the body is missing", name or None
    message = str(fault["msg"]).removeprefix("Value error, ")
    return (f"{name}: {message}" if name else message), name or None


def add_handlers(app: FastAPI, fields_of: Callable[[str], list[str]]) -> None:
    """Give all errors OpenAI's format. `fields_of` tells the body's fields of a path."""
    from fastapi import Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        faults = error.errors()
        # A union's branches all complain; the first complaint about a field is enough.
        described = [describe_fault(fault, {"body": fields_of(request.url.path)}) for fault in faults]
        message, param = described[0]
        more = len({name for _, name in described}) - 1
        words = f"{message} (and {more} more)" if more else message
        return JSONResponse(error_body(words, 400, param), 400)

    @app.exception_handler(HTTPException)
    async def _refused(request: Request, error: HTTPException) -> JSONResponse:
        words = str(error.detail)
        if error.status_code == 404 and words == "Not Found":
            words = f"no such path: {request.url.path}"
        elif error.status_code == 405:
            words = f"{request.method} is not allowed for {request.url.path}"
        return JSONResponse(error_body(words, error.status_code), error.status_code, headers=error.headers)

    @app.exception_handler(MoebiusError)
    async def _ours(request: Request, error: MoebiusError) -> JSONResponse:
        return answer_to(error)


class Gate:
    """ASGI middleware: asks for the bearer token, and refuses bodies above BODY_LIMIT.

    Without a token, only programs of this machine are served: not a browser's page from elsewhere, which could send
    requests to a loopback address, too (it names its origin), or reach it under a name of its own (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app, self._token = app, None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or refuse."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # there is nothing but HTTP
        headers = {name.lower(): value for name, value in scope["headers"]}
        if self._token is not None and scope["path"] not in OPEN_PATHS and not self._knows(headers):
            await _answer(send, 401, "give the server's token: Authorization: Bearer TOKEN", b"Bearer")
            return
        if self._token is None and not _from_here(headers):
            await _answer(send, 403, "without a token this server answers only programs of its own machine; give one")
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > BODY_LIMIT:
            await _answer(send, 413, f"the body is larger than {BODY_LIMIT} bytes")
            return
        await self.app(scope, _Limited(receive), send)

    def _knows(self, headers: dict[bytes, bytes]) -> bool:
        assert self._token is not None
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._token)


def _from_here(headers: dict[bytes, bytes]) -> bool:
    """Whether the request was sent to a loopback address by that name, and not by a page from elsewhere."""
    host, origin = headers.get(b"host", b"localhost").decode("latin-1"), headers.get(b"origin")
    try:
        names = [urlsplit(f"//{host}").hostname]
        if origin is not None:
            names.append(urlsplit(origin.decode("latin-1")).hostname)
    except ValueError:
        return False
    return all(name is not None and is_loopback(name) for name in names)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Limited:
    """Receives a body of at most BODY_LIMIT bytes, also when its length was not told; cuts off what is longer."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._taken = receive, 0

    def __call__(self) -> Awaitable[Message]:
        return self._next()

    async def _next(self) -> Message:
        message = await self._receive()
        self._taken += len(message.get("body", b""))
        if self._taken > BODY_LIMIT:
            return {"type": "http.disconnect"}
        return message


async def _answer(send: Send, status: int, words: str, challenge: bytes | None = None) -> None:
    body = json.dumps(error_body(words, status)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if challenge is not None:
        headers.append((b"www-authenticate", challenge))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
