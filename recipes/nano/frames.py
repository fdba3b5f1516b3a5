"""The texts that the V4.1 codec puts around a question, rendered once, so that training data needs no codec.

``frames.json``: {name: text up to and including the token that opens the answer's thinking or its text} with the
question's place marked by ``QUESTION``. Names: efforts high, low, max; none (no thinking); system0..2 (with a system
message); turn (after an earlier question and answer, two more marks); tools0.. (with a set of ``tasks.TOOL_SETS``).
"""

from __future__ import annotations

from typing import Any

from deepseek_recipe import (
    AssistantMessage,
    Conversation,
    DeepseekV41Encoding,
    Message,
    SpecialTokens,
    SystemMessage,
    ToolDefinition,
    UserMessage,
)

from recipes.nano import chat, tasks
from recipes.nano.packing import EARLIER_ANSWER, EARLIER_QUESTION, QUESTION
from recipes.nano.tokenizer import IMAGE


def definition(tool: tasks.Tool) -> ToolDefinition:
    """The codec's description of a tool."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {tool.parameter: {"type": tool.kind}},
        "required": [tool.parameter],
    }
    return ToolDefinition(tool.name, tool.description, schema)


def conversation(frame: str, question: str, earlier: tuple[str, str] = ("", "")) -> Conversation:
    """The conversation that a frame stands for; ``earlier`` is the turn before in frame "turn"."""
    messages: list[Message] = []
    tools: list[ToolDefinition] = []
    effort: Any = "high"
    if frame in ("low", "max"):
        effort = frame
    elif frame == "none":
        effort = None
    elif frame.startswith("system"):
        messages.append(SystemMessage(chat.SYSTEM_TEXTS[int(frame[6:])]))
    elif frame == "turn":
        messages += [UserMessage(earlier[0]), AssistantMessage(earlier[1])]
    elif frame.startswith("tools"):
        tools = [definition(tasks.TOOLS[i]) for i in tasks.TOOL_SETS[int(frame[5:])]]
    messages.append(UserMessage(question))
    return Conversation(messages, tools=tools, thinking_mode=effort is not None, reasoning_effort=effort)


def names() -> list[str]:
    """Every frame."""
    fixed = ["high", "low", "max", "none", *(f"system{i}" for i in range(3)), "turn"]
    return fixed + [f"tools{i}" for i in range(len(tasks.TOOL_SETS))]


def render() -> dict[str, str]:
    """{name: text with the marks in the places of the question and of the earlier turn}."""
    encoding = DeepseekV41Encoding().with_special_tokens(SpecialTokens(image=IMAGE))
    marks = {"QQ": QUESTION, "QE": EARLIER_QUESTION, "AE": EARLIER_ANSWER}
    out = {}
    for name in names():
        text = encoding.render_conversation(conversation(name, "QQ", ("QE", "AE"))).prompt
        for word, mark in marks.items():
            if text.count(word) != (word == "QQ" or name == "turn"):
                raise ValueError(f"frame {name}: {word} occurs {text.count(word)} times")
            text = text.replace(word, mark)
        out[name] = text
    return out
