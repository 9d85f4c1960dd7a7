-- Puts the chunks of a group that has many into parts, by the first byte of their fields.
--
-- KEYS[1]  the group, see apply_change.lua
-- KEYS[2]  groups of its range that are not split, KEYS[3] those that are
-- KEYS[4]  and the 255 after it: its parts. None is there, unless the store lost the group but not these
-- ARGV[1]  chunks that a group may have without being split
-- Returns  1 if it was split
--
-- Digests of the parts are left to the change that needs that of one: very many nodes may have each of the chunks. Field "u" of
-- a part says so.
local spread = unpack
local key = KEYS[1]
local place = string.sub(key, -32)
local chunk_count = redis.call("HLEN", key) - 1
if chunk_count <= tonumber(ARGV[1]) then
  return 0
end
local meta, parts = "", {}
local flat = redis.call("HGETALL", key)
for i = 1, #flat, 2 do
  local field = flat[i]
  if field == "" then
    meta = flat[i + 1]
  else
    local number = string.byte(field)
    local part = parts[number] or {"u", ""}
    parts[number] = part
    part[#part + 1] = field
    part[#part + 1] = flat[i + 1]
  end
end
redis.call("UNLINK", key, spread(KEYS, 4))
for number, part in pairs(parts) do
  for i = 1, #part, 512 do  -- a call takes a few thousand words
    redis.call("HSET", KEYS[4 + number], spread(part, i, math.min(i + 511, #part)))
  end
end
redis.call("HSET", key, "", meta, "s", struct.pack("<I4", chunk_count))
redis.call("SREM", KEYS[2], place)
redis.call("SADD", KEYS[3], place)
return 1
