"""What becomes of one group of the JSON-Schema-Test-Suite: at the grammar, and through a server."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import jsonschema
import numpy as np
import tokenizers

from trtllm_lite.runtime.errors import RequestError, StepError
from trtllm_lite.runtime.grammar import Grammar, GrammarCompiler
from trtllm_lite.runtime.grammar_spec import GrammarSpec
from trtllm_lite.tools.conformance.json_schema_groups import Group
from trtllm_lite.tools.conformance.toy import EOS

PARAM = "response_format"
WRITERS = 3
"""Random texts per schema that is taken."""
MAX_TOKENS = 400
_VALIDATORS = {
    "draft2020-12": jsonschema.Draft202012Validator,
    "draft7": jsonschema.Draft7Validator,
}
_SPELLINGS = ((",", ":"), (", ", ": "))
_MARK = "\\u0000u"
"""How json writes what stands for the backslash and the u of an escape."""


@dataclass
class Finding:
    """What one group came to. refusal: the reason; None where the schema is taken.

    narrow: valid instances that no text of the grammar spells; taken: valid ones that one does;
    refused: invalid ones that none does. judged: texts that were written and validated. wrong: what
    must not be, one line each.
    """

    group: str
    refusal: str | None = None
    taken: list[str] = field(default_factory=list)
    narrow: list[str] = field(default_factory=list)
    refused: int = 0
    judged: int = 0
    wrong: list[str] = field(default_factory=list)


class Checker:
    """Checks groups with one vocabulary and one server."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, compiler: GrammarCompiler, client: httpx.Client
    ) -> None:
        self._tokenizer = tokenizer
        self._compiler = compiler
        self._client = client

    def check(self, group: Group) -> Finding:
        """One group. Raises httpx.HTTPError when the server is gone."""
        found = Finding(group.name)
        grammar = self._compiled(group.schema, found)
        self._ask_server(group, found)
        if grammar is not None:
            self._feed(group, grammar, found)
            self._write(group, grammar, found)
        return found

    def _compiled(self, schema: Any, found: Finding) -> Grammar | None:
        try:
            return self._compiler.compile(GrammarSpec.json_schema(schema, param=PARAM))
        except RequestError as error:
            found.refusal = str(error)
            return None

    def _ask_server(self, group: Group, found: Finding) -> None:
        """The server has to be of one mind with the grammar, and what it writes has to fit."""
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 64,
            PARAM: {"type": "json_schema", "json_schema": {"name": "x", "schema": group.schema}},
        }
        response = self._client.post("/v1/chat/completions", json=body)
        answer = response.json()
        if found.refusal is not None:
            error = answer.get("error", {})
            if response.status_code != 400 or error.get("param") != PARAM or not error["message"]:
                found.wrong.append(f"{response.status_code} for a schema that is refused: {answer}")
            return
        if response.status_code != 200:
            found.wrong.append(f"{response.status_code} for a schema that is taken: {answer}")
        elif answer["choices"][0]["finish_reason"] == "stop":
            self._judge(group, answer["choices"][0]["message"]["content"], found)

    def _feed(self, group: Group, grammar: Grammar, found: Finding) -> None:
        for instance in group.instances:
            spelled = any(self._takes(grammar, text) for text in spellings(instance.value))
            if instance.valid:
                (found.taken if spelled else found.narrow).append(instance.description)
            elif spelled:
                found.wrong.append(f"takes what is invalid: {instance.description}")
            else:
                found.refused += 1

    def _takes(self, grammar: Grammar, text: str) -> bool:
        state = grammar.start()
        try:
            for token in self._tokenizer.encode(text).ids:
                if not state.allowed()[token]:
                    return False
                state.advance(token)
        except StepError:
            return False
        return state.may_stop()

    def _write(self, group: Group, grammar: Grammar, found: Finding) -> None:
        for seed in range(WRITERS):
            text = self._random_text(grammar, random.Random(seed))
            if text is not None:
                self._judge(group, text, found)

    def _random_text(self, grammar: Grammar, rng: random.Random) -> str | None:
        """By a writer that knows nothing of JSON, and prefers what might end. None: it has not."""
        state, tokens = grammar.start(), list[int]()
        while not state.may_stop() or rng.random() < 0.3:
            allowed = [int(i) for i in np.flatnonzero(state.allowed()) if i != EOS]
            if not allowed:
                break
            if len(tokens) == MAX_TOKENS:
                return None
            closing = [i for i in allowed if self._tokenizer.id_to_token(i) in ('"', "}", "]")]
            pool = closing if closing and rng.random() < 0.4 else allowed
            tokens.append(rng.choice(pool))
            state.advance(tokens[-1])
        return self._tokenizer.decode(tokens)

    def _judge(self, group: Group, text: str, found: Finding) -> None:
        try:
            value = json.loads(text)
        except ValueError:
            found.wrong.append(f"writes what is no JSON: {text!r:.80}")
            return
        kind = _VALIDATORS[group.draft]
        try:
            fits = kind(group.schema, format_checker=kind.FORMAT_CHECKER).is_valid(value)
        except re.error:
            # The validator has Python's regular expressions, which lack some of ECMA 262's.
            return
        found.judged += 1
        if not fits:
            found.wrong.append(f"writes what is invalid: {text!r:.80}")


def spellings(value: Any) -> Iterator[str]:
    """A value as JSON: compact and spaced, characters as they are and escaped, and names in
    disguise, every character of them escaped."""
    for item, key in _SPELLINGS:
        for plain in (False, True):
            yield json.dumps(value, separators=(item, key), ensure_ascii=plain)
    yield json.dumps(_marked(value), separators=_SPELLINGS[0]).replace(_MARK, "\\u")


def _marked(value: Any) -> Any:
    """The value with the characters of its names as escapes that json leaves alone."""
    if isinstance(value, list):
        return [_marked(each) for each in value]
    if isinstance(value, dict):
        return {_escapes(name): _marked(each) for name, each in value.items()}
    return value


def _escapes(name: str) -> str:
    units = name.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\0u{units[i : i + 4]}" for i in range(0, len(units), 4))
