"""The editing workload: whole programs before and after, and a target whose output is forced."""

from __future__ import annotations

import ast

import pytest

from foretoken.bench.editing import EDITS, ForcedOutput, editing_tasks
from foretoken.control.fixed import Fixed
from foretoken.core.context import Context
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.toy import ToyModel
from foretoken.propose.base import Proposer
from foretoken.propose.lookup import Lookup
from foretoken.propose.prediction import Prediction
from foretoken.propose.suffix import Suffix


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
