"""The race: all systems take turns in rotating order, so that drift of the machine affects all of them equally.

The entrants are our configurations and each peer, plain and at every draft length. All systems stay loaded while memory
suffices, otherwise those that are needed soonest.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from foretoken import zoo
from foretoken.bench.output import memory
from foretoken.bench.peers import export
from foretoken.bench.peers.protocol import OWN_CHOICE, Answer, PeerRequest, Setup
from foretoken.bench.peers.registry import GGUF_TYPES, OURS, Peer
from foretoken.bench.peers.worker import PeerError, PeerWorker
from foretoken.control.config import GoodputConfig, parse
from foretoken.core.errors import ForetokenError
from foretoken.models.formats.checkpoint import load_config
from foretoken.models.formats.gguf import is_gguf
from foretoken.propose.methods import NONE
from foretoken.speculation import AUTO, SpeculativeConfig

WEIGHT_COPIES, OVERHEAD = 2.5, 2 * 2**30  # while loading, a system may hold its weights twice; and its libraries


class Pool:
    """Keeps workers loaded while memory suffices.

    schedule: The setup of every turn. The worker whose next turn is furthest away is unloaded first.
    """

    def __init__(
        self,
        start: Callable[[Setup], PeerWorker],
        schedule: Sequence[Setup],
        fits: Callable[[Setup], bool] = lambda setup: memory("MemAvailable") >= needed(setup),
    ) -> None:
        self._start, self._schedule, self._fits = start, list(schedule), fits
        self._workers: dict[Setup, PeerWorker] = {}

    def get(self, turn: int) -> PeerWorker:
        """Returns the worker of a turn and loads it if necessary, unloading others. Raises PeerError."""
        setup = self._schedule[turn]
        if setup not in self._workers:
            while self._workers and not self._fits(setup):
                self.drop(max(self._workers, key=lambda other: self._next(other, turn)))
            self._workers[setup] = self._start(setup)
        return self._workers[setup]

    def drop(self, setup: Setup) -> None:
        """Unloads a worker; unknown setups are ignored."""
        if setup in self._workers:
            self._workers.pop(setup).close()

    def close(self) -> None:
        for setup in list(self._workers):
            self.drop(setup)

    def _next(self, setup: Setup, turn: int) -> int:
        """Returns the next turn that needs ``setup``, or the number of turns if none does."""
        return next((at for at in range(turn, len(self._schedule)) if self._schedule[at] == setup), len(self._schedule))


def needed(setup: Setup) -> int:
    """Returns the bytes of memory that must be free before ``setup`` is loaded."""
    target = Path(setup.target)
    files = [target] if target.is_file() else [f for f in target.glob("*") if f.suffix in (".safetensors", ".bin")]
    weights = sum(file.stat().st_size for file in files)
    return int(WEIGHT_COPIES * weights) + OVERHEAD


WARM_UP = 8  # tokens
LONG = 1000  # tokens of a prompt beyond which a warm-up takes a part of it


@dataclass(frozen=True)
class Entrant:
    """A system with its method and depth. Entrants with the same setup share a process."""

    system: str
    method: str
    depth: int
    setup: Setup


@dataclass(frozen=True)
class RaceTask:
    """The task of all entrants."""

    groups: list[list[list[int]]]  # prompts that run in one batch, each as token ids
    limits: list[int]  # tokens of each prompt, by group
    temperature: float


@dataclass(frozen=True)
class RaceRow:
    """The result of one entrant: medians over the repeats; spreads are (lowest, highest)."""

    system: str
    version: str
    method: str
    num_speculative_tokens: int
    quantization: str
    temperature: float
    batch: int
    tokens_per_second: float
    tokens_per_second_spread: tuple[float, float]
    decode_tokens_per_second: float
    decode_tokens_per_second_spread: tuple[float, float]
    prefill_seconds: float  # until every prompt of a group had its first tokens
    tokens_per_pass: float  # emitted tokens per target pass
    identical_to_plain: bool | None  # whether all texts equal the system's own plain ones. None for sampled texts.
    identical_texts: int | None
    texts: int
    repeats: int
    weights: str = "bf16"  # how the system stores the target's weights
    best: bool = False  # whether this is the depth at which the system and method were fastest
    resident_bytes: int = 0  # largest resident memory of the system's processes after a turn; 0 if hidden
    sampling_bias_z: float | None = None  # sampling bias in standard errors, see ``sampling_bias.py``
    sampling_bias_nats: float | None = None  # sampling bias in nats per token


def turns(count: int, repeats: int) -> list[int]:
    """Returns the order of the turns: every index once per repeat, rotated by one each time."""
    return [(i + r) % count for r in range(repeats) for i in range(count)]


RaceAnswers = dict[tuple[Entrant, float], list[list[Answer]]]  # the answers of every repeat, by entrant and temperature


def race(
    entrants: Sequence[Entrant],
    tasks: Sequence[RaceTask],
    repeats: int,
    start: Callable[[Setup], PeerWorker],
    say: Callable[[str], None],
    track: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> tuple[list[RaceRow], RaceAnswers]:
    """Runs all entrants on all tasks, interleaved.

    Returns rows and answers of every entrant that finished.
    say: Receives a line about a system that failed. track: Wraps the turns to show progress.
    """
    pairs = [(entrant, task) for entrant in entrants for task in tasks]
    order = turns(len(pairs), repeats)
    race_answers: RaceAnswers = {(entrant, task.temperature): [] for entrant, task in pairs}
    versions: dict[Setup, str] = {}
    resident: dict[Setup, int] = {}
    failed: set[Setup] = set()
    with closing(Pool(start, [pairs[i][0].setup for i in order])) as pool:
        for turn in track(range(len(order))):
            entrant, task = pairs[order[turn]]
            if entrant.setup in failed:
                continue
            try:
                worker = pool.get(turn)
                versions[entrant.setup] = worker.version
                race_answers[entrant, task.temperature].append(run(worker, entrant, task))
                resident[entrant.setup] = max(resident.get(entrant.setup, 0), worker.resident_bytes)
            except PeerError as error:
                failed.add(entrant.setup)
                pool.drop(entrant.setup)
                say(f"{error}. Racing without it.")
    race_answers = {key: answers for key, answers in race_answers.items() if key[0].setup not in failed}
    return _rows(tasks, race_answers, versions, resident), race_answers


def _rows(
    tasks: Sequence[RaceTask], race_answers: RaceAnswers, versions: Mapping[Setup, str], resident: Mapping[Setup, int]
) -> list[RaceRow]:
    """Returns a row for each entrant and task, the best of each system marked."""
    rows: list[RaceRow] = []
    for task in tasks:
        by_entrant = {
            entrant: answers for (entrant, value), answers in race_answers.items() if value == task.temperature
        }
        plain = {e.system: answers[0] for e, answers in by_entrant.items() if e.method == "plain"}
        found = [
            replace(
                summarize(e, versions[e.setup], task, answers, plain.get(e.system)), resident_bytes=resident[e.setup]
            )
            for e, answers in by_entrant.items()
        ]
        rows += mark_best(found)
    return rows


def run(worker: PeerWorker, entrant: Entrant, task: RaceTask) -> list[Answer]:
    """Runs one turn: a short warm-up, with an eighth of a long prompt, then every group once."""

    def answer(group: list[list[int]], tokens: int) -> Answer:
        return worker.answer(PeerRequest(group, tokens, task.temperature, entrant.depth))

    answer([prompt[: max(LONG, len(prompt) // 8)] for prompt in task.groups[0]], min(WARM_UP, *task.limits))
    return [answer(group, limit) for group, limit in zip(task.groups, task.limits, strict=True)]


def summarize(
    entrant: Entrant, version: str, task: RaceTask, repeats: Sequence[Sequence[Answer]], plain: Sequence[Answer] | None
) -> RaceRow:
    """Summarizes all repeats of one entrant. plain: answers of the same system without speculation."""
    rates = [sum(a.total for a in run) / sum(a.seconds for a in run) for run in repeats]
    decode = [
        sum(a.total - a.first_tokens for a in run) / max(1e-9, sum(a.seconds - a.first_seconds for a in run))
        for run in repeats
    ]
    every = [answer for run in repeats for answer in run]
    texts = [tokens for answer in repeats[0] for tokens in answer.tokens]
    same = None
    if plain is not None and task.temperature == 0:
        expected = [tokens for answer in plain for tokens in answer.tokens]
        made = [[tokens for answer in run for tokens in answer.tokens] for run in repeats]
        same = sum(all(run[i] == text for run in made) for i, text in enumerate(expected))
    return RaceRow(
        system=entrant.system,
        version=version,
        method=entrant.method,
        num_speculative_tokens=entrant.depth,
        quantization=entrant.setup.quantization or "bf16",
        temperature=task.temperature,
        batch=max(map(len, task.groups)),
        tokens_per_second=median(rates),
        tokens_per_second_spread=(min(rates), max(rates)),
        decode_tokens_per_second=median(decode),
        decode_tokens_per_second_spread=(min(decode), max(decode)),
        prefill_seconds=median(answer.first_seconds for answer in every),
        tokens_per_pass=sum(a.total for a in every) / max(1, sum(a.passes for a in every)),
        identical_to_plain=None if same is None else same == len(texts),
        identical_texts=same,
        texts=len(texts),
        repeats=len(repeats),
        weights=entrant.setup.weights,
    )


def mark_best(rows: Sequence[RaceRow]) -> list[RaceRow]:
    """Marks the fastest depth of every system and method."""
    fastest = {(row.system, row.method): row.tokens_per_second for row in sorted(rows, key=_rate)}
    return [replace(row, best=row.tokens_per_second == fastest[row.system, row.method]) for row in rows]


def ratios(rows: Sequence[RaceRow]) -> list[dict[str, Any]]:
    """Returns the speedups of our fastest speculation over its plain decoding and over every peer.

    Peers count at their fastest depth end to end, with and without speculation. Speedups are end to end and decoding
    only.
    """
    best = [row for row in rows if row.best]
    fastest = max((r for r in best if r.system == "foretoken" and r.method != "plain"), key=_rate, default=None)
    if fastest is None:
        return []
    groups: dict[tuple[str, bool], list[RaceRow]] = {}
    for row in best:
        groups.setdefault((row.system, row.method == "plain"), []).append(row)
    others = [max(group, key=_rate) for group in groups.values() if fastest not in group]
    return [
        {
            "over": f"{other.system} {'plain' if other.method == 'plain' else 'speculative'}",
            "tokens_per_second": fastest.tokens_per_second / other.tokens_per_second,
            "decode_tokens_per_second": fastest.decode_tokens_per_second / other.decode_tokens_per_second,
        }
        for other in others
        if other.tokens_per_second and other.decode_tokens_per_second
    ]


def _rate(row: RaceRow) -> float:
    return row.tokens_per_second


_WITH_DRAFT = (AUTO, "draft_model")  # methods that draft with a draft model
Config = Mapping[str, object]  # a speculative_config, as users write it; an empty one leaves the method to ``LLM``
UNNAMED = "default"  # the method of a row whose configuration names none


def own(shared: Setup, configs: Sequence[Config], depths: tuple[int, ...]) -> list[Entrant]:
    """Returns plain decoding once, and every configuration at its own depth or at all ``depths``.

    shared: The models and settings of the race, with the draft model for the methods that take one.

    Raises:
        InvalidRequest: A configuration is not valid.
        ModelLoadError: The target cannot be converted to the GGUF type that the race asks for.
    """
    shared = _converted(OURS, shared)
    entrants: list[Entrant] = []
    methods = list(map(_method, configs))
    for method, config in zip(methods, configs, strict=True):
        named = {k: v for k, v in config.items() if k not in ("model", "num_speculative_tokens")}
        named |= {"method": method} if config else {}
        options = tuple(sorted((key, json.dumps(value)) for key, value in named.items()))
        setup = replace(_setup(OURS, shared, method), options=options)
        if "model" in config:
            setup = replace(setup, draft=str(config["model"]))
        if not entrants:
            entrants.append(Entrant(OURS.name, "plain", 0, setup))
        name = UNNAMED if not config else method if methods.count(method) == 1 else _label(config)
        entrants += [Entrant(OURS.name, name, depth, setup) for depth in _depths(config, depths)]
    return entrants


def peers(
    shared: Setup,
    configs: Sequence[Config],
    depths: tuple[int, ...],
    candidates: Sequence[Peer],
    say: Callable[[str], None],
) -> list[Entrant]:
    """Returns each peer, plain and with the methods that it shares. ``say`` receives the reason why one is skipped."""
    entrants: list[Entrant] = []
    by_method: dict[str, tuple[int, ...]] = {}
    for config in configs:  # a peer has one way to use a method, so it races at the first configuration's depths
        by_method.setdefault(_method(config), _depths(config, depths))
    gguf = is_gguf(Path(shared.target)) or (bool(shared.draft) and is_gguf(Path(shared.draft)))
    for peer in candidates:
        if refusal := peer.refusal(shared.batch, shared.quantization, gguf):
            say(refusal)
            continue
        try:
            converted = _converted(peer, shared)
        except ForetokenError as error:
            say(f"{error}. Racing without it.")
            continue
        entrants += _entrants(peer, converted, {m: d for m, d in by_method.items() if m in peer.methods})
    return entrants


def _entrants(peer: Peer, converted: Setup, depths: dict[str, tuple[int, ...]]) -> list[Entrant]:
    """Entrants share a process where the depth is part of each request; plain decoding is then depth 0."""
    one_process = not peer.fixed_depth and peer.name != "openvino"  # OpenVINO's pipeline with a draft always drafts
    plain = _setup(peer, converted, next(iter(depths)) if one_process and depths else "plain")
    entrants = [Entrant(peer.name, "plain", 0, plain)]
    for method, each in depths.items():
        setup = _setup(peer, converted, method)
        entrants += [
            Entrant(peer.name, method, k, replace(setup, depth=k) if peer.fixed_depth else setup) for k in each
        ]
    return entrants


def _setup(peer: Peer, converted: Setup, method: str) -> Setup:
    """Returns the setup of a peer's process for one method."""
    draft = converted.draft if method in _WITH_DRAFT else ""
    return replace(converted, system=peer.name, method=method, draft=draft)


def _converted(peer: Peer, shared: Setup) -> Setup:
    """Returns the setup with models as files that ``peer`` loads. Only the target is quantized, by all."""
    target, draft = Path(shared.target), shared.draft
    weights = shared.quantization if is_gguf(target) else peer.weights[shared.quantization]
    if peer.name in ("openvino", "llamacpp"):
        to_openvino = peer.name == "openvino"
        convert: Callable[[Path, str], Path] = export.openvino if to_openvino else export.gguf
        draft = draft and str(convert(Path(draft), "bf16" if to_openvino else "BF16"))
        target = convert(target, weights)
    elif weights in GGUF_TYPES:
        target = export.gguf(target, weights)
    return replace(shared, target=str(target), draft=draft, weights=weights)


def stretched(target: Path, positions: int) -> Path:
    """Returns the target, or a folder with its weights whose configuration allows ``positions`` positions.

    Neither the time nor the memory of a prompt depends on the positions that were trained.
    """
    if is_gguf(target) or (config := load_config(target)).get("max_position_embeddings", positions) >= positions:
        return target
    where = zoo.cache_folder() / "stretched" / f"{target.name}-{positions}"
    where.mkdir(parents=True, exist_ok=True)
    for file in target.iterdir():
        if file.is_file() and file.name != "config.json" and not (where / file.name).is_symlink():
            (where / file.name).symlink_to(file.resolve())
    (where / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}), encoding="utf-8")
    return where


def needs_draft(config: Config) -> bool:
    """Returns whether a configuration drafts with a draft model and names none. Raises InvalidRequest."""
    return _method(config) in _WITH_DRAFT and "model" not in config


def _method(config: Config) -> str:
    SpeculativeConfig.of(config)
    return str(config.get("method") or "draft_model")


def _label(config: Config) -> str:
    """Returns the method and the options that distinguish this configuration."""
    hidden = ("method", "model", "num_speculative_tokens")
    options = (f"{key}={value}" for key, value in sorted(config.items()) if key not in hidden)
    return " ".join((_method(config), *options))


def _depths(config: Config, depths: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the depths to race: the configuration's own if it names one or chooses it."""
    control: Any = config.get("control", "fixed")
    if config.get("method") == NONE:
        return ()  # plain decoding races in any case
    if not config or config.get("method") == AUTO or isinstance(parse(control), GoodputConfig):
        return (OWN_CHOICE,)
    depth = config.get("num_speculative_tokens")
    return (int(str(depth)),) if depth is not None else depths
