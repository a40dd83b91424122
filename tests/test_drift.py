"""The distance of matrix rules in 8 bits from the fp64 reading of their specs, in steps of a descent."""

import pytest

from docs.tools.drift import RULES, Descent

MEASURED = {
    "muon": 1.6e-2, "low_rank_muon": 9.3e-3, "normuon": 2.4e-2, "adamuon": 1.2e-1, "polargrad": 3.5e-2, "scion": 2.7e-2,
    "dion": 4.6e-2, "dion2": 6.2e-2, "sinkgd": 1.6e-4, "soap": 2e-1, "soap_muon": 3e-1,
    "shampoo": 9.2e-3, "kl_shampoo": 1.8e-2, "psgd_kron": 5.8e-3, "splus": 1.6e-1, "conda": 1.8e-2, "galore": 1.1e-2,
    "apollo": 2e-3, "fira": 3.6e-3,
}  # fmt: skip
"""The farthest of 24 steps, by the eager reference."""


@pytest.mark.parametrize("name", RULES)
def test_rules_in_8_bits_stay_near_their_reading(name: str) -> None:
    """Within twice what was measured; nearer than a tenth of it, nothing would be kept in 8 bits."""
    found = max(Descent(24, "reference").distances(name, "int8_split24"))
    assert 0.1 * MEASURED[name] <= found <= 2 * MEASURED[name]
