"""The scripts that run inside Redis: each compares the writer with the registration, then writes, at once.

All keys of a script carry one hash tag, so they live on one shard. Entries stand in the stream at the id
``epoch-seq``: ids grow with every boot, a cursor is a position in the log, and a trim is exact. Numbers that
pass 2^31 are formatted by ``%.0f``, since Lua would print them with an exponent.

    boot      KEYS meta lease ev snapmeta load    ARGV epoch-before retention-ms snap-prefix process
              field value … -> epoch. Fences the last registration, drops its lease and snapshot, begins the log
              anew; notes until when another process that had the id may think that its lease runs.
    append    KEYS meta ev                        ARGV epoch nonce first-seq entries (see wire.pack_entries)
    beat      KEYS meta lease ev snapmeta load    ARGV epoch nonce lease-ms retention-ms proof snap-prefix
              number (field value) … of the load -> also Redis's time in ms; 0 for last_seq if the log
              doesn't follow the snapshot
    snapshot  KEYS meta ev snapmeta               ARGV epoch nonce seq keep-from anew retention-ms checksum
              snap-prefix chunk … anew=1: the snapshot takes the place of all that was written. It stands at
              a number that nobody has read, and an empty entry behind it lets every reader see the gap.
    leave     KEYS meta lease load                ARGV epoch nonce -> also until when that is, in ms; 0: nobody

    limit     KEYS q                              ARGV stamp-expected stamp-and-proof retention-ms blocks, or empty
              for none -> 1 if it was the one expected
    reserve   KEYS q                              ARGV replica epoch nonce fingerprint blocks keep-ms retention-ms
              -> {verdict, granted, others, limit or empty, generation}
    raise     KEYS q                              ARGV above token -> {generation, token}
    confirm   KEYS q                              ARGV replica nonce generation token max -> 1 if that is the last one;
              2 if more than max fields stand there now
    tenant    KEYS q                              -> {now-ms, field value …}
    announce  KEYS purges                         ARGV tenant max: at the position behind the last one, in ms at
              least: were one given again that a store has lost, whoever stands there would miss it
    announced KEYS purges                         ARGV after -> {tenant, position …}
    unannounced KEYS purges                       ARGV (tenant position) … -> the places, from 1, of those that
              aren't there, or only before that position

    job       KEYS job                            ARGV ttl-ms field value … -> 1 if it is new
    list      KEYS jobs                           ARGV job ttl-ms max -> {how many, job that is too many …}
    own       KEYS job                            ARGV owner expected -> 1 if replaced
    add       KEYS job                            ARGV owner field epoch nonce value max-parts -> 1 if added
    part      KEYS job                            ARGV field value -> 1 if replaced

    keep      KEYS pins                           ARGV pin ttl-ms stated max anew most -> 1 unless there are too many
    unpin     KEYS pins                           ARGV pin keep-ms stated -> 1 unless it was ended before
    state     KEYS pins                           ARGV pin replica epoch value max-parts -> 1 if set

The first five but ``boot`` answer ``{verdict, last_seq, …}``, the verdict being OK, GAP, LOST or FENCED.
"""

from __future__ import annotations

_COMMON = """
local function whole(number) return string.format('%.0f', number) end
local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
"""

_STANDING = (
    _COMMON
    + """
local function standing(meta, epoch, nonce)
  local held = redis.call('HMGET', meta, 'epoch', 'nonce', 'last_seq')
  local stored, mine = tonumber(held[1] or ''), tonumber(epoch)
  if not stored or stored < mine then return 'LOST', 0 end
  if stored > mine or held[2] ~= nonce then return 'FENCED', 0 end
  return 'OK', tonumber(held[3] or '0')
end
local function replaced_left(meta, now)
  local held = redis.call('HMGET', meta, 'replaced_ms', 'replaced_until')
  return math.max(0, math.min(tonumber(held[1] or '') or 0, (tonumber(held[2] or '') or 0) - now))
end
local function drop_chunks(prefix, first, count)
  for i = first, math.min(tonumber(count or '0') or 0, 4096) - 1 do redis.call('DEL', prefix .. i) end
end
"""
)

BOOT = (
    _STANDING
    + """
local held = redis.call('HMGET', KEYS[1], 'epoch', 'nonce', 'lease_ms')
local now, old = now_ms(), tonumber(held[1] or '') or 0
local epoch = math.max(old + 1, tonumber(ARGV[1]) + 1, now)
local left = replaced_left(KEYS[1], now)
if held[2] and redis.call('GET', KEYS[2]) == held[2] and string.sub(held[2], 1, #ARGV[4]) ~= ARGV[4] then
  left = math.max(left, math.min(redis.call('PTTL', KEYS[2]), tonumber(held[3] or '') or 0))
end
if redis.call('EXISTS', KEYS[3]) == 1 then
  local info = redis.call('XINFO', 'STREAM', KEYS[3])
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then
      epoch = math.max(epoch, tonumber(string.match(info[i + 1], '^(%d+)')) + 1)
    end
  end
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
local ops = {s = 'store', r = 'remove', c = 'clear', t = 'tier'}
local tiers = {[0] = 'device', [1] = 'host', [2] = 'disk'}
local packed, at = ARGV[4], 1
local function take(length)
  at = at + length
  return string.sub(packed, at - length, at - 1)
end
while at <= #packed do
  local op, tier, named, parented, count = string.byte(packed, at, at + 4)
  at, last = at + 5, last + 1
  local namespace, parent = take(named), take(parented)
  redis.call('XADD', KEYS[2], ARGV[1] .. '-' .. whole(last), 'e', ARGV[1], 's', whole(last),
             'o', ops[string.char(op)], 'n', namespace, 'p', parent, 't', tiers[tier], 'b', take(16 * count))
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
redis.call('HSET', KEYS[1], 'proof', ARGV[5], 'lease_ms', ARGV[3], 'beats', ARGV[7])
local now = now_ms()
local left = replaced_left(KEYS[1], now)
if left > 0 then
  redis.call('HSET', KEYS[1], 'replaced_ms', whole(left))
else
  redis.call('HDEL', KEYS[1], 'replaced_ms', 'replaced_until')
end
for i = 8, #ARGV, 2 do redis.call('HSET', KEYS[5], ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', KEYS[5], ARGV[4])
for i = 1, 4 do if i ~= 2 then redis.call('PEXPIRE', KEYS[i], ARGV[4]) end end
for i = 0, math.min(tonumber(redis.call('HGET', KEYS[4], 'count') or '0') or 0, 4096) - 1 do
  redis.call('PEXPIRE', ARGV[6] .. i, ARGV[4])
end
local saved = redis.call('HMGET', KEYS[4], 'epoch', 'seq')
local needed = saved[1] == ARGV[1] and tonumber(saved[2]) + 1 or 1
if needed <= last then
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
local count = #ARGV - 8
drop_chunks(ARGV[8], count, redis.call('HGET', KEYS[3], 'count'))
for i = 1, count do redis.call('SET', ARGV[8] .. (i - 1), ARGV[8 + i], 'PX', ARGV[6]) end
redis.call('HSET', KEYS[3], 'epoch', ARGV[1], 'seq', whole(seq), 'count', whole(count), 'checksum', ARGV[7])
redis.call('PEXPIRE', KEYS[3], ARGV[6])
if anew then
  last = seq + 1
  redis.call('XADD', KEYS[2], ARGV[1] .. '-' .. whole(last), 'e', ARGV[1], 's', whole(last),
             'o', 'store', 'n', '', 'p', '', 't', 'device', 'b', '')
  redis.call('HSET', KEYS[1], 'last_seq', whole(last))
end
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
redis.call('HSET', KEYS[1], 'beats', '0')
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
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local replica = string.match(all[i], '^r:(.*)$')
  if replica then
    local epoch, nonce, blocks, ends, model = string.match(all[i + 1], '^(%d+):([^:]*):(%d+):(%d+):(.*)$')
    if not epoch or tonumber(ends) <= now then
      redis.call('HDEL', KEYS[1], all[i])
    else
      local is_mine = replica == ARGV[1]
      if is_mine then
        mine = tonumber(epoch)
        rival = mine == tonumber(ARGV[2]) and nonce ~= ARGV[3]
      end
      if model == ARGV[4] and (rival or not is_mine) then others = others + tonumber(blocks) end
    end
  end
end
local held = redis.call('HMGET', KEYS[1], 'limit', 'generation')
local limit, generation = held[1] or '', held[2] or '0'
if mine and mine > tonumber(ARGV[2]) then return {'FENCED', '0', whole(others), limit, generation} end
if rival then return {'OK', '0', whole(others), limit, generation} end
local granted = tonumber(ARGV[5])
if limit ~= '' then granted = math.min(granted, math.max(0, tonumber(limit) - others)) end
if granted == 0 then
  redis.call('HDEL', KEYS[1], 'r:' .. ARGV[1])
else
  local ends = whole(now + tonumber(ARGV[6]))
  local stated = {ARGV[2], ARGV[3], whole(granted), ends, ARGV[4]}
  redis.call('HSET', KEYS[1], 'r:' .. ARGV[1], table.concat(stated, ':'))
end
if limit == '' and not held[2] then redis.call('PEXPIRE', KEYS[1], ARGV[7]) end
return {'OK', whole(granted), whole(others), limit, generation}
"""
)

RAISE = (
    _COMMON
    + """
local generation = tonumber(redis.call('HGET', KEYS[1], 'generation') or '0') or 0
if generation <= tonumber(ARGV[1]) then
  generation = tonumber(ARGV[1]) + 1
  redis.call('HSET', KEYS[1], 'generation', whole(generation), 'token', ARGV[2])
  for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
    if string.sub(field, 1, 2) == 'c:' then redis.call('HDEL', KEYS[1], field) end
  end
end
redis.call('PERSIST', KEYS[1])
return {whole(generation), redis.call('HGET', KEYS[1], 'token') or ''}
"""
)

ANNOUNCE = (
    _COMMON
    + """
local last = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')
redis.call('ZADD', KEYS[1], whole(math.max((tonumber(last[2] or '0') or 0) + 1, now_ms())), ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -tonumber(ARGV[2]) - 1)
return 1
"""
)

ANNOUNCED = """
local last, after = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES'), ARGV[1]
if (tonumber(last[2] or '0') or 0) < tonumber(after) then after = '0' end
return redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. after, '+inf', 'WITHSCORES')
"""

UNANNOUNCED = """
local places = {}
for at = 1, #ARGV, 2 do
  local position = redis.call('ZSCORE', KEYS[1], ARGV[at])
  if not position or tonumber(position) < tonumber(ARGV[at + 1]) then table.insert(places, (at + 1) / 2) end
end
return places
"""

CONFIRM = """
local held = redis.call('HMGET', KEYS[1], 'generation', 'token')
if held[1] ~= ARGV[3] or held[2] ~= ARGV[4] then return 0 end
redis.call('HSET', KEYS[1], 'c:' .. ARGV[1], ARGV[2])
return #redis.call('HKEYS', KEYS[1]) > tonumber(ARGV[5]) and 2 or 1
"""

TENANT = (
    _COMMON
    + """
local answer = redis.call('HGETALL', KEYS[1])
table.insert(answer, 1, whole(now_ms()))
return answer
"""
)

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

ADD = """
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then return 0 end
local old = redis.call('HGET', KEYS[1], ARGV[2])
if old then
  local epoch, nonce = string.match(old, '^(%d+) (%S*)')
  epoch = tonumber(epoch) or 0
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

PART = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""

_PINS = (
    _COMMON
    + """
local now = now_ms()
local function stated(id)
  local held = redis.call('HGET', KEYS[1], 'p:' .. id)
  if not held then return nil end
  local ends, state, rest = string.match(held, '^(%d+):(%a+):(.*)$')
  if not ends or tonumber(ends) <= now then return nil end
  return tonumber(ends), state, rest
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
    + """
local _, state = stated(ARGV[1])
if state ~= 'live' then return 0 end
local field, prefix = 's:' .. ARGV[1] .. ':' .. ARGV[2], 's:' .. ARGV[1] .. ':'
local old = redis.call('HGET', KEYS[1], field)
if old then
  if (tonumber(string.match(old, '^(%d+)')) or 0) > tonumber(ARGV[3]) then return 0 end
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
