"""Spelling of names: snake_case, CamelCase, identifiers that no language here reserves."""

from __future__ import annotations

import keyword
import re

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(_[A-Za-z0-9]+)*\Z")
_SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*\Z")


def is_snake(name: str) -> bool:
    """Return True if a name can be an identifier in generated Python: lower case, no keyword.

    >>> is_snake("exp_avg_sq"), is_snake("x0"), is_snake("Exp"), is_snake("lambda"), is_snake("_x")
    (True, True, False, False, False)
    """
    return bool(_SNAKE.match(name)) and not keyword.iskeyword(name)


def is_name(name: str) -> bool:
    """Return True for what a state or hyper-parameter may be called: letters of either case, single underscores inside.

    >>> is_name("exp_avg_sq"), is_name("L"), is_name("lambda"), is_name("_x"), is_name("x_")
    (True, True, False, False, False)
    """
    return bool(_NAME.match(name)) and not keyword.iskeyword(name)


def camel(name: str) -> str:
    """A class name for a snake_case name.

    >>> camel("my_adam_2")
    'MyAdam2'
    """
    return "".join(word[:1].upper() + word[1:] for word in name.split("_"))


def snake(name: str) -> str:
    """A module name for a class name.

    >>> snake("MyAdam2"), snake("AdamW"), snake("SGD"), snake("RMSprop"), snake("my-rule")
    ('my_adam2', 'adam_w', 'sgd', 'rm_sprop', 'my_rule')
    """
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return re.sub(r"\W+", "_", spaced).strip("_").lower()


def is_text(x: object) -> bool:
    """Return True for a text that a file of Python can have between quotes: no NUL, no half of a pair of surrogates.

    >>> is_text("\\r"), is_text("\\0"), is_text("\\ud800"), is_text(1)
    (True, False, False, False)
    """
    return isinstance(x, str) and "\0" not in x and x.encode(errors="ignore").decode() == x


def unique(name: str, taken: set[str]) -> str:
    """The name, or the name with the first free number after it.

    >>> unique("p", {"p", "p_2"})
    'p_3'
    """
    k = 2
    out = name
    while out in taken:
        out = f"{name}_{k}"
        k += 1
    return out
