"""``foretoken drafts``, and ``--draft-model auto``."""

import json
from typing import Any

from foretoken import zoo


def test_drafters_are_listed_with_licence_and_source(run: Any) -> None:
    out = " ".join(run("drafts", "Qwen/Qwen3-8B").out.split())
    assert "Tengyunw/qwen3_8b_eagle3 Qwen/Qwen3-8B eagle3 MIT not here https://huggingface.co/Tengyunw/" in out
    assert "no drafter of a/[b] is known" in run("drafts", "a/[b]").out


def test_bundled_drafters_have_their_folders(run: Any) -> None:
    rows = json.loads(run("drafts", str(zoo.path("target")), "--json").out)
    assert [row["form"] for row in rows] == ["eagle3", "mtp", "medusa", "blockwise", "draft_model"]
    assert rows[0] == {
        "drafter": "stdlib-eagle3",
        "target": "stdlib-15m",
        "form": "eagle3",
        "method": "eagle3",
        "licence": "Apache-2.0",
        "source": "bundled",
        "place": "bundled",
        "path": str(zoo.path("eagle3")),
    }


def test_the_choice_of_auto_is_printed(run: Any) -> None:
    result = run("generate", "def", "-md", "auto", "--max-tokens", "4", "--json")
    assert result.err.splitlines()[-1] == "drafter: stdlib-eagle3 (eagle3, bundled) of stdlib-15m"
    assert json.loads(result.out)["draft_model"] == str(zoo.path("eagle3"))


def test_a_bundled_drafter_is_loaded_by_its_name(run: Any) -> None:
    result = run("generate", "def", "-md", "stdlib-medusa", "--max-tokens", "4", "--json")
    assert json.loads(result.out)["draft_model"] == str(zoo.path("medusa"))
