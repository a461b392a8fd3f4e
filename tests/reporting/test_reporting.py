# SPDX-License-Identifier: Apache-2.0
"""Reports name the machine."""

import getpass
import os
import socket

from context_compressors.reporting.environment import environment


def test_environment_names_hardware_and_versions_and_nobody():
    content = environment()
    assert content["cpu"]
    assert content["cpu_cores"] >= 1
    assert all(content["versions"][name] for name in ("torch", "transformers", "trl"))
    values = [content["cpu"], content["system"], content["python"], *content["gpus"]]
    values += [version for version in content["versions"].values() if version]
    for private in (socket.gethostname(), os.path.expanduser("~"), os.getcwd(), f"/{getpass.getuser()}"):
        assert not [value for value in values if private in value]
