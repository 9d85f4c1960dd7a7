-- Opens an announce stream of a node: its number fences all earlier ones.
--
-- KEYS     records, attempts      ARGV  1 node id, 2 incarnation, 3 announce epoch, 4 process or ""
-- Returns  {1, ordinal, number}; {0} if the lease has ended; {-1} if a newer incarnation or another process is registered; {-2} if the
--          epoch is an old one
local record = redis.call("HGET", KEYS[1], ARGV[1])
if not record or #record ~= 34 then
  return {0}
end
local time = redis.call("TIME")
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local stored, ordinal, epoch, fence, lease_end, alive, ended = struct.unpack("<I8I4I8I4I8BB", record)
local wanted = tonumber(ARGV[2])
if stored > wanted then
  return {-1}
end
if stored ~= wanted or alive == 0 or lease_end <= now then
  return {0}
end
local process = string.sub(redis.call("HGET", KEYS[2], ARGV[1]) or "", 1, 16)
if process ~= "" and process ~= ARGV[4] then
  return {-1}
end
if tonumber(ARGV[3]) < epoch then
  return {-2}
end
-- By the clock, so that a store that was rolled back does not give a number twice.
fence = math.max(fence + 1, tonumber(time[1]) - 1700000000)
redis.call("HSET", KEYS[1], ARGV[1], struct.pack("<I8I4I8I4I8BB", stored, ordinal, epoch, fence, lease_end, alive, ended))
return {1, ordinal, fence}
