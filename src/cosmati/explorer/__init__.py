"""Pages and figures over finished runs. They read records and never the loop."""
