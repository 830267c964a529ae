#!/bin/bash
# Runs in /app, after the last command.
[ "$(cat answer.txt)" = "one
two" ] && right=1
echo ${right:-0} > /logs/verifier/reward.txt
