"""Requests for tokens of steps, answered by the chooser of a device and by the compiled kernels of the CPU."""

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foretoken import verify
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft, Elsewhere, Sampled, TopPlusSampled, WithoutReplacement
from foretoken.core.errors import NoTokenAllowed
from foretoken.core.native import sampling as native
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import PrivateStream, Purpose, Streams
from foretoken.engine.sequence import ComputedTokens
from foretoken.engine.step_rows import ON_DEVICES, SequenceRow
from foretoken.models.base import Scores
from foretoken.models.chains import TREE_KINDS, ChainRequest, Draws, ModelChain, TreeShape
from foretoken.models.device_drafts import DraftMemory, UnreadChain, UnreadDraft
from foretoken.models.device_logits import DeviceRows
from foretoken.models.runners.cuda.choice import DeviceChooser

LAWS = {
    "plain": SamplingLaw(),
    "greedy": SamplingLaw(temperature=0.0, repetition_penalty=1.5),
    "temperature": SamplingLaw(temperature=0.6),
    "top_k": SamplingLaw(top_k=7),
    "top_p": SamplingLaw(top_p=0.8),
    "min_p": SamplingLaw(temperature=1.3, min_p=0.05),
    "filters": SamplingLaw(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01),
    "penalties": SamplingLaw(presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.2),
    "changes": SamplingLaw(
        top_p=0.9,
        frequency_penalty=0.3,
        bad_words=[(2,), (4,)],
        min_tokens=4,
        end_ids=(0, 5),
        logit_bias=((3, 4.0), (7, -2.0)),
    ),
    "few": SamplingLaw(allowed_ids=(0, 3, 5, 6, 8, 11), min_tokens=4, end_ids=(0, 5), presence_penalty=1.0),
}


def logits(rows: int, vocabulary: int, seed: int) -> Tensor:
    """Returns rows of which every second has many ties."""
    values = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3.0
    values[::2] = (values[::2] * 2.0).round() / 2.0
    return values


def likely_tree(size: int, target: Tensor, seed: int) -> Draft:
    """Returns a tree of likely tokens, some of them twice."""
    rng = random.Random(seed)
    parents = [rng.randrange(max(-1, node - 3), node) for node in range(size)]
    return Draft.tree([int(rng.choice(target[parent + 1].topk(3).indices.tolist())) for parent in parents], parents)


class Steps:
    """The same steps of some sequences, of different laws, on the device and on the host.

    Args:
        chooser: the device's.
        vocabulary: number of logits of a row.
        laws: names in ``LAWS``.
        logprobs: number of listed tokens.
    """

    def __init__(
        self, chooser: DeviceChooser, vocabulary: int, laws: Sequence[str], logprobs: int | None, device: torch.device
    ) -> None:
        self._chooser, self._vocabulary, self._device = chooser, vocabulary, device
        grades = Exactness.DISTRIBUTION, Exactness.TRAJECTORY
        self._contexts = [
            Context(number, [1, 2, 3 + number], 2, LAWS[law], Streams(number * 7 - 3), grades[number % 2])
            for number, law in enumerate(laws)
        ]
        self._requests = [[SequenceRow(each, logprobs, vocabulary) for each in self._contexts] for _ in range(2)]

    def compare(self, sizes: Sequence[int], seed: int, lost: Sequence[float] = ()) -> int:
        """Compares the tokens of one step with drafts of these sizes. Returns the number of accepted draft tokens.

        Args:
            sizes: nodes of each draft.
            seed: of the logits.
            lost: a logit of each of the first rows.
        """
        counts = [size + 1 for size in sizes]
        target = logits(sum(counts), self._vocabulary, seed)
        for row, value in enumerate(lost):
            target[row, slice(None) if value == -torch.inf else row] = value
        parts = target.split(counts)
        drafts = [likely_tree(size, part, seed) for size, part in zip(sizes, parts, strict=True)]
        kernels = native.kernels()
        assert kernels is not None
        placed = target.to(self._device)
        rows = DeviceRows(placed, self._chooser).split(counts)
        results: list[list[ComputedTokens | None]] = []
        for requests, scores, choose in (
            (self._requests[0], [Scores(part) for part in parts], kernels.choose_tokens),
            (self._requests[1], [Scores(part) for part in rows], self._chooser.choose_tokens),
        ):
            asked = [
                request.update(draft, score) for request, draft, score in zip(requests, drafts, scores, strict=True)
            ]
            if wait := choose([row for row in asked if row is not None], self._vocabulary):
                wait()
            assert None not in asked
            results.append([request.result() for request in requests])
        accepted = 0
        for context, one, other in zip(self._contexts, *results, strict=True):
            if one is None or other is None:
                assert one is other and lost
                continue
            assert described(one) == described(other), context.law
            accepted += len(one.path)
            context.tokens.extend(row.token for row in one.rows)
        return accepted


def described(computed: ComputedTokens) -> object:
    listed = [(row.logprob, row.rank, row.top) for row in computed.rows if row.top_count >= 0]
    return computed.path, [row.token for row in computed.rows], listed


def sampled_chain(size: int, target: Tensor, law: SamplingLaw, seed: int) -> tuple[list[int], Tensor]:
    """Returns tokens, and distributions near the target's from which they were sampled; some are equal to it."""
    generator = torch.Generator().manual_seed(seed)
    near = target[:size] + torch.randn(size, target.shape[1], generator=generator) * (seed % 3) / 2
    q = law.probs(near, ())
    return torch.multinomial(q, 1, generator=generator)[:, 0].tolist() if size else [], q


def sampled_tree(
    size: int, target: Tensor, law: SamplingLaw, seed: int, kind: str
) -> tuple[list[int], list[int], Tensor]:
    """Returns tokens and parents of a tree of a kind of ``TREE_KINDS``, and the distributions of its tokens."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    near = target + torch.randn(target.shape, generator=generator) * (seed % 3) / 2
    q, tokens, parents = law.probs(near, ()), list[int](), list[int]()
    while len(parents) < size:
        parent = rng.randrange(-1, len(parents))
        if parents.count(parent) < min(3, q[parent + 1].count_nonzero()):
            parents.append(parent)
    left = q.clone()
    for node, parent in enumerate(parents):
        row = left[parent + 1]
        fixed = kind == "greedy_multi" and parent in parents[node + 1 :]
        tokens.append(int(row.argmax() if fixed else torch.multinomial(row, 1, generator=generator)))
        row[tokens[-1]] = 0.0
    return tokens, parents, q


def unread(
    tokens: Sequence[int], q: Tensor, lost: bool, device: torch.device, parents: Sequence[int] = (), kind: str = ""
) -> UnreadDraft:
    """Returns a sampled chain or tree that lies on a device. ``lost``: it has one node more, which is not there."""
    count = len(tokens) + lost
    nodes = torch.ones(3, 1, count, dtype=torch.int32)
    nodes[0, 0] = torch.tensor([*tokens, *[0] * lost])
    nodes[2, 0] = torch.tensor([0.5] * len(tokens) + [-torch.inf if parents else torch.nan] * lost).view(torch.int32)
    rows = torch.cat((q, q.new_full((int(lost), q.shape[1]), torch.nan)))
    request = ChainRequest(count, Draws(SamplingLaw().kept, uniforms=[0.5] * count, rows=True))
    if parents:
        nodes[1, 0] = torch.tensor([node - parent for node, parent in enumerate([*parents, *[-1] * lost])])
        request = replace(request, tree=TreeShape(3, max(Draft.tree(tokens, parents).depths), kind=kind))
    chain = UnreadChain(DraftMemory(nodes.to(device), rows[None].to(device)), 0, request)

    def finish(drafted: ModelChain) -> Draft:
        assert isinstance(drafted.rows, Elsewhere) and drafted.parents == list(parents)
        return replace(Draft.chain(drafted.tokens, drafted.rows), **{"parents": tuple(parents)} if parents else {})

    return UnreadDraft(chain, finish)


def depths_of(nodes: Tensor) -> Tensor:
    """Returns the depth of each row [fields, rows], the first of which is the root's."""
    depths = [0]
    for row, up in enumerate(nodes[1, 1:].tolist(), 1):
        depths.append(depths[row - up] + 1)
    return torch.tensor(depths)


def verdict_on(
    draft: Draft, probs: Tensor, stream: PrivateStream, rejection: str = "block"
) -> tuple[tuple[int, ...], int]:
    """Returns the path and the token behind it, -1 where none is possible."""
    try:
        verdict = verify.choose(draft.law, rejection=rejection)(draft, probs, stream)
    except NoTokenAllowed:
        return (), -1
    return verdict.path, verdict.token


def compare_drafts(
    chooser: DeviceChooser, vocabulary: int, seeds: Sequence[int], device: torch.device, kind: str
) -> int:
    """Compares verdicts on sampled trees, or on chains, with the CPU's. Returns the number of accepted tokens.

    kind: one of ``TREE_KINDS``, or "recursive" for sampled trees verified from the root down; empty for chains, and
    "token" for chains verified token by token. A large vocabulary, which takes long in the interpreter, has every
    second law, of which one has all filters.
    """
    kernels, laws = native.kernels(), [law for law in LAWS.values() if not (law.greedy or law.adjusts)]
    assert kernels is not None
    rejection, kind = ("token", "sampled") if kind == "recursive" else (kind if kind == "token" else "block", kind)
    laws = laws[1::2] if vocabulary > 1000 else laws
    accepted = 0
    for seed in seeds:
        sizes, targets, drafts, requests = list[int](), list[Tensor](), list[UnreadDraft](), list[SequenceRow]()
        expected = list[tuple[tuple[int, ...], int]]()
        for number, law in enumerate(laws):
            size, streams, position = (seed + 3 * number) % 6 + 1, Streams(seed * 11 + number), seed % 5
            target = logits(size + 1, vocabulary, seed + number)
            parents = list[int]()
            if kind in TREE_KINDS:
                size *= 2
                target = logits(size + 1, vocabulary, seed + number)
                tokens, parents, q = sampled_tree(size, target, law, seed + number, kind)
            else:
                tokens, q = sampled_chain(size, target, law, seed + number)
            target[size // 2] += torch.nan if seed % 4 == 2 else 0.0  # no token is possible there
            draft = unread(tokens, q, seed % 4 == 3, device, parents, kind)
            private = streams.private(Purpose.VERIFY, position)
            assert isinstance(private, PrivateStream)
            if kind == "token":
                expected.append(verdict_on(Draft.chain(tokens, Sampled(q)), law.probs(target, ()), private, rejection))
            elif kind:
                fixed = Draft(
                    tuple(tokens), tuple(parents), {"sampled": WithoutReplacement}.get(kind, TopPlusSampled)(q)
                )
                expected.append(verdict_on(fixed, law.probs(target, ()), private, rejection))
            else:
                count, token = kernels.verify_chain(target, tokens, q, law.kept, private.key)
                expected.append((tuple(range(count)), token))
            context = Context(number, [1] * (2 + position), 2, law, streams)
            requests.append(SequenceRow(context, None, vocabulary))
            requests[-1].on_device = {law for law, _ in ON_DEVICES}
            assert requests[-1].row is not None
            requests[-1].row.tokenwise = rejection == "token"
            rows = torch.cat((target, target[:1])) if draft.limit > size else target
            sizes.append(draft.limit + 1), targets.append(rows), drafts.append(draft)
        drafted = torch.zeros(sum(sizes), 4, dtype=torch.int64)
        nodes = [
            torch.cat((torch.zeros(3, 1, dtype=torch.int32), d.source._memory.nodes[:, 0].cpu()), 1) for d in drafts
        ]
        drafted[:, :3] = torch.cat(nodes, 1).T
        drafted[:, 3] = torch.cat([depths_of(each) for each in nodes])
        placed = DeviceRows(torch.cat(targets).to(device), chooser, drafted=drafted.to(device)).split(sizes)
        asked = [
            request.update(draft, Scores(rows)) for request, draft, rows in zip(requests, drafts, placed, strict=True)
        ]
        chooser.choose_tokens([row for row in asked if row is not None], vocabulary)()
        for request, draft, verdict in zip(requests, drafts, expected, strict=True):
            result = request.result()
            if verdict[1] < 0:
                # for the host, which verifies it again
                assert result is None and len(draft.law.probs) == max(draft.parents) + 2  # type: ignore[union-attr]
                continue
            assert result is not None and (result.path, result.rows[-1].token) == verdict
            assert [row.token for row in result.rows[:-1]] == [draft.ids[node] for node in result.path]
            assert all(0.0 < (draft.chance(node) or 0.0) <= 1.0 for node in result.path)
            accepted += len(result.path)
    return accepted
