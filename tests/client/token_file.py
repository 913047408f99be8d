"""A file of tokens, for servers that tests start."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Tokens:
    """Writes a file for --auth-tokens-file."""

    path: Path
    lines: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, tenant: str, *scopes: str) -> str:
        token = f"weft_{name}-{'x' * 40}"
        record = {
            "id": name,
            "sha256": hashlib.sha256(token.encode()).hexdigest(),
            "tenant": tenant,
            "scopes": scopes,
        }
        self.lines[name] = json.dumps(record)
        self.write()
        return token

    def revoke(self, name: str) -> None:
        del self.lines[name]
        self.write()

    def write(self) -> None:
        draft = self.path.with_suffix(".new")
        draft.write_text("".join(line + "\n" for line in self.lines.values()))
        draft.replace(self.path)
