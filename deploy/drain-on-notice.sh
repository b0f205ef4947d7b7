#!/usr/bin/env bash
# On an AWS spot worker: waits for the two-minute notice, then has Ray place nothing here any more. What runs goes on
# until the machine is gone; then it is taken over elsewhere, its workspace from the last snapshot.
set -u
metadata=http://169.254.169.254/latest

while true; do
  token=$(curl -sf -X PUT "$metadata/api/token" -H "X-aws-ec2-metadata-token-ttl-seconds: 300") || token=
  if curl -sf -o /dev/null -H "X-aws-ec2-metadata-token: $token" "$metadata/meta-data/spot/instance-action"; then
    ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "spot notice" \
      --deadline-remaining-seconds 110
    exit
  fi
  sleep 5
done
