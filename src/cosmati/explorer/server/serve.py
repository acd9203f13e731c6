"""Serve a store's pages on this machine until Ctrl-C."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from cosmati.errors import RunError
from cosmati.explorer.rendering import missing
from cosmati.progress import ProgressDisplay
from cosmati.store.index import RunIndex

if TYPE_CHECKING:
    from cosmati.explorer.server.site import KeysOf, Site  # needs FastAPI

DEFAULT_PORT, NUM_PORTS = 8765, 20
HOST = "127.0.0.1"


def serve(
    store: Path, *, port: int | None = None, console: Console | None = None, keys_of: KeysOf | None = None
) -> None:
    """Index a store, and serve its pages.

    Args:
        store: its folder.
        port: to listen on; None takes the first free one from 8765 on.
        console: where the address goes; None means standard error.
        keys_of: gives the keys of sealed columns that pages of a run's folder show; None shows none.

    Raises:
        RunError: it's no folder, or the port is in use, or there are keys for none of its runs.
        MissingExtraError: an extra isn't installed.
    """
    try:
        import uvicorn

        from cosmati.explorer.server.app import make_app
    except ImportError as error:
        raise missing(str(error.name)) from error
    console = console or Console(stderr=True)
    listener = _listen(port)
    with listener, RunIndex(store) as index:
        app = make_app(index, keys_of)
        site = app.state.site
        with ProgressDisplay("Read the store", console=console) as progress:
            site.last = index.refresh(lambda done, total: progress.update(done / total, f"{done} of {total}"))
            progress.update(1.0, f"{index.count():,} runs")
        if keys_of is not None:
            _refuse_keys_of_none(site, keys_of)
        address = f"http://{HOST}:{listener.getsockname()[1]}/"
        console.print(f"Open {address} (Ctrl-C ends it)", highlight=False, soft_wrap=True)
        watcher = threading.Thread(target=site.watch, daemon=True)
        watcher.start()
        config = uvicorn.Config(app, log_level="warning", lifespan="off", server_header=False)
        try:
            with contextlib.suppress(KeyboardInterrupt):  # that's how it's ended
                uvicorn.Server(config).run(sockets=[listener])
        finally:
            site.stop()
            watcher.join(timeout=5)


def _refuse_keys_of_none(site: Site, keys_of: KeysOf) -> None:
    """Refuse a credential that's for no run of the store; one that doesn't hold is refused on the way."""
    governed = (site.index.run(key) for (key,) in site.index.answer("SELECT key FROM runs WHERE is_governed"))
    if not any(keys_of(site.folder(run.path)) for run in governed if run is not None):
        raise RunError("The credential is for none of the store's runs. Give the folder that has its run.")


def _listen(port: int | None) -> socket.socket:
    ports = range(DEFAULT_PORT, DEFAULT_PORT + NUM_PORTS) if port is None else (port,)
    for one in ports:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, one))
            listener.listen(128)
        except OSError as error:
            listener.close()
            refused = error
        else:
            return listener
    which = f"Port {port} can't" if port is not None else f"No port from {ports[0]} to {ports[-1]} can"
    msg = f"{which} be had: {refused}. Name another: --port N."
    raise RunError(msg)
