"""torchtitan's container of optimizers, replaced by `optgen.integrations.torchtitan.Container`: groups by names of
parameters are then tested on our classes."""

import importlib
import os
import sys
from typing import Any

from tests.others import Suite


def install(plan: str) -> None:
    sys.path.insert(0, os.environ["OPTGEN_OTHERS_CHECKOUT"])
    titan: Any = importlib.import_module("torchtitan.components.optimizer")
    container = importlib.import_module("optgen.integrations.torchtitan").Container
    default = titan.default_adamw
    titan.default_adamw = lambda *a, **options: container.Config(param_groups=default(*a, **options).param_groups)
    titan.OptimizersContainer = container


FILES_LEFT_OUT = {
    "theirs: a Muon of its own, over two GPUs": "flex_shard/test_dist_muon.py",
    "theirs: models, data and trainers, without an optimizer that could be ours": "test_weight_tying.py "
    "components/data/test_grain_data.py components/data/test_qwen_multimodal_data.py "
    "observability/test_structured_logging.py test_activation_checkpoint.py test_chat_dataset.py "
    "test_checkpoint.py test_compile_moe.py test_compile_regional_inductor.py test_config_manager.py "
    "test_configurable.py test_context_parallel_validation.py test_dataset_checkpointing.py test_dataset_flux.py "
    "test_dist_gemm.py test_distributed_linear.py test_distributed_utils.py test_download_hf_assets.py "
    "test_embedding.py test_expert_parallel.py test_filesystem.py test_flex_attention.py "
    "test_fsdp_moe_sharding.py test_fused_mla_override.py test_fused_qkv.py test_fused_swiglu.py "
    "test_fused_swiglu_override.py test_gpt_oss_moe.py test_helion_rope.py test_inference_moe.py "
    "test_invalid_loss.py test_linear.py test_lora.py test_loss.py test_loss_dtensor.py test_metrics_config.py "
    "test_minimal_async_ep_kernels.py test_mm_dataset_checkpointing.py test_mm_dataset_preprocessing.py "
    "test_model_td_layout.py test_module.py test_moe.py test_no_new_cli_options.py test_override.py "
    "test_packed_vision.py test_parallel_dims.py test_profiler.py test_profiler_config.py test_quantization.py "
    "test_qwen3_5_deltanet.py test_rmsnorm.py test_rope.py test_set_determinism.py test_state_dict_adapter.py "
    "test_state_dict_keys.py test_text_dataset_packing.py test_tokenizer.py test_tools_utils.py "
    "test_torch_checkpointing.py test_tp_kv_heads_validation.py test_train_spec.py test_trainer.py "
    "test_validate.py test_validator_frequency.py test_varlen_attention.py test_vision_attention.py",
}
SUITES = [
    Suite(
        plan="int8_split24",
        folder="tests/unit_tests",
        files=("test_optimizer_param_groups.py", "test_lr_scheduler.py"),
        rewrites={
            r"torch\.optim\.": "__import__('optgen').optim.",
            "from torch.optim import": "from optgen.optim import",
        },
    )
]
