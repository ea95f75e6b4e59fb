"""Text to token ids and back, as the bundle's tokenizer.json and chat template say."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import tokenizers

from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.chat_template import ChatTemplate
from trtllm_lite.runtime.errors import BundleError, RequestError
from trtllm_lite.runtime.token_bytes import byte_level_bytes, fallback_byte

_MAX_TEMPLATE_BYTES = 2**20


class Template(Protocol):
    """A compiled chat template: `ChatTemplate`, or `IsolatedTemplate`."""

    @property
    def variables(self) -> frozenset[str]:
        """Names that it uses, beside those that every template knows."""

    def render(
        self,
        messages: object,
        *,
        tools: object = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: object,
    ) -> str:
        """The prompt text of a conversation."""


Renderer = Callable[[str, Mapping[str, str]], Template]
"""Compiles a template's source with its special tokens. Raises BundleError."""


class Tokenizer:
    """A tokenizer of the `tokenizers` library, and what the runtime asks of it.

    Special tokens written out in text, a chat message's included ("<|im_start|>"), become those
    special tokens, as in vLLM and transformers: filter untrusted text before it gets here if that
    matters.
    """

    def __init__(
        self,
        raw: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        renderer: Renderer = ChatTemplate,
    ) -> None:
        """`eos_token_ids`: the first is the one that a chat template knows as `eos_token`.
        `renderer`: what makes a template of the source. Raises BundleError for a chat template
        that cannot be used."""
        raw.no_truncation()
        raw.no_padding()
        self._raw = raw
        added = raw.get_added_tokens_decoder()
        self._special_tokens = {t.content: i for i, t in added.items() if t.special}
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        names = (f"<0x{byte:02X}>" for byte in range(256))
        ids = (raw.token_to_id(name) for name in names)
        self._byte_ids = frozenset(i for i in ids if i is not None)
        self._vocab_size = 1 + max(raw.get_vocab(with_added_tokens=True).values(), default=-1)
        self._bos_token = self._name(bos_token_id)
        self._eos_token = next((self._name(i) for i in eos_token_ids), None)
        self._byte_level = raw.decoder is not None and raw.decoder.decode(["a", "Ġa"]) == "a a"
        # A decoder may treat the first token of a text differently: one to put before others.
        self._before = self._ordinary_token()
        self._template: Template | None = None
        if chat_template is not None:
            tokens = {"bos_token": self._bos_token, "eos_token": self._eos_token}
            given = {name: text for name, text in tokens.items() if text is not None}
            self._template = renderer(chat_template, given)

    @classmethod
    def from_bundle(cls, bundle: Bundle, renderer: Renderer = ChatTemplate) -> "Tokenizer":
        """The bundle's tokenizer. Raises BundleError for a file that is missing or damaged, or has
        more tokens than the model (fewer are normal: models pad their vocabulary)."""
        manifest = bundle.manifest
        if manifest.tokenizer is None:
            raise BundleError("tokenizer", "the bundle has none; give prompt_token_ids instead")
        template = None
        if manifest.chat_template is not None:
            template = _read_template(bundle.path(manifest.chat_template))
        tokenizer = cls(
            _read_tokenizer(bundle.path(manifest.tokenizer)),
            bos_token_id=manifest.model.bos_token_id,
            eos_token_ids=manifest.model.eos_token_ids,
            chat_template=template,
            renderer=renderer,
        )
        if tokenizer.vocab_size > manifest.model.vocab_size:
            message = f"it has token ids up to {tokenizer.vocab_size - 1}, but the model's"
            raise BundleError("tokenizer", f"{message} vocabulary is {manifest.model.vocab_size}")
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return self._vocab_size

    @property
    def bos_token(self) -> str | None:
        return self._bos_token

    @property
    def eos_token(self) -> str | None:
        return self._eos_token

    @property
    def special_tokens(self) -> dict[str, int]:
        """The text of every special token, and its id."""
        return dict(self._special_tokens)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat template uses, beside those of every template."""
        return frozenset() if self._template is None else self._template.variables

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json, without truncation and padding."""
        return self._raw.to_str()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. A rendered chat template already has its special tokens: encode it
        with add_special_tokens=False.

        There is no limit of length here: cost grows about linearly, by a second or two a megabyte,
        so whoever takes text from strangers bounds it first. Raises RequestError for what is not
        Unicode text or holds words that the tokenizer has no token for.
        """
        _check_text(text)
        try:
            return list(self._raw.encode(text, add_special_tokens=add_special_tokens).ids)
        # The library raises plain Exception for text that it cannot take.
        except Exception as error:
            message = f"the tokenizer cannot encode it: {_one_line(error)}"
            raise RequestError("prompt", message) from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids that only the model's padded vocabulary has are empty; bytes that
        are no UTF-8 are U+FFFD."""
        known = [i for i in ids if 0 <= i < self._vocab_size]
        return self._raw.decode(known, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The token's own text inside a text: with its leading space, where it has one, and with
        U+FFFD for bytes that are part of a character only. "" for an id without a token."""
        prefix = self.decode(self._before, skip_special_tokens=False)
        both = self.decode([*self._before, token_id], skip_special_tokens=False)
        if prefix and both.startswith(prefix):
            return both[len(prefix) :]
        return self.decode([token_id], skip_special_tokens=False)

    def token_name(self, token_id: int) -> str:
        """How the vocabulary spells a token (a byte-level one writes Ġ for a blank); empty for an
        id without a token."""
        return self._name(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes inside a text, parts of characters too. Those of all tokens of a
        text, joined, are its UTF-8; some tokenizers leave out a space at its beginning, and this
        does not. b"" for an id without a token."""
        name = self._name(token_id)
        if name is None:
            return b""
        if self._byte_level:
            return byte_level_bytes(name)
        if token_id in self._byte_ids:
            return fallback_byte(name)
        return self.token_text(token_id).encode("utf-8")

    def has_text(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Whether `decode` looks at the token at all."""
        if skip_special_tokens and token_id in self._special_ids:
            return False
        return 0 <= token_id < self._vocab_size

    def is_byte(self, token_id: int) -> bool:
        """Whether it is a byte-fallback token, which decodes together with its neighbours."""
        return token_id in self._byte_ids

    def apply_chat_template(
        self,
        messages: object,
        *,
        tools: object = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: object,
    ) -> str:
        """The prompt for a conversation: see `ChatTemplate.render`. Raises RequestError."""
        if self._template is None:
            action = "use generate with a prompt"
            raise RequestError("messages", f"the bundle has no chat template; {action}")
        return self._template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **kwargs,
        )

    def _ordinary_token(self) -> list[int]:
        ids = (i for i in range(self._vocab_size) if i not in self._special_ids)
        return next(([i] for i in ids if self._raw.decode([i]).strip().isalnum()), [])

    def _name(self, token_id: int | None) -> str | None:
        return None if token_id is None else self._raw.id_to_token(token_id)


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    # The library raises plain Exception for what it cannot read.
    except Exception as error:
        message = f"{path.name} is not a tokenizer that can be read: {_one_line(error)}"
        raise BundleError("tokenizer", message) from error


def _read_template(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_TEMPLATE_BYTES + 1)
        if len(data) > _MAX_TEMPLATE_BYTES:
            raise BundleError("chat_template", f"{path.name} is over {_MAX_TEMPLATE_BYTES} bytes")
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError("chat_template", f"{path.name}: {_one_line(error)}") from error


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise RequestError("prompt", f"got {type(text).__name__}; allowed: a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        where = f"a lone surrogate at character {error.start}"
        raise RequestError("prompt", f"{where}; allowed: Unicode text") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
