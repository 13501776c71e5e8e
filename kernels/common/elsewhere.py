"""The column of a target that is none of those at hand, for rows that count: a vocabulary in parts has it elsewhere."""

ELSEWHERE = 1 << 30
