"""Requests of event loops to the thread that runs the engine.

The loop hands over requests by a queue; the thread hands back pieces, and notifies the loop once a step. Neither waits
for the other.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from foretoken.control.limited import Limited
from foretoken.core.bad_words import BadWords
from foretoken.engine.prompts import Prompt
from foretoken.engine.requests import Restrictions
from foretoken.llm import LLM
from foretoken.params import SamplingParams
from foretoken.propose.per_request import PREDICTION
from foretoken.serve.engine_thread import EngineThread
from foretoken.serve.errors import Overloaded, ServerUnavailable
from foretoken.serve.generation import BuiltRequest, DraftSource, Generation

LARGE_TEXT = 2**16  # characters; longer texts take noticeable time to tokenize
ORDER_PATIENCE = 30.0  # seconds that an order between steps may wait
COMPILE_PATIENCE = 30.0  # seconds that a request may wait for its grammar and bad words, including those of others

T = TypeVar("T")


class Worker(EngineThread):
    """Serves an ``LLM`` to event loops. Nothing else may use the ``LLM`` meanwhile.

    Args:
        llm: The model. A server opens it with ``isolate_failures``.
        max_waiting: Number of sequences that may wait beside those in the batch.

    Attributes:
        limited: The bound on draft lengths, which may change between steps.
        draining: Whether new requests are refused.
    """

    def __init__(self, llm: LLM, *, max_waiting: int = 256) -> None:
        super().__init__(llm)
        if not isinstance(self.engine.controller, Limited):
            self.engine.controller = Limited(self.engine.controller)
        self.limited = self.engine.controller
        self.max_waiting = max_waiting
        self.draining = False
        self._open: set[Generation] = set()
        self._building = 0  # requests that are tokenized and checked
        self._small_pool = ThreadPoolExecutor(1, "foretoken-prepare")
        self._large_pool = ThreadPoolExecutor(1, "foretoken-prepare-large")
        self._compilers = ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 4), "foretoken-compile")

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._open)

    async def run_in_thread(self, work: Callable[[], T], size: int = 0) -> T:
        """Returns the result of ``work``, which would block the event loop, such as tokenizing a prompt.

        Texts of a large ``size``, in characters, have their own thread, so that others need not wait.
        """
        pool = self._large_pool if size > LARGE_TEXT else self._small_pool
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    @property
    def capacity(self) -> int:
        """Number of sequences that may run or wait."""
        return self.engine.max_sequences + self.max_waiting

    async def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams, bad_words: BadWords | None = None, **options: Any
    ) -> Generation:
        """Checks and queues all of ``prompts``, or none.

        Args:
            prompts: The prompts.
            params: Sampling parameters of all of them.
            bad_words: The tokens of the bad words, where they are not in ``params``.
            options: Further arguments of ``Generation``.

        Raises:
            InvalidRequest: A prompt or a parameter is not valid for this model.
            Overloaded: Too many sequences wait.
            ServerUnavailable: The server takes no requests.
        """
        self._admit(len(prompts) * params.n)
        restrictions = await self._restrictions(params, bad_words)
        self._building += 1
        try:
            built = await self.run_in_thread(lambda: [self._build(prompt, params, restrictions) for prompt in prompts])
            self._admit(len(prompts) * params.n)  # again: others came while the prompts were built
            context = built[0][1][0]
            method = self.llm.method_of(context)
            predicted = len(context.prediction) if method == PREDICTION else 0
            drafts = DraftSource(method, self.llm.draft_tokens_of(context), predicted)
            generation = Generation(built, self._release, drafts=drafts, **options)
            self._open.add(generation)
            self.enqueue(generation)
            return generation
        finally:
            self._building -= 1
            self.order(self.sweep_adapters)

    async def between_steps(self, work: Callable[[], T]) -> T:
        """Returns the result of ``work``, which the engine's thread does between two steps.

        Raises:
            ServerUnavailable: The engine does not run, ends, or takes longer than ``ORDER_PATIENCE`` for a step.
        """
        result: Future[T] = Future()

        def failed(error: Exception) -> None:
            if result.set_running_or_notify_cancel():
                result.set_exception(error)

        def order() -> None:
            if not result.set_running_or_notify_cancel():  # the caller has given up
                return
            try:
                result.set_result(work())
            except Exception as error:
                result.set_exception(error)

        if not self.alive:
            raise ServerUnavailable("the engine is not running")
        self.order(order, failed)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(result), ORDER_PATIENCE)
        except TimeoutError:
            raise ServerUnavailable(f"the engine did not answer within {ORDER_PATIENCE:g} s; try again later") from None

    def abandon(self) -> None:
        """Ends unfinished requests, for shutting down."""
        for generation in list(self._open):
            generation.end(ServerUnavailable("the server shut down before the request was done"), abort=True)

    def close(self) -> None:
        """Stops the thread after its current step, and waits for it."""
        self.stop()
        for pool in (self._small_pool, self._large_pool, self._compilers):
            pool.shutdown(wait=False, cancel_futures=True)

    def _admit(self, sequences: int) -> None:
        if self.dead is not None:
            raise ServerUnavailable(f"the engine stopped working ({self.dead}); the server has to be started again")
        if self.draining:
            raise ServerUnavailable("the server is shutting down; ask another one")
        if sum(len(generation.members) for generation in self._open) + sequences > self.capacity:
            raise Overloaded(f"the queue is full: {self.capacity} sequences may run or wait; try again later")

    async def _restrictions(self, params: SamplingParams, bad_words: BadWords | None) -> Restrictions:
        """Returns the compiled restrictions of a request, without delaying requests that have none."""
        make = self.llm.requests.restrictions
        if params.structured_outputs is None and not params.bad_words:
            return make(params, bad_words)
        try:
            async with asyncio.timeout(COMPILE_PATIENCE):
                return await asyncio.get_running_loop().run_in_executor(self._compilers, make, params, bad_words)
        except TimeoutError as error:
            raise Overloaded(
                f"the structured_outputs and bad_words were not compiled within {COMPILE_PATIENCE:g} s, as those of "
                "other requests were before them; try again later, or make them smaller"
            ) from error

    def _build(self, prompt: Prompt, params: SamplingParams, restrictions: Restrictions) -> BuiltRequest:
        request, contexts = self.llm.requests.build(prompt, params, restrictions)
        for context in contexts:
            self.engine.check(context)
        return request, contexts

    def _release(self, generation: Generation, abort: bool) -> None:
        self._open.discard(generation)
        if abort:
            self.order(lambda: self.drop(generation))
        self.order(self.sweep_adapters)  # asked there, because an order before this one may unload an adapter

    def sweep_adapters(self) -> None:
        """Frees the memory of unloaded LoRA adapters that no request uses. For the engine's thread, between steps."""
        if self.llm.adapters.retired and not self._building:  # a request that is being built may use any
            built = [contexts for generation in list(self._open) for _, contexts in generation.built]
            queued = {context.adapter for contexts in built for context in contexts}
            self.llm.adapters.sweep(lambda: self.engine.adapters_in_use | queued)
