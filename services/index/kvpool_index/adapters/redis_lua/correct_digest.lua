-- Corrects a digest, unless it has changed since it was found to be wrong.
--
-- KEYS[1]  digests of a range, or a part of a split group
-- KEYS[2]  of a part only: digests of its range, which change by the same difference
-- KEYS[3]  of a part only: its group, in the same slot as both
-- ARGV     1 u32 ordinal, 2 the digest as it was found, 3 as it is to be; 8 bytes each, or none for 0
-- Returns  1 if it was set
if (redis.call("HGET", KEYS[1], ARGV[1]) or "") ~= ARGV[2] then
  return 0
end
if KEYS[3] and (redis.call("HEXISTS", KEYS[3], "s") == 0 or redis.call("HEXISTS", KEYS[1], "u") == 1) then
  return 0
end
local function set(key, digest)
  if digest == "" then
    redis.call("HDEL", key, ARGV[1])
  else
    redis.call("HSET", key, ARGV[1], digest)
  end
end
set(KEYS[1], ARGV[3])
if KEYS[2] then
  local difference = ""
  local of_range = redis.call("HGET", KEYS[2], ARGV[1]) or ""
  local zero = string.rep("\0", 8)
  local function byte(digest, i)
    return string.byte(digest ~= "" and digest or zero, i)
  end
  for i = 1, 8 do
    local folded = bit.bxor(byte(of_range, i), byte(ARGV[2], i), byte(ARGV[3], i))
    difference = difference .. string.char(folded)
  end
  set(KEYS[2], difference ~= zero and difference or "")
end
return 1
