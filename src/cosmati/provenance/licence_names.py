"""How licences are named outside SPDX: trove classifiers, common names, and sentences of their texts.

Each entry gives a class of `software_licences` and an SPDX identifier, or None where the name covers several.
"""

from __future__ import annotations

ClassedLicence = tuple[str, str | None]

_PUBLIC, _PERMISSIVE, _PSF = "public-domain", "open/permissive", "open/psf"
_WEAK, _COPYLEFT, _RESTRICTED, _PROPRIETARY = (
    "open/weak-copyleft",
    "open/copyleft",
    "restricted",
    "proprietary",
)

SAY_NOTHING = frozenset({"License :: OSI Approved", "License :: DFSG approved"})
"""Classifiers that name no licence."""

CLASSIFIERS: dict[str, ClassedLicence] = {
    "Public Domain": (_PUBLIC, None),
    "CC0 1.0 Universal (CC0 1.0) Public Domain Dedication": (_PUBLIC, "CC0-1.0"),
    "The Unlicense (Unlicense)": (_PUBLIC, "Unlicense"),
    "Academic Free License (AFL)": (_PERMISSIVE, None),
    "Apache Software License": (_PERMISSIVE, None),
    "Artistic License": (_PERMISSIVE, None),
    "BSD License": (_PERMISSIVE, None),
    "Blue Oak Model License (BlueOak-1.0.0)": (_PERMISSIVE, "BlueOak-1.0.0"),
    "Boost Software License 1.0 (BSL-1.0)": (_PERMISSIVE, "BSL-1.0"),
    "CeCILL-B Free Software License Agreement (CECILL-B)": (_PERMISSIVE, "CECILL-B"),
    "Historical Permission Notice and Disclaimer (HPND)": (_PERMISSIVE, "HPND"),
    "ISC License (ISCL)": (_PERMISSIVE, "ISC"),
    "MIT License": (_PERMISSIVE, "MIT"),
    "MIT No Attribution License (MIT-0)": (_PERMISSIVE, "MIT-0"),
    "Mulan Permissive Software License v2 (MulanPSL-2.0)": (_PERMISSIVE, "MulanPSL-2.0"),
    "SIL Open Font License 1.1 (OFL-1.1)": (_PERMISSIVE, "OFL-1.1"),
    "The Open License": (_PERMISSIVE, None),
    "Universal Permissive License (UPL)": (_PERMISSIVE, "UPL-1.0"),
    "University of Illinois/NCSA Open Source License": (_PERMISSIVE, "NCSA"),
    "W3C License": (_PERMISSIVE, "W3C"),
    "Zero-Clause BSD (0BSD)": (_PERMISSIVE, "0BSD"),
    "Zope Public License": (_PERMISSIVE, None),
    "zlib/libpng License": (_PERMISSIVE, None),
    "Python License (CNRI Python License)": (_PSF, "CNRI-Python"),
    "Python Software Foundation License": (_PSF, None),
    "Common Development and Distribution License 1.0 (CDDL-1.0)": (_WEAK, "CDDL-1.0"),
    "CeCILL-C Free Software License Agreement (CECILL-C)": (_WEAK, "CECILL-C"),
    "Eclipse Public License 1.0 (EPL-1.0)": (_WEAK, "EPL-1.0"),
    "Eclipse Public License 2.0 (EPL-2.0)": (_WEAK, "EPL-2.0"),
    "GNU Lesser General Public License v2 (LGPLv2)": (_WEAK, "LGPL-2.0-only"),
    "GNU Lesser General Public License v2 or later (LGPLv2+)": (_WEAK, "LGPL-2.0-or-later"),
    "GNU Lesser General Public License v3 (LGPLv3)": (_WEAK, "LGPL-3.0-only"),
    "GNU Lesser General Public License v3 or later (LGPLv3+)": (_WEAK, "LGPL-3.0-or-later"),
    "GNU Library or Lesser General Public License (LGPL)": (_WEAK, None),
    "Mozilla Public License 1.0 (MPL)": (_WEAK, "MPL-1.0"),
    "Mozilla Public License 1.1 (MPL 1.1)": (_WEAK, "MPL-1.1"),
    "Mozilla Public License 2.0 (MPL 2.0)": (_WEAK, "MPL-2.0"),
    "CEA CNRS Inria Logiciel Libre License, version 2.1 (CeCILL-2.1)": (_COPYLEFT, "CECILL-2.1"),
    "European Union Public Licence 1.1 (EUPL 1.1)": (_COPYLEFT, "EUPL-1.1"),
    "European Union Public Licence 1.2 (EUPL 1.2)": (_COPYLEFT, "EUPL-1.2"),
    "GNU Affero General Public License v3": (_COPYLEFT, "AGPL-3.0-only"),
    "GNU Affero General Public License v3 or later (AGPLv3+)": (_COPYLEFT, "AGPL-3.0-or-later"),
    "GNU Free Documentation License (FDL)": (_COPYLEFT, None),
    "GNU General Public License (GPL)": (_COPYLEFT, None),
    "GNU General Public License v2 (GPLv2)": (_COPYLEFT, "GPL-2.0-only"),
    "GNU General Public License v2 or later (GPLv2+)": (_COPYLEFT, "GPL-2.0-or-later"),
    "GNU General Public License v3 (GPLv3)": (_COPYLEFT, "GPL-3.0-only"),
    "GNU General Public License v3 or later (GPLv3+)": (_COPYLEFT, "GPL-3.0-or-later"),
    "Open Software License 3.0 (OSL-3.0)": (_COPYLEFT, "OSL-3.0"),
    "Sleepycat License": (_COPYLEFT, "Sleepycat"),
    "Aladdin Free Public License (AFPL)": (_RESTRICTED, "Aladdin"),
    "Free For Educational Use": (_RESTRICTED, None),
    "Free For Home Use": (_RESTRICTED, None),
    "Free for non-commercial use": (_RESTRICTED, None),
    "Free To Use But Restricted": (_RESTRICTED, None),
    "Other/Proprietary License": (_PROPRIETARY, None),
}
"""By the classifier's last part."""

NAMES: tuple[tuple[str, ClassedLicence], ...] = (
    (r"public domain", (_PUBLIC, None)),
    (r"cc0", (_PUBLIC, "CC0-1.0")),
    (r"mit(?: (?:mit|expat|x11))?|expat", (_PERMISSIVE, "MIT")),
    (r"(?:bsd ?2 clause|2 clause bsd|simplified bsd|freebsd)(?: simplified)?", (_PERMISSIVE, "BSD-2-Clause")),
    (
        r"(?:bsd ?3 clause|3 clause bsd|new bsd|modified bsd|revised bsd)(?: (?:new|revised))*",
        (_PERMISSIVE, "BSD-3-Clause"),
    ),
    (r"bsd(?: style| like)?", (_PERMISSIVE, None)),
    (r"(?:apache|asl)(?: software)? ?2(?:\.0)?", (_PERMISSIVE, "Apache-2.0")),
    (r"apache(?: software)?", (_PERMISSIVE, None)),
    (r"isc(?:l| iscl)?", (_PERMISSIVE, "ISC")),
    (r"zlib(?: libpng)?", (_PERMISSIVE, "Zlib")),
    (r"boost(?: software)?(?: 1\.0)?", (_PERMISSIVE, "BSL-1.0")),
    (r"cc by 4(?:\.0)?", (_PERMISSIVE, "CC-BY-4.0")),
    (r"psf(?:l| 2(?:\.0)?)?|python software foundation|python(?: 2\.0)?", (_PSF, None)),
    (r"(?:mpl|mozilla public) ?2(?:\.0)?(?: mpl 2\.0)?", (_WEAK, "MPL-2.0")),
    (r"mpl|mozilla public", (_WEAK, None)),
    (r"(?:epl|eclipse public) ?2(?:\.0)?", (_WEAK, "EPL-2.0")),
    (r"cc by nc(?: (?:sa|nd))?(?: [\d.]+)?", (_RESTRICTED, None)),
    (r"(?:other )?proprietary(?: software)?|commercial|all rights reserved", (_PROPRIETARY, None)),
)
"""Patterns for a whole name: lower case, no punctuation, without `version`, `v` and the word licence; first
match wins. The GNU licences have a pattern of their own."""

GNU_NAME = (
    r"(?:gnu )?(?P<kind>lgpl|lesser general public|library general public|agpl|affero general public|"
    r"affero gpl|gpl|general public)(?: [al]?gpl)? ?(?P<number>[123](?:\.[01])?)?"
    r"(?P<later> ?\+| or (?:later|greater|newer))?"
    r"(?: only)?(?: [al]?gpl ?[123](?:\.[01])?\+?)?"
)
"""Pattern for the name of a GNU licence, after the same clean-up."""

SENTENCES: tuple[tuple[str, ClassedLicence], ...] = (
    (r"(?i)free and unencumbered software released into the public domain", (_PUBLIC, "Unlicense")),
    (r"(?i)permission is hereby granted, free of charge, to any person", (_PERMISSIVE, None)),
    (r"(?i)redistribution and use in source and binary forms", (_PERMISSIVE, None)),
    (r"(?i)permission to use, copy, modify, and(?:/or)? distribute this software", (_PERMISSIVE, None)),
    (r"(?i)apache license,? version 2\.0", (_PERMISSIVE, "Apache-2.0")),
    (r"(?i)python software foundation license version 2", (_PSF, "PSF-2.0")),
    (r"(?i)mozilla public license", (_WEAK, None)),
    (r"(?i)(?:lesser|library) general public license", (_WEAK, None)),
    (r"(?i)gnu (?:affero )?general public license|\bA?GPL\b", (_COPYLEFT, None)),
    (r"(?i)non-?commercial (?:use|purposes?)\b", (_RESTRICTED, None)),
    (r"(?i)confidential and proprietary|proprietary and confidential", (_PROPRIETARY, None)),
)
"""Patterns to search for in a whole licence text, white space collapsed."""

_REDISTRIBUTION = r"(?i)redistribution and use in source and binary forms"
_ENDORSEMENT = r"(?i)(?:neither the names?|the names?) of .{1,300}? (?:be )?used to endorse or promote products"
_ADVERTISING = r"(?i)all advertising materials"
TEXTS: tuple[tuple[ClassedLicence, dict[str, bool], str], ...] = (
    ((_PERMISSIVE, "BSD-2-Clause"), {_ENDORSEMENT: False, _ADVERTISING: False}, _REDISTRIBUTION),
    ((_PERMISSIVE, "BSD-3-Clause"), {_ENDORSEMENT: True, _ADVERTISING: False}, _REDISTRIBUTION),
    (
        (_PERMISSIVE, "MIT"),
        {
            r"(?i)the above copyright notice and this permission notice .{0,40}shall be included": True,
            r"(?i)except as contained in this notice": False,
        },
        r"(?i)permission is hereby granted, free of charge, to any person obtaining a copy",
    ),
    (
        (_PERMISSIVE, "ISC"),
        {r"(?i)provided that the above copyright notice and this permission notice appear in all copies": True},
        r"(?i)permission to use, copy, modify, and(?:/or)? distribute this software for any purpose",
    ),
    ((_PERMISSIVE, "Apache-2.0"), {}, r"(?i)apache license,? version 2\.0, january 2004"),
)
"""Whole texts: class and identifier, what must be there (or must not), and what tells of the family and stands in a
text once. A text in which it stands twice is of several licences."""
