"""Chat templates: what they render, what they are refused, and what they may cost."""

from collections.abc import Callable
from datetime import datetime
from itertools import count

import pytest

from trtllm_lite.runtime.chat_template import ChatTemplate
from trtllm_lite.runtime.errors import BundleError, RequestError

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
HI = [{"role": "user", "content": "Hi"}]


def ticking() -> Callable[[], float]:
    """A clock on which every look takes a millisecond: a deadline counts looks."""
    ticks = count()
    return lambda: next(ticks) / 1000


def template(source: str, **tokens: str) -> ChatTemplate:
    return ChatTemplate(source, tokens, seconds=0.25, clock=ticking())


def render(source: str, messages: object = HI, **kwargs: object) -> str:
    return template(source).render(messages, **kwargs)  # type: ignore[arg-type]  # wrong types too


def test_chatml() -> None:
    messages = [{"role": "system", "content": "Be nice."}, *HI]
    prompt = "<|im_start|>system\nBe nice.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert render(CHATML, messages) == prompt + "<|im_start|>assistant\n"
    assert render(CHATML, messages, add_generation_prompt=False) == prompt


ASKED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "content", "end"),
    [
        (CHATML, "Sure, ", "Sure, "),
        (CHATML, "", ""),
        (CHATML, "<|im_end|>", "<|im_end|>"),
        (CHATML, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        (CHATML.replace("message['content']", "message['content'] | trim"), " Sure, \n", "Sure,"),
        (CHATML.replace("+ '<|im_end|>'", ""), "Sure.", "Sure."),
    ],
)
def test_a_last_message_to_go_on_with_ends_the_text(source: str, content: object, end: str) -> None:
    last = {"role": "assistant", "content": content}
    text = render(source, [*HI, last], add_generation_prompt=False, continue_final_message=True)
    asked = ASKED if "'<|im_end|>'" in source else ASKED.replace("<|im_end|>", "")
    assert text == asked + end
    assert last["content"] == content


@pytest.mark.parametrize(
    ("source", "message", "start", "why"),
    [
        (CHATML, {"content": "a"}, True, "allowed only with add_generation_prompt false"),
        (CHATML, {"role": "user", "content": "a"}, False, "role 'user'; allowed: one of the assis"),
        (CHATML + "{{ m.tool_calls }}", {"tool_calls": [{}]}, False, "ends with tool_calls"),
        ("{{ messages[0].content }}", {"content": "a"}, False, "does not show the last message"),
        (CHATML.replace("['content']", "['content'] | upper"), {"content": "a"}, False, "as it is"),
        (
            "{{ messages[1].content.split('b')[1] }}",
            {"content": "abc"},
            False,
            "does not show the last message as it is",
        ),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(
    source: str, message: dict[str, object], start: bool, why: str
) -> None:
    messages = [*HI, {"role": "assistant", **message}]
    with pytest.raises(RequestError, match=f"^continue_final_message: .*{why}"):
        render(source, messages, add_generation_prompt=start, continue_final_message=True)


def test_special_tokens_are_known_by_name() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token is defined }}"
    assert template(source, bos_token="<s>").render(HI) == "<s>HiFalse"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # The whitespace rules and helpers that templates written for transformers rely on.
        ("{% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}a{{ messages[0].role }}{% endgeneration %}b", "auserb"),
        ("{{ {'é': '<b>&'}|tojson }}", '{"é": "<b>&"}'),
        ("{{ [1, {'a': 2}]|tojson(indent=1) }}", '[\n 1,\n {\n  "a": 2\n }\n]'),
        ("{{ {'b': 1, 'a': 2}|tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ 'é'|tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{% set ns = namespace(x=1) %}{% set ns.x = ns.x + 1 %}{{ ns.x }}", "2"),
        ("{{ dict(a=1).a }}{{ none }}{{ undefined_name }}", "1None"),
        ("{{ 'a,b'.split(',')|join('-') }}{{ '{:>3}|{}'.format(1, 'x') }}", "a-b  1|x"),
        ("{{ 'x%02d' % 3 }}{{ '%s!'|format('y') }}{{ 'ab'|replace('a', 'c') }}", "x03y!cb"),
        ("{{ ['b', 'a']|sort|join }}{{ 'a\nb'|indent(2) }}{{ 2 ** 3 * 'z' }}", "aba\n  bzzzzzzzz"),
        ("{{ messages|selectattr('role', 'equalto', 'user')|list|length }}", "1"),
        ("{{ [[3, 1], [2, 0]]|map('first')|list }}{{ 1 ~ none ~ 'x' }}", "[3, 2]1Nonex"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') ~ m('b') }}", "<a><b>"),
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 2025"),
        ("{{ 'a'.center(5) }}|{{ '7'.zfill(3) }}", "  a  |007"),
        ("{% for a, b in {'k': 1}.items() %}{{ a }}{{ b }}{% endfor %}", "k1"),
    ],
)
def test_renders(source: str, expected: str) -> None:
    made = ChatTemplate(source, {}, clock=ticking(), now=lambda: datetime(2025, 1, 2))
    assert made.render(HI) == expected


def test_further_names_are_honoured_or_refused() -> None:
    source = "{% if enable_thinking %}think{% endif %}{{ documents }}{{ bos_token }}"
    assert render(source, enable_thinking=True, documents=["d"]) == "think['d']"
    with pytest.raises(
        RequestError, match=r"^mood: .* allowed: bos_token, documents, enable_think"
    ):
        render(source, mood="x")
    with pytest.raises(RequestError, match=r"^mood: .* allowed: nothing further$"):
        render(CHATML, mood="x")
    with pytest.raises(RequestError, match=r"^bos_token: the chat template does not use it"):
        template(source, bos_token="<s>").render(HI, bos_token="x")
    with pytest.raises(RequestError, match=r"^enable_thinking: enable_thinking holds a object"):
        render(source, enable_thinking=object())


@pytest.mark.parametrize("name", ["chat_template", "tokenize"])
def test_another_template_is_refused_even_where_the_name_is_used(name: str) -> None:
    with pytest.raises(RequestError, match=f"^{name}: not allowed"):
        render("{{ chat_template }}{{ tokenize }}", **{name: "{{ 1 }}"})


def test_tools() -> None:
    source = "{{ tools|tojson if tools else 'none' }}"
    assert render(source, tools=[{"a": 1}]) == '[{"a": 1}]'
    assert render(source, tools=[]) == "none"
    for bad in ({"a": 1}, ["x"], "x"):
        with pytest.raises(RequestError, match=r"^tools: allowed: a list"):
            render(source, tools=bad)
    with pytest.raises(RequestError, match=r"^tools: .* does not use tools"):
        render(CHATML, tools=[{"a": 1}])


def test_tool_calls_need_a_template_that_shows_them() -> None:
    messages = [*HI, {"role": "assistant", "tool_calls": [{"id": "1"}]}]
    shown = render("{% for m in messages %}{{ m.tool_calls }}{% endfor %}", messages)
    assert shown == "[{'id': '1'}]"
    with pytest.raises(RequestError, match="does not use tool_calls"):
        render(CHATML, messages)


def test_messages_and_flags_are_checked() -> None:
    with pytest.raises(RequestError, match=r"^messages: got an empty list"):
        render(CHATML, [])
    with pytest.raises(RequestError, match=r"^continue_final_message: got 'no'"):
        render(CHATML, continue_final_message="no")
    with pytest.raises(RequestError, match=r"^add_generation_prompt: got 'no'"):
        render(CHATML, add_generation_prompt="no")


def test_what_the_template_refuses_is_told() -> None:
    source = "{% if messages|length > 1 %}{{ raise_exception('roles\nmust alternate') }}{% endif %}"
    assert render(source) == ""
    with pytest.raises(RequestError, match=r"^messages: the chat template refused: roles must alt"):
        render(source, HI * 2)


def test_a_template_may_refuse_the_probe_and_still_serve() -> None:
    source = "{% if not tools %}{{ raise_exception('tools!') }}{% endif %}ok"
    assert template(source).render(HI, tools=[{"a": 1}]) == "ok"
    broken = template("{{ messages[0].nothing.at_all }}")
    with pytest.raises(RequestError, match="the chat template failed: UndefinedError: "):
        broken.render(HI)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "line 1: Expected an expression"),
        ("{{ x|no_such_filter }}", "No filter named 'no_such_filter'"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
        ("{% macro m() %}{{ varargs }}{% endmacro %}", "uses varargs"),
    ],
)
def test_no_jinja_is_a_bundle_error(source: str, message: str) -> None:
    with pytest.raises(BundleError, match=f"^chat_template: it cannot be compiled: .*{message}"):
        template(source)


INJECTIONS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('echo pwned').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('echo pwned').read() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ ''|attr('__class__') }}",
    "{{ [''] | map(attribute='__class__') | list }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{% set f = '{0.__class__}'.format %}{{ f('') }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{{ messages['__class__'] }}",
    "{{ self._TemplateReference__context }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{% set ns = namespace(__class__=1) %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% set ns = namespace() %}{% set ns['__init__'] = 1 %}",
]


@pytest.mark.parametrize("source", INJECTIONS)
def test_python_is_out_of_reach(source: str) -> None:
    try:
        shown = template(source).render(HI)
    except (BundleError, RequestError):
        return
    assert shown in ("", "[Undefined]")


@pytest.mark.parametrize(
    "source", ["{% set ns = namespace(_a=1) %}", "{% set ns = namespace() %}{% set ns._a = 1 %}"]
)
def test_a_namespace_holds_no_private_names(source: str) -> None:
    with pytest.raises(BundleError, match="a namespace cannot hold '_a'"):
        template(source)


BOMBS = {
    "loops without calls": "{% set x = range(9999)|list %}"
    + "{% for i in x %}" * 4
    + "{% endfor %}" * 4,
    "silent loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "macro calls": "{% macro m(n) %}{% if n %}{% set a = m(n-1) %}{% set b = m(n-1) %}{% endif %}"
    "{% endmacro %}{% set x = m(60) %}",
    "repeat": "{{ 'a' * 10**10 }}",
    "repeat list": "{{ [0] * 10**9 }}",
    "power": "{{ 10 ** (10**8) }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}"
    "{% endfor %}",
    "center": "{{ 'a'.center(10**10) }}",
    "zfill": "{{ '1'.zfill(10**10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**10) }}",
    "format width": "{{ '{:>10000000000}'.format(1) }}",
    "computed width": "{{ '{:>{w}}'.format(1, w=10**10) }}",
    "format_map width": "{{ '{x:>99999}'.format_map({'x': 1}) }}",
    "format fields": "{% set x = 'a' * 2000000 %}{{ ('{0}' * 100).format(x) }}",
    "percent width": "{{ '%10000000000d'|format(1) }}",
    "percent star": "{{ '%*d' % (10**10, 1) }}",
    "percent fields": "{% set x = 'a' * 2000000 %}{{ ('%(x)s' * 100) % {'x': x} }}",
    "double by ~": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "double by +": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "double by set": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "double a list": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "nest lists": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}",
    "nest dicts": "{% set ns = namespace(x={}) %}{% for i in range(60) %}"
    "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}",
    "nest by dict()": "{% set ns = namespace(x={}) %}{% for i in range(60) %}"
    "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}",
    "nest tuples": "{% set ns = namespace(x=1) %}{% for i in range(60) %}"
    "{% set ns.x = (ns.x, ns.x) %}{% endfor %}",
    "nest by map": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = "
    "range(9)|map(attribute='no', default=ns.x)|list %}{% endfor %}",
    "replace": "{% set x = 'a' * 2000000 %}{{ x|replace('a', x) }}",
    "replace method": "{% set x = 'a' * 2000000 %}{{ x.replace('a', x) }}",
    "join": "{% set x = 'a' * 2000000 %}{{ range(9)|join(x) }}",
    "join method": "{% set x = 'a' * 2000000 %}{{ x.join(['a'] * 9) }}",
    "indent": "{{ ('\n' * 10000)|indent(10**6) }}",
    "indent json": "{{ [[[1]]]|tojson(indent=10**9) }}",
    "long output": "{{ 'a' * 3000000 }}{{ 'a' * 3000000 }}",
    "literals": "{% set y %}{% for j in range(200) %}" + "x" * 400000 + "{% endfor %}{% endset %}",
    "texts in all": "{% for i in range(30) %}{% set y = 'a' * 3000000 %}{% endfor %}",
    "hoard": "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}"
    "{% set ns.l = ns.l + ['a' * 100000] %}{% endfor %}",
    "sorts": "{% set x = range(9999)|list %}{% for i in range(9999) %}{% set y = x|sort %}"
    "{% endfor %}",
    "print itself": "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
    "date": "{{ strftime_now('%' * 10000) }}",
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS)
def test_costly_templates_do_not_load(source: str) -> None:
    with pytest.raises(BundleError, match=r"^chat_template: it ") as caught:
        template(source)
    assert "failed" not in str(caught.value)


def test_a_cost_that_only_some_messages_cause_fails_the_request() -> None:
    # The first conversation, which every template renders when it loads, is harmless.
    source = "{{ messages[0].content * (messages|length - 1) * 10**6 }}"
    assert render(source, HI * 2) == "Hi" * 10**6
    with pytest.raises(RequestError, match=r"^messages: the chat template makes a text or list of"):
        render(source, HI * 4)
    once = template(source)
    with pytest.raises(RequestError):
        once.render(HI * 4)
    assert once.render(HI) == ""
