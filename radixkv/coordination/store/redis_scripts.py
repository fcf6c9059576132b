"""Lua scripts that run inside Redis: each compares the writer with the registration, then writes, atomically.

All keys of a script carry one hash tag, so they are on one shard. Stream entries have the id ``epoch-seq``: ids grow
with every boot, a cursor is a position in the log, and a trim is exact. Numbers above 2^31 are formatted by ``%.0f``,
because Lua would print them with an exponent.

Any writer may have made the records that a script reads. Numbers are read by ``count``, which accepts up to 15 digits
and nothing else. A registration with unreadable numbers, or a log that takes no entry, is LOST: its replica registers
again, and ``boot`` begins from its own writes. Epochs and log numbers close to 15 digits also start again. The client
deletes a key of another type (``REPAIR``), then runs the script again.

    boot      KEYS meta lease ev snapmeta load    ARGV epoch-before retention-ms snap-prefix process
              field value … -> epoch. Fences the last registration, drops its lease and snapshot, begins a new log;
              records until when another process that had the id may think that its lease runs.
    append    KEYS meta ev                        ARGV epoch nonce first-seq entries (see wire.pack_entries)
    beat      KEYS meta lease ev snapmeta load    ARGV epoch nonce lease-ms retention-ms snap-prefix count
              (field value) … of the registration, count of these, and of the load -> also Redis's time in ms; 0 for
              last_seq if the log doesn't follow the snapshot, or goes on behind its last number
    snapshot  KEYS meta ev snapmeta               ARGV epoch nonce seq keep-from anew retention-ms checksum
              snap-prefix chunk … anew=1: the snapshot replaces all that was written. It gets a number that no
              reader has seen, and an empty entry behind it lets every reader see the gap.
    leave     KEYS meta lease load                ARGV epoch nonce proof -> also until when an earlier process
              may serve, in ms since 1970; 0: none

    limit     KEYS q                              ARGV stamp-expected stamp-and-proof retention-ms blocks, or empty
              for none -> 1 if the stamp was the expected one
    reserve   KEYS q                              ARGV replica epoch nonce fingerprint blocks keep-ms retention-ms
              limit-or-empty stamp-and-proof-or-empty longest-ms -> {verdict, granted, others}
    raise     KEYS q                              ARGV expected-record generation token raised -> 1 if it matched
    confirm   KEYS q                              ARGV expected-record replica confirmed max -> 1 if it matches;
              2 if the hash has more than max fields now
    tenant    KEYS q                              -> {now-ms, field value …}
    announce  KEYS purges                         ARGV tenant max: gives the position after the last one, at least the
              time in ms. A store that lost a position must not reuse it: readers already past it would miss the
              announcement. Positions a week ahead are not from replicas, and are removed
    announced KEYS purges                         ARGV after -> {tenant, position …}
    unannounced KEYS purges                       ARGV (tenant position) … -> the indices, from 1, of those that are
              missing, or only before that position

    job       KEYS job                            ARGV ttl-ms field value … -> 1 if it is new
    list      KEYS jobs                           ARGV job ttl-ms max -> {how many, job above the limit …}
    own       KEYS job                            ARGV owner expected -> 1 if replaced
    add       KEYS job                            ARGV owner field epoch nonce value max-parts -> 1 if added
    part      KEYS job                            ARGV field value -> 1 if replaced

    keep      KEYS pins                           ARGV pin ttl-ms stated max anew most -> 1 unless there are too many
    unpin     KEYS pins                           ARGV pin keep-ms stated -> 1 unless it was ended before
    state     KEYS pins                           ARGV pin replica epoch value max-parts -> 1 if set

    note      KEYS n                              ARGV max (field value) … -> how many have no room

    repair    KEYS any                            ARGV type … of each -> the indices, from 1, of those that had another
              type, and are deleted

The first five, except ``boot``, answer ``{verdict, last_seq, …}``; the verdict is OK, GAP, LOST or FENCED.
"""

from __future__ import annotations

_COMMON = """
local LARGEST = 900000000000000
local function whole(number) return string.format('%.0f', number) end
local function count(value)
  if type(value) == 'string' and #value <= 15 and string.find(value, '^%d+$') then return tonumber(value) end
  return nil
end
local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
"""

_PARTS = """
local function part_of(stated)
  local epoch, nonce = string.match(stated, '^(%d+) (%S+) %a+ %d+ %d+ %d+ [a-z_]*$')
  epoch = count(epoch)
  if not epoch or epoch > now_ms() + 366 * 86400000 then return 0, '' end
  return epoch, nonce
end
"""

_STANDING = (
    _COMMON
    + """
local function standing(meta, epoch, nonce)
  local held = redis.call('HMGET', meta, 'epoch', 'nonce', 'last_seq')
  local stored, mine, last = count(held[1]), tonumber(epoch), count(held[3])
  if not stored or stored < mine then return 'LOST', 0 end
  if stored > mine or held[2] ~= nonce then return 'FENCED', 0 end
  if not last or last > LARGEST then return 'LOST', 0 end
  return 'OK', last
end
local function replaced_left(meta, now)
  local held = redis.call('HMGET', meta, 'replaced_ms', 'replaced_until')
  return math.max(0, math.min(count(held[1]) or 0, (count(held[2]) or 0) - now, 3600000))
end
local function drop_chunks(prefix, first, stated)
  for i = first, math.min(count(stated) or 0, 4096) - 1 do redis.call('DEL', prefix .. i) end
end
local function last_id(ev)
  if redis.call('EXISTS', ev) == 0 then return '0-0' end
  local info = redis.call('XINFO', 'STREAM', ev)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then return info[i + 1] end
  end
end
local function is_after(ev, epoch, seq)
  local end_epoch, end_seq = string.match(last_id(ev), '^(%d+)%-(%d+)$')
  local first, last = count(end_epoch), count(end_seq)
  if not first or not last then return true end
  return first > tonumber(epoch) or (first == tonumber(epoch) and last > seq)
end
local function add(ev, epoch, seq, op, namespace, parent, tier, digests)
  redis.call('XADD', ev, epoch .. '-' .. whole(seq), 'e', epoch, 's', whole(seq),
             'o', op, 'n', namespace, 'p', parent, 't', tier, 'b', digests)
end
"""
)

BOOT = (
    _STANDING
    + """
local held = redis.call('HMGET', KEYS[1], 'epoch', 'nonce', 'lease_ms')
local now, old = now_ms(), count(held[1]) or 0
if old > LARGEST then old = 0 end
local epoch = math.max(old + 1, tonumber(ARGV[1]) + 1, now)
if epoch > LARGEST then epoch = now end
local left = replaced_left(KEYS[1], now)
if held[2] and redis.call('GET', KEYS[2]) == held[2] and string.sub(held[2], 1, #ARGV[4]) ~= ARGV[4] then
  left = math.max(left, math.min(redis.call('PTTL', KEYS[2]), count(held[3]) or 0, 3600000))
end
local last = count(string.match(last_id(KEYS[3]), '^(%d+)'))
if last and last < LARGEST then
  epoch = math.max(epoch, last + 1)
else
  redis.call('DEL', KEYS[3])
end
drop_chunks(ARGV[3], 0, redis.call('HGET', KEYS[4], 'count'))
redis.call('DEL', KEYS[1], KEYS[2], KEYS[4], KEYS[5])
redis.call('HSET', KEYS[1], 'epoch', whole(epoch), 'last_seq', '1')
if left > 0 then redis.call('HSET', KEYS[1], 'replaced_until', whole(now + left), 'replaced_ms', whole(left)) end
for i = 5, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('XADD', KEYS[3], 'MINID', '=', whole(epoch) .. '-0', whole(epoch) .. '-1',
           'e', whole(epoch), 's', '1', 'o', 'clear', 'n', '', 'p', '', 't', 'device', 'b', '')
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[3], ARGV[2])
return whole(epoch)
"""
)

APPEND = (
    _STANDING
    + """
local verdict, last = standing(KEYS[1], ARGV[1], ARGV[2])
if verdict ~= 'OK' then return {verdict, '0'} end
if tonumber(ARGV[3]) ~= last + 1 then return {'GAP', whole(last)} end
if is_after(KEYS[2], ARGV[1], last) then return {'LOST', '0'} end
local ops = {s = 'store', r = 'remove', c = 'clear', t = 'tier'}
local tiers = {[0] = 'device', [1] = 'host', [2] = 'disk'}
local packed, at = ARGV[4], 1
local function take(length)
  at = at + length
  return string.sub(packed, at - length, at - 1)
end
while at <= #packed do
  local op, tier, named, parented, num_digests = string.byte(packed, at, at + 4)
  at, last = at + 5, last + 1
  local namespace, parent = take(named), take(parented)
  local digests = take(16 * num_digests)
  add(KEYS[2], ARGV[1], last, ops[string.char(op)], namespace, parent, tiers[tier], digests)
end
redis.call('HSET', KEYS[1], 'last_seq', whole(last))
return {'OK', whole(last)}
"""
)

BEAT = (
    _STANDING
    + """
local verdict, last = standing(KEYS[1], ARGV[1], ARGV[2])
if verdict ~= 'OK' then return {verdict, '0', '0'} end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
local ended = 6 + tonumber(ARGV[6])
redis.call('HSET', KEYS[1], unpack(ARGV, 7, ended))
local now = now_ms()
local left = replaced_left(KEYS[1], now)
if left > 0 then
  redis.call('HSET', KEYS[1], 'replaced_ms', whole(left))
else
  redis.call('HDEL', KEYS[1], 'replaced_ms', 'replaced_until')
end
redis.call('HSET', KEYS[5], unpack(ARGV, ended + 1))
redis.call('PEXPIRE', KEYS[5], ARGV[4])
for i = 1, 4 do if i ~= 2 then redis.call('PEXPIRE', KEYS[i], ARGV[4]) end end
local saved = redis.call('HMGET', KEYS[4], 'epoch', 'seq', 'count')
for i = 0, math.min(count(saved[3]) or 0, 4096) - 1 do redis.call('PEXPIRE', ARGV[5] .. i, ARGV[4]) end
local needed = saved[1] == ARGV[1] and (count(saved[2]) or 0) + 1 or 1
if is_after(KEYS[3], ARGV[1], last) then
  last = 0
elseif needed <= last then
  local id = ARGV[1] .. '-' .. whole(needed)
  if #redis.call('XRANGE', KEYS[3], id, id) == 0 then last = 0 end
end
return {'OK', whole(last), whole(now)}
"""
)

SNAPSHOT = (
    _STANDING
    + """
local verdict, last = standing(KEYS[1], ARGV[1], ARGV[2])
if verdict ~= 'OK' then return {verdict, '0'} end
local seq, keep_from, anew = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5] == '1'
if anew then
  seq = math.max(seq, last) + 1
  keep_from = seq + 1
elseif seq ~= last then
  return {'GAP', whole(last)}
end
if anew then
  last = seq + 1
  if is_after(KEYS[2], ARGV[1], seq) then return {'LOST', '0'} end
  add(KEYS[2], ARGV[1], last, 'store', '', '', 'device', '')
  redis.call('HSET', KEYS[1], 'last_seq', whole(last))
end
local num_chunks = #ARGV - 8
drop_chunks(ARGV[8], num_chunks, redis.call('HGET', KEYS[3], 'count'))
for i = 1, num_chunks do redis.call('SET', ARGV[8] .. (i - 1), ARGV[8 + i], 'PX', ARGV[6]) end
redis.call('HSET', KEYS[3], 'epoch', ARGV[1], 'seq', whole(seq), 'count', whole(num_chunks), 'checksum', ARGV[7])
redis.call('PEXPIRE', KEYS[3], ARGV[6])
redis.call('XTRIM', KEYS[2], 'MINID', '=', ARGV[1] .. '-' .. whole(keep_from))
return {'OK', whole(last)}
"""
)

LEAVE = (
    _STANDING
    + """
local verdict = standing(KEYS[1], ARGV[1], ARGV[2])
if verdict ~= 'OK' then return {verdict, '0', '0'} end
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('HSET', KEYS[1], 'beats', '0', 'proof', ARGV[3])
local now = now_ms()
local left = replaced_left(KEYS[1], now)
return {verdict, '0', left > 0 and whole(now + left) or '0'}
"""
)

LIMIT = """
local held = redis.call('HMGET', KEYS[1], 'said', 'generation')
local stamp, proof = string.match(held[1] or '', '^(%d+):([0-9a-f]+)$')
if not stamp or #stamp > 15 or #proof ~= 64 then stamp = '0' end
if tonumber(stamp) ~= tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'said', ARGV[2])
if ARGV[4] == '' then redis.call('HDEL', KEYS[1], 'limit') else redis.call('HSET', KEYS[1], 'limit', ARGV[4]) end
if ARGV[4] == '' and not held[2] then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
else
  redis.call('PERSIST', KEYS[1])
end
return 1
"""

RESERVE = (
    _COMMON
    + """
local now, others, mine, rival = now_ms(), 0, nil, false
local held = redis.call('HMGET', KEYS[1], 'limit', 'said', 'generation')
local stamp, proof = string.match(held[2] or '', '^(%d+):([0-9a-f]+)$')
local is_said = count(stamp) and #proof == 64
local limit, said = is_said and held[1] or '', is_said and held[2] or ''
if ARGV[5] ~= '0' and (limit ~= ARGV[8] or said ~= ARGV[9]) then return {'STALE', '0', '0'} end
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local replica = string.match(all[i], '^r:(.*)$')
  if replica then
    local epoch, nonce, blocks, ends, model = string.match(all[i + 1], '^(%d+):([^:]*):(%d+):(%d+):(.*)$')
    epoch, blocks, ends = count(epoch), count(blocks), count(ends)
    local is_mine = replica == ARGV[1]
    if not (epoch and blocks and ends and ends > now and ends <= now + tonumber(ARGV[10])) then
      redis.call('HDEL', KEYS[1], all[i])
    else
      local is_rival = is_mine and epoch == tonumber(ARGV[2]) and nonce ~= ARGV[3]
      if is_mine then mine, rival = epoch, is_rival end
      if model == ARGV[4] and (is_rival or not is_mine) then others = others + blocks end
    end
  end
end
others = math.min(others, LARGEST)
if mine and mine > tonumber(ARGV[2]) then return {'FENCED', '0', whole(others)} end
if rival then return {'OK', '0', whole(others)} end
local granted = tonumber(ARGV[5])
if ARGV[8] ~= '' then granted = math.min(granted, math.max(0, tonumber(ARGV[8]) - others)) end
if granted == 0 then
  redis.call('HDEL', KEYS[1], 'r:' .. ARGV[1])
else
  local ends = whole(now + tonumber(ARGV[6]))
  local stated = {ARGV[2], ARGV[3], whole(granted), ends, ARGV[4]}
  redis.call('HSET', KEYS[1], 'r:' .. ARGV[1], table.concat(stated, ':'))
end
if ARGV[8] == '' and not held[3] then redis.call('PEXPIRE', KEYS[1], ARGV[7]) end
return {'OK', whole(granted), whole(others)}
"""
)

_RAISED = """
local function stands(key)
  local held = redis.call('HMGET', key, 'generation', 'token', 'raised')
  return (held[1] or '') .. '\\n' .. (held[2] or '') .. '\\n' .. (held[3] or '')
end
"""

RAISE = (
    _RAISED
    + """
if stands(KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'generation', ARGV[2], 'token', ARGV[3], 'raised', ARGV[4])
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  if string.sub(field, 1, 2) == 'c:' then redis.call('HDEL', KEYS[1], field) end
end
redis.call('PERSIST', KEYS[1])
return 1
"""
)

_POSITIONS = (
    _COMMON
    + """
local function last_position()
  redis.call('ZREMRANGEBYSCORE', KEYS[1], whole(now_ms() + 7 * 86400000), '+inf')
  local last = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')
  return math.floor(math.max(tonumber(last[2] or '0') or 0, 0))
end
"""
)

ANNOUNCE = (
    _POSITIONS
    + """
redis.call('ZADD', KEYS[1], whole(math.max(last_position() + 1, now_ms())), ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -tonumber(ARGV[2]) - 1)
return 1
"""
)

ANNOUNCED = (
    _POSITIONS
    + """
local after = ARGV[1]
if last_position() < tonumber(after) then after = '0' end
return redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. after, '+inf', 'WITHSCORES')
"""
)

IDENTITY = """
local held = redis.pcall('GET', KEYS[1])
if type(held) ~= 'string' or #held ~= 32 or not string.find(held, '^[0-9a-f]+$') then
  held = ARGV[1]
  redis.call('SET', KEYS[1], held)
end
return held
"""

UNANNOUNCED = """
local places = {}
for at = 1, #ARGV, 2 do
  local position = redis.call('ZSCORE', KEYS[1], ARGV[at])
  if not position or tonumber(position) < tonumber(ARGV[at + 1]) then table.insert(places, (at + 1) / 2) end
end
return places
"""

CONFIRM = (
    _RAISED
    + """
if stands(KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'c:' .. ARGV[2], ARGV[3])
return #redis.call('HKEYS', KEYS[1]) > tonumber(ARGV[4]) and 2 or 1
"""
)

TENANT = (
    _COMMON
    + """
local answer = redis.call('HGETALL', KEYS[1])
table.insert(answer, 1, whole(now_ms()))
return answer
"""
)

NOTE = """
local num_free, num_left_out = nil, 0
for at = 2, #ARGV, 2 do
  local is_new = redis.call('HEXISTS', KEYS[1], ARGV[at]) == 0
  if is_new and not num_free then num_free = tonumber(ARGV[1]) - #redis.call('HKEYS', KEYS[1]) end
  if is_new and num_free <= 0 then
    num_left_out = num_left_out + 1
  else
    redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1])
    if is_new then num_free = num_free - 1 end
  end
end
return num_left_out
"""

JOB = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
for i = 2, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
"""

LIST = (
    _COMMON
    + """
local now = now_ms()
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', whole(now))
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. whole(now + 2 * tonumber(ARGV[2])), '+inf')
redis.call('ZADD', KEYS[1], whole(now + tonumber(ARGV[2])), ARGV[1])
local excess = redis.call('ZCARD', KEYS[1]) - tonumber(ARGV[3])
local answer = {}
if excess > 0 then
  answer = redis.call('ZRANGE', KEYS[1], 0, excess - 1)
  redis.call('ZREMRANGEBYRANK', KEYS[1], 0, excess - 1)
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
table.insert(answer, 1, redis.call('ZCARD', KEYS[1]))
return answer
"""
)

OWN = """
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'owner', ARGV[1])
return 1
"""

ADD = (
    _COMMON
    + _PARTS
    + """
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then return 0 end
local old = redis.call('HGET', KEYS[1], ARGV[2])
if old then
  local epoch, nonce = part_of(old)
  if epoch > tonumber(ARGV[3]) or (epoch == tonumber(ARGV[3]) and nonce == ARGV[4]) then return 0 end
else
  local parts = 0
  for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
    if string.sub(field, 1, 5) == 'part:' then parts = parts + 1 end
  end
  if parts >= tonumber(ARGV[6]) then return 0 end
end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[5])
return 1
"""
)

PART = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""

REPAIR = """
local places = {}
for at, key in ipairs(KEYS) do
  local kind = redis.call('TYPE', key)['ok']
  if kind ~= 'none' and kind ~= ARGV[at] then
    redis.call('DEL', key)
    table.insert(places, at)
  end
end
return places
"""

_PINS = (
    _COMMON
    + """
local now = now_ms()
local function stated(id)
  local held = redis.call('HGET', KEYS[1], 'p:' .. id)
  if not held then return nil end
  local ends, state, rest = string.match(held, '^(%d+):(%a+):(.*)$')
  ends = count(ends)
  if not ends or ends <= now or ends > now + 367 * 86400000 then return nil end
  if state ~= 'live' and state ~= 'ended' then return nil end
  return ends, state, rest
end
local function state_until(id, ends, state, rest)
  redis.call('HSET', KEYS[1], 'p:' .. id, whole(ends) .. ':' .. state .. ':' .. rest)
  if redis.call('PTTL', KEYS[1]) < ends - now then redis.call('PEXPIRE', KEYS[1], whole(ends - now)) end
end
local function forget_parts(holds)
  for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
    local id = string.match(field, '^s:([^:]*):')
    if id and not holds(id) then redis.call('HDEL', KEYS[1], field) end
  end
end
"""
)

KEEP = (
    _PINS
    + """
local kept, live, ended, max = {}, 0, {}, tonumber(ARGV[4])
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  local id = string.match(field, '^p:(.*)$')
  if id then
    local ends, state = stated(id)
    if not ends then
      redis.call('HDEL', KEYS[1], field)
    else
      kept[id] = true
      if id ~= ARGV[1] and state == 'live' then live = live + 1 end
      if id ~= ARGV[1] and state == 'ended' then table.insert(ended, {ends, id}) end
    end
  end
end
table.sort(ended, function(a, b) return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2]) end)
for i = 1, #ended - max do
  redis.call('HDEL', KEYS[1], 'p:' .. ended[i][2])
  kept[ended[i][2]] = nil
end
forget_parts(function(id) return kept[id] end)
local _, state = stated(ARGV[1])
if state and ARGV[5] == '0' then return 1 end
if state ~= 'live' and live >= tonumber(ARGV[6]) then return 0 end
state_until(ARGV[1], now + tonumber(ARGV[2]), 'live', ARGV[3])
return 1
"""
)

UNPIN = (
    _PINS
    + """
local ends, state, rest = stated(ARGV[1])
if state == 'ended' then return 0 end
state_until(ARGV[1], ends or (now + tonumber(ARGV[2])), 'ended', rest or ARGV[3])
forget_parts(function(id) return id ~= ARGV[1] end)
return 1
"""
)

STATE = (
    _PINS
    + _PARTS
    + """
local _, state = stated(ARGV[1])
if state ~= 'live' then return 0 end
local field, prefix = 's:' .. ARGV[1] .. ':' .. ARGV[2], 's:' .. ARGV[1] .. ':'
local old = redis.call('HGET', KEYS[1], field)
if old then
  if part_of(old) > tonumber(ARGV[3]) then return 0 end
else
  local parts = 0
  for _, each in ipairs(redis.call('HKEYS', KEYS[1])) do
    if string.sub(each, 1, #prefix) == prefix then parts = parts + 1 end
  end
  if parts >= tonumber(ARGV[5]) then return 0 end
end
redis.call('HSET', KEYS[1], field, ARGV[4])
return 1
"""
)
