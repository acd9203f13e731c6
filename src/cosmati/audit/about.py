"""What only the provider of a model can say of it: asked for in a file, and printed as missing where it isn't there."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cosmati.errors import ExportError
from cosmati.routing.strict_yaml import load_yaml

SourceCategory = Literal["public", "licensed", "private", "crawled", "user", "synthetic", "other"]
"""Of a source, as the summary of training content tells them apart."""
KINDS: dict[str, SourceCategory] = {
    "downloaded": "public",
    "installed": "public",
    "public": "public",
    "licensed": "licensed",
    "private": "private",
    "bought": "private",
    "collected": "crawled",
    "crawled": "crawled",
    "scraped": "crawled",
    "user": "user",
    "users": "user",
    "generated": "synthetic",
    "synthetic": "synthetic",
}
"""By what a manifest says of how a source was obtained."""

BLANK = """\
# What the ledger can't know of a model. What stays empty is printed as missing, and nothing is guessed.

provider: ""                # name and address of who places the model on the market
contact: ""
representative: ""          # in the Union, where the provider is elsewhere
model: ""                   # its name and version; the run's name if left out
depends_on: ""              # the model that it modifies or was fine-tuned from, with its own summary's address
placed_on_market: ""        # in the Union, YYYY-MM-DD
modalities: []              # text, image, audio, video, other
size: ""                    # all training data by modality: text below 1 billion, up to 10 trillion, or more tokens ...
content: ""                 # what kinds of content each modality has
latest_acquired: ""         # when the last of it was acquired, and whether the model goes on being trained
languages: ""
characteristics: ""         # other: regions, demography ...
public: ""                  # a description of public data sets beyond what the manifests say
licensed: ""                # likewise of what rightsholders or their agents have licensed
private: ""                 # likewise of other data sets got from third parties
crawled: ""                 # crawlers by name, whose, what for, how they behave, when, and what they fetched
domains: ""                 # the most used domain names, and by which measure
user: ""                    # services whose users' data were taken, and which modalities
synthetic: ""               # what was generated, by which models
other: ""
reservations: ""            # how reservations of rights are found and kept: before, and while training
illegal_content: ""         # what was done against illegal content
processing: ""              # anything else
sources: {}                 # name of a source: public, licensed, private, crawled, user, synthetic or other
"""


class About(BaseModel):
    """The provider's own words; `BLANK` says what each is."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    provider: str = ""
    contact: str = ""
    representative: str = ""
    model: str = ""
    depends_on: str = ""
    placed_on_market: str = Field(default="", pattern=r"^(\d{4}-\d{2}-\d{2})?$")
    modalities: list[Literal["text", "image", "audio", "video", "other"]] = []
    size: str = ""
    content: str = ""
    latest_acquired: str = ""
    languages: str = ""
    characteristics: str = ""
    public: str = ""
    licensed: str = ""
    private: str = ""
    crawled: str = ""
    domains: str = ""
    user: str = ""
    synthetic: str = ""
    other: str = ""
    reservations: str = ""
    illegal_content: str = ""
    processing: str = ""
    sources: dict[str, SourceCategory] = {}

    def kind_of(self, source: str, obtained: str) -> SourceCategory:
        """Return which kind a source is of: as the provider says, or else as its manifest does."""
        return self.sources.get(source) or KINDS.get(obtained.strip().lower(), "other")


def read_about(path: Path) -> About:
    """Read a provider's file, YAML or JSON.

    Raises:
        ExportError: it can't be read, or isn't of that form.
    """
    try:
        content, _ = load_yaml(path.read_text("utf-8"))
        return About.model_validate(content or {})
    except OSError as error:
        raise ExportError(f"{path} can't be read: {error.strerror}. `cosmati audit about` prints a blank.") from error
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ExportError(f"{path}: {wrong}. `cosmati audit about` prints a blank with what each field is.") from error
    except ValueError as error:
        raise ExportError(f"{path}: {error}. `cosmati audit about` prints a blank.") from error
