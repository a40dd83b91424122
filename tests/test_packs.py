"""Specs and plans of installed packages, which entry points name."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from optgen.base.errors import UserError
from optgen.driver import load

RULE = '''
from optgen.lang import hyper, optimizer

@optimizer(cite="nobody")
def NAME(p, g, *, lr=hyper(1e-3, ge=0)):
    """Plain steps."""
    p = p - lr * g
    return p
'''


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with a folder of specs; it returns the folder."""
    folder = tmp_path / "site" / "apack" / "rules"
    folder.mkdir(parents=True)
    for place in (folder, folder.parent):
        (place / "__init__.py").write_text("")
    about = tmp_path / "site" / "apack-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: apack\nVersion: 1.0\n")
    groups = "[optgen.specs]\napack = apack.rules\n[optgen.plans]\napack = apack.rules\nmore = apack.storage\n"
    (about / "entry_points.txt").write_text(groups)
    (folder.parent / "storage").mkdir()
    (folder.parent / "storage" / "__init__.py").write_text("")
    (folder.parent / "storage" / "plans.py").write_text("from optgen.formats import Plan\n\nalone = Plan('In fp32.')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    load.packs.cache_clear()
    yield folder
    load.packs.cache_clear()
    sys.modules.pop("apack", None)


def test_a_pack_is_listed_and_found(pack: Path) -> None:
    (pack / "plain.py").write_text(RULE.replace("NAME", "plain"))
    (pack / "plans.py").write_text("from optgen.formats import Plan\n\nof_pack = Plan('Everything in fp32.')\n")
    entry = load.entries()["plain"]
    assert (entry.file, entry.own) == (pack / "plain.py", False)
    assert load.find_spec("plain").name == "plain"
    assert load.find_plan("of_pack").name == "of_pack" and load.find_plan("alone").name == "alone"
    assert "int8_split24" in load.plans()


def test_a_pack_shadows_nothing_in_silence(pack: Path) -> None:
    (pack / "lion.py").write_text(RULE.replace("NAME", "lion"))
    with pytest.raises(UserError, match="E412"):
        load.find_spec("lion")
    own = Path("specs")
    own.mkdir()
    (own / "lion.py").write_text(RULE.replace("NAME", "lion"))  # a project's own rule wins, as ever
    assert load.find_spec("lion").loc.file == str((own / "lion.py").resolve())


def test_a_pack_that_is_not_there(pack: Path) -> None:
    pack.rename(pack.parent / "other")
    with pytest.raises(UserError, match="the entry point 'apack' names no package of specs"):
        load.entries()
