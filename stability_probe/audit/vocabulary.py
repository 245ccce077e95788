"""What the audit needs to know of a tokenizer, looked up once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stability_probe.errors import ProbeError

_EOS_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]", "<|eot_id|>")
_PAD_NAMES = ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>")


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer with two tables over its ids.

    Attributes:
        tokenizer: a `tokenizers.Tokenizer`.
        size: largest id + 1, special tokens included.
        bytes_of_id: UTF-8 bytes of each token's text, 0 for special tokens.
        is_digits: tokens that are ASCII digits, a leading space aside.
    """

    tokenizer: Any
    size: int
    bytes_of_id: NDArray[np.int16]
    is_digits: NDArray[np.bool_]
    eos_id: int | None = None
    pad_id: int | None = None

    @staticmethod
    def can_use(tokenizer: Any) -> bool:
        """Whether there is a fast (Rust) tokenizer in or behind it."""
        inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
        return hasattr(inner, "get_vocab") and hasattr(inner, "encode_batch") and hasattr(inner, "decoder")

    @staticmethod
    def of(tokenizer: Any) -> Vocabulary:
        """From a `tokenizers.Tokenizer` or a transformers fast tokenizer.

        Raises:
            ProbeError: a slow (pure-Python) tokenizer, or something else altogether.
        """
        inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not Vocabulary.can_use(tokenizer):
            raise ProbeError(
                "cannot use this tokenizer for the audit",
                f"a {type(tokenizer).__name__} has no fast (Rust) tokenizer behind it",
                "pass a tokenizers.Tokenizer, a transformers fast tokenizer, or a tokenizer.json",
            )
        tokens: dict[str, int] = inner.get_vocab(with_added_tokens=True)
        size = max(tokens.values(), default=-1) + 1
        byte_level = "ByteLevel" in repr(inner.decoder) + repr(inner.pre_tokenizer)
        special = {int(id_) for id_, added in inner.get_added_tokens_decoder().items() if added.special}
        lengths, digits = np.zeros(size, np.int16), np.zeros(size, np.bool_)
        for token, id_ in tokens.items():
            if id_ not in special:
                lengths[id_] = min(_token_bytes(token, byte_level), 32767)
                bare = token.lstrip("Ġ▁ ")
                digits[id_] = bare.isascii() and bare.isdigit()
        return Vocabulary(
            inner,
            size,
            lengths,
            digits,
            _known(tokenizer, "eos_token_id", tokens, _EOS_NAMES),
            _known(tokenizer, "pad_token_id", tokens, _PAD_NAMES),
        )

    @staticmethod
    def load(path: str | Path) -> Vocabulary:
        """From a `tokenizer.json` or a folder that holds one (and, for EOS and pad, a `tokenizer_config.json`).

        Raises:
            ProbeError: no such file, or one that the tokenizers library cannot read.
        """
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ProbeError(
                f"cannot find a tokenizer at {path}",
                "there is no tokenizer.json",
                "give a transformers folder with a fast tokenizer, or a tokenizer.json",
            )
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ProbeError(
                f"cannot read the tokenizer {file}",
                "the tokenizers library is not installed",
                'pip install "stability-probe[hf]"',
            ) from error
        try:
            inner = Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001  the library raises bare Exception for bad JSON
            raise ProbeError(
                f"cannot read the tokenizer {file}", str(error)[:200], "save it again with save_pretrained"
            ) from None
        vocabulary = Vocabulary.of(inner)
        named = _configured(file.parent / "tokenizer_config.json")
        tokens = inner.get_vocab(with_added_tokens=True)
        eos, pad = tokens.get(named.get("eos_token", "")), tokens.get(named.get("pad_token", ""))
        return Vocabulary(
            inner,
            vocabulary.size,
            vocabulary.bytes_of_id,
            vocabulary.is_digits,
            vocabulary.eos_id if eos is None else eos,
            vocabulary.pad_id if pad is None else pad,
        )

    def known(self, ids: NDArray[np.int32]) -> list[int]:
        """The ids that the tokenizer has, as a list."""
        kept: list[int] = ids[(ids >= 0) & (ids < self.size)].tolist()
        return kept

    def decode(self, ids: NDArray[np.int32]) -> str:
        text: str = self.tokenizer.decode(self.known(ids), skip_special_tokens=False)
        return text

    def encode(self, texts: list[str]) -> list[NDArray[np.int64]]:
        encode = getattr(self.tokenizer, "encode_batch_fast", self.tokenizer.encode_batch)
        return [np.array(encoding.ids, np.int64) for encoding in encode(texts, add_special_tokens=False)]

    def decodes(self, texts: list[NDArray[np.int32]]) -> list[str]:
        return list(self.tokenizer.decode_batch([self.known(ids) for ids in texts], skip_special_tokens=False))


def _token_bytes(token: str, byte_level: bool) -> int:
    if byte_level:  # one character stands for one byte
        return len(token)
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace("▁", " ").removeprefix("##").encode("utf-8", "replace"))


def _known(tokenizer: Any, attribute: str, tokens: dict[str, int], names: tuple[str, ...]) -> int | None:
    own = getattr(tokenizer, attribute, None)
    if isinstance(own, int):
        return own
    return next((tokens[name] for name in names if name in tokens), None)


def _configured(path: Path) -> dict[str, str]:
    """`eos_token` and `pad_token` of a tokenizer_config.json; empty where it cannot be read."""
    try:
        data = json.loads(path.read_text("utf-8")) if path.stat().st_size < 1 << 24 else {}
    except (OSError, ValueError):
        return {}
    found = {}
    for name in ("eos_token", "pad_token"):
        value = data.get(name) if isinstance(data, dict) else None
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found
