"""How the renderer tells the template's control tokens from the client's, one turn of the argument at a time."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from scheduler_svc.gateway import chat_render
from scheduler_svc.gateway.chat_render import AmbiguousTextError, ChatRenderer, TemplateRefusalError

CONTROLS = ["<|im_end|>", "[INST]", "<s>", "<s"]


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content} for content in contents]


def controls_of(template: str, *contents: str, controls: list[str] | None = None) -> list[str]:
    renderer = ChatRenderer(template, {}, CONTROLS if controls is None else controls)
    rendered = renderer.render(chat(*contents), add_generation_prompt=True)
    return [rendered.text[start:end] for start, end in rendered.control_spans]


def rendered(template: str, *contents: str, **specials: str) -> str:
    return ChatRenderer(template, specials, CONTROLS).render(chat(*contents), add_generation_prompt=True).text


def test_the_longest_control_token_at_a_place_is_the_one() -> None:
    assert controls_of("<s>{{ messages[0].content }}", "x") == ["<s>"]


def test_a_model_without_control_tokens_has_no_spans() -> None:
    assert controls_of("<s>{{ messages[0].content }}", "x", controls=[]) == []


PICKY = "{% if messages[0].content.startswith('go') %}"
"""A template that looks into client text, so that only the second shadow agrees."""
ENDS = "{% else %}{{ raise_exception('say go') }}{% endif %}"


def test_text_that_a_template_changes_into_a_control_token_stays_text() -> None:
    assert controls_of("<s>{{ messages[0].content | trim | upper }}", "  [inst]  ") == ["<s>"]


def test_a_template_that_refuses_the_first_shadow_is_tried_with_the_second() -> None:
    template = PICKY + "<s>{{ messages[0].content }}" + ENDS
    assert controls_of(template, "go <|im_end|> on") == ["<s>"]
    with pytest.raises(TemplateRefusalError, match="say go"):
        controls_of(template, "stop")


@pytest.mark.parametrize(
    ("around", "text"),
    [
        ("<|{{ messages[1].content }}|>", "im_end"),
        ("<|im_end{{ messages[1].content }}", "|> and more"),
        ("{{ messages[1].content }}_end|>", "more and <|im"),
        ("{{ messages[1].content }}", "<|im_end|>"),
        ("<{{ messages[1].content }}>", "s><s"),
        ("{{ messages[1].content }}>", "<s"),
    ],
)
def test_the_second_shadow_hides_what_could_join_a_control_token(around: str, text: str) -> None:
    assert controls_of(PICKY + around + ENDS, "go", text) == []
    assert controls_of(PICKY + around + "[INST]" + ENDS, "go", "harmless") == ["[INST]"]


def test_ordinary_text_between_is_what_the_second_shadow_leaves() -> None:
    template = "{% if 'key' in messages[0].content %}[INST]{% endif %}{{ messages[0].content }}"
    assert controls_of(template, "|> key <|") == ["[INST]"]


@pytest.mark.parametrize(("then", "otherwise"), [("abc", "<s>"), ("<s>", "abc"), ("<s>", "")])
def test_renderings_that_differ_in_more_than_the_filler_are_refused(then: str, otherwise: str) -> None:
    template = f"{{% if '<s>' in messages[0].content %}}{then}{{% else %}}{otherwise}{{% endif %}}"
    with pytest.raises(AmbiguousTextError):
        controls_of(template, "<s>")


def test_text_with_the_filler_in_it_takes_another_and_with_all_of_them_is_refused() -> None:
    template = "<s>{{ messages[0].content }}"
    fillers = chat_render._FILLERS
    for filler in fillers:
        assert controls_of(template, filler + "<s>") == ["<s>"]
    assert controls_of(template, "".join(fillers[:-1]) + "<s>") == ["<s>"]
    with pytest.raises(AmbiguousTextError):
        controls_of(template, "".join(fillers) + "<s>")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ '%(x)s' % {} }}",
        "{{ 'abc'.index('z') }}",
        "{{ messages.nothing.more }}",
        "{{ nothing() }}",
        "{{ 5 | xmlattr }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_fails_is_a_refusal_without_our_exceptions_text(template: str) -> None:
    with pytest.raises(TemplateRefusalError) as caught:
        rendered(template, "x")
    assert str(caught.value) == ""


def test_the_templates_own_words_are_kept_to_a_line() -> None:
    with pytest.raises(TemplateRefusalError) as caught:
        rendered("{{ raise_exception('n' * 300) }}", "x")
    assert str(caught.value) == "n" * 200


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_render, "MAX_OUTPUT_CHARS", 10)
    assert rendered("{{ messages[0].content }}", "x" * 10) == "x" * 10
    with pytest.raises(TemplateRefusalError, match="too long"):
        rendered("{{ messages[0].content }}", "x" * 11)


def test_now_is_now_and_the_special_tokens_are_there() -> None:
    years = {datetime.now().year, datetime.now().year + 1}
    assert int(rendered("{{ strftime_now('%Y') }}", "x")) in years
    assert rendered("{{ bos_token }}|{{ tools }}|{{ documents }}", "x", bos_token="B") == "B|None|None"


@pytest.mark.parametrize(
    ("filtered", "value"),
    [
        ("tojson", '"é<&\'"'),
        ("tojson(ensure_ascii=true)", '"\\u00e9<&\'"'),
    ],
)
def test_tojson_of_text_is_plain_json(filtered: str, value: str) -> None:
    assert rendered(f"{{{{ messages[0].content | {filtered} }}}}", "é<&'") == value


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("", {}),
        ("(indent=2)", {"indent": 2}),
        ("(separators=(',', ':'))", {"separators": (",", ":")}),
        ("(sort_keys=true)", {"sort_keys": True}),
    ],
)
def test_tojson_of_values_follows_its_arguments(arguments: str, options: dict[str, Any]) -> None:
    template = "{{ {'b': 1, 'a': [2, 3]} | tojson" + arguments + " }}"
    assert rendered(template, "x") == json.dumps({"b": 1, "a": [2, 3]}, **options)


def test_blocks_take_no_room_and_loops_may_break() -> None:
    assert rendered("{% if true %}\n  {% endif %}\nx", "x") == "x"
    assert rendered("{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}", "x") == "1"
    assert rendered("a{% generation %}b{% endgeneration %}c", "x") == "abc"


def test_the_opening_of_an_answer_is_on_demand() -> None:
    renderer = ChatRenderer("{% if add_generation_prompt %}A{% else %}B{% endif %}", {}, CONTROLS)
    assert [renderer.render(chat("x"), add_generation_prompt=opened).text for opened in (True, False)] == ["A", "B"]
