"""The Lua scripts of the Redis membership. Redis runs each of them as one atomic step.

Keys: KEYS[1] hash, learner id -> "term.number"; KEYS[2] sorted set, learner id by the time of its
last heartbeat in microseconds of Redis' own clock; KEYS[3] the term, which the lease writes;
KEYS[4] K; KEYS[5] the mark of a seeded run.

A script that writes takes the writer's term as ARGV[1] and returns {1, result}, or {0, term of the
keeper} where that one is higher; nothing is written then. An error whose text holds ``MALFORMED``
means that a value is not ours.
"""

from __future__ import annotations

from typing import Final

TERM: Final = """
local function to_term(text)
  local term = string.match(text, '^[1-9]%d*$') and tonumber(text)
  if not term or term > 2^50 then error('MALFORMED term') end
  return term
end
"""
"""A function that reads a term."""

_FENCE: Final = (
    TERM
    + """
local ours = redis.call('GET', KEYS[3])
if ours and to_term(ours) > tonumber(ARGV[1]) then return {0, ours} end
"""
)

_COMMON: Final = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local function known(learner_id)
  local text = redis.call('HGET', KEYS[1], learner_id)
  if not text then return nil end
  local term, number = string.match(text, '^(%d+)%.(%d+)$')
  term, number = tonumber(term), tonumber(number)
  if not term or term >= 2^53 or number >= 2^53 then error('MALFORMED incarnation') end
  return term, number
end
local function mark(learner_id, term, number)
  local text = string.format('%.0f.%.0f', term, number)
  redis.call('HSET', KEYS[1], learner_id, text)
  redis.call('ZADD', KEYS[2], string.format('%.0f', now), learner_id)
  return text
end
local function members(latest)
  local found = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', latest, 'WITHSCORES')
  local result = {}
  for i = 1, #found, 2 do
    local age = now - tonumber(found[i + 1])
    if not known(found[i]) or age >= 2^53 then error('MALFORMED heartbeat') end
    result[#result + 1] = found[i]
    result[#result + 1] = redis.call('HGET', KEYS[1], found[i])
    result[#result + 1] = string.format('%.0f', math.max(0, age))
  end
  return result
end
"""

GRANT: Final = (
    _FENCE
    + _COMMON
    + """
local term, number = known(ARGV[2])
local new_term, new_number = tonumber(ARGV[1]), tonumber(ARGV[3])
if term and (term > new_term or number > new_number
    or (number == new_number and term < new_term)) then
  return {1, string.format('%.0f.%.0f', term, number)}
end
return {1, mark(ARGV[2], new_term, new_number)}
"""
)
"""ARGV: term, learner id, number. Result: that incarnation, or the known one that is in its way."""

HEARTBEAT: Final = (
    _FENCE
    + _COMMON
    + """
local at = string.format('%.0f', now)
for i = 2, #ARGV, 3 do
  if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[i + 1] .. '.' .. ARGV[i + 2] then
    redis.call('ZADD', KEYS[2], at, ARGV[i])
  else
    local new_term, new_number = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
    local term, number = known(ARGV[i])
    if not term or new_term > term or (new_term == term and new_number > number) then
      mark(ARGV[i], new_term, new_number)
    end
  end
end
return {1, 0}
"""
)
"""ARGV: term; learner id, term, number, and so on."""

MEMBERS: Final = _COMMON + "return members('+inf')"
"""Returns id, incarnation, age in microseconds, and so on; the longest unheard first."""

READ_BACK: Final = (
    _COMMON
    + """
return {redis.call('GET', KEYS[4]), redis.call('GET', KEYS[5]), members('+inf')}
"""
)
"""Returns K, the mark of a seeded run, and what ``MEMBERS`` returns."""

EXPIRE: Final = (
    _FENCE
    + _COMMON
    + """
local silent = members(string.format('(%.0f', now - tonumber(ARGV[2])))
for i = 1, #silent, 3 do redis.call('ZREM', KEYS[2], silent[i]) end
return {1, silent}
"""
)
"""ARGV: term, least age in microseconds, exclusive. Result: as ``MEMBERS``."""

REMOVE: Final = (
    _FENCE
    + """
if redis.call('HGET', KEYS[1], ARGV[2]) ~= ARGV[3] then return {1, 0} end
return {1, redis.call('ZREM', KEYS[2], ARGV[2])}
"""
)
"""ARGV: term, learner id, incarnation. Result: 1 where a member was removed."""

SET_QUORUM: Final = (
    _FENCE
    + """
redis.call('SET', KEYS[4], ARGV[2])
return {1, 0}
"""
)
"""ARGV: term, K."""

MARK_SEEDED: Final = (
    _FENCE
    + """
return {1, redis.call('SETNX', KEYS[5], ARGV[1])}
"""
)
"""ARGV: term. Result: 1 for the first alone."""
