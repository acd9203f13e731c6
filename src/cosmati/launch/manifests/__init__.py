"""Manifests for schedulers of containers, rendered from what a launcher is asked for: `render`."""

from __future__ import annotations

from cosmati.launch.manifests.rendered import RENDERED, render

__all__ = ["RENDERED", "render"]
