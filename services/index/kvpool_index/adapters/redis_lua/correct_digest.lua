-- Corrects a digest, unless it has changed since it was found to be wrong.
--
-- KEYS     digests of a range
-- ARGV     1 u32 ordinal, 2 the digest as it was found, 3 as it is to be; 8 bytes each, or none for 0
-- Returns  1 if it was set
if (redis.call("HGET", KEYS[1], ARGV[1]) or "") ~= ARGV[2] then
  return 0
end
if ARGV[3] == "" then
  redis.call("HDEL", KEYS[1], ARGV[1])
else
  redis.call("HSET", KEYS[1], ARGV[1], ARGV[3])
end
return 1
