"""Where data comes from: classes, licences, authorities, tags. Needs no torch."""
