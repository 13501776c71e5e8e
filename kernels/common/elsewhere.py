"""Numbers that stand for no id."""

# the column of a target that is none of those at hand, for rows that count: a vocabulary in parts has it elsewhere
ELSEWHERE = 1 << 30
BEHIND = -2  # behind the last of the ids that tokens keep
