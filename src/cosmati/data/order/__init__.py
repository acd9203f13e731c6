"""The order of streamed rows, as pure functions of seed and position.

permutation.py   a keyed bijection without a table
shards.py        a source's rows: shards permuted, rows permuted within windows of shards
interleave.py    groups in exact proportion, with random access
mixture.py       position -> source, epoch, index: repeats, curricula
plan.py          step and microbatch -> rows: route-pure, tails
"""
