# SPDX-License-Identifier: Apache-2.0
"""Files of records, as data sets are published in."""

import gzip
import json

import pyarrow.parquet


def lines(*records):
    """Records as JSONL."""
    return "".join(json.dumps(record) + "\n" for record in records)


def write_files(folder, files):
    """Each file of a folder: of a text as it is, or compressed; of a list of rows as Parquet."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(content, str):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path)
        elif name.endswith(".gz"):
            path.write_bytes(gzip.compress(content.encode()))
        else:
            path.write_bytes(content.encode())
