"""The processes of a run are divided into rows, tokens, matrices and layers."""

from lean_finetune.config.parallel_layout import ParallelLayout


def test_each_process_has_one_place_and_each_group_differs_in_its_dimensions():
    """Ranks that exchange parts of different rows, or sum gradients twice."""
    layout = ParallelLayout(data=2, context=2, tensor=2, pipeline=2)
    places = [layout.coordinates(rank) for rank in range(layout.size)]
    assert len(set(places)) == 16 and places[1].tensor == places[2].context == places[4].data == places[8].pipeline == 1
    assert layout.groups("context")[:2] == [[0, 2], [1, 3]]
    assert layout.groups("data", "context")[:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.groups("pipeline")[0] == [0, 8] and len(layout.groups("tensor")) == 8
