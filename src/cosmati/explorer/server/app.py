"""The web application of one store."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.responses import FileResponse, HTMLResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from cosmati.errors import CosmatiError
from cosmati.explorer.rendering import TEMPLATES, plotly_path, template_environment
from cosmati.explorer.server.compare import compare_router
from cosmati.explorer.server.composition import composition_router
from cosmati.explorer.server.filter_bar import warm_choices
from cosmati.explorer.server.governance import governance_router
from cosmati.explorer.server.live import live_router
from cosmati.explorer.server.methods import methods_router
from cosmati.explorer.server.parts import parts_router
from cosmati.explorer.server.run import run_router
from cosmati.explorer.server.runs import runs_router
from cosmati.explorer.server.security import guard
from cosmati.explorer.server.site import KeysOf, Site, no_keys
from cosmati.explorer.server.studies import studies_router
from cosmati.explorer.server.tradeoffs import tradeoffs_router
from cosmati.store.index import RunIndex

STATIC = Path(__file__).parents[1] / "static"
DAY = "max-age=86400"
ROUTERS = (
    tradeoffs_router,
    runs_router,
    run_router,
    live_router,
    compare_router,
    studies_router,
    parts_router,
    composition_router,
    methods_router,
    governance_router,
)
"""Of each page. An address that two of them know is the first one's."""


def make_app(index: RunIndex, keys_of: KeysOf | None = None) -> FastAPI:
    """Return the application; `app.state.site` has its site.

    Args:
        index: of the store.
        keys_of: gives the keys of sealed columns that pages of a run's folder show.

    Raises:
        MissingExtraError: Jinja2 or Plotly isn't installed.
    """
    app = FastAPI(title="Cosmati", docs_url=None, redoc_url=None, openapi_url=None)
    site = app.state.site = Site(index, template_environment(), keys_of=keys_of or no_keys)
    site.warm = lambda: warm_choices(site)
    plotly = plotly_path()
    app.middleware("http")(guard)
    app.add_middleware(GZipMiddleware, minimum_size=2000, compresslevel=4)
    for router in ROUTERS:
        app.include_router(router(site))
    app.mount("/static", StaticFiles(directory=STATIC))

    @app.get("/assets/plotly.js")
    def plotly_script() -> Response:
        # Its 4.5 MB go to this machine alone, and once a day: packing them takes longer than sending them.
        headers = {"Cache-Control": DAY, "Content-Encoding": "identity"}
        return FileResponse(plotly, media_type="text/javascript", headers=headers)

    @app.get("/assets/script.js")
    def script() -> Response:
        return FileResponse(TEMPLATES / "script.js", media_type="text/javascript")

    @app.get("/assets/print.js")
    def print_script() -> Response:
        return FileResponse(TEMPLATES / "print.js", media_type="text/javascript")

    @app.get("/assets/style.css")
    def style() -> Response:
        parts = [(TEMPLATES / name).read_text() for name in ("style.css", "print.css")]
        text = "".join([site.templates.get_template("theme.css").render(), *parts])
        return Response(text, media_type="text/css")

    @app.exception_handler(CosmatiError)
    def refused(request: Request, error: CosmatiError) -> HTMLResponse:
        return site.page(request, "refused.html", title="That doesn't work", status=404, text=str(error))

    @app.exception_handler(HTTPException)
    def not_there(request: Request, error: HTTPException) -> HTMLResponse:
        text = "There's no such page. Choose one above."
        return site.page(request, "refused.html", title="No such page", status=error.status_code, text=text)

    return app
