"""The thread that runs the engine and passes pieces of output to the event loops of their requests."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from foretoken.core.draft import Draft
from foretoken.core.errors import ForetokenError
from foretoken.core.step import StepOutput
from foretoken.engine.assemble import Assembler
from foretoken.llm import LLM
from foretoken.serve.errors import RequestFailed, ServerUnavailable
from foretoken.serve.generation import Delivery, Generation, hand_over

_log = logging.getLogger(__name__)

IDLE_SECONDS = 1.0  # seconds without work before the engine's integrity is checked


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
        self._fresh: list[Generation] = []  # not admitted yet

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
        self._fresh.append(generation)
        try:
            for request, contexts in generation.built:
                self._generations.update(dict.fromkeys(request.members, generation))
                self._methods.update({context.id: self.llm.method_of(context) for context in contexts})
                self._assembler.add(request, contexts, generation.priority)
        except Exception as error:
            self._fail([generation], error)

    def drop(self, generation: Generation) -> None:
        """Ends the sequences of a request that are not done. An error in one of them is logged."""
        if generation in self._fresh:
            self._fresh.remove(generation)
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
        self._note_begun({*self.engine.running, *(step.sequence for step in steps)}, now)
        for listener in self.listeners:
            try:
                listener(steps)
            except Exception:
                _log.exception("a listener failed")
        self._deliver([delivery for step in steps if (delivery := self._piece(step))])

    def _note_begun(self, sequences: Collection[int], now: float) -> None:
        begun = [generation for generation in self._fresh if any(member in sequences for member in generation.members)]
        for generation in begun:
            generation.began = now
            self._fresh.remove(generation)

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
