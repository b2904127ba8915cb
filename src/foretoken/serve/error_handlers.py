"""Answers of an app to the errors of its routes."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from foretoken.core.errors import ForetokenError
from foretoken.serve.errors import ApiError, RefusedBody, as_api_error
from foretoken.serve.validation import validation_error


def add_handlers(app: FastAPI) -> None:
    """Makes ``app`` answer every error in the format of the API that was asked."""

    async def known(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response(request.scope)

    async def refused(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return validation_error(error.errors(), error.body).response(request.scope)

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if isinstance(error, RefusedBody):
            return as_api_error(error.reason).response(request.scope)
        where = f"{request.method} {request.url.path}"
        words = {404: f"there is no {request.url.path} here", 405: f"{where} is not possible with this method"}
        message = words.get(error.status_code, str(error.detail))
        code = "body_too_large" if error.status_code == 413 else None
        return ApiError(error.status_code, message, code=code, headers=error.headers or {}).response(request.scope)

    app.add_exception_handler(ForetokenError, known)
    app.add_exception_handler(TimeoutError, known)
    app.add_exception_handler(RequestValidationError, refused)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, known)
