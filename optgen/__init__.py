"""optgen: a compiler for optimizers.

    optgen.compile("specs/mine.py", plan="int8_split24")     a class in memory
    optgen.make("adamw", model, plan="int8_split24")         an optimizer by name; {pattern: rule} for several rules
    optgen.list("adam*")                                     the names of ready-made rules; also list_rules
    optgen.cast_model(model, torch.bfloat16)                 a 16-bit model for it
    optgen.fp8_weights(model)                                layers that see 8 bits of their weights
    optgen.StableEmbedding(...)                              an embedding whose optimizer states stay in fp32
    optgen.keep_states_fp32(module)                          the same for any module
    optgen.save_checkpoint(path, opt, model)                 one file, whole or not at all; load_checkpoint
    optgen.diagnose(opt)                                     which weights and states of any optimizer are frozen
    optgen.SAM(opt, rho=0.05)                                sharpness-aware steps around any optimizer

`import optgen` itself imports nothing: generated code needs `optgen.runtime` only.
"""

__version__ = "0.2.0"
__all__ = [
    "SAM", "StableEmbedding", "__version__", "cast_model", "compile", "diagnose",
    "fp8_weights", "keep_states_fp32", "list_rules", "load_checkpoint", "make", "save_checkpoint",
]  # fmt: skip


_HOMES = {
    "SAM": "runtime.sharpness", "StableEmbedding": "embedding", "cast_model": "cast", "compile": "driver.compile",
    "diagnose": "driver.diagnose", "fp8_weights": "cast", "keep_states_fp32": "runtime.records.fp32_modules",
    "list": "by_name", "list_rules": "by_name", "load_checkpoint": "runtime.files", "make": "by_name",
    "save_checkpoint": "runtime.files",
}  # fmt: skip
"""Name -> the module that has it, which is imported when the name is asked for (PEP 562)."""


def __getattr__(name: str) -> object:
    if name not in (*_HOMES, "optim"):
        raise AttributeError(f"module 'optgen' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"optgen.{_HOMES.get(name, name)}")
    return module if name == "optim" else getattr(module, "list_rules" if name == "list" else name)


def __dir__() -> list[str]:
    return __all__
