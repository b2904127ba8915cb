"""Clients of OpenAI-compatible servers: addresses, keys, listed models, and requests at once."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import httpx

from foretoken.core.errors import ForetokenError

T = TypeVar("T")


def base_url(url: str) -> str:
    """Returns a server's address without ``/v1`` and without a slash at its end."""
    return url.rstrip("/").removesuffix("/v1")


def auth_headers(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def listed_models(url: str, key: str | None) -> list[dict[str, object]]:
    """Returns the entries of ``/v1/models``, one at least, each with an ``id``.

    Raises ForetokenError if the server does not answer, or not as OpenAI's API does.
    """
    try:
        answer = httpx.get(f"{url}/v1/models", headers=auth_headers(key), timeout=30.0)
        answer.raise_for_status()
        listed = [{**model, "id": str(model["id"])} for model in answer.json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise ForetokenError(f"{url}/v1/models does not answer as OpenAI's API does: {error}") from error
    if not listed:
        raise ForetokenError(f"{url} serves no model")
    return listed


async def at_once(count: int, jobs: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Runs all jobs, ``count`` at a time. Returns their results in the order of the jobs."""
    left, results = iter(enumerate(jobs)), dict[int, T]()

    async def one() -> None:
        for number, job in left:
            results[number] = await job()

    await asyncio.gather(*(one() for _ in range(count)))
    return [results[number] for number in range(len(jobs))]
