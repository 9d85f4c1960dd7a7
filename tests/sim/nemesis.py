"""What goes wrong in a history: crashes, pauses, partitions, lost power, a wiped store, a failing disk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

from kvpool.client.config import ClientConfig
from kvpool.client.pagestore_control import PageStoreControl
from kvpool.core.errors import KvPoolError
from kvpool.core.fault_points import POINTS, arm, disarm_all
from kvpool_pagestore.engine.drain import Drain, DrainState
from tests.sim.clients import POSITIONS, ClientNode
from tests.sim.loop import Process, SimKilled, current_process
from tests.sim.nodes import IndexNode, World
from tests.sim.pages import KEYSPACES, TENANT, chunk_hash
from tests.sim.pagestore_node import PageStoreNode

_KILL_WITHIN_CALLBACKS = 400


class Nemesis:
    """Plants faults at seeded times and, at the end, takes all of them back."""

    def __init__(self, world: World, clients: list[ClientNode], *, operations: int) -> None:
        self._world = world
        self._clients = clients
        self._operations = operations
        self.done: list[str] = []
        self._operators: list[asyncio.Task[None]] = []

    async def run(self, count: int, within_s: float) -> None:
        """Plant `count` faults one after the other."""
        world = self._world
        for _ in range(count):
            await asyncio.sleep(world.some_s(2 * within_s / count))
            fault = self._choose()
            self._say(fault.__name__)
            world.events_may_lack |= fault in self._faults_of_the_log()
            await fault()

    def end(self) -> None:
        """No more faults: everything runs again, and what was sent arrives."""
        world = self._world
        for operator in self._operators:
            operator.cancel()  # `revive` starts what they have drained
        disarm_all()
        world.network.faults.none()
        world.network.partitions.clear()
        world.redis.down_until_s = world.redis.loss = 0.0
        for store in world.pagestores:
            store.disk.fault_share = store.disk.sync_s = 0.0
            store.process.kill_at = 0
            world.loop.resume(store.process)
        for client in self._clients:
            client.process.kill_at = 0
            self._wake(client)
        for index in world.indexes:
            world.loop.resume(index.process)

    def revive(self) -> None:
        """Start what is down."""
        for index in self._world.indexes:
            if not index.process.alive:
                index.start()
        for store in self._world.pagestores:
            drain = store.engine.drain if store.engine is not None and store.serving else None
            if drain is not None and drain.state is DrainState.DRAINED:
                store.crash()
            if not store.alive:
                store.crash()  # also one that a planned kill ended: the rest of the world is notified
                store.start()
            elif drain is not None and drain.state is DrainState.DRAINING:
                self._world.loop.spawn(store.process, _cancelled(drain), "cancel drain")

    # Faults

    def _faults_of_the_log(self) -> tuple[Callable[[], Coroutine[Any, Any, None]], ...]:
        """An index that fails between a change and its event leaves that out: the same batch is no change any more."""
        broken = (self._crash_index, self._pause_index, self._kill_at_point, self._partition)
        return (*broken, self._redis_down, self._wipe_redis, self._roll_redis_back)

    def _choose(self) -> Callable[[], Coroutine[Any, Any, None]]:
        rng = self._world.rng
        if self._world.only_slow:
            return self._disk_is_slow
        faults: list[tuple[int, Callable[[], Coroutine[Any, Any, None]]]] = [
            (8, self._crash_store),
            (2, self._lose_power),
            (4, self._pause_store),
            (3, self._crash_client),
            (2, self._pause_client),
            (4, self._partition),
            (2, self._crash_index),
            (1, self._pause_index),
            (1, self._redis_down),
            (2, self._wipe_redis),
            (3, self._roll_redis_back),
            (2, self._disk_fails),
            (2, self._disk_is_slow),
            (4, self._damage_disk),
            (3, self._kill_at_point),
            (5, self._drain),
            (4 if self._world.copies > 1 else 0, self._lose_machine),
        ]
        return rng.choices([fault for _, fault in faults], [weight for weight, _ in faults])[0]

    async def _crash_store(self) -> None:
        """Sometimes while its clients sleep, which know nothing of it and keep what they have mapped."""
        store, rng = self._a_store(), self._world.rng
        sleepers = [one for one in self._clients if one.store is store and one.alive and rng.random() < 0.6]
        began_s = self._world.loop.time()
        if sleepers:
            await asyncio.sleep(self._world.some_s(0.02))  # in the middle of anything
        for client in sleepers:
            self._world.loop.pause(client.process)
        self._kill_soon(store.process)
        await self._restart(store)
        if sleepers:
            await asyncio.sleep(self._world.some_s(1.5))
        for client in sleepers:
            self._woken(client, client.process, began_s)

    async def _lose_machine(self) -> None:
        """Its disk with it: a new machine takes its place, of the same name."""
        store = self._a_store()
        store.disk.lose_everything()
        await self._power_lost(store)

    async def _lose_power(self) -> None:
        await self._power_lost(self._a_store())

    async def _power_lost(self, store: PageStoreNode) -> None:
        for client in self._clients:
            if client.store is store and client.alive:
                client.crash()
        store.crash()
        store.disk.lose_power()
        store.host.segments.clear()
        store.host.granted.clear()
        store.host.session_files.clear()
        await self._restart(store)
        self._revive_clients()

    async def _pause_store(self) -> None:
        process = self._a_store().process
        self._world.loop.pause(process)
        await asyncio.sleep(self._world.some_s(2.5 * self._world.lease_ttl_ms / 1e3))
        self._world.loop.resume(process)

    async def _crash_client(self) -> None:
        client = self._a_client()
        self._kill_soon(client.process)
        await asyncio.sleep(self._world.some_s(1.0))
        if client.alive and client.process.kill_at:
            self._world.loop.kill(client.process)
        self._revive_clients()

    async def _pause_client(self) -> None:
        client = self._a_client()
        process = client.process
        self._world.loop.pause(process)
        began_s = self._world.loop.time()
        await asyncio.sleep(self._world.some_s(4.0))
        self._woken(client, process, began_s)

    async def _partition(self) -> None:
        world, rng = self._world, self._world.rng
        names = [one.name for one in world.pagestores] + [one.name for one in world.indexes]
        names += [one.name for one in self._clients]
        one, other = rng.sample(names, 2)
        if rng.random() < 0.5:
            client = self._a_client()
            one, other = client.name, client.store.name
        duration_s = world.some_s(4.0)
        world.network.partition(one, other, duration_s)
        await asyncio.sleep(duration_s / 2)

    async def _crash_index(self) -> None:
        index = self._an_index()
        index.crash()
        await asyncio.sleep(self._world.some_s(1.0))
        if not index.process.alive:
            index.start()

    async def _pause_index(self) -> None:
        process = self._an_index().process
        self._world.loop.pause(process)
        await asyncio.sleep(self._world.some_s(3.0))
        self._world.loop.resume(process)

    async def _redis_down(self) -> None:
        redis = self._world.redis
        redis.down_until_s = self._world.loop.time() + self._world.some_s(3.0)
        redis.loss = 0.05

    async def _wipe_redis(self) -> None:
        self._world.redis.wipe()

    async def _roll_redis_back(self) -> None:
        """A failover to a replica that had not got everything yet, often not that pages have gone."""
        world, redis = self._world, self._world.redis
        redis.save()
        if world.rng.random() < 0.7:
            for store in world.pagestores:
                await self._evict_from(store)
        await asyncio.sleep(world.some_s(world.rng.choice((0.5, 3.0))))
        redis.roll_back()

    async def _disk_fails(self) -> None:
        disk = self._a_store().disk
        disk.fault_share = 0.3 + self._world.some_s(0.7)
        await asyncio.sleep(self._world.some_s(1.0))
        disk.fault_share = 0.0

    async def _disk_is_slow(self) -> None:
        """Each sync takes longer than a session's peer may be silent."""
        world = self._world
        disks = [store.disk for store in (world.pagestores if world.only_slow else [self._a_store()])]
        for disk in disks:
            disk.sync_s = 1.0 + world.some_s(3.0)
        await asyncio.sleep(1.0 + world.some_s(3.0))
        for disk in disks:
            disk.sync_s = 0.0

    async def _damage_disk(self) -> None:
        disk, rng = self._a_store().disk, self._world.rng
        for key in rng.sample(sorted(disk.written), min(4, len(disk.written))):
            disk.damage(key, rng)

    async def _drain(self) -> None:
        """An operator drains a node while clients go on; a drained one is started again, sometimes with a new disk."""
        store = self._a_store()
        self._operators.append(self._world.loop.spawn(self._world.loop.world, self._drain_one(store), "operator"))
        await asyncio.sleep(self._world.some_s(2.0))

    async def _drain_one(self, store: PageStoreNode) -> None:
        world = self._world
        control = PageStoreControl(store.endpoint, ClientConfig(call_timeout_s=5.0, connect_timeout_s=1.0))
        try:
            async with aclosing(control.drain(timeout_s=5.0)) as progresses:
                async for progress in progresses:
                    if not progress.done:
                        continue
                    self._say(f"{store.name} is drained")
                    await asyncio.sleep(world.some_s(1.0))
                    if store.alive and not store.process.paused:
                        store.crash()
                    await self._restart(store)
        except KvPoolError as error:
            self._say(f"{store.name} is not drained: {error}")
        finally:
            await control.close()

    async def _kill_at_point(self) -> None:
        """The next process that takes a named step dies there."""
        world = self._world
        name = world.rng.choice([one for one in POINTS if not one.startswith("gpuagent")])
        victims: list[Process] = []

        def kill() -> None:
            process = current_process()
            if not victims and process.alive:
                victims.append(process)
                world.loop.kill(process)
                raise SimKilled

        arm(name, kill)
        self._say(name)
        await asyncio.sleep(world.some_s(2.0))
        disarm_all()
        self.revive()

    # Inside

    async def _evict_from(self, store: PageStoreNode) -> None:
        """Have chunks of a chain given up, as an operator would."""
        world = self._world
        control = PageStoreControl(store.endpoint, ClientConfig(call_timeout_s=1.0, connect_timeout_s=1.0))
        chain = world.rng.choice(world.chains)
        first = int(world.rng.random() * 2)
        hashes = [chunk_hash(chain, position) for position in range(first, POSITIONS)]
        try:
            await control.evict(KEYSPACES[TENANT], hashes, timeout_s=1.0)
        except KvPoolError as error:
            self._say(f"nothing evicted: {error}")
        finally:
            await control.close()

    async def _restart(self, store: PageStoreNode) -> None:
        await asyncio.sleep(self._world.some_s(1.5))
        if not store.alive or store.process.kill_at:
            store.crash()
            store.start()

    def _revive_clients(self) -> None:
        for client in self._clients:
            if not client.alive and not client.leaving:
                client.crash()
                client.start(self._operations // 2)

    def _kill_soon(self, process: Process) -> None:
        """Between any two callbacks: the process may just be in the middle of anything."""
        process.kill_at = process.callback_count + 1 + int(self._world.rng.random() * _KILL_WITHIN_CALLBACKS)

    def _woken(self, client: ClientNode, process: Process, began_s: float) -> None:
        """A client goes on that slept since then, if it is the same process still."""
        if client.process is process:
            if client.operation is not None:
                client.operation.paused_s += self._world.loop.time() - began_s
            self._wake(client)

    def _wake(self, client: ClientNode) -> None:
        self._world.loop.resume(client.process)

    def _a_store(self) -> PageStoreNode:
        return self._world.rng.choice(self._world.pagestores)

    def _a_client(self) -> ClientNode:
        return self._world.rng.choice(self._clients)

    def _an_index(self) -> IndexNode:
        return self._world.rng.choice(self._world.indexes)

    def _say(self, what: str) -> None:
        self.done.append(f"{self._world.loop.time():8.3f} {what}")
        if self._world.loop.trace is not None:
            self._world.loop.trace(f"NEMESIS {what}")


async def _cancelled(drain: Drain) -> None:
    with contextlib.suppress(KvPoolError):  # it is done, or cannot be said now: it is looked at again
        await drain.cancel()
