# SPDX-License-Identifier: Apache-2.0
"""A server for memories and the chat that reads them, with a page to try a checkpoint on (extras `serve`, `mcp`)."""
