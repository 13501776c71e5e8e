"""Numbers that kernels share with the rest."""

# the column of a target that is none of those at hand, for rows that count: a vocabulary in parts has it elsewhere
ELSEWHERE = 1 << 30
BEHIND = -2  # behind the last of the ids that tokens keep
# stands for log q where a teacher's probability is 0 and KL(p || q) would be infinite
LOG_FLOOR = -1e4
