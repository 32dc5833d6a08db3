"""A language model of 100,000 parameters with a tokenizer of characters: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ["<pad>", "<end>", "<user>", "<assistant>", "<system>", "<tool>"]


def tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = SPECIAL + [chr(code) for code in range(32, 127)]
    core = Tokenizer(models.WordLevel({token: place for place, token in enumerate(tokens)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=SPECIAL[2:],
        padding_side="left",
        model_max_length=512,
    )
    made.chat_template = TEMPLATE
    return made


def network(words: Any, seed: int = 0) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=words.pad_token_id,
        eos_token_id=words.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(shape)


def tool_tokenizer() -> Any:
    """A tokenizer of characters with the chat template of Qwen3 that TRL has for training with tools."""
    import trl
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
    markers = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    tokens = [*special, *markers, "\n", "\t", *(chr(code) for code in range(32, 127))]
    core = Tokenizer(models.WordLevel({token: place for place, token in enumerate(tokens)}, unk_token=special[0]))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("(?m:.)"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in markers])
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=special[0],
        eos_token=special[1],
        additional_special_tokens=special[2:],
        padding_side="left",
    )
    made.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    return made


def scripted_network(words: Any, answer: Callable[[str], str]) -> Any:
    """A model whose answers are a function of the text so far; its parameters are trained like any other's."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    class Scripted(LlamaForCausalLM):  # type: ignore[misc]  # its types are not known here
        def generate(self, input_ids: Any = None, **_: Any) -> Any:
            texts = [answer(words.decode(row)) for row in input_ids]
            rows = [words(text, add_special_tokens=False)["input_ids"] for text in texts]
            longest = max(map(len, rows))
            padded = [row + [words.pad_token_id] * (longest - len(row)) for row in rows]
            return torch.cat([input_ids, torch.tensor(padded)], 1)

    torch.manual_seed(0)
    return Scripted(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )
