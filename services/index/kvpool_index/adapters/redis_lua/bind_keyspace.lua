-- Binds a keyspace name of a tenant, unless it is bound.
--
-- KEYS     names of the tenant, names by keyspace id
-- ARGV     1 name, 2 what it is to stand for (16-byte id, then the encoding), 3 the entry by id
-- Returns  {1 if this call bound it, what it stands for now}
local created = redis.call("HSETNX", KEYS[1], ARGV[1], ARGV[2])
local bound = redis.call("HGET", KEYS[1], ARGV[1])
if bound == ARGV[2] then
  redis.call("HSETNX", KEYS[2], string.sub(bound, 1, 16), ARGV[3])
end
return {created, bound}
