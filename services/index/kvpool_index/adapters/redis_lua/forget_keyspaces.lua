-- Forgets keyspaces of a tenant that have not been used for long, with their names.
--
-- KEYS     names of the tenant, names by keyspace id, times of the last use, see keep_keyspaces.lua
-- ARGV     1 milliseconds without use; then for each name of a keyspace: its id, the name ("": it has none)
-- Returns  the ids of those that were forgotten
local time = redis.call("TIME")
local latest = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000) - tonumber(ARGV[1])
local is_forgotten, forgotten = {}, {}
for i = 2, #ARGV, 2 do
  local id, name = ARGV[i], ARGV[i + 1]
  local used = redis.call("ZSCORE", KEYS[3], id)
  if used and tonumber(used) <= latest then
    redis.call("ZREM", KEYS[3], id)
    redis.call("HDEL", KEYS[2], id)
    is_forgotten[id] = true
    forgotten[#forgotten + 1] = id
  elseif not used and redis.call("HEXISTS", KEYS[2], id) == 0 then
    is_forgotten[id] = true -- with another of its names
  end
  if is_forgotten[id] and name ~= "" and string.sub(redis.call("HGET", KEYS[1], name) or "", 1, 16) == id then
    redis.call("HDEL", KEYS[1], name)
  end
end
return forgotten
