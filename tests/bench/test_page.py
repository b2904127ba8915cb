"""The page, well-formed, self-contained and with the source of its figures; the editing workload's forced outputs."""

import ast
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from foretoken.bench.editing import EDITS, ForcedOutput, editing_tasks
from foretoken.bench.page import page, race_tables
from foretoken.bench.race import RaceRow
from foretoken.control.fixed import Fixed
from foretoken.core.context import Context
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.toy import ToyModel
from foretoken.propose.base import Proposer
from foretoken.propose.prediction import Prediction
from foretoken.propose.suffix import Lookup, Suffix

ROW = RaceRow(
    *("foretoken", "1", "draft_model", 4, "bf16", 0.0, 1),
    *(50.0, (45.0, 55.0), 60.0, (55.0, 65.0), 0.1, 2.7, True, 6, 6, 3),
    best=True,
)
ROWS = [
    ROW,
    replace(ROW, num_speculative_tokens=8, tokens_per_second=40.0, best=False),
    replace(ROW, system="a<b>", method="plain", num_speculative_tokens=0, tokens_per_second=25.0),
    replace(ROW, temperature=1.0, identical_to_plain=None, identical_texts=None, sampling_bias_z=-0.7),
]
SETTING = {
    "date": "2026-01-01",
    "processor": "a <fast> one",
    "cores": 2,
    "command": 'foretoken bench race --prompts "a&b"',
    "peers": {"vllm": "0.32"},
}


def test_well_formed_and_self_contained():
    text = page(SETTING, ROWS)
    root = ElementTree.fromstring(text.partition("\n")[2])
    for element in root.iter():
        assert element.tag not in ("script", "link", "img", "iframe")
        assert not {"href", "src"} & set(element.attrib)
    assert "http" not in text and "url(" not in text
    assert len(root.findall(".//svg")) == 2
    paths = [
        path for path in root.find(".//svg").iter("path") if re.search(r"fill: var\(--(c0|theirs)", path.get("style"))
    ]
    widths = [max(x) - min(x) for path in paths for x in [[float(v) for v in re.findall(r"[ML] (\S+)", path.get("d"))]]]
    assert len(widths) == 2 and widths[0] == pytest.approx(2 * widths[1], abs=0.2)


def test_it_says_where_its_figures_are_from():
    text = page(SETTING, ROWS)
    for said in ("a &lt;fast&gt; one", "2026-01-01", "a&amp;b", "vllm 0.32", "prefers-color-scheme: dark"):
        assert said in text
    assert "2.00x a&lt;b&gt; plain" in text
    assert page(SETTING, [])


def test_terminal_tables_say_the_same():
    parts = list(race_tables(ROWS))
    assert sum(isinstance(part, str) and part.startswith("\ntemperature") for part in parts) == 2
    assert any(isinstance(part, str) and "over a<b> plain: 2.00x" in part for part in parts)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.rename[0])
def test_an_edit_is_a_rename_and_a_fix(edit):
    old, new = edit.rename
    assert edit.source.count(edit.fix[0]) == 1
    assert 25 <= len(edit.source.splitlines()) <= 60
    ast.parse(edit.source)
    assert new not in {node.id for node in ast.walk(ast.parse(edit.source)) if isinstance(node, ast.Name)}
    names = {node.id for node in ast.walk(ast.parse(edit.edited)) if isinstance(node, ast.Name)}
    assert old not in names
    assert edit.edited != edit.source.replace(old, new)


def steps(proposer: Proposer, tokenizer) -> int:
    """Passes over all tasks; every text must be the forced one."""
    target = ForcedOutput(ToyModel(len(tokenizer), order=1))
    engine = Engine(target, proposer, Fixed(16))
    passes = 0
    for number, task in enumerate(editing_tasks(tokenizer)[:3]):
        target.output, target.prompt_length = task.output, len(task.prompt)
        prompt, law = list(task.prompt), SamplingLaw(temperature=0.0)
        context = Context(number, prompt, len(prompt), law, Streams(0), prediction=tuple(task.reference))
        engine.add(context, Length(len(task.output)))
        while engine.busy:
            passes += len(engine.step())
        assert context.tokens[context.prompt_length :] == task.output
    return passes


def test_edits_are_mostly_drafted(tokenizer):
    plain = sum(len(task.output) for task in editing_tasks(tokenizer)[:3])
    assert steps(Proposer(), tokenizer) == plain
    for proposer, gain in ((Lookup(), 5), (Suffix(), 5), (Prediction(), 7)):
        assert steps(proposer, tokenizer) < plain / gain
