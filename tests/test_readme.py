"""The README says what is there: a row for every verb, and no part left to be filled in."""

from __future__ import annotations

import re
from pathlib import Path

from deepinfer_cli.commands import VERBS

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_verb_table_names_exactly_the_verbs():
    section = re.search(r"^## The verbs\n(.*?)^## ", README, re.MULTILINE | re.DOTALL)
    assert section is not None, "README.md has no section 'The verbs'"
    rows = re.findall(r"^\| *`([^`]+)` *\|", section[1], re.MULTILINE)
    assert sorted(rows) == sorted(verb.name for verb in VERBS)


def test_no_placeholder_is_left():
    assert re.findall(r"^@\w+@$", README, re.MULTILINE) == []
