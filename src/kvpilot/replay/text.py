"""Text of an exact length in tokens, made from an id: the same id gives the same text on every machine."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

MESSAGE_OVERHEAD = 6
"""Tokens a chat template adds around one message, at most (SmolLM2: role, newline and two markers: 5)."""


class TextError(ValueError):
    """No text of exact length can be made with this tokenizer; the message says why."""


class TextMaker:
    """Words that are one token each, with their leading space, and stay so next to one another."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str = "") -> None:
        self._tokenizer = tokenizer
        self.chat_template = chat_template
        self._words = _single_token_words(tokenizer)
        self.text = lru_cache(maxsize=20_000)(self._make)

    @classmethod
    def load(cls, model: str | Path) -> TextMaker:
        """From a folder with ``tokenizer.json``. Raises TextError."""
        folder = Path(model)
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises plain Exception
            raise TextError(f"cannot load {folder / 'tokenizer.json'}: {error}") from None
        return cls(tokenizer, _chat_template(folder))

    def _make(self, text_id: str, tokens: int) -> str:
        """Text of exactly ``tokens`` tokens; shorter texts of one id are prefixes of longer ones."""
        raw = hashlib.shake_256(text_id.encode()).digest(4 * tokens)
        picks = np.frombuffer(raw, dtype="<u4") % len(self._words)
        return "".join(self._words[i] for i in picks.tolist())

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def clip(self, text: str, tokens: int) -> str:
        """The beginning of ``text`` that is about ``tokens`` tokens long, cut between two tokens."""
        offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return text if len(offsets) <= tokens else text[: offsets[tokens - 1][1]]

    @property
    def carries_tools(self) -> bool:
        """Whether the chat template renders ``tool_calls`` (they then cost tokens of their own)."""
        return "tool_calls" in self.chat_template


def _single_token_words(tokenizer: Tokenizer) -> list[str]:
    candidates = [
        " " + piece[1:]
        for piece in tokenizer.get_vocab()
        if piece[:1] in "Ġ▁" and len(piece) > 3 and piece[1:].isascii() and piece[1:].isalpha()
    ]
    encoded = tokenizer.encode_batch(candidates, add_special_tokens=False)
    words = sorted(word for word, e in zip(candidates, encoded, strict=True) if len(e.ids) == 1)
    sample = words[:: max(1, len(words) // 512)]
    if len(words) < 100 or len(tokenizer.encode("".join(sample), add_special_tokens=False).ids) != len(
        sample
    ):
        raise TextError("this tokenizer has too few words that are one token each")
    return words


def _chat_template(folder: Path) -> str:
    try:
        return (folder / "chat_template.jinja").read_text()
    except OSError:
        pass
    try:
        template = json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template", "")
    except (OSError, ValueError):
        return ""
    return template if isinstance(template, str) else json.dumps(template)
