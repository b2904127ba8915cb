"""Requests of event loops to the thread that runs the engine, and that thread.

The loop hands over requests by a queue; the thread hands back pieces, and notifies the loop once a step. Neither waits
for the other.
"""

import asyncio
import logging
import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from foretoken.control.limited import Limited
from foretoken.core.draft import Draft
from foretoken.core.errors import ForetokenError
from foretoken.core.restrictions import BadWords
from foretoken.core.step import StepOutput
from foretoken.engine.prompts import Prompt
from foretoken.engine.requests import Assembler, Restrictions
from foretoken.llm import LLM
from foretoken.params import SamplingParams
from foretoken.propose.per_request import PREDICTION
from foretoken.serve.errors import Overloaded, RequestFailed, ServerUnavailable
from foretoken.serve.generation import BuiltRequest, Delivery, DraftSource, Generation, hand_over

_log = logging.getLogger(__name__)

LARGE_TEXT = 2**16  # characters; longer texts take noticeable time to tokenize
ORDER_PATIENCE = 30.0  # seconds that an order between steps may wait
COMPILE_PATIENCE = 30.0  # seconds that a request may wait for its grammar and bad words, including those of others
IDLE_SECONDS = 1.0  # seconds without work before the engine's integrity is checked

T = TypeVar("T")
_Order = tuple[Callable[[], None], Callable[[Exception], None]]  # work, and what is called if it fails


class EngineThread:
    """Runs the engine of an ``LLM``. Other threads give it orders, which it carries out between two steps.

    An order that raises fails alone. When the thread ends, for whatever reason, every request in the engine and every
    order that was not carried out fails at once.

    Nothing else may use the ``LLM`` while the thread runs.

    Attributes:
        listeners: Called in the thread with the outputs of every decode step.
        dead: The error that ended the thread, or None.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm, self.engine = llm, llm.engine
        self.listeners: list[Callable[[Sequence[StepOutput]], None]] = []
        self.dead: Exception | None = None
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._accepting = threading.Lock()  # is held while an order is queued, and while the thread stops taking any
        self._end: ServerUnavailable | None = None  # the error of all orders from then on
        self._thread = threading.Thread(target=self._run, name="foretoken-engine", daemon=True)
        # Only the thread uses these.
        self._assembler = Assembler(self.engine, llm.tokenizer)
        self._generations: dict[int, Generation] = {}  # by sequence
        self._methods: dict[int, str] = {}  # by sequence

    def start(self) -> None:
        """Starts the thread. To be called once."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.dead is None

    def order(self, work: Callable[[], None], failed: Callable[[Exception], None] = lambda error: None) -> None:
        """Asks the thread to do ``work`` between two steps. May be called by any thread.

        ``failed`` is called with the error if ``work`` raises, or if the thread ends or has ended without doing it.
        """
        with self._accepting:
            if self._end is None:
                self._orders.put((work, failed))
                return
        failed(self._end)

    def enqueue(self, generation: Generation) -> None:
        """Adds a request to the engine between two steps. An error ends it. May be called by any thread."""
        self.order(lambda: self.add(generation), lambda error: self._deliver([(generation, error)]))

    def stop(self) -> None:
        """Ends the thread after its current step, and waits for it."""
        self._orders.put(None)
        if self._thread.is_alive():
            self._thread.join()
        else:
            self._finish(ServerUnavailable("the engine is not running"))

    def method_of(self, step: StepOutput) -> str:
        """Returns the method that drafted in ``step``. Valid while listeners are called with it."""
        return self._methods.get(step.sequence, self.llm.methods[0])

    # orders

    def add(self, generation: Generation) -> None:
        """Adds the sequences of a request to the engine. An error ends the request."""
        try:
            for request, contexts in generation.built:
                self._generations.update(dict.fromkeys(request.members, generation))
                self._methods.update({context.id: self.llm.method_of(context) for context in contexts})
                self._assembler.add(request, contexts, generation.priority)
        except Exception as error:
            self._fail([generation], error)

    def drop(self, generation: Generation) -> None:
        """Ends the sequences of a request that are not done. An error in one of them is logged."""
        for request in generation.requests:
            self._assembler.forget(request)
        for member in generation.members:
            self._generations.pop(member, None)
            self._methods.pop(member, None)
            try:
                self.engine.abort(member)
            except Exception:
                _log.exception("a sequence could not be removed from the engine")
            self.engine.finished.pop(member, None)

    # the thread's work

    def _run(self) -> None:
        try:
            while self._run_orders():
                if self.engine.busy:
                    self._step()
        except Exception as error:
            _log.exception("the engine's thread ended")
            self.dead = error
        finally:
            words = "is not running" if self.dead is None else f"stopped working ({self.dead})"
            self._finish(ServerUnavailable(f"the engine {words}"))

    def _finish(self, end: ServerUnavailable) -> None:
        """Fails every request, and every order that was not carried out."""
        with self._accepting:
            self._end = end
        self._deliver([(generation, end) for generation in set(self._generations.values())])
        while not self._orders.empty():
            if (order := self._orders.get()) is not None:
                _, failed = order
                failed(end)

    def _run_orders(self) -> bool:
        """Carries out all orders, and waits for one if there is no work. Returns False after the order to stop."""
        checked = False
        while not self.engine.busy or not self._orders.empty():
            try:
                order = self._orders.get(timeout=None if checked else IDLE_SECONDS)
            except queue.Empty:
                self.engine.check_integrity()
                checked = True
                continue
            if order is None:
                return False
            work, failed = order
            try:
                work()
            except Exception as error:
                failed(_failure(error))
        return True

    def _step(self) -> None:
        before, now = list(self.engine.running), time.monotonic()
        try:
            steps = self.engine.step()
        except Exception as error:
            running = [*before, *self.engine.running] or [sequence.context.id for sequence in self.engine.waiting]
            failed = {self._generations[sequence] for sequence in running if sequence in self._generations}
            if not failed:  # the step would fail for ever
                raise
            _log.exception("a step failed")
            self._fail(failed, error)
            return
        self._note_begun([*self.engine.running, *(step.sequence for step in steps)], now)
        for listener in self.listeners:
            try:
                listener(steps)
            except Exception:
                _log.exception("a listener failed")
        self._deliver([delivery for step in steps if (delivery := self._piece(step))])

    def _note_begun(self, sequences: Iterable[int], now: float) -> None:
        for sequence in sequences:
            generation = self._generations.get(sequence)
            if generation is not None and generation.began is None:
                generation.began = now

    def _piece(self, step: StepOutput) -> Delivery | None:
        generation = self._generations.get(step.sequence)
        if generation is None:
            return None
        try:
            piece = self._assembler.piece(step)
        except Exception as error:
            self.drop(generation)
            return generation, _failure(error)
        if piece.output is not None:
            del self._generations[step.sequence]
            self._methods.pop(step.sequence, None)
        # without the draft's distribution, which can have a row of the vocabulary for each node
        light = Draft(step.draft.ids, step.draft.parents)
        return generation, replace(piece, step=replace(step, draft=light))

    def _fail(self, generations: Iterable[Generation], error: Exception) -> None:
        """Ends requests with an error. The others continue."""
        failed = list(generations)
        self._deliver([(generation, _failure(error)) for generation in failed])
        for generation in failed:
            self.drop(generation)

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Hands pieces and errors over to their event loops, waking each loop once."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[Delivery]] = defaultdict(list)
        for delivery in deliveries:
            by_loop[delivery[0].loop].append(delivery)
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(hand_over, batch)
            except RuntimeError:  # the loop is closed
                for generation, _ in batch:
                    self.drop(generation)


def _failure(error: Exception) -> Exception:
    """Returns the error that the client gets. Unexpected errors are logged and become RequestFailed."""
    if isinstance(error, ForetokenError):
        return error
    _log.error("the engine's thread failed on a request", exc_info=error)
    failure = RequestFailed(f"the engine failed on this request ({type(error).__name__})")
    failure.__cause__ = error
    return failure


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

        bad_words: The tokens of the bad words, where they are not in ``params``. options: Further arguments of
        ``Generation``.

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

        Raises ServerUnavailable if the engine does not run, ends, or takes longer than ``ORDER_PATIENCE`` for a step.
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
