"""The listed mutants and seeded defects are changes of lines that are there, which is what their results are of."""

import json

from tools import mutants


def test_every_listed_change_has_its_line() -> None:
    rows = [row["mutant"] for row in json.loads(mutants.KEPT.read_text())]
    listed = [*json.loads(mutants.SEEDED.read_text()), *rows]
    gone = [f"{x['file']} {x['function']}: {x['before']}" for x in listed if mutants.changed(x) is None]
    assert not gone, f"let entries follow their lines, or run python -m tools.mutants --draw --minutes 9: {gone}"
    assert len(rows) == 200
