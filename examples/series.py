"""A continuous series: an AR model of four lags drafts, a network over two days of values verifies.

    .venv/bin/python examples/series.py --picture docs/img/series.png

The series is hourly and synthetic: a daily and a weekly cycle, and noise with a threshold,
    y_t = 10 + 2.5 sin(2 pi t / 24) + sin(2 pi t / 168) + a_t,   a_t = 0.8 tanh(1.4 a_{t-1}) - 0.25 a_{t-2} + 0.45 e_t
Both models are fitted to its first weeks and know nothing else about it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from torch import Tensor

from continuous_verifier import Gaussians, Origin, SeededReals, SeriesDraft, SeriesVerdict, verify
from foretoken.core.streams import Purpose, Streams, random_seed_from

Reals = NDArray[np.float64]
Means = Callable[[Reals], Reals]  # pasts [rows, WINDOW] -> means of the next values [rows]

DAY, WINDOW = 24, 48
LAGS = (1, 2, 24, 25)  # lags that the draft uses


def make_series(length: int, seed: int) -> Reals:
    """Returns ``length`` hourly values of the process above."""
    noise = np.random.default_rng(seed).normal(size=length)
    a = np.zeros(length + 2)
    for t in range(length):
        a[t + 2] = 0.8 * np.tanh(1.4 * a[t + 1]) - 0.25 * a[t] + 0.45 * noise[t]
    hours = np.arange(length)
    return 10.0 + 2.5 * np.sin(2 * np.pi * hours / DAY) + np.sin(2 * np.pi * hours / (7 * DAY)) + a[2:]


@dataclass(frozen=True)
class Forecaster:
    """An autoregressive Gaussian: the next value is N(means(last WINDOW values), scale^2). calls: rows of each pass."""

    means: Means
    scale: float
    calls: list[int] = field(default_factory=list)  # rows of each pass

    def rows(self, pasts: Reals, scale: float | None = None) -> Gaussians:
        """Runs one pass over any number of pasts, [rows, WINDOW]. Returns the distributions of the next values."""
        self.calls.append(len(pasts))
        means = self.means(pasts)[:, None]
        return Gaussians(means, np.full_like(means, scale or self.scale))


def windows(series: Reals) -> tuple[Reals, Reals]:
    """Returns every window of WINDOW values, and the value after it."""
    stretches = np.lib.stride_tricks.sliding_window_view(series, WINDOW)[:-1]
    return stretches, series[WINDOW:]


def fit_draft(series: Reals) -> Forecaster:
    """Fits LAGS and a constant by least squares."""
    pasts, nexts = windows(series)

    def inputs(past: Reals) -> Reals:
        return np.column_stack([past[:, [WINDOW - lag for lag in LAGS]], np.ones(len(past))])

    weights, *_ = np.linalg.lstsq(inputs(pasts), nexts, rcond=None)
    return Forecaster(lambda past: inputs(past) @ weights, float(np.std(nexts - inputs(pasts) @ weights)))


def fit_target(series: Reals, steps: int = 1500, seed: int = 1) -> Forecaster:
    """Trains a network of two hidden layers on the residual of least squares over the whole window, with Adam."""
    pasts, nexts = windows(series)
    middle = float(series.mean())
    held_out = len(nexts) // 5
    linear, *_ = np.linalg.lstsq(pasts - middle, nexts - middle, rcond=None)
    x, y = torch.from_numpy(pasts - middle), torch.from_numpy(nexts - middle - (pasts - middle) @ linear)
    generator = torch.Generator().manual_seed(seed)
    sizes = (WINDOW, 48, 48, 1)
    layers = [
        torch.randn(i, o, generator=generator, dtype=torch.float64).mul_(i**-0.5).requires_grad_()
        for i, o in pairwise(sizes)
    ]

    def network(past: Tensor) -> Tensor:
        for layer in layers[:-1]:
            past = torch.tanh(past @ layer)
        return (past @ layers[-1])[:, 0]

    optimizer = torch.optim.AdamW(layers, lr=3e-3, weight_decay=0.05)
    for _ in range(steps):
        some = torch.randint(held_out, len(y), (256,), generator=generator)
        optimizer.zero_grad()
        loss = (network(x[some]) - y[some]).square().mean()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        scale = float((network(x[:held_out]) - y[:held_out]).square().mean().sqrt())  # held out from training

    def means(past: Reals) -> Reals:
        with torch.no_grad():
            bent = network(torch.from_numpy(past - middle)).numpy()
        result: Reals = middle + (past - middle) @ linear + bent
        return result

    return Forecaster(means, scale)


@dataclass(frozen=True)
class ForecastStep:
    """The decode step after ``position`` values: the draft, its verdict, and the target's rows."""

    position: int
    draft: SeriesDraft
    verdict: SeriesVerdict
    target: Gaussians


def decode_step(
    past: Reals,
    target: Forecaster,
    draft: Forecaster,
    streams: Streams,
    position: int,
    depth: int,
    own_scale: bool = False,
) -> ForecastStep:
    """Drafts ``depth`` values one by one, computes the target's rows in one pass, and verifies.

    own_scale: sample with the draft's scale instead of the target's. Rejected values are then resampled.
    """
    numbers = SeededReals(streams, Purpose.DRAFT, position)
    known, means = past[-WINDOW:], np.empty((0, 1))
    scale = draft.scale if own_scale else target.scale
    for i in range(depth):
        row = draft.rows(known[None, -WINDOW:], scale)
        means = np.vstack([means, row.means])
        known = np.append(known, row.draw(0, numbers, i))
    values = known[len(known) - depth :, None]
    drafted = SeriesDraft(values, Gaussians(means, np.full_like(means, scale)))
    rows = target.rows(np.lib.stride_tricks.sliding_window_view(known, WINDOW)[-depth - 1 :])
    return ForecastStep(position, drafted, verify(drafted, rows, SeededReals(streams, Purpose.VERIFY, position)), rows)


def forecast(
    past: Reals, length: int, target: Forecaster, draft: Forecaster, seed: int, depth: int, own_scale: bool = False
) -> tuple[Reals, list[ForecastStep]]:
    """Samples ``length`` future values. Returns them and the decode steps. depth 0 is plain sampling."""
    future, steps, streams = np.empty(0), list[ForecastStep](), Streams(seed)
    while len(future) < length:
        budget = min(depth, length - len(future) - 1)
        known = np.concatenate([past, future])
        one = decode_step(known, target, draft, streams, len(future), budget, own_scale)
        future = np.concatenate([future, one.draft.values[: one.verdict.accepted, 0], one.verdict.value])
        steps.append(one)
    return future, steps


def report(name: str, values: int, steps: list[ForecastStep]) -> None:
    """Prints forward passes and accepted values."""
    passes, accepted = len(steps), sum(s.verdict.accepted for s in steps)
    verified = sum(min(s.verdict.accepted + 1, len(s.draft)) for s in steps)
    print(f"{name}: {passes} passes for {values} values, {1 - passes / values:.0%} saved, {values / passes:.2f} a pass")
    if verified:
        kinds = ", ".join(f"{sum(s.verdict.origin is origin for s in steps)} {origin}" for origin in Origin)
        print(
            f"  {accepted} draft values accepted, {accepted / verified:.0%} of the verified; the target's own: {kinds}"
        )


LOOKS: dict[str, dict[str, Any]] = {
    "accepted draft value": {"color": "#2a9d5c", "marker": "o", "s": 34},
    "rejected draft value": {"facecolors": "white", "edgecolors": "#d1495b", "marker": "o", "s": 34},
    "its reflection": {"color": "#d1495b", "marker": "D", "s": 30},
    "draft value after a rejected one": {"facecolors": "white", "edgecolors": "#bbbbbb", "marker": "o", "s": 18},
    "bonus value": {"color": "#1b5e9c", "marker": "s", "s": 32},
}
BAND = "#dfe7f1"


def draw(picture: Path, past: Reals, future: Reals, steps: list[ForecastStep], others: Reals, shown: int = 30) -> None:
    """Draws the future among others, [futures, hours], and its first ``shown`` hours by decode step."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (wide, near) = plt.subplots(2, 1, figsize=(9, 6.4), height_ratios=(1, 1.6), layout="constrained")
    hours, shown = np.arange(len(future)), min(len(future), shown)
    low, high = np.quantile(others, (0.05, 0.95), axis=0)
    wide.fill_between(hours, low, high, color="#c9d6e8", lw=0, label=f"5 % to 95 % of {len(others)} futures")
    wide.plot(np.arange(-len(past), 1), [*past, future[0]], color="#777777", lw=1, label="what was seen")
    wide.plot(hours, future, color="#1b5e9c", lw=1.3, label="one of them")
    wide.axvspan(-0.5, shown - 0.5, color="#f7f0e0", lw=0, zorder=0)
    wide.text(shown / 2 - 0.5, low.min() - 0.9, "below, step by step", ha="center", fontsize=8, color="#8a7340")
    wide.set_ylim(low.min() - 1.2, high.max() + 2.0)
    wide.legend(loc="upper left", fontsize=8, ncols=3, frameon=False)
    _draw_steps(near, future, steps, shown)
    near.set_xlabel("hours ahead")
    for axes in (wide, near):
        axes.set_ylabel("value")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def _draw_steps(axes: Any, future: Reals, steps: list[ForecastStep], shown: int) -> None:
    """Draws band, draft values and verdicts of the steps that end within ``shown`` hours, separated by dotted lines."""
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in LOOKS}
    accepted, rejected, reflected, dropped, bonus = points.values()
    end = 0
    for one in steps:
        at, own, value = one.position, one.position + one.verdict.accepted, float(one.verdict.value[0])
        if own >= shown:
            break
        for i in range(own - at + 1):
            middle, spread = one.target.means[i, 0], 2 * one.target.scales[i, 0]
            axes.fill_between(
                at + i + np.array([-0.42, 0.42]), middle - spread, middle + spread, color=BAND, lw=0, zorder=0
            )
        drafted = [(at + i, float(x)) for i, x in enumerate(one.draft.values[:, 0])]
        accepted += drafted[: own - at]
        dropped += [point for point in drafted[own - at + 1 :] if point[0] < shown]
        if one.verdict.origin is Origin.BONUS:
            bonus.append((own, value))
        else:
            rejected.append(drafted[own - at])
            reflected.append((own, value))
            arrow = {"arrowstyle": "->", "color": "#d1495b", "lw": 1.2}
            axes.annotate("", (own, value), drafted[own - at], arrowprops=arrow, zorder=2)
        axes.axvline(own + 0.5, color="#bbbbbb", lw=0.8, ls=":", zorder=0)
        end = own + 1
    axes.plot(np.arange(end), future[:end], color="#999999", lw=0.8, zorder=1)
    for name, look in LOOKS.items():
        if points[name]:
            axes.scatter(*zip(*points[name], strict=True), zorder=3, label=name, **look)
    axes.fill_between([], [], [], color=BAND, lw=0, label="target's mean ± 2 deviations")
    axes.set_xlim(-0.8, shown - 0.4)
    axes.set_ylim(top=axes.get_ylim()[1] + 1.4)
    axes.legend(loc="upper left", fontsize=8, ncols=3, frameon=False)


def main(
    futures: Annotated[int, typer.Option(help="how many futures are drawn")] = 100,
    length: Annotated[int, typer.Option(help="hours ahead")] = 96,
    depth: Annotated[int, typer.Option(help="draft values a step")] = 5,
    picture: Annotated[Path | None, typer.Option(help="where a picture is written")] = None,
    seed: Annotated[int, typer.Option(help="of the futures")] = 7,
) -> None:
    """Fits both models, samples futures in three ways, and prints how many passes speculation saved."""
    torch.set_num_threads(1)
    series = make_series(24 * 7 * 30, seed=3)
    target, draft = fit_target(series), fit_draft(series)
    print(
        f"the target misses by {target.scale:.3f}, the draft by {draft.scale:.3f} (the noise's own deviation is 0.45)"
    )
    past = series[-7 * DAY :]
    for name, k, own_scale in (
        ("plain", 0, False),
        ("drafted with the target's scale", depth, False),
        ("with the draft's own", depth, True),
    ):
        drawn = [forecast(past, length, target, draft, random_seed_from(seed, i), k, own_scale) for i in range(futures)]
        report(name, futures * length, [s for _, steps in drawn for s in steps])
        ends = np.array([future[-1] for future, _ in drawn])
        print(
            f"  the value {length} hours ahead: {ends.mean():.2f} ± {ends.std() / len(ends) ** 0.5:.2f}, "
            f"deviation {ends.std():.2f}"
        )
        if picture is not None and k and not own_scale:
            future, steps = drawn[0]
            draw(picture, past[-72:], future, steps, np.array([f for f, _ in drawn]))
            print(f"  picture: {picture}")


if __name__ == "__main__":
    typer.run(main)
