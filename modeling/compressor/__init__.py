# SPDX-License-Identifier: Apache-2.0
"""What every compressor does around its method: compress, read, generate; chunks, checks, pipeline, serving."""
