"""Writes chat templates that loop, exhaust memory, nest deeply, or fail: one file for each.

    python3 scripts/reliability/hostile_templates.py FOLDER

A template whose name begins with `ok_` must be accepted; every other one must be refused.
"""

import sys
from pathlib import Path

TURNS = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}"
    "{%- for part in message.content %}{%- if part.type == 'image' %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def nested(opening, closing, depth, middle=""):
    return opening * depth + middle + closing * depth


def templates():
    """Name -> text of each template."""
    yield "ok_plain", TURNS
    yield "ok_short_loop", "{%- for i in range(1000) %}{%- endfor %}" + TURNS

    # Time.
    loop = "{%- for {0} in range(100000) %}"
    yield "loop_two_deep", loop.replace("{0}", "a") + loop.replace("{0}", "b") + "{%- endfor %}{%- endfor %}" + TURNS
    four = "".join(loop.replace("{0}", name) for name in "abcd")
    yield "loop_four_deep", four + "{%- endfor %}" * 4 + TURNS
    yield "loop_in_a_macro", (
        "{%- macro m() %}{%- for i in range(99999) %}{%- for j in range(99999) %}"
        "{%- endfor %}{%- endfor %}{%- endmacro %}{{- m() }}" + TURNS
    )
    yield "macros_that_double", (
        "{%- macro m0() %}{%- endmacro %}"
        + "".join(f"{{%- macro m{i}() %}}{{{{- m{i - 1}() }}}}{{{{- m{i - 1}() }}}}{{%- endmacro %}}" for i in range(1, 41))
        + "{{- m40() }}" + TURNS
    )
    yield "loop_over_a_list_that_doubles", (
        "{%- set ns = namespace(l=[0]) %}{%- for i in range(40) %}{%- set ns.l = ns.l + ns.l %}{%- endfor %}"
        "{%- for x in ns.l %}{%- endfor %}" + TURNS
    )
    yield "recursive_loop", (
        "{%- for x in [[1]] recursive %}{{- loop([x, x]) }}{%- endfor %}" + TURNS
    )
    yield "sort_in_a_loop", (
        "{%- for i in range(100000) %}{%- set x = range(100000) | sort(reverse=true) %}{%- endfor %}" + TURNS
    )
    yield "split_in_a_loop", (
        "{%- set t = 'ab' * 1000000 %}{%- for i in range(100000) %}{%- set x = t.split('a') | length %}{%- endfor %}" + TURNS
    )
    yield "contains_in_a_loop", (
        "{%- set t = 'a' * 10000000 %}{%- for i in range(100000) %}{%- if t ~ 'b' in t %}{%- endif %}{%- endfor %}" + TURNS
    )
    yield "replace_in_a_loop", (
        "{%- set t = 'a' * 10000000 %}{%- for i in range(100000) %}{%- set x = t | replace('a', 'b') %}{%- endfor %}" + TURNS
    )
    yield "tojson_in_a_loop", (
        "{%- set t = range(100000) | list %}{%- for i in range(100000) %}{%- set x = t | tojson %}{%- endfor %}" + TURNS
    )

    # Memory.
    yield "text_times_ten_billion", "{%- set x = 'abcdefghij' * 1000000000 %}{{- x }}" + TURNS
    yield "text_that_doubles", (
        "{%- set ns = namespace(t='abcdefgh') %}{%- for i in range(40) %}{%- set ns.t = ns.t ~ ns.t %}{%- endfor %}"
        "{{- ns.t }}" + TURNS
    )
    yield "text_that_doubles_unused", (
        "{%- set ns = namespace(t='abcdefgh') %}{%- for i in range(34) %}{%- set ns.t = ns.t + ns.t %}{%- endfor %}" + TURNS
    )
    yield "list_times_ten_billion", "{%- set x = [0] * 10000000000 %}{{- x | length }}" + TURNS
    yield "range_of_ten_billion", "{%- set x = range(10000000000) | list %}{{- x | length }}" + TURNS
    yield "lists_of_lists", (
        "{%- set ns = namespace(l=[]) %}{%- for i in range(90000) %}"
        "{%- set ns.l = ns.l + [range(90000) | list] %}{%- endfor %}" + TURNS
    )
    yield "output_without_end", "{%- for i in range(99999) %}{%- for j in range(99999) %}{{- 'abcdefghijklmnop' }}{%- endfor %}{%- endfor %}" + TURNS
    yield "output_of_messages", (
        "{%- for i in range(99999) %}{%- for j in range(99999) %}{{- messages | tojson }}{%- endfor %}{%- endfor %}" + TURNS
    )
    yield "indent_by_ten_billion", "{{- 'a\\nb' | indent(10000000000) }}" + TURNS
    yield "center_in_ten_billion", "{{- 'a'.center(10000000000) }}" + TURNS
    yield "ljust_ten_billion", "{{- 'a'.ljust(10000000000) }}" + TURNS
    yield "format_width", "{{- '%9999999999d' | format(1) }}" + TURNS
    yield "join_with_a_long_text", "{{- range(99999) | join('a' * 1000000) }}" + TURNS
    yield "replace_by_a_long_text", "{{- ('a' * 100000) | replace('a', 'b' * 1000000) }}" + TURNS
    yield "captured_output", (
        "{%- set x %}{%- for i in range(99999) %}{%- for j in range(99999) %}abcdefghijklmnop{%- endfor %}{%- endfor %}{%- endset %}" + TURNS
    )
    yield "powers_of_powers", "{{- 9 ** 9 ** 9 }}" + TURNS

    # Stack.
    yield "macro_that_calls_itself", "{%- macro m() %}{{- m() }}{%- endmacro %}{{- m() }}" + TURNS
    yield "macros_that_call_each_other", (
        "{%- macro a() %}{{- b() }}{%- endmacro %}{%- macro b() %}{{- a() }}{%- endmacro %}{{- a() }}" + TURNS
    )
    yield "caller_that_calls_itself", (
        "{%- macro m() %}{%- call m() %}{{- caller() }}{%- endcall %}{%- endmacro %}{%- call m() %}x{%- endcall %}" + TURNS
    )
    yield "nested_parentheses", "{{- " + nested("(", ")", 100_000, "1") + " }}" + TURNS
    yield "nested_lists", "{{- " + nested("[", "]", 100_000) + " }}" + TURNS
    yield "nested_maps", "{{- " + nested("{'a':", "}", 100_000, "1") + " }}" + TURNS
    yield "nested_not", "{{- " + "not " * 100_000 + "1 }}" + TURNS
    yield "nested_minus", "{{- " + "-" * 100_000 + "1 }}" + TURNS
    yield "nested_if", nested("{% if 1 %}", "{% endif %}", 20_000) + TURNS
    yield "nested_for", nested("{% for a in [1] %}", "{% endfor %}", 20_000) + TURNS
    yield "long_sum", "{{- " + "1+" * 200_000 + "1 }}" + TURNS
    yield "long_chain_of_filters", "{{- 'a'" + "|upper" * 200_000 + " }}" + TURNS
    yield "long_chain_of_attributes", "{{- messages" + ".a" * 200_000 + " }}" + TURNS
    yield "long_chain_of_tests", "{{- " + "1 if 1 else " * 100_000 + "1 }}" + TURNS
    yield "value_that_nests", (
        "{%- set ns = namespace(l=[]) %}{%- for i in range(99999) %}{%- set ns.l = [ns.l] %}{%- endfor %}{{- ns.l }}" + TURNS
    )
    yield "value_that_nests_as_json", (
        "{%- set ns = namespace(l=[]) %}{%- for i in range(99999) %}{%- set ns.l = [ns.l] %}{%- endfor %}{{- ns.l | tojson }}" + TURNS
    )
    yield "value_that_nests_compared", (
        "{%- set a = namespace(l=[]) %}{%- set b = namespace(l=[]) %}{%- for i in range(99999) %}"
        "{%- set a.l = [a.l] %}{%- set b.l = [b.l] %}{%- endfor %}{{- a.l == b.l }}" + TURNS
    )

    # Files, syntax, text that is not text.
    yield "include", "{% include '/etc/passwd' %}" + TURNS
    yield "import", "{% import '../../secret' as x %}" + TURNS
    yield "extends", "{% extends 'chat_template.jinja' %}" + TURNS
    yield "include_itself", "{% include 'chat_template.jinja' %}" + TURNS
    yield "unfinished", "{% for message in messages %}"
    yield "raise", "{{ raise_exception('x' * 100000) }}"
    yield "nothing", ""
    yield "only_text", "a" * 1000
    yield "attributes_of_python", "{{ ''.__class__.__mro__[1].__subclasses__() }}" + TURNS
    yield "escapes", "\x1b]0;owned\x07{{ nothing.x.y }}" + TURNS

    # Misleading: the text of the turns does not occur as it is.
    yield "misleading_upper", TURNS.replace("{{- message.content }}", "{{- message.content | upper }}")
    yield "ok_text_of_contents", (  # the rows of the script have no parts
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + (message.content | string) + '<|im_end|>\\n' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    yield "misleading_end_mark", TURNS.replace("<|im_end|>", "</end of turn>")
    yield "misleading_dropped_turn", TURNS.replace(
        "for message in messages", "for message in messages[-2:]"
    )


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in templates():
        (folder / f"{name}.jinja").write_bytes(text.encode())


main()
