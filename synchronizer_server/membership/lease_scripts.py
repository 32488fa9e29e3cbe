"""The Lua scripts of the lease in Redis. Redis runs each of them as one atomic step.

Keys: KEYS[1] hash with an expiry, the claim that holds the lease and its address; KEYS[2] the
highest term; KEYS[3] JSON list of the standbys in sync; KEYS[4] number of the write that set it in
this term. The last three never expire: where there is neither term, nor list, nor a holder, Redis
knows nothing of the run; nor does it where a leader left ``forgotten`` in the place of the list.

The first arguments are always a claim: ARGV[1] run id, ARGV[2] term, ARGV[3] leader id, ARGV[4]
signature (hex), ARGV[5] address, ARGV[6] milliseconds of the lease. What is not ours stops a
script with ``MALFORMED`` before it writes anything.
"""

from __future__ import annotations

from typing import Final

from synchronizer_server.membership.scripts import TERM

FORGOTTEN: Final = "forgotten"
"""In the place of the list where a leader had everything forgotten."""

_STATE: Final = (
    TERM
    + f"local FORGOTTEN = '{FORGOTTEN}'"
    + """
local fields = {'run_id', 'term', 'leader_id', 'signature', 'address'}
local function holder()
  local left = redis.call('PTTL', KEYS[1])
  if left == -2 then return nil end
  local found = redis.call('HMGET', KEYS[1], unpack(fields))
  for i = 1, #fields do
    if not found[i] then error('MALFORMED lease') end
  end
  if left < 0 then error('MALFORMED lease without expiry') end
  to_term(found[2])
  found[6] = left
  return found
end
local function sync()
  local text = redis.call('GET', KEYS[3])
  if not text or text == FORGOTTEN then return nil end
  local read, ids = pcall(cjson.decode, text)
  if not read or string.sub(text, 1, 1) ~= '[' then error('MALFORMED in_sync') end
  for _, id in ipairs(ids) do
    if type(id) ~= 'string' then error('MALFORMED in_sync') end
  end
  return ids
end
local held, in_sync, term = holder(), sync(), redis.call('GET', KEYS[2])
local knows = held or in_sync or (term and redis.call('GET', KEYS[3]) ~= FORGOTTEN)
term = term and to_term(term) or 0
local function view()
  return {holder() or false, redis.call('GET', KEYS[2]), redis.call('GET', KEYS[3])}
end
"""
)

_CLAIM: Final = (
    _STATE
    + """
local claimed = tonumber(ARGV[2])
local mine = held ~= nil
for i = 1, 4 do mine = mine and held[i] == ARGV[i] end
local function take()
  redis.call('DEL', KEYS[1])
  for i = 1, #fields do redis.call('HSET', KEYS[1], fields[i], ARGV[i]) end
  redis.call('PEXPIRE', KEYS[1], ARGV[6])
end
local function write(ids, revision)
  redis.call('SET', KEYS[2], ARGV[2])
  redis.call('SET', KEYS[3], ids)
  redis.call('SET', KEYS[4], revision)
end
"""
)

READ: Final = _STATE + "return view()"
"""Returns {holder's fields and milliseconds left, or nil; term or nil; in_sync or nil}."""

ACQUIRE: Final = (
    _CLAIM
    + """
local may = not knows
for _, id in ipairs(in_sync or {}) do may = may or id == ARGV[7] end
if mine and term <= claimed then
  take()
elseif not held and term < claimed and may then
  take()
  write(in_sync and redis.call('GET', KEYS[3]) or cjson.encode({ARGV[7]}), 0)
end
return view()
"""
)
"""ARGV: claim, standby id. Returns as ``READ``."""

RENEW: Final = (
    _CLAIM
    + """
if (mine or not held) and term <= claimed then
  take()
  if term < claimed or not in_sync then write(ARGV[7], ARGV[8]) end
end
return view()
"""
)
"""ARGV: claim, JSON list of the standbys in sync, revision. Returns as ``READ``."""

SET_IN_SYNC: Final = (
    _CLAIM
    + """
if held and not mine then return 0 end
if (knows and term ~= claimed) or term > claimed then return 0 end
local revision = redis.call('GET', KEYS[4]) or '0'
revision = string.match(revision, '^%d+$') and tonumber(revision)
if not revision or revision >= 2^53 then error('MALFORMED in_sync_revision') end
if revision > tonumber(ARGV[8]) then return 0 end
write(ARGV[7], ARGV[8])
return 1
"""
)
"""ARGV: claim, JSON list of the standbys in sync, revision. Returns 1 where it was written."""

RELEASE: Final = (
    _CLAIM
    + """
if mine then redis.call('DEL', KEYS[1]) end
local last = not held and knows and term == claimed
if (mine or last) and ARGV[7] == 'forget' then
  redis.call('SET', KEYS[2], string.format('%.0f', claimed + 1))
  redis.call('SET', KEYS[3], FORGOTTEN)
  redis.call('DEL', KEYS[4])
end
return 0
"""
)
"""ARGV: claim, ``forget`` where nothing is to be left but a term that is above the claim's."""
