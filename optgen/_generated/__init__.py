"""The repository's generated/ folder, under the name that it has in a wheel.

A wheel holds the generated folder itself in this place and leaves this file out.
"""

from pathlib import Path

_init = Path(__file__).resolve().parents[2] / "generated" / "__init__.py"
__path__ = [str(_init.parent)]
exec(compile(_init.read_text(encoding="utf-8"), str(_init), "exec"))
