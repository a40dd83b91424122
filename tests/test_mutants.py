"""The listed mutants and seeded defects are changes of lines that are there, which is what their results are of."""

import json

from tools import seed_defects


def test_every_listed_change_has_its_line() -> None:
    listed = json.loads(seed_defects.LIST.read_text())
    listed += [row["mutant"] for row in json.loads(seed_defects.LIST.with_name("mutants.json").read_text())]
    gone = [f"{x['file']} {x['function']}: {x['before']}" for x in listed if seed_defects._changed(x) is None]
    assert not gone, f"let entries follow their lines, or run tools/mutants.py --draw --minutes 9: {gone}"
