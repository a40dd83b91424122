"""`optgen new NAME`: write a spec that builds as it stands, to be edited."""

from __future__ import annotations

from pathlib import Path

from optgen.base.errors import UserError
from optgen.base.loc import relative
from optgen.base.names import camel, is_snake, snake
from optgen.driver.load import home
from optgen.lang.optimizer import RESERVED, VARIABLES

CALLED = "sqrt"  # called by the template: a spec of that name would call itself
TEMPLATE = '''"""{title}: what it does, in one line."""

from optgen.lang import hyper, nonneg, optimizer, sqrt, state


@optimizer(cite="Author, year, where")
def {name}(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(1e-2, ge=0),
):
    """It starts as Adam with decoupled weight decay: change the lines below into your rule."""
    beta1, beta2 = betas
    p = p * (1 - lr * weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    denom = sqrt(exp_avg_sq / (1 - beta2**t)) + eps
    p = p - lr / (1 - beta1**t) * exp_avg / denom
    return p, exp_avg, exp_avg_sq
'''


def new(name: str) -> Path:
    """Write specs/<name>.py and return its path; never over an existing file."""
    spelled = snake(name)
    path = name.endswith(".py") or not set(name).isdisjoint("/\\.")
    taken = spelled in RESERVED | VARIABLES or spelled in ("plans", CALLED)
    if path or not is_snake(spelled) or taken:
        used = "choose another name: this one is used by generated code, by specs/ or in the spec"
        raise UserError("E409", name=name, remedy=used if taken and not path else "for instance my_rule, or MyRule")
    folder = home() / "specs"
    file = folder / f"{spelled}.py"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as stream:
            stream.write(TEMPLATE.format(name=spelled, title=camel(spelled)))
    except FileExistsError:
        raise UserError("E408", file=relative(str(file))) from None
    except OSError as error:
        raise UserError("E413", path=relative(str(file)), why=error.strerror) from error
    return file
