"""Append-only log of what a run did: write, sign, verify, query. Needs no torch.

`writer` appends, `verify` checks, `query` answers. Below them: `entry` (bytes of an entry), `tree` (RFC
6962), `tiles` (C2SP tlog-tiles), `note` (C2SP signed notes and checkpoints), `keys`, `wal` (write-ahead log),
`files` (one ledger's files), `history` (which entries may follow which), `reader` (one verified pass over all
entries), `tables` (what is in force for a step). `proof` takes one entry out for who hasn't the log, and `roots` gives
what it signs of the weights.
"""
