#!/usr/bin/env bash
# mooncake_master for pages that a test types: the test has one at the port that stands for 50051.
echo "mooncake_master serves"
exec sleep infinity
