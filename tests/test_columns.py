"""Generated text has no line over 120 columns, and breaking one changes nothing."""

import ast

import pytest

from optgen.backends import columns
from tests.harness import texts


def test_no_generated_line_is_too_long() -> None:
    files = [f for ending in ("*.py", "*.h") for f in texts("columns", ending)]
    assert files
    long = [f for f in files if any(len(line) > columns.LIMIT for line in f.read_text(encoding="utf-8").split("\n"))]
    assert long == []


NAMES = [f"one_of_many_long_names_{k}" for k in range(9)]


@pytest.mark.parametrize(
    "line",
    [
        f"    x = f({', '.join(NAMES)})",
        f"    x = {' + '.join(NAMES)}",
        f"    return {', '.join(f'g({name})' for name in NAMES)}",
        f"    x = f(a) * (({' - '.join(NAMES)}).to(y, z=True) >> 3 & h(i(b, c), d))  # 30  the author's line",
        f"    # a comment of {' '.join(NAMES)}",
    ],
)
def test_a_broken_line_is_the_same_program(line: str) -> None:
    body = "\n".join(part.removeprefix("    ") if line.startswith("    ") else part for part in line.split("\n"))
    for text in (body, f"def f():\n    pass\n{line}" if line.startswith("    ") else body):
        made = columns.python(text)
        assert max(map(len, made.split("\n"))) <= columns.LIMIT
        assert ast.dump(ast.parse(made)) == ast.dump(ast.parse(text))


def test_the_author_s_line_stands_once_and_its_number_at_every_further_place() -> None:
    text = "x = 1  # 30  x = a\n# 31  y = b\ny = (\n)\n# 31  y = b\ny = 2\nx = 3  # 30  x = a\nz = 4  # 30  z"
    again = "x = 1  # 30  x = a\n# 31  y = b\ny = (\n)\ny = 2  # 31\nx = 3  # 30\nz = 4  # 30  z"
    assert columns.python(text) == again
    assert columns.python(said := f'"""{" ".join(NAMES)}"""') == said  # a docstring has no place to break it
    assert columns.python(text, kernels=True) == "x = 1  # 30\ny = (  # 31\n)\ny = 2  # 31\nx = 3  # 30\nz = 4  # 30"


def test_cpp_lines_keep_their_tokens() -> None:
    line = f"        const F x = max({', '.join(NAMES)}) * where({', '.join(NAMES)});  // 12  a comment"
    made = columns.cpp(line).split("\n")
    assert max(map(len, made)) <= columns.LIMIT and made[0].strip() == "// 12"
    assert "".join("".join(made[1:]).split()) == "".join(line.partition("  //")[0].split())
    macro = f"#define f({', '.join(NAMES)}) {' '.join(NAMES)}"
    assert columns.cpp(macro) == macro
