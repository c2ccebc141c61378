# SPDX-License-Identifier: Apache-2.0
# The environment of every command that may start a vLLM engine; source it, with sh or bash.
# The Makefile does. What is set already is kept.

# Models are made on the spot: nothing is downloaded and nothing is reported.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
export TRANSFORMERS_OFFLINE="${TRANSFORMERS_OFFLINE:-1}"
export HF_HUB_DISABLE_TELEMETRY="${HF_HUB_DISABLE_TELEMETRY:-1}"
export VLLM_NO_USAGE_STATS="${VLLM_NO_USAGE_STATS:-1}"
export DO_NOT_TRACK="${DO_NOT_TRACK:-1}"

# GiB of KV cache in each engine, the least that vLLM takes. An engine on a small model then needs
# 2.4 GiB in all, so that the two which the tests run at once fit into a laptop's 8 GiB.
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
