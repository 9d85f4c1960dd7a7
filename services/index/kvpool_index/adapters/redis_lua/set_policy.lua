-- Sets the policy of a keyspace.
--
-- KEYS     policies by keyspace id, the version of all policies
-- ARGV     1 keyspace id, 2 the policy, 3 the version it has (decimal), or 0 for a new one that is higher than all,
--          4 microseconds that a version may be ahead of the time: one further ahead is of no index, and nothing is set
-- Returns  the version that the keyspace's policy has now: a higher one than ARGV 3 if the policy there is newer
local current = tonumber(redis.call("GET", KEYS[2]) or "0") or 0
local wanted = tonumber(ARGV[3])
local time = redis.call("TIME")
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
if wanted == 0 then
  wanted = math.max(current, now) + 1
elseif wanted > now + tonumber(ARGV[4]) then
  return ARGV[3]
else
  local entry = redis.call("HGET", KEYS[1], ARGV[1])
  local stored = entry and tonumber(string.match(entry, "^%d+"))
  if stored and stored >= wanted then
    return string.format("%.0f", stored)
  end
end
local version = string.format("%.0f", wanted)
redis.call("HSET", KEYS[1], ARGV[1], version .. " " .. ARGV[2])
redis.call("SET", KEYS[2], string.format("%.0f", math.max(current, wanted)))
return version
