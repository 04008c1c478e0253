"""The two worlds that run ranks on a CPU: threads (simulated) and processes (pool)."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from multiprocessing import active_children

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, _resolve_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dtplan._errors import ApplyError, DegreesError
from dtplan.prove import pool as pool_module
from dtplan.prove import simulated as simulated_module
from dtplan.prove.pool import GlooPool
from dtplan.prove.serve import RemoteTraceback
from dtplan.prove.simulated import simulated_ranks

ops = torch.ops._c10d_functional

NEVER = 1e6
"""A limit beyond pytest's own: where it is used, the failure of a rank has to release the others."""

# ----------------------------------------------------------------------------- what ranks do, in either world


def meet(rank):
    """Wait for every other rank."""
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


def collect(rank):
    """One of each collective, over the rows and over the columns of a 2-D mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    x = torch.tensor([10.0 * rank, 10.0 * rank + 1])
    found = {}
    for axis in ("shard", "tp"):
        group = mesh[axis].get_group().group_name
        found[axis] = [
            ops.wait_tensor(ops.all_reduce(x, "sum", group)).tolist(),
            ops.wait_tensor(ops.all_gather_into_tensor(x, 2, group)).tolist(),
            ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", 2, group)).tolist(),
        ]
    return found


class SumBothWays(torch.autograd.Function):
    """An all-reduce in forward; in backward an all-gather and a reduce-scatter."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return ops.wait_tensor(ops.all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx, grad):
        gathered = ops.wait_tensor(ops.all_gather_into_tensor(grad.contiguous(), 2, ctx.group))
        return ops.wait_tensor(ops.reduce_scatter_tensor(gathered * (1 + dist.get_rank()), "sum", 2, ctx.group)), None


def backward(rank, failing=-1):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = SumBothWays.apply(x, dist.distributed_c10d._get_default_group().group_name)
    if rank == failing:
        y.register_hook(lambda grad: 1 / 0)
    (y * torch.tensor([1.0, 10.0]) * (rank + 1)).sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


def uneven(rank, order):
    """Gather 3 rows from 2 x 2 ranks; leave in a given order, which permutes the next call's threads."""
    rows = torch.arange(6.0).reshape(3, 2)
    mesh = init_device_mesh("cpu", (2, 2))
    gathered = distribute_tensor(rows, mesh, [Shard(0), Shard(0)]).full_tensor()
    meet(rank)
    time.sleep(0.02 * order.index(rank))
    return torch.equal(gathered, rows)


def train(rank, model, batches):
    """The gradients of a model under FSDP2, each rank with a batch of its own."""
    model = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (len(batches),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(batches[rank]).square().mean().backward()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def fsdp_case():
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    batches = [torch.randn(3, 6, dtype=torch.float64, generator=generator) for _ in range(4)]
    whole = copy.deepcopy(model)
    torch.stack([whole(batch).square().mean() for batch in batches]).mean().backward()
    return model, batches, [parameter.grad for parameter in whole.parameters()]


def refuse_alone(rank):
    """Rank 2 refuses, and the others wait for it."""
    if rank == 2:
        raise DegreesError("rank 2 refuses")
    return meet(rank)


def refuse_together(rank):
    init_device_mesh("cpu", (dist.get_world_size(),))
    raise DegreesError("tp is 3, but the mesh has 4 ranks")


def refuse_each(rank):
    raise DegreesError(f"rank {rank} refuses")


def skip_collective(rank, skipping):
    if rank != skipping:
        meet(rank)


def skip_mesh(rank, skipping):
    if rank != skipping:
        init_device_mesh("cpu", (2, 2))


# ------------------------------------------------------------------------------------------------ both worlds


@pytest.fixture(params=["threads", "processes"])
def world(request):
    """``world(n, fn, *args)`` on threads, then on processes."""
    if request.param == "threads":
        return simulated_ranks
    pool = request.getfixturevalue("pool")
    return lambda n, fn, *args, timeout_s=60: pool.run(fn, *args, ranks=n, timeout_s=timeout_s)


def late_first(rank):
    time.sleep(0.05 * (3 - rank))
    return rank, dist.get_rank(), dist.get_world_size()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_results_come_in_rank_order(world, n):
    assert world(n, late_first) == [(rank, rank, n) for rank in range(n)]


def test_collectives_are_exact_on_both_axes_of_a_mesh(world):
    results = world(4, collect)
    for rank, found in enumerate(results):
        for axis, peers in {
            "shard": [rank % 2, rank % 2 + 2],
            "tp": [rank - rank % 2, rank - rank % 2 + 1],
        }.items():
            a, b = (torch.tensor([10.0 * peer, 10.0 * peer + 1]) for peer in peers)
            own = [peers.index(rank)]
            assert found[axis] == [(a + b).tolist(), torch.cat([a, b]).tolist(), (a + b)[own].tolist()]


def test_collectives_inside_backward(world):
    # grad * [1, 2] is gathered; rank r scales it by 1 + r, and the sum of both scales is 3.
    assert world(2, backward) == [[3.0, 30.0], [6.0, 60.0]]


def test_fsdp2_gradients_are_the_mean_of_the_batches(world):
    model, batches, expected = fsdp_case()
    for gradients in world(4, train, model, batches):
        torch.testing.assert_close(gradients, expected, rtol=1e-14, atol=1e-14)


def test_the_rank_that_failed_is_the_one_reported(world):
    with pytest.raises(DegreesError, match="rank 2 refuses"):
        world(4, refuse_alone, timeout_s=NEVER)


def test_the_lowest_of_many_failures_is_reported(world):
    with pytest.raises(DegreesError, match="rank 0 refuses"):
        world(4, refuse_each)


@pytest.mark.parametrize("wait", [skip_collective, skip_mesh])
def test_a_deadlock_ends_and_tells_where_each_rank_stands(world, wait):
    with pytest.raises(ApplyError) as caught:
        world(4, wait, 1, timeout_s=4)
    lines = str(caught.value).splitlines()
    kind = "simulated" if world is simulated_ranks else "gloo"
    assert lines[0].startswith(f"4 {kind} ranks were not all done after 4")
    assert lines[2] == "  rank 1 has ended"
    for rank in (0, 2, 3):
        assert lines[1 + rank].startswith(f"  rank {rank} is in ")
        assert "test_worlds.py" in lines[1 + rank]
    assert world(4, meet) == [4] * 4


def test_a_world_of_no_ranks_is_refused(world):
    with pytest.raises(ApplyError, match=r"n is 0|but 0 were asked for"):
        world(0, meet)


# ---------------------------------------------------------------------------------------------------- threads


def test_uneven_shards_stay_right_when_ranks_change_threads():
    orders = [[0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2], [2, 3, 0, 1], [0, 2, 1, 3], [3, 1, 2, 0]]
    assert [simulated_ranks(4, uneven, order) for order in orders] == [[True] * 4] * len(orders)


def test_the_error_is_the_same_object_with_its_traceback():
    error = DegreesError("mine")

    def fail(rank):
        if rank == 1:
            raise error
        meet(rank)

    with pytest.raises(DegreesError) as caught:
        simulated_ranks(2, fail, timeout_s=NEVER)
    assert caught.value is error
    assert "fail" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_an_error_in_backward_releases_ranks_that_wait_in_backward():
    with pytest.raises(ZeroDivisionError):
        simulated_ranks(2, backward, 1, timeout_s=NEVER)


def test_an_error_releases_ranks_that_wait_for_a_mesh():
    def fail(rank):
        if rank == 3:
            raise DegreesError("no mesh for me")
        init_device_mesh("cpu", (2, 2))

    with pytest.raises(DegreesError, match="no mesh for me"):
        simulated_ranks(4, fail, timeout_s=NEVER)


def test_an_error_raised_while_being_released_is_not_the_reported_one():
    def fail(rank):
        if rank == 1:
            raise DegreesError("first")
        try:
            meet(rank)
        finally:
            raise DegreesError("clean-up of a released rank")

    with pytest.raises(DegreesError, match="first"):
        simulated_ranks(2, fail, timeout_s=NEVER)


@pytest.mark.parametrize("fn", [meet, refuse_alone, refuse_each, skip_collective])
def test_nothing_is_left_behind(fn):
    torch.set_num_threads(2)
    threads, world = threading.enumerate(), dist.distributed_c10d._world
    try:
        simulated_ranks(4, fn, *([1] if fn is skip_collective else []), timeout_s=1)
    except (ApplyError, DegreesError):
        assert fn is not meet
    assert threading.enumerate() == threads
    assert dist.distributed_c10d._world is world
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    # Torch registers groups by thread while threads are isolated: another would not find this group by name.
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    name, found = dist.distributed_c10d._get_default_group().group_name, []
    other = threading.Thread(target=lambda: found.append(_resolve_process_group(name)))
    other.start()
    other.join()
    assert found == [dist.group.WORLD]
    dist.destroy_process_group()


def test_a_process_that_has_a_group_is_refused():
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ApplyError, match=r"has a process group \(gloo\)"):
            simulated_ranks(2, meet)
        assert meet(0) == 1
    finally:
        dist.destroy_process_group()


def test_a_rank_cannot_simulate_ranks():
    with pytest.raises(ApplyError, match=r"has a process group \(threaded\)"):
        simulated_ranks(2, lambda rank: simulated_ranks(2, meet))


def test_callers_in_many_threads_take_turns():
    found = []
    callers = [threading.Thread(target=lambda: found.append(simulated_ranks(2, meet))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [[2, 2]] * 4


@pytest.mark.parametrize("call", ["run()", "one = Thread(target=run); one.start(); one.join()"], ids=["main", "thread"])
def test_a_fake_mode_of_ranks_that_have_ended_does_no_harm(call):
    """In a process of its own: torch 2.11 keeps what the first thread that entered one left, and dies of it."""
    code = f"""
from threading import Thread
from torch._subclasses.fake_tensor import FakeTensorMode
from dtplan.prove.simulated import simulated_ranks

def enter(rank):
    with FakeTensorMode():
        return [bytes(n) for n in range(64)]

def run():
    for _ in range(20):
        assert len(simulated_ranks(2, enter)) == 2

for _ in range(3):
    {call}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_rank_that_cannot_be_ended_is_named_and_bars_the_next_call(monkeypatch):
    monkeypatch.setattr(simulated_module, "_UNWIND_S", 0.2)
    leave = threading.Event()
    with pytest.raises(ApplyError, match="rank 1 cannot be ended and still runs"):
        simulated_ranks(2, lambda rank: rank == 1 and leave.wait(), timeout_s=0.5)
    (stuck,) = (thread for thread in threading.enumerate() if thread.name == "rank 1")
    with pytest.raises(ApplyError, match="rank 1 of an earlier call"):
        simulated_ranks(2, meet)
    leave.set()
    stuck.join()
    assert simulated_ranks(2, meet) == [2, 2]


# -------------------------------------------------------------------------------------------------- processes


def pids(rank):
    meet(rank)
    return os.getpid(), torch.get_num_threads(), os.environ["HF_HUB_OFFLINE"], "transformers" in sys.modules


def test_ranks_are_warm_processes_of_one_thread_that_end_with_the_call(pool):
    first, second = pool.run(pids), pool.run(pids)
    assert len({pid for pid, *_ in first + second} | {os.getpid()}) == 9
    assert {tuple(rest) for _, *rest in first + second} == {(1, "1", True)}
    assert active_children() == []


def test_the_same_error_on_all_ranks(pool):
    outcomes = pool.run_outcomes(refuse_together)
    assert [outcome.rank for outcome in outcomes] == [0, 1, 2, 3]
    assert {(type(outcome.error), str(outcome.error), outcome.secondary) for outcome in outcomes} == {
        (DegreesError, "tp is 3, but the mesh has 4 ranks", False)
    }


def test_ranks_that_waited_for_a_failed_one_are_secondary(pool):
    outcomes = pool.run_outcomes(refuse_alone, timeout_s=NEVER)
    assert [outcome.secondary for outcome in outcomes] == [True, True, False, True]
    # Gloo woke them; had they been given up, these would be errors of the pool.
    assert [type(outcome.error) for outcome in outcomes] == [
        RuntimeError,
        RuntimeError,
        DegreesError,
        RuntimeError,
    ]


def test_ranks_that_wait_for_no_failed_one_are_ended_all_the_same(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "_UNWIND_S", 0.5)
    outcomes = pool.run_outcomes(fail_or_sleep, ranks=2, timeout_s=NEVER)
    assert str(outcomes[1].error) == "rank 1 refuses"
    assert "rank 0 is in fail_or_sleep" in str(outcomes[0].error)
    assert (outcomes[0].secondary, outcomes[1].secondary) == (True, False)


def fail_or_sleep(rank):
    if rank == 1:
        raise DegreesError("rank 1 refuses")
    time.sleep(600)


class OwnError(Exception):
    """Made from other arguments than those that it keeps."""

    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")
        self.code = code


def refuse_own(rank):
    raise OwnError(7, "refused")


def test_an_error_keeps_its_class_its_attributes_and_its_traceback(pool):
    with pytest.raises(OwnError, match=r"^7: refused$") as caught:
        pool.run(refuse_own, ranks=1)
    assert caught.value.code == 7
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "in refuse_own" in str(caught.value.__cause__)


def refuse_with_a_lock(rank):
    error = DegreesError("holds a lock")
    error.__dict__["lock"] = threading.Lock()
    raise error


def test_an_error_that_cannot_travel_keeps_its_text(pool):
    with pytest.raises(ApplyError, match="DegreesError: holds a lock"):
        pool.run(refuse_with_a_lock, ranks=1)


def die(rank, how):
    if rank == 1:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    meet(rank)


@pytest.mark.parametrize(("how", "told"), [("kill", "of SIGKILL"), ("exit", "with exit code 3")])
def test_a_rank_that_dies_is_reported_and_the_pool_goes_on(pool, how, told):
    with pytest.raises(ApplyError, match=f"rank 1 of 4 died {told}"):
        pool.run(die, how, timeout_s=NEVER)
    assert pool.run(meet) == [4] * 4


def fail_then_die(rank):
    if rank == 0:
        raise DegreesError("the other one seems to be gone")
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_death_counts_more_than_an_error_that_was_sent_before(pool):
    outcomes = pool.run_outcomes(fail_then_die, ranks=2)
    assert [outcome.secondary for outcome in outcomes] == [True, False]
    with pytest.raises(ApplyError, match="rank 1 of 2 died"):
        pool.run(fail_then_die, ranks=2)


def loop(rank):
    while rank == 0:
        pass


def test_a_rank_that_loops_for_ever_is_ended(pool):
    with pytest.raises(ApplyError, match="rank 0 is in loop"):
        pool.run(loop, ranks=2, timeout_s=4)
    assert active_children() == []


def other_groups_first(rank, extra):
    """A mesh whose groups have other names than those of an equal mesh in an earlier call."""
    for _ in range(extra):
        dist.new_group([0, 1])
    tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))["tp"]
    doubled = distribute_tensor(torch.arange(4.0), tp, [Shard(0)]) * 2
    assert isinstance(doubled, DTensor)
    return doubled.redistribute(placements=[Replicate()]).to_local().tolist()


def test_a_call_does_not_see_the_groups_of_an_earlier_one(pool):
    for extra in (0, 3):
        assert pool.run(other_groups_first, extra) == [[0.0, 2.0, 4.0, 6.0]] * 4


def test_calls_within_kept_share_processes_that_end_with_it(pool):
    with pool.kept(ranks=2) as ranks:
        first, second = ranks.run(pids), ranks.run(pids)
        assert first == second
        assert len(active_children()) == 2
    assert active_children() == []


def test_kept_ranks_find_the_groups_of_their_own_call(pool):
    """Meshes that are equal, with groups that are not the same: DTensor's caches must not hand out wrong ones."""
    with pool.kept() as ranks:
        for extra in (0, 3, 1):
            assert ranks.run(other_groups_first, extra) == [[0.0, 2.0, 4.0, 6.0]] * 4


def test_kept_ranks_are_new_ones_after_a_failure(pool):
    with pool.kept(ranks=2) as ranks:
        before = ranks.run(pids)
        with pytest.raises(DegreesError, match="rank 0 refuses"):
            ranks.run(refuse_each)
        with pytest.raises(ApplyError, match="died of SIGKILL"):
            ranks.run(die, "kill")
        assert {pid for pid, *_ in ranks.run(pids)}.isdisjoint({pid for pid, *_ in before})


def return_lambda(rank):
    return lambda: rank


def test_what_cannot_be_pickled_is_said(pool):
    with pytest.raises(ApplyError, match="top level of a module"):
        pool.run(lambda rank: rank)
    with pytest.raises(ApplyError, match="return plain tensors"):
        pool.run(return_lambda, ranks=1)


def test_a_pool_refuses_what_it_cannot_do(pool):
    with pytest.raises(ApplyError, match="runs 1 to 4 ranks, but 5 were asked for"):
        pool.run(meet, ranks=5)
    with pytest.raises(ApplyError, match="size is 0"):
        GlooPool(0)
    with GlooPool(2) as closed:
        pass
    with pytest.raises(ApplyError, match="is closed"):
        closed.run(meet)
