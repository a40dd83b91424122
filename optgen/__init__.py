"""optgen: a compiler for optimizers.

    optgen.compile("specs/mine.py", plan="int8_split24")     a class in memory
    optgen.make("adamw", model, plan="int8_split24")         an optimizer by name; {pattern: rule} for several rules
    optgen.list("adam*")                                     the names of ready-made rules; also list_rules
    optgen.cast_model(model, torch.bfloat16)                 a 16-bit model for it
    optgen.StableEmbedding(...)                              an embedding whose optimizer states stay in fp32
    optgen.keep_states_fp32(module)                          the same for any module
    optgen.attention_heads(model.named_parameters(), 32)     blocks for Adam-mini
    optgen.save_checkpoint(path, opt, model)                 one file, whole or not at all; load_checkpoint
    optgen.SAM(opt, rho=0.05)                                sharpness-aware steps around any optimizer
    optgen.take_states(new, old)                             AdamW's states for Muon, or for SOAP

`import optgen` itself imports nothing: generated code needs `optgen.runtime` only.
"""

__version__ = "0.2.0"
__all__ = [
    "SAM", "StableEmbedding", "__version__", "attention_heads", "cast_model", "compile", "keep_states_fp32",
    "list_rules", "load_checkpoint", "make", "save_checkpoint", "take_states",
]  # fmt: skip


def __getattr__(name: str) -> object:
    # PEP 562: the compiler is loaded when it is asked for.
    if name == "compile":
        from optgen.driver.compile import compile

        return compile
    if name == "optim":
        from importlib import import_module

        return import_module("optgen.optim")
    if name == "cast_model":
        from optgen.cast import cast_model

        return cast_model
    if name == "StableEmbedding":
        from optgen.embedding import StableEmbedding

        return StableEmbedding
    if name == "SAM":
        from optgen.sharpness import SAM

        return SAM
    if name == "keep_states_fp32":
        from optgen.runtime.records.marks import keep_states_fp32

        return keep_states_fp32
    if name == "attention_heads":
        from optgen.runtime.options.blocks import attention_heads

        return attention_heads
    if name in ("list", "list_rules", "make"):
        from optgen import by_name

        return getattr(by_name, "list_rules" if name == "list" else name)
    if name == "take_states":
        from optgen.convert.rules import take_states

        return take_states
    if name in ("load_checkpoint", "save_checkpoint"):
        from optgen.runtime import files

        return getattr(files, name)
    raise AttributeError(f"module 'optgen' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
