"""The Lua that runs inside Redis (7.0 and later, Valkey 7.2 and later), and the keys it touches.

Per data shard, all under one hash tag `{namespace:shard}`:
    dir         hash    level, split, blocks: the state of the linear hashing below
    b:<number>  hash    fingerprint (8 bytes) -> owners (4 bytes little-endian slot each); a bucket of about 64 blocks
                        stays a listpack, which is what makes a block cost some 20 bytes
In shard 0 besides:
    control     hash    incarnation (random, made with the first claim), next_slot
    workers     hash    worker id -> epoch:slot:sequence:started_ms:expires_ms
    dead        zset    slot -> time in ms from which its entries may be swept
    stream      stream  field b: what happened, see event_codec.py

A slot stands for one life of one worker and is never used again: whoever holds an old slot, owns nothing. Buckets are
split one at a time as blocks are added (linear hashing), so their number follows the size without a rehash. A script
names the buckets itself, which every cluster accepts because they share the tag of the key that it declares.
"""

from __future__ import annotations

INITIAL_LEVEL = 4
BLOCKS_PER_BUCKET = 64

_COMMON = f"""
local dir, prefix = KEYS[1], ARGV[1]
local state = redis.call('HMGET', dir, 'level', 'split', 'blocks')
local level = tonumber(state[1]) or {INITIAL_LEVEL}
local split = tonumber(state[2]) or 0
local blocks = tonumber(state[3]) or 0
local size = 2 ^ level
local function hash(f)
  local a, b, c, d = string.byte(f, 1, 4)
  return a + b * 256 + c * 65536 + d * 16777216
end
local function bucket(f)
  local h = hash(f)
  local i = h % size
  if i < split then i = h % (2 * size) end
  return prefix .. string.format('%d', i)
end
local function listed(owners)
  local count = math.min(math.floor(#owners / 4), 255)
  return string.char(count) .. string.sub(owners, 1, 4 * count)
end
local function find(owners, slot)
  for i = 1, #owners, 4 do
    if string.sub(owners, i, i + 3) == slot then return i end
  end
end
"""

# ARGV: prefix, slot, fingerprints stored, fingerprints removed, entry ttl in s
APPLY = (
    _COMMON
    + f"""
local slot, stored, removed, ttl = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local touched = {{}}
for i = 1, #removed, 8 do
  local f = string.sub(removed, i, i + 7)
  local key = bucket(f)
  local owners = redis.call('HGET', key, f)
  local at = owners and find(owners, slot)
  if at then
    local rest = string.sub(owners, 1, at - 1) .. string.sub(owners, at + 4)
    if #rest == 0 then
      redis.call('HDEL', key, f)
      blocks = blocks - 1
    else
      redis.call('HSET', key, f, rest)
    end
  end
end
for i = 1, #stored, 8 do
  local f = string.sub(stored, i, i + 7)
  local key = bucket(f)
  touched[key] = true
  local owners = redis.call('HGET', key, f)
  if not owners then
    redis.call('HSET', key, f, slot)
    blocks = blocks + 1
  elseif not find(owners, slot) then
    redis.call('HSET', key, f, owners .. slot)
  end
end
while blocks > {BLOCKS_PER_BUCKET} * (size + split) do
  local from = prefix .. string.format('%d', split)
  local to = prefix .. string.format('%d', size + split)
  local all = redis.call('HGETALL', from)
  for i = 1, #all, 2 do
    if hash(all[i]) % (2 * size) >= size then
      redis.call('HSET', to, all[i], all[i + 1])
      redis.call('HDEL', from, all[i])
      touched[to] = true
    end
  end
  split = split + 1
  if split == size then level, size, split = level + 1, 2 * size, 0 end
end
for key in pairs(touched) do redis.call('EXPIRE', key, ttl) end
redis.call('HSET', dir, 'level', level, 'split', split, 'blocks', blocks)
redis.call('EXPIRE', dir, 2 * ttl)
return blocks
"""
)

# ARGV: prefix, fingerprints. Returns, for each up to the first that is absent, its number of owners (u8) and slots.
LOOKUP = (
    _COMMON
    + """
local wanted, found = ARGV[2], {}
for i = 1, #wanted, 8 do
  local f = string.sub(wanted, i, i + 7)
  local owners = redis.call('HGET', bucket(f), f)
  if not owners then break end
  found[#found + 1] = listed(owners)
end
return table.concat(found)
"""
)

# ARGV: prefix, first bucket, number of buckets. Returns the number of all buckets, and entries: fingerprint, owners
# (u8 number, slots). A caller that reads upwards misses nothing: splitting moves entries to higher numbers only.
DUMP = (
    _COMMON
    + """
local first, out = tonumber(ARGV[2]), {}
local last = math.min(first + tonumber(ARGV[3]), size + split) - 1
for i = first, last do
  local all = redis.call('HGETALL', prefix .. string.format('%d', i))
  for j = 1, #all, 2 do
    if #all[j] == 8 then out[#out + 1] = all[j] .. listed(all[j + 1]) end
  end
end
return {size + split, table.concat(out)}
"""
)

# ARGV: prefix, first bucket, number of buckets, dead slots (4 bytes each), entry ttl in s. Returns number of buckets.
SWEEP = (
    _COMMON
    + """
local first, dead, ttl = tonumber(ARGV[2]), {}, ARGV[5]
for i = 1, #ARGV[4], 4 do dead[string.sub(ARGV[4], i, i + 3)] = true end
local last = math.min(first + tonumber(ARGV[3]), size + split) - 1
for i = first, last do
  local key = prefix .. string.format('%d', i)
  local all = next(dead) and redis.call('HGETALL', key) or {}
  for j = 1, #all, 2 do
    local alive = {}
    for k = 1, #all[j + 1], 4 do
      local slot = string.sub(all[j + 1], k, k + 3)
      if not dead[slot] then alive[#alive + 1] = slot end
    end
    local rest = table.concat(alive)
    if #rest == 0 then
      redis.call('HDEL', key, all[j])
      blocks = blocks - 1
    elseif #rest < #all[j + 1] then
      redis.call('HSET', key, all[j], rest)
    end
  end
  redis.call('EXPIRE', key, ttl)
end
if blocks ~= tonumber(state[3]) then redis.call('HSET', dir, 'blocks', blocks) end
redis.call('EXPIRE', dir, 2 * ttl)
return size + split
"""
)

_WORKERS = """
local control, workers, dead, stream = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function record(worker)
  local text = redis.call('HGET', workers, worker)
  if not text then return nil end
  local epoch, slot, sequence, started, expires = string.match(text, '^([^:]+):(%d+):(%d+):(%d+):(%d+)$')
  if not epoch then return nil end
  return {epoch = epoch, slot = slot, sequence = sequence, started = tonumber(started), expires = tonumber(expires)}
end
local function may_write(known, epoch, started)
  return not known or known.epoch == epoch or known.expires < now or known.started < started
end
"""

# ARGV: worker, epoch, started ms, candidate incarnation, candidate first slot, ms until an uncommitted slot is dead.
# Returns {"OK", slot} or {"FENCED"}: a younger life of the worker is there.
CLAIM = (
    _WORKERS
    + """
if not may_write(record(ARGV[1]), ARGV[2], tonumber(ARGV[3])) then return {'FENCED'} end
if redis.call('HSETNX', control, 'incarnation', ARGV[4]) == 1 then
  redis.call('HSET', control, 'next_slot', ARGV[5])
end
local slot = redis.call('HINCRBY', control, 'next_slot', 1)
redis.call('ZADD', dead, now + ARGV[6], slot)
return {'OK', slot}
"""
)

# ARGV: worker, epoch, started ms, slot, sequence, lease ms, stream length, payload. Makes a filled slot the worker's.
COMMIT = (
    _WORKERS
    + """
local known = record(ARGV[1])
if not may_write(known, ARGV[2], tonumber(ARGV[3])) then return 'FENCED' end
if known and known.slot ~= ARGV[4] then redis.call('ZADD', dead, now, known.slot) end
redis.call('ZREM', dead, ARGV[4])
local expires = string.format('%d', now + ARGV[6])
redis.call('HSET', workers, ARGV[1], table.concat({ARGV[2], ARGV[4], ARGV[5], ARGV[3], expires}, ':'))
redis.call('XADD', stream, 'MAXLEN', '~', ARGV[7], '*', 'b', ARGV[8])
return 'OK'
"""
)

# ARGV: worker, epoch, slot, sequence before and after, lease ms, stream length, payloads … Moves position and lease on.
# Returns OK, LOST (Redis does not know this life up to the sequence before: claim anew) or FENCED.
ADVANCE = (
    _WORKERS
    + """
local known = record(ARGV[1])
if not known then return 'LOST' end
if known.epoch ~= ARGV[2] then return 'FENCED' end
if known.slot ~= ARGV[3] or known.sequence ~= ARGV[4] then return 'LOST' end
local expires = string.format('%d', now + ARGV[6])
local started = string.format('%d', known.started)
redis.call('HSET', workers, ARGV[1], table.concat({ARGV[2], ARGV[3], ARGV[5], started, expires}, ':'))
for i = 8, #ARGV do redis.call('XADD', stream, 'MAXLEN', '~', ARGV[7], '*', 'b', ARGV[i]) end
return 'OK'
"""
)

# ARGV: stream length, payload, worker, epoch or '' for any. Takes a worker off the list; its slot may be swept.
BURY = (
    _WORKERS
    + """
local known = record(ARGV[3])
if not known or (ARGV[4] ~= '' and known.epoch ~= ARGV[4]) then return 0 end
redis.call('HDEL', workers, ARGV[3])
redis.call('ZADD', dead, now, known.slot)
redis.call('XADD', stream, 'MAXLEN', '~', ARGV[1], '*', 'b', ARGV[2])
return 1
"""
)

# Returns {now ms, all workers flat}.
ALIVE = _WORKERS + "return {now, redis.call('HGETALL', workers)}"

# Returns {now ms, all workers flat, incarnation, run id of the server, last stream id, slots to sweep}.
STATUS = (
    _WORKERS
    + """
local last = '0-0'
if redis.call('EXISTS', stream) == 1 then
  local info = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then last = info[i + 1] end
  end
end
local due = redis.call('ZRANGEBYSCORE', dead, '-inf', now, 'LIMIT', 0, 1024)
local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') or ''
return {now, redis.call('HGETALL', workers), redis.call('HGET', control, 'incarnation') or '', run_id, last, due}
"""
)


class Keys:
    """Names of the keys of one namespace."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def directory(self, shard: int) -> str:
        return f"ww:{{{self._namespace}:{shard}}}:dir"

    def bucket_prefix(self, shard: int) -> str:
        return f"ww:{{{self._namespace}:{shard}}}:b:"

    @property
    def stream(self) -> str:
        return f"ww:{{{self._namespace}:0}}:stream"

    @property
    def dead(self) -> str:
        return f"ww:{{{self._namespace}:0}}:dead"

    def lock(self, name: str) -> str:
        return f"ww:{{{self._namespace}:0}}:lock:{name}"

    @property
    def control(self) -> tuple[str, str, str, str]:
        """In the order in which the scripts on workers declare them."""
        tag = f"ww:{{{self._namespace}:0}}"
        return f"{tag}:control", f"{tag}:workers", f"{tag}:dead", f"{tag}:stream"
