# SPDX-License-Identifier: Apache-2.0
"""How many examples each property gets: a few in `make test`, always the same; as many as wanted in `make fuzz`."""

import functools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase

# Of a hundred examples, how many try each property.
SHARES = {
    "slots of padded batches": 20,
    "logits of padded batches": 16,
    "generated ids of padded batches": 10,
    "text behind a cache": 8,
    "memories saved, cut, repeated and joined": 8,
    "broken calls": 18,
    "odd arguments of functions": 8,
    "odd arguments of memories": 6,
    "odd fields of configurations": 6,
}
WANTED = os.environ.get("FUZZ_EXAMPLES")
TOTAL = int(WANTED or 300)
EXAMPLES: Counter[str] = Counter()


def fuzz(name: str, **strategies: Any) -> Callable:
    """Try a property, named in `SHARES`, on its share of all examples, which are counted in `EXAMPLES`."""
    settings = hypothesis.settings(
        max_examples=max(1, TOTAL * SHARES[name] // 100),
        derandomize=WANTED is None,
        print_blob=True,
        # A busy machine is no reason to fail, and models are made at their first use.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    )

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def counted(*args: Any, **kwargs: Any) -> None:
            EXAMPLES[name] += 1
            test(*args, **kwargs)

        return pytest.mark.slow(settings(hypothesis.given(**strategies)(counted)))

    return decorate
