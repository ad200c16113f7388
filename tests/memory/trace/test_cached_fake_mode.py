"""Cached results of fake operations equal PyTorch's own."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from lean_finetune.memory.trace.cached_fake_mode import CachedFakeMode


def results(mode):
    """Metadata of the results of a few operations, each run twice, and whether they alias an argument."""
    found: list[tuple[Any, ...]] = []
    with mode:
        for _ in range(2):
            x, weight = torch.empty(3, 4, 5), torch.empty(7, 5, dtype=torch.bfloat16, requires_grad=True)
            view, half = x.transpose(0, 1)[1:], x.to(torch.bfloat16)
            parts, added = x.split(2, dim=-1), x.add_(1)
            stacked = torch._foreach_add([x, view.contiguous()], 1.0)
            loss = torch.nn.functional.cross_entropy((half @ weight.T).float().flatten(0, 1), torch.empty(12).long())
            loss.backward()
            moved = torch.empty(2, 3).t_()
            for out in (view, half, *parts, added, *stacked, loss, weight.grad, moved, x.new_empty(0), x[..., None]):
                inside = out.untyped_storage()._cdata == x.untyped_storage()._cdata
                found.append((type(out), out.dtype, out.shape, out.stride(), out.storage_offset(), out.device, inside))
                found.append((out.untyped_storage().nbytes(), out.requires_grad))
            assert added is x
    return found


def test_cached_results_are_those_of_pytorch():
    """One wrong size or alias is a wrong prediction."""
    expected = results(FakeTensorMode(allow_non_fake_inputs=True))
    assert results(CachedFakeMode()) == expected
    assert results(CachedFakeMode()) == expected  # Another mode, with the cache of the first.


@pytest.mark.parametrize(("sizes", "dim"), [((0,), 0), ((0, 4), 0), ((5, 0), 0), ((0, 4), 1), ((2, 0), -1)])
def test_a_tensor_without_values_is_split_as_on_a_cpu(sizes, dim):
    """A GPU without trained tokens in a step: torch 2.11 ends with an IndexError where it splits fake tensors."""
    expected = [part.shape for part in torch.empty(sizes).split(3, dim)]
    with CachedFakeMode():
        for _ in range(2):
            assert [part.shape for part in torch.empty(sizes).split(3, dim)] == expected


def test_a_tensor_that_changes_its_memory_is_followed():
    """set_ changes the storage of its argument, not its metadata."""
    with CachedFakeMode():
        for _ in range(2):
            one, other = torch.empty(4), torch.empty(4)
            one.set_(other)  # type: ignore[call-overload]
            assert one.untyped_storage()._cdata == other.untyped_storage()._cdata


def test_values_are_not_cached():
    """A scalar of an earlier call returned, since PyTorch knows its value."""
    with CachedFakeMode():
        assert [torch.tensor(value).item() for value in (2, 3, 3)] == [2, 3, 3]
        with pytest.raises(DataDependentOutputException):
            torch.empty(1).item()


def test_the_parts_of_a_tensor_come_from_the_cache(monkeypatch):
    """Sharding splits every weight: one slow call for each took a third of a trace."""

    def shapes():
        with CachedFakeMode():
            return [(part.shape, part.storage_offset()) for part in torch.empty(8, 4).chunk(3)]

    def slow(*_: object):
        raise AssertionError

    expected = shapes()
    monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", slow)
    assert shapes() == expected


def test_results_for_other_parts_of_a_tensor_come_from_the_cache(monkeypatch):
    """One slow attention for each of a thousand images: they differ only in where they begin."""
    dispatch, slow = FakeTensorMode.__torch_dispatch__, []

    def counted(mode, func, *args):
        slow.append(func)
        return dispatch(mode, func, *args)

    monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", counted)
    with CachedFakeMode():
        for start in (2, 4, 6):
            part = torch.empty(8, 4)[start : start + 2]
            assert part.atanh().storage_offset() == 0
            assert torch.ops.aten._unsafe_view(part, (8,)).storage_offset() == 4 * start  # A view begins there too.
    assert slow.count(torch.ops.aten.atanh.default) == 1
