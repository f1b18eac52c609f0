"""Tokenizers by name: arithmetic, bytes, or a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrl.errors import UserError

if TYPE_CHECKING:
    import tokenizers

ARITHMETIC_SYMBOLS = "$0123456789+="
"""`$` ends a text."""


class Tokenizer:
    """Text to token ids and back; a thin cover over the `tokenizers` library.

    Attributes:
        end_id: id of the token that ends a text.
        pad_id: id that fills unused places.
        vocab_size: number of ids, unused padding entries included.
    """

    def __init__(self, name: str, backend: tokenizers.Tokenizer, end_token: str, pad_token: str) -> None:
        self.name = name
        self.end_token, self.pad_token = end_token, pad_token
        self._backend = backend
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.end_id = self._id(end_token)
        self.pad_id = self._id(pad_token)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, nothing added.

        Raises:
            UserError: the text has a character that this tokenizer does not know.
        """
        try:
            return self._backend.encode(text, add_special_tokens=False).ids
        except Exception as error:
            unknown = sorted({c for c in text if self._backend.token_to_id(c) is None})
            raise UserError(
                f"the {self.name} tokenizer cannot write {text!r}: it does not know "
                f"{', '.join(map(repr, unknown))}"
            ) from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, the end token and other special ones included."""
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`; transformers' AutoTokenizer loads them."""
        directory.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(
            json.dumps(
                {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "eos_token": self.end_token,
                    "pad_token": self.pad_token,
                    "clean_up_tokenization_spaces": False,
                },
                indent=2,
            )
        )

    def _id(self, token: str) -> int:
        found = self._backend.token_to_id(token)
        if found is None:
            raise UserError(f"the {self.name} tokenizer has no token {token!r}")
        return found


def load_tokenizer(name: str) -> Tokenizer:
    """`arithmetic`: 13 symbols in 16 ids, `$` ends; `bytes`: 256 bytes and an end token; else a directory.

    Raises:
        UserError: no such name or directory, or a directory without `tokenizer.json` or an end token.
    """
    if name == "arithmetic":
        return _arithmetic()
    if name == "bytes":
        return _bytes()
    directory = Path(name).expanduser()
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise UserError(
            f"unknown tokenizer {name!r}: it is neither arithmetic nor bytes, nor a directory with "
            "tokenizer.json"
        )
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise UserError(f"{file}: not a tokenizer: {error}") from error
    end = _token_of(directory, "eos_token")
    if end is None:
        raise UserError(
            f"{directory / 'tokenizer_config.json'}: names no eos_token, so no response could end"
        )
    return Tokenizer(name, backend, end, _token_of(directory, "pad_token") or end)


def _arithmetic() -> Tokenizer:
    import tokenizers
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

    symbols = [*ARITHMETIC_SYMBOLS, "<pad>", "<unused0>", "<unused1>"]
    backend = tokenizers.Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in ("$", *symbols[13:])])
    return Tokenizer("arithmetic", backend, "$", "<pad>")


def _bytes() -> Tokenizer:
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    special = ["<end>", "<pad>", *(f"<unused{i}>" for i in range(6))]
    symbols = [*_byte_symbols(), *special]
    backend = tokenizers.Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    return Tokenizer("bytes", backend, "<end>", "<pad>")


def _byte_symbols() -> list[str]:
    """The visible character that stands for each byte in byte-level tokenizers (Radford et al. 2019).

    Printable bytes of Latin-1 stand for themselves, the others for the characters from 256 on.
    """
    hidden = iter(range(256, 512))
    return [
        chr(byte) if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174 else chr(next(hidden))
        for byte in range(256)
    ]


def _token_of(directory: Path, role: str) -> str | None:
    """A special token's text, from `tokenizer_config.json` or `special_tokens_map.json`."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = directory / name
        if file.is_file():
            value: Any = json.loads(file.read_text()).get(role)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                return value
    return None
