"""Every spelling of `prefect deployment run … --param` either works or is refused with the right one shown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sweeps.request import HELP, build


def arrives(text: str) -> Any:
    """What Prefect makes of the right side of ``--param name=text``: JSON, else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def asked(**spelled: str) -> Any:
    """The sweep that these parameters describe, through the flow's own validation."""
    from flows.sweep import sweep

    valid = sweep.validate_parameters({name: arrives(text) for name, text in spelled.items()})
    return build(valid.get("grid", "ablation"), **{name: value for name, value in valid.items() if name in HELP})


@pytest.mark.parametrize(
    "text", ['["gdn","gla"]', "gdn,gla", "['gdn', 'gla']", "[gdn,gla]", '["gdn,gla"]', '"gdn,gla"']
)
def test_lists_in_any_spelling(text):
    cells = asked(mechanisms=text, budgets="56+8").cells
    assert [cell.recipe.mechanism for cell in cells] == ["softmax", "gdn", "gla"]


def test_numbers_in_any_spelling():
    cells = asked(seeds="[1,2]", tokens="4k", learning_rate="1.10", sequence_length="256").cells
    assert {cell.seed for cell in cells[1:]} == {1, 2}
    assert (
        cells[1].train.tokens == 4000 and cells[1].train.learning_rate == 1.1 and cells[1].train.sequence_length == 256
    )
    assert asked(seeds="3", tokens='"10.24M"').cells[1].train.tokens == 10_240_000


@pytest.mark.parametrize(
    ("spelled", "shown"),
    [
        ({"mechanisms": '{"gdn": 1}'}, "mechanisms"),
        ({"mechanisms": "[]"}, "write mechanisms="),
        ({"budgets": "64,128"}, "56+8"),
        ({"learning_rate": "NaN"}, "finite number"),
        ({"learning_rate": "12e4567"}, "finite number"),
        ({"tokens": "Infinity"}, "10.24M"),
        ({"seeds": "1.5"}, "seeds"),
        ({"no_such": "1"}, "no_such"),
    ],
)
def test_what_is_wrong_is_refused_with_the_right_spelling(spelled, shown):
    with pytest.raises(Exception, match=shown.replace("+", r"\+")):
        asked(**spelled)
