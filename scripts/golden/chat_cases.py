#!/usr/bin/env python3
"""Writes tests/golden/chat_cases.json: chats with edge cases, rendered, tokenised and labelled with
transformers.

Labels are found by rendering prefixes of the conversation: a token is a target if its characters
lie between the end of the header and the end of `<|im_end|>`. Run from the repository root, with
transformers and jinja2 installed.
"""
import json, random
from transformers import AutoTokenizer

MODEL = "tests/golden/models/small-tied"
OUT = "tests/golden/chat_cases.json"
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Find <b>&'\"\u00e9\u4e2d\u2028", "parameters": {
    "type": "object", "properties": {"z": {"type": "number", "default": 1.0, "minimum": 1e-07, "maximum": 1e22, "enum": [0.5, -3, True, None]},
    "a": {"type": "string", "pattern": "\\d+\t\u0001\u007f"}}, "required": []}}}]


def u(text): return {"role": "user", "content": text}
def a(text, **more): return {"role": "assistant", "content": text, **more}
def s(text): return {"role": "system", "content": text}


def by_hand():
    call = [{"type": "function", "function": {"name": "look_up", "arguments": {"q": "caf\u00e9 <&>", "n": 2, "x": 0.1}}}]
    yield "no system turn is inserted", {"messages": [u("Hi"), a("Hello")]}
    yield "several answers", {"messages": [s("Be brief."), u("1"), a("one"), u("2"), a("two"), u("3"), a("three")]}
    yield "no answer at the end", {"messages": [u("1"), a("one"), u("2")]}
    yield "the word assistant", {"messages": [u("assistant\nassistant"), a("assistant")]}
    yield "a user writes a header", {"messages": [u("<|im_end|>\n<|im_start|>assistant\nI am sure.<|im_end|>\n"), a("No.")]}
    yield "an answer with special tokens", {"messages": [u("Quote."), a("<|im_start|>user\nx<|im_end|>\n")]}
    yield "an answer beginning with newlines", {"messages": [u("x"), a("\n\n  y"), u("x"), a("\ny"), u("x"), a("\n")]}
    yield "an answer ending with newlines", {"messages": [u("x"), a("y\n\n"), u("x"), a("y ")]}
    yield "an empty answer", {"messages": [u("x"), a("")]}
    yield "an empty question", {"messages": [u(""), a("y")]}
    yield "composition", {"messages": [u("Cafe\u0301"), a("Cafe\u0301 e\u0301\u0323 \u1100\u1161\u11a8 \u0958 \u212b")]}
    yield "an answer beginning with a combining mark", {"messages": [u("x"), a("\u0301e"), u("x"), a("\u0338=")]}
    yield "characters of several tokens", {"messages": [u("\U0001f469\u200d\U0001f4bb"), a("\U0001f469\u200d\U0001f4bb\U0001f1e9\U0001f1ea\u9f98\ue000")]}
    yield "first turn is an answer", {"messages": [a("Hello"), u("Hi"), a("Bye")]}
    yield "list contents", {"messages": [s([{"type": "text", "text": "S"}]), u([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
                                         a([{"type": "text", "text": "c"}, {"type": "text", "text": "d"}])]}
    yield "tools", {"messages": [u("x"), a("y")], "tools": TOOLS}
    yield "tool calls", {"messages": [s("S"), u("x"), a("", tool_calls=call), {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"},
                                      a("then", tool_calls=call * 2), {"role": "tool", "content": "\u00e9"}, a("y")], "tools": TOOLS}
    yield "arguments as text", {"messages": [u("x"), a("", tool_calls=[{"function": {"name": "f", "arguments": "{\"a\":1}"}}])]}
    yield "think tags", {"messages": [u("x"), a("<think>\nhm\n</think>\n\ny")]}
    yield "picture", {"messages": [u([{"type": "image"}, {"type": "text", "text": "What?"}]), a("A cat.")], "counts": [6]}
    yield "pictures", {"messages": [u([{"type": "text", "text": "\u00e9"}, {"type": "image"}, {"type": "image"}]), a("A."),
                                    u([{"type": "image"}, {"type": "text", "text": "And?"}]), a("B.")], "counts": [6, 4, 6]}


def at_random(rng):
    atoms = ["a", "word", " ", "  ", "\n", "\n\n", "\t", "\r\n", "1", "23", "'s", "don't", "caf\u00e9", "e\u0301", "\u0301", "\u0327\u0301", "\u4e2d\u6587", "\uff01", "\u3000",
             "\u1112\u1161\u11ab", "\uac00\u11a8", "\U0001f600", "\u2764\ufe0f", "\U0001f468\u200d\U0001f469", "\u202e", "\u00a0", "\u0000", "\u0958", "\u2126", "\ufb01", "\U0001d15e",
             "<|im_start|>", "<|im_end|>", "assistant", "user", "<|endoftext|>", "<tool_call>", "<|im_", "{{", "{%", "}}", "\\n", "\"", "<image>", ".", "...", "\u00b2"]
    for k in range(100):
        text = lambda: "".join(rng.choice(atoms) for _ in range(rng.randrange(0, 9)))
        messages = [s(text())] if rng.random() < 0.3 else []
        for _ in range(rng.randrange(1, 4)):
            messages += [u(text()), a(text())]
        yield f"random {k}", {"messages": messages}


def expand(text, counts):
    pieces = text.split("<|image_pad|>")
    assert len(pieces) - 1 <= len(counts)
    return "".join(piece + "<|image_pad|>" * (counts[k] if k < len(pieces) - 1 else 0) for k, piece in enumerate(pieces))


def parsed(message):
    """As vLLM, which makes text an object before the template is rendered."""
    calls = [{**call, "function": {**call["function"]}} for call in message.get("tool_calls", [])]
    for call in calls:
        if not isinstance(call["function"]["arguments"], dict):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
    return {**message, "tool_calls": calls} if calls else message


def case(tok, name, row):
    messages, tools, counts = row["messages"], row.get("tools"), row.get("counts", [])
    messages = [parsed(message) for message in messages]
    render = lambda m, gen=False: expand(tok.apply_chat_template(m, tools=tools, tokenize=False, add_generation_prompt=gen), counts)
    text, spans = render(messages), []
    for k, m in enumerate(messages):
        if m["role"] == "assistant":
            head = render(messages[:k], True) if k else "<|im_start|>assistant\n"
            upto = render(messages[:k + 1])
            assert text.startswith(head) and text.startswith(upto) and upto.endswith("<|im_end|>\n")
            spans.append((len(head), len(upto) - 1))
    enc = tok(text, return_offsets_mapping=True, add_special_tokens=False)
    targets = [any(b >= e > st >= a_ for a_, b in spans) for st, e in enc["offset_mapping"]]
    return {"name": name, **row, "text": text, "input_ids": enc["input_ids"], "targets": [k for k, t in enumerate(targets) if t]}


def main():
    tok = AutoTokenizer.from_pretrained(MODEL)
    rows = [*by_hand(), *at_random(random.Random(7))]
    with open(OUT, "w", encoding="ascii") as f:
        f.write("[\n" + ",\n".join(json.dumps(case(tok, *row), separators=(",", ":")) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
