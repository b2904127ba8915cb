"""Commands never write over their inputs or over artifacts of another kind, and replace their own only with --force."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from tests.cli.conftest import Run
from tests.conftest import Pair
from tests.models.heads import blocks, tiny

from foretoken import LLM
from foretoken.cli.files import OUTPUT_FILES
from foretoken.cli.main import app
from foretoken.core.artifacts import kind_of
from foretoken.core.errors import InvalidRequest, WriteError
from foretoken.propose.recycling import Recycling
from foretoken.quantize import quantize_checkpoint

pytestmark = pytest.mark.slow

SIZES = "--hidden 32 --intermediate 48 --layers 1 --heads 2 --kv-heads 1 --head-dim 16 --no-compile"
T5 = "--hidden 32 --intermediate 48 --layers 1 --decoder-layers 1 --heads 2 --head-dim 16 --no-compile"
HYBRID = "--hidden 32 --layers 4 --heads 2 --kv-heads 1 --head-dim 16 --linear-key-heads 1 --linear-value-heads 2 "
HYBRID += "--linear-head-dim 16 --experts 4 --experts-per-token 2 --units 16 --shared-units 16 --positions 128"
WIDE = "--hidden 128 --intermediate 96 --layers 3 --heads 8 --kv-heads 2"
STEPS = "--data {texts} --steps 1 --batch 2 --window 24 --no-compile"
HEADS = f"--model {{target}} {STEPS} --windows 4 --held-out 2 --device cpu"

# By command: the kind of its artifact among ``ARTIFACTS``, and its arguments behind the output; {names} are inputs.
COMMANDS = {
    "train target": ("model", f"{SIZES} {STEPS}"),
    "train draft": ("model", f"{{target}} {SIZES} {STEPS} --device cpu"),
    "train hybrid": ("model", f"{HYBRID} {STEPS} --device cpu"),
    "train seq2seq": ("model", f"{T5} --data {{texts}} --steps 1 --batch 2 --window 64"),
    "train seq2seq-draft": ("model", f"--target {{t5}} {T5} --data {{texts}} --steps 1 --batch 2 --window 64"),
    "train acceptance": (
        "acceptance",
        f"--model {{target}} --draft-model {{draft}} {STEPS.replace(' --no-compile', '')} --windows 4 --held-out 1 "
        "--device cpu",
    ),
    "train eagle3": ("eagle3", f"{HEADS} --taps 1,2,2 --intermediate 16 --vocabulary 64 --depths 2"),
    "train peagle": ("eagle3", f"{HEADS} --taps 1,2,2 --intermediate 16 --vocabulary 64 --depths 2 --layers 1"),
    "train mtp": ("mtp", f"{HEADS} --intermediate 16 --depths 2"),
    "train medusa": ("medusa", f"{HEADS} --heads 2"),
    "train blockwise": ("blockwise", f"{HEADS} --heads 2 --intermediate 16"),
    "train early-exit": ("early-exit", f"{HEADS} --exit-layer 1"),
    "train dflash": ("dflash", f"{HEADS} --block 3 --layers 1 --taps 1,2 --intermediate 16 --anchors 2"),
    "train jetspec": ("jetspec", f"{HEADS} --block 3 --layers 1 --taps 1,2 --intermediate 16 --anchors 2"),
    "train dspark": ("dspark", f"{HEADS} --block 3 --layers 1 --taps 1,2 --intermediate 16 --anchors 2"),
    "convert": ("eagle3", "--to speculators"),
    "quantize": ("model", "--scheme int8"),
    "widen": ("model", WIDE),
    "build-datastore": ("datastore", "--data {texts} --model {target}"),
}
SOURCES = {"convert": "head", "quantize": "target", "widen": "target"}  # commands whose first argument is an input


def written(path: Path, name: str, content: str = "{}") -> Path:
    path.mkdir()
    (path / name).write_text(content)
    return path


ARTIFACTS: dict[str, Callable[[Path, Pair], Path]] = {
    "model": lambda path, pair: Path(shutil.copytree(pair.draft, path)),
    "eagle3": lambda path, pair: tiny.save(path, *tiny.eagle3(hidden=32)),
    "medusa": lambda path, pair: tiny.save(path, *tiny.medusa(hidden=32)),
    "blockwise": lambda path, pair: tiny.save(path, *tiny.blockwise(hidden=32)),
    "dflash": lambda path, pair: tiny.save(path, *blocks.dflash()),
    "jetspec": lambda path, pair: tiny.save(path, *blocks.jetspec()),
    "dspark": lambda path, pair: tiny.save(path, *blocks.dspark()),
    "mtp": lambda path, pair: tiny.save(path, {"foretoken_mtp": {"normed": True}}, {"mtp.fc.weight": torch.ones(2)}),
    "early-exit": lambda path, pair: tiny.save(path, {"model_type": "foretoken_early_exit"}, {"a": torch.ones(1)}),
    "acceptance": lambda path, pair: tiny.save(path, {"model_type": "foretoken_acceptance"}, {"a": torch.ones(1)}),
    "datastore": lambda path, pair: written(path, "datastore.json"),
    "adapter": lambda path, pair: written(path, "adapter_config.json"),
    "gguf": lambda path, pair: written(path, "model.gguf", "GGUF"),
    "text": lambda path, pair: written(path, "chapter.md", "mine"),
    "a file": lambda path, pair: (path.write_text("mine"), path)[1],
}


def contents(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


class Workspace:
    """A folder with inputs of all commands, which the tests must find unchanged."""

    def __init__(self, root: Path, pair: Pair) -> None:
        self.root, self.pair = root, pair
        self.inputs = {name: root / name for name in ("target", "draft", "head", "t5", "texts")}
        shutil.copytree(pair.target, self.inputs["target"])
        shutil.copytree(pair.draft, self.inputs["draft"])
        tiny.save(self.inputs["head"], *tiny.eagle3(embedding=False))
        written(self.inputs["t5"], "config.json", '{"model_type": "t5"}')
        self.inputs["texts"].mkdir()
        for number in range(6):
            lines = (f"def f{number}_{i}(x):\n    return x * {i} + {i % 7}\n\n" for i in range(20))
            (self.inputs["texts"] / f"f{number}.py").write_text("".join(lines))
        self.before = contents(root)

    def args(self, command: str, out: Path, *more: str) -> list[str]:
        source = [str(self.inputs[SOURCES[command]])] if command in SOURCES else []
        options = COMMANDS[command][1].format(**self.inputs).split()
        return [*command.split(), *source, str(out), *options, *more]

    def unchanged(self) -> bool:
        return contents(self.root) == self.before


@pytest.fixture
def work(tiny_pair: Pair, tmp_path: Path) -> Workspace:
    (tmp_path / "work").mkdir()
    return Workspace(tmp_path / "work", tiny_pair)


def leaves(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, set[str]]]:
    """Every command with the names of its parameters."""
    commands = getattr(group, "commands", None)
    if commands is None:
        yield " ".join(path), {parameter.name for parameter in group.params}
    for name, command in (commands or {}).items():
        yield from leaves(command, (*path, name))


def test_every_command_with_an_output_is_here() -> None:
    listed = dict(leaves(typer.main.get_command(app)))
    assert {name for name, parameters in listed.items() if "out" in parameters} == set(COMMANDS)
    assert {name for name, parameters in listed.items() if parameters & set(OUTPUT_FILES)} == set(FILE_COMMANDS)
    assert {name for name, parameters in listed.items() if "force" in parameters} == set(COMMANDS)


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["", "--force"])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_is_an_input_is_refused(run: Run, work: Workspace, command: str, force: tuple[str, ...]) -> None:
    named = [name for name in work.inputs if f"{{{name}}}" in COMMANDS[command][1]]
    named += [SOURCES[command]] if command in SOURCES else []
    (work.root.parent / "link").symlink_to(work.root)
    for name in named:
        path = work.inputs[name]
        outs = [path, work.root.parent / "link" / name, work.root / "texts" / ".." / name, work.root]
        if name != "texts":
            outs.append(path / "inside")
        for out in outs:
            run(*work.args(command, out, *force)).refused("this command uses")
    assert work.unchanged()


@pytest.mark.parametrize("command", COMMANDS)
def test_another_kind_of_artifact_is_never_replaced(run: Run, work: Workspace, command: str, tmp_path: Path) -> None:
    outs = [ARTIFACTS[kind](tmp_path / kind, work.pair) for kind in ARTIFACTS.keys() - {COMMANDS[command][0]}]
    before = contents(tmp_path)
    for out, force in product(outs, ((), ("--force",))):
        run(*work.args(command, out, *force)).refused("is not replaced by")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_the_same_kind_is_replaced_only_if_asked(run: Run, work: Workspace, command: str, tmp_path: Path) -> None:
    out = ARTIFACTS[COMMANDS[command][0]](tmp_path / "out", work.pair)
    (out / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    run(*work.args(command, out)).refused("exists; name another output, or pass --force to replace it")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_force_replaces_the_same_kind(run: Run, work: Workspace, command: str, tmp_path: Path) -> None:
    if command == "train seq2seq-draft":
        shutil.rmtree(work.inputs["t5"])
        run(*work.args("train seq2seq", work.inputs["t5"])).ok()
        work.before = contents(work.root)
    (tmp_path / "out").mkdir()
    out = ARTIFACTS[COMMANDS[command][0]](tmp_path / "out" / "artifact", work.pair)
    kind, before = kind_of(out), contents(out)
    (out / "notes.txt").write_text("of the earlier one")
    run(*work.args(command, out, "--force")).ok()
    assert kind_of(out) == kind and contents(out) != before and "notes.txt" not in contents(out)
    assert [path.name for path in out.parent.iterdir()] == ["artifact"]
    assert work.unchanged()


def test_gguf_files_and_parts_of_split_ones_are_protected(run: Run, work: Workspace, tmp_path: Path) -> None:
    file, folder = tmp_path / "a.gguf", tmp_path / "folder"
    quantize_checkpoint(work.inputs["target"], file, "F16")
    parts = [tmp_path / f"b-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        shutil.copy(file, part)
    before = contents(tmp_path)
    for source, out, words in (
        (file, file, "the same file"),
        (parts[0], parts[1], "the same file"),
        (work.inputs["target"], file, "--force"),
    ):
        force = () if words == "--force" else ("--force",)
        run("quantize", str(source), str(out), "--scheme", "F16", *force).refused(words)
        assert contents(tmp_path) == before
    assert run("quantize", str(file), str(folder), "--scheme", "bfloat16").code == 0
    result = run("train", "eagle3", str(folder), "--model", str(folder), "--data", str(work.inputs["texts"]))
    result.refused("the same folder")


FILE_COMMANDS = {
    "generate": "x --model {model}",
    "plan": "--model {model}",
    "simulate": "",
    "audit": "--model {model}",
    "bench race": "--target {model} --draft {model}",
    "bench costs": "--model {model}",
    "bench serve": "",
    "bench table": "--target {model} --draft {model}",
}


def file_options(command: str) -> list[str]:
    """The options of a command that name a file to write."""
    listed = dict(leaves(typer.main.get_command(app)))
    return [f"--{name.removesuffix('_file')}" for name in OUTPUT_FILES if name in listed[command]]


CASES = [(command, option) for command in FILE_COMMANDS for option in file_options(command)]


@pytest.mark.parametrize(("command", "option"), CASES)
def test_output_files_are_no_inputs_and_no_other_files(run: Run, work: Workspace, command: str, option: str) -> None:
    target = work.inputs["target"]
    args = [*command.split(), *FILE_COMMANDS[command].format(model=target).split()]
    config = json.dumps({"method": "retrieval", "model": str(work.inputs["texts"] / "f0.py")})
    if command in ("plan", "generate", "audit"):
        args += ["--speculative-config", config]
        cases = {work.inputs["texts"] / "f0.py": "the same file"}
    else:
        cases = {}
    cases |= {
        target / "config.json": "belongs to a model" if option == "--output" else "is not replaced by",
        target / "model.safetensors": "is not replaced by",
        target / "tokenizer.json": "belongs to a model" if option == "--output" else "is not replaced by",
        work.inputs["texts"] / "f1.py": "is not replaced by",
    }
    for file, words in cases.items():
        run(*args, option, str(file)).refused(words)
        assert work.unchanged()


def test_prompts_are_not_written_over(run: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text('{"prompt": "a"}\n')
    for command in ("plan", "audit", "bench race", "bench table --only x --record"):
        option = [] if command.endswith("--record") else ["--prompts", str(prompts), "--output"]
        result = run(*command.split(), *option, str(prompts), *(["--output", str(prompts)] if not option else []))
        result.refused("the same file")
    assert prompts.read_text() == '{"prompt": "a"}\n'
    (tmp_path / "link").symlink_to(prompts)
    assert "the same file" in run("plan", "--prompts", str(prompts), "--output", str(tmp_path / "link")).err
    assert "the same file" in run("plan", "--output", str(tmp_path / "x"), "--html", str(tmp_path / "x")).err
    (tmp_path / "x.partial").write_text("mine")
    refused = run("audit", "--endpoint", "http://localhost:9", "--output", str(tmp_path / "x"))
    assert "x.partial holds something else" in refused.err


def test_a_result_replaces_an_earlier_one_whole_or_not_at_all(run, tmp_path, monkeypatch):
    out, page = tmp_path / "a.json", tmp_path / "a.html"
    for _ in range(2):
        assert run("simulate", "--output", str(out), "--html", str(page)).code in (0, 3)
    before = out.read_bytes(), page.read_bytes()
    assert json.loads(before[0]) and before[1].lower().startswith(b"<!doctype html")

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    result = run("simulate", "--output", str(out))
    assert result.code == 1 and "No space left" in result.err
    assert (out.read_bytes(), page.read_bytes()) == before
    assert sorted(os.listdir(tmp_path)) == ["a.html", "a.json"]


def test_empty_files_and_folders_are_replaced_by_their_like_alone(run: Run, work: Workspace, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.gguf").mkdir()
    for command in ("quantize", "convert", "build-datastore"):
        run(*work.args(command, tmp_path / "file", "--force")).refused("is a file")
    target = str(work.inputs["target"])
    run("quantize", target, str(tmp_path / "folder.gguf"), "--scheme", "F16").refused("is a folder")
    assert run(*work.args("convert", tmp_path / "folder")).code == 0
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "folder.gguf", "work"]


def test_the_library_follows_the_same_rule(work: Workspace, tmp_path: Path) -> None:
    table = work.inputs["target"] / "model.safetensors"
    with pytest.raises(InvalidRequest, match="belongs to a model"):
        Recycling(8).save(table)
    (tmp_path / "notes").write_text("mine")
    with pytest.raises((InvalidRequest, WriteError), match="is not replaced by"):
        Recycling(8).save(tmp_path / "notes")
    (tmp_path / "tables").mkdir()
    for _ in range(2):
        Recycling(8).save(tmp_path / "tables" / "table.safetensors")
    llm = LLM(work.inputs["target"], work.inputs["draft"], dtype="float32", adapt=True)
    for folder in (work.inputs["draft"], work.inputs["target"], work.root):
        with pytest.raises(InvalidRequest, match="which this command uses"):
            llm.save_draft(folder, force=True)
    assert work.unchanged()
    llm.save_draft(tmp_path / "saved")
    with pytest.raises(InvalidRequest, match="exists"):
        llm.save_draft(tmp_path / "saved")
    llm.save_draft(tmp_path / "saved", force=True)
