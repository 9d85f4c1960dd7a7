-- Declares a node dead whose lease ran out, and forgets one that has been gone for long.
--
-- KEYS     records, infos, loads, ordinals, events, attempts
-- ARGV     1 node id, 2 incarnation, 3 milliseconds after which a node is forgotten, 4 bound of the event stream
-- Returns  1 for the one caller that declared it dead, else 0
local record = redis.call("HGET", KEYS[1], ARGV[1])
if not record or #record ~= 34 then
  return 0
end
local time = redis.call("TIME")
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local stored, ordinal, epoch, fence, lease_end, alive, ended = struct.unpack("<I8I4I8I4I8BB", record)
if stored ~= tonumber(ARGV[2]) or lease_end > now then
  return 0
end
if alive == 1 then
  local dead = struct.pack("<I8I4I8I4I8BB", stored, ordinal, epoch, fence, lease_end, 0, ended)
  redis.call("HSET", KEYS[1], ARGV[1], dead)
  local info = redis.call("HGET", KEYS[2], ARGV[1]) or ""
  redis.call("XADD", KEYS[5], "MAXLEN", "~", ARGV[4], "*", "e", struct.pack("<BI8", 0, stored) .. info)
  return 1
end
if lease_end + tonumber(ARGV[3]) * 1000 <= now then
  redis.call("HDEL", KEYS[1], ARGV[1])
  redis.call("HDEL", KEYS[2], ARGV[1])
  redis.call("HDEL", KEYS[3], ARGV[1])
  redis.call("HDEL", KEYS[6], ARGV[1])
  redis.call("HDEL", KEYS[4], struct.pack("<I4", ordinal))
end
return 0
