"""A study's figures as files for papers: PNG and SVG, drawn by the browser that is there, as the report draws them."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from cosmati.errors import RunError
from cosmati.explorer.palette import LIGHT
from cosmati.explorer.rendering import embedded_json, plotly_source, safe_markup, template_environment
from cosmati.explorer.views import study_figures, study_view
from cosmati.records.study import StudyRecord
from cosmati.storage.atomic import replace_file

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
WIDTH, SCALE = 760, 3
"""Of a figure in CSS pixels, and of a PNG's pixels to these."""
_SECONDS, _VIRTUAL_MS = 300, 120_000
_ANCHOR = "study"
_IMAGES = re.compile(r'<script type="application/json" id="images">([A-Za-z0-9+/=]+)</script>')


def write_figures(study: StudyRecord, folder: str | Path) -> list[Path]:
    """Write each figure of a study as `NAME.png` and `NAME.svg`, and return the paths.

    Args:
        study: with finished runs.
        folder: to write into; it's made if it isn't there.

    Raises:
        RunError: the study has no finished run, there's no browser, it drew nothing, or the folder can't be written.
        MissingExtraError: Jinja2 or Plotly isn't installed.
    """
    figures = study_figures(study_view(study, _ANCHOR), LIGHT)
    if not figures:
        raise RunError(f"No run of {study.name} has finished, so there's no figure to write. Run the study first.")
    plots = {name.removeprefix(f"{_ANCHOR}-"): figure.plot for name, figure in figures.items()}
    page = (
        template_environment()
        .get_template("figures.html")
        .render(data=safe_markup(embedded_json(plots)), plotly=safe_markup(plotly_source()), width=WIDTH, scale=SCALE)
    )
    folder, written = Path(folder).expanduser(), []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, (svg, png) in _drawn(page).items():
            for path, content in (
                (folder / f"{name}.png", base64.b64decode(png)),
                (folder / f"{name}.svg", svg.encode()),
            ):
                replace_file(path, content)
                written.append(path)
    except OSError as error:
        raise RunError(f"The figures can't be written: {error}. Name another folder.") from error
    return written


def _drawn(page: str) -> dict[str, tuple[str, str]]:
    """Return SVG text and PNG as base64 by the figure's name."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        msg = (
            "Figures are drawn by Chromium or Chrome, and none was found on the path. Install one, or save figures by "
            "the buttons of the report."
        )
        raise RunError(msg)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as where:
        source = Path(where) / "figures.html"
        source.write_text(page, encoding="utf-8")
        command = [browser, "--headless", "--disable-gpu", "--no-first-run", f"--user-data-dir={where}/profile"]
        # Chromium refuses its sandbox to root; the page is our own, and holds no script of anybody else.
        command += ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        command += [f"--virtual-time-budget={_VIRTUAL_MS}", "--dump-dom", source.as_uri()]
        try:
            made = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)  # noqa: S603  (ours)
        except subprocess.TimeoutExpired as error:
            raise RunError(f"{browser} didn't draw the figures in {_SECONDS} s. Try again when less runs.") from error
    written = _IMAGES.search(made.stdout.decode("utf-8", "replace"))
    try:
        images: dict[str, tuple[str, str]] = json.loads(base64.b64decode(written[1])) if written else {}
    except (ValueError, binascii.Error):
        images = {}
    if not images:
        said = made.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["nothing"]
        raise RunError(f"{browser} drew no figure; it said: {said[0][:300]}. Save figures by the report's buttons.")
    return images
