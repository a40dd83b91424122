"""A plugin of axolotl.  In a configuration:

    plugins: [optgen.integrations.axolotl.OptgenPlugin]
    optgen: {rule: adamw, plan: int8_split24}

Learning rate and weight decay are axolotl's own keys; `optgen` has further options of the class.
"""

from __future__ import annotations

from typing import Any

from optgen.integrations import framework
from optgen.integrations.transformers import optimizer_cls_and_kwargs


class OptgenArgs(framework("pydantic").BaseModel):  # type: ignore[misc]
    """The keys that the plugin adds to a configuration."""

    optgen: dict[str, Any] | None = None


class OptgenPlugin(framework("axolotl.integrations.base").BasePlugin):  # type: ignore[misc]
    """A plugin that gives axolotl's trainer an optimizer of optgen."""

    def get_input_args(self) -> str:
        """Return the path of the model of its keys."""
        return f"{__name__}.{OptgenArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Set the class and options from which the trainer makes its optimizer."""
        given = dict(cfg.optgen or {})
        chosen = optimizer_cls_and_kwargs(trainer.args, given.pop("rule", "adamw"), model=trainer.model, **given)
        trainer.optimizer_cls_and_kwargs = chosen
