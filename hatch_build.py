"""Build hook: a wheel carries profiles/ and recipes/ as data of the engine package.

An editable install reads them from the source tree, so nothing is copied there (a copy would go stale).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

DATA = {"profiles": (".yaml",), "recipes": (".yaml", ".py", ".jsonl", ".json", ".txt")}

#: Measurements, of interest to who reads the repository; nothing reads them at run time.
LEFT_OUT = Path("recipes/results")


class DataFilesHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the data files to a standard wheel; mutates ``build_data["force_include"]``."""
        if version != "standard":
            return
        root = Path(self.root)
        for folder, suffixes in DATA.items():
            for path in sorted((root / folder).rglob("*")):
                name = path.relative_to(root)
                if path.is_file() and path.suffix in suffixes and not name.is_relative_to(LEFT_OUT):
                    build_data["force_include"][str(path)] = f"deepinfer_engine/data/{name.as_posix()}"
