"""Train nano's byte-level BPE and write the token-side files of its checkpoint.

The pre-tokeniser is the release's (numbers, CJK runs, words and punctuation, then bytes) except that every digit is a
token of its own. Ids: 0, 1, 2 are BOS, EOS and PAD, then bytes and merges, and the control tokens of the V4.1 prompt
format close the vocabulary. The vocabulary has exactly ``vocab_size`` ids.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from recipes.nano import chat
from recipes.nano.engram import bucket_primes, token_classes

HERE = Path(__file__).resolve().parent

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
THINK, THINK_END = "<think>", "</think>"
DSML, REMINDER, IMAGE, NOISE = "｜DSML｜", "<｜latest_reminder｜>", "<｜deepseek_image｜>", "<｜dspark_noise｜>"
_SPANS = tuple(f"<｜{slash}{name}｜>" for name in ("ref", "box", "point", "polygon") for slash in ("", "/"))
#: Control tokens after the merges, in id order.
CONTROL = (SYSTEM, USER, ASSISTANT, THINK, THINK_END, DSML, REMINDER, IMAGE, NOISE, *_SPANS)

_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def prompt_texts() -> list[str]:
    """Plain-text parts of what the V4.1 codec puts around a conversation: effort lines, tool instructions, results."""
    from deepseek_recipe import (
        AssistantMessage,
        Conversation,
        DeepseekV41Encoding,
        SpecialTokens,
        ToolCall,
        ToolDefinition,
        ToolMessage,
        UserMessage,
    )

    encoding = DeepseekV41Encoding().with_special_tokens(SpecialTokens(image=IMAGE))
    schema = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "what to look for"}, "limit": {"type": "integer"}},
        "required": ["query"],
    }
    tool = ToolDefinition("search", "Search the documents.", schema)
    call = ToolCall("call_1", "search", '{"query": "value", "limit": 3}')
    conversations = [
        Conversation([UserMessage("Hello")], reasoning_effort=effort) for effort in ("low", "high", "max")
    ] + [
        Conversation(
            [
                UserMessage("Find it"),
                AssistantMessage("", reasoning_content="I search.", tool_calls=[call]),
                ToolMessage("found", "call_1"),
            ],
            tools=[tool],
        ),
        Conversation([UserMessage("json")], response_schema=schema),
    ]
    texts = []
    for conversation in conversations:
        rendered = encoding.render_conversation(conversation)
        edge = 0
        for start, stop in [*rendered.special_ranges, (len(rendered.prompt), len(rendered.prompt))]:
            if start > edge:
                texts.append(rendered.prompt[edge:start])
            edge = stop
    return texts


def corpus(seed: int, chats: int) -> Iterator[str]:
    """What the merges are learned from: chats, the codec's own texts, common words, and JSON-shaped lines."""
    rng = Random(seed)
    for _ in range(chats):
        c = chat.training_chat(rng)
        yield from (c.question, c.thinking, c.answer)
    for text in prompt_texts():
        yield from [text] * (chats // 100)
    words = (HERE / "words.txt").read_text(encoding="utf-8").split()
    for _ in range(chats // 20):
        yield " ".join(rng.choices(words, k=12)) + "."
        yield json.dumps({rng.choice(words): rng.choice(words), rng.choice(words): rng.randrange(1000)})
        yield " ".join(w.capitalize() for w in rng.choices(words, k=3))


def train_tokenizer(vocab_size: int, *, seed: int, chats: int) -> Tokenizer:
    """A tokenizer with exactly ``vocab_size`` ids; raises ``ValueError`` when the corpus yields too few merges."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence(
        [
            Split(Regex(r"\p{N}"), "isolated"),
            Split(Regex(_CJK), "isolated"),
            Split(Regex(_WORDS), "isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(CONTROL),
        special_tokens=[AddedToken(t, normalized=False, special=True) for t in (BOS, EOS, PAD)],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed, chats), trainer)
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in CONTROL])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the corpus yields {tokenizer.get_vocab_size()} ids, the config wants {vocab_size}")
    return tokenizer


def complete_config(template: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """The checkpoint's config.json: the template with the ids and the Engram sizes that follow from the tokenizer."""
    raw = json.loads(json.dumps(template))
    ids = {name: tokenizer.token_to_id(text) for name, text in (("bos", BOS), ("eos", EOS), ("pad", PAD))}
    raw |= {f"{name}_token_id": value for name, value in ids.items()}
    raw["image_token_id"] = tokenizer.token_to_id(IMAGE)
    text = raw["text_config"]
    columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
    primes = bucket_primes(text["engram_vocab_size"], len(text["engram_layer_ids"]), columns)
    text["engram_num_embeddings"] = [sum(p) for p in primes]
    text["engram_pad_token_id"] = ids["pad"]
    text["engram_compressed_vocab_size"] = int(token_classes(tokenizer).max()) + 1
    text["dspark_noise_token_id"] = tokenizer.token_to_id(NOISE)
    return raw


def side_files(raw: dict[str, Any]) -> dict[str, bytes]:
    """tokenizer_config.json and generation_config.json that belong to a completed config."""
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": raw["text_config"]["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
    }
    generation_config = {
        "bos_token_id": raw["bos_token_id"],
        "eos_token_id": raw["eos_token_id"],
        "pad_token_id": raw["pad_token_id"],
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
        "transformers_version": raw["transformers_version"],
    }
    return {
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2, ensure_ascii=False).encode() + b"\n",
        "generation_config.json": json.dumps(generation_config, indent=2).encode() + b"\n",
    }


def write_token_files(directory: Path, template: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Write config.json, tokenizer.json and the two small side files; returns the completed config."""
    directory.mkdir(parents=True, exist_ok=True)
    raw = complete_config(template, tokenizer)
    files = side_files(raw) | {
        "config.json": json.dumps(raw, indent=2).encode() + b"\n",
        "tokenizer.json": tokenizer.to_str(pretty=False).encode() + b"\n",
    }
    for name, data in files.items():
        part = directory / f"{name}.part"
        part.write_bytes(data)
        os.replace(part, directory / name)
    return raw
