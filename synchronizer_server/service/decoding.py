"""Requests that are no protobuf: refused with a reason, where gRPC by itself answers UNKNOWN."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from synchronizer_server.service.synchronizer import Context, refuse

_OURS: Final = "/decoupled_diloco."

_Handler = Any
"""A `grpc.RpcMethodHandler`, whose fields the stubs do not know."""

_Decode = Callable[[bytes], object]


class DecodingInterceptor(grpc.aio.ServerInterceptor):
    """Answers MALFORMED to a single request that cannot be decoded.

    Messages within a stream are decoded while it is served, where `refuse` meets the same error.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """See `grpc.aio.ServerInterceptor`."""
        handler = await continuation(handler_call_details)
        is_ours = handler_call_details.method.startswith(_OURS)
        if not is_ours or handler is None or handler.request_streaming:
            return handler
        decode = _decoding(handler.request_deserializer)
        if handler.response_streaming:
            serve = _refusing_stream(handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(serve, decode, handler.response_serializer)
        answer = _refusing(handler.unary_unary)
        return grpc.unary_unary_rpc_method_handler(answer, decode, handler.response_serializer)


INTERCEPTORS: Final = (DecodingInterceptor(),)
"""What every server of ours has."""


def _decoding(decode: _Decode) -> _Decode:
    """Returns the error in place of the message."""

    def try_to(data: bytes) -> object:
        try:
            return decode(data)
        except DecodeError as error:
            return error

    return try_to


def _refusing(
    serve: Callable[[object, Context], Awaitable[object]],
) -> Callable[[object, Context], Awaitable[object]]:
    async def answer(request: object, context: Context) -> object:
        if isinstance(request, DecodeError):
            await refuse(context, request)
        return await serve(request, context)

    return answer


def _refusing_stream(
    serve: Callable[[object, Context], AsyncIterator[object]],
) -> Callable[[object, Context], AsyncIterator[object]]:
    async def answer(request: object, context: Context) -> AsyncIterator[object]:
        if isinstance(request, DecodeError):
            await refuse(context, request)
        async for message in serve(request, context):
            yield message

    return answer
