"""The check of errors fails for errors beyond both bounds, and for values that should be finite or infinite."""

from __future__ import annotations

import pytest
import torch

from .oracle import check_errors

WANT = {"out": torch.tensor([3.0, 4.0, -torch.inf, torch.nan])}
BEYOND = {
    "error": [3.0, 4.051, -torch.inf, torch.nan],
    "nan": [3.0, torch.nan, -torch.inf, torch.nan],
    "infinite": [3.0, torch.inf, -torch.inf, torch.nan],
    "finite for an empty row": [3.0, 4.0, -1e30, torch.nan],
    "another sign": [3.0, 4.0, torch.inf, torch.nan],
    "finite for nan": [3.0, 4.0, -torch.inf, 0.0],
}


@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.parametrize(("theirs", "floor"), [(0.005, 0.0), (torch.nan, 0.01)])
def test_errors_beyond_the_bounds_fail(name: str, theirs: float, floor: float) -> None:
    check_errors({"out": torch.tensor([3.0, 4.049, -torch.inf, torch.nan])}, WANT, [{"out": theirs}], floor)
    with pytest.raises(AssertionError, match="out: error"):
        check_errors({"out": torch.tensor(BEYOND[name])}, WANT, [{"out": theirs}], floor)


def test_the_largest_error_of_some_orders_counts() -> None:
    got = {"out": torch.tensor([3.0, 4.049, -torch.inf, torch.nan])}
    check_errors(got, WANT, ({"out": each} for each in (0.001, 0.005, 0.0)), 0.0)
    with pytest.raises(AssertionError, match="allowed 2.00e-03"):
        check_errors(got, WANT, ({"out": each} for each in (0.001, 0.0)), 0.0)
