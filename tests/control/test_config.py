from __future__ import annotations

import pytest
import torch

from foretoken.control.config import CONTROLS, build, max_tokens, parse
from foretoken.control.fixed import Fixed
from foretoken.control.policy import DraftPolicy
from foretoken.core.errors import InvalidRequest


def test_controllers_by_name():
    policy, cpu = DraftPolicy(), torch.device("cpu")
    assert build(parse("goodput"), 12, cpu, policy) is policy and policy.max_tokens == 12 and not policy.constant
    assert policy.ledger is not None and policy.memory is not None
    assert build(parse({"name": "fixed", "memory": False}), 4, cpu, policy) == Fixed(4)
    assert build(parse({"name": "fixed", "guard": True, "memory": False}), 4, cpu, policy) is policy
    assert policy.constant and policy.max_tokens == 4 and policy.ledger is not None and policy.memory is None


def test_the_largest_draft_length():
    assert max_tokens(parse("goodput"), 4, given=False) == 16
    assert max_tokens(parse("goodput"), 32, given=False) == 32
    assert max_tokens(parse("goodput"), 4, given=True) == 4
    assert max_tokens(parse({"name": "goodput", "max_tokens": 6}), 4, given=False) == 6
    assert max_tokens(parse("goodput"), 0, given=False) == 0
    assert max_tokens(parse("fixed"), 4, given=False) == 4


@pytest.mark.parametrize(
    "control, message",
    [
        ("fastest", "one of fixed, goodput, got 'fastest'"),
        ({"guard": True}, "one of fixed, goodput"),
        (3, "one of fixed, goodput"),
        ({"name": "fixed", "depth": 3}, "unknown key.s. in control: depth; known: name, allowance, guard, memory"),
        ({"name": "goodput", "guard": 1}, "guard of control must be true or false"),
        ({"name": "goodput", "max_tokens": 0}, "max_tokens of control must be an integer from 1 to 4096"),
        ({"name": "goodput", "allowance": "much"}, "allowance must be a number"),
    ],
)
def test_wrong_configurations_are_refused(control, message):
    with pytest.raises(InvalidRequest, match=message):
        parse(control)
    assert set(CONTROLS) == {"fixed", "goodput"}
