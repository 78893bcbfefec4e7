"""Reads Python's literals, which models write in place of JSON, as JSON."""

import ast
import json
import warnings
from typing import Any

from aerie.cluster.http.text.json_text import parsed, without_surrogates

_CONSTANTS = {"true": True, "false": False, "null": None}


def literal_json(text: str) -> str:
    """Return the JSON of a literal, such as a dictionary. Raises ValueError: it is none, or JSON does not have it."""
    return _json(_value(_expression(text)))


def keywords_json(text: str) -> str:
    """Return the JSON of the arguments of a call with keywords alone. text: the call. Raises ValueError, as
    `literal_json`."""
    call = _expression(text)
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
        raise ValueError("no call with keywords alone")
    return _json({_keyword(each): _value(each.value) for each in call.keywords})


def _expression(text: str) -> ast.expr:
    try:
        with warnings.catch_warnings():  # of unknown escapes
            warnings.simplefilter("ignore")
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("no expression") from None


def _keyword(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise ValueError("** is no argument")
    return keyword.arg


def _value(node: ast.expr) -> Any:
    try:
        match node:
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [_value(part) for part in parts]
            case ast.Dict(keys=keys, values=values):
                named = [_value(key) if key is not None else None for key in keys]
                if not all(isinstance(key, str) for key in named):
                    raise ValueError("JSON's objects have texts as keys")
                return dict(zip(named, map(_value, values), strict=True))
            case ast.Name(id=name) if name in _CONSTANTS:
                return _CONSTANTS[name]
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.Constant(value=str() | int() | float() | None as value):
                return value
    except RecursionError:
        raise ValueError("nested too deeply") from None
    raise ValueError("no value of JSON")


def _json(value: Any) -> str:
    """Return JSON that `parsed` accepts. Raises ValueError."""
    try:
        written = without_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    parsed(written)
    return written
