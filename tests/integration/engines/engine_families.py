# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints of model families with other cache groups than full attention.

Weights are random with the size of trained ones: with vLLM's dummy weights outputs do not depend
on the cache. Layers and tensors are those of the ``transformers`` class of each family.
"""

import json
import math
from dataclasses import dataclass, field

COMMON = {
    "vocab_size": 512,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
ROPE = {"rope_theta": 10000.0}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_ssm": 256,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "ssm_multipliers": [1.0] * 5,
    "mlp_multipliers": [1.0, 1.0],
}


@dataclass(frozen=True)
class Family:
    """One model family: its configuration, and what vLLM has to be told to run it here."""

    config: dict = field(hash=False)
    arguments: tuple = ()
    """Arguments of ``vllm.LLM`` besides the common ones."""
    exact_chunks: bool = True
    """Whether vLLM computes the same, bit by bit, whatever the chunks of a prefill. Where it does
    not, tests compare with vLLM's own local hit at the same boundary."""
    few_blocks: int | None = None
    """Blocks of a cache that six prompts of 129 tokens outgrow; None where requests do not grow,
    or where vLLM computes another result when it computes a chunk again."""
    forgets: bool = False
    """Whether outputs no longer depend on a loaded state, damaged or not, some tokens later."""
    keeps_generated: bool = True
    """Whether a second turn can hit beyond the first prompt: recurrent states of generated tokens
    are handed over only where vLLM retains them, at its ``prefix_cache_retention_interval``."""


FAMILIES = {
    "sliding_and_full": Family(
        {
            **COMMON,
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "num_hidden_layers": 6,
            "head_dim": 32,
            "rms_norm_eps": 1e-6,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 32,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "tie_word_embeddings": True,
        },
        few_blocks=56,
    ),
    "all_sliding": Family(
        {
            **COMMON,
            **ROPE,
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "num_hidden_layers": 4,
            "head_dim": 32,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "sliding_window": 64,
            "tie_word_embeddings": False,
        },
        few_blocks=20,
    ),
    "recurrent_and_full": Family(
        {
            **COMMON,
            **ROPE,
            **MAMBA2,
            "architectures": ["FalconH1ForCausalLM"],
            "model_type": "falcon_h1",
            "num_hidden_layers": 4,
            "head_dim": 32,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        },
        arguments=(("mamba_cache_mode", "align"), ("prefix_cache_retention_interval", 64)),
        few_blocks=17,
    ),
    "recurrent_and_little_attention": Family(
        {
            **COMMON,
            "architectures": ["NemotronHForCausalLM"],
            "model_type": "nemotron_h",
            "num_hidden_layers": 4,
            "hybrid_override_pattern": "M*M-",
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "head_dim": 32,
            "attention_head_dim": 32,
            "layer_norm_epsilon": 1e-5,
            "rms_norm_eps": 1e-5,
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "expand": 2,
            "chunk_size": 64,
            "use_conv_bias": True,
            "mamba_proj_bias": False,
            "use_bias": False,
            "mlp_bias": False,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "time_step_limit": [0.0, 1e9],
            "residual_in_fp32": False,
        },
        arguments=(("mamba_cache_mode", "align"),),
        few_blocks=17,
        keeps_generated=False,
    ),
    "recurrent_alone": Family(
        {
            "vocab_size": 512,
            "torch_dtype": "float32",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 32,
            "n_groups": 1,
            "state_size": 16,
            "conv_kernel": 4,
            "expand": 2,
            "chunk_size": 64,
            "hidden_act": "silu",
            "layer_norm_epsilon": 1e-5,
            "use_conv_bias": True,
            "use_bias": False,
            "rms_norm": True,
            "tie_word_embeddings": False,
            "time_step_limit": [0.0, 1e9],
        },
        arguments=(("mamba_cache_mode", "align"),),
        keeps_generated=False,
        forgets=True,
    ),
    "hits_below_the_block": Family(
        {
            **COMMON,
            **ROPE,
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "full_attention_interval": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.25,
            "tie_word_embeddings": False,
        },
        # Its block has some thousand tokens; states are kept where hashes end, every 32.
        arguments=(
            ("mamba_cache_mode", "align"),
            ("prefix_match_unit", 32),
            ("dtype", "bfloat16"),
        ),
        exact_chunks=False,
        keeps_generated=False,
    ),
    "convolution_and_full": Family(
        {
            **COMMON,
            **ROPE,
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention"] * 2,
            "full_attn_idxs": [1, 3],
            "block_ff_dim": 256,
            "conv_dim": 128,
            "conv_dim_out": 128,
            "block_dim": 128,
            "block_auto_adjust_ff_dim": False,
            "norm_eps": 1e-5,
            "conv_L_cache": 3,
            "conv_bias": False,
            "tie_word_embeddings": True,
            "tie_embedding": True,
        },
        arguments=(("mamba_cache_mode", "align"),),
        exact_chunks=False,
        keeps_generated=False,
    ),
}
LATENT = Family(
    {
        **COMMON,
        **ROPE,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "num_experts_per_tok": 2,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "norm_topk_prob": True,
    },
    arguments=(("dtype", "bfloat16"),),  # the CPU's latent attention has no float32
    exact_chunks=False,
)
"""Its own constant: vLLM turns prefix caching off for it on a CPU, so no local hit can be the
reference, and cold and warm go through different kernels in bfloat16."""


FULL = Family(
    {
        **COMMON,
        **ROPE,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
)
"""Full attention alone, with two KV heads."""


def write_family(folder, family, seed=0, *, exact_sums=False):
    """Write the checkpoint of a family into ``folder`` and return the folder.

    ``exact_sums``: each output of a matrix reads one input. Whatever the order of a sum, and the
    number of ranks that share it, it adds zeros to one product: no rounding tells ranks apart.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(family.config))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model = model.to(torch.float32)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            one_entry = exact_sums and ("_proj" in name or name == "lm_head.weight")
            weights = _one_entry_a_row if one_entry else _weights
            parameter.copy_(weights(name, parameter, random))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(family.config))
    return folder


def _weights(name, parameter, random):
    """Return real-sized values: matrices keep the size of activations, norms are about 1.

    Gemma's norms add 1 to their weight. Recurrence parameters keep the values of their class.
    """
    import torch

    if parameter.ndim >= 2:
        return (
            torch.randn(parameter.shape, generator=random) * 1.2 / math.sqrt(parameter[0].numel())
        )
    if "norm" in name:
        middle = float(parameter.mean())
        return torch.rand(parameter.shape, generator=random) - 0.5 + middle
    if name.endswith("bias"):
        return torch.randn(parameter.shape, generator=random) * 0.02
    return parameter


def _one_entry_a_row(_name, parameter, random):
    """Return a matrix that picks an input for each output; outputs keep the size of inputs."""
    import torch

    rows, columns = parameter.shape
    picked = torch.randint(columns, (rows, 1), generator=random)
    entries = torch.randn((rows, 1), generator=random) * 1.2
    return torch.zeros_like(parameter).scatter_(1, picked, entries)
