# SPDX-License-Identifier: Apache-2.0
"""Helpers of the fuzzed properties, and the totals that `make fuzz` shows."""

import sys
from pathlib import Path

import pytest

# Tests import the helper modules beside them, and the tables of tiny models, by name.
sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "modeling")]

from budget import EXAMPLES, WANTED

# Their assertions show their values, as those of tests do.
pytest.register_assert_rewrite("calls")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if report.when == "call" and EXAMPLES:
        # What a worker counts reaches the process that reports by its reports alone.
        report.user_properties.append(("examples", dict(EXAMPLES)))
        EXAMPLES.clear()
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if WANTED is None:
        return
    total = 0
    terminalreporter.section("examples by property")
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, counts in report.user_properties:
                if name == "examples":
                    for prop, count in counts.items():
                        total += count
                        terminalreporter.write_line(f"{count:>7,} {outcome}: {prop}")
    terminalreporter.write_line(f"{total:>7,} in all")
