"""The Lua scripts of the Redis membership. Redis runs each of them as one atomic step.

Keys: KEYS[1] hash, learner id -> "term.number"; KEYS[2] sorted set, learner id by the time of its
last heartbeat in microseconds of Redis' own clock. An error whose text holds ``MALFORMED`` means
that a value is not ours.
"""

from __future__ import annotations

from typing import Final

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
"""

GRANT: Final = (
    _COMMON
    + """
local term, number = known(ARGV[1])
if term and term > tonumber(ARGV[2]) then
  return {0, string.format('%.0f.%.0f', term, number)}
end
local granted = 1 + math.max(number or 0, tonumber(ARGV[3]))
return {1, mark(ARGV[1], tonumber(ARGV[2]), granted)}
"""
)
"""ARGV: learner id, term, at_least. Returns {1, granted} or {0, the later one that is known}."""

HEARTBEAT: Final = (
    _COMMON
    + """
local at = string.format('%.0f', now)
for i = 1, #ARGV, 3 do
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
return 0
"""
)
"""ARGV: learner id, term, number, and so on."""

MEMBERS: Final = (
    _COMMON
    + """
local latest = '+inf'
if ARGV[1] ~= '' then latest = string.format('(%.0f', now - tonumber(ARGV[1])) end
local found = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', latest, 'WITHSCORES')
local result = {}
for i = 1, #found, 2 do
  result[#result + 1] = found[i]
  result[#result + 1] = redis.call('HGET', KEYS[1], found[i]) or ''
  result[#result + 1] = string.format('%.0f', math.max(0, now - tonumber(found[i + 1])))
end
return result
"""
)
"""ARGV: least age in microseconds, exclusive, or empty for all. Returns id, incarnation, age."""

REMOVE: Final = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
return redis.call('ZREM', KEYS[2], ARGV[1])
"""
"""ARGV: learner id, incarnation."""
