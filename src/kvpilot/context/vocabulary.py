"""What each token writes, in bytes, and the text of a token sequence with its token borders.

With the bytes of every token, offsets in text become token indices without tokenising anything again: the
engine's own tokens say where they begin and end. Read from ``tokenizer.json``; byte-level BPE (GPT-2's
alphabet) and SentencePiece-like vocabularies (``▁`` for a space, ``<0xAB>`` for a byte) are understood.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvpilot.domain import TokenArray


class VocabularyError(ValueError):
    """The tokenizer file is missing, unreadable or of a kind whose tokens have no exact bytes."""


@dataclass(frozen=True, slots=True)
class TokenText:
    """The bytes of a token sequence; ``ends[i]`` is where token ``i`` ends in ``data``."""

    data: bytes
    ends: npt.NDArray[np.int64]
    special: npt.NDArray[np.bool_]
    """Per token: is it an added token (``<|im_end|>``) rather than a piece of text?"""

    def tokens_before(self, offset: int) -> int:
        """Tokens that end at or before byte ``offset``: a token across a border belongs to what follows."""
        return int(np.searchsorted(self.ends, offset, side="right"))

    def special_starts(self) -> set[int]:
        """Byte offsets at which an added token begins."""
        starts = np.concatenate(([0], self.ends[:-1]))
        return set(starts[self.special].tolist())


class Vocabulary:
    """Token id → bytes."""

    def __init__(self, table: list[bytes], special: set[int], *, nfc: bool) -> None:
        self._table = table
        self._lengths = np.array([len(entry) for entry in table], dtype=np.int64)
        self._special = np.zeros(len(table), dtype=np.bool_)
        self._special[sorted(special)] = True
        self._nfc = nfc

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read a ``tokenizer.json``. Raises VocabularyError."""
        try:
            return cls._from_json(msgspec.json.decode(path.read_bytes()))
        except OSError as error:
            raise VocabularyError(f"cannot read {path}: {error.strerror}") from None
        except (msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
            raise VocabularyError(f"{path}: {error}") from None

    @classmethod
    def _from_json(cls, raw: dict[str, Any]) -> Vocabulary:
        kinds = {part.get("type") for part in _parts(raw.get("decoder"))}
        kinds |= {part.get("type") for part in _parts(raw.get("pre_tokenizer"))}
        vocabulary = raw["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: [[piece, score], …]
            vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
        if "ByteLevel" in kinds:
            decode = _byte_level
        elif kinds & {"ByteFallback", "Metaspace", "Replace"}:
            decode = _sentencepiece
        else:
            raise VocabularyError(f"tokens of a {raw['model'].get('type')} vocabulary have no exact bytes")
        added = {int(token["id"]): str(token["content"]) for token in raw.get("added_tokens") or ()}
        table = [b""] * (1 + max((*vocabulary.values(), *added), default=-1))
        for piece, number in vocabulary.items():
            table[number] = decode(piece)
        for number, content in added.items():
            table[number] = content.encode()
        nfc = any(part.get("type") == "NFC" for part in _parts(raw.get("normalizer")))
        return cls(table, set(added), nfc=nfc)

    def text(self, tokens: TokenArray) -> TokenText:
        """Raises VocabularyError for ids that the vocabulary does not have."""
        if len(tokens) and int(tokens.max()) >= len(self._table):
            raise VocabularyError(f"token {int(tokens.max())} is not in the vocabulary")
        table = self._table
        data = b"".join([table[token] for token in tokens.tolist()])
        return TokenText(data, np.cumsum(self._lengths[tokens]), self._special[tokens])

    def normalize(self, text: str) -> bytes:
        """The bytes that tokens of ``text`` write: the tokenizer's own normalisation, as UTF-8."""
        if self._nfc:
            text = unicodedata.normalize("NFC", text)
        return text.encode("utf-8", "replace")


def _parts(node: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A tokenizer.json component, its ``Sequence`` members included."""
    if not node:
        return
    yield node
    for key in ("decoders", "pretokenizers", "normalizers"):
        for child in node.get(key) or ():
            yield from _parts(child)


def _alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (``bytes_to_unicode`` of its encoder.py), inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_BYTES = _alphabet()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in piece])
    except KeyError:
        return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    return piece.replace("▁", " ").encode()
