-- Grants a lease to a node, for a new incarnation or again for the one it holds.
--
-- KEYS     records, infos, loads (by node id), ordinals, events, attempts (by node id): hashes and a stream in one slot
--          A record: u64 incarnation, u32 ordinal, u64 epoch, u32 fence, u64 lease end in us, u8 alive, u8 ended
--          Attempts: 16 bytes of the process, u64 its highest attempt, 16 bytes of each process before it
-- ARGV     1 node id, 2 incarnation held (0: none), 3 last incarnation remembered, 4 TTL in ms, 5 info,
--          6 candidates for an ordinal, u32 each, 7 bound of the event stream, 8 process or "", 9 attempt,
--          10 processes remembered, 11 microseconds that an incarnation may be ahead of the time
-- Returns  {incarnation, ordinal, epoch, what happened}: 1 if nothing was changed because the attempt is an old one, 2 if
--          a live lease of another process was taken over, else 0;
--          {-1, stored} if a newer incarnation, a later process or another one's incarnation is stored; {-2} if no candidate was free;
--          {-3} if an incarnation asked for is further ahead than ARGV 11
local time = redis.call("TIME")
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local held, last = tonumber(ARGV[2]), tonumber(ARGV[3])
local ahead = now + tonumber(ARGV[11])
if held > ahead or last > ahead then
  return {-3}
end
local stored, ordinal, epoch, fence, lease_end, alive, ended = 0, 0, 0, 0, 0, 0, 1
local record = redis.call("HGET", KEYS[1], ARGV[1])
if record and #record ~= 34 then
  record = nil -- not written by an index
end
if record then
  stored, ordinal, epoch, fence, lease_end, alive, ended = struct.unpack("<I8I4I8I4I8BB", record)
  if stored > ahead or epoch > ahead then
    stored, epoch = 0, 0 -- neither: it would leave no number for the node's next start
  end
end
local attempts = record and redis.call("HGET", KEYS[6], ARGV[1]) or ""
local again = ARGV[8] ~= "" and string.sub(attempts, 1, 16) == ARGV[8]
if again and tonumber(ARGV[9]) <= struct.unpack("<I8", attempts, 17) then
  return {stored, ordinal, epoch, 1}
end
for i = 25, #attempts, 16 do
  if string.sub(attempts, i, i + 15) == ARGV[8] then
    return {-1, stored}
  end
end
-- An incarnation is given again only to the process that has it: no other knows it but from the index.
local is_others = attempts ~= "" and not again and stored == held
if held > 0 and (stored > held or is_others) then
  return {-1, stored}
end
local taken_over = alive == 1 and lease_end > now and not again and held == 0
local granted = held
if held == 0 and again and ended == 0 and stored > last then
  granted = stored
elseif held == 0 then
  granted = math.max(stored, last, now) + 1
end
if granted ~= stored or ended == 1 then
  local chosen
  for i = 1, #ARGV[6], 4 do
    local candidate = string.sub(ARGV[6], i, i + 3)
    if redis.call("HSETNX", KEYS[4], candidate, ARGV[1]) == 1 then
      chosen = struct.unpack("<I4", candidate)
      break
    end
  end
  if not chosen then
    return {-2}
  end
  if record and ended == 0 then
    redis.call("HDEL", KEYS[4], struct.pack("<I4", ordinal))
  end
  redis.call("HDEL", KEYS[3], ARGV[1])
  ordinal = chosen
end
epoch = math.max(epoch + 1, now)
lease_end = now + tonumber(ARGV[4]) * 1000
redis.call("HSET", KEYS[1], ARGV[1], struct.pack("<I8I4I8I4I8BB", granted, ordinal, epoch, fence, lease_end, 1, 0))
redis.call("HSET", KEYS[2], ARGV[1], ARGV[5])
if ARGV[8] ~= "" then
  local before = string.sub(attempts, 25)
  if not again then
    before = string.sub(string.sub(attempts, 1, 16) .. before, 1, 16 * (tonumber(ARGV[10]) - 1))
  end
  redis.call("HSET", KEYS[6], ARGV[1], ARGV[8] .. struct.pack("<I8", ARGV[9]) .. before)
else
  redis.call("HDEL", KEYS[6], ARGV[1])
end
redis.call("XADD", KEYS[5], "MAXLEN", "~", ARGV[7], "*", "e", struct.pack("<BI8", 1, granted) .. ARGV[5])
return {granted, ordinal, epoch, taken_over and 2 or 0}
