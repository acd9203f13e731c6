"""Documents in other people's forms, rendered from a bundle's figures: CycloneDX and Croissant."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from typing import Any

from cosmati import __version__
from cosmati.audit.about import About
from cosmati.audit.summary import summary_page

BOM, SUMMARY = "documents/model.cdx.json", "documents/training-content-summary.html"
_CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileProperty": "cr:fileProperty",
    "fileObject": "cr:fileObject",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}
"""The context that Croissant 1.0 gives."""
_LIMITS = (
    "Classes of data are what their signers say. That a class taught a region nothing is about direct writes: after "
    "two steps each class acts on all through the activations."
)
_SPDX = re.compile(r"[A-Za-z0-9.+-]+")


def documents(found: Mapping[str, Any], about: About, weights: Mapping[str, str], made: str) -> dict[str, bytes]:
    """Return each document's bytes by its name.

    Args:
        found: the figures.
        about: the provider's words.
        weights: SHA-256 in hex of the files of weights, by name; empty where the bundle has none.
        made: when the bundle was made, ISO 8601.
    """
    files = {BOM: _json(bom(found, about, weights, made)), SUMMARY: summary_page(found, about, made).encode()}
    for one in found["sources"]:
        slug = re.sub(r"[^A-Za-z0-9-]+", "-", one["target"])
        files[f"documents/croissant/{slug}.json"] = _json(croissant(one))
    return files


def bom(found: Mapping[str, Any], about: About, weights: Mapping[str, str], made: str) -> dict[str, Any]:
    """Return a CycloneDX 1.6 bill of materials: the model, what it was made from, and who signed that."""
    run = found["run"]
    identity = f"{run['origin']} {run['root']}"
    model = {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": about.model or run["id"],
        "version": str(run["steps"]),
        "hashes": [{"alg": "SHA-256", "content": digest} for _, digest in sorted(weights.items())],
        "modelCard": {
            "modelParameters": {"datasets": [{"ref": _ref(one)} for one in found["sources"]]},
            "considerations": {"technicalLimitations": [_LIMITS]},
        },
        "properties": _properties(
            {
                "cosmati:ledger:origin": run["origin"],
                "cosmati:ledger:tree-size": run["tree_size"],
                "cosmati:ledger:root": run["root"],
                "cosmati:ledger:operator": run["operator"],
                "cosmati:steps": run["steps"],
            }
        ),
    }
    if about.provider:
        model["manufacturer"] = {"name": about.provider}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, identity)}",
        "version": 1,
        "metadata": {
            "timestamp": made,
            "tools": {"components": [{"type": "library", "name": "cosmati", "version": __version__}]},
            "component": model,
        },
        "components": [_data(one) for one in found["sources"]] + [_artifact(one) for one in found["artifacts"]],
        "dependencies": [{"ref": "model", "dependsOn": [_ref(one) for one in found["sources"]]}],
    }


def _data(one: Mapping[str, Any]) -> dict[str, Any]:
    facts = one["facts"]
    component: dict[str, Any] = {
        "type": "data",
        "bom-ref": _ref(one),
        "name": one["source"],
        "version": one["source_version"],
        "hashes": [{"alg": "SHA-256", "content": one["manifest_sha256"]}],
        "data": [{"type": "dataset", "name": one["target"], "classification": one["class"]}],
        "properties": _properties(
            {
                "cosmati:class": one["class"],
                "cosmati:rows": one["num_rows"],
                "cosmati:bytes": one["num_bytes"],
                "cosmati:authority": one["root"],
                "cosmati:origin": facts["origin"],
                "cosmati:obtained": facts["obtained"],
                "cosmati:lawful-basis": facts["lawful_basis"],
            }
        ),
    }
    if facts["licence"]:
        component["licenses"] = [{"license": {"name": facts["licence"]}}]
    return component


def _artifact(one: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "file",
        "bom-ref": f"artifact: {one['from_step']} {one['label']}",
        "name": one["label"],
        "properties": _properties({"cosmati:state": one["state"], "cosmati:origin": one["origin"]}),
    }
    if len(one["digest"]) == 64:
        found["hashes"] = [{"alg": "SHA-256", "content": one["digest"]}]
    return found


def croissant(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return Croissant 1.0 metadata of a source: what was signed of it, and its shards by their digests."""
    facts = one["facts"]
    found: dict[str, Any] = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": re.sub(r"[^A-Za-z0-9_.-]+", "-", one["target"]),
        "description": f"{one['num_rows']} rows of {one['class']}, from {facts['origin'] or 'an unnamed place'}.",
        "version": one["source_version"],
        "url": f"urn:sha256:{one['manifest_sha256']}",
        "creator": {"@type": "sc:Organization", "name": f"authority {one['root'][:16]}"},
        "distribution": [
            {
                "@type": "cr:FileObject",
                "@id": shard["name"],
                "name": shard["name"],
                "contentUrl": shard["name"],
                "encodingFormat": "application/octet-stream",
                "sha256": shard["sha256"],
            }
            for shard in one["shards"]
        ],
    }
    if facts["licence"]:
        is_spdx = _SPDX.fullmatch(facts["licence"]) is not None
        found["license"] = f"https://spdx.org/licenses/{facts['licence']}.html" if is_spdx else facts["licence"]
    return found


def _ref(one: Mapping[str, Any]) -> str:
    return f"source: {one['target']}"


def _properties(values: Mapping[str, object]) -> list[dict[str, str]]:
    return [{"name": name, "value": str(value)} for name, value in values.items() if value != ""]


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
