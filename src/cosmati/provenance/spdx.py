"""SPDX licence expressions, and which class of `software_licences` an identifier belongs to.

Source: the SPDX specification 2.3, annex D (operators: `+` binds first, then WITH, AND, OR) and the SPDX
licence list. The tables hold the licences met in practice; an identifier outside them is `unknown`, never
guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

RESTRICTIVENESS = (
    "public-domain",
    "open/permissive",
    "open/psf",
    "open/weak-copyleft",
    "open/copyleft",
    "restricted",
    "proprietary",
    "unknown",
)
"""Classes from least to most restrictive. `unknown` is last: what can't be read grants nothing."""

_IDENTIFIERS = {
    "public-domain": """
        CC0-1.0 Unlicense PDDL-1.0 CC-PDDC CC-PDM-1.0 SAX-PD SAX-PD-2.0 blessing NIST-PD NCBI-PD NTIA-PD
        ANTLR-PD libselinux-1.0
    """,
    "open/permissive": """
        0BSD AFL-2.1 AFL-3.0 Apache-1.0 Apache-1.1 Apache-2.0 Artistic-2.0 BlueOak-1.0.0 BSD-1-Clause
        BSD-2-Clause BSD-2-Clause-FreeBSD BSD-2-Clause-NetBSD BSD-2-Clause-Patent BSD-2-Clause-Views
        BSD-3-Clause BSD-3-Clause-Clear BSD-3-Clause-LBNL BSD-3-Clause-Modification BSD-3-Clause-Open-MPI
        BSD-4-Clause BSD-4-Clause-UC BSD-Source-Code BSL-1.0 bzip2-1.0.6 CC-BY-1.0 CC-BY-2.0 CC-BY-2.5
        CC-BY-3.0 CC-BY-4.0 CDLA-Permissive-1.0 CDLA-Permissive-2.0 CECILL-B curl ECL-2.0 etalab-2.0 FSFAP
        FTL HPND ICU IJG ImageMagick ISC libpng-2.0 Libpng libtiff MIT MIT-0 MIT-advertising MIT-CMU
        MIT-Modern-Variant MITNFA MulanPSL-2.0 NCSA NTP ODC-By-1.0 OFL-1.1 OGL-UK-3.0 OLDAP-2.8 OpenSSL
        PostgreSQL Qhull Ruby TCL Unicode-3.0 Unicode-DFS-2016 UPL-1.0 Vim W3C WTFPL X11 Xnet Zlib
        zlib-acknowledgement ZPL-2.0 ZPL-2.1
    """,
    "open/psf": "PSF-2.0 Python-2.0 Python-2.0.1 CNRI-Python CNRI-Python-GPL-Compatible CNRI-Jython",
    "open/weak-copyleft": """
        CDDL-1.0 CDDL-1.1 CECILL-C CPL-1.0 EPL-1.0 EPL-2.0 IPL-1.0 LGPL-2.0 LGPL-2.0+ LGPL-2.0-only
        LGPL-2.0-or-later LGPL-2.1 LGPL-2.1+ LGPL-2.1-only LGPL-2.1-or-later LGPL-3.0 LGPL-3.0+
        LGPL-3.0-only LGPL-3.0-or-later MPL-1.0 MPL-1.1 MPL-2.0 MPL-2.0-no-copyleft-exception MS-RL
        GPL-2.0-with-autoconf-exception GPL-2.0-with-classpath-exception GPL-2.0-with-font-exception
        GPL-2.0-with-GCC-exception GPL-3.0-with-GCC-exception
    """,
    "open/copyleft": """
        AGPL-1.0 AGPL-1.0-only AGPL-1.0-or-later AGPL-3.0 AGPL-3.0-only AGPL-3.0-or-later CC-BY-SA-1.0
        CC-BY-SA-2.0 CC-BY-SA-2.5 CC-BY-SA-3.0 CC-BY-SA-4.0 CDLA-Sharing-1.0 CECILL-2.0 CECILL-2.1 EUPL-1.1
        EUPL-1.2 GFDL-1.1-only GFDL-1.1-or-later GFDL-1.2 GFDL-1.2-only GFDL-1.2-or-later GFDL-1.3
        GFDL-1.3-only GFDL-1.3-or-later GPL-1.0 GPL-1.0+ GPL-1.0-only GPL-1.0-or-later GPL-2.0 GPL-2.0+
        GPL-2.0-only GPL-2.0-or-later GPL-3.0 GPL-3.0+ GPL-3.0-only GPL-3.0-or-later ODbL-1.0 OSL-3.0
        QPL-1.0 RPL-1.5 Sleepycat
    """,
    "restricted": """
        Aladdin BUSL-1.1 CC-BY-NC-1.0 CC-BY-NC-2.0 CC-BY-NC-2.5 CC-BY-NC-3.0 CC-BY-NC-4.0 CC-BY-NC-ND-1.0
        CC-BY-NC-ND-2.0 CC-BY-NC-ND-2.5 CC-BY-NC-ND-3.0 CC-BY-NC-ND-4.0 CC-BY-NC-SA-1.0 CC-BY-NC-SA-2.0
        CC-BY-NC-SA-2.5 CC-BY-NC-SA-3.0 CC-BY-NC-SA-4.0 CC-BY-ND-1.0 CC-BY-ND-2.0 CC-BY-ND-2.5 CC-BY-ND-3.0
        CC-BY-ND-4.0 C-UDA-1.0 Elastic-2.0 FSL-1.1-ALv2 FSL-1.1-MIT Hippocratic-2.1 JSON
        PolyForm-Noncommercial-1.0.0 PolyForm-Small-Business-1.0.0 SSPL-1.0
    """,
}
_CLASS_OF = {name: path for path, names in _IDENTIFIERS.items() for name in names.split()}
_CANONICAL = {name.lower(): name for name in _CLASS_OF}

_LINKING_EXCEPTIONS = """
    Autoconf-exception-2.0 Autoconf-exception-3.0 Bison-exception-2.2 Bootloader-exception
    Classpath-exception-2.0 eCos-exception-2.0 FLTK-exception Font-exception-2.0 freertos-exception-2.0
    GCC-exception-2.0 GCC-exception-3.1 GNAT-exception GPL-3.0-linking-exception
    GPL-3.0-linking-source-exception LGPL-3.0-linking-exception Libtool-exception LLVM-exception
    OCaml-LGPL-linking-exception Qt-GPL-exception-1.0 Qt-LGPL-exception-1.1 Swift-exception
    WxWindows-exception-3.1
"""
_OTHER_EXCEPTIONS = """
    cryptsetup-OpenSSL-exception GPL-CC-1.0 Linux-syscall-note openvpn-openssl-exception
    u-boot-exception-2.0 Universal-FOSS-exception-1.0 x11vnc-openssl-exception
"""
_LINKING = frozenset(_LINKING_EXCEPTIONS.split())
_EXCEPTIONS = {name.lower(): name for name in (*_LINKING, *_OTHER_EXCEPTIONS.split())}

_TOKEN = re.compile(r"\s*(\(|\)|[A-Za-z0-9.-]+\+?)\s*")
_MAX_DEPTH = 50


@dataclass(frozen=True)
class Term:
    """What an expression, or a part of it, comes to.

    Args:
        class_path: class in `software_licences`.
        spdx: the expression with identifiers in their canonical case; those not in the tables as they were
            written.
        unlisted: identifiers and exceptions that aren't in the tables.
    """

    class_path: str
    spdx: str
    unlisted: tuple[str, ...] = ()


def most_restrictive(*paths: str) -> str:
    """Return the most restrictive of some classes."""
    return max(paths, key=RESTRICTIVENESS.index)


def parse_expression(text: str) -> Term | None:
    """Read an SPDX expression: OR takes the least restrictive side, AND the most restrictive one.

    An exception that lets other works link makes a copyleft licence weak. An identifier or an exception that
    isn't in
    the tables is `unknown`: beside an OR that doesn't matter, beside an AND it decides.

    Returns:
        The expression's class, or None where the text isn't an SPDX expression.
    """
    tokens, position = [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return None
        tokens.append(match[1])
        position = match.end()
    parser = _Parser(tokens)
    term = parser.either(0)
    return term if parser.position == len(tokens) else None


class _Parser:
    """Recursive descent over the tokens; each method returns None where the grammar doesn't hold."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0

    def word(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self, word: str) -> bool:
        if self.word().upper() != word:
            return False
        self.position += 1
        return True

    def either(self, depth: int) -> Term | None:
        return self.series(depth, "OR")

    def series(self, depth: int, operator: str) -> Term | None:
        """Read terms joined by OR, each of which is terms joined by AND."""
        left = self.series(depth, "AND") if operator == "OR" else self.licence(depth)
        while left is not None and self.take(operator):
            right = self.series(depth, "AND") if operator == "OR" else self.licence(depth)
            if right is None:
                return None
            choose = min if operator == "OR" else max
            path = choose(left.class_path, right.class_path, key=RESTRICTIVENESS.index)
            left = Term(path, f"{left.spdx} {operator} {right.spdx}", left.unlisted + right.unlisted)
        return left

    def licence(self, depth: int) -> Term | None:
        if self.take("("):
            inner = self.either(depth + 1) if depth < _MAX_DEPTH else None
            return Term(inner.class_path, f"({inner.spdx})", inner.unlisted) if inner and self.take(")") else None
        name = self.name(_EXCEPTIONS)
        if name is None or not self.take("WITH"):
            return None if name is None else _licence_term(name)
        exception = self.name(_CANONICAL)
        return None if exception is None else _with_exception(_licence_term(name), exception)

    def name(self, others: Mapping[str, str]) -> str | None:
        """Read an identifier that isn't one of the others: a licence is no exception, and an exception no licence."""
        word = self.word()
        if word.upper() in {"", "(", ")", "AND", "OR", "WITH"} or word.removesuffix("+").lower() in others:
            return None
        self.position += 1
        return word


def _licence_term(name: str) -> Term:
    canonical = _CANONICAL.get(name.lower())
    if canonical is None and name.endswith("+"):
        base = _CANONICAL.get(name[:-1].lower())
        canonical = f"{base}+" if base else None
    if canonical is None:
        return Term("unknown", name, (name,))
    return Term(_CLASS_OF.get(canonical) or _CLASS_OF[canonical[:-1]], canonical)


def _with_exception(term: Term, name: str) -> Term:
    canonical = _EXCEPTIONS.get(name.lower())
    if canonical is None:
        return Term("unknown", f"{term.spdx} WITH {name}", (*term.unlisted, name))
    weaker = canonical in _LINKING and term.class_path == "open/copyleft"
    path = "open/weak-copyleft" if weaker else term.class_path
    return Term(path, f"{term.spdx} WITH {canonical}", term.unlisted)
