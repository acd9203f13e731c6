"""Tables derived from a ledger's entries, in Parquet beside it: for quick answers, never in the ledger's place."""
