"""Where rows come from: sources with provenance, in one keyed order."""
