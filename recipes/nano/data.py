"""Write what training needs besides the code: tokenizer, config, the texts around a question, and list words.

    python -m recipes.nano.data --out DIR [--recipe recipes/nano/nano.yaml]

writes DIR/{tokenizer,config,tokenizer_config,generation_config,frames,words}.json. The chats themselves are drawn while
the model trains (``packing``). This is the only step that needs the protocol codec.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer

from recipes.nano import frames
from recipes.nano.tokenizer import HERE, train_tokenizer, write_token_files


def list_words(tokenizer: Tokenizer) -> list[str]:
    """The common words that are one token after a space, as they stand in lists."""
    words = (HERE / "words.txt").read_text(encoding="utf-8").split()
    return [w for w in words if len(tokenizer.encode(f" {w}", add_special_tokens=False).ids) == 1]


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` and only then give the file its name."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(part, path)


def generate(out: Path, recipe: dict[str, Any], template: dict[str, Any]) -> dict[str, Any]:
    """Everything of a recipe under ``out``; returns the completed config."""
    settings = recipe["tokenizer"]
    size = template["text_config"]["vocab_size"]
    tokenizer = train_tokenizer(size, seed=settings["seed"], chats=settings["chats"])
    raw = write_token_files(out, template, tokenizer)
    write_json(out / "frames.json", frames.render())
    write_json(out / "words.json", list_words(tokenizer))
    return raw


def main() -> None:
    parser = argparse.ArgumentParser(description="generate nano's tokenizer, config and texts")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", type=Path, default=HERE / "nano.yaml")
    args = parser.parse_args()
    recipe = yaml.safe_load(args.recipe.read_text(encoding="utf-8"))
    generate(args.out, recipe, json.loads((HERE / "config.json").read_text(encoding="utf-8")))
    print(f"tokenizer, config, frames and words in {args.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
