"""`cosmati ledger witness`: somebody else who remembers a ledger's tree, so that it can't be rewritten unseen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cosmati.cli.errors import Answering
from cosmati.cli.ledger_folder import ledger_of
from cosmati.errors import LedgerError
from cosmati.ledger.cosigned import FOLDER, CosignedHead, ask_witness
from cosmati.ledger.evidence import utc
from cosmati.ledger.note import VerifierKey
from cosmati.ledger.reader import read_verifier_key
from cosmati.ledger.witness import Witness, create_witness
from cosmati.ledger.witness_http import WitnessServer, over_http, witness_and_url

app = typer.Typer(
    cls=Answering,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Be a witness, or ask one: it cosigns a ledger's checkpoint, and refuses one that was rewritten or cut back.",
)
WitnessFolder = Annotated[Path, typer.Argument(metavar="WITNESS", help="Folder with the witness's key and memory.")]
WitnessedRun = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder, its ledger folder, or the checkpoint in it.")
]
Logs = Annotated[
    list[str] | None,
    typer.Option("--log", metavar="VKEY", help="An operator's verifier key, whose log it takes from now on."),
]


@app.command("init")
def init(
    folder: WitnessFolder,
    name: Annotated[str, typer.Option(help="Under which it cosigns, such as witness.example.com/w1.")],
) -> None:
    """Make a witness: a key, and a folder for what it remembers. Keep it where the operator can't reach it.

    \b
    Example:
      cosmati ledger witness init my-witness --name witness.example.com/w1
    """  # noqa: D301
    typer.echo(create_witness(folder, name).text)


@app.command("sign")
def sign(
    run: WitnessedRun,
    key: Annotated[Path, typer.Option(metavar="WITNESS", help="Folder that `init` made.")],
    logs: Logs = None,
) -> None:
    """Cosign a run's checkpoint, if it goes on from what this witness has seen of it. 1 if it doesn't.

    A log that it sees for the first time is known by its key: give --log from a source that you trust; without it the
    key in the run folder is taken, and kept.

    \b
    Examples:
      cosmati ledger witness sign RUN --key my-witness --log "$(cat operator.vkey)"
      cosmati ledger witness sign RUN --key my-witness
    """  # noqa: D301
    directory = ledger_of(run.parent if run.is_file() else run)
    witness = _witness(key, logs)
    operator = read_verifier_key(directory)
    if not witness.knows(operator.name):
        typer.echo(f"First seen: {operator.text}. From now on this witness takes no other key for {operator.name}.")
        witness.trust(operator)

    _say(directory, ask_witness(directory, witness.key, witness.send))


@app.command("ask")
def ask(
    run: WitnessedRun,
    witness: Annotated[str, typer.Option(metavar="'VKEY URL'", help="Its key, a space, and its address.")],
) -> None:
    """Ask a witness over HTTP to cosign a run's checkpoint. 1 if what it has seen isn't the beginning of this log.

    \b
    Example:
      cosmati ledger witness ask RUN --witness "$(cat witness.vkey) https://witness.example.com"
    """  # noqa: D301
    directory = ledger_of(run.parent if run.is_file() else run)
    key, url = witness_and_url(witness)
    _say(directory, ask_witness(directory, key, over_http(url)))


@app.command("serve")
def serve(
    folder: WitnessFolder,
    logs: Logs = None,
    host: Annotated[str, typer.Option(help="Address to listen on: this machine's own if left out.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Of the address; 0 takes a free one.")] = 7380,
) -> None:
    """Answer over HTTP, as C2SP's tlog-witness says: POST /add-checkpoint. Ctrl-C ends it.

    It has no TLS of its own: put a server with a certificate before it where others reach it.

    \b
    Example:
      cosmati ledger witness serve my-witness --log "$(cat operator.vkey)"
    """  # noqa: D301
    witness = _witness(folder, logs)
    try:
        server = WitnessServer(witness, host=host, port=port)
    except OSError as error:
        raise LedgerError(f"{host}:{port} can't be listened on: {error}. Give another --port.") from error
    with server:
        typer.echo(f"{witness.key.text} {server.url}")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("Ended.")


def _witness(folder: Path, logs: list[str] | None) -> Witness:
    witness = Witness(folder)
    for log in logs or ():
        witness.trust(VerifierKey.parse(log))
    return witness


def _say(directory: Path, cosigned: CosignedHead) -> None:
    (given,) = cosigned.cosignatures
    typer.echo(f"Cosigned by {given.key.name} at {utc(given.time)}: {cosigned.head.size} entries")
    typer.echo(f"  root      {cosigned.head.root.hex()}")
    typer.echo(f"  kept in   {directory / FOLDER / str(cosigned.head.size)}")
