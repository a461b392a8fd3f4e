# SPDX-License-Identifier: Apache-2.0
"""Reports name the machine; their files and tables have one form."""

import getpass
import os
import socket

from context_compressors.reporting.environment import environment
from context_compressors.reporting.tables import markdown_table


def test_environment_names_hardware_and_versions_and_nobody():
    content = environment()
    assert content["cpu"]
    assert content["cpu_cores"] >= 1
    assert isinstance(content["gpus"], list)
    assert all(content["versions"][name] for name in ("torch", "transformers", "trl"))
    values = [content["cpu"], content["system"], content["python"], *content["gpus"]]
    values += [version for version in content["versions"].values() if version]
    for private in (socket.gethostname(), os.path.expanduser("~"), os.getcwd(), f"/{getpass.getuser()}"):
        assert not [value for value in values if private in value]


def test_markdown_table_is_aligned_and_escapes_bars():
    lines = markdown_table(["a", "long header"], [["x|y", 1], ["z", 22]]).splitlines()
    assert lines[1] == "|------|-------------|"
    assert lines[2].startswith("| x\\|y | 1")
    assert len({len(line) for line in lines}) == 1
