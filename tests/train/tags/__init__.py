"""Tags that follow their rows: what lineage says of random pipelines, against what their content shows."""
