"""Render the chats to token rows through the V4.1 codec and pack them for the training machine.

    python -m recipes.nano.data --out DIR [--recipe recipes/nano/nano.yaml] [--samples N]

writes DIR/{tokenizer,config,tokenizer_config,generation_config}.json and DIR/data.npz. The training machine needs
nothing but these files: it neither renders nor tokenises. The prompt of a chat is what the engine sends at inference;
prompts are assembled from encoded parts (the codec encodes the text between control tokens separately) and every
``CHECK_EVERY``-th one is compared with the codec's own encoding.

data.npz: tokens uint16 [sum of lengths] · lengths uint8 [N] · prompts uint8 [N] (prompt tokens of each row, which carry
no loss) · eval/<set>/{tokens, lengths, prompts, answers}: the same for problems never trained on, where ``answers``
counts the closing tokens of a row (the answer and EOS) that a correct generation must end with.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import yaml
from deepseek_recipe import (
    AssistantMessage,
    Conversation,
    DeepseekV41Encoding,
    Message,
    SpecialTokens,
    SystemMessage,
    UserMessage,
)
from deepseek_recipe import Tokenizer as CodecTokenizer
from tokenizers import Tokenizer

from recipes.nano import chat
from recipes.nano.tokenizer import (
    ASSISTANT,
    BOS,
    EOS,
    HERE,
    IMAGE,
    SYSTEM,
    THINK,
    THINK_END,
    USER,
    train_tokenizer,
    write_token_files,
)

CHECK_EVERY = 997  # a prime, so that the check meets every template
Effort = Literal["low", "high", "max"]


@dataclass(frozen=True)
class Row:
    """Token ids of one chat; the first ``prompt`` of them are given, the last ``answer`` are answer and EOS."""

    ids: list[int]
    prompt: int
    answer: int


@dataclass(frozen=True)
class Setting:
    """Everything around the question: effort (None = no thinking), system text, an earlier turn."""

    effort: Effort | None = "high"
    system: str | None = None
    before: chat.Chat | None = None


class Renderer:
    """Turns chats into rows; ``tokenizer_file`` is the checkpoint's tokenizer.json."""

    def __init__(self, tokenizer_file: Path):
        self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self._codec = (
            DeepseekV41Encoding()
            .with_tokenizer(CodecTokenizer.from_file(str(tokenizer_file)))
            .with_special_tokens(SpecialTokens(image=IMAGE))
        )
        controls = (BOS, EOS, SYSTEM, USER, ASSISTANT, THINK, THINK_END)
        vocabulary = self.tokenizer.get_vocab()
        self._control = {text: vocabulary[text] for text in controls}
        self._parts: dict[str, list[int]] = {}
        self._heads: dict[tuple[Effort | None, str | None], list[int]] = {}

    def text(self, text: str) -> list[int]:
        """Ids of plain text; a short cache serves the recurring texts."""
        if len(self._parts) > 200_000:
            self._parts.clear()
        ids = self._parts.get(text)
        if ids is None:
            ids = self._parts[text] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode(self, question: str, setting: Setting) -> list[int]:
        """Prompt ids as the codec itself encodes them."""
        messages: list[Message] = [] if setting.system is None else [SystemMessage(setting.system)]
        if setting.before is not None:
            messages += [UserMessage(setting.before.question), AssistantMessage(setting.before.answer)]
        messages.append(UserMessage(question))
        thinking = setting.effort is not None
        return self._codec.encode(Conversation(messages, thinking_mode=thinking, reasoning_effort=setting.effort))

    def _head(self, setting: Setting) -> list[int]:
        """Ids up to and including the User token; they depend on effort and system text only."""
        key = (setting.effort, setting.system)
        if key not in self._heads:
            ids = self.encode("x", Setting(setting.effort, setting.system))
            self._heads[key] = ids[: ids.index(self._control[USER]) + 1]
        return self._heads[key]

    def prompt(self, question: str, setting: Setting) -> list[int]:
        c = self._control
        ids = list(self._head(setting))
        if setting.before is not None:
            ids += [*self.text(setting.before.question), c[ASSISTANT], c[THINK_END]]
            ids += [*self.text(setting.before.answer), c[EOS], c[USER]]
        return ids + self.text(question) + [c[ASSISTANT], c[THINK_END if setting.effort is None else THINK]]

    def row(self, item: chat.Chat, setting: Setting) -> Row:
        c = self._control
        prompt = self.prompt(item.question, setting)
        thinking = [] if setting.effort is None else [*self.text(item.thinking), c[THINK_END]]
        answer = [*self.text(item.answer), c[EOS]]
        return Row(prompt + thinking + answer, len(prompt), len(answer))


def draw_setting(rng: Random, shares: dict[str, Any]) -> Setting:
    """One setting with the recipe's shares."""
    effort: Effort | None = "high"
    if rng.random() < shares["no_thinking"]:
        effort = None
    elif rng.random() < shares["other_effort"]:
        effort = rng.choice(("low", "max"))
    system = rng.choice(chat.SYSTEM_TEXTS) if rng.random() < shares["system_text"] else None
    before = None
    if rng.random() < shares["two_turns"]:
        before = chat.talk(rng) if rng.random() < 0.3 else chat.arithmetic(rng, rng.choice(((1, 1), (2, 2))))
    return Setting(effort, system, before)


def training_rows(renderer: Renderer, shares: dict[str, Any], samples: int) -> Iterable[Row]:
    """``samples`` rows no longer than the recipe's length; checks the codec on a subset, raises ``ValueError``."""
    rng = Random(shares["seed"])
    made = 0
    while made < samples:
        item, setting = chat.training_chat(rng), draw_setting(rng, shares)
        row = renderer.row(item, setting)
        if len(row.ids) > shares["length"]:
            continue
        if made % CHECK_EVERY == 0 and renderer.encode(item.question, setting) != row.ids[: row.prompt]:
            raise ValueError(f"assembled prompt differs from the codec's: {item} {setting}")
        made += 1
        yield row


def evaluation_rows(renderer: Renderer, shares: dict[str, Any]) -> dict[str, list[Row]]:
    """Held-out sets; ``two_digit`` is the acceptance set, the others are for information."""
    rng = Random(shares["seed"] + 1)
    count = shares["held_out"]
    two = chat.held_out_chats(rng, count, (2, 2))
    three = chat.held_out_chats(rng, count // 2, (3, 3))
    direct = chat.held_out_chats(rng, count // 2, (2, 2))
    rows = {
        "two_digit": [renderer.row(c, Setting()) for c in two],
        "three_digit": [renderer.row(c, Setting()) for c in three],
        "direct": [renderer.row(c, Setting(effort=None)) for c in direct],
        "talk": [renderer.row(chat.talk(rng), Setting()) for _ in range(count // 4)],
    }
    for c in two + direct:
        if renderer.encode(c.question, Setting()) != renderer.prompt(c.question, Setting()):
            raise ValueError(f"assembled prompt differs from the codec's: {c}")
    return rows


def pack(rows: Iterable[Row], prefix: str = "") -> dict[str, np.ndarray]:
    """The arrays of one set (see the module text)."""
    kept = list(rows)
    arrays = {
        "tokens": np.fromiter((t for r in kept for t in r.ids), dtype=np.uint16),
        "lengths": np.array([len(r.ids) for r in kept], dtype=np.uint8),
        "prompts": np.array([r.prompt for r in kept], dtype=np.uint8),
        "answers": np.array([r.answer for r in kept], dtype=np.uint8),
    }
    return {prefix + name: array for name, array in arrays.items()}


def generate(out: Path, recipe: dict[str, Any], template: dict[str, Any]) -> dict[str, Any]:
    """Tokenizer, config and data of a recipe under ``out``; returns the completed config."""
    tokenizer = train_tokenizer(
        template["text_config"]["vocab_size"], seed=recipe["tokenizer"]["seed"], chats=recipe["tokenizer"]["chats"]
    )
    raw = write_token_files(out, template, tokenizer)
    renderer = Renderer(out / "tokenizer.json")
    shares = recipe["data"]
    arrays = pack(training_rows(renderer, shares, shares["samples"]))
    for name, rows in evaluation_rows(renderer, shares).items():
        arrays |= pack(rows, f"eval/{name}/")
    part = out / "data.npz.part"
    with part.open("wb") as file:
        np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]
    os.replace(part, out / "data.npz")
    return raw


def main() -> None:
    parser = argparse.ArgumentParser(description="generate nano's tokenizer and training data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", type=Path, default=HERE / "nano.yaml")
    parser.add_argument("--samples", type=int, help="rows instead of the recipe's number")
    args = parser.parse_args()
    recipe = yaml.safe_load(args.recipe.read_text(encoding="utf-8"))
    if args.samples is not None:
        recipe["data"]["samples"] = args.samples
    generate(args.out, recipe, json.loads((HERE / "config.json").read_text(encoding="utf-8")))
    size = (args.out / "data.npz").stat().st_size
    print(f"{recipe['data']['samples']} rows, {size / 2**20:.1f} MiB in {args.out / 'data.npz'}", file=sys.stderr)


if __name__ == "__main__":
    main()
