"""Images as pixel tokens: a coarse draft proposes the next pixels of a digit, a network verifies them.

    .venv/bin/python examples/digits.py --picture docs/img/digits.png

scikit-learn's digits have 8 x 8 pixels of 17 grey levels: 17 tokens, in raster order, after one of ten class tokens.
The draft is a table over the class, the position, and the pixels above and to the left in four shades.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from foretoken.control.fixed import Fixed
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft, Sampled
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput
from foretoken.core.streams import Purpose, Streams, random_seed_from
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.base import Handle, Model, Scores, growing
from foretoken.propose.base import Proposer

SIDE, LEVELS, CLASSES = 8, 17, 10
PIXELS = SIDE * SIDE
VOCABULARY = LEVELS + CLASSES  # grey levels first, then the class tokens
ABOVE, BESIDE = 3, 3  # the network's window: rows above, columns to either side
SHADES = 4  # shades that the draft distinguishes


def load() -> Tensor:
    """Returns int64 [1797, 65]: each image as its class token and 64 pixels."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    data = load_digits()
    pixels, labels = torch.from_numpy(data.data).long(), torch.from_numpy(data.target).long()
    return torch.cat([labels[:, None] + LEVELS, pixels], 1)


def _window() -> tuple[Tensor, Tensor]:
    """Returns, for each pixel, the positions around it that precede it.

    Returns:
        Indices [64, W], and whether each of them is inside the image [64, W].
    """
    steps = [(-r, c) for r in range(1, ABOVE + 1) for c in range(-BESIDE, BESIDE + 1)]
    steps += [(0, -c) for c in range(1, BESIDE + 1)]
    places, inside = [], []
    for at in range(PIXELS):
        around = [(at // SIDE + r, at % SIDE + c) for r, c in steps]
        inside.append([0 <= r < SIDE and 0 <= c < SIDE for r, c in around])
        places.append([r * SIDE + c if ok else 0 for (r, c), ok in zip(around, inside[-1], strict=True)])
    return torch.tensor(places), torch.tensor(inside)


PLACES, INSIDE = _window()


def inputs(images: Tensor, at: Tensor) -> Tensor:
    """Returns the network's input before pixel ``at[i]`` of ``images[i]``. Later pixels are not used.

    Args:
        images: int64 [n, 65].
        at: int64 [n].

    Returns:
        float64 [n, W + 64 + 64 + 10]: the window, all pixels so far, the position, the class.
    """
    levels = images[:, 1:].double() / (LEVELS - 1)
    so_far = levels * (torch.arange(PIXELS) < at[:, None])
    around = so_far.gather(1, PLACES[at]) * INSIDE[at]
    classes = F.one_hot(images[:, 0] - LEVELS, CLASSES)
    return torch.cat([around, so_far, F.one_hot(at, PIXELS), classes], 1)


class PixelModel(Model):
    """A target: a network of two hidden layers over the image so far. It needs no KV cache.

    It computes in float64, so that the number of rows in a pass changes only the sixteenth digit. Class tokens have
    probability 0.

    Args:
        weights: Matrices [in + 1, out], with the bias as the last row.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = [w.double() for w in weights]
        self.vocab_size, self.max_length = VOCABULARY, PIXELS + 1
        self.num_layers, self.hidden_size = len(weights), weights[-1].shape[0]
        self.device, self.dtype = torch.device("cpu"), torch.float64
        self.passes: list[int] = []  # rows of each
        self._open: set[int] = set()

    def logits(self, histories: Sequence[Sequence[int]]) -> Tensor:
        """Returns logits, float64 [n, 27], after each of ``histories``: a class token and up to 63 pixels."""
        images = torch.zeros(len(histories), PIXELS + 1, dtype=torch.int64)
        for image, history in zip(images, histories, strict=True):
            image[: len(history)] = torch.tensor(history)
        at = torch.tensor([len(history) - 1 for history in histories])
        # No logits are needed after the last pixel, but a full draft may reach it.
        levels = network(self.weights, inputs(images, at.clamp(max=PIXELS - 1)))
        return F.pad(levels, (0, CLASSES), value=-torch.inf)

    # the contract

    def open(
        self,
        prompt: Sequence[int],
        source: Sequence[int] = (),
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Handle:
        if not prompt or not LEVELS <= prompt[0] < VOCABULARY:
            raise InvalidRequest(f"an image begins with a class token, {LEVELS} to {VOCABULARY - 1}; got {prompt[:1]}")
        slot = next(i for i in range(len(self._open) + 1) if i not in self._open)
        self._open.add(slot)
        return Handle(slot, list(prompt))

    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
        histories: list[list[int]] = []
        counts: list[int] = []
        for handle, draft in zip(handles, drafts, strict=True):
            done = growing(handle, draft)
            nodes = range(-1 if handle.pending else done, len(draft))
            histories += [[*handle.tokens, *(draft.ids[i] for i in draft.path(node))] for node in nodes]
            counts.append(len(nodes))
            handle.cached = len(handle.tokens)
            handle.nodes[:], handle.parents[:] = draft.ids, draft.parents
        self.passes.append(len(histories))
        return [Scores(rows) for rows in self.logits(histories).split(counts)]

    def commit(self, handles: Sequence[Handle], tokens: Sequence[Sequence[int]]) -> None:
        for handle, new in zip(handles, tokens, strict=True):
            handle.advance(new)

    def close(self, handle: Handle) -> None:
        self._open.discard(handle.slot)
        handle.slot = -1


def network(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """Returns the logits of the grey levels [n, 17] for inputs [n, in]."""
    for weight in weights[:-1]:
        x = torch.relu(x @ weight[:-1] + weight[-1])
    return x @ weights[-1][:-1] + weights[-1][-1]


def train(images: Tensor, epochs: int = 16, seed: int = 1) -> PixelModel:
    """Trains with Adam and a falling rate on the cross-entropy of every pixel; half a minute on one core."""
    generator = torch.Generator().manual_seed(seed)
    n = len(images)
    x = inputs(images.repeat_interleave(PIXELS, 0), torch.arange(PIXELS).repeat(n)).float()
    y = images[:, 1:].reshape(-1)
    weights = [
        torch.cat([torch.randn(i, o, generator=generator) * (2 / i) ** 0.5, torch.zeros(1, o)]).requires_grad_()
        for i, o in pairwise((x.shape[1], 192, 96, LEVELS))
    ]
    batches = -(-len(y) // 512)
    optimizer = torch.optim.AdamW(weights, lr=3e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=epochs * batches)
    for _ in range(epochs):
        for some in torch.randperm(len(y), generator=generator).chunk(batches):
            optimizer.zero_grad()
            F.cross_entropy(network(weights, x[some]), y[some]).backward()
            optimizer.step()
            schedule.step()
    return PixelModel([weight.detach() for weight in weights])


class CoarseDraft(Proposer):
    """Draws pixels from counts over the class, the position, and the pixels above and to the left in four shades.

    Where a class has few counts, the counts over all classes are mixed in. In the trajectory grade the draws share the
    target's noise and count as fixed candidates.
    """

    name = "coarse"

    def __init__(self, images: Tensor, trust: float = 4.0) -> None:
        """Counts ``images``. trust: number of counts over all classes that weigh as much as those of one class."""
        classes, pixels = images[:, 0] - LEVELS, images[:, 1:]
        counts = torch.zeros(CLASSES, PIXELS, SHADES, SHADES, LEVELS, dtype=torch.float64)
        for at in range(PIXELS):
            above = _shade(pixels[:, at - SIDE]) if at >= SIDE else torch.zeros_like(classes)
            left = _shade(pixels[:, at - 1]) if at % SIDE else torch.zeros_like(classes)
            where = (classes, torch.full_like(classes, at), above, left, pixels[:, at])
            counts.index_put_(where, torch.ones(len(images), dtype=torch.float64), accumulate=True)
        everyone = counts.sum(0, keepdim=True) + 0.05
        mixed = counts + trust * everyone / everyone.sum(-1, keepdim=True)
        self.table = F.pad(mixed / mixed.sum(-1, keepdim=True), (0, CLASSES)).log()

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Returns logits, float64 [27], after a class token and some pixels."""
        at = len(tokens) - 1
        above = tokens[at + 1 - SIDE] if at >= SIDE else 0
        left = tokens[at] if at % SIDE else 0
        return self.table[tokens[0] - LEVELS, at, _shade(above), _shade(left)]

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [self._one(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def _one(self, context: Context, budget: int) -> Draft:
        """Returns a chain and the distributions of its tokens under the request's sampling parameters."""
        shared = context.exactness is Exactness.TRAJECTORY
        position = context.generated
        stream = context.streams.shared(position) if shared else context.streams.private(Purpose.DRAFT, position)
        drafted: list[int] = []
        rows: list[Tensor] = []
        for index in range(budget):
            logits = self.logits([*context.tokens, *drafted])
            rows.append(context.law.probs(logits[None], [context.history(drafted)])[0])
            drafted.append(stream.categorical(rows[-1], index=index))
        return Draft.chain(drafted, None if shared or not rows else Sampled(torch.stack(rows)))


def _shade(level: Any) -> Any:
    """Returns grey levels 0 to 16 as one of four shades; blank is a shade of its own. Takes a number or a tensor."""
    return (level > 0) * 1 + (level > 5) * 1 + (level > 11) * 1


@dataclass(frozen=True)
class Drawing:
    """An image, the origin of each of its pixels, and the number of its decode steps."""

    pixels: tuple[int, ...]
    accepted: tuple[bool, ...]
    steps: int


def sample(
    target: PixelModel,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    depth: int,
    seed: int,
    grade: Exactness = Exactness.DISTRIBUTION,
    pixels: int = PIXELS,
    batch: int = 32,
) -> tuple[list[Drawing], list[StepOutput]]:
    """Draws one image for each prompt (a class token and perhaps first pixels).

    Image i depends on (seed, i) alone.

    Args:
        target: The target.
        proposer: The draft.
        prompts: One per image.
        depth: Draft tokens per step.
        seed: Seed of all images.
        grade: Grade of exactness.
        pixels: Pixels to draw in each image.
        batch: Images in one pass.

    Returns:
        The images in the order of the prompts, and all decode steps.
    """
    engine = Engine(target, proposer, Fixed(depth), max_sequences=batch)
    contexts = [
        Context(i, list(prompt), len(prompt), SamplingLaw(), Streams(random_seed_from(seed, i)), grade)
        for i, prompt in enumerate(prompts)
    ]
    for context in contexts:
        engine.add(context, Length(pixels))
    steps: list[StepOutput] = []
    while engine.busy:
        steps += engine.step()
    origins: list[list[bool]] = [[] for _ in contexts]
    counts = [0] * len(contexts)
    for step in steps:
        origins[step.sequence] += [i < step.accepted for i in range(len(step.tokens))]
        counts[step.sequence] += 1
    return [Drawing(tuple(c.tokens[1:]), tuple(o), r) for c, o, r in zip(contexts, origins, counts, strict=True)], steps


def report(name: str, drawings: list[Drawing], steps: list[StepOutput]) -> None:
    """Prints forward passes and accepted draft tokens."""
    pixels, passes = sum(len(d.accepted) for d in drawings), sum(d.steps for d in drawings)
    accepted, drafted = sum(step.accepted for step in steps), sum(len(step.draft) for step in steps)
    print(
        f"{name}: {passes / len(drawings):.1f} passes an image, {1 - passes / pixels:.0%} saved, "
        f"{pixels / passes:.2f} pixels a pass"
    )
    if drafted:
        print(f"  {accepted} of {drafted} draft tokens accepted, those after a rejected one counted too")


def draw(picture: Path, real: Tensor, drawings: list[Drawing]) -> None:
    """Draws a row of images of the data, then rows of drawings, each repeated with pixels coloured by origin.

    Args:
        picture: File to write.
        real: Images of the data, [columns, 64].
        drawings: Whole rows of ``columns``.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = len(real)
    rows: list[tuple[str, list[Any]]] = [("data", [_ink(image) for image in real.tolist()])]
    for start in range(0, len(drawings), columns):
        line = drawings[start : start + columns]
        rows += [("drawn", [_ink(d.pixels) for d in line]), ("origin", [_ink(d.pixels, d.accepted) for d in line])]
    figure, grid = plt.subplots(
        len(rows), columns, figsize=(0.8 * columns, 0.8 * len(rows) + 0.4), layout="constrained"
    )
    for (name, images), line in zip(rows, grid, strict=True):
        line[0].set_ylabel(name, fontsize=8)
        for axes, image in zip(line, images, strict=True):
            axes.imshow(image, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_color("#cccccc")
    share = sum(sum(d.accepted) for d in drawings) / sum(len(d.accepted) for d in drawings)
    figure.suptitle(f"green: accepted draft tokens ({share:.0%} of pixels); orange: the target's own", fontsize=9)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def _ink(levels: Sequence[int], accepted: Sequence[bool] | None = None) -> Any:
    """Returns colours [8, 8, 3]: grey, or green where ``accepted`` and orange elsewhere."""
    ink = torch.tensor(levels).view(SIDE, SIDE, 1) / (LEVELS - 1)
    if accepted is None:
        return (1 - ink).expand(-1, -1, 3).numpy()
    green = torch.tensor(accepted).view(SIDE, SIDE, 1)
    paper = torch.where(green, torch.tensor([0.86, 0.95, 0.88]), torch.tensor([1.0, 0.88, 0.74]))
    dark = torch.where(green, torch.tensor([0.03, 0.36, 0.20]), torch.tensor([0.60, 0.24, 0.0]))
    return (paper * (1 - ink) + dark * ink).numpy()


def nats(logits: Tensor, images: Tensor) -> float:
    """Returns the cross-entropy per pixel. logits: [n, 64, 27]."""
    return float(F.cross_entropy(logits.flatten(0, 1), images[:, 1:].flatten()))


def main(
    copies: Annotated[int, typer.Option(help="images of each class")] = 10,
    depth: Annotated[int, typer.Option(help="draft tokens a step")] = 8,
    epochs: Annotated[int, typer.Option(help="times the network sees the data")] = 16,
    picture: Annotated[Path | None, typer.Option(help="where a picture is written")] = None,
    seed: Annotated[int, typer.Option(help="of the images")] = 7,
) -> None:
    """Trains the target, builds the draft, and draws digits with and without it."""
    torch.set_num_threads(1)
    images = load()
    images, unseen = images[:1500], images[1500:]
    target, coarse = train(images, epochs), CoarseDraft(images)
    histories = [image[: at + 1] for image in unseen.tolist() for at in range(PIXELS)]
    scores = [target.logits(histories), torch.stack([coarse.logits(history) for history in histories])]
    of_target, of_draft = (nats(score.view(len(unseen), PIXELS, -1), unseen) for score in scores)
    print(f"nats a pixel of {len(unseen)} images not trained on: target {of_target:.2f}, draft {of_draft:.2f}")
    prompts = [[LEVELS + i % CLASSES] for i in range(copies * CLASSES)]
    for grade in (Exactness.DISTRIBUTION, Exactness.TRAJECTORY):
        plain, plain_steps = sample(target, Proposer(), prompts, 0, seed, grade)
        fast, steps = sample(target, coarse, prompts, depth, seed, grade)
        report(f"{grade}, plain", plain, plain_steps)
        report(f"{grade}, drafted", fast, steps)
        if grade is Exactness.TRAJECTORY:
            same = sum(a.pixels == b.pixels for a, b in zip(plain, fast, strict=True))
            print(f"  {same} of {len(plain)} images are those of plain sampling, pixel by pixel")
        if picture is not None and grade is Exactness.DISTRIBUTION:
            first = [images[images[:, 0] == LEVELS + c][0, 1:] for c in range(CLASSES)]
            draw(picture, torch.stack(first), fast[: 3 * CLASSES])
            print(f"  picture: {picture}")


if __name__ == "__main__":
    typer.run(main)
