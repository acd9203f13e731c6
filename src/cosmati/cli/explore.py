"""`cosmati explore`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cosmati.cli.column_keys import (
    AuthorityPlace,
    AuthorityRoot,
    CredentialFile,
    HolderKey,
    ReadingRights,
    ReleasedKeys,
)
from cosmati.explorer.server.serve import serve


def explore(
    store: Annotated[
        Path, typer.Argument(metavar="[STORE]", help="A folder of runs and studies, at any depth.")
    ] = Path(),
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="The port; the first free one from 8765 on if left out.")
    ] = None,
    credential: CredentialFile = None,
    released: ReleasedKeys = None,
    holder_key: HolderKey = None,
    authority: AuthorityPlace = "",
    root: AuthorityRoot = "",
) -> None:
    """Look at runs and studies in a browser, offline, while they run and afterwards.

    STORE is any folder with run folders or studies below it: what `cosmati quickstart` wrote, or the folder that
    your own runs are in; the current one if left out. Pages are served to this machine alone, and follow what
    changes on disk.

    What is measured of sensitive classes is sealed, and pages say so. --credential, --keys and --holder-key show what
    they cover of the one run that they're for, to everybody on this machine while it's served.

    \b
    Examples:
      cosmati explore cosmati-quickstart
      cosmati explore runs --port 9000
    """  # noqa: D301
    rights = ReadingRights(credential, released, holder_key, authority, root)
    serve(store, port=port, keys_of=rights.open_run if rights.any_given else None)
