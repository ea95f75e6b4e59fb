"""Jinja's sandbox as chat templates need it: transformers' helpers, and a budget for what it costs.

Loops and calls are counted against a deadline. Operations that make long texts out of short ones
are measured before they are done. Filters are those that chat templates use; the others could make
long texts, or are no use there.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from types import BuiltinMethodType, MappingProxyType, MethodType
from typing import Any

import jinja2
import jinja2.filters as builtin
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from trtllm_lite.runtime import template_cost as cost
from trtllm_lite.runtime.template_cost import Budget, TemplateCostError

BUDGET = "the budget"
"""The name under which a render's context holds its Budget: no identifier, so that no template can
name it."""


class Refusal(jinja2.TemplateError):
    """The template called raise_exception."""


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012  # declared by Jinja as a plain class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Guards(NodeTransformer):
    """Puts a counted call into every loop body and around what compares values or makes lists."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        literal = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        call = _counted("tick", [nodes.Const(literal)], node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _counted("concat_values", list(node.nodes), node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Call:
        return self._made(node)

    def visit_List(self, node: nodes.List) -> nodes.Call:
        return self._made(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Call:
        return self._made(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        # A tuple that is assigned to is no value.
        return self._made(node) if node.ctx == "load" else node

    def visit_Name(self, node: nodes.Name) -> nodes.Name:
        if node.name in ("varargs", "kwargs"):
            raise TemplateCostError(f"uses {node.name}, which is not allowed")
        return node

    def _made(self, node: nodes.Expr) -> nodes.Call:
        self.generic_visit(node)
        return _counted("made", [node], node.lineno)


def _counted(name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute(name)
    call = nodes.Call(function, [nodes.ContextReference(), *args], [], None, None)
    call.set_lineno(line)
    return call


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with transformers' helpers, counting what a template costs."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            finalize=_finalize,
        )
        # The filters themselves run in an environment of their own, which knows how to call them.
        inner = ImmutableSandboxedEnvironment()
        guarded = {name: _guarded(inner, name) for name in _BUILTIN_FILTERS}
        self.filters = {**guarded, **_OWN_FILTERS}
        self.globals = {
            "range": self.globals["range"],
            "dict": _dict,
            "namespace": _Namespace,
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: now().strftime(_short(form)),
        }

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, *args: Any, **kw: Any
    ) -> str:
        guarded = _Guards().visit(source)
        return super()._generate(guarded, name, filename, *args, **kw)

    def tick(self, context: Context, literal: int) -> None:
        """One iteration of a loop whose body writes `literal` characters of its own."""
        _budget(context).charge(literal)

    def made(self, context: Context, value: Any) -> Any:
        """A new list, tuple or dict, whose size is charged, or the result of a comparison."""
        _budget(context).charge_value(value)
        return value

    def concat_values(self, context: Context, *values: object) -> str:
        """`a ~ b`, measured first."""
        budget = _budget(context)
        budget.charge(budget.measure(values, printed=True))
        return "".join(str(value) for value in values)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        cost.charge_operator(_budget(context), operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        budget.step()
        text, name = _string_method(obj)
        if name == "join" and args:
            args = (list(args[0]), *args[1:])
            cost.charge_join(budget, text, args[0])
        elif name in ("format", "format_map"):
            values = args[0].values() if name == "format_map" else (*args, *kwargs.values())
            cost.charge_format(budget, text, values)
        elif name:
            cost.charge_method(budget, text, name, args)
        result = super().call(context, obj, *args, **kwargs)
        budget.charge(cost.length(result))
        return result


def _budget(context: Context) -> Budget:
    budget: Budget = context.parent[BUDGET]
    return budget


def _string_method(function: object) -> tuple[str, str]:
    """(the string, the method's name) when `function` is a method of a string, else ("", "")."""
    # The sandbox wraps str.format.
    function = getattr(function, "__wrapped__", function)
    if isinstance(function, BuiltinMethodType | MethodType):
        owner = function.__self__
        if isinstance(owner, str):
            return owner, function.__name__
    return "", ""


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Every `{{ value }}` passes here before it becomes text."""
    budget = _budget(context)
    budget.charge(budget.measure(value, printed=True))
    return value


def _guarded(inner: ImmutableSandboxedEnvironment, name: str) -> Callable[..., Any]:
    """A filter of Jinja's, counted, with what it takes and gives measured."""

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        if name in _TEXT_FILTERS:
            budget.charge_value(value)
        result = inner.call_filter(name, value, args, kwargs, context=context)
        budget.charge_value(result)
        return result

    return run


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers: no HTML escapes, and non-ASCII text as it is. Stops when too long."""
    if indent is not None and indent > cost.MAX_WIDTH:
        raise TemplateCostError(f"indents by over {cost.MAX_WIDTH}")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    budget, pieces, size = _budget(context), [], 0
    for piece in encoder.iterencode(value):
        budget.step()
        size += len(piece)
        if size > cost.MAX_TEXT:
            budget.charge(size)
        pieces.append(piece)
    budget.charge(size)
    return "".join(pieces)


@pass_context
def _join(context: Context, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    items = list(value)
    cost.charge_join(_budget(context), str(d), items)
    joined: str = builtin.do_join(context.eval_ctx, items, d, attribute)
    return joined


@pass_context
def _list(context: Context, value: Any) -> list[Any]:
    result = list(value)
    _budget(context).charge_value(result)
    return result


@pass_context
def _replace(context: Context, value: Any, old: str, new: str, count: int | None = None) -> str:
    text = _string(context, value)
    cost.charge_method(_budget(context), text, "replace", (old, new))
    return builtin.do_replace(context.eval_ctx, text, old, new, count)


@pass_context
def _format(context: Context, value: Any, *args: Any, **kwargs: Any) -> str:
    text = _string(context, value)
    cost.charge_percent(_budget(context), text, kwargs or args)
    return builtin.do_format(text, *args, **kwargs)


@pass_context
def _string(context: Context, value: Any) -> str:
    budget = _budget(context)
    budget.charge(budget.measure(value, printed=True))
    return value if isinstance(value, str) else str(value)


@pass_context
def _indent(
    context: Context, value: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    text = _string(context, value)
    step = len(width) if isinstance(width, str) else width
    _budget(context).charge(len(text) + step * (1 + text.count("\n")))
    return builtin.do_indent(text, width, first, blank)


_TEXT_FILTERS = (
    "capitalize",
    "e",
    "escape",
    "lower",
    "safe",
    "title",
    "trim",
    "upper",
    "wordcount",
)
_BUILTIN_FILTERS = (
    *_TEXT_FILTERS,
    *("abs", "attr", "count", "d", "default", "dictsort", "first", "float", "groupby", "int"),
    *("items", "last", "length", "map", "max", "min", "reject", "rejectattr", "reverse", "round"),
    *("select", "selectattr", "sort", "sum", "unique"),
)
_OWN_FILTERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "tojson": _tojson,
        "join": _join,
        "list": _list,
        "replace": _replace,
        "format": _format,
        "string": _string,
        "indent": _indent,
    }
)


class _Namespace(Namespace):
    """Jinja's namespace, without names that could reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


@pass_context
def _dict(context: Context, *args: Any, **kwargs: Any) -> dict[Any, Any]:
    result = dict(*args, **kwargs)
    _budget(context).charge_value(result)
    return result


def _raise_exception(message: object) -> None:
    raise Refusal(str(message))


def _short(form: object) -> str:
    if not isinstance(form, str) or len(form) > 100:
        raise TemplateCostError("asks for a date in a format of over 100 characters")
    return form
