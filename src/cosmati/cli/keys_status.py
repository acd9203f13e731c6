"""The page of `cosmati keys status`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cosmati.provenance.authority.ceremony import RoleStatus
from cosmati.provenance.authority.repository import AuthorityRepository
from cosmati.provenance.authority.standing import Standing, fold, is_due
from cosmati.provenance.rehearsal import SAYS

_PLAIN_WIDTH = 120
_BAD, _SOON, _GOOD, _DIM = "bold red", "yellow", "green", "dim"


def show_standing(repository: AuthorityRepository, found: Standing, names: Mapping[str, str]) -> None:
    """Print a page: what wants doing, who may sign what and until when, and what each key may.

    Args:
        repository: the authority's.
        found: how it stands.
        names: of keys, by their ids; others are shown by the beginning of theirs.
    """
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False, markup=False, emoji=False)
    classes = f"taxonomy {found.taxonomy.name} {found.taxonomy.version}" if found.taxonomy else "no taxonomy"
    console.print(Text.assemble((str(repository.folder), "bold"), f", {classes}"), soft_wrap=True)
    console.print(Text.assemble(("root ", _DIM), found.root), soft_wrap=True)
    if found.is_rehearsal:
        console.print(Text(f"! This is {SAYS}.", _SOON), soft_wrap=True)
    for style, line in _to_do(repository, found):
        console.print(Text(line, style), soft_wrap=True)
    if (ahead := found.next) and ahead.expires:
        console.print(f"Next to expire: {ahead.role}, {left(ahead.expires - found.now)}.")
    console.print()
    console.print(_roles(repository, found, names, is_class=False))
    if any(one.is_class for one in found.roles):
        console.print(_roles(repository, found, names, is_class=True))
    if found.unsigned:
        folded = ", ".join(fold(found.unsigned, found.taxonomy))
        console.print(Text(f"Nobody may sign: {folded}", _DIM), soft_wrap=True)
        console.print()
    console.print(_keys(found, names))


def as_mapping(found: Standing, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the same for programs."""
    roles = [
        {
            **vars(one),
            "expires": one.expires.isoformat() if one.expires else None,
            "days_left": int((one.expires - found.now) / timedelta(days=1)) if one.expires else None,
        }
        for one in found.roles
    ]
    keys = [
        {"keyid": keyid, "name": names.get(keyid), "signs": [one.role for one in may]}
        for keyid, may in {**found.keys, **dict.fromkeys(found.former, ())}.items()
    ]
    taxonomy = {"name": found.taxonomy.name, "version": found.taxonomy.version} if found.taxonomy else None
    return {
        "root": found.root,
        "rehearsal": found.is_rehearsal,
        "taxonomy": taxonomy,
        "next": found.next.role if found.next else None,
        "roles": roles,
        "nobody_signs": list(found.unsigned),
        "lapsed": list(found.lapsed),
        "keys": keys,
    }


def left(time: timedelta) -> str:
    """Return in words how long something holds."""
    hours = abs(time) // timedelta(hours=1)
    words = f"{hours // 24} days" if hours >= 48 else "1 hour" if hours == 1 else f"{hours} hours"
    return f"expired {words} ago" if time < timedelta() else f"in {words}"


def _to_do(repository: AuthorityRepository, found: Standing) -> Iterator[tuple[str, str]]:
    """Yield what wants doing, the command with it: what has failed, then what expires soon."""
    for one in found.roles:
        if one.problem:
            yield _BAD, f"✗ {one.role} isn't trusted: {one.problem}"
    if found.lapsed:
        classes = ", ".join(found.lapsed)
        yield (
            _BAD,
            f"✗ {classes}: what was signed isn't trusted, since nobody may sign it any more: cosmati keys delegate",
        )
    for has_expired, style, mark in ((True, _BAD, "✗"), (False, _SOON, "!")):
        due = [one for one in found.roles if is_due(one, found.now, repository) and not one.problem]
        due = [one for one in due if one.expires and (one.expires <= found.now) == has_expired]
        machines = [one for one in due if not one.is_class and one.role in {"snapshot", "timestamp"}]
        others = [one for one in due if one not in machines]
        for those in (machines, others):
            if those:
                named = "" if those is machines else "".join(f" {one.role}" for one in those)
                whose = "" if those is machines else ", with the keys of their people"
                words = "Expired" if has_expired else "Expires soon"
                roles = ", ".join(one.role for one in those)
                command = f"cosmati keys renew {shlex.quote(str(repository.folder))}{named}"
                yield style, f"{mark} {words}: {roles}. Renew{whose}: {command}"


def _roles(repository: AuthorityRepository, found: Standing, names: Mapping[str, str], *, is_class: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    for head in ("class" if is_class else "the authority's own", "must sign", "who"):
        table.add_column(head, header_style="bold", overflow="fold")
    if is_class:
        table.add_column("sources", justify="right", header_style="bold")
    table.add_column("until", no_wrap=True, header_style="bold")
    table.add_column("", no_wrap=True)
    for one in sorted(found.roles, key=lambda one: one.role.split("/")):
        if one.is_class == is_class:
            who = ", ".join(_name(keyid, names) for keyid in one.keyids)
            sources = [f"{one.num_targets:,}"] if is_class else []
            until = f"{one.expires:%Y-%m-%d}" if one.expires else ""
            table.add_row(
                one.role, f"{one.threshold} of {len(one.keyids)}", who, *sources, until, _state(repository, found, one)
            )
    table.add_row()
    return table


def _state(repository: AuthorityRepository, found: Standing, one: RoleStatus) -> Text:
    if one.problem:
        return Text("not trusted", _BAD)
    if one.expires is None:
        return Text("not signed yet", _DIM)
    style = _BAD if one.expires <= found.now else _SOON if is_due(one, found.now, repository) else _GOOD
    return Text(left(one.expires - found.now), style)


def _keys(found: Standing, names: Mapping[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in ("key", "id", "may sign"):
        table.add_column(head, header_style="bold", overflow="fold")
    for keyid, may in found.keys.items():
        own = [one.role for one in may if not one.is_class]
        signs = own + fold([one.role for one in may if one.is_class], found.taxonomy)
        table.add_row(names.get(keyid, ""), keyid[:12], ", ".join(signs))
    for keyid in found.former:
        table.add_row(names.get(keyid, ""), keyid[:12], Text("nothing any more: revoked or rotated", _DIM))
    return table


def _name(keyid: str, names: Mapping[str, str]) -> str:
    return names.get(keyid, keyid[:12])
