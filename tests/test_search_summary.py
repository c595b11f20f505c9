"""What a search says of its trials and runs."""

from types import SimpleNamespace

import pytest

from attnreg.experiments.compare.search.trials import _summary


@pytest.mark.parametrize(("most", "says"), [(1, "in 3 runs. The"), (4, "in 3 runs of at most 4. The")])
def test_a_search_that_goes_on_with_fewer_runs_does_not_count_against_them(most, says):
    ended = [SimpleNamespace(seconds=60.0, finished=True)] * 3
    made = SimpleNamespace(all=[SimpleNamespace(state="complete")])
    assert says in _summary(SimpleNamespace(runs=most), made, ended)
