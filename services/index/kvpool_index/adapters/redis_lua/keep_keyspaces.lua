-- Notes that keyspaces of one tenant are in use, and stores those that are not known, up to a limit.
--
-- KEYS     names by keyspace id, time of the last use (ms) by keyspace id: a sorted set for each tenant
-- ARGV     1 keyspaces that the tenant may have; then for each: id, the entry by id ("": one that is not known stays so)
-- Returns  how many were not stored for the limit
local time = redis.call("TIME")
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local refused = 0
for i = 2, #ARGV, 2 do
  local is_known = redis.call("HEXISTS", KEYS[1], ARGV[i]) == 1
  if not is_known and ARGV[i + 1] ~= "" then
    is_known = redis.call("ZCARD", KEYS[2]) < tonumber(ARGV[1])
    if is_known then
      redis.call("HSET", KEYS[1], ARGV[i], ARGV[i + 1])
    else
      refused = refused + 1
    end
  end
  if is_known then
    redis.call("ZADD", KEYS[2], now, ARGV[i])
  end
end
return refused
