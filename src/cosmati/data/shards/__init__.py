"""Shards: files of rows, in MDS version 2 or Parquet, here or remote.

encodings.py    a value as bytes        compression.py  a file made smaller
index.py        which shards there are  mds.py          one shard, mapped into memory
"""
