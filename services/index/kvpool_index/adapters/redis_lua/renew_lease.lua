-- Lengthens leases.
--
-- KEYS     records, loads      ARGV  for each node: node id, incarnation, TTL in ms, load ("": it stays)
-- Returns  for each: 1; 0 if the lease has ended; -1 if a newer incarnation is registered
local time = redis.call("TIME")
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local answers = {}
for i = 1, #ARGV, 4 do
  local answer = 0
  local record = redis.call("HGET", KEYS[1], ARGV[i])
  if record and #record == 34 then
    local stored, ordinal, epoch, fence, lease_end, alive = struct.unpack("<I8I4I8I4I8BB", record)
    local wanted = tonumber(ARGV[i + 1])
    if stored > wanted then
      answer = -1
    elseif stored == wanted and alive == 1 and lease_end > now then
      answer = 1
      lease_end = now + tonumber(ARGV[i + 2]) * 1000
      redis.call("HSET", KEYS[1], ARGV[i], struct.pack("<I8I4I8I4I8BB", stored, ordinal, epoch, fence, lease_end, 1, 0))
      if ARGV[i + 3] ~= "" then
        redis.call("HSET", KEYS[2], ARGV[i], ARGV[i + 3])
      end
    end
  end
  answers[#answers + 1] = answer
end
return answers
