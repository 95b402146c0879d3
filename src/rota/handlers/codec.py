"""Convert the payloads of a handler's type to JSON and back."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError

from rota.client import Encoded, encode_payload
from rota.domain.payload import encode
from rota.errors import ConfigError, InvalidPayload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


@dataclass(frozen=True, slots=True)
class Codec:
    """`decode` reads JSON text, `encode` returns it. Both raise InvalidPayload, whose message never shows the payload."""

    decode: Callable[[str], Any]
    encode: Callable[[Any], Encoded]


def codec_of(function: Callable[..., Any], names: Mapping[str, Any] | None = None) -> Codec:
    """Return the codec for the type T of a handler's `job: Job[T]`; for plain JSON values if it names no type.

    `names` are local names where the function is declared, because a test may define the type locally.
    """
    hint = _job_annotation(function, names or {})
    if get_origin(hint) is None or not get_args(hint):
        return JSON_CODEC
    payload: Any = get_args(hint)[0]
    if payload is Any or payload is object:
        return JSON_CODEC
    if payload is type(None):
        return EMPTY_CODEC
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(payload)
    except PydanticUserError as error:
        raise ConfigError(f"the payload type of handler {_name_of(function)} can't be used: {error.message}") from error
    return _typed_codec(adapter, getattr(payload, "__name__", str(payload)))


def _job_annotation(function: Callable[..., Any], names: Mapping[str, Any]) -> Any:
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].annotation is inspect.Parameter.empty:
        return None
    # Only this annotation: the others may name types that are imported for type checkers only.
    carrier = SimpleNamespace(__annotations__={"job": parameters[0].annotation})
    module_names = getattr(inspect.unwrap(function), "__globals__", {})
    try:
        return get_type_hints(carrier, module_names, dict(names))["job"]
    except NameError as error:
        raise ConfigError(
            f"the annotation of handler {_name_of(function)} can't be resolved ({error}): "
            "import the payload's type at run time, not under TYPE_CHECKING"
        ) from error


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _typed_codec(adapter: TypeAdapter[Any], name: str) -> Codec:
    def decode(text: str) -> Any:
        try:
            return adapter.validate_json(text)
        except ValidationError as error:
            raise InvalidPayload(f"the payload is no {name}: {_rule_violations(error)}") from None
        except Exception as error:  # noqa: BLE001  the type's own validators may raise anything
            raise InvalidPayload(f"the payload is no {name}: {type(error).__name__}") from None

    def encode_typed(value: Any) -> Encoded:
        try:
            for path in _non_finite_paths(adapter.dump_python(value, by_alias=True, warnings="error"), "$"):
                # pydantic would write null instead
                raise InvalidPayload(f"payload {path}: neither NaN nor an infinity is JSON: use null or text")
            plain = adapter.dump_python(value, mode="json", by_alias=True, warnings="error")
        except (PydanticSerializationError, ValueError, AttributeError, TypeError) as error:
            raise InvalidPayload(
                f"the payload is no {name}, but a {type(value).__name__} ({type(error).__name__})"
            ) from None
        text = Encoded(encode(plain))
        decode(text)  # better an error for the caller than a dead letter later
        return text

    return Codec(decode, encode_typed)


def _non_finite_paths(value: Any, path: str) -> Iterator[str]:
    match value:
        case float() if not math.isfinite(value):
            yield path
        case dict():
            for key, item in value.items():
                yield from _non_finite_paths(item, f"{path}.{key}")
        case list() | tuple():
            for index, item in enumerate(value):
                yield from _non_finite_paths(item, f"{path}[{index}]")


def _rule_violations(error: ValidationError) -> str:
    # The error's own text shows the input. Places and rules can be logged.
    violations = error.errors(include_input=False, include_url=False, include_context=False)[:10]
    return "; ".join(
        f"{'.'.join(map(str, violation['loc']))[:200] or '$'}: {violation['type']}" for violation in violations
    )


def _decode_json(text: str) -> Any:
    if text == "{}":
        return {}
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidPayload(f"the payload doesn't decode: {type(error).__name__}") from None


def _decode_nothing(_: str) -> None:
    return


JSON_CODEC = Codec(_decode_json, lambda value: Encoded("{}" if value is None else encode_payload(value)))
EMPTY_CODEC = Codec(_decode_nothing, lambda _: Encoded("{}"))
