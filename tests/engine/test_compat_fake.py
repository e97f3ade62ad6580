import pytest
import torch
import torch.distributed as dist

from shardwise.engine import compat_fake
from shardwise.engine.compat import UnsupportedRelease, replaced
from shardwise.engine.compat_fake import FakeTensors, aten, fake_group, fakes_taken_as_real, shards_fetched


def test_a_number_read_from_a_fake_tensor_is_nothing():
    with FakeTensors():
        values = torch.randn(3)
        assert (values.sum().item(), values.int().sum().item(), bool(values.any())) == (0.0, 0, False)
        assert torch.tensor(7.5).item() == 7.5


def test_places_of_true_elements_are_as_many_as_was_said():
    tensors = FakeTensors()
    with tensors:
        mask = torch.ones(4, 5, dtype=torch.bool)
        with pytest.raises(RuntimeError, match="nonzero"):
            mask.nonzero()
        tensors.trues = {20: 7}
        assert mask.nonzero().shape == (7, 2)


def test_a_result_can_be_looked_at_for_a_while():
    tensors, seen = FakeTensors(), []

    def look(result, args):
        seen.append((tuple(result.shape), args[1].shape[0]))
        return result

    with tensors:
        with tensors.kernel(aten("mm"), look):
            torch.zeros(2, 3) @ torch.zeros(3, 5)
        torch.zeros(2, 3) @ torch.zeros(3, 5)
    assert seen == [((2, 5), 3)]


def test_a_storage_is_not_kept_by_what_looked_at_it():
    died = []
    with FakeTensors():
        storage = torch.zeros(9).untyped_storage()
        torch.empty(0).set_(storage)
        torch.utils.weak.weakref.finalize(storage, died.append, True)
        del storage
    assert died == [True]


def test_a_group_that_is_not_there():
    with fake_group(5):
        assert (dist.get_rank(), dist.get_world_size()) == (0, 5)
        with pytest.raises(RuntimeError, match="belongs to a process group already"), fake_group(2):
            pass
    assert not dist.is_initialized()


def test_transformers_takes_fake_tensors_as_real_ones():
    from transformers import masking_utils
    from transformers.utils import import_utils

    with FakeTensors():
        given = torch.ones(2, 3)
        assert import_utils.is_fake_tensor(given)
        with fakes_taken_as_real(all_tokens=True):
            assert not import_utils.is_fake_tensor(given)
            assert masking_utils.fast_all(given) is True
        assert import_utils.is_fake_tensor(given)


@pytest.mark.parametrize("name", ["is_fake_tensor"])
def test_a_release_of_transformers_without_it_is_said(name, monkeypatch):
    from transformers.utils import import_utils

    monkeypatch.delattr(import_utils, name)
    with pytest.raises(UnsupportedRelease, match=name), fakes_taken_as_real(all_tokens=True):
        pass


def test_what_is_replaced_comes_back_after_an_error():
    before = compat_fake.dist
    with pytest.raises(ValueError, match="x"), replaced(compat_fake, "dist", None):
        raise ValueError("x")
    assert compat_fake.dist is before
    with pytest.raises(UnsupportedRelease, match="nothing_like_it"), replaced(compat_fake, "nothing_like_it", None):
        pass


def test_an_operator_that_a_release_lacks():
    with pytest.raises(UnsupportedRelease, match="aten::no_such_operator"):
        aten("no_such_operator")


def test_the_way_of_offloaded_shards_comes_back():
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    before = FSDPParam.all_gather_inputs
    with shards_fetched(lambda shard: shard):
        assert FSDPParam.all_gather_inputs is not before
    assert FSDPParam.all_gather_inputs is before
