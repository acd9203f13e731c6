"""Licence metadata to classes: SPDX expressions, classifiers, names and texts."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from packaging.licenses import canonicalize_license_expression

from cosmati.provenance import spdx
from cosmati.provenance.licence_names import CLASSIFIERS, NAMES, SENTENCES
from cosmati.provenance.licences import classify_licence
from cosmati.provenance.spdx import RESTRICTIVENESS, parse_expression
from cosmati.provenance.taxonomy import software_licences

BY_CLASS = {
    "CC0-1.0": "public-domain",
    "MIT": "open/permissive",
    "Apache-2.0": "open/permissive",
    "PSF-2.0": "open/psf",
    "MPL-2.0": "open/weak-copyleft",
    "LGPL-3.0-only": "open/weak-copyleft",
    "GPL-3.0-or-later": "open/copyleft",
    "GPL-2.0-only WITH Classpath-exception-2.0": "open/weak-copyleft",
    "Apache-2.0 WITH LLVM-exception": "open/permissive",
    "GPL-2.0-only WITH Linux-syscall-note": "open/copyleft",
    "CC-BY-NC-4.0": "restricted",
    "LicenseRef-Secret": "unknown",
}

Tree = str | tuple[str, "Tree", "Tree"]
TREES: st.SearchStrategy[Tree] = st.recursive(
    st.sampled_from(sorted(BY_CLASS)),
    lambda below: st.tuples(st.sampled_from(["AND", "OR"]), below, below),
    max_leaves=8,
)


def written(tree: Tree) -> str:
    """Write every operator's operands in parentheses."""
    return tree if isinstance(tree, str) else f"({written(tree[1])}) {tree[0]} ({written(tree[2])})"


def rank(tree: Tree) -> int:
    """Evaluate the tree by its meaning: a choice for OR, all for AND."""
    if isinstance(tree, str):
        return RESTRICTIVENESS.index(BY_CLASS[tree])
    return (min if tree[0] == "OR" else max)(rank(tree[1]), rank(tree[2]))


@pytest.mark.long
@given(TREES, st.booleans())
def test_expressions_follow_their_tree(tree: Tree, lower: bool) -> None:
    text = written(tree).replace(" AND ", " and ").replace(" OR ", " Or ") if lower else written(tree)
    finding = classify_licence(text)
    assert finding.class_path == RESTRICTIVENESS[rank(tree)]
    assert (finding.state == "unknown") == (finding.class_path == "unknown")
    assert finding.spdx == canonicalize_license_expression(text)


@given(
    st.lists(
        st.sampled_from(["MIT", "GPL-3.0-only", "CC0-1.0", "AND", "OR", "WITH", "(", ")", "GCC-exception-3.1"]),
        max_size=9,
    )
)
@example(["MIT", "WITH", "MIT"])
@example(["GCC-exception-3.1"])
def test_grammar_agrees_with_another_parser(words: list[str]) -> None:
    text = " ".join(words)
    try:
        expected: str | None = canonicalize_license_expression(text)
    except ValueError:
        expected = None
    term = parse_expression(text)
    assert (None if term is None else term.spdx) == expected


@pytest.mark.parametrize("text", sorted(BY_CLASS))
def test_single_terms(text: str) -> None:
    assert classify_licence(text).class_path == BY_CLASS[text]


def test_and_binds_before_or() -> None:
    assert classify_licence("MIT OR GPL-3.0-only AND CC-BY-NC-4.0").class_path == "open/permissive"
    assert classify_licence("(MIT OR GPL-3.0-only) AND CC-BY-NC-4.0").class_path == "restricted"


@pytest.mark.parametrize("path", RESTRICTIVENESS)
def test_every_listed_identifier_is_an_spdx_identifier(path: str) -> None:
    names = [name for name, own in spdx._CLASS_OF.items() if own == path]
    assert names or path in {"proprietary", "unknown"}
    for name in names:
        assert canonicalize_license_expression(name) == name
        assert parse_expression(name.lower()) == spdx.Term(path, name)


def test_tables_name_classes_and_identifiers_that_exist() -> None:
    taxonomy = software_licences()
    for path, name in [*CLASSIFIERS.values(), *(named for _, named in (*NAMES, *SENTENCES))]:
        assert taxonomy.contains(path)
        if name is not None:
            term = parse_expression(name)
            assert term is not None
            assert term.class_path == path


def test_unlisted_identifiers_are_unknown_and_named() -> None:
    finding = classify_licence("MIT AND Made-Up-1.0")
    assert (finding.class_path, finding.state) == ("unknown", "unknown")
    assert "not listed: Made-Up-1.0" in finding.evidence
    assert classify_licence("GPL-3.0-only WITH Made-Up-exception").class_path == "unknown"
    assert classify_licence("MIT OR Made-Up-1.0").class_path == "open/permissive"


@pytest.mark.parametrize(
    "text",
    [
        "MIT AND",
        "(MIT",
        "MIT)",
        "MIT WITH",
        "MIT WITH MIT",
        "MIT WITH mit+",
        "LLVM-exception",
        "MIT MIT",
        "MIT & ISC",
        "AND",
        "()",
        "(" * 5000 + "MIT",
    ],
)
def test_malformed_expressions_are_a_state(text: str) -> None:
    finding = classify_licence(text, ["License :: OSI Approved :: MIT License"], "MIT")
    assert (finding.class_path, finding.state, finding.spdx) == ("unknown", "unknown", None)
    assert "not an SPDX expression" in finding.evidence


@pytest.mark.parametrize(
    ("text", "path", "spdx"),
    [
        ("MIT License", "open/permissive", "MIT"),
        ("The MIT License (MIT)", "open/permissive", "MIT"),
        ("BSD-3-Clause", "open/permissive", "BSD-3-Clause"),
        ("BSD 3-Clause License", "open/permissive", "BSD-3-Clause"),
        ("3-Clause BSD License", "open/permissive", "BSD-3-Clause"),
        ("BSD 2-Clause License", "open/permissive", "BSD-2-Clause"),
        ("BSD", "open/permissive", None),
        ("Apache 2.0", "open/permissive", "Apache-2.0"),
        ("Apache License, Version 2.0", "open/permissive", "Apache-2.0"),
        ("Apache License v2.0", "open/permissive", "Apache-2.0"),
        ("Apache Software License", "open/permissive", None),
        ("ISC License", "open/permissive", "ISC"),
        ("PSF", "open/psf", None),
        ("Python Software Foundation License", "open/psf", None),
        ("MPL 2.0", "open/weak-copyleft", "MPL-2.0"),
        ("LGPLv2.1+", "open/weak-copyleft", "LGPL-2.1-or-later"),
        ("GNU Lesser General Public License v3", "open/weak-copyleft", "LGPL-3.0-only"),
        ("GPL", "open/copyleft", None),
        ("GPLv3", "open/copyleft", "GPL-3.0-only"),
        ("GPL-2", "open/copyleft", "GPL-2.0-only"),
        ("GNU General Public License v3 or later (GPLv3+)", "open/copyleft", "GPL-3.0-or-later"),
        ("AGPLv3", "open/copyleft", "AGPL-3.0-only"),
        ("Public Domain", "public-domain", None),
        ("Proprietary", "proprietary", None),
        ("Apache-2.0 or MIT", "open/permissive", "Apache-2.0 OR MIT"),
        ("CC BY-NC-SA 4.0", "restricted", None),
    ],
)
def test_common_names(text: str, path: str, spdx: str | None) -> None:
    finding = classify_licence(None, [], text)
    assert (finding.class_path, finding.spdx, finding.state) == (path, spdx, "normalised")
    assert finding.evidence == f"License: {text}"


@pytest.mark.parametrize("text", ["UNKNOWN", "LICENSE.txt", "see file", "GPLv9x", "MITish", "x" * 5000, "GNU"])
def test_other_texts_are_unknown(text: str) -> None:
    assert classify_licence(None, [], text).class_path == "unknown"


def test_whole_texts_count_as_the_strictest_licence_in_them() -> None:
    mit = (
        "Copyright (c) 2020\n\nPermission is hereby granted, free of charge, to any person obtaining a copy\n"
        + "of it " * 99
    )
    gpl = "Bundled: libfoo, under the GNU General\nPublic License version 3."
    assert classify_licence(None, [], mit).class_path == "open/permissive"
    assert classify_licence(None, [], mit + gpl).class_path == "open/copyleft"


BSD = """Copyright (c) 2001 Somebody. All rights reserved.

Redistribution and use in source and binary forms, with or without modification, are permitted provided that

1. Redistributions of source code must retain the above copyright notice.
2. Redistributions in binary form must reproduce the above copyright notice.
"""
THIRD = """3. Neither the name of the copyright holder nor the names of its contributors may be used to
   endorse or promote products derived from this software.
"""
MIT = """Permission is hereby granted, free of charge, to any person obtaining a copy of this software, to deal in it.
The above copyright notice and this permission notice shall be included in all copies.
"""
VAGUE = ["License :: OSI Approved :: BSD License"]


def notice(name: str, files: str, licence: str, text: str = "") -> str:
    return f"\nName: {name}\nFiles: {files}\nDescription: bundled\nLicense: {licence}\n{text}\n"


def test_compiled_libraries_of_a_wheel_are_told_and_do_not_count() -> None:
    gcc = notice("GCC runtime library", "scipy.libs/libgfortran*.so", "GPL-3.0-or-later WITH GCC-exception-3.1")
    whole = BSD + THIRD + "This distribution can also bundle:\n" + gcc + "GNU GENERAL PUBLIC LICENSE Version 3"
    finding = classify_licence(None, VAGUE, whole)
    assert (finding.class_path, finding.spdx) == ("open/permissive", "BSD-3-Clause")
    assert "don't count: GCC runtime library (GPL-3.0-or-later WITH GCC-exception-3.1)" in finding.evidence


@pytest.mark.parametrize(
    "files", ["scipy/_lib/x.py", "scipy/_lib/*", "a.libs/b.so, src/c.c", "libs.py", "readme.solid"]
)
def test_bundled_works_that_may_be_source_count(files: str) -> None:
    finding = classify_licence(None, VAGUE, BSD + THIRD + notice("foo", files, "GPL-3.0-only"))
    assert (finding.class_path, finding.spdx) == ("open/copyleft", None)
    assert "bundled source foo: GPL-3.0-only" in finding.evidence
    assert classify_licence(None, VAGUE, BSD + notice("foo", files, "whatever")).class_path == "open/permissive"
    assert classify_licence(None, [], BSD + notice("foo", files, "whatever")).class_path == "unknown"


@pytest.mark.parametrize(
    "broken", ["Name: foo\nLicense: MIT\n", "Name: foo\nFiles: a.so\n\nLicense: MIT\n", "Files: a.so\nLicense: MIT\n"]
)
def test_a_notice_that_is_not_whole_hides_nothing(broken: str) -> None:
    text = f"{BSD}{THIRD}\n{broken}\nThe rest is under the GNU General Public License."
    assert classify_licence(None, VAGUE, text).class_path == "open/copyleft"


def test_what_stands_before_the_notices_counts() -> None:
    text = f"Under the GNU General Public License.\n{BSD}{notice('foo', 'a.so', 'MIT')}"
    assert classify_licence(None, VAGUE, text).class_path == "open/copyleft"


@pytest.mark.parametrize(("text", "name"), [(BSD, "BSD-2-Clause"), (BSD + THIRD, "BSD-3-Clause")])
def test_a_licence_file_makes_a_vague_name_exact(text: str, name: str) -> None:
    finding = classify_licence(None, VAGUE, None, {"LICENSE.txt": text})
    assert (finding.class_path, finding.spdx, finding.state) == ("open/permissive", name, "normalised")
    assert finding.evidence == f"classifier: {VAGUE[0]}; text of LICENSE.txt: {name}"


@pytest.mark.parametrize(
    "files",
    [
        {"LICENSE": BSD + MIT},
        {"LICENSE": BSD + BSD},
        {"LICENSE": BSD, "LICENSE.other": MIT},
        {"LICENSE": "Under the GNU General Public License"},
        {"LICENSE": f"{BSD} or the Apache License, Version 2.0"},
    ],
)
def test_a_licence_file_that_is_not_one_well_known_text_names_nothing(files: dict[str, str]) -> None:
    finding = classify_licence(None, VAGUE, None, files)
    assert (finding.class_path, finding.spdx) == ("open/permissive", None)


def test_a_licence_file_never_changes_a_class() -> None:
    gpl = ["License :: OSI Approved :: GNU General Public License (GPL)"]
    assert classify_licence(None, gpl, None, {"LICENSE": MIT}).spdx is None
    assert classify_licence(None, (), None, {"LICENSE": MIT}).class_path == "unknown"


def test_several_classifiers_count_as_the_most_restrictive() -> None:
    entries = [
        f"License :: OSI Approved :: {name}" for name in ("MIT License", "GNU General Public License v2 (GPLv2)")
    ]
    finding = classify_licence(None, ["Programming Language :: Python", *entries])
    assert (finding.class_path, finding.spdx, finding.state) == ("open/copyleft", None, "normalised")


def test_classifier_and_text_that_differ_count_as_the_stricter() -> None:
    mit = ["License :: OSI Approved :: MIT License"]
    for text, path in (
        ("GPLv3", "open/copyleft"),
        ("Unlicense", "open/permissive"),
        ("whatever", "open/permissive"),
    ):
        assert classify_licence(None, mit, text).class_path == path


def test_text_makes_a_vague_classifier_exact() -> None:
    finding = classify_licence(None, ["License :: OSI Approved :: BSD License"], "BSD-3-Clause")
    assert finding.spdx == "BSD-3-Clause"


def test_a_classifier_that_says_nothing_is_passed_over() -> None:
    assert classify_licence(None, ["License :: OSI Approved"], "MIT").class_path == "open/permissive"
    assert classify_licence(None, ["License :: OSI Approved"]).evidence == "no licence metadata"


def test_an_unlisted_classifier_is_unknown() -> None:
    finding = classify_licence(None, ["License :: Other :: Curious License", "License :: OSI Approved :: MIT License"])
    assert (finding.class_path, finding.state) == ("unknown", "unknown")


def test_expression_stands_alone() -> None:
    finding = classify_licence("MIT", ["License :: Other/Proprietary License"], "GPLv3")
    assert (finding.class_path, finding.spdx, finding.state) == ("open/permissive", "MIT", "declared")


@pytest.mark.long
@given(
    st.text(max_size=40) | st.none(),
    st.lists(st.text(max_size=30).map("License :: ".__add__), max_size=2),
    st.text(max_size=300),
)
def test_never_raises(expression: str | None, classifiers: list[str], text: str) -> None:
    finding = classify_licence(expression, classifiers, text)
    assert software_licences().contains(finding.class_path)
    assert (finding.state == "unknown") == (finding.class_path == "unknown")


@pytest.mark.parametrize(("one", "other"), list(product(["", " ", None], repeat=2)))
def test_nothing_is_unknown(one: str | None, other: str | None) -> None:
    assert classify_licence(one, [], other).evidence == "no licence metadata"
