-- Ends the lease of an incarnation for good: its ordinal will not come back.
--
-- KEYS     records, infos, ordinals, events, attempts
-- ARGV     1 node id, 2 incarnation, 3 bound of the event stream, 4 process or ""
-- Returns  1 if a live lease was ended, else 0; -1 if another process registered this incarnation
local record = redis.call("HGET", KEYS[1], ARGV[1])
if not record or #record ~= 34 then
  return 0
end
local stored, ordinal, epoch, fence, lease_end, alive, ended = struct.unpack("<I8I4I8I4I8BB", record)
if stored ~= tonumber(ARGV[2]) or ended == 1 then
  return 0
end
local process = string.sub(redis.call("HGET", KEYS[5], ARGV[1]) or "", 1, 16)
if process ~= "" and process ~= ARGV[4] then
  return -1
end
local time = redis.call("TIME")
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
redis.call("HSET", KEYS[1], ARGV[1], struct.pack("<I8I4I8I4I8BB", stored, ordinal, epoch, fence, now, 0, 1))
redis.call("HDEL", KEYS[3], struct.pack("<I4", ordinal))
if alive == 1 then
  local info = redis.call("HGET", KEYS[2], ARGV[1]) or ""
  redis.call("XADD", KEYS[4], "MAXLEN", "~", ARGV[3], "*", "e", struct.pack("<BI8", 0, stored) .. info)
end
return alive
