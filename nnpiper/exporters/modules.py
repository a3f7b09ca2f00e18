"""Names of the PyTorch modules that make up each layer.

By model family as Hugging Face transformers names them: GPT2LMHeadModel, LlamaForCausalLM, BertForPreTraining,
T5ForConditionalGeneration. PLAIN are the names of torchtitan and of the examples in PyTorch's documentation.
"""

from ..plan_file import PlanFile
from ..workload import MODELS

PLAIN = {"embedding": "tok_embeddings", "block": "layers.{}", "head": "norm output"}
FAMILIES = {
    "gpt": {"embedding": "transformer.wte transformer.wpe transformer.drop", "block": "transformer.h.{}",
            "head": "transformer.ln_f lm_head"},
    "llama": {"embedding": "model.embed_tokens model.rotary_emb", "block": "model.layers.{}",
              "head": "model.norm lm_head"},
    "bert": {"embedding": "bert.embeddings", "block": "bert.encoder.layer.{}", "head": "bert.pooler cls"},
    # the second embedding closes the encoder and opens the decoder
    "t5": {"embedding": "shared encoder.embed_tokens", "encoder": "encoder.block.{}",
           "embedding 1": "encoder.final_layer_norm encoder.dropout decoder.embed_tokens",
           "decoder": "decoder.block.{}", "head": "decoder.final_layer_norm decoder.dropout lm_head"},
}


def family(plan: PlanFile) -> str | None:
    """"gpt", "llama", "bert" or "t5"; None for a model that the catalogue does not know."""
    return MODELS[plan.model].family if plan.model in MODELS else None


def module_names(kinds: list[str], table: dict[str, str]) -> list[list[str]]:
    """[L] the modules of each layer, first the one that runs first. All kinds must be in the table."""
    seen, names = {}, []
    for kind in kinds:
        i = seen[kind] = seen.get(kind, -1) + 1
        names.append(table.get(f"{kind} {i}", table[kind]).format(i).split())
    return names
