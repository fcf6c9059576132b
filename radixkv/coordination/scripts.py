"""The scripts that run inside Redis: each compares the writer with the registration, then writes, at once.

All keys of a script carry one hash tag, so they live on one shard. Entries stand in the stream at the id
``epoch-seq``: ids grow with every boot, a cursor is a position in the log, and a trim is exact. Numbers that
pass 2^31 are formatted by ``%.0f``, since Lua would print them with an exponent.

    boot      KEYS meta lease ev snapmeta load    ARGV epoch-before retention-ms snap-prefix field value …
              -> epoch. Fences the last registration, drops its lease and snapshot, begins the log anew.
    append    KEYS meta ev                        ARGV epoch nonce first-seq (op ns parent tier digests) …
    beat      KEYS meta lease ev snapmeta load    ARGV epoch nonce lease-ms retention-ms proof snap-prefix
              (field value) … of the load -> also Redis's time in ms
    snapshot  KEYS meta ev snapmeta               ARGV epoch nonce seq keep-from anew retention-ms checksum
              snap-prefix chunk … anew=1: the snapshot takes the place of all that was written. It stands at
              a number that nobody has read, and an empty entry behind it lets every reader see the gap.
    leave     KEYS meta lease load                ARGV epoch nonce
    part      KEYS job                            ARGV field value -> 1 if replaced

All but ``boot`` and ``part`` answer ``{verdict, last_seq, …}``, the verdict being OK, GAP, LOST or FENCED.
"""

from __future__ import annotations

_STANDING = """
local function standing(meta, epoch, nonce)
  local held = redis.call('HMGET', meta, 'epoch', 'nonce', 'last_seq')
  local stored, mine = tonumber(held[1] or ''), tonumber(epoch)
  if not stored or stored < mine then return 'LOST', 0 end
  if stored > mine or held[2] ~= nonce then return 'FENCED', 0 end
  return 'OK', tonumber(held[3] or '0')
end
local function whole(number) return string.format('%.0f', number) end
local function drop_chunks(prefix, first, count)
  for i = first, math.min(tonumber(count or '0') or 0, 4096) - 1 do redis.call('DEL', prefix .. i) end
end
"""

BOOT = (
    _STANDING
    + """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local old = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0') or 0
local epoch = math.max(old + 1, tonumber(ARGV[1]) + 1, now)
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
for i = 4, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('XADD', KEYS[3], 'MINID', '=', whole(epoch) .. '-0', whole(epoch) .. '-1',
           'e', whole(epoch), 's', '1', 'o', 'clear', 'n', '', 'p', '', 't', '', 'b', '')
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
for i = 4, #ARGV, 5 do
  last = last + 1
  redis.call('XADD', KEYS[2], ARGV[1] .. '-' .. whole(last), 'e', ARGV[1], 's', whole(last),
             'o', ARGV[i], 'n', ARGV[i + 1], 'p', ARGV[i + 2], 't', ARGV[i + 3], 'b', ARGV[i + 4])
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
redis.call('HSET', KEYS[1], 'proof', ARGV[5])
for i = 7, #ARGV, 2 do redis.call('HSET', KEYS[5], ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', KEYS[5], ARGV[4])
for i = 1, 4 do if i ~= 2 then redis.call('PEXPIRE', KEYS[i], ARGV[4]) end end
for i = 0, math.min(tonumber(redis.call('HGET', KEYS[4], 'count') or '0') or 0, 4096) - 1 do
  redis.call('PEXPIRE', ARGV[6] .. i, ARGV[4])
end
local time = redis.call('TIME')
return {'OK', whole(last), whole(tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))}
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
             'o', 'store', 'n', '', 'p', '', 't', '', 'b', '')
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
if verdict == 'OK' then redis.call('DEL', KEYS[2], KEYS[3]) end
return {verdict, '0'}
"""
)

PART = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""
