-- Lengthens a lease.
--
-- KEYS     records, loads      ARGV  1 node id, 2 incarnation, 3 TTL in ms, 4 load
-- Returns  1; 0 if the lease has ended; -1 if a newer incarnation is registered
local record = redis.call("HGET", KEYS[1], ARGV[1])
if not record or #record ~= 34 then
  return 0
end
local time = redis.call("TIME")
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local stored, ordinal, epoch, fence, lease_end, alive, ended = struct.unpack("<I8I4I8I4I8BB", record)
local wanted = tonumber(ARGV[2])
if stored > wanted then
  return -1
end
if stored ~= wanted or alive == 0 or lease_end <= now then
  return 0
end
lease_end = now + tonumber(ARGV[3]) * 1000
redis.call("HSET", KEYS[1], ARGV[1], struct.pack("<I8I4I8I4I8BB", stored, ordinal, epoch, fence, lease_end, 1, 0))
redis.call("HSET", KEYS[2], ARGV[1], ARGV[4])
return 1
