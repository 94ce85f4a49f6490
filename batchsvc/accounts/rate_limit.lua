-- Counts one request in every bucket, or in none if one of them is full: the arithmetic of accounts/limits.py.
--
-- KEYS[i]   batchsvc:rate:<name>   string   the moment, in microseconds since the epoch, at which bucket i is full again
-- ARGV[2i-1], ARGV[2i]             microseconds for one request, and for all that bucket i holds
-- Answer: 1 or 0 (counted or refused), then for each bucket the microseconds until it is full again.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local debts = {}
local allowed = 1
for i, key in ipairs(KEYS) do
  local full = tonumber(redis.call('GET', key) or '0')
  debts[i] = math.max(0, full - now)
  if debts[i] + tonumber(ARGV[2 * i - 1]) > tonumber(ARGV[2 * i]) then
    allowed = 0
  end
end
if allowed == 1 then
  for i, key in ipairs(KEYS) do
    debts[i] = debts[i] + tonumber(ARGV[2 * i - 1])
    redis.call('SET', key, string.format('%.0f', now + debts[i]), 'PX', math.ceil(debts[i] / 1000))
  end
end
table.insert(debts, 1, allowed)
return debts
