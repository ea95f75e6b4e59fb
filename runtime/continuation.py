"""`continue_final_message`: a prompt that ends inside of its last message, for a model to go on.

As transformers does it: the message gets a mark at its end, the conversation is rendered as ever,
and the text is cut at the mark.
"""

import secrets
from dataclasses import dataclass

from trtllm_lite.runtime.chat_messages import Message
from trtllm_lite.runtime.errors import RequestError

NAME = "continue_final_message"


@dataclass(frozen=True)
class Continuation:
    """The content that the prompt ends with, and what marks its end, which nobody can have written.
    The mark ends with a blank: when that is gone, the template takes off white space."""

    content: str
    mark: str

    @classmethod
    def of(cls, messages: list[Message], *, starts_answer: bool) -> "Continuation":
        """Of the last of the checked `messages`, which is marked in place. Raises RequestError
        where that is none to go on with, or a new answer is to be started as well."""
        if starts_answer:
            raise RequestError(NAME, "got true; allowed only with add_generation_prompt false")
        last = messages[-1]
        if last["role"] != "assistant":
            got = f"the last message is of the role {last['role']!r}"
            raise RequestError(NAME, f"{got}; allowed: one of the assistant")
        if last.get("tool_calls"):
            got = "the last message ends with tool_calls"
            raise RequestError(NAME, f"{got}; allowed: one that ends with its content")
        made = cls(last["content"], f"{secrets.token_hex(16)} ")
        last["content"] += made.mark
        return made

    def end_of(self, text: str) -> str:
        """What a template made of the marked messages, up to the mark; without white space in front
        of it where the template leaves none at the end of a message. Raises RequestError for a
        template that does not end the message with its content."""
        before, found, _ = text.rpartition(self.mark)
        if not found:
            before, found, _ = text.rpartition(self.mark.rstrip())
            before = before.rstrip()
        if not found or not before.rstrip().endswith(self.content.strip()):
            message = "the chat template does not show the last message as it is"
            raise RequestError(NAME, message)
        return before
