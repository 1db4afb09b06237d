"""Prompts as token ids: text, ready ids, conversations. One way for Generate and for Tokenize."""

from __future__ import annotations

from pagemill.errors import unsupported
from pagemill.v1 import inference_pb2 as pb
from scheduler_svc.gateway.chat import ChatTemplate
from scheduler_svc.gateway.tokenizer import TokenizerPool


class PromptEncoder:
    """Turns what a client sent into ids. `chat` is None for a model without a chat template."""

    def __init__(self, pool: TokenizerPool, chat: ChatTemplate | None) -> None:
        self._pool = pool
        self._chat = chat

    async def text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of plain text, with the tokenizer's own special tokens unless told otherwise."""
        return await self._pool.encode(text, field="text", add_special_tokens=add_special_tokens)

    async def chat(self, chat: pb.ChatPrompt) -> list[int]:
        """Ids of a conversation; control ids only where the template wrote them."""
        if self._chat is None:
            raise unsupported("chat", "the model has no chat template")
        messages = []
        for message in chat.messages:
            entry = {"role": message.role, "content": message.content}
            if message.name:
                entry["name"] = message.name
            messages.append(entry)
        opened = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
        rendered = await self._chat.render(messages, add_generation_prompt=opened)
        return await self._pool.encode_chat(rendered.text, rendered.control_spans)
