"""`cosmati keys`: an authority, its people and what they may sign."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from cosmati.errors import MissingExtraError, ProvenanceError
from cosmati.provenance.taxonomy import Taxonomy, software_licences

try:
    from cosmati.provenance.authority import ceremony
    from cosmati.provenance.authority.keys import PUBLIC, KeyRing, create_key, read_public_key
    from cosmati.provenance.authority.repository import AuthorityRepository
except ImportError as _error:  # told when a command is asked for
    _MISSING: ImportError | None = _error
else:
    _MISSING = None

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Who may sign which class of data: make an authority, name its people, take keys back.\n\n"
    "A ceremony in five commands: keys init, keys new, keys delegate, data sign, keys status.",
)
AuthorityFolder = Annotated[Path, typer.Argument(metavar="AUTHORITY", help="The folder of the authority's repository.")]
Keys = Annotated[
    list[Path] | None,
    typer.Option("--keys", help="A folder of private keys; again for more. AUTHORITY-keys if left out."),
]
WARN_DAYS = 14


@app.callback()
def need_packages() -> None:
    """Refuse to go on without the packages of the extra `authority`.

    Raises:
        MissingExtraError: one is missing.
    """
    if _MISSING is not None:
        msg = f"Authorities need another package ({_MISSING.name}): pip install 'cosmati[authority]'."
        raise MissingExtraError(msg)


@app.command()
def init(
    authority: AuthorityFolder,
    keys: Annotated[Path | None, typer.Option("--keys", help="Where the private keys go; AUTHORITY-keys.")] = None,
    taxonomy: Annotated[
        Path | None, typer.Option(help="YAML or JSON: name, version, classes. Software licences if left out.")
    ] = None,
    policies: Annotated[
        bool, typer.Option("--policies", help="An authority for policies, which signs no data.")
    ] = False,
) -> None:
    """Make an authority: keys, taxonomy and an empty repository, which is plain files to be published anywhere.

    Its root has three keys, of which two must sign. They belong to three people: move each to its owner, offline.
    A passphrase is taken from COSMATI_PASSPHRASE.

    \b
    Examples:
      cosmati keys init authority
      cosmati keys init policies --policies
    """  # noqa: D301
    folder = keys or _beside(authority)
    if policies and taxonomy is not None:
        raise ProvenanceError("An authority for policies has no classes of its own. Leave out --taxonomy.")
    classes = None if policies else _taxonomy(taxonomy)
    root = ceremony.init(authority, folder, classes, passphrase=_passphrase())
    typer.echo(f"{authority} is an authority now. Who trusts it writes down the digest of its root:\n  {root}")
    what = "main" if policies else "CLASS"
    typer.echo(
        f"Its keys are in {folder}. Move root-1, root-2 and root-3 to three people; targets, snapshot and timestamp "
        "sign from day to day.\n"
        f"Next: cosmati keys new NAME --keys DIR, then cosmati keys delegate {authority} {what} --to DIR/NAME{PUBLIC}"
    )


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the key is called: a person, or a role.")],
    keys: Annotated[Path, typer.Option("--keys", help="The folder that it's written into.")] = Path("keys"),
) -> None:
    """Make a key of one's own. Its public half goes to the authority, the other one nowhere.

    \b
    Example:
      cosmati keys new ada --keys ~/keys
    """  # noqa: D301
    key = create_key(keys, name, passphrase=_passphrase())
    typer.echo(f"{keys / name}{PUBLIC}  {key.keyid[:12]}")


@app.command()
def delegate(
    authority: AuthorityFolder,
    path: Annotated[
        str, typer.Argument(metavar="CLASS", help="A class, a branch for all classes below it, or a policy's name.")
    ],
    to: Annotated[list[Path], typer.Option("--to", help="Somebody's public key; again for more.")],
    threshold: Annotated[int, typer.Option(help="How many of them must sign.")] = 1,
    keys: Keys = None,
) -> None:
    """Let people sign the sources of a class, or the versions of a policy, in place of those who may now.

    \b
    Examples:
      cosmati keys delegate authority open/permissive --to ada.pub.pem
      cosmati keys delegate authority licensed --to ada.pub.pem --to bob.pub.pem --threshold 2
      cosmati keys delegate policies main --to ada.pub.pem --to bob.pub.pem --threshold 2
    """  # noqa: D301
    repository, ring = AuthorityRepository(authority), ring_of(authority, keys)
    publics = [read_public_key(one) for one in to]
    with repository.change(ring) as change:
        chain = repository.chain()
        if chain.holds_policies:
            names = [ceremony.delegate_policy(change, path, publics, threshold=threshold)]
        else:
            names = ceremony.delegate(
                change, ceremony.taxonomy_of(repository, chain), path, publics, threshold=threshold
            )
    for name in names:
        typer.echo(f"{name:<28} {threshold} of {', '.join(key.keyid[:12] for key in publics)}")


@app.command()
def rotate(
    authority: AuthorityFolder,
    old: Annotated[
        str, typer.Argument(metavar="KEY", help="The key that goes: its id's beginning, or its public file.")
    ],
    to: Annotated[Path, typer.Option("--to", help="The public key that takes its place.")],
    keys: Keys = None,
) -> None:
    """Put a new key in the place of one, wherever that may sign.

    \b
    Example:
      cosmati keys rotate authority ada.pub.pem --to ada-2027.pub.pem
    """  # noqa: D301
    _replace(authority, old, to, keys)


@app.command()
def revoke(
    authority: AuthorityFolder,
    old: Annotated[
        str, typer.Argument(metavar="KEY", help="The key that goes: its id's beginning, or its public file.")
    ],
    keys: Keys = None,
) -> None:
    """Take a key back: what only it has signed isn't trusted any more.

    \b
    Example:
      cosmati keys revoke authority 3b2748573081
    """  # noqa: D301
    _replace(authority, old, None, keys)


@app.command()
def renew(
    authority: AuthorityFolder,
    classes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CLASS]...", help="What to sign anew, too: sources of a class; `targets`, `root`."),
    ] = None,
    keys: Keys = None,
) -> None:
    """Sign anew what expires: the timestamp every week, by a timer; the rest once a year, with its own people's keys.

    \b
    Examples:
      cosmati keys renew authority
      cosmati keys renew authority root targets --keys authority-keys --keys ~/root-1 --keys ~/root-2
      cosmati keys renew authority open/permissive --keys authority-keys --keys ~/keys
    """  # noqa: D301
    repository = AuthorityRepository(authority)
    with repository.change(ring_of(authority, keys)) as change:
        ceremony.renew(change, classes or ())
    _show(repository)


@app.command()
def status(
    authority: AuthorityFolder,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show who may sign what, until when, and what expires next.

    \b
    Example:
      cosmati keys status authority
    """  # noqa: D301
    repository = AuthorityRepository(authority)
    if not as_json:
        _show(repository)
        return
    found = [
        {**vars(one), "expires": one.expires.isoformat() if one.expires else None}
        for one in ceremony.status(repository)
    ]
    typer.echo(json.dumps({"root": repository.chain().first_root_sha256, "roles": found}, indent=2))


def _show(repository: AuthorityRepository) -> None:
    now = datetime.now(UTC)
    typer.echo(f"root {repository.chain().first_root_sha256}")
    typer.echo(f"{'signs':<28} {'must sign':<10} {'version':>7} {'sources':>8}  {'expires':<16}  keys")
    for one in ceremony.status(repository):
        left = None if one.expires is None else (one.expires - now).days
        until = "not signed yet" if one.expires is None else f"{one.expires:%Y-%m-%d %H:%M}"
        flag = "" if left is None or left >= WARN_DAYS else " expired" if left < 0 else f" in {left} days"
        need, version = f"{one.threshold} of {len(one.keyids)}", "" if one.version is None else one.version
        names = ", ".join(keyid[:12] for keyid in one.keyids)
        typer.echo(f"{one.role:<28} {need:<10} {version:>7} {one.num_targets:>8,}  {until:<16}  {names}{flag}")
        if one.problem:
            typer.echo(f"  {one.problem}", err=True)


def _replace(authority: Path, old: str, to: Path | None, keys: list[Path] | None) -> None:
    repository = AuthorityRepository(authority)
    keyid = _keyid(repository, old)
    with repository.change(ring_of(authority, keys)) as change:
        changed = ceremony.replace_key(change, keyid, read_public_key(to) if to else None)
    typer.echo(f"{keyid[:12]} signs no more: {', '.join(changed)}.")
    _show(repository)


def _keyid(repository: AuthorityRepository, text: str) -> str:
    if Path(text).is_file():
        return str(read_public_key(Path(text)).keyid)
    there = dict.fromkeys(keyid for one in ceremony.status(repository) for keyid in one.keyids)
    found = [keyid for keyid in there if keyid.startswith(text)]
    if len(found) != 1:
        what = "No key here begins" if not found else f"{len(found)} keys here begin"
        raise ProvenanceError(f"{what} with {text!r}. `cosmati keys status` lists them.")
    return found[0]


class _Words(yaml.BaseLoader):
    """YAML whose words stay words, and where no key takes another one's place."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := sorted({str(key) for key in keys if keys.count(key) > 1}):
            raise yaml.constructor.ConstructorError(None, None, f"it has {twice[0]!r} twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _taxonomy(path: Path | None) -> Taxonomy:
    if path is None:
        return software_licences()
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Words)  # noqa: S506  (strings alone)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ProvenanceError(f"The taxonomy {path} can't be read: {error}. It has name, version, classes.") from error
    if not isinstance(content, dict):
        raise ProvenanceError(f"The taxonomy {path} is no mapping. It has name, version and classes.")
    return Taxonomy.from_mapping(content)


def ring_of(authority: Path, keys: list[Path] | None) -> KeyRing:
    """Return the private keys in some folders, or in the one beside an authority's repository.

    Raises:
        ProvenanceError: there's no such folder.
    """
    folders = keys or [_beside(authority)]
    for folder in folders:
        if not folder.is_dir():
            raise ProvenanceError(f"There's no folder {folder} of keys. Name the ones that hold yours with --keys.")
    return KeyRing(folders, passphrase=_passphrase())


def _beside(authority: Path) -> Path:
    return authority.with_name(f"{authority.name}-keys")


def _passphrase() -> str:
    return os.environ.get("COSMATI_PASSPHRASE", "")
