-- Binds a keyspace name of a tenant, unless it is bound.
--
-- KEYS     names of the tenant, names by keyspace id, times of the last use, see keep_keyspaces.lua
-- ARGV     1 name, 2 what it is to stand for (16-byte id, then the encoding), 3 the entry by id
-- Returns  {1 if this call bound it, what it stands for now}
local created = redis.call("HSETNX", KEYS[1], ARGV[1], ARGV[2])
local bound = redis.call("HGET", KEYS[1], ARGV[1])
if bound == ARGV[2] then
  local time = redis.call("TIME")
  local id = string.sub(bound, 1, 16)
  redis.call("HSETNX", KEYS[2], id, ARGV[3])
  redis.call("ZADD", KEYS[3], tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000), id)
end
return {created, bound}
