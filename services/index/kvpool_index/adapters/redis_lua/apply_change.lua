-- Changes one node's entry of one chunk: `apply_operation` of core/entries.py, where the format is described.
--
-- KEYS[1]  the chain group, a hash: 8-byte chunk field -> value; "" -> u64 version, then (u32 ordinal, u32 fence) pairs.
--          The key ends with the keyspace id and the hash of the group's head
-- KEYS[2]  digests of the group's range, a hash in the same slot: u32 ordinal -> u64 (big-endian), see location_digest.py
-- KEYS[3]  groups of the range that have a chunk, a set in the same slot: keyspace id and head of each
-- ARGV[1]  field of the chunk
-- ARGV[2]  u32 ordinal, u32 fence (0: not of an announce stream), u64 all_shards of the grid (0: not known),
--          then u64 added and u64 removed for gpu, staging and disk
-- ARGV[3]  milliseconds for which an emptied group remembers its version and fences
-- Returns  {status, version, value}; status 1 changed, 0 as it was, -1 refused: a later stream of the node was here
local band, bor, bnot, lshift, tobit = bit.band, bit.bor, bit.bnot, bit.lshift, bit.tobit
local unpack, pack, sub = struct.unpack, struct.pack, string.sub
local MAX_ENTRIES, MAX_FENCES = 64, 32

local key, field = KEYS[1], ARGV[1]
-- 1 ordinal, 2 fence, 3 and 4 grid; of tier t: 5 + 4t and on, added and removed; always the low half first
local op = {unpack("<I4I4I4I4I4I4I4I4I4I4I4I4I4I4I4I4", ARGV[2])}
local ordinal, fence, grid_low, grid_high = op[1], op[2], op[3], op[4]
local got = redis.call("HMGET", key, "", field)
local meta, value = got[1] or "", got[2] or ""

local version, old_fences = 0, ""
if meta ~= "" then
  version, old_fences = unpack("<I8", meta), sub(meta, 9)
end

local fences = old_fences
if fence > 0 then
  local at
  for i = 1, #fences, 8 do
    if unpack("<I4", fences, i) == ordinal then
      at = i
      break
    end
  end
  if at then
    if fence < unpack("<I4", fences, at + 4) then
      return {-1, version, value}
    end
    fences = sub(fences, 1, at + 3) .. pack("<I4", fence) .. sub(fences, at + 8)
  else
    if #fences >= 8 * MAX_FENCES then
      fences = sub(fences, 9)
    end
    fences = fences .. pack("<I4I4", ordinal, fence)
  end
end

local before, after, mine_before, count, found = "", "", "", 0, false
local grid_known = grid_low ~= 0 or grid_high ~= 0
local low, high, kept = {0, 0, 0}, {0, 0, 0}, {}
local i = 1
while i <= #value do
  local start, other, flags = i, unpack("<I4B", value, i)
  local mine = other == ordinal
  i = i + 5
  for t = 0, 2 do
    if band(flags, lshift(1, t)) ~= 0 then
      if band(flags, lshift(16, t)) ~= 0 then
        if mine then
          low[t + 1], high[t + 1] = unpack("<I4I4", value, i)
        end
        i = i + 8
      elseif mine and grid_known then
        low[t + 1], high[t + 1] = grid_low, grid_high
      elseif mine then
        -- Which shards these are is not known: they stay as they are, or are forgotten with a change of this tier.
        local a = 5 + 4 * t
        kept[t + 1] = op[a] == 0 and op[a + 1] == 0 and op[a + 2] == 0 and op[a + 3] == 0
      end
    end
  end
  if mine then
    found, mine_before = true, sub(value, start + 4, i - 1)
  elseif other < ordinal then
    before = before .. sub(value, start, i - 1)
  else
    after = after .. sub(value, start, i - 1)
  end
  count = count + 1
end

local flags, bitmaps = 0, ""
if found or count < MAX_ENTRIES then
  for t = 0, 2 do
    local a = 5 + 4 * t
    local l = band(bor(low[t + 1], op[a]), bnot(op[a + 2]))
    local h = band(bor(high[t + 1], op[a + 1]), bnot(op[a + 3]))
    if kept[t + 1] then
      flags = bor(flags, lshift(1, t))
    elseif l ~= 0 or h ~= 0 then
      flags = bor(flags, lshift(1, t))
      if l ~= tobit(grid_low) or h ~= tobit(grid_high) then
        flags = bor(flags, lshift(16, t))
        bitmaps = bitmaps .. pack("<I4I4", l, h)
      end
    end
  end
end
local mine_after = flags ~= 0 and pack("B", flags) .. bitmaps or ""
local result = before .. (flags ~= 0 and pack("<I4", ordinal) .. mine_after or "") .. after

if result == value then
  if fences ~= old_fences then
    redis.call("HSET", key, "", pack("<I8", version) .. fences)
    if meta == "" then
      redis.call("PEXPIRE", key, ARGV[3])
    end
  end
  return {0, version, value}
end

if mine_before ~= mine_after then
  -- Both parts of the digest are folded as 32 bits: numbers here are doubles.
  local digest_field, chunk = pack("<I4", ordinal), sub(key, -32) .. field
  local high, low = 0, 0
  local digest = redis.call("HGET", KEYS[2], digest_field)
  if digest then
    high, low = unpack(">I4I4", digest)
  end
  for _, held in ipairs({mine_before, mine_after}) do
    if held ~= "" then
      local hex = redis.sha1hex(chunk .. held)
      high = bit.bxor(high, tonumber(sub(hex, 1, 8), 16))
      low = bit.bxor(low, tonumber(sub(hex, 9, 16), 16))
    end
  end
  if tobit(high) == 0 and tobit(low) == 0 then
    redis.call("HDEL", KEYS[2], digest_field)
  else
    redis.call("HSET", KEYS[2], digest_field, pack(">I4I4", high, low))
  end
end

local now = redis.call("TIME")
version = math.max(version + 1, tonumber(now[1]) * 1000000 + tonumber(now[2]))
meta = pack("<I8", version) .. fences
if result == "" then
  redis.call("HSET", key, "", meta)
  redis.call("HDEL", key, field)
  if redis.call("HLEN", key) == 1 then
    redis.call("PEXPIRE", key, ARGV[3])
    redis.call("SREM", KEYS[3], sub(key, -32))
  end
else
  redis.call("HSET", key, "", meta, field, result)
  if value == "" and redis.call("HLEN", key) == 2 then
    redis.call("PERSIST", key)
    redis.call("SADD", KEYS[3], sub(key, -32))
  end
end
return {1, version, result}
