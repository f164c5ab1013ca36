"""Tiny pretrained models of several architectures, with random weights, as folders on disk."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|end|>"
_SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "gpt2": {"n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 128},
    "gpt_neox": _SIZES,
    "opt": {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 24},
    "gemma2": {**_SIZES, "head_dim": 12},
    "granite": {**_SIZES, "logits_scaling": 3.0},
    "cohere": _SIZES,
    "qwen2": _SIZES,
}


def write_model(folder: Path, architecture: str, text: str, seed: int = 0) -> Path:
    """A folder as `save_pretrained` leaves it."""
    import transformers

    tokeniser = Tokenizer(models.BPE())
    tokeniser.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokeniser.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokeniser.train_from_iterator([text], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokeniser.save(str(folder / "tokenizer.json"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token=END)
    fast.save_pretrained(folder)
    config = transformers.AutoConfig.for_model(
        architecture, vocab_size=328, bos_token_id=None, eos_token_id=0, pad_token_id=0, **ARCHITECTURES[architecture]
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # as they are made, they know next to nothing apart
        parameter.data.mul_(6.0) if parameter.dim() > 1 else None
    model.save_pretrained(folder)
    return folder


def with_window(folder: Path, to: Path, window: int) -> Path:
    """A copy of a model some of whose layers see only so many tokens."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, "sliding_window": window}))
    return to
