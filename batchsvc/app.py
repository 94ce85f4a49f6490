"""The API process: puts the parts together and serves them. `python -m batchsvc.app` runs it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy.orm import Session

import batchsvc.accounts.audit_routes
import batchsvc.accounts.organization_routes
import batchsvc.accounts.routes
import batchsvc.batches.deletion_routes
import batchsvc.batches.explain_routes
import batchsvc.batches.incident_routes
import batchsvc.batches.message_routes
import batchsvc.batches.model_routes
import batchsvc.batches.quote_routes
import batchsvc.batches.result_routes
import batchsvc.batches.routes
import batchsvc.batches.stop_routes
import batchsvc.batches.worker_routes
import batchsvc.billing.invoice_routes
import batchsvc.billing.routes
import batchsvc.billing.usage_routes
import batchsvc.files.retention_routes
import batchsvc.files.routes
import batchsvc.files.store_routes
import batchsvc.files.upload_routes
import batchsvc.interactive.routes
import batchsvc.webhooks.routes
from batchsvc import logs, tracing
from batchsvc.accounts.caller import CallerDep, require_caller, secret_of
from batchsvc.accounts.door import Door
from batchsvc.accounts.scrapers import Scrapers, is_loopback
from batchsvc.batches import garbage_queries
from batchsvc.batches.service import live_batch_of
from batchsvc.db import migrate
from batchsvc.db.session import Database
from batchsvc.dispatch import CeleryDispatcher, Dispatcher
from batchsvc.errors import ServiceError
from batchsvc.health import Checks
from batchsvc.http import certificate, errors
from batchsvc.http.deps import Context
from batchsvc.http.description import describe, sends
from batchsvc.http.middleware import BodyLimit, RequestMiddleware
from batchsvc.interactive.switchboard import Switchboard
from batchsvc.interactive.texts_ahead import TextsAhead
from batchsvc.metrics import Metrics
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore

_POOL = 20  # database connections: about one for every two of the threads that run routes
_DRAIN_S = 8
_IDLE_S = 75  # longer than clients keep a connection that they may use again: none is closed under a call
_SCHEMA_EXIT = 8  # as workers/exits.py has it


def create_app(settings: Settings, dispatcher: Dispatcher | None = None) -> FastAPI:
    """The application on these settings. Opens no connection before it is started."""
    db = Database(settings.database_url, pool_size=_POOL)
    store = ObjectStore(settings)
    checks = Checks(db, lambda: store, settings.redis_url)
    metrics = Metrics(db, settings, checks)
    scrapers = Scrapers(checks.was_database_away)
    context = Context(
        settings=settings,
        db=db,
        store=store,
        dispatcher=dispatcher or CeleryDispatcher(settings.redis_url),
        live_batch_of=live_batch_of,
        discard=_discard,
    )

    switchboard = Switchboard(
        settings.redis_url, most_calls=settings.interactive_max, most_bytes=settings.interactive_buffer_bytes
    )

    texts_ahead = TextsAhead(db)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        texts_ahead.start()
        yield
        texts_ahead.close()
        await switchboard.close()
        door.close()
        context.dispatcher.close()
        checks.close()
        db.dispose()
        tracing.stop()  # here, for the server ends the process by the signal that it was sent

    # no pages of documentation: they would need no key, and FastAPI's load scripts from elsewhere
    app = FastAPI(
        title="batchsvc",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.context = context
    app.state.switchboard = switchboard
    app.state.door = door = Door(db, settings)
    app.add_middleware(
        RequestMiddleware,
        limits=[
            BodyLimit("POST", "/v1/files", None),
            BodyLimit("POST", "/v1/uploads/[^/]+/parts", None),
            BodyLimit("POST", "/v1/batches", settings.max_inline_bytes),
            BodyLimit("POST", "/v1/messages/batches", None),
        ],
    )
    errors.install(app)
    for module in (batchsvc.accounts, batchsvc.files, batchsvc.batches):
        app.include_router(module.routes.router)
    app.include_router(batchsvc.accounts.organization_routes.router)
    app.include_router(batchsvc.accounts.audit_routes.router)
    app.include_router(batchsvc.files.upload_routes.router)
    app.include_router(batchsvc.files.store_routes.router)
    app.include_router(batchsvc.files.retention_routes.router)
    app.include_router(batchsvc.batches.deletion_routes.router)
    app.include_router(batchsvc.batches.model_routes.router)
    app.include_router(batchsvc.batches.message_routes.router)
    app.include_router(batchsvc.batches.quote_routes.router)
    app.include_router(batchsvc.batches.explain_routes.router)
    app.include_router(batchsvc.batches.result_routes.router)
    app.include_router(batchsvc.batches.stop_routes.router)
    app.include_router(batchsvc.batches.worker_routes.router)
    app.include_router(batchsvc.batches.incident_routes.router)
    app.include_router(batchsvc.billing.routes.router)
    app.include_router(batchsvc.billing.usage_routes.router)
    app.include_router(batchsvc.billing.invoice_routes.router)
    app.include_router(batchsvc.webhooks.routes.router)
    app.include_router(batchsvc.interactive.routes.router)

    @app.get("/livez")
    async def livez() -> dict[str, str]:
        """The process runs; needs no key."""
        return {"status": "ok"}

    @app.get("/readyz", responses={503: {"description": "A part that every request needs doesn't answer."}})
    def readyz() -> Response:
        """Whether requests can be served, part by part; needs no key."""
        health = checks.look()
        return JSONResponse(health.shown(), status_code=200 if health.is_ready else 503)

    @app.get("/metrics", response_class=Response, responses=sends(CONTENT_TYPE_LATEST))
    def show_metrics(request: Request) -> Response:
        """Prometheus' text; needs no key from this machine, unless a proxy may be who asks, and an admin key from any
        other."""
        if settings.public_url or not (request.client and is_loopback(request.client.host)):
            scrapers.admit(secret_of(request), lambda: require_caller(request, context))
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/openapi.json", include_in_schema=False)
    def show_description(_caller: CallerDep) -> JSONResponse:
        """This API as OpenAPI describes it."""
        return JSONResponse(describe(app))

    return app


def _discard(session: Session, key: str) -> None:
    garbage_queries.discard(session, [key], grace_s=garbage_queries.DOWNLOAD_S)


def main() -> None:
    """Make schema and bucket where there are none, and serve until told to stop."""
    try:
        settings = Settings.from_env()
        logs.configure(settings.log_level)
        logs.warn_of_settings(Settings.strangers())
        migrate.make_or_require(settings.database_url)
        ObjectStore(settings).ensure_bucket()
        tracing.start(settings.otlp_endpoint, "api")
        tls = certificate.uvicorn_options(settings)
        app = create_app(settings)
    except migrate.SchemaError as error:
        sys.stderr.write(f"{error.message}\n")
        sys.exit(_SCHEMA_EXIT)
    except ServiceError as error:
        sys.exit(error.message)
    uvicorn.run(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_DRAIN_S,
        timeout_keep_alive=_IDLE_S,
        **tls,
    )


if __name__ == "__main__":
    main()
