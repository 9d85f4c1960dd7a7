-- Changes entries of some chunks of one group: `apply_operation` of core/entries.py, where the format is described. All of
-- the changes are done, or none.
--
-- KEYS[1]  the chain group, a hash: 8-byte chunk field -> value; "" -> u64 version, then (u32 ordinal, u32 fence) pairs.
--          The key ends with the keyspace id and the hash of the group's head
-- KEYS[2]  digests of the group's range, a hash in the same slot: u32 ordinal -> u64 (big-endian), see location_digest.py
-- KEYS[3]  groups of the range that have a chunk, a set in the same slot: keyspace id and head of each. Of a split group:
--          those that are split, others: those that are not
-- KEYS[4]  of a split group only: the part of it that has the chunks, a hash in the same slot. 8-byte chunk field -> value,
--          and u32 ordinal -> u64 digest of the node's chunks in this part, unless it has "u": then they are yet to be
--          computed
--
-- A group of more than SPLIT_CHUNKS chunks is to be split, see split_group.lua: from then on its hash has no chunks, but
-- "s" -> u32 number of its chunks, until it is empty and its time is over. All keys are named by the caller: in a slot
-- that is moving between members of a Cluster, only those are checked for being here.
--
-- ARGV[1]  milliseconds for which an emptied group remembers its version and fences
-- ARGV[2]  and every other one after it: field of a chunk
-- ARGV[3]  and every other one after it: the operation, or "" for the same as that of the chunk before.
--          u32 ordinal, u32 fence (0: not of an announce stream), u64 all_shards of the grid (0: not known),
--          then u64 added and u64 removed for gpu, staging and disk
-- Returns  {status, then for each chunk its version, negative if its value is as it was, and its value}; status 0 done,
--          1 done, and the group is to be split. Or, where nothing was done: {-1} a later stream of the node was here,
--          {-2} it is split, {-3} it is not split
local band, bor, bnot, bxor, lshift, tobit = bit.band, bit.bor, bit.bnot, bit.bxor, bit.lshift, bit.tobit
local spread = unpack
local unpack, pack, sub = struct.unpack, struct.pack, string.sub
-- Fences keep a stream out whose node has opened a later one; of more than 256 nodes in one group the oldest go. A write
-- that such a stream had on its way then counts, as one that came in time would have, until the node's next comparison.
local MAX_ENTRIES, MAX_FENCES = 64, 256
local SPLIT_CHUNKS, SPLIT_AGAIN_CHUNKS = 1024, 64

local key = KEYS[1]
local place = sub(key, -32)
local home = KEYS[4] or key  -- where the chunks' values are
local count = (#ARGV - 1) / 2
local names = {}
for n = 1, count do
  names[n] = ARGV[2 * n]
end
local got = redis.call("HMGET", key, "", "s", spread(names))
local meta, chunk_count = got[1] or "", nil
if got[2] and not KEYS[4] then
  return {-2}
elseif KEYS[4] and not got[2] then
  return {-3}
end

local function fingerprint(of_field, held)
  local hex = redis.sha1hex(place .. of_field .. held)
  return tonumber(sub(hex, 1, 8), 16), tonumber(sub(hex, 9, 16), 16)
end

-- Where the entry at `i` of a value ends; nil if it is cut off: no index wrote it, and it is left out.
local function entry_end(of_value, i)
  local flags, last = string.byte(of_value, i + 4), i + 4
  for t = 0, 2 do
    if flags and band(flags, lshift(17, t)) == lshift(17, t) then
      last = last + 8
    end
  end
  return flags and last <= #of_value and last or nil
end

local values = {}  -- by field, as of now
if got[2] then
  chunk_count = #got[2] == 4 and unpack("<I4", got[2]) or 0
  local in_part = redis.call("HMGET", home, "u", spread(names))
  for n = 1, count do
    values[names[n]] = in_part[n + 1] or ""
  end
  if in_part[1] then
    local digests, found = {}, {}  -- high and low half by ordinal; fields and values of the hash
    local flat = redis.call("HGETALL", home)
    for at = 1, #flat, 2 do
      local of_field, of_value = flat[at], flat[at + 1]
      local i = 1
      local last = #of_field == 8 and entry_end(of_value, i)
      while last do
        local other = sub(of_value, i, i + 3)
        local digest = digests[other] or {0, 0}
        local high, low = fingerprint(of_field, sub(of_value, i + 4, last))
        digests[other] = {bxor(digest[1], high), bxor(digest[2], low)}
        i = last + 1
        last = entry_end(of_value, i)
      end
    end
    for other, digest in pairs(digests) do
      if tobit(digest[1]) ~= 0 or tobit(digest[2]) ~= 0 then
        found[#found + 1] = other
        found[#found + 1] = pack(">I4I4", digest[1], digest[2])
      end
    end
    for at = 1, #found, 512 do  -- a call takes a few thousand words
      redis.call("HSET", home, spread(found, at, math.min(at + 511, #found)))
    end
    redis.call("HDEL", home, "u")
  end
else
  for n = 1, count do
    values[names[n]] = got[n + 2] or ""
  end
end

local version, old_fences = 0, ""
if #meta >= 8 and #meta % 8 == 0 then  -- else no index wrote it
  version, old_fences = unpack("<I8", meta), sub(meta, 9)
end
local fences = old_fences

-- Notes the stream of an operation; false if a later one of its node was here.
local function pass_fence(ordinal, fence)
  for i = 1, #fences, 8 do
    if unpack("<I4", fences, i) == ordinal then
      local known = unpack("<I4", fences, i + 4)
      if fence > known then
        fences = sub(fences, 1, i + 3) .. pack("<I4", fence) .. sub(fences, i + 8)
      end
      return fence >= known
    end
  end
  if #fences >= 8 * MAX_FENCES then
    fences = sub(fences, 9)
  end
  fences = fences .. pack("<I4I4", ordinal, fence)
  return true
end

-- The value after an operation, and what its node's entry was and is, without the ordinal.
-- op: 1 ordinal, 2 fence, 3 and 4 grid; of tier t: 5 + 4t and on, added and removed; always the low half first
local function changed(value, op)
  local ordinal, grid_low, grid_high = op[1], op[3], op[4]
  local before, after, mine_before, entries, found = "", "", "", 0, false
  local grid_known = grid_low ~= 0 or grid_high ~= 0
  local low, high, kept = {0, 0, 0}, {0, 0, 0}, {}
  local i = 1
  while entry_end(value, i) do
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
    entries = entries + 1
  end

  local flags, bitmaps = 0, ""
  if found or entries < MAX_ENTRIES then
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
  return before .. (flags ~= 0 and pack("<I4", ordinal) .. mine_after or "") .. after, mine_before, mine_after
end

local now
local answer, digests = {0}, {}  -- of digests, what changes: high and low half by ordinal
local is_changed, appeared, vanished = {}, 0, 0
local op
local last_value, last_op, last_result, last_before, last_after  -- chunks of a group mostly change alike
for n = 1, count do
  local field, packed = names[n], ARGV[2 * n + 1]
  if packed ~= "" then
    op = {unpack("<I4I4I4I4I4I4I4I4I4I4I4I4I4I4I4I4", packed)}
    if op[2] > 0 and not pass_fence(op[1], op[2]) then
      return {-1}
    end
  end
  local value = values[field]
  if value ~= last_value or op ~= last_op then
    last_value, last_op = value, op
    last_result, last_before, last_after = changed(value, op)
  end
  local result, mine_before, mine_after = last_result, last_before, last_after
  if result == value then
    answer[2 * n] = -version
  else
    if not now then
      local time = redis.call("TIME")
      now = tonumber(time[1]) * 1000000 + tonumber(time[2])
    end
    version = math.max(version + 1, now)
    answer[2 * n] = version
    values[field] = result
    is_changed[field] = true
    appeared = appeared + (value == "" and 1 or 0)
    vanished = vanished + (result == "" and 1 or 0)
  end
  answer[2 * n + 1] = result
  if mine_before ~= mine_after then
    local digest = digests[op[1]] or {0, 0}
    digests[op[1]] = digest
    if mine_before ~= "" then
      local high, low = fingerprint(field, mine_before)
      digest[1], digest[2] = bxor(digest[1], high), bxor(digest[2], low)
    end
    if mine_after ~= "" then
      local high, low = fingerprint(field, mine_after)
      digest[1], digest[2] = bxor(digest[1], high), bxor(digest[2], low)
    end
  end
end

if not now then
  if fences ~= old_fences then
    redis.call("HSET", key, "", pack("<I8", version) .. fences)
    if meta == "" then
      redis.call("PEXPIRE", key, ARGV[1])
    end
  end
  return answer
end

-- Numbers here are doubles, so that a digest is folded as two of 32 bits.
local function fold(digest_key, digest_field, high, low)
  local digest = redis.call("HGET", digest_key, digest_field)
  if digest and #digest == 8 then
    local before_high, before_low = unpack(">I4I4", digest)
    high, low = bxor(high, before_high), bxor(low, before_low)
  end
  if tobit(high) == 0 and tobit(low) == 0 then
    redis.call("HDEL", digest_key, digest_field)
  else
    redis.call("HSET", digest_key, digest_field, pack(">I4I4", high, low))
  end
end

for ordinal, digest in pairs(digests) do
  fold(KEYS[2], pack("<I4", ordinal), digest[1], digest[2])
  if chunk_count then
    fold(home, pack("<I4", ordinal), digest[1], digest[2])
  end
end

local set, gone = {}, {}
for field in pairs(is_changed) do
  if values[field] == "" then
    gone[#gone + 1] = field
  else
    set[#set + 1] = field
    set[#set + 1] = values[field]
  end
end
meta = pack("<I8", version) .. fences
local held  -- chunks that the group has now
if chunk_count then
  held = math.max(chunk_count + appeared - vanished, 0)
  if #set > 0 then
    redis.call("HSET", home, spread(set))
  end
  redis.call("HSET", key, "", meta, "s", pack("<I4", held))
else
  redis.call("HSET", key, "", meta, spread(set))
end
if #gone > 0 then
  redis.call("HDEL", home, spread(gone))
end
if appeared == 0 and vanished == 0 then
  return answer
end
held = held or redis.call("HLEN", key) - 1
local before = held - appeared + vanished
if held == 0 then
  redis.call("PEXPIRE", key, ARGV[1])
  redis.call("SREM", KEYS[3], place)
elseif before <= 0 then
  redis.call("PERSIST", key)
  redis.call("SADD", KEYS[3], place)
end
-- Not each time: the slot may be moving, and then it cannot be split.
local steps_before = math.floor((before - SPLIT_CHUNKS - 1) / SPLIT_AGAIN_CHUNKS)
local steps = math.floor((held - SPLIT_CHUNKS - 1) / SPLIT_AGAIN_CHUNKS)
if not chunk_count and steps >= 0 and steps > steps_before then
  answer[1] = 1
end
return answer
