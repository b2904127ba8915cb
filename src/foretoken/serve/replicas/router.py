"""Ray Serve's interface to ``routing``."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from foretoken.serve.replicas.forwarded import Forwarded
from foretoken.serve.replicas.routing import PrefilledBlocks, ReplicaLoad, ranked


class PrefixRouter(RequestRouter):
    """Chooses replicas. It runs in the front's process, which is their only client."""

    def initialize_state(self, slack: int = 4, max_requests: int = 32, **kwargs: Any) -> None:
        """slack: see ``routing``. max_requests: requests that a replica may have in work."""
        self._slack, self._max_requests = slack, max_requests
        self._prefilled, self._ledger = PrefilledBlocks(), ReplicaLoad()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the replicas that are not full, each as its own rank; none if all are full."""
        request = None if pending_request is None else _forwarded(pending_request)
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # wait before the next try if all are full
        if request is not None and len(by_id) > 1:
            avoided = {name: r for name, r in by_id.items() if name.unique_id not in request.avoid}
            by_id = avoided or by_id
        blocks = request.prefix_hashes if request is not None else ()
        load = {name: count for name in by_id if (count := self._ledger.load(name)) < self._max_requests}
        known = {name: self._prefilled.known(blocks, name) for name in load}
        return [[by_id[name]] for name in ranked(load, known, self._slack)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Records the replica that a request was sent to."""
        request = _forwarded(pending_request)
        if request is not None:
            self._prefilled.note(request.prefix_hashes, replica_id)
        number = pending_request.metadata.internal_request_id
        self._ledger.add(replica_id, number)
        result.add_done_callback(lambda _: self._ledger.remove(replica_id, number))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forgets replicas that ended."""
        for gone in set(self.curr_replicas) - {replica.replica_id for replica in replicas}:
            self._prefilled.forget(gone)
            self._ledger.forget(gone)
        super().update_replicas(replicas)


def _forwarded(pending: PendingRequest) -> Forwarded | None:
    return pending.args[0] if pending.args and isinstance(pending.args[0], Forwarded) else None
