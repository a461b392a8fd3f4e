# SPDX-License-Identifier: Apache-2.0
"""What every report needs: the machine that it was made on, result files, tables."""
